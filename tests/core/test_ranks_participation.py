"""Parameters used on some ranks or in some steps only: losses of one process, or a refusal.

The reference is a plain torch loop on the whole global batch, whose optimizer has momentum and
weight decay, so that a parameter which is updated without a gradient changes the losses.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.routed import ROUTED, ROWS, plain_losses, routed_losses, rows_of, rows_of_batch, sgd
from torch.nn import functional

from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.ranks.context import RunContext

STEPS = 5
LATE = "gamma is used in this step, and was left out of training"
UNFROZEN = r"towers.0.a.weight was frozen when .* strategy {}, and is trained .* before step 3"
FROZEN = r"towers.0.a.weight was trained when .* strategy {}, and is frozen .* before step 3"
NO_GRADIENT = "towers.1.a.weight and 3 more got no gradient in this step. DeepSpeed would still"
REFUSED_AT_ONCE = r"not every pass uses towers.0, towers.1 \(nonzero in the model\): {} ranks would"
UNUSED = "does not depend on towers.1.a.weight, .*find_unused_parameters=true"

Expected = dict[str, tuple[str, int] | None]
"""A refusal and the number of steps before it; None if the losses must equal those of one
process.
"""


def everywhere(strategy: str) -> Expected:
    return {
        "Late": (LATE, 2),
        "LateModule": ("towers.1.a.weight is used in this step", 2),
        "Unfrozen": (UNFROZEN.format(strategy), 2),
        "Frozen": (FROZEN.format(strategy), 2),
    }


RIGHT: Expected = dict.fromkeys(("Towers", "Sizes", "Masked", "Layers", "SkipInside"))
EXPECTED: dict[str, Expected] = {
    "ddp": RIGHT | everywhere("ddp") | {"SkipOnce": (UNUSED, 3)},
    "zero1_torch": RIGHT | everywhere("zero1_torch") | {"SkipOnce": (UNUSED, 3)},
    "fsdp": RIGHT | everywhere("fsdp") | {"SkipOnce": None, "Hidden": ("step 3: the ranks did", 2)},
    "fsdp_zero2": RIGHT
    | everywhere("fsdp_zero2")
    | {"SkipOnce": None, "Hidden": ("uses of towers.0: rank 0 1, rank 1 0", 2)},
    "oss": RIGHT | everywhere("oss") | {"SkipOnce": (UNUSED, 3)},
    "sharded_ddp": {"Towers": (REFUSED_AT_ONCE.format("fairscale's"), 0), "SkipOnce": None}
    | everywhere("sharded_ddp")
    | {"Hidden": ("uses of towers.0.a.weight: rank 0 1, rank 1 0", 2)},
}
for stage in (1, 2, 3):
    EXPECTED[f"zero{stage}"] = {
        "Towers": (REFUSED_AT_ONCE.format("DeepSpeed's"), 0),
        "SkipInside": (r"towers.1 \(it changes between steps\)", 0),
        "SkipOnce": (NO_GRADIENT, 3),
    } | everywhere(f"zero{stage}")


def losses_of(context: RunContext, names: list[str], strategy: str, keys: dict[str, Any]) -> Any:
    """The losses of every net, all in one set of ranks."""
    return {name: routed_losses(context, name, strategy, keys, STEPS) for name in names}


@pytest.fixture(scope="module")
def plain() -> dict[str, list[float]]:
    return {name: plain_losses(name, STEPS) for name in ROUTED}


@pytest.mark.parametrize("strategy", EXPECTED)
def test_what_not_every_step_or_rank_uses(strategy: str, plain: dict[str, list[float]]) -> None:
    expected = EXPECTED[strategy]
    keys = {"train.micro_batch_size": 8}
    for outcomes in run_ranks(losses_of, 2, list(expected), strategy, keys):
        for name, refusal in expected.items():
            losses, error, _ = outcomes[name]
            if refusal is None:
                assert error is None, name
                assert len(losses) == STEPS
            else:
                words, steps = refusal
                assert error is not None, name
                assert len(losses) == steps, (name, error)
                assert re.search(words, error, re.DOTALL), error
            assert losses == pytest.approx(plain[name][: len(losses)], abs=2e-6), name


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1_torch"])
def test_what_some_micro_batches_use(strategy: str, plain: dict[str, list[float]]) -> None:
    """Each rank has several micro-batches, and the rows of a rank are of one kind."""
    keys = {"train.micro_batch_size": 2}
    names = ["Towers", "Masked", "Layers"]
    for outcomes in run_ranks(losses_of, 2, names, strategy, keys):
        for name, (losses, error, _) in outcomes.items():
            assert error is None
            assert losses == pytest.approx(plain[name], abs=2e-6), name


def test_what_is_found_unused_follows_everything_but_requires_grad(
    plain: dict[str, list[float]],
) -> None:
    """With ddp's `find_unused_parameters`: zeros that stay in its buckets do not count as
    gradients.
    """
    found_unused = {"strategy.replicate.find_unused_parameters": True}
    for size in (2, 8):
        keys = {**found_unused, "train.micro_batch_size": size}
        names = ["SkipOnce", "Late", "LateModule", "Skip", "Frozen"]
        for outcomes in run_ranks(losses_of, 2, names, "ddp", keys):
            for name, (losses, error, _) in outcomes.items():
                assert error is None, name
                assert losses == pytest.approx(plain[name], abs=2e-6), name


def test_one_process_follows_late_parameters_and_freezing(plain: dict[str, list[float]]) -> None:
    names = ["Towers", "Layers", "Skip", "SkipOnce", "Late", "LateModule", "Frozen", "Unfrozen"]
    outcomes = run_ranks(losses_of, 1, names, "single", {"train.micro_batch_size": 4})[0]
    for name, (losses, error, _) in outcomes.items():
        if name == "Unfrozen":
            assert "towers.0.a.weight was frozen" in error
        else:
            assert error is None, name
        assert losses == pytest.approx(plain[name][: len(losses)], abs=2e-6), name


def random_layer_losses(context: RunContext, strategies: list[str]) -> Any:
    """The results of `Dropped`, whose ranks skip different layers, under each strategy."""
    keys = {"train.micro_batch_size": 4}
    return {s: routed_losses(context, "Dropped", s, keys, 4) for s in strategies}


def test_layers_that_each_rank_drops_by_chance_of_its_own() -> None:
    """No single process draws like this; the strategies must agree with each other."""
    strategies = ["ddp", "zero1_torch", "fsdp", "fsdp_zero2"]
    for outcomes in run_ranks(random_layer_losses, 2, strategies):
        for losses, error, _ in outcomes.values():
            assert error is None
            assert losses == pytest.approx(outcomes["ddp"][0], abs=2e-6)
            assert losses[-1] != losses[0]
        assert any("(a random number of Python)" in note for note in outcomes["fsdp"][2])
        assert any("find_unused_parameters=true" in note for note in outcomes["ddp"][2])


def without_example(context: RunContext, strategy: str) -> Any:
    """Train without an example batch, so that no route is known in advance."""
    torch.manual_seed(0)
    net = ROUTED["Towers"]()
    keys = {"train.global_batch_size": ROWS, "train.micro_batch_size": 8}
    job = job_from_keys(strategy, keys)
    rows = slice(context.dp_rank * 8, context.dp_rank * 8 + 8)
    try:
        with Engine(net, functional.cross_entropy, sgd, job, context) as engine:
            for step in range(2):
                engine.step(rows_of_batch(rows_of(step), rows))
    except Exception as error:  # noqa: BLE001 - looked at by the test
        return type(error).__name__, str(error), context.rank
    return None


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_without_an_example_other_routes_end_in_a_message(strategy: str) -> None:
    for kind, error, rank in run_ranks(without_example, 2, strategy):
        assert kind == "ConfigError"
        if strategy == "fsdp":
            assert "uses of towers.0: rank 0 1, rank 1 0" in error
            assert "nothing was updated" in error
        else:
            unused_parameter = "towers.1.a.weight" if rank == 0 else "towers.0.a.weight"
            assert f"does not depend on {unused_parameter}" in error
            assert "find_unused_parameters=true" in error
