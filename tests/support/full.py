"""The mark `full`: tests that only `make test-full` runs, as `tests/full.yaml` lists them.

A plain `pytest` skips them; `--full` runs them, and so does their name on the command line
(`file::test`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

LONG_S = 10.0
"""Tests without the mark `full` that take longer are listed at the end of a session."""
LIST_NAME = "full.yaml"
EVERY_TEST = pytest.StashKey[list[str]]()
"""The names of all tests, if all were collected."""


def is_full(entry: object, case: str | None) -> bool:
    """Whether a case of a listed test is full.

    Args:
        entry: "all", {"daily": cases that are not full} or {"full": cases that are}.
        case: the case's id; None for a test without parameters.
    """
    if entry == "all":
        return True
    if isinstance(entry, dict) and len(entry) == 1:
        key, cases = next(iter(entry.items()))
        if key in ("daily", "full") and isinstance(cases, list):
            return (case in cases) == (key == "full")
    raise pytest.UsageError(f"{LIST_NAME}: {entry!r} is none of all, {{daily: []}}, {{full: []}}")


def read_list(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the tests that the list of a folder names: by file below the folder, then by name."""
    path = folder / LIST_NAME
    if not path.exists():
        return {}
    listed: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return listed


def mark_full(
    items: Iterable[pytest.Item], folder: Path, listed: Mapping[str, Mapping[str, Any]]
) -> None:
    """Mark the collected tests that the list names."""
    for item in items:
        if not item.path.is_relative_to(folder):
            continue
        tests = listed.get(item.path.relative_to(folder).as_posix(), {})
        name = item.name.partition("[")[0]
        if name in tests:
            call = getattr(item, "callspec", None)
            if is_full(tests[name], None if call is None else call.id):
                item.add_marker("full")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("bigtrain")
    group.addoption("--full", action="store_true", help="also run all tests marked full")


@pytest.hookimpl(tryfirst=True)  # before pytest drops tests by -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    folder = config.rootpath / "tests"
    mark_full(items, folder, read_list(folder))
    if [(config.invocation_params.dir / word).resolve() for word in config.args] == [folder]:
        config.stash[EVERY_TEST] = [item.nodeid for item in items]
    named = any("::" in word for word in config.args)
    if config.getoption("full") or named or "full" in config.getoption("markexpr"):
        return
    left = [item for item in items if item.get_closest_marker("full") is not None]
    items[:] = [item for item in items if item.get_closest_marker("full") is None]
    if left:
        config.hook.pytest_deselected(items=left)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Note in the report whether its test may be long: the summary has reports, but no items."""
    report = yield
    report.may_be_long = item.get_closest_marker("full") is not None
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    took: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and not report.may_be_long:
                took[report.nodeid] = took.get(report.nodeid, 0.0) + report.duration
    long = sorted((-seconds, node) for node, seconds in took.items() if seconds > LONG_S)
    if long:
        terminalreporter.section(f"over {LONG_S:.0f} s, and not marked full")
        for seconds, node in long:
            terminalreporter.line(f"{-seconds:6.1f} s  {node}")
