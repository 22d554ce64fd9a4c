"""Results as they come: the option `--results FILE`, so that long runs can be ended and go on.

Each finished test is one line of JSON: its name, its outcome and its seconds (setup, call and
teardown). A later session with the same file leaves out the tests that have passed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def read_results(path: Path) -> dict[str, tuple[str, float]]:
    """Return the last outcome and the seconds of each test in a file; none if it does not exist."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return {row["test"]: (row["outcome"], row["seconds"]) for row in rows}


class _Results:
    """Appends the result of each test to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reports: dict[str, list[pytest.TestReport]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reports = self._reports.setdefault(report.nodeid, [])
        reports.append(report)
        if report.when != "teardown":
            return
        outcomes = {r.outcome for r in self._reports.pop(report.nodeid)}
        outcome = next(o for o in ("failed", "skipped", "passed") if o in outcomes)
        seconds = round(sum(r.duration for r in reports), 2)
        row = {"test": report.nodeid, "outcome": outcome, "seconds": seconds}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("bigtrain").addoption(
        "--results",
        type=Path,
        metavar="FILE",
        help="append each result to this file, and leave out tests that have passed there",
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("results")
    if path is not None and not hasattr(config, "workerinput"):  # not in a worker of xdist
        config.pluginmanager.register(_Results(path))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path = config.getoption("results")
    if path is None:
        return
    passed = {name for name, (outcome, _) in read_results(path).items() if outcome == "passed"}
    done = [item for item in items if item.nodeid in passed]
    items[:] = [item for item in items if item.nodeid not in passed]
    if done:
        config.hook.pytest_deselected(items=done)
