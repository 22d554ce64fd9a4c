"""Malformed inputs, drawn as by benchmarks/hostile_inputs.py."""

from __future__ import annotations

import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.damages import hostile_inputs
from support.zygote import forked_cli, surroundings


def rows_of(folder: Path, numbers: range, seed: int) -> list[dict[str, Any]]:
    forked_cli(["strategies"])  # import once, before two processes need it
    # Other tests run at the same time; the limit of ten seconds is checked by the benchmark.
    runs = hostile_inputs.HostileRuns(folder, forked_cli, surroundings(), limit_s=60)
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda number: runs.one(number, seed), numbers))


def test_some_inputs_of_each_kind_end_in_a_line_or_run(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, range(3 * len(hostile_inputs.KINDS)), seed=21)
    assert [row for row in rows if row["problem"] is not None] == []
    assert set(Counter(row["kind"] for row in rows).values()) == {3}
    assert {row["status"] for row in rows} == {0, 2}


@pytest.mark.parametrize("seed", [22, 23])
def test_hundreds_of_inputs_end_in_a_line_or_run(tmp_path: Path, seed: int) -> None:
    rows = rows_of(tmp_path, range(450), seed)
    assert [row for row in rows if row["problem"] is not None] == []


def test_an_input_is_the_same_by_its_number_and_seed() -> None:
    for number in range(20):
        first, again = (hostile_inputs.drawn_input(number, 5) for _ in range(2))
        assert first == again
        assert first != hostile_inputs.drawn_input(number, 6)


@pytest.mark.parametrize(
    ("status", "said", "problem"),
    [
        (0, "", None),
        (2, "bigtrain: no\n", None),
        (2, "usage: bigtrain\n", None),
        (2, "", "exit status 2 without a line"),
        (1, "bigtrain: no\n", "exit status 1"),
        (-9, "", "exit status -9"),
        (0, "Traceback (most recent call last):\nValueError: x\n", "traceback: ValueError: x"),
        (2, f"bigtrain: {'x' * 6000}\n", "a line of 6010 letters"),
    ],
)
def test_what_counts_as_a_fault(status: int, said: str, problem: str | None) -> None:
    fault = hostile_inputs._fault(subprocess.CompletedProcess([], status, "", said))
    assert (fault is None) if problem is None else fault.startswith(problem)


def test_what_is_kept_of_inputs() -> None:
    rows = [
        {"kind": "job", "status": 2, "problem": None},
        {"kind": "job", "status": 0, "problem": None},
        {"kind": "cache", "status": 1, "problem": "exit status 1"},
    ]
    summary = hostile_inputs.summary_of(rows, 5, 1.25)
    assert (summary["inputs"], summary["failed"], summary["seed"]) == (3, 1, 5)
    assert summary["by_kind"]["job"] == {"ran": 1, "refused": 1, "failed": 0}
    assert summary["by_kind"]["cache"] == {"ran": 0, "refused": 0, "failed": 1}
    assert summary["failures"] == [rows[2]]
