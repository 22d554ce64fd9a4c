"""Faults at chosen and at random moments, as benchmarks/faults.py makes them by the hundred."""

from __future__ import annotations

import importlib.util
import random
import sys
from typing import Any

import pytest
from support.programs import ROOT
from support.zygote import interpreter, surroundings


def _faults() -> Any:
    """benchmarks/faults.py, as a module."""
    spec = importlib.util.spec_from_file_location("faults", ROOT / "benchmarks" / "faults.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["faults"] = module
    spec.loader.exec_module(module)
    return module


faults = _faults()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two ranks; what a run without a fault computes is known."""
    made = faults.FaultRuns(tmp_path_factory.mktemp("faults"), interpreter(), surroundings())
    made.reference()
    assert len(made.expected) == faults.STEPS
    return made


@pytest.mark.parametrize("number", range(4))
def test_a_fault_of_each_kind_changes_no_number(runs: Any, number: int) -> None:
    faulty = {
        0: faults.Fault("SIGKILL", 1, step=5),
        1: faults.Fault("SIGTERM", 0, step=3, delay_s=0.02),
        2: faults.Fault("write", 0, call=runs.calls[0] // 2),
        3: faults.Fault("write", 1, call=runs.calls[1] - 1),
    }[number]
    outcome = runs.one(number, faulty)
    assert outcome.problem is None
    assert outcome.came
    assert outcome.continued_from is not None


@pytest.mark.full
@pytest.mark.parametrize("kind", faults.KINDS)
def test_ten_faults_at_random_change_no_number(runs: Any, kind: str) -> None:
    draws = random.Random(kind)
    for number in range(4 if kind == "write" else 2):
        outcome = runs.drawn(100 + 10 * faults.KINDS.index(kind) + number, kind, draws)
        assert outcome.problem is None, outcome
