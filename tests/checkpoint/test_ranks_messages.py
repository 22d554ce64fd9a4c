"""Ranks of one host pass the bytes of a save in memory that they share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.nets import BlockLM, tokens
from support.parity import adamw
from support.ranks import run_ranks

from bigtrain.checkpoint import layout, manifest, messages, read, write
from bigtrain.checkpoint.messages import SharedMessages, SocketMessages
from bigtrain.data import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.errors import BigtrainError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.ranks.context import RunContext

PIECE = 4096
"""Bytes of a piece in these tests, so that a save has many rounds."""


def small_pieces() -> None:
    """Let files be written in small pieces on this rank, which is a process of its own."""
    for module in (layout, write, read, manifest):
        module.PIECE_BYTES = PIECE  # type: ignore[attr-defined]


def count_messages() -> list[int]:
    """Return a list that gets the bytes of each message of this rank."""
    sizes, send = [], dist.isend

    def isend(tensor: Any, *args: Any) -> Any:
        sizes.append(tensor.nbytes)
        return send(tensor, *args)

    dist.isend = isend
    return sizes


def save(
    context: RunContext, folder: Path, strategy: str, keys: Mapping[str, Any], way: str
) -> tuple[dict[str, Any], int, int, str]:
    """Save once; return the hashes, the largest message, their number, and the way they went."""
    small_pieces()
    if way == "refused":

        def refuse(*_: Any) -> Any:
            raise BigtrainError("another user's process")

        messages.shared_memory = refuse
    if way == "sockets":
        write.messages_between = lambda *_: SocketMessages()
    used: list[str] = []
    made = write.messages_between

    def note(*args: Any) -> Any:
        result = made(*args)
        used.append(type(result).__name__)
        return result

    write.messages_between = note
    job = job_from_keys(strategy, {"train.global_batch_size": 8, **keys})
    batch = tokens(8 // max(1, context.dp_size), ignored=False)
    loss = CrossEntropy()
    example = MicroBatch(batch.inputs, batch.targets, loss.count(batch.targets), len(batch.inputs))
    with Engine(BlockLM, loss, adamw, job, context, example=example) as engine:
        engine.step((batch.inputs, batch.targets))
        sizes = count_messages()
        path = engine.save(folder)
        engine.saver.wait()
    files = json.loads((path / "manifest.json").read_text())["files"]
    tensors = {name: files[name] for name in files if name.endswith(".safetensors")}
    return tensors, max(sizes, default=0), len(sizes), used[0]


CASES = [
    (4, "fsdp", {}, {}),
    (4, "1f1b+fsdp", {"mesh.pp": 2}, {"pp": 2}),
    (2, "tensor", {"mesh.tp": 2}, {"tp": 2}),
    (2, "fsdp", {"checkpoint.asynchronous": True}, {}),
    (2, "fsdp", {"checkpoint.asynchronous": True, "checkpoint.snapshot_bytes": 20_000}, {}),
]


@pytest.mark.parametrize(("ranks", "strategy", "keys", "mesh"), CASES)
def test_files_are_the_same_as_through_sockets(tmp_path, ranks, strategy, keys, mesh) -> None:
    shared, sockets = (
        run_ranks(save, ranks, tmp_path / way, strategy, keys, way, fresh=True, **mesh)
        for way in ("shared", "sockets")
    )
    assert [tensors for tensors, *_ in shared] == [tensors for tensors, *_ in sockets]
    assert {way for *_, way in shared} == {SharedMessages.__name__}
    assert {way for *_, way in sockets} == {SocketMessages.__name__}
    assert max(largest for _, largest, *_ in shared) == 1
    assert max(largest for _, largest, *_ in sockets) > 100
    assert max(number for _, _, number, _ in sockets) > 3  # several rounds


def test_ranks_that_cannot_share_memory_use_sockets(tmp_path) -> None:
    saved = run_ranks(save, 2, tmp_path, "fsdp", {}, "refused", fresh=True)
    assert {way for *_, way in saved} == {SocketMessages.__name__}


def test_replicas_have_no_messages(tmp_path) -> None:
    saved = run_ranks(save, 2, tmp_path, "ddp", {}, "shared", fresh=True)
    assert {(number, way) for _, _, number, way in saved} == {(0, SocketMessages.__name__)}
