"""Gradient norms in slices, shards and stages equal those of one process, and so do clipped steps.

Gradients may also be freed in the backward pass."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.nets import BlockLM, tokens
from support.parity import Record, largest_difference, train
from support.ranks import run_ranks
from support.released import RELEASE
from support.released import train as train_released

from bigtrain.ranks.context import RunContext

CLIPPED = {"train.precision": "fp64", "optim.clip_norm": 0.05, "train.micro_batch_size": 1}
MESHES: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "slices": ({"tp": 2}, ("tensor", "tensor_sequence")),
    "three": ({"tp": 3}, ("tensor",)),
    "replicas": ({"tp": 2, "dp": 2}, ("ddp+tensor", "fsdp+tensor", "zero1_torch+tensor_sequence")),
    "stages": ({"tp": 2, "pp": 2}, ("1f1b+tensor", "gpipe+tensor_sequence")),
}


def records(context: RunContext, strategies: tuple[str, ...], mesh: dict[str, int]) -> Any:
    keys = {**CLIPPED, **{f"mesh.{axis}": size for axis, size in mesh.items()}}
    return [train(context, BlockLM, tokens(22), strategy, keys, 4) for strategy in strategies]


@pytest.fixture(scope="module")
def expected() -> Record:
    """The run of one process; the first and the last stage share the embedding, which is also
    the head.
    """
    single: Record = run_ranks(train, 1, BlockLM, tokens(22), "single", CLIPPED, 4)[0]
    assert min(single.norms) > 2 * CLIPPED["optim.clip_norm"]
    return single


@pytest.mark.parametrize("case", MESHES)
def test_norms_and_clipped_steps_are_those_of_one_process(expected: Record, case: str) -> None:
    mesh, strategies = MESHES[case]
    ranks = math.prod(mesh.values())
    for results in run_ranks(records, ranks, strategies, mesh, timeout_s=120, **mesh):
        for strategy, record in zip(strategies, results, strict=True):
            assert largest_difference(expected, record) < 1e-12, strategy


def train_with_release(context: RunContext, strategies: tuple[str, ...]) -> Any:
    """Records of training with gradients kept, and with gradients freed."""
    keys = {"mesh.tp": 2, "optim.weight_decay": 0.1}
    return {
        strategy: [train_released(context, strategy, {**keys, **more}) for more in ({}, RELEASE)]
        for strategy in strategies
    }


@pytest.mark.parametrize(
    ("ranks", "strategies"), [(2, ("tensor", "tensor_sequence")), (4, ("fsdp+tensor",))]
)
def test_gradients_that_are_freed_as_they_come_leave_the_bits_and_the_norm(
    ranks: int, strategies: tuple[str, ...]
) -> None:
    for results in run_ranks(train_with_release, ranks, strategies, tp=2, timeout_s=120):
        for strategy, (retained, freed) in results.items():
            for kept_step, freed_step in zip(retained[0], freed[0], strict=True):
                assert kept_step.loss == freed_step.loss, strategy
                assert kept_step.grad_norm == pytest.approx(freed_step.grad_norm, rel=1e-6), (
                    strategy
                )
            for name, value in retained[1].items():
                assert torch.equal(value, freed[1][name]), (strategy, name)
            measured, predicted = freed[2:]
            assert predicted.bytes == pytest.approx(measured.bytes, rel=0.005), strategy
