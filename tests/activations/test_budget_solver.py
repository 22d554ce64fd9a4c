"""The choice under a budget against enumeration, and against the known programs for chains."""

from __future__ import annotations

import itertools
import math
import random
from functools import cache

import pytest

from bigtrain.activations import budget_solver
from bigtrain.activations.budget_solver import (
    BudgetSolution,
    PolicyCost,
    fastest_within,
    lowest_peak,
    solution_peak,
)


def enumerated(menu, room, tail, waiting):
    """The least (seconds, peak) inside the room, of all there are."""
    found = None
    for picks in itertools.product(*(range(len(prices)) for prices in menu)):
        peak = solution_peak(menu, picks, tail, waiting)
        seconds = sum(prices[pick].seconds for prices, pick in zip(menu, picks, strict=True))
        if peak <= room and (found is None or (seconds, peak) < found):
            found = (seconds, peak)
    return found


@pytest.mark.parametrize("seed", range(300))
def test_it_is_the_best_of_all(seed):
    rng = random.Random(seed)
    menu = [
        [
            PolicyCost(rng.randint(0, 20), rng.randint(0, 60), rng.choice([0, 1, 2, 3.5]))
            for _ in range(rng.randint(1, 4))
        ]
        for _ in range(rng.randint(1, 6))
    ]
    room, tail, waiting = rng.randint(5, 200), rng.randint(0, 30), rng.choice([0, 0, 1, 3])
    answer = fastest_within(menu, room, tail, waiting)
    expected = enumerated(menu, room, tail, waiting)
    if expected is None:
        assert answer is None
        assert lowest_peak(menu, tail, waiting).peak > room
    else:
        assert answer is not None
        assert (answer.seconds, answer.peak) == expected
        assert solution_peak(menu, answer.picks, tail, waiting) == answer.peak
        assert lowest_peak(menu, tail, waiting).peak <= answer.peak


@pytest.mark.parametrize("blocks", [60, pytest.param(200, marks=pytest.mark.full)])
def test_many_different_blocks_with_five_choices_are_chosen_for_in_seconds(blocks):
    rng = random.Random(1)
    menu = [
        [
            PolicyCost(rng.randint(1, 10**9), rng.randint(10**9, 2 * 10**9), rng.random())
            for _ in range(5)
        ]
        for _ in range(blocks)
    ]
    least = lowest_peak(menu, num_waiting=3).peak
    answer = fastest_within(menu, int(1.5 * least), num_waiting=3)
    assert answer is not None
    assert answer.peak <= 1.5 * least


def test_rounding_beyond_the_largest_front_stays_inside_the_room(monkeypatch):
    rng = random.Random(2)
    menu = [
        [
            PolicyCost(rng.randint(1, 10**6), rng.randint(10**6, 2 * 10**6), rng.random())
            for _ in "abc"
        ]
        for _ in range(30)
    ]
    room = int(1.4 * lowest_peak(menu).peak)
    exact = fastest_within(menu, room)
    monkeypatch.setattr(budget_solver, "MAX_FRONT", 200)
    rounded = fastest_within(menu, room)
    assert isinstance(exact, BudgetSolution)
    assert isinstance(rounded, BudgetSolution)
    assert solution_peak(menu, rounded.picks) <= room
    assert exact.seconds <= rounded.seconds <= 1.15 * exact.seconds


# A chain of n equal blocks: each makes `boundary` bytes for the next one and keeps `inside` bytes
# more if it keeps everything; forward takes 1, backward 2.


def chain(n, boundary, inside):
    keep = PolicyCost(boundary + inside, boundary + inside + boundary, 0.0)
    full = PolicyCost(boundary, boundary + inside + boundary, 1.0)
    return [[keep, full]] * n


def rotor(n, boundary, inside, room):
    """The least extra forward passes of a chain, over all ways to compute parts of it again.

    Beaumont et al. 2019 (arXiv 1911.13214), the recursion of their theorem: either the first
    block keeps everything, or the chain is gone through to some block, of which the input is
    kept, without keeping anything before it, and what was left out is done again afterwards.
    """

    @cache
    def least(start, stop, left):
        if stop == start:
            return 0.0 if left >= boundary + inside + boundary else math.inf
        best = math.inf
        if left >= 2 * boundary + inside:
            best = least(start + 1, stop, left - boundary - inside)
        for middle in range(start + 1, stop + 1):
            if left >= 2 * boundary:
                again = middle - start
                behind = least(middle, stop, left - boundary)
                best = min(best, again + behind + least(start, middle - 1, left))
        return best

    return least(0, n - 1, room)


def test_beside_the_optimal_program_for_chains():
    """Never better than Rotor, which may compute a block more than once; and seldom worse.

    Where what is inside of a block weighs 16 times its boundary, as in a transformer (34 bytes
    to 2 for each number, Korthikanti et al. 2022), from the peak of full checkpointing on both
    take the same time, but for the last block, of which Rotor knows that it need not be done
    twice, and for what computing several blocks at once saves in boundaries.
    """
    n, boundary, inside = 12, 1, 16
    menu = chain(n, boundary, inside)
    floor = lowest_peak(menu).peak
    for room in range(floor, n * (boundary + inside) + boundary + 1):
        ours = fastest_within(menu, room)
        assert ours is not None
        best = rotor(n, boundary, inside, room)
        assert best <= ours.seconds <= best + 1


def test_beside_the_square_root_rule():
    """Below n boundaries blocks would have to be computed again in groups: we refuse there.

    The rule keeps a boundary after each √n-th block, and needs 2√n times a block's bytes where
    boundary and inside weigh the same (Chen et al. 2016); a budget that it fits into and ours
    does not is below the lowest peak that is named.
    """
    n, boundary, inside = 100, 1, 99
    menu = chain(n, boundary, inside)
    rule = 2 * math.isqrt(n) * (boundary + inside)
    answer = fastest_within(menu, rule)
    assert answer is not None  # 100 boundaries are less than the rule's ten groups of ten
    assert answer.seconds < n - math.isqrt(n) + 1  # the rule computes all but the last group again
    assert lowest_peak(menu).peak < rule


def test_ties_go_to_the_lower_peak():
    menu = [[PolicyCost(5, 9, 1.0), PolicyCost(3, 9, 1.0)], [PolicyCost(4, 6, 0.0)]]
    answer = fastest_within(menu, 100)
    assert answer is not None
    assert answer.picks == (1, 0)
