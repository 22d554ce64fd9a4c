"""Published figures of schedules and the formulas of `formulas`, compared with the schedules here.

`schedules.orders` simulates torch's schedule tables (torch 2.15), without using any formula.
"""

from __future__ import annotations

import random

import pytest

from bigtrain.errors import ConfigError
from bigtrain.schedules.bubble import StageSeconds, bubble_share, simulate_step
from bigtrain.schedules.in_flight import peak_in_flight
from bigtrain.schedules.orders import (
    SCHEDULES,
    SINGLE_STAGE_SCHEDULES,
    V_SHAPED_SCHEDULES,
    schedule_orders,
)
from published.formulas import in_flight_together, micro_batches_in_flight


def simulate(schedule, pp, micro_batches, v, forward=1.0, inputs=1.0, weights=1.0):
    """Simulate a step in which each stage takes these seconds."""
    seconds = [StageSeconds(forward, inputs, weights)] * (pp * v)
    return simulate_step(schedule_orders(schedule, pp, v, micro_batches), seconds)


def peak_micro_batches(schedule, pp, micro_batches, v):
    """The micro-batches whose activations each rank holds at its peak."""
    return [
        in_flight_together(actions) / v
        for actions in schedule_orders(schedule, pp, v, micro_batches)
    ]


def grid(schedule, rounds=(1, 2, 3, 4, 5, 6, 8, 12, 16)):
    """The combinations of (ranks, micro-batches, stages per rank) that the schedule accepts."""
    counts = (
        (1,)
        if schedule in SINGLE_STAGE_SCHEDULES
        else (2,)
        if schedule in V_SHAPED_SCHEDULES
        else (1, 2, 3)
    )
    for pp in (1, 2, 3, 4, 6):
        for m in rounds:
            for v in counts:
                try:
                    schedule_orders(schedule, pp, v, m)
                except ConfigError:
                    continue
                yield pp, m, v


TABLE = {
    # pp, m: share of 1F1B; interleaved and its peaks; LoopedBFS and its peak; interleaved zero
    # bubble, ZBV and DualPipeV, which have equal bubbles, and their peaks
    (2, 4): (".200", ".111", [2.5, 1.5], 4, ".040", (2, 2, 2.5)),
    (4, 8): (".273", ".158", [5.5, 4.5, 3.5, 2.5], 8, ".059", (4, 4, 4.5)),
    (4, 16): (".158", ".086", [5.5, 4.5, 3.5, 2.5], 16, ".030", (4, 4, 4.5)),
    (8, 32): (".179", ".099", [11.5, 10.5, 9.5, 8.5, 7.5, 6.5, 5.5, 4.5], 32, ".035", (8, 8, 8.5)),
}
SPLIT = ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")


