"""The mark `full`: tests that only `make test-full` runs, as `tests/full.yaml` lists them.

A plain `pytest` skips them; `--full` runs them, and so does their name on the command line
(`file::test`). The list gives the heaviest tests a number of cases to draw: `--full` then runs that
many, drawn by the commit, so that other commits run other cases; `--every` runs all of them.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
        entry: "all", {"daily": cases that are not full} or {"full": cases that are}; the last two
            may have {"draw": how many of the full cases run at a commit} as well.
        case: the case's id; None for a test without parameters.
    """
    if entry == "all":
        return True
    if isinstance(entry, dict) and isinstance(entry.get("draw", 1), int):
        rest = {key: cases for key, cases in entry.items() if key != "draw"}
        key, cases = next(iter(rest.items()), ("", None))
        if len(rest) == 1 and key in ("daily", "full") and isinstance(cases, list):
            return (case in cases) == (key == "full")
    raise pytest.UsageError(f"{LIST_NAME}: {entry!r} is none of all, {{daily: []}}, {{full: []}}")


def drawn(cases: Sequence[str], number: int, seed: str) -> set[str]:
    """Return some of the cases: the same for the same seed, whichever process asks."""
    digests = {case: hashlib.sha256(f"{seed} {case}".encode()).hexdigest() for case in cases}
    return set(sorted(cases, key=digests.__getitem__)[:number])


def commit_of(folder: Path) -> str:
    """The commit of a work tree, which seeds the draws; empty without git."""
    words = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def not_drawn(items: Iterable[pytest.Item], folder: Path, seed: str) -> set[str]:
    """The names of the full cases that are not drawn, among the collected tests."""
    listed = read_list(folder)
    cases: dict[tuple[str, str], list[str]] = defaultdict(list)
    for item in items:
        if item.path.is_relative_to(folder) and item.get_closest_marker("full") is not None:
            file = item.path.relative_to(folder).as_posix()
            cases[file, item.name.partition("[")[0]].append(item.nodeid)
    left: set[str] = set()
    for (file, name), names in cases.items():
        entry = listed.get(file, {}).get(name)
        if isinstance(entry, dict) and "draw" in entry:
            left |= set(names) - drawn(names, entry["draw"], seed)
    return left


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
    group.addoption("--full", action="store_true", help="also run tests marked full, some drawn")
    group.addoption("--every", action="store_true", help="with --full: all cases, none drawn")


@pytest.hookimpl(tryfirst=True)  # before pytest drops tests by -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    folder = config.rootpath / "tests"
    mark_full(items, folder, read_list(folder))
    if [(config.invocation_params.dir / word).resolve() for word in config.args] == [folder]:
        config.stash[EVERY_TEST] = [item.nodeid for item in items]
    if any("::" in word for word in config.args):
        return
    if config.getoption("full") or "full" in config.getoption("markexpr"):
        names = set() if config.getoption("every") else not_drawn(items, folder, commit_of(folder))
    else:
        names = {item.nodeid for item in items if item.get_closest_marker("full") is not None}
    left = [item for item in items if item.nodeid in names]
    items[:] = [item for item in items if item.nodeid not in names]
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
