"""What each way to run a block costs, read off the forecasts of one rank.

For each choice a rank is forecast with all its blocks choosing it. What a block saves is then the
difference between what is alive when it ends and when it begins, and what it needs is the highest
moment of its forward or backward pass above its beginning. Shards that are gathered, buckets and
gradients are in the forecasts and so in the prices.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bigtrain.activations.budget_solver import PolicyCost, solution_peak
from bigtrain.activations.policy import BlockPolicy
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.memory.timeline import BlockTicks, Timeline
from bigtrain.prediction.operation_log import BlockCost

OFFLOAD_BYTES_PER_SECOND = {"cpu": 2.5e10, "disk": 1e9, "device": math.inf}
"""Bytes to the host over PCIe 4, and to a common solid-state disk: orders of magnitude."""


@dataclass(frozen=True)
class BudgetProblem:
    """The blocks of a rank in the order of the forward pass, with their prices."""

    names: tuple[str, ...]
    policy_costs: tuple[tuple[PolicyCost, ...], ...]
    """For each block one price for each choice."""
    policies: tuple[BlockPolicy, ...]
    tail: int
    waiting: int
    base: int
    """Bytes when the first block begins, states included."""

    @property
    def solver_arguments(self) -> tuple[tuple[tuple[PolicyCost, ...], ...], int, int]:
        """What `budget.lowest` takes."""
        return self.policy_costs, self.tail, self.waiting


@dataclass(frozen=True)
class UniformForecast:
    """A rank whose blocks all made one choice."""

    forecast: Forecast
    """Of the whole step."""
    stages: tuple[tuple[Profile, Forecast], ...]
    """Of one micro-batch through each of its stages."""

    @property
    def highest(self) -> int:
        """Bytes at the highest moment of the micro-batches; the optimizer's step is left out."""
        step = Timeline((), self.forecast.step.phases)
        return replace(self.forecast, step=step).peak().bytes


def make_budget_problem(
    seen: Mapping[BlockPolicy, UniformForecast],
    costs: Mapping[str, BlockCost],
    *,
    waiting: int = 0,
    place: str = "disk",
) -> BudgetProblem:
    """Read the prices off the forecasts.

    Args:
        seen: by choice; `keep` is one of them.
        costs: of the blocks.
        waiting: other micro-batches that wait on the rank meanwhile.
        place: where what is moved goes.
    """
    blocks_by_policy = {choice: _Blocks.of(found) for choice, found in seen.items()}
    names = tuple(blocks_by_policy["keep"].saved)
    menu = []
    for name in names:
        kept_bytes = blocks_by_policy["keep"].saved[name]
        menu.append(
            tuple(
                PolicyCost(
                    found.saved[name],
                    found.highest[name],
                    _seconds(choice, costs[name], kept_bytes - found.saved[name], place),
                )
                for choice, found in blocks_by_policy.items()
            )
        )
    tail = max(found.tail for found in blocks_by_policy.values())
    # Where choices do not quite add up the lowest is taken: what is chosen so is proven, and the
    # room made smaller until it holds.
    base = min(
        found.highest - solution_peak(menu, [place] * len(names), tail, waiting)
        for place, found in enumerate(seen.values())
    )
    return BudgetProblem(names, tuple(menu), tuple(seen), tail, waiting, base)


def saved_bytes(profile: Profile, predicted: Forecast) -> dict[str, int]:
    """What each followed block adds to what is alive, from its forward to its backward pass."""
    _, saved, _, _ = _read(profile, predicted.passes["first"], predicted.states.total)
    return saved


def _seconds(choice: BlockPolicy, cost: BlockCost, moved_bytes: int, tier: str) -> float:
    """What a choice adds. Copies run beside the computation; what does not fit is waited for."""
    transfer_seconds = 2 * max(0.0, moved_bytes / OFFLOAD_BYTES_PER_SECOND[tier] - cost.whole)
    return {
        "keep": 0.0,
        "selective": cost.between,
        "full": cost.whole,
        "offload": transfer_seconds,
        "full_offload": cost.whole + transfer_seconds,
    }[choice]


@dataclass(frozen=True)
class _Blocks:
    """What the blocks save and need where all choose alike."""

    saved: dict[str, int]
    highest: dict[str, int]
    tail: int

    @classmethod
    def of(cls, seen: UniformForecast) -> _Blocks:
        saved: dict[str, int] = {}
        highest: dict[str, int] = {}
        tail = 0
        for profile, predicted in seen.stages:
            passes = [(predicted.passes["first"], predicted.states.total)]
            if predicted.micro_batches > 1:
                held_bytes = predicted.states.total + (
                    0 if predicted.states.gradients else predicted.gradients
                )
                passes.append((predicted.passes["later"], held_bytes))
            readings = [_read(profile, timeline, held_bytes) for timeline, held_bytes in passes]
            base = max(begin for begin, _, _, _ in readings)
            for begin, saved_of, peak_of_block, end in readings:
                offset = begin - base  # a pass that starts lower ends lower
                for name, size in saved_of.items():
                    saved[name] = max(saved.get(name, size), size)
                    highest[name] = max(highest.get(name, 0), peak_of_block[name] + offset)
                tail = max(tail, end + offset)
        return cls(saved, highest, tail)


def _read(
    profile: Profile, timeline: Timeline, held_bytes: int
) -> tuple[int, dict[str, int], dict[str, int], int]:
    """Bytes at the first block's start; saved and highest by block; the highest after the last."""
    curve = _MemoryCurve(timeline)
    is_second = timeline.phases[0][0] != profile.passes["first"].phases[0][0]
    visits = [(name, again if is_second else first) for name, first, again in profile.windows]
    if not visits:
        return held_bytes + curve.at(curve.end), {}, {}, 0
    starts = [visit.forward[0] for _, visit in visits]
    stops = [*starts[1:], visits[-1][1].forward[1]]
    backward_ranges = _backward(visits, curve.end)
    saved, highest = {}, {}
    for (name, _), begin, stop, backward_range in zip(
        visits, starts, stops, backward_ranges, strict=True
    ):
        bytes_at_start = curve.at(begin)
        saved[name] = curve.at(stop) - bytes_at_start
        highest[name] = max(curve.most(begin, stop), curve.most(*backward_range)) - bytes_at_start
    end = stops[-1]
    tail = curve.most(end, max(end, backward_ranges[-1][0])) - curve.at(end)
    return held_bytes + curve.at(starts[0]), saved, highest, tail


def _backward(visits: Sequence[tuple[str, BlockTicks]], end: int) -> list[tuple[int, int]]:
    """From where each block's backward pass begins to where that of the block before does."""
    starts = [visit.backward[0] for _, visit in visits]
    return [
        (start, max(start, before))
        for start, before in zip(starts, [end, *starts[:-1]], strict=True)
    ]


class _MemoryCurve:
    """Bytes alive at each tick of a timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self._ticks, self._alive = timeline.steps()
        # Deaths after the last tick of a pass only say that something outlives it.
        self.end = max((span.birth for span in timeline.spans), default=0) + 1

    def at(self, tick: int) -> int:
        """Bytes at a tick."""
        index = bisect_right(self._ticks, tick) - 1
        return self._alive[index] if index >= 0 else 0

    def most(self, start: int, stop: int) -> int:
        """The most bytes at the ticks from one to another, both included."""
        first = bisect_right(self._ticks, start)
        last = bisect_right(self._ticks, stop)
        return max([self.at(start), *self._alive[first:last]])
