"""The mark `full`, and the list of unmarked tests that take too long.

A test marked `full` proves the same as another test, in more cases or at greater length. A plain
`pytest` skips it; `--full` runs it, and so does its name on the command line (`file::test`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import pytest

LONG_S = 10.0
"""Tests without the mark `full` that take longer are listed at the end of a session."""


def in_turn(*axes: Iterable[Any]) -> list[Any]:
    """The product of some axes as parameters; half of the combinations are marked full.

    Each value is combined with half of the values of each other axis in every run.

    Args:
        axes: values, or tuples of values that go together.
    """
    cases = []
    for numbered in product(*(enumerate(axis) for axis in axes)):
        values = [v for _, value in numbered for v in (value if type(value) is tuple else (value,))]
        is_odd = sum(number for number, _ in numbered) % 2
        cases.append(pytest.param(*values, marks=[pytest.mark.full] * is_odd))
    return cases


def fewer(cases: Iterable[Any], count: int) -> list[Any]:
    """Mark all but `count` cases, spread evenly, as full.

    Args:
        cases: values, tuples of values that go together, or `pytest.param` objects.
        count: number of cases that are not full; the first and the last are among them.
    """
    listed = list(cases)
    gaps = max(count - 1, 1)
    daily = {round(n * (len(listed) - 1) / gaps) for n in range(count)}
    parameters = []
    for number, case in enumerate(listed):
        marks = [] if number in daily else [pytest.mark.full]
        if isinstance(case, type(pytest.param())):
            parameters.append(pytest.param(*case.values, id=case.id, marks=[*case.marks, *marks]))
        else:
            values = case if type(case) is tuple else (case,)
            parameters.append(pytest.param(*values, marks=marks))
    return parameters


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("bigtrain")
    group.addoption("--full", action="store_true", help="also run all tests marked full")


EVERY_FULL = pytest.StashKey[list[str]]()
"""The names of all tests marked full, if all tests were collected."""


@pytest.hookimpl(tryfirst=True)  # before pytest drops tests by -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = [(config.invocation_params.dir / word).resolve() for word in config.args]
    if places == [config.rootpath / "tests"]:
        marked = [item for item in items if item.get_closest_marker("full") is not None]
        config.stash[EVERY_FULL] = [item.nodeid for item in marked]
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
