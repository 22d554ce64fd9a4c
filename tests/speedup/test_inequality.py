"""The inequality of synchronous SGD and its solutions, compared with closed forms."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bigtrain.speedup.inequality import (
    ComputeCost,
    SyncStep,
    Threshold,
    bandwidth_that_pays,
    batch_that_pays,
    ranks_that_pay,
)
from bigtrain.speedup.show import inequality_lines

# Ten samples a second, 8 of them a step; sending the gradients takes a second.
COST = ComputeCost(0.2, 0.1)


def step(ranks: int = 2, batch: int = 8, **changes: float) -> SyncStep:
    seconds = COST.fixed + COST.per_sample * batch
    made = SyncStep(ranks, ranks, batch, seconds, seconds, 1.0, 1.0, 0.01)
    return replace(made, **changes)


def ring(ranks: int, alpha: float, nbytes: float, rate: float, compute: float) -> SyncStep:
    exchange = 2 * (ranks - 1) * (alpha + nbytes / ranks / rate)
    return SyncStep(ranks, ranks, 8, compute, compute, exchange)


def test_an_epoch_takes_what_the_textbook_says():
    half_exposed = step(exposed=0.5)
    assert half_exposed.epoch_seconds(160) == pytest.approx(160 / (2 * 8) * (1.0 + 0.5))
    assert half_exposed.speedup == pytest.approx((160 / 8 * 1.0) / half_exposed.epoch_seconds(160))
    assert half_exposed.pays
    assert not step(exposed=1.0).pays


def test_a_line_goes_through_two_measurements():
    assert ComputeCost.through((8, 1.0), (4, 0.6)) == ComputeCost(pytest.approx(0.2), 0.1)
    assert ComputeCost.through((4, 0.1), (8, 0.9)) == ComputeCost(0.0, pytest.approx(0.9 / 8))
    assert ComputeCost.through((4, 0.9), (8, 0.9)) is None


@pytest.mark.parametrize("exposed", [0.33, 1.0, 2.7])
@pytest.mark.parametrize("slowdown", [1.0, 1.3])
def test_from_the_batch_that_pays_on_it_pays(exposed, slowdown):
    def of_batch(batch: int) -> SyncStep:
        alone = COST.fixed + COST.per_sample * batch
        return step(batch=batch, alone=alone, compute=slowdown * alone, exposed=exposed)

    least = batch_that_pays(of_batch(8), COST).value
    assert least is not None
    assert of_batch(int(least)).pays
    assert least == 1 or not of_batch(int(least) - 1).pays


@pytest.mark.parametrize(("exposed", "whole"), [(1.5, 1.5), (1.2, 1.4), (1.5, 1.2)])
def test_with_the_bandwidth_that_pays_a_step_is_as_long_as_alone(exposed, whole):
    known = step(exposed=exposed, whole=whole, latency=0.2)
    needed = bandwidth_that_pays(known, 1e6).value
    assert needed is not None
    seconds = 0.2 + (whole - 0.2) * 1e6 / needed
    assert seconds + (exposed - whole) == pytest.approx(known.break_even)


def test_the_ranks_that_pay_are_those_of_the_closed_form():
    alpha, nbytes, rate, compute = 1e-3, 5e6, 1e6, 1.7
    least = ranks_that_pay(lambda n: ring(n, alpha, nbytes, rate, compute), range(2, 99)).value
    assert least == math.floor(2 * nbytes / (rate * (compute - 2 * alpha))) + 1


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (batch_that_pays(step(compute=2.1), COST), "2 ranks at once compute 2.10 times as long"),
        (batch_that_pays(step(), None), "twice the samples took no longer"),
        (batch_that_pays(step(workers=1, compute=0.5), COST), "one of the ranks computes"),
        (bandwidth_that_pays(step(workers=1, compute=0.5), 1.0), "one of the ranks computes"),
        (bandwidth_that_pays(step(compute=2.1), 1.0), "so that nothing is gained"),
        (bandwidth_that_pays(step(whole=None), 1.0), "the seconds of the exchange alone are not"),
        (
            bandwidth_that_pays(step(latency=1.0), 1.0),
            "the latency of the messages alone takes 1 s",
        ),
        (bandwidth_that_pays(step(exposed=2.5), 1.0), "waiting for slower ranks, and for cores"),
        (
            ranks_that_pay(lambda n: ring(n, 0.6, 1.0, 1.0, 1.0), range(2, 40)),
            "up to 39 ranks the exchange takes more than they save: the best number",
        ),
        (
            ranks_that_pay(lambda n: step(n, compute=float(n)), range(2, 40)),
            "they share the same processor",
        ),
    ],
)
def test_never_has_a_reason(found, reason):
    assert found.value is None
    assert reason in found.reason


def test_where_no_rank_waits_everything_pays():
    free = step(exposed=-0.1)
    assert batch_that_pays(free, None).value == 1
    assert bandwidth_that_pays(free, 1.0).value == 0


def test_what_pays_now_is_not_called_hopeless():
    """One of the three values may be unknown although the step pays."""
    for current, words in ((step(exposed=0.5), "pays now"), (step(exposed=1.5), "never")):
        thresholds = {
            "batch": batch_that_pays(current, None),
            "bandwidth": bandwidth_that_pays(replace(current, whole=None), 1.0),
            "ranks": Threshold(None, "by forecast none do"),
        }
        first, *lines = inequality_lines("ddp", current, thresholds, None, here=True)
        assert first.endswith("it pays" if current.pays else "it does not pay")
        assert len(lines) == 3
        for line in lines:
            assert ("never" in line) is (words == "never"), line
            assert ("the present value pays" in line) is (words == "pays now"), line
