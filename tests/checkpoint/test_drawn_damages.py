"""Damages of every kind, drawn as by `benchmarks/faults.py --damage`."""

from __future__ import annotations

import json

import pytest
from support.damages import damages

from bigtrain.checkpoint.manifest import Manifest


def test_two_damages_of_each_kind_are_refused_and_gone_back_from() -> None:
    report = damages.damage_all(2 * len(damages.KINDS), seed=11)
    assert report["failures"] == []
    assert {row["damages"] for row in report["by_kind"].values()} == {2}


def test_a_thousand_damages_are_refused_and_gone_back_from() -> None:
    report = damages.damage_all(1000, seed=12)
    assert report["failures"] == []
    assert json.loads(json.dumps(report))["damages"] == 1000


def test_a_damage_that_is_let_through_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(Manifest, "find_damage", lambda *_: None)
    report = damages.damage_all(2 * len(damages.KINDS), seed=13, say=messages.append)
    assert report["failed"] == len(messages) > 3
    through = {kind for kind, row in report["by_kind"].items() if row["failed"]}
    # A changed bit may hit a header, which is checked separately
    assert len(through & {"bits", "page", "swapped", "older"}) > 1
