"""Counts of a few rounds are those of a whole step."""

from __future__ import annotations

import pytest

from bigtrain.planner.held_micro_batches import GROWING_SCHEDULES, STEADY_ROUNDS
from bigtrain.schedules.in_flight import in_flight_at_peak, in_flight_by_stage
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


@pytest.mark.parametrize("pp", [2, 3, 8, 16])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_in_flight_stays_the_same_after_a_few_rounds(schedule, pp):
    stages = (
        (1,)
        if schedule in SINGLE_STAGE_SCHEDULES
        else (2,)
        if schedule in V_SHAPED_SCHEDULES
        else (2, 3, 4)
    )
    for per_rank in stages:
        few = counts(schedule, pp, per_rank, STEADY_ROUNDS * pp)
        for rounds in (STEADY_ROUNDS + 1, STEADY_ROUNDS + 2, 8, 13):
            many = counts(schedule, pp, per_rank, rounds * pp)
            assert (many == few) == (schedule not in GROWING_SCHEDULES)
