"""The host updates for the device: the order of copies, tested with copies that are delayed."""

from __future__ import annotations

import tempfile
from itertools import product
from typing import Any

import pytest
import torch
from support.late_copies import LateCopies
from support.nets import TinyLM, tokens
from support.offloaded import begin_and_continue
from support.parity import Record, adamw, largest_difference, sgd, train
from support.ranks import run_ranks

import bigtrain.optim.partitioned
import bigtrain.optim.state_store
import bigtrain.tensors.transfer
from bigtrain.core.strategy import Assembly
from bigtrain.errors import ConfigError
from bigtrain.optim.state_store import DiskStateStore, HostStateStore
from bigtrain.ranks.context import RunContext
from bigtrain.strategies.offload import Offload

HOST = {"strategy.offload.name": f"{__name__}:OnHost", "strategy.offload.optimizer": "cpu"}


class OnHost(Offload):
    """As on a GPU, but with the CPU as the device."""

    def apply(self, assembly: Assembly) -> None:
        assembly.state_store = HostStateStore(assembly.context, LateCopies())


class OnDisk(Offload):
    """As on a GPU, through buffers so small that every tensor needs several."""

    def apply(self, assembly: Assembly) -> None:
        bigtrain.tensors.transfer.BOUNCE_BYTES = 64
        folder = tempfile.gettempdir()
        assembly.state_store = DiskStateStore(assembly.context, folder, LateCopies())


def train_in_small_chunks(context, *args: Any) -> Record:
    bigtrain.optim.partitioned.chunk_elements = lambda *_: 64
    return train(context, *args)


CASES = {
    "fp32": {},
    "accumulating and clipped": {"train.micro_batch_size": 2, "optim.clip_norm": 0.5},
    "fp64": {"train.precision": "fp64", "optim.clip_norm": 0.5},
    "bf16": {"train.precision": "bf16", "train.micro_batch_size": 2, "optim.clip_norm": 0.5},
}


DISK = {"strategy.offload.name": f"{__name__}:OnDisk", "strategy.offload.optimizer": "disk"}
RUNS = [(1, "single"), (2, "ddp"), (2, "zero1_torch"), (2, "fsdp")]


@pytest.mark.parametrize(
    ("world_size", "strategy", "case", "optimizer"),
    [(*run, *rest) for run, *rest in product(RUNS, CASES, [sgd, adamw])],
)
def test_late_copies_change_nothing(case, optimizer, world_size, strategy):
    args = (TinyLM, tokens(22), strategy)
    plain = run_ranks(train_in_small_chunks, world_size, *args, CASES[case], 4, optimizer)
    keys = {**CASES[case], **HOST}
    host = run_ranks(train_in_small_chunks, world_size, *args, keys, 4, optimizer)
    for mine, theirs in zip(plain, host, strict=True):
        assert mine.losses == theirs.losses
        assert largest_difference(mine, theirs) == 0


@pytest.mark.parametrize(("world_size", "strategy"), [(1, "single"), (2, "zero1_torch")])
@pytest.mark.parametrize("case", ["fp32", "bf16"])
def test_late_copies_to_disk_change_nothing(case, world_size, strategy):
    args = (TinyLM, tokens(22), strategy)
    plain = run_ranks(train_in_small_chunks, world_size, *args, CASES[case], 4, adamw)
    keys = {**CASES[case], **DISK}
    disk = run_ranks(train_in_small_chunks, world_size, *args, keys, 4, adamw)
    for mine, theirs in zip(plain, disk, strict=True):
        assert mine.losses == theirs.losses
        assert largest_difference(mine, theirs) == 0


@pytest.mark.parametrize(("world_size", "strategy"), [(1, "single"), (2, "zero1_torch")])
def test_checkpoints_go_both_ways(tmp_path, world_size, strategy):
    variants = {"plain": (strategy, {}), "host": (strategy, HOST)}
    keys = {"train.precision": "bf16"}
    losses = {
        str(
            run_ranks(
                begin_and_continue,
                world_size,
                tmp_path / f"{a}-{b}",
                variants[a],
                variants[b],
                keys,
            )
        )
        for a in variants
        for b in variants
    }
    assert len(losses) == 1


def test_the_next_chunk_comes_while_this_one_is_updated():
    copies = LateCopies()
    home = HostStateStore(RunContext.alone(), copies)
    parameter = torch.nn.Parameter(torch.zeros(256))
    before = bigtrain.optim.partitioned.chunk_elements
    bigtrain.optim.partitioned.chunk_elements = lambda *_: 64
    try:
        update = bigtrain.optim.partitioned.PartitionedUpdate(
            {"p": parameter}, adamw, state_store=home
        )
    finally:
        bigtrain.optim.partitioned.chunk_elements = before
    parameter.grad = torch.ones(256)
    seen = []
    step = update.optimizer.step

    def watched() -> None:
        seen.append((len(copies.asked), copies.done))
        step()

    update.optimizer.step = watched  # type: ignore[method-assign]
    update.step()
    # Before each of four updates: at first two gradients are requested, then each time a value to
    # the device and a gradient to the host; one of them, or both, still in progress.
    assert seen == [(2, 1), (4, 2), (6, 4), (7, 6)]
    assert copies.done == len(copies.asked) == 8
    values = parameter.detach()
    assert torch.equal(values, values[:1].expand(256))
    assert values[0] < 0


def build_with_little_memory(context, free: int) -> str:
    bigtrain.optim.state_store.free_host_bytes = lambda: free if context.rank == 1 else 10**12
    make = torch.optim.AdamW
    try:
        HostStateStore(context).ensure_space(
            updated_bytes=400, copied=[300, 100], make_optimizer=make
        )
    except ConfigError as error:
        return str(error)
    return ""


def test_the_hosts_memory_must_hold_all_ranks_and_they_say_the_same():
    assert run_ranks(build_with_little_memory, 2, 2400) == ["", ""]
    first, second = run_ranks(build_with_little_memory, 2, 2399)
    assert first == second
    assert "(2400 bytes)" in first
    assert "(2399 bytes)" in first
