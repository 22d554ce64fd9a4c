"""The number of micro-batches that each stage of a candidate has in flight."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from bigtrain.core.strategy import CutStrategy, Plan
from bigtrain.planner.space import Candidate
from bigtrain.schedules.in_flight import (
    SCHEDULES_WAITING_AT_HEAD,
    in_flight_at_peak,
    in_flight_by_stage,
)
from bigtrain.schedules.orders import SCHEDULES, STEADY_SCHEDULES, stage_ranks

STEADY_ROUNDS = 3
"""A schedule's memory repeats itself after this many micro-batches for each rank."""
COUNTED_ROUNDS = 2
"""A schedule's numbers in flight repeat after this many; `dualpipev` needs one more."""
GROWING_SCHEDULES = ("gpipe", "looped_bfs")
"""Schedules in which every micro-batch of a step is in flight at once."""


class HeldMicroBatches:
    """Micro-batches in flight of one candidate, counted when first used, as that takes a while."""

    def __init__(self, plan: Plan, candidate: Candidate) -> None:
        self._is_cut = candidate.stages > 1
        self._schedule = (str(candidate.schedule), candidate.pp, candidate.stages_per_rank)
        self._steps = _counted(plan, str(candidate.schedule))
        self._splits = plan.splits_backward

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The pp rank of each stage."""
        return stage_ranks(*self._schedule)

    @cached_property
    def by_stage(self) -> tuple[int, ...]:
        """The most that each stage has in flight."""
        if not self._is_cut:
            return (1,)
        return in_flight_by_stage(*self._schedule, self._steps, splits=self._splits)

    @cached_property
    def fullest(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Numbers in flight at a rank's fullest moment, of all and of those with gradients.

        Before the first backward pass ends, there are no gradients.
        """
        if not self._is_cut:
            return (1,), (int(self._steps > 1),)
        first, later = (
            in_flight_at_peak(*self._schedule, self._steps, splits=self._splits, later=later)
            for later in (False, True)
        )
        return first, later


def with_fewer_micro_batches(plan: Plan) -> Plan:
    """The plan with fewer micro-batches, if further ones do not change a peak.

    torch's own schedules hold the gradients that they send until the step ends: with them every
    micro-batch counts.
    """
    steps, most = plan.batch.accumulation_steps, STEADY_ROUNDS * plan.pp
    if plan.pp == 1 or plan.cut is None or plan.cut.schedule not in STEADY_SCHEDULES:
        return plan
    if steps <= most:
        return plan
    return replace(plan, batch=replace(plan.batch, accumulation_steps=most))


def _counted(plan: Plan, schedule: str) -> int:
    """A smaller number of micro-batches with as many in flight: hundreds take long to count."""
    steps = with_fewer_micro_batches(plan).batch.accumulation_steps
    if schedule in GROWING_SCHEDULES or steps % plan.pp:
        return steps
    return min(steps, counted_rounds(schedule) * plan.pp)


def counted_rounds(schedule: str) -> int:
    """See `COUNTED_ROUNDS`."""
    return COUNTED_ROUNDS + (schedule == "dualpipev")


def several_wait(plan: Plan) -> bool:
    """Whether several micro-batches are in flight at the head of the model."""
    technique = plan.techniques.get("cut")
    if not isinstance(technique, CutStrategy):
        return False
    schedule = technique.traits.schedule
    if schedule in SCHEDULES:
        return plan.batch.accumulation_steps > 1 and schedule in SCHEDULES_WAITING_AT_HEAD
    return max(technique.in_flight(plan)[-1:], default=1) > 1
