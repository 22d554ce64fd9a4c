"""Which tests are run: marks `full` and `alone`, and the tests that take long without a mark.

A test marked `full` proves what another test proves, in more cases or at greater length. A plain
`pytest` leaves these out; `--full` takes all of them and `--full-fifth auto` a fifth, by the date,
so that any five days in a row have seen every one. A test that is named (`file::test`) is run.
"""

from __future__ import annotations

import datetime
import zlib
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import pytest

LONG_S = 10.0
"""A test without the mark `full` that takes longer is named at the end."""


def in_turn(*axes: Iterable[Any]) -> list[Any]:
    """The product of some axes as parameters: each value with half of the others', the rest full.

    Args:
        axes: values, or tuples of values that go together.
    """
    cases = []
    for numbered in product(*(enumerate(axis) for axis in axes)):
        values = [v for _, value in numbered for v in (value if type(value) is tuple else (value,))]
        is_odd = sum(number for number, _ in numbered) % 2
        cases.append(pytest.param(*values, marks=[pytest.mark.full] * is_odd))
    return cases


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("bigtrain")
    group.addoption("--full", action="store_true", help="also run all tests marked full")
    group.addoption(
        "--full-fifth",
        choices=["auto", "0", "1", "2", "3", "4"],
        help="also run a fifth of the tests marked full; auto: by the date",
    )


def fifth_of_today() -> int:
    """The fifth for this date, the same everywhere on Earth."""
    return datetime.datetime.now(datetime.timezone.utc).date().toordinal() % 5


def fifth_of(node: str) -> int:
    """The fifth that a test belongs to: by its name, so that a new test moves no other."""
    return zlib.crc32(node.encode()) % 5


def pytest_configure(config: pytest.Config) -> None:
    """Turn `auto` into a number, once: midnight may come between two workers."""
    if config.getoption("full_fifth") == "auto":
        config.option.full_fifth = str(fifth_of_today())


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.getoption("full"):
        return "full: all"
    fifth = config.getoption("full_fifth")
    return None if fifth is None else f"full: fifth {fifth} (again with --full-fifth {fifth})"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = any("::" in word for word in config.args)
    if config.getoption("full") or named or "full" in config.getoption("markexpr"):
        return
    fifth = config.getoption("full_fifth")
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        is_full = item.get_closest_marker("full") is not None
        wanted = not is_full or (fifth is not None and fifth_of(item.nodeid) == int(fifth))
        (kept if wanted else left).append(item)
    items[:] = kept
    if left:
        config.hook.pytest_deselected(items=left)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Let a report say whether its test may be long: where it is shown there is no item."""
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
