"""Read the bytes and seconds of each policy of a block off the forecasts of one rank.

There is one forecast for each policy, in which all blocks of the rank have this policy. The saved
bytes of a block are the live bytes at its end less those at its start. Its needed bytes are the
peak of its forward or backward pass less the live bytes at its start. The forecasts, and so the
prices, include gathered shards, buckets and gradients.
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
"""Bytes per second to the host over PCIe 4 and to a solid-state disk, as orders of magnitude."""


@dataclass(frozen=True)
class BudgetProblem:
    """The blocks of a rank in the order of the forward pass, with the cost of each policy."""

    names: tuple[str, ...]
    """The names of the blocks."""
    policy_costs: tuple[tuple[PolicyCost, ...], ...]
    """For each block, the cost of each of `policies`."""
    policies: tuple[BlockPolicy, ...]
    tail: int
    """Bytes at the peak after the last block, in addition to those at its end."""
    waiting: int
    """The number of other micro-batches whose activations the rank holds."""
    base: int
    """Live bytes when the first block begins, with all states."""

    @property
    def solver_arguments(self) -> tuple[tuple[tuple[PolicyCost, ...], ...], int, int]:
        """The arguments of `budget_solver.lowest_peak`."""
        return self.policy_costs, self.tail, self.waiting


@dataclass(frozen=True)
class UniformForecast:
    """The forecast of a rank whose blocks all have one policy."""

    forecast: Forecast
    """The forecast of the whole step."""
    stages: tuple[tuple[Profile, Forecast], ...]
    """For each stage of the rank, the profile and the forecast of one micro-batch."""

    @property
    def highest(self) -> int:
        """The peak bytes during micro-batches, without the optimizer's step."""
        step = Timeline((), self.forecast.step.phases)
        return replace(self.forecast, step=step).peak().bytes


def make_budget_problem(
    seen: Mapping[BlockPolicy, UniformForecast],
    costs: Mapping[str, BlockCost],
    *,
    waiting: int = 0,
    place: str = "disk",
) -> BudgetProblem:
    """Make the input of the solver from the forecasts.

    Args:
        seen: the forecast of each policy; it must have "keep".
        costs: the seconds of each block, by name.
        waiting: the number of other micro-batches whose activations the rank holds.
        place: the tier to which activations are offloaded: "cpu", "disk" or "device".
    """
    blocks_by_policy = {choice: _Blocks.of(forecast) for choice, forecast in seen.items()}
    names = tuple(blocks_by_policy["keep"].saved)
    menu = []
    for name in names:
        kept_bytes = blocks_by_policy["keep"].saved[name]
        menu.append(
            tuple(
                PolicyCost(
                    forecast.saved[name],
                    forecast.highest[name],
                    _seconds(choice, costs[name], kept_bytes - forecast.saved[name], place),
                )
                for choice, forecast in blocks_by_policy.items()
            )
        )
    tail = max(forecast.tail for forecast in blocks_by_policy.values())
    # The base may differ a little between policies, because costs of blocks do not add up exactly.
    # The lowest is safe: each choice is checked by a forecast, and the budget of the solver is
    # lowered until a forecast is within the limit.
    base = min(
        forecast.highest - solution_peak(menu, [place] * len(names), tail, waiting)
        for place, forecast in enumerate(seen.values())
    )
    return BudgetProblem(names, tuple(menu), tuple(seen), tail, waiting, base)


def saved_bytes(profile: Profile, predicted: Forecast) -> dict[str, int]:
    """Return the bytes that each block saves from its forward to its backward pass, by name."""
    _, saved, _, _ = _read(profile, predicted.passes["first"], predicted.states.total)
    return saved


def _seconds(choice: BlockPolicy, cost: BlockCost, moved_bytes: int, tier: str) -> float:
    """Return the seconds that a policy adds; a copy adds those by which it outlasts compute."""
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
    """The bytes that blocks save and need if all have one policy."""

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
                offset = begin - base  # passes differ in the live bytes at their start
                for name, size in saved_of.items():
                    saved[name] = max(saved.get(name, size), size)
                    highest[name] = max(highest.get(name, 0), peak_of_block[name] + offset)
                tail = max(tail, end + offset)
        return cls(saved, highest, tail)


def _read(
    profile: Profile, timeline: Timeline, held_bytes: int
) -> tuple[int, dict[str, int], dict[str, int], int]:
    """Read bytes off the timeline of a forward and a backward pass.

    Returns:
        The bytes at the first block's start; the saved bytes and the needed bytes of each block;
        the bytes at the peak after the last block, in addition to those at its end.
    """
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
    """Return the ticks of each block's backward pass.

    The ticks begin with this pass, and end where the backward pass of the block before it in the
    model begins.
    """
    starts = [visit.backward[0] for _, visit in visits]
    return [
        (start, max(start, before))
        for start, before in zip(starts, [end, *starts[:-1]], strict=True)
    ]


class _MemoryCurve:
    """The live bytes at each tick of a timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self._ticks, self._alive = timeline.steps()
        # The last birth is in the pass. The death of a tensor that outlives the pass is later.
        self.end = max((span.birth for span in timeline.spans), default=0) + 1

    def at(self, tick: int) -> int:
        """Return the live bytes at a tick."""
        index = bisect_right(self._ticks, tick) - 1
        return self._alive[index] if index >= 0 else 0

    def most(self, start: int, stop: int) -> int:
        """Return the most live bytes between two ticks, both included."""
        first = bisect_right(self._ticks, start)
        last = bisect_right(self._ticks, stop)
        return max([self.at(start), *self._alive[first:last]])
