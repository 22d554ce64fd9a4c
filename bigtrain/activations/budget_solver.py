"""Choose a policy for each block so that a pass fits a budget in the least extra time, exactly.

The peak of a chain of blocks has a simple form. While block i runs, forward or backward, the
tensors saved by the blocks before it are alive, and so are its own tensors, at most highest(i)
bytes. So the peak from block i on, in addition to the bytes at its start, is

    peak(i) = max(highest(i), saved(i) + peak(i + 1)),    peak(n) = tail

and seconds add up in the same order. From the last block to the first, the solver stores the pairs
of peak and seconds that no other pair dominates: only these can be part of the best solution. If
further micro-batches wait, each with all tensors that its blocks have saved, the saved bytes are a
third criterion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

MAX_FRONT = 20_000
"""The most partial solutions that are stored exactly; with more, bytes are rounded up."""


@dataclass(frozen=True)
class PolicyCost:
    """The cost of one policy for one block."""

    saved: int
    """Bytes saved from the forward to the backward pass."""
    peak: int
    """Bytes at the peak of the block, forward or backward, in addition to those at its start."""
    seconds: float
    """Seconds in addition to those of a block that saves everything."""


class BudgetSolution(NamedTuple):
    """One policy for each block, by its index among the block's costs."""

    picks: tuple[int, ...]
    peak: int
    """Bytes at the peak, in addition to those at the first block's start; waiting micro-batches are
    included."""
    seconds: float


class _State(NamedTuple):
    peak: int
    saved: int
    seconds: float
    picks: Any
    """A pick and the picks of the later blocks, as nested pairs, which solutions can share."""


def fastest_within(
    policy_costs: Sequence[Sequence[PolicyCost]],
    limit: int,
    tail_bytes: int = 0,
    num_waiting: int = 0,
) -> BudgetSolution | None:
    """Return the fastest solution whose peak is within a limit; ties go to the lowest peak.

    The solution is optimal unless there are more than `MAX_FRONT` partial solutions: then their
    peaks and saved bytes are rounded up.

    Args:
        policy_costs: by block, in the order of the forward pass, the costs of its policies.
        limit: the most bytes of a peak, in addition to those at the start of the first block.
        tail_bytes: bytes at the peak after the last block, in addition to those at its end.
        num_waiting: the number of other micro-batches that have run all blocks forward and wait
            for their backward pass.

    Returns:
        None if even the lowest peak is above the limit.
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
    """Return the solution of lowest peak; of several, the fastest. See `fastest_within`."""
    states = _pareto_front(policy_costs, None, tail_bytes, num_waiting)
    return _solution(min(states, key=lambda s: (_peak(s, num_waiting), s.seconds)), num_waiting)


def solution_peak(
    policy_costs: Sequence[Sequence[PolicyCost]],
    picks: Sequence[int],
    tail_bytes: int = 0,
    num_waiting: int = 0,
) -> int:
    """Return the peak of given picks, in bytes; see `BudgetSolution.peak`."""
    saved, highest = 0, 0
    for costs, pick in zip(policy_costs, picks, strict=True):
        highest = max(highest, saved + costs[pick].peak)
        saved += costs[pick].saved
    return max(highest, saved + tail_bytes) + num_waiting * saved


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
    least = [min(cost.saved for cost in costs) for costs in policy_costs]
    least_before = sum(least)
    front = [_State(tail_bytes, 0, 0.0, ())]
    for costs, least_saved in zip(reversed(policy_costs), reversed(least), strict=True):
        least_before -= least_saved
        extended = []
        for pick, cost in enumerate(costs):
            for state in front:
                saved = cost.saved + state.saved
                peak = max(cost.peak, cost.saved + state.peak)
                # The blocks before save at least this much.
                if (
                    limit is not None
                    and least_before + peak + num_waiting * (least_before + saved) > limit
                ):
                    continue
                seconds = cost.seconds + state.seconds
                extended.append(_State(peak, saved, seconds, (pick, state.picks)))
        front = _undominated(extended, num_waiting)
        if len(front) > MAX_FRONT:
            front = _undominated(_rounded(front), num_waiting)
    return front


def _undominated(states: list[_State], num_waiting: int) -> list[_State]:
    """Return the states that no other dominates in seconds, peak and, if some wait, saved bytes."""
    states.sort(key=lambda s: (s.seconds, s.peak, s.saved))
    undominated: list[_State] = []
    if num_waiting == 0:
        for state in states:
            if not undominated or state.peak < undominated[-1].peak:
                undominated.append(state)
        return undominated
    # States ascend in seconds, so only the undominated pairs of earlier states matter.
    frontier: list[tuple[int, int]] = []  # peak ascending, saved descending
    for state in states:
        if not any(peak <= state.peak and saved <= state.saved for peak, saved in frontier):
            undominated.append(state)
            frontier = [s for s in frontier if not (state.peak <= s[0] and state.saved <= s[1])]
            frontier.append((state.peak, state.saved))
    return undominated


def _rounded(states: list[_State]) -> list[_State]:
    """Round peaks and saved bytes up to a grid, so that similar states become one."""
    step = max(1, max(state.peak for state in states) // (MAX_FRONT // 4))
    return [
        state._replace(peak=-(-state.peak // step) * step, saved=-(-state.saved // step) * step)
        for state in states
    ]
