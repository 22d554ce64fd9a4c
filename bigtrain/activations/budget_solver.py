"""Which block keeps what, so that a pass stays inside a budget at the least extra time: exactly.

On a chain of blocks the peak has a simple shape. While block i works, forward or backward, what
is alive is what the blocks before it have kept, and what itself needs at its highest moment. So
the peak from block i on, counted from its start, is

    peak(i) = max(highest(i), saved(i) + peak(i + 1)),    peak(n) = tail

and so is the time. Going from the last block to the first, the pairs of peak and time that no
other beats in both are all that can still be part of the best answer. Where further micro-batches
wait meanwhile, each with all that its blocks have saved, that sum is a third number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

MAX_FRONT = 20_000
"""Answers that are followed at once. Only beyond this number peaks are rounded, and up."""


@dataclass(frozen=True)
class PolicyCost:
    """What one way to run a block costs."""

    saved: int
    """Bytes that stay from its forward to its backward pass."""
    peak: int
    """Bytes at its highest moment, forward or backward, above what there was at its start."""
    seconds: float
    """On top of what the block takes when it keeps everything."""


class BudgetSolution(NamedTuple):
    """One price for each block."""

    picks: tuple[int, ...]
    peak: int
    """Bytes above what there was at the first block's start, waiting micro-batches included."""
    seconds: float


class _State(NamedTuple):
    peak: int
    saved: int
    seconds: float
    picks: Any
    """A pick and those of the blocks after it, nested: shared by all answers that end alike."""


def fastest_within(
    policy_costs: Sequence[Sequence[PolicyCost]],
    limit: int,
    tail_bytes: int = 0,
    num_waiting: int = 0,
) -> BudgetSolution | None:
    """The answer of the least time whose peak is inside the room; of those, the lowest peak.

    Exact but for rounding beyond `MAX_FRONT` answers.

    Args:
        policy_costs: for each block, in the order of the forward pass, its prices.
        limit: bytes above what there is at the start of the first block.
        tail_bytes: bytes at the highest moment after the last block, above those at its end.
        num_waiting: other micro-batches that have gone through all blocks and wait meanwhile.

    Returns:
        None where even the lowest peak is above the room.
    """
    feasible = [
        s
        for s in _pareto_front(policy_costs, limit, tail_bytes, num_waiting)
        if _peak(s, num_waiting) <= limit
    ]
    best = min(feasible, key=lambda s: (s.seconds, _peak(s, num_waiting)), default=None)
    return None if best is None else _solution(best, num_waiting)


def lowest_peak(
    policy_costs: Sequence[Sequence[PolicyCost]], tail_bytes: int = 0, num_waiting: int = 0
) -> BudgetSolution:
    """The answer of the lowest peak; of those, the one of the least time."""
    states = _pareto_front(policy_costs, None, tail_bytes, num_waiting)
    return _solution(min(states, key=lambda s: (_peak(s, num_waiting), s.seconds)), num_waiting)


def solution_peak(
    policy_costs: Sequence[Sequence[PolicyCost]],
    picks: Sequence[int],
    tail_bytes: int = 0,
    num_waiting: int = 0,
) -> int:
    """The peak of given prices, in bytes as `BudgetSolution.peak`."""
    held, highest = 0, 0
    for prices, pick in zip(policy_costs, picks, strict=True):
        highest = max(highest, held + prices[pick].peak)
        held += prices[pick].saved
    return max(highest, held + tail_bytes) + num_waiting * held


def _peak(state: _State, num_waiting: int) -> int:
    return state.peak + num_waiting * state.saved


def _solution(state: _State, num_waiting: int) -> BudgetSolution:
    return BudgetSolution(tuple(_picked(state.picks)), _peak(state, num_waiting), state.seconds)


def _picked(link: Any) -> Iterator[int]:
    while link:
        pick, link = link
        yield pick


def _pareto_front(
    policy_costs: Sequence[Sequence[PolicyCost]],
    limit: int | None,
    tail_bytes: int,
    num_waiting: int,
) -> list[_State]:
    least = [min(price.saved for price in prices) for prices in policy_costs]
    least_before = sum(least)
    front = [_State(tail_bytes, 0, 0.0, ())]
    for prices, least_saved in zip(reversed(policy_costs), reversed(least), strict=True):
        least_before -= least_saved
        extended = []
        for pick, price in enumerate(prices):
            for state in front:
                saved = price.saved + state.saved
                peak = max(price.peak, price.saved + state.peak)
                # Whatever the blocks before do, they keep this much.
                if (
                    limit is not None
                    and least_before + peak + num_waiting * (least_before + saved) > limit
                ):
                    continue
                seconds = price.seconds + state.seconds
                extended.append(_State(peak, saved, seconds, (pick, state.picks)))
        front = _undominated(extended, num_waiting)
        if len(front) > MAX_FRONT:
            front = _undominated(_rounded(front), num_waiting)
    return front


def _undominated(states: list[_State], num_waiting: int) -> list[_State]:
    """Those that no other beats in time and peak, and, where some wait, in what is saved."""
    states.sort(key=lambda s: (s.seconds, s.peak, s.saved))
    undominated: list[_State] = []
    if num_waiting == 0:
        for state in states:
            if not undominated or state.peak < undominated[-1].peak:
                undominated.append(state)
        return undominated
    # By ascending time: of those before, only the pairs of peak and saved that are not beaten.
    frontier: list[tuple[int, int]] = []  # peak ascending, saved descending
    for state in states:
        if not any(peak <= state.peak and saved <= state.saved for peak, saved in frontier):
            undominated.append(state)
            frontier = [s for s in frontier if not (state.peak <= s[0] and state.saved <= s[1])]
            frontier.append((state.peak, state.saved))
    return undominated


def _rounded(states: list[_State]) -> list[_State]:
    """Peaks and saved bytes up to a grid, so that near answers become one."""
    step = max(1, max(state.peak for state in states) // (MAX_FRONT // 4))
    return [
        state._replace(peak=-(-state.peak // step) * step, saved=-(-state.saved // step) * step)
        for state in states
    ]
