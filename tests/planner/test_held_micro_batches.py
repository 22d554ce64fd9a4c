"""Counts of micro-batches in flight from a few rounds equal those of a whole step."""

from __future__ import annotations

import pytest

from bigtrain.errors import ConfigError
from bigtrain.planner.held_micro_batches import GROWING_SCHEDULES, counted_rounds
from bigtrain.schedules.in_flight import (
    SCHEDULES_WAITING_AT_HEAD,
    in_flight_at_peak,
    in_flight_by_stage,
)
from bigtrain.schedules.orders import SCHEDULES, SINGLE_STAGE_SCHEDULES, V_SHAPED_SCHEDULES


def counts(schedule, pp, per_rank, steps):
    given = (schedule, pp, per_rank, steps)
    return [
        [in_flight_by_stage(*given, splits=splits) for splits in (False, True)],
        [
            in_flight_at_peak(*given, splits=splits, later=later)
            for splits in (False, True)
            for later in (False, True)
        ],
    ]


def stages_of(schedule):
    if schedule in SINGLE_STAGE_SCHEDULES:
        return (1,)
    return (2,) if schedule in V_SHAPED_SCHEDULES else (2, 3, 4)


@pytest.mark.parametrize("pp", [2, 3, 8, 16])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_in_flight_stays_the_same_after_a_few_rounds(schedule, pp):
    for per_rank in stages_of(schedule):
        few = counts(schedule, pp, per_rank, counted_rounds(schedule) * pp)
        for rounds in (3, 4, 5, 8, 13):
            many = counts(schedule, pp, per_rank, rounds * pp)
            assert (many == few) == (schedule not in GROWING_SCHEDULES)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_which_schedules_have_several_micro_batches_at_the_head(schedule):
    seen = set()
    for per_rank in stages_of(schedule):
        for pp in (2, 3, 4, 8, 16):
            for steps in (1, 2, 3, 5, pp, 2 * pp, 3 * pp, 6 * pp):
                try:
                    held = in_flight_by_stage(schedule, pp, per_rank, steps, splits=True)
                except ConfigError:
                    continue
                seen.add(steps > 1)
                assert (held[-1] > 1) == (steps > 1 and schedule in SCHEDULES_WAITING_AT_HEAD)
    assert True in seen
