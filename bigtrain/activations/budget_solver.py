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
    menu: Sequence[Sequence[PolicyCost]], room: int, tail: int = 0, waiting: int = 0
) -> BudgetSolution | None:
    """The answer of the least time whose peak is inside the room; of those, the lowest peak.

    Exact but for rounding beyond `MAX_FRONT` answers.

    Args:
        menu: for each block, in the order of the forward pass, its prices.
        room: bytes above what there is at the start of the first block.
        tail: bytes at the highest moment after the last block, above what there was at its end.
        waiting: other micro-batches that have gone through all blocks and wait meanwhile.

    Returns:
        None where even the lowest peak is above the room.
    """
    inside = [s for s in _pareto_front(menu, room, tail, waiting) if _peak(s, waiting) <= room]
    best = min(inside, key=lambda s: (s.seconds, _peak(s, waiting)), default=None)
    return None if best is None else _solution(best, waiting)


def lowest_peak(
    menu: Sequence[Sequence[PolicyCost]], tail: int = 0, waiting: int = 0
) -> BudgetSolution:
    """The answer of the lowest peak; of those, the one of the least time."""
    states = _pareto_front(menu, None, tail, waiting)
    return _solution(min(states, key=lambda s: (_peak(s, waiting), s.seconds)), waiting)


def solution_peak(
    menu: Sequence[Sequence[PolicyCost]], picks: Sequence[int], tail: int = 0, waiting: int = 0
) -> int:
    """The peak of given prices, in bytes as `BudgetSolution.peak`."""
    held, highest = 0, 0
    for prices, pick in zip(menu, picks, strict=True):
        highest = max(highest, held + prices[pick].peak)
        held += prices[pick].saved
    return max(highest, held + tail) + waiting * held


def _peak(state: _State, waiting: int) -> int:
    return state.peak + waiting * state.saved


def _solution(state: _State, waiting: int) -> BudgetSolution:
    return BudgetSolution(tuple(_picked(state.picks)), _peak(state, waiting), state.seconds)


def _picked(link: Any) -> Iterator[int]:
    while link:
        pick, link = link
        yield pick


def _pareto_front(
    menu: Sequence[Sequence[PolicyCost]], room: int | None, tail: int, waiting: int
) -> list[_State]:
    least = [min(price.saved for price in prices) for prices in menu]
    before = sum(least)
    front = [_State(tail, 0, 0.0, ())]
    for prices, smallest in zip(reversed(menu), reversed(least), strict=True):
        before -= smallest
        grown = []
        for pick, price in enumerate(prices):
            for state in front:
                saved = price.saved + state.saved
                peak = max(price.peak, price.saved + state.peak)
                # Whatever the blocks before do, they keep this much.
                if room is not None and before + peak + waiting * (before + saved) > room:
                    continue
                seconds = price.seconds + state.seconds
                grown.append(_State(peak, saved, seconds, (pick, state.picks)))
        front = _undominated(grown, waiting)
        if len(front) > MAX_FRONT:
            front = _undominated(_rounded(front), waiting)
    return front


def _undominated(states: list[_State], waiting: int) -> list[_State]:
    """Those that no other beats in time and peak, and, where some wait, in what is saved."""
    states.sort(key=lambda s: (s.seconds, s.peak, s.saved))
    kept: list[_State] = []
    if waiting == 0:
        for state in states:
            if not kept or state.peak < kept[-1].peak:
                kept.append(state)
        return kept
    # By ascending time: of those before, only the pairs of peak and saved that are not beaten.
    stairs: list[tuple[int, int]] = []  # peak ascending, saved descending
    for state in states:
        if not any(peak <= state.peak and saved <= state.saved for peak, saved in stairs):
            kept.append(state)
            stairs = [s for s in stairs if not (state.peak <= s[0] and state.saved <= s[1])]
            stairs.append((state.peak, state.saved))
    return kept


def _rounded(states: list[_State]) -> list[_State]:
    """Peaks and saved bytes up to a grid, so that near answers become one."""
    grain = max(1, max(state.peak for state in states) // (MAX_FRONT // 4))
    return [
        state._replace(peak=-(-state.peak // grain) * grain, saved=-(-state.saved // grain) * grain)
        for state in states
    ]