@pytest.mark.parametrize(("pp", "m"), TABLE)
def test_the_table_of_all_schedules(pp, m):
    """Two stages per rank and F = I = W: figures computed earlier, from torch's tables, by
    other code.
    """
    one_f_one_b, interleaved, peaks, looped_peak, split, split_peaks = TABLE[pp, m]

    def share(schedule, v):
        return f"{simulate(schedule, pp, m, v).share:.3f}"[1:]

    assert share("1f1b", 1) == one_f_one_b
    assert share("interleaved_1f1b", 2) == share("looped_bfs", 2) == interleaved
    assert [share(schedule, 2) for schedule in SPLIT] == [split] * 3
    assert peak_micro_batches("interleaved_1f1b", pp, m, 2) == peaks
    assert peak_micro_batches("looped_bfs", pp, m, 2) == [looped_peak] * pp
    for schedule, peak in zip(SPLIT, split_peaks, strict=True):
        assert peak_micro_batches(schedule, pp, m, 2) == [peak] * pp
    # In 1F1B the peak falls with the rank; in the split schedules it does not.
    assert peak_micro_batches("1f1b", pp, m, 1) == [pp - rank for rank in range(pp)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_closed_forms_of_what_is_in_flight(schedule):
    """On every rank, for every combination that the schedule accepts, as in the simulation."""
    cases = list(grid(schedule))
    assert len(cases) > 10
    for pp, m, v in cases:
        closed = [micro_batches_in_flight(schedule, pp, rank, m, v) for rank in range(pp)]
        assert closed == peak_micro_batches(schedule, pp, m, v), (pp, m, v)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_closed_forms_of_the_bubble(schedule):
    """As in the simulation, also for unequal seconds if the formula covers them."""
    draw = random.Random(7)
    tried = refused = 0
    for pp, m, v in grid(schedule):
        whole = (draw.randint(1, 4), draw.randint(4, 9), 0)
        drawn = (tuple(draw.randint(1, 9) for _ in range(3)) for _ in range(3))
        for times in ((1, 1, 1), (1, 2, 0), whole, *drawn):
            try:
                closed = bubble_share(schedule, pp, m, v, *times)
            except ValueError:
                refused += 1
                continue
            tried += 1
            assert closed == pytest.approx(simulate(schedule, pp, m, v, *times).share), (pp, m, v)
    assert schedule in V_SHAPED_SCHEDULES or tried > refused
    assert tried > 20
    assert (refused > 0) == (schedule in SPLIT)


def test_the_forms_refuse_what_the_schedules_refuse():
    for call in (
        lambda: micro_batches_in_flight("1f1b", 4, 0, 2),
        lambda: bubble_share("1f1b", 4, 2),
    ):
        with pytest.raises(ConfigError, match="needs at least 4 micro-batches"):
            call()
    with pytest.raises(ValueError, match="has no closed form; use schedules.bubble"):
        bubble_share("zbv_zero_bubble", 4, 8, 2, 1, 2, 1)


def test_gpipe_and_1f1b():
    """(K-1)/(M+K-1), section 2.3 of arXiv 1811.06965; 1F1B (PipeDream-Flush) has the
    same bubble.
    """
    for pp, m in ((2, 2), (4, 16), (8, 8)):
        for schedule in ("gpipe", "1f1b"):
            assert simulate(schedule, pp, m, 1).share == pytest.approx((pp - 1) / (m + pp - 1))
        assert peak_micro_batches("gpipe", pp, m, 1) == [m] * pp
        # Stage i of 1F1B holds min(m, p - i) micro-batches: arXiv 2006.09503.
        actions = schedule_orders("1f1b", pp, 1, m)
        assert [peak_in_flight(row)[rank] for rank, row in enumerate(actions)] == [
            min(m, pp - rank) for rank in range(pp)
        ]


@pytest.mark.parametrize("v", [1, 2, 3])
def test_interleaved(v):
    """Its bubble is a v-th of 1F1B's, section 2.2 of arXiv 2104.04473; on the first rank it holds
    1 + (p-1)/(pv) times as much, section 4.2.3 of arXiv 2205.05198.
    """
    for pp, m in ((2, 4), (4, 16)):
        whole = 3 * m  # the work of a rank, for any number of stages
        idle = simulate("interleaved_1f1b", pp, m, v, 1 / v, 1 / v, 1 / v).seconds - whole
        assert idle == pytest.approx(3 * (pp - 1) / v)
        first = peak_micro_batches("interleaved_1f1b", pp, m, v)[0]
        assert first == pytest.approx(pp * (1 + (pp - 1) / (pp * v)))


def test_zero_bubble():
    """F = I = W; bubble over work, memory over 1F1B's: the authors' table, and torch's schedules.

    Printed: 1F1B (p-1)/m, ZB1P (p-1)/3m, ZBV 0; memory 1, 1, 1. The first two agree. With ZBV
    no rank waits between its first and its last action, but each begins an F later than the rank
    before it: from the first to the last action of all that is (p-1)F/v, or (p-1)/6m of the work.
    """
    for pp, m in ((2, 8), (4, 12), (8, 32)):

        def over_work(schedule, v, pp=pp, m=m):
            step = simulate(schedule, pp, m, v)
            return (step.seconds - step.busy[0]) / step.busy[0]

        assert over_work("1f1b", 1) == pytest.approx((pp - 1) / m)
        assert over_work("interleaved_zero_bubble", 1) == pytest.approx((pp - 1) / (3 * m))
        assert over_work("zbv_zero_bubble", 2) == pytest.approx((pp - 1) / (6 * m)) != 0
        most = max(peak_micro_batches("1f1b", pp, m, 1))
        assert peak_micro_batches("interleaved_zero_bubble", pp, m, 1) == [most] * pp
        assert peak_micro_batches("zbv_zero_bubble", pp, m, 2) == [most] * pp
        # Unequal seconds: (p-1)(F + B - 2W) with B = I + W, where W is the smallest of the three.
        step = simulate("interleaved_zero_bubble", pp, m, 1, 3, 5, 2)
        assert step.seconds - step.busy[0] == (pp - 1) * (3 + 5 + 2 - 2 * 2)


def test_only_zbv_has_no_bubble_where_ranks_need_not_end_together():
    """In two steps without a wait for all ranks between, the idle time is that of one step."""
    pp, m = 4, 12

    def twice(schedule, v):
        rows = schedule_orders(schedule, pp, v, m)
        again = [tuple(a._replace(micro_batch=a.micro_batch + m) for a in row) for row in rows]
        two_steps = tuple(row + more for row, more in zip(rows, again, strict=True))
        step = simulate_step(two_steps, [StageSeconds(1.0, 1.0, 1.0)] * (pp * v))
        return step.seconds - step.busy[0]

    assert twice("zbv_zero_bubble", 2) == pp - 1
    assert twice("interleaved_zero_bubble", 1) == 2 * (pp - 1)
    assert twice("1f1b", 1) == 2 * 3 * (pp - 1)


def test_sources_disagree_on_dualpipev():
    """Two published bubbles, neither of which equals that of torch's table without overlap.

    DeepSeek's (PP/2-1)(F&B + B - 3W) with PP = 2p chunks, where F&B is a forward and a backward
    pass together; MindSpeed's (PP-1)(F&B + B - W) - F with PP = p (both read). The first equals
    torch's if the forward pass takes no time during a backward pass: F&B = B.
    """
    for pp, m in ((2, 4), (4, 8), (8, 32)):
        step = simulate("dualpipev", pp, m, 2)
        idle = step.seconds - step.busy[0]
        assert idle == pp - 1

        def deepseek(together, pp=pp):
            return (pp - 1) * (together + 2 - 3)

        assert deepseek(together=3) == 2 * (pp - 1) != idle
        assert deepseek(together=2) == idle
        assert (pp - 1) * (3 + 2 - 1) - 1 != idle
        # PP + 1 chunks of activations, which are p + 1/2 of a rank's.
        assert peak_micro_batches("dualpipev", pp, m, 2) == [(2 * pp + 1) / 2] * pp
