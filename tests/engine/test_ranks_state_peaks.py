"""The memory peaks of saving and resuming equal their forecasts, also during training."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nets import DeepResidual
from support.parity import adamw
from support.ranks import run_ranks

from bigtrain.checkpoint import layout, manifest, read, write
from bigtrain.checkpoint.save import CheckpointWriting
from bigtrain.data import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.memory.added_bytes import StatePeak
from bigtrain.ranks.context import RunContext

PIECE_BYTES = 1 << 16
"""Small pieces, so that the model's files consist of several."""


def small_pieces() -> threading.Event:
    """Make pieces of files small, and let saves finish only when the event is set."""
    for module in (layout, write, read, manifest):
        module.PIECE_BYTES = PIECE_BYTES
    gate, plain = threading.Event(), CheckpointWriting.finish

    def finish(self: CheckpointWriting, context: RunContext) -> Path:
        assert gate.wait(30.0)
        return plain(self, context)

    CheckpointWriting.finish = finish
    return gate


Pair = tuple[StatePeak, StatePeak]


def save_and_resume(
    context: RunContext, folder: Path, strategy: str, keys: dict[str, Any]
) -> dict[str, Pair]:
    """Save, resume, and save again during a step; return the predicted and measured peaks."""
    gate = small_pieces()
    peaks: dict[str, Pair] = {}
    for name, asynchronous in (("save", False), ("beside", True)):
        job_keys = {"train.global_batch_size": 8, "checkpoint.asynchronous": asynchronous, **keys}
        job = job_from_keys(strategy, job_keys)
        rows = job.train.micro_batch_size or 8 // context.dp_size
        tokens = torch.arange(8 // context.dp_size * 6).view(-1, 6) % 13
        loss = CrossEntropy()
        first = tokens[:rows]
        example = MicroBatch(first, first, loss.count(first), rows)
        with Engine(DeepResidual, loss, adamw, job, context, example=example) as engine:
            predicted = engine.prediction.state
            if asynchronous:
                engine.load(folder / "step-3")
                gate.clear()
            else:
                gate.set()
            for _ in range(3):
                engine.step((tokens.clone(), tokens.clone()))
            engine.save(folder)
            if asynchronous:
                engine.step((tokens.clone(), tokens.clone()))
                gate.set()
            engine.saver.wait()
            found_all = engine.meter.measured()
            measured, step = found_all.state, found_all.peak
        if not asynchronous:
            peaks[name] = predicted.save, measured.save
            continue
        # During a step, only the addition to the step's peak counts; that peak has a test of its
        # own.
        more = predicted.save.bytes - engine.prediction.peak.bytes + step.bytes
        peaks[name] = replace(predicted.save, bytes=more), measured.save
        peaks["resume"] = predicted.resume, measured.resume
    return peaks


SMALL = {"train.micro_batch_size": 2}
CASES: dict[str, tuple[Any, ...]] = {
    "single": (1, 1, "single", {}),
    "ddp, bounded": (2, 1, "ddp", {"checkpoint.snapshot_bytes": 200_000}),
    "fsdp": (2, 1, "fsdp", {}),
    "zero1_torch, bf16": (2, 1, "zero1_torch", {"train.precision": "bf16"}),
    "zero3": (2, 1, "zero3", {}),
    "1f1b": (2, 2, "1f1b", SMALL),
    "offload_disk": (1, 1, "offload_disk", {}),
    "tensor": (3, 1, "tensor", {"mesh.tp": 3}),
    "fsdp+tensor": (4, 1, "fsdp+tensor", {"mesh.tp": 2}),
    "1f1b+tensor": (4, 2, "1f1b+tensor", {**SMALL, "mesh.tp": 2}),
}
MORE: dict[str, tuple[Any, ...]] = {
    "zero2": (2, 1, "zero2", {}),
    "1f1b_fsdp": (4, 2, "1f1b_fsdp", SMALL),
    "ddp+tensor": (4, 1, "ddp+tensor", {"mesh.tp": 2}),
    "zero1_torch+tensor": (4, 1, "zero1_torch+tensor", {"mesh.tp": 2, "train.precision": "bf16"}),
    "tensor on disk": (2, 1, "tensor+offload_optimizer_disk", {"mesh.tp": 2}),
}


@pytest.mark.parametrize("case", [*CASES, *MORE])
def test_a_save_and_a_resume_hold_what_was_forecast(tmp_path: Path, case: str) -> None:
    ranks, pp, strategy, keys = {**CASES, **MORE}[case]
    if strategy.endswith("_disk"):
        keys = {**keys, "strategy.offload.path": str(tmp_path)}
    tp = keys.get("mesh.tp", 1)
    for rows in run_ranks(save_and_resume, ranks, tmp_path, strategy, keys, pp=pp, tp=tp):
        for name, (predicted, measured) in rows.items():
            # A gloo thread releases sent tensors a moment later, which may add a part of a piece.
            assert predicted.bytes == pytest.approx(measured.bytes, rel=0.005), (name, rows)
            assert predicted.host_bytes == measured.host_bytes == 0


@pytest.mark.parametrize("servers", [1, 2])
def test_servers_hold_what_is_saved_and_workers_what_is_said_of_it(
    tmp_path: Path, servers: int
) -> None:
    keys = {"strategy.replicate.servers": servers}
    peaks = run_ranks(save_and_resume, 3, tmp_path, "parameter_server", keys)
    for rank, rows in enumerate(peaks):
        for name, (predicted, measured) in rows.items():
            if rank >= servers and name == "save":
                # A worker sends no tensors; its peak is the lists of owners, which are sent as
                # bytes.
                assert 0 <= measured.bytes - predicted.bytes < 64 * 1024
            else:
                assert predicted.bytes == pytest.approx(measured.bytes, rel=0.005), (name, rows)


def save_untracked(context: RunContext, folder: Path) -> Any:
    """The peaks of a save in a run that tracks no step."""
    keys = {"train.global_batch_size": 8, "memory.track_steps": 0}
    tokens = torch.zeros(8, 6, dtype=torch.long)
    with Engine(
        DeepResidual, CrossEntropy(), adamw, job_from_keys("single", keys), context
    ) as engine:
        engine.step((tokens, tokens))
        engine.save(folder)
        return engine.meter.measured().state


def test_nothing_is_said_to_be_measured_where_no_step_was_tracked(tmp_path: Path) -> None:
    (state,) = run_ranks(save_untracked, 1, tmp_path)
    assert state.save is None
    assert state.resume is None
