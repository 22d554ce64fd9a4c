"""Updates that the device leaves out: the same numbers, and nothing changes if one is not finite.

On a CPU a run waits before the update instead, so the tests let it hold back as on a GPU.
"""

from __future__ import annotations

import math
from functools import partial
from unittest import mock

import pytest
import torch
from support.nets import BlockLM, tokens
from support.parity import UNSEEN
from support.ranks import run_ranks
from support.whole import whole_tensors
from torch import Tensor, nn

import bigtrain
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy

AS_ON_A_GPU = "bigtrain.core.loop.is_accelerator"
FUSED = partial(torch.optim.AdamW, lr=1e-2, fused=True)
PLAIN = partial(torch.optim.AdamW, lr=1e-2, foreach=True)
KEYS = {"train.global_batch_size": 8, "optim.clip_norm": 0.5, **UNSEEN}
MASTERS = {"train.precision": "bf16"}


def numbers(context, strategy, keys, *, held: bool, make_optimizer=FUSED):
    samples = tokens(8, ignored=False)
    rows = slice(4 * context.dp_rank, 4 * context.dp_rank + 4)
    batch = samples.inputs[rows], samples.targets[rows]
    job = job_from_keys(strategy, {**KEYS, **keys})
    model = partial(BlockLM, width=16)
    with (
        mock.patch(AS_ON_A_GPU, return_value=held),
        Engine(model, CrossEntropy(), make_optimizer, job, context) as engine,
    ):
        steps = [engine.step(batch) for _ in range(3)]
        figures = [(step.loss, step.grad_norm) for step in steps]
        return engine.runner._holds_back, figures, whole_tensors(engine.runner.state())


def both_ways(context, strategy, keys):
    return [numbers(context, strategy, keys, held=held) for held in (True, False)]


@pytest.mark.parametrize(
    ("strategy", "keys"),
    [
        ("ddp", {}),
        ("ddp", MASTERS),
        ("fsdp", {}),
        ("fsdp", MASTERS),
        ("fsdp_zero2", {}),
        ("zero1_torch", {}),
        ("zero1_torch", MASTERS),
    ],
)
def test_a_step_computes_the_same_to_the_bit(strategy, keys):
    for (held, figures, state), (waited, others, other) in run_ranks(both_ways, 2, strategy, keys):
        assert held
        assert not waited
        assert figures == others
        assert len(set(figures)) == 3
        assert all(torch.equal(state[name], other[name]) for name in state)


def test_an_update_elsewhere_is_not_held_back():
    run = partial(numbers, held=True)
    assert not any(held for held, *_ in run_ranks(run, 2, "ddp+offload_disk", {}))


def test_an_optimizer_that_is_not_fused_is_not_held_back():
    run = partial(numbers, held=True, make_optimizer=PLAIN)
    assert not any(held for held, *_ in run_ranks(run, 2, "ddp", {}))


class Breaking(CrossEntropy):
    """Not finite while `broken` names it: its loss alone, on rank 1; or its gradient."""

    broken = ""

    def __call__(self, output: Tensor, targets: Tensor, count: int | None = None) -> Tensor:
        loss = super().__call__(output, targets, count)
        if not self.broken:
            return loss
        if self.broken == "gradient":
            return loss + (output.flatten()[:4] * 0).sqrt().sum()  # 0, with a gradient of NaN
        first = torch.distributed.get_rank() == 0
        return loss if first else loss + math.inf


def broken_step(context, strategy, what, *, held: bool = True):
    batch = torch.ones(4, 4), torch.arange(4) % 3
    with (
        mock.patch(AS_ON_A_GPU, return_value=held),
        Engine(
            partial(nn.Linear, 4, 3), Breaking(), FUSED, job_from_keys(strategy, KEYS), context
        ) as engine,
    ):
        first = engine.step(batch).loss
        before = {k: v.clone() for k, v in whole_tensors(engine.runner.state()).items()}
        with (
            mock.patch.object(Breaking, "broken", what),
            pytest.raises(bigtrain.NonFiniteError, match="the optimizer was not stepped") as told,
        ):
            engine.step(batch)
        after = whole_tensors(engine.runner.state())
        unchanged = all(torch.equal(before[name], after[name]) for name in before)
        return str(told.value), unchanged, first, engine.step(batch).loss, sorted(before)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1_torch"])
def test_a_loss_that_is_infinite_on_one_rank_changes_nothing(strategy):
    for message, unchanged, first, next_loss, names in run_ranks(broken_step, 2, strategy, "loss"):
        assert "step 2: the loss of rank 1 is inf" in message
        assert unchanged
        assert next_loss < first
        assert "optimizer.weight.step" in names


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1_torch"])
def test_a_gradient_that_is_not_finite_changes_nothing(strategy):
    results = run_ranks(broken_step, 2, strategy, "gradient")
    for message, unchanged, first, next_loss, _ in results:
        assert "step 2: the gradient norm is nan" in message
        assert unchanged
        assert next_loss < first


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_after_the_error_trains_where_the_host_waits_before_the_update_too(what):
    run = partial(broken_step, held=False)
    for _, unchanged, first, next_loss, _ in run_ranks(run, 2, "ddp", what):
        assert unchanged
        assert next_loss < first
