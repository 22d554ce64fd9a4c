"""Rows of the plan table that would look the same show how they differ."""

from __future__ import annotations

from bigtrain.planner.show import differences


def test_what_differs_between_rows_that_look_the_same_is_told() -> None:
    shown = [("1f1b+fsdp", 2, 4), ("1f1b+fsdp", 2, 4), ("1f1b+fsdp", 4, 2), ("ddp", 1, 8)]
    strategies = [
        {"cut": {"name": "pipeline", "at": ["a", "b"]}, "replicate": {"name": "zero", "stage": 3}},
        {"cut": {"name": "pipeline", "at": ["a", "c"]}, "replicate": {"name": "zero"}},
        {"cut": {"name": "pipeline", "at": ["a", "d"]}},
        {"replicate": {"name": "ddp"}},
    ]
    assert differences(shown, strategies) == [
        {"cut.at": ["a", "b"], "replicate.stage": 3},
        {"cut.at": ["a", "c"], "replicate.stage": None},
        {},
        {},
    ]
    assert differences(shown[:1] * 2, strategies[:1] * 2) == [{}, {}]
