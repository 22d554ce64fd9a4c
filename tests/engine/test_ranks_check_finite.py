"""`train.check_finite=false`: the same numbers, and training continues after a non-finite step."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.nets import BlockLM, TinyLM, tokens
from support.parity import UNSEEN, sgd
from support.ranks import run_ranks
from support.whole import whole_tensors
from torch import nn

import bigtrain
from bigtrain.data import GlobalOrder, MicroBatch, StepLoader
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy

RELEASED = {"optim.release_gradients": True}
BF16 = {"optim.clip_norm": 0.5, "train.micro_batch_size": 1, "train.precision": "bf16"}
CASES = {"ddp": BF16, "fsdp": BF16, "zero2": BF16, "oss": {}, "fsdp released": RELEASED}


def with_and_without_check(context, strategy, keys):
    """The results of a run with the check and without it."""
    samples, loss, runs = tokens(22), CrossEntropy(), []
    rows = MicroBatch(samples.inputs[:2], samples.targets[:2], loss.count(samples.targets[:2]), 2)
    keys = {"train.global_batch_size": 8, **UNSEEN, **keys}
    for check in (True, False):
        job = job_from_keys(strategy, {**keys, "train.check_finite": check})
        model = partial(BlockLM, width=16)
        with Engine(model, loss, sgd, job, context, example=rows) as engine:
            batch = engine.plan.batch
            loader = StepLoader(
                samples,
                GlobalOrder(len(samples), batch.global_size, seed=3),
                count=loss.count,
                dp_rank=context.dp_rank,
                dp_size=context.dp_size,
                micro_batch_size=batch.micro_size,
            )
            results = [engine.step(step) for _, step in zip(range(4), loader, strict=False)]
            state = whole_tensors(engine.runner.state())
            runs.append(([r.loss for r in results], [r.grad_norm for r in results], state))
    return runs


def are_equal(runs) -> bool:
    (losses, norms, state), (*first_results, other_state) = runs
    alike = all(torch.equal(state[name], other_state[name]) for name in state)
    return alike and [losses, norms] == first_results and len(set(losses)) > 1


@pytest.mark.parametrize("case", CASES)
def test_losses_and_norms_are_the_same_to_the_bit(case):
    assert all(map(are_equal, run_ranks(with_and_without_check, 2, case.split()[0], CASES[case])))


@pytest.mark.parametrize("strategy", ["1f1b", "zbv", "layer_split"])
def test_so_they_are_in_a_pipeline(strategy):
    assert all(
        map(
            are_equal,
            run_ranks(with_and_without_check, 2, strategy, {"train.accumulation_steps": 4}, pp=2),
        )
    )


class Overflowing(TinyLM):
    """Its loss is NaN at its second step."""

    def forward(self, tokens):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(tokens) * (float("inf") if self.calls == 2 else 1.0)


def run_overflowing(context, strategy, keys):
    """The results of steps, the second of which has a NaN loss."""
    samples = tokens(8, ignored=False)
    keys = {"train.global_batch_size": 16, "memory.predict": False, **keys}
    job = job_from_keys(strategy, {**keys, "train.check_finite": False})
    with Engine(Overflowing, CrossEntropy(), sgd, job, context) as engine:
        results = [engine.step((samples.inputs, samples.targets)) for _ in range(3)]
        return [(r.step, r.loss, r.grad_norm) for r in results]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp released", "zero1", "zero3"])
def test_a_step_that_is_not_finite_goes_on_and_its_figures_say_so(strategy):
    strategy, *released = strategy.split()
    keys = RELEASED if released else {}
    for results in run_ranks(run_overflowing, 2, strategy, keys):
        assert [step for step, *_ in results] == [1, 2, 3]
        assert all(math.isfinite(number) for number in results[0])
        assert not any(math.isfinite(number) for number in results[1][1:])
        # An update by NaN makes the weights NaN; DeepSpeed skips such an update.
        skipped = strategy.startswith("zero")
        assert all(math.isfinite(number) is skipped for number in results[2][1:])


def test_it_is_refused_by_default():
    with pytest.raises(bigtrain.NonFiniteError, match="step 2: the loss of rank 0 is nan"):
        prepare_and_break(check=True)
    assert [math.isnan(result.loss) for result in prepare_and_break(check=False)] == [
        False,
        True,
        True,
    ]


def prepare_and_break(*, check):
    """Steps of one process whose second loss is not finite."""
    batch = torch.randn(8, 4), torch.arange(8) % 3
    keys = {"memory__predict": False, "train__check_finite": check}
    with bigtrain.prepare(lambda: nn.Linear(4, 3), F.cross_entropy, sgd, **keys) as engine:
        results = [engine.step(batch)]
        with torch.no_grad():
            engine.model.weight[0, 0] = math.nan
        return results + [engine.step(batch) for _ in range(2)]


class Signed(CrossEntropy):
    """Infinite, with a different sign on each rank."""

    def __call__(self, output, target, count=None):
        sign = 1 - 2 * torch.distributed.get_rank()
        return super().__call__(output, target, count) * math.inf * sign


def loss_of_both_signs(context):
    """The loss of a step in which ranks have infinities of different signs."""
    keys = {"train.global_batch_size": 8, **UNSEEN, "train.check_finite": False}
    with Engine(partial(nn.Linear, 4, 3), Signed(), sgd, job_from_keys("ddp", keys), context) as e:
        return e.step((torch.ones(4, 4), torch.arange(4) % 3)).loss


def test_infinite_losses_of_both_signs_are_no_number():
    assert all(map(math.isnan, run_ranks(loss_of_both_signs, 2)))
