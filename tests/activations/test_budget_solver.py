"""The solver of the recomputation budget, against enumeration and known programs for chains."""

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


def enumerate_choices(menu, room, tail, waiting):
    """The least (seconds, peak) within `room`, among all combinations of choices."""
    best = None
    for picks in itertools.product(*(range(len(prices)) for prices in menu)):
        peak = solution_peak(menu, picks, tail, waiting)
        seconds = sum(prices[pick].seconds for prices, pick in zip(menu, picks, strict=True))
        if peak <= room and (best is None or (seconds, peak) < best):
            best = (seconds, peak)
    return best


@pytest.mark.parametrize("seed", range(300))
def test_it_is_the_best_of_all(seed):
    """The answer is the optimum of all combinations."""
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
    expected = enumerate_choices(menu, room, tail, waiting)
    if expected is None:
        assert answer is None
        assert lowest_peak(menu, tail, waiting).peak > room
    else:
        assert answer is not None
        assert (answer.seconds, answer.peak) == expected
        assert solution_peak(menu, answer.picks, tail, waiting) == answer.peak
        assert lowest_peak(menu, tail, waiting).peak <= answer.peak


@pytest.mark.parametrize("blocks", [60, 200])
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


# A chain of n equal blocks: each passes `boundary` bytes to the next one and saves `inside` more
# bytes if it saves everything; its forward pass takes 1 second, its backward pass 2.


def chain(n, boundary, inside):
    """n equal blocks, which may save everything or be recomputed."""
    keep = PolicyCost(boundary + inside, boundary + inside + boundary, 0.0)
    full = PolicyCost(boundary, boundary + inside + boundary, 1.0)
    return [[keep, full]] * n


def rotor(n, boundary, inside, room):
    """The least number of extra forward passes of a chain, over all recomputation programs.

    Beaumont et al. 2019 (arXiv 1911.13214), the recursion of their theorem: either the first block
    saves everything, or the chain runs forward to some block and saves only that block's input, and
    the skipped blocks are computed again afterwards.
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
    """Never better than Rotor, which may recompute a block more than once, and seldom worse.

    If the inside of a block is 16 times its boundary, as in a transformer (34 bytes to 2 per
    number, Korthikanti et al. 2022), both take the same time for every budget from the peak of full
    checkpointing upwards, with two exceptions: Rotor knows that the last block need not be
    recomputed, and computing several blocks at once saves boundaries.
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
    """A budget below n boundaries would need nested recomputation, which we refuse.

    The rule saves a boundary after every √n-th block, and needs 2√n times a block's bytes if
    boundary and inside are equal (Chen et al. 2016); a budget that is enough for the rule and not
    for ours is below the lowest peak that the refusal names.
    """
    n, boundary, inside = 100, 1, 99
    menu = chain(n, boundary, inside)
    rule = 2 * math.isqrt(n) * (boundary + inside)
    answer = fastest_within(menu, rule)
    assert answer is not None  # 100 boundaries need less than ten groups of ten blocks
    assert answer.seconds < n - math.isqrt(n) + 1  # the rule recomputes all but the last group
    assert lowest_peak(menu).peak < rule


def test_ties_go_to_the_lower_peak():
    menu = [[PolicyCost(5, 9, 1.0), PolicyCost(3, 9, 1.0)], [PolicyCost(4, 6, 0.0)]]
    answer = fastest_within(menu, 100)
    assert answer is not None
    assert answer.picks == (1, 0)
