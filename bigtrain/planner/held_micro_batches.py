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
"""The memory of a step repeats itself after this many micro-batches for each pp rank."""
COUNTED_ROUNDS = 2
"""The numbers of micro-batches in flight repeat after this many micro-batches for each pp rank; the
schedule `dualpipev` needs one more."""
GROWING_SCHEDULES = ("gpipe", "looped_bfs")
"""Schedules in which every micro-batch of a step is in flight at once."""


class HeldMicroBatches:
    """The micro-batches that each stage of a candidate has in flight, counted on first use.

    Args:
        plan: the plan of the candidate.
        candidate: the candidate.
    """

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
        """The most micro-batches that each stage has in flight."""
        if not self._is_cut:
            return (1,)
        return in_flight_by_stage(*self._schedule, self._steps, splits=self._splits)

    @cached_property
    def fullest(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """For each stage, the micro-batches in flight when the stage's rank has the most of them.

        The first tuple is for the whole step. The second one is for the time after the first
        backward passes, when there are gradients.
        """
        if not self._is_cut:
            return (1,), (int(self._steps > 1),)
        first, later = (
            in_flight_at_peak(*self._schedule, self._steps, splits=self._splits, later=later)
            for later in (False, True)
        )
        return first, later


def with_fewer_micro_batches(plan: Plan) -> Plan:
    """Return the plan with fewer micro-batches if those that are left out do not change a peak.

    torch's own schedules hold the gradients that they send until the step ends, so every
    micro-batch changes their peaks.
    """
    steps, most = plan.batch.accumulation_steps, STEADY_ROUNDS * plan.pp
    if plan.pp == 1 or plan.cut is None or plan.cut.schedule not in STEADY_SCHEDULES:
        return plan
    if steps <= most:
        return plan
    return replace(plan, batch=replace(plan.batch, accumulation_steps=most))


def _counted(plan: Plan, schedule: str) -> int:
    """Return fewer micro-batches, if possible, with which as many are in flight as with all.

    Counting hundreds of micro-batches takes long.
    """
    steps = with_fewer_micro_batches(plan).batch.accumulation_steps
    if schedule in GROWING_SCHEDULES or steps % plan.pp:
        return steps
    return min(steps, counted_rounds(schedule) * plan.pp)


def counted_rounds(schedule: str) -> int:
    """Return the micro-batches for each pp rank after which the numbers in flight repeat."""
    return COUNTED_ROUNDS + (schedule == "dualpipev")


def several_wait(plan: Plan) -> bool:
    """Whether the last stage, which has the head, ever has several micro-batches in flight."""
    technique = plan.techniques.get("cut")
    if not isinstance(technique, CutStrategy):
        return False
    schedule = technique.traits.schedule
    if schedule in SCHEDULES:
        return plan.batch.accumulation_steps > 1 and schedule in SCHEDULES_WAITING_AT_HEAD
    return max(technique.in_flight(plan)[-1:], default=1) > 1
