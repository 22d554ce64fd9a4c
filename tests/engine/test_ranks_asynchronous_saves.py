"""Checkpoints that are written during training contain the state of the step at which
they began.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.nets import TinyLM, tokens
from support.parity import adamw
from support.ranks import run_ranks

from bigtrain.checkpoint import write
from bigtrain.checkpoint.folders import newest_checkpoint
from bigtrain.checkpoint.read import Checkpoint
from bigtrain.data import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.engine.resume import failed_save, save_or_explain
from bigtrain.errors import CheckpointError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.ranks.context import RunContext

_PATIENCE_S = 30.0


def gate_of_writes() -> threading.Event:
    """An event; nothing is written before it is set."""
    gate, plain = threading.Event(), write._Writer._write_all

    def write_all(descriptor: int, data: memoryview, offset: int) -> None:
        assert gate.wait(_PATIENCE_S)
        plain(descriptor, data, offset)

    write._Writer._write_all = staticmethod(write_all)
    return gate


def train(context: RunContext, folder: Path, strategy: str, keys: dict[str, Any]) -> Any:
    """Save after each of two steps; the second save runs during training if that is configured."""
    gate = gate_of_writes()
    job = job_from_keys(strategy, {"train.global_batch_size": 8, **keys})
    copies_all = job.checkpoint.asynchronous and job.checkpoint.snapshot_bytes is None
    if not copies_all:
        gate.set()
    batch = tokens(8 // max(1, context.dp_size), ignored=False)
    loss = CrossEntropy()
    example = MicroBatch(batch.inputs, batch.targets, loss.count(batch.targets), len(batch.inputs))
    with Engine(TinyLM, loss, adamw, job, context, example=example) as engine:
        engine.step((batch.inputs, batch.targets))
        path = engine.save(folder)
        copied = engine.saver.copied_bytes
        assert not (copies_all and path.exists())
        engine.step((batch.inputs, batch.targets))
        gate.set()
        engine.save(folder)  # this save waits for the first one
        assert path.exists()
        engine.saver.wait()
        assert newest_checkpoint(folder) == folder / "step-2"
    return copied


def states(path: Path) -> dict[str, bytes]:
    checkpoint = Checkpoint(path)
    return {name: checkpoint.read(name).numpy().tobytes() for name in checkpoint.names}


@pytest.mark.parametrize(
    ("ranks", "strategy", "keys"),
    [
        (1, "single", {}),
        (2, "fsdp", {}),
        (2, "ddp", {"checkpoint.snapshot_bytes": 2000}),
        (2, "1f1b", {"checkpoint.snapshot_bytes": 0}),
    ],
)
def test_it_is_the_state_of_the_step_at_which_it_began(tmp_path, ranks, strategy, keys):
    at_once = tmp_path / "at_once"
    pp = 2 if strategy == "1f1b" else 1
    run_ranks(train, ranks, at_once, strategy, {}, pp=pp)
    keys = {"checkpoint.asynchronous": True, **keys}
    copied = run_ranks(train, ranks, tmp_path / "beside", strategy, keys, pp=pp)
    for step in ("step-1", "step-2"):
        assert states(tmp_path / "beside" / step) == states(at_once / step)
    size = sum(file.stat().st_size for file in (at_once / "step-2").glob("*.safetensors"))
    most = keys.get("checkpoint.snapshot_bytes")
    if most is None:  # each byte is written by one rank
        assert 0.5 * size < sum(copied) <= size
    else:
        assert all(tensor <= most for tensor in copied)


def fail_second_save(context: RunContext, folder: Path) -> Any:
    """The second save meets a full disk after the run has continued."""
    job = job_from_keys("ddp", {"train.global_batch_size": 8, "checkpoint.asynchronous": True})
    batch = tokens(4, ignored=False)
    gate, plain = threading.Event(), write._Writer._write_all

    def full(descriptor: int, data: memoryview, offset: int) -> None:
        assert gate.wait(_PATIENCE_S)
        raise OSError(28, "No space left on device")

    messages = []
    with Engine(TinyLM, CrossEntropy(), adamw, job, context) as engine:
        engine.step((batch.inputs, batch.targets))
        messages.append(save_or_explain(engine, folder, last=False))
        engine.saver.wait()
        if context.rank == 1:
            write._Writer._write_all = staticmethod(full)
        engine.step((batch.inputs, batch.targets))
        messages.append(save_or_explain(engine, folder, last=False))
        engine.step((batch.inputs, batch.targets))
        messages.append(failed_save(engine, folder))
        gate.set()
        end = time.monotonic() + _PATIENCE_S
        while not (failure := failed_save(engine, folder)) and time.monotonic() < end:
            time.sleep(0.01)
        messages.append(failure)
        write._Writer._write_all = staticmethod(plain)
        messages.append(save_or_explain(engine, folder, last=True))
    return messages


def test_a_save_that_fails_beside_training_is_said_when_it_has(tmp_path):
    folder = tmp_path / "run"
    for messages in run_ranks(fail_second_save, 2, folder):
        (line,) = messages[3]
        assert messages == [[], [], [], [line], []]
        assert "no checkpoint was written to" in line
        assert "No space left" in line
        assert str(folder / "checkpoints") in line
        assert "rank 1" in line
        assert "The run goes on; the newest is still step-1." in line
    newest = newest_checkpoint(folder / "checkpoints")
    assert newest is not None
    assert newest.name == "step-3"
    assert Checkpoint(newest).meta["step"] == 3


def fail_last_save(context: RunContext, folder: Path) -> Any:
    """The last save fails."""
    job = job_from_keys("single", {"checkpoint.asynchronous": True})
    batch = tokens(8, ignored=False)

    def full(descriptor: int, data: memoryview, offset: int) -> None:
        raise OSError(28, "No space left on device")

    write._Writer._write_all = staticmethod(full)
    with Engine(TinyLM, CrossEntropy(), adamw, job, context) as engine:
        engine.step((batch.inputs, batch.targets))
        with pytest.raises(CheckpointError, match="its last state is lost"):
            save_or_explain(engine, folder, last=True)
    return True


def test_the_last_save_is_waited_for_and_fails_the_run(tmp_path):
    assert run_ranks(fail_last_save, 1, tmp_path)[0]
