"""Measure the seconds of every test in the two runs of `make test`, and of `make check`.

    python benchmarks/suite.py --output benchmarks/results/suite.json
    python benchmarks/suite.py --full --output FILE       # with those marked `full`

Use an idle machine. The seconds of a test are those of its setup, call and teardown on one of two
workers, which share the machine. CPU seconds are those of all processes that a run has waited for;
on a busy machine they are closer to the cost of a run than its wall time.

Results are kept as they come in `build/suite-COMMIT.jsonl`. If a run is ended, the same command
goes on at the same commit, with the tests that have not passed; wall seconds are then of the last
part alone, and `parts` says how many there were.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness import keep

TOP = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TOP / "tests"))

from support.results import read_results  # noqa: E402

RUNS = {"not alone": ["-n", "2", "--dist", "worksteal"], "alone": []}
SLOWEST = 20


def main() -> int:
    """Run both, print the sums and write all seconds; return 1 if a test failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="with the tests marked full")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = _results_file()
    parts = sum(1 for _ in results.parent.glob(f"{results.stem}.part*")) + 1
    results.with_suffix(f".part{parts}").touch()
    document: dict[str, Any] = {"runs": {"check": _timed(["make", "check"])}, "parts": parts}
    failed = int(document["runs"]["check"].pop("status") != 0)
    for marks, words in RUNS.items():
        before = len(read_results(results))
        command = [sys.executable, "-m", "pytest", "-q", "-m", marks, f"--results={results}"]
        took = _timed([*command, *words, *(["--full"] if options.full else [])])
        failed |= int(took.pop("status") not in (0, 5))  # 5: all have passed before
        document["runs"][marks] = {**took, "new_tests": len(read_results(results)) - before}
    found = read_results(results)
    outcomes = Counter(outcome for outcome, _ in found.values())
    seconds = Counter({name: spent for name, (_, spent) in found.items()})
    by_file: Counter[str] = Counter()
    for name, spent in seconds.items():
        by_file.update({name.partition("::")[0]: spent})
    document["outcomes"] = dict(outcomes)
    document["not_passed"] = sorted(name for name, (o, _) in found.items() if o != "passed")
    document["slowest"] = {name: round(s, 1) for name, s in seconds.most_common(SLOWEST)}
    document["files"] = {name: round(s, 1) for name, s in by_file.most_common()}
    document["tests"] = {name: round(s, 2) for name, s in sorted(seconds.items())}
    shown = ("runs", "outcomes", "not_passed", "slowest")
    print(json.dumps({key: document[key] for key in shown}, indent=1))
    keep(options.output, document)
    return 1 if failed else 0


def _results_file() -> Path:
    """The file of results at this commit."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(words, cwd=TOP, check=True, capture_output=True, text=True).stdout
    folder = TOP / "build"
    folder.mkdir(exist_ok=True)
    return folder / f"suite-{commit.strip()}.jsonl"


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


if __name__ == "__main__":
    sys.exit(main())
