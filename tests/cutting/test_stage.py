"""Cut models compute the same as whole ones: at every cut point, in both modes."""

from __future__ import annotations

import random

import pytest
from support.cut_runs import (
    RECOMPUTED,
    common_points,
    compare,
    trace_case,
)
from support.cutting_nets import CASES

from bigtrain.cutting.cut import cut_at


@RECOMPUTED
@pytest.mark.parametrize("name", CASES)
def test_a_cut_at_every_place_changes_nothing(name: str) -> None:
    model, traced_model, batches = trace_case(CASES[name])
    points, refused = common_points(traced_model, batches[0])
    assert points, refused
    trace, _ = traced_model.trace(batches[0], training=True)
    for point in points:
        compare(model, cut_at(trace, [point.call], traced_model), [batches[0], batches[-1]])


@RECOMPUTED
@pytest.mark.parametrize("name", CASES)
def test_four_stages_change_nothing(name: str) -> None:
    model, traced_model, batches = trace_case(CASES[name])
    points, _ = common_points(traced_model, batches[0])
    trace, _ = traced_model.trace(batches[0], training=True)
    chosen = random.Random(0)
    for _ in range(3):
        calls = sorted(chosen.sample([p.call for p in points], min(3, len(points))))
        compare(model, cut_at(trace, calls, traced_model), batches)
