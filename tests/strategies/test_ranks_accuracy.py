"""Strategies with different numbers learn the digits as well as synchronous replicas do."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest
from support.parity import UNSEEN
from support.ranks import run_ranks

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.setup import open_setup
from bigtrain.job.load import load_job

POINT = 0.01
SEEDS = (0, 1, 2)
STEPS = 240
"""Ten epochs; replicas synchronize every 8 and every 20 steps, so all end with synchronized
weights.
"""


def held_out_accuracies(context, strategy) -> list[float]:
    """The accuracy on held-out digits after a run of the job `digits`, for each seed."""
    accuracies = []
    for seed in SEEDS:
        length = [f"train.steps={STEPS}", "train.epochs=null", f"train.seed={seed}"]
        quiet = [f"{key}={value}" for key, value in UNSEEN.items()]
        job = load_job("digits", strategy, [*length, *quiet])
        parts = open_setup(job, make_plan(job, context.world_size, "cpu"))
        with parts.engine(replace(context, seed=seed)) as engine:
            for batch in parts.training_steps(context, 0):
                if engine.step(batch).step == STEPS:
                    break
            accuracies.append(engine.evaluate(parts.validation_batches(context))["top1"])
    return accuracies


@pytest.fixture(scope="module")
def expected() -> float:
    return mean(run_ranks(held_out_accuracies, 2, "ddp", timeout_s=300)[0])


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("parameter_server_async", 3),
        ("local_sgd", 2),
        ("diloco", 2),
    ],
)
def test_it_is_within_a_point_of_ddp(expected, strategy, ranks):
    """Means of asynchronous runs were 0.7 points below to 0.3 above, so these get a second try."""
    assert expected > 0.96
    tries = 2 if strategy == "parameter_server_async" else 1
    accuracies = (
        run_ranks(held_out_accuracies, ranks, strategy, timeout_s=300)[0] for _ in range(tries)
    )
    assert any(mean(accuracy) >= expected - POINT for accuracy in accuracies)
