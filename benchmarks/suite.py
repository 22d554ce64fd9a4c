"""What the tests take: seconds of every test, in the two runs of `make test`.

    python benchmarks/suite.py --output benchmarks/results/suite.json
    python benchmarks/suite.py --full --output FILE       # with those marked `full`

On an idle machine only. A test's seconds are those of its setup, call and teardown on one of two
workers, which share the machine.
"""

from __future__ import annotations

import argparse
import json
import os
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
    """Run both, print the sums and write all; returns 1 where a test failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="with the tests marked full")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    whole: dict[str, Any] = {"runs": {}}
    failed = 0
    seconds: Counter[str] = Counter()
    for marks, words in RUNS.items():
        found, wall_s, status = _run(marks, [*words, *(["--full"] if options.full else [])])
        seconds.update(found)
        failed |= status
        whole["runs"][marks] = {"wall_seconds": round(wall_s), "tests": len(found)}
    by_file: Counter[str] = Counter()
    for name, spent in seconds.items():
        by_file.update({name.partition("::")[0]: spent})
    whole["slowest"] = {name: round(s, 1) for name, s in seconds.most_common(SLOWEST)}
    whole["files"] = {name: round(s, 1) for name, s in by_file.most_common()}
    whole["tests"] = {name: round(s, 2) for name, s in sorted(seconds.items())}
    print(json.dumps({key: whole[key] for key in ("runs", "slowest")}, indent=1))
    keep(options.output, whole)
    return 1 if failed else 0


def _run(marks: str, words: list[str]) -> tuple[dict[str, float], float, int]:
    """One run of pytest: seconds by test, seconds of all, and whether it failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", marks, f"--junitxml={report}"]
        began = time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        status = subprocess.run([*command, *words], cwd=TOP, env=environment).returncode
        wall_s = time.monotonic() - began
        cases = ElementTree.parse(report).iter("testcase")
        return {_name(case): float(case.get("time", 0)) for case in cases}, wall_s, status


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"


if __name__ == "__main__":
    sys.exit(main())
