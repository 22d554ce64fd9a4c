"""Measure the seconds of every test in the two runs of `make test`, and of `make check`.

    python benchmarks/suite.py --output benchmarks/results/suite.json
    python benchmarks/suite.py --full --output FILE       # with those marked `full`

Use an idle machine. The seconds of a test are those of its setup, call and teardown on one of two
workers, which share the machine. CPU seconds are those of all processes that a run has waited for;
on a busy machine they are closer to the cost of a run than its wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from harness import keep

TOP = Path(__file__).resolve().parents[1]
RUNS = {"not alone": ["-n", "2", "--dist", "worksteal"], "alone": []}
SLOWEST = 20


def main() -> int:
    """Run both, print the sums and write all seconds; return 1 if a test failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="with the tests marked full")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    document: dict[str, Any] = {"runs": {"check": _timed(["make", "check"])}}
    failed = int(document["runs"]["check"].pop("status") != 0)
    seconds: Counter[str] = Counter()
    for marks, words in RUNS.items():
        tests, took = _run(marks, [*words, *(["--full"] if options.full else [])])
        seconds.update(tests)
        failed |= int(took.pop("status") != 0)
        document["runs"][marks] = {**took, "tests": len(tests)}
    by_file: Counter[str] = Counter()
    for name, spent in seconds.items():
        by_file.update({name.partition("::")[0]: spent})
    document["slowest"] = {name: round(s, 1) for name, s in seconds.most_common(SLOWEST)}
    document["files"] = {name: round(s, 1) for name, s in by_file.most_common()}
    document["tests"] = {name: round(s, 2) for name, s in sorted(seconds.items())}
    print(json.dumps({key: document[key] for key in ("runs", "slowest")}, indent=1))
    keep(options.output, document)
    return 1 if failed else 0


def _run(marks: str, words: list[str]) -> tuple[dict[str, float], dict[str, int]]:
    """Run pytest once; return the seconds of each test, and those of the run as `_timed` does."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", marks, f"--junitxml={report}"]
        took = _timed([*command, *words])
        cases = ElementTree.parse(report).iter("testcase")
        return {_name(case): float(case.get("time", 0)) for case in cases}, took


def _timed(command: list[str]) -> dict[str, int]:
    """Run a command; return its exit status, wall seconds, and CPU seconds."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    status = subprocess.run(command, cwd=TOP, env=environment).returncode
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "status": status,
        "wall_seconds": round(time.monotonic() - began),
        "cpu_seconds": round(cpu_s),
    }


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"


if __name__ == "__main__":
    sys.exit(main())
