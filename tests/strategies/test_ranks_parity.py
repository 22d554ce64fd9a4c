"""Every strategy computes the same as one process on the same global batch.

In float64 differences are at rounding level, so a wrong factor, a lost micro-batch or a mean of
means shows. There are 22 samples and a global batch of 8: every third batch is smaller, some
samples have no valid target, and with four ranks some ranks have none at all.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from support.nets import Sometimes, TinyLM, Unreached, tokens
from support.parity import Record, adamw, largest_difference
from support.parity import train_beside_plain_loop as train
from support.ranks import run_ranks

from bigtrain.assembly.make_plan import make_plan
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.job.presets import preset_names
from bigtrain.job.strategy_words import whole_strategies

ON_DEVICES = ("layer_split_devices", "gpipe_fairscale")
"""Strategies that use several devices in one process."""
ON_FOUR = (
    "hybrid",
    "1f1b_ddp",
    "1f1b_zero1",
    "1f1b_zero2",
    "1f1b_fsdp",
    "3d",
    "pipeline_deepspeed_zero1",
)
FP64 = {"train.precision": "fp64", "optim.clip_norm": 0.5}


def reference(precision: str = "fp64", model: type[TinyLM] = TinyLM, **how) -> Record:
    keys = {"train.precision": precision, "optim.clip_norm": 0.5}
    return run_ranks(train, 1, model, tokens(22), "single", keys, *how.values())[0]


@pytest.fixture(scope="module")
def expected() -> Record:
    return reference()


CASES = {
    "whole batch": {},
    "accumulation": {"train.micro_batch_size": 1},
    "two rows at a time": {"train.micro_batch_size": 2},
    "small buckets": {"strategy.replicate.bucket_size": 64, "train.micro_batch_size": 1},
    "separate buckets": {"strategy.replicate.gradient_as_bucket_view": False},
    "static graph": {"strategy.replicate.static_graph": True},
    "static graph, accumulating": {
        "strategy.replicate.static_graph": True,
        "train.micro_batch_size": 1,
    },
    "separate buckets, accumulating": {
        "strategy.replicate.gradient_as_bucket_view": False,
        "train.micro_batch_size": 1,
    },
    "unused parameters, accumulating": {
        "strategy.replicate.find_unused_parameters": True,
        "train.micro_batch_size": 1,
    },
    "unused parameters": {"strategy.replicate.find_unused_parameters": True},
}


@pytest.mark.parametrize(("world_size", "case"), [*product([2, 4], CASES)])
def test_ddp_equals_one_process_in_float64(expected, world_size, case):
    records = run_ranks(train, world_size, TinyLM, tokens(22), "ddp", {**FP64, **CASES[case]})
    for record in records:
        assert largest_difference(expected, record) < 1e-10


TWELVE = {"train.global_batch_size": 12}
ONE_ROW = {**TWELVE, "train.micro_batch_size": 1}
CLASSIC: dict[str, tuple[str, dict[str, Any]]] = {
    "sync_sgd": ("sync_sgd", TWELVE),
    "sync_sgd, accumulating": ("sync_sgd", ONE_ROW),
    "ring": ("ring", TWELVE),
    "ring, accumulating": ("ring", ONE_ROW),
    # 7 numbers: chunks of 4 and 3; of 3, 2 and 2; of 2, 2, 2 and 1; the last bucket has fewer.
    "ring, uneven chunks": ("ring", {**ONE_ROW, "strategy.replicate.bucket_size": 56}),
}


def train_classic(context, model, base):
    """The records of both strategies, in one set of ranks."""
    return {
        case: train(context, model, tokens(22), strategy, {**base, **keys}, 4)
        for case, (strategy, keys) in CLASSIC.items()
    }


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sync_sgd_and_the_ring_equal_one_process(world_size):
    """In float64; and their replicas are equal bit for bit."""
    one = run_ranks(train, 1, TinyLM, tokens(22), "single", {**FP64, **TWELVE}, 4)[0]
    found = run_ranks(train_classic, world_size, TinyLM, FP64)
    for rank, case in product(found, CLASSIC):
        assert largest_difference(one, rank[case]) < 1e-10, case
        for name, weight in rank[case].weights.items():
            assert torch.equal(weight, found[0][case].weights[name]), (case, name)


@pytest.mark.parametrize("strategy", ["sync_sgd", "ring"])
def test_what_a_step_does_without_is_left_alone_in_it(strategy):
    """A layer that is used in every other step gets no momentum and no weight decay in between."""
    keys = {**FP64, **TWELVE}
    one = run_ranks(train, 1, Sometimes, tokens(22), "single", keys, 4)[0]
    for record in run_ranks(train, 2, Sometimes, tokens(22), strategy, keys, 4):
        assert largest_difference(one, record) < 1e-10


def test_sync_sgd_and_the_ring_have_the_losses_of_one_process_in_float32():
    one = run_ranks(train, 1, TinyLM, tokens(22), "single", TWELVE, 4)[0]
    for rank in run_ranks(train_classic, 3, TinyLM, {}):
        for case, record in rank.items():
            assert record.losses == pytest.approx(one.losses, abs=1e-6), case


WHOLE = whole_strategies()
# Words that extend a strategy: they extend `single`, unless they need more.
BESIDE = {"offload_parameters_cpu": "fsdp"}
LISTED = [
    name if name in WHOLE else f"{BESIDE.get(name, 'single')}+{name}"
    for name in preset_names("strategies")
]


@pytest.fixture(scope="module")
def expected_with_unreached() -> Record:
    return reference(model=Unreached)


@pytest.mark.parametrize("strategy", LISTED)
def test_every_listed_strategy_equals_one_process(expected_with_unreached, strategy):
    """A new preset is tested as soon as its file exists, in float64 if it supports that.

    Parameters that the loss does not reach have no gradient in one process: weight decay and
    momentum do not change them there, and must not in any engine.
    """
    world_size = 1 if strategy.startswith("single") or strategy in ON_DEVICES else 2
    world_size = 4 if strategy in ON_FOUR else world_size
    keys = {**FP64, "train.micro_batch_size": 2}
    if strategy.endswith("+accumulation"):
        del keys["train.micro_batch_size"]  # accumulation sets the number of micro-batches itself
    one, tolerance = expected_with_unreached, 1e-10
    if refusal(strategy, keys, world_size):
        one, tolerance = reference("fp32", Unreached), 1e-5
        keys["train.precision"] = "fp32"
        reason = refusal(strategy, keys, world_size)
        if reason:  # it cannot run on a CPU, and names an alternative
            assert "needs CUDA" in reason
            assert "Use --strategy" in reason
            return
    job = job_from_keys(strategy, {"train.global_batch_size": 8, **keys})
    plan = make_plan(job, world_size, "cpu")
    # Inexact strategies state a reason before the ranks connect
    if plan.replicate.inexact_reason is not None:
        assert any(plan.replicate.inexact_reason in line for line in plan.warnings)
        return
    mesh = {"pp": plan.pp, "tp": plan.tp}
    for record in run_ranks(train, world_size, Unreached, tokens(22), strategy, keys, **mesh):
        assert largest_difference(one, record) < tolerance


BF16_WITH_FP32_VALUES = {"dp": ["ddp", "fsdp", "fsdp_zero2"], "pp": ["1f1b"]}


def train_in_bf16(context, strategies):
    keys = {"train.precision": "bf16"}
    return {name: train(context, Unreached, tokens(22), name, keys, 2) for name in strategies}


@pytest.mark.parametrize("axis", BF16_WITH_FP32_VALUES)
def test_in_bf16_a_parameter_that_the_loss_does_not_reach_keeps_its_values(axis):
    """In units of fully_shard it has the dtype of the trained ones, which torch demands."""
    one = reference("fp32", Unreached)
    unreached = ["pooler.weight", "pooler.bias", "spare"]
    seen = set()
    for rank in run_ranks(train_in_bf16, 2, BF16_WITH_FP32_VALUES[axis], **{axis: 2}):
        for strategy, record in rank.items():
            assert record.losses[0] == pytest.approx(one.losses[0], rel=0.02), strategy
            for name in {*unreached} & record.weights.keys():  # a stage has its own only
                seen.add((strategy, name))
                assert torch.equal(record.weights[name], one.weights[name]), (strategy, name)
    assert seen == {*product(BF16_WITH_FP32_VALUES[axis], unreached)}
    assert not torch.equal(one.weights[unreached[0]].bfloat16().float(), one.weights[unreached[0]])


def refusal(strategy: str, keys: dict[str, Any], world_size: int) -> str | None:
    """The reason why a plan is refused, or None."""
    try:
        make_plan(
            job_from_keys(strategy, {"train.global_batch_size": 8, **keys}), world_size, "cpu"
        )
    except ConfigError as error:
        return str(error)
    return None


def test_accumulation_on_one_process_equals_the_whole_batch(expected):
    for rows in (1, 3):
        keys = {**FP64, "train.micro_batch_size": rows}
        if rows == 3:  # an accumulation that does not divide the batch evenly
            keys["train.global_batch_size"] = 9
            whole = run_ranks(
                train, 1, TinyLM, tokens(22), "single", {**FP64, "train.global_batch_size": 9}
            )
            record = run_ranks(train, 1, TinyLM, tokens(22), "single", keys)[0]
            assert largest_difference(whole[0], record) < 1e-10
        else:
            record = run_ranks(train, 1, TinyLM, tokens(22), "single", keys)[0]
            assert largest_difference(expected, record) < 1e-10


@pytest.mark.parametrize("world_size", [2, 4])
def test_ddp_equals_one_process_in_float32(world_size):
    one = reference("fp32")
    keys = {"optim.clip_norm": 0.5, "train.micro_batch_size": 1}
    for record in run_ranks(train, world_size, TinyLM, tokens(22), "ddp", keys):
        assert largest_difference(one, record) < 1e-5


def test_adamw_has_the_same_losses():
    one = run_ranks(train, 1, TinyLM, tokens(22), "single", {}, 6, adamw)[0]
    for record in run_ranks(train, 2, TinyLM, tokens(22), "ddp", {}, 6, adamw):
        assert record.losses == pytest.approx(one.losses, abs=2e-6)


@pytest.mark.parametrize("hook", ["fp16", "bf16", "powersgd"])
def test_compressed_gradients_stay_close_and_are_not_the_same(hook):
    keys = {
        "train.check_first_steps": 0,
        "strategy.replicate.compress": hook,
        "strategy.replicate.powersgd_start": 2,
    }
    one = run_ranks(train, 1, TinyLM, tokens(22), "single", {})[0]
    record = run_ranks(train, 2, TinyLM, tokens(22), "ddp", keys)[0]
    # PowerSGD keeps one direction of each matrix: it learns, but along a different path.
    assert record.losses == pytest.approx(one.losses, abs=0.5 if hook == "powersgd" else 0.02)
    assert largest_difference(one, record) > 0


def test_bf16_equals_one_process_in_bf16_and_keeps_fp32_weights():
    bf16 = {"train.precision": "bf16", "optim.clip_norm": 0.5}
    one = run_ranks(train, 1, TinyLM, tokens(22), "single", bf16)[0]
    record = run_ranks(train, 2, TinyLM, tokens(22), "ddp", bf16)[0]
    assert record.losses == pytest.approx(one.losses, abs=5e-3)
    assert all(t.dtype.is_floating_point and t.element_size() == 4 for t in record.weights.values())


def test_a_wrong_gradient_would_be_seen(expected):
    """The tolerance itself: a run with a different rate differs by far more."""
    other = run_ranks(train, 1, TinyLM, tokens(22, ignored=False), "single", FP64)[0]
    assert largest_difference(expected, other) > 1e-3
