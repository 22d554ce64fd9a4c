"""Optimizer state on disk or on the host: the same numbers and less memory, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.nets import TinyLM, tokens
from support.offloaded import DISK, begin_and_continue
from support.parity import Record, adamw, largest_difference, sgd, train
from support.peaks import assert_same_parts, peaks, repeat_if_above, text, wide_model
from support.ranks import run_ranks
from torch import nn

import bigtrain.optim.partitioned
from bigtrain.engine.engine import Engine
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy


def train_in_small_chunks(context, *args: Any) -> Record:
    """Train with chunks so small that parameters are divided, and several share a chunk."""
    bigtrain.optim.partitioned.chunk_elements = lambda *_: 64
    return train(context, *args)


ONE = {
    "fp32": {},
    "fp32, accumulating and clipped": {"train.micro_batch_size": 2, "optim.clip_norm": 0.5},
    "bf16": {"train.precision": "bf16", "train.micro_batch_size": 2, "optim.clip_norm": 0.5},
    "fp64": {"train.precision": "fp64"},
}


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("case", ONE)
def test_one_process_has_the_same_bits(case, optimizer):
    args = (TinyLM, tokens(22))
    plain = run_ranks(train, 1, *args, "single", ONE[case], 6, optimizer)[0]
    keys = {**ONE[case], **DISK}
    disk = run_ranks(train_in_small_chunks, 1, *args, "single", keys, 6, optimizer)[0]
    assert disk.losses == plain.losses
    assert largest_difference(plain, disk) == 0


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("strategy", ["ddp", "zero1_torch", "fsdp"])
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_ranks_equal_one_process(world_size, strategy, precision):
    keys = {"train.precision": precision, "optim.clip_norm": 0.5, "train.micro_batch_size": 1}
    single = run_ranks(train, 1, TinyLM, tokens(22), "single", keys)[0]
    args = (TinyLM, tokens(22), strategy, {**keys, **DISK})
    for record in run_ranks(train_in_small_chunks, world_size, *args):
        assert largest_difference(single, record) < (1e-10 if precision == "fp64" else 1e-5)


class Narrow(nn.Module):
    """Two of three ranks have no elements of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.down = nn.Embedding(13, 8), nn.Linear(8, 2)
        self.up = nn.Linear(2, 13)

    def forward(self, tokens):
        return self.up(torch.relu(self.down(self.embedding(tokens))))


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_a_rank_without_elements_of_a_parameter_takes_part_in_its_checkpoint(precision):
    keys = {"train.precision": precision, "train.global_batch_size": 9}
    plain = run_ranks(train, 3, Narrow, tokens(22), "fsdp", keys, 4, adamw)[0]
    for record in run_ranks(train, 3, Narrow, tokens(22), "fsdp", {**keys, **DISK}, 4, adamw):
        assert largest_difference(plain, record) < 1e-10


def test_fp32_copies_of_bf16_parameters_live_on_disk_with_the_same_bits():
    keys = {"train.precision": "bf16", "train.micro_batch_size": 2, "optim.clip_norm": 0.5}
    args = (TinyLM, tokens(22), "zero1_torch")
    plain = run_ranks(train_in_small_chunks, 2, *args, keys, 6, adamw)
    disk = run_ranks(train_in_small_chunks, 2, *args, {**keys, **DISK}, 6, adamw)
    for mine, theirs in zip(plain, disk, strict=True):
        assert mine.losses == theirs.losses
        assert largest_difference(mine, theirs) == 0


@pytest.mark.parametrize(
    ("precision", "world_size", "strategy"),
    [
        ("fp32", 1, "single"),
        ("bf16", 1, "single"),
        ("fp32", 2, "ddp"),
        ("bf16", 2, "ddp"),
        ("fp32", 2, "zero1_torch"),
        ("bf16", 2, "zero1_torch"),
    ],
)
def test_checkpoints_go_both_ways(tmp_path, precision, world_size, strategy):
    keys = {"train.precision": precision}
    variants = {"plain": (strategy, {}), "disk": (strategy, DISK)}
    losses = {
        (a, b): run_ranks(
            begin_and_continue, world_size, tmp_path / f"{a}-{b}", variants[a], variants[b], keys
        )
        for a in variants
        for b in variants
    }
    assert len({str(last_losses) for last_losses in losses.values()}) == 1


CASES: dict[str, tuple[Any, ...]] = {
    "single": (1, "single", {}, adamw),
    "single, clipped, accumulating": (
        *(1, "single", {"optim.clip_norm": 1.0, "train.micro_batch_size": 8}),
        adamw,
    ),
    "single, sgd": (1, "single", {"train.micro_batch_size": 8}, sgd),
    "single, fp64": (1, "single", {"train.precision": "fp64"}, adamw),
    "ddp": (2, "ddp", {}, adamw),
    "ddp, accumulating": (2, "ddp", {"train.micro_batch_size": 8}, adamw),
    "ddp, bf16": (2, "ddp", {"train.precision": "bf16", "train.micro_batch_size": 16}, adamw),
}


@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_predicted_part_by_part(case):
    world_size, strategy, keys, optimizer = CASES[case]
    args = (wide_model, text(), strategy, {**keys, **DISK}, optimizer)
    rows = repeat_if_above(
        lambda: run_ranks(peaks, world_size, *args), lambda row: row[1].bytes > 1.01 * row[0].bytes
    )
    for predicted, measured, note in rows:
        assert note is None
        assert_same_parts(predicted, measured)


def build_on_a_small_disk(context, free: int) -> str:
    """Only rank 1 sees too little space; every rank must report the same error."""
    import bigtrain.optim.state_store

    bigtrain.optim.state_store.free_disk_bytes = lambda _: free if context.rank == 1 else 10**12
    keys = {"train.global_batch_size": 8, "memory.predict": False, **DISK}
    try:
        Engine(TinyLM, CrossEntropy(), adamw, job_from_keys("ddp", keys), context)
    except ConfigError as error:
        return str(error)
    return ""


def test_all_ranks_of_a_node_need_room_and_say_the_same():
    state = 8 * sum(p.numel() for p in TinyLM().parameters())
    assert run_ranks(build_on_a_small_disk, 2, 2 * state) == ["", ""]
    first, second = run_ranks(build_on_a_small_disk, 2, 2 * state - 1)
    assert first == second
    assert f"({2 * state} bytes)" in first
    assert f"({2 * state - 1} bytes)" in first
    assert "the 2 ranks" in first


def test_the_host_is_where_a_cpu_run_is_already():
    plain = run_ranks(train, 1, TinyLM, tokens(22), "single", {})[0]
    record = run_ranks(train, 1, TinyLM, tokens(22), "single_offload_cpu", {})[0]
    assert record.losses == plain.losses
