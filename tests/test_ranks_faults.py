"""Faults at chosen and at random moments, made as by benchmarks/faults.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.programs import ROOT
from support.survival import faults
from support.zygote import interpreter, surroundings

BESIDE = faults.Setting("ddp", True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The results of runs without a fault, computed on first use."""

    def made(strategy: str) -> str:
        return interpreter("deepspeed" if strategy == "zero2" else "plain")

    return faults.FaultRuns(tmp_path_factory.mktemp("faults"), made, surroundings())


@pytest.mark.parametrize("number", range(4))
def test_a_fault_of_each_kind_changes_no_number(runs: Any, number: int) -> None:
    reference = runs.reference(BESIDE)
    assert len(reference.curve) == faults.STEPS
    fault = {
        0: faults.Fault("SIGKILL", 1, step=5),
        1: faults.Fault("SIGTERM", 0, step=3, delay_s=0.02),
        2: faults.Fault("write", 0, call=reference.calls[0] // 2),
        3: faults.Fault("write", 1, call=reference.calls[1] - 1),
    }[number]
    outcome = runs.one(1000 + number, BESIDE, fault)
    assert outcome.problem is None
    assert outcome.came
    assert outcome.continued_from is not None


@pytest.mark.parametrize("first", [0, 5])
def test_faults_at_random_change_no_number(runs: Any, first: int) -> None:
    for number in range(first, first + 5):  # one of each strategy
        outcome = runs.drawn(number, seed=1)
        assert outcome.problem is None, outcome


def test_what_is_kept_of_runs_is_added_to_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    record = {"problem": None, "came": True, "setting": {"strategy": "1f1b", "asynchronous": True}}
    lost = {**record, "problem": "lost"}
    late = {**record, "came": False}
    every = [{**o, "fault": {"kind": "write"}} for o in (record, lost, late)]
    assert "| `1f1b` | beside | 0 of 0 | 0 of 0 | 0 of 0 | 1 of 2 |" in faults.table(every)
    assert faults.table(every).endswith("\n3 runs, 2 hit, 1 did not hold")
    path = tmp_path / "faults.json"
    outcomes = [{"number": n, **outcome} for n, outcome in enumerate(every)]
    faults.keep_runs(path, 7, "forked", outcomes)
    assert faults.runs_of(path, 7, "forked") == dict(enumerate(outcomes))
    assert faults.runs_of(path, 7, "real") == faults.runs_of(path, 8, "forked") == {}
