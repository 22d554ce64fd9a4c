"""The list of the tests marked `full`, and the options that select them."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from support.full import EVERY_TEST, drawn, is_full, read_list
from support.zygote import interpreter, surroundings

ROOT = Path(__file__).parents[2]


def collected(folder: Path, *words: str) -> list[str]:
    """Return the names of the tests that a command line would run."""
    command = [interpreter(), "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *words], cwd=folder, env=surroundings(), capture_output=True, text=True
    )
    assert done.returncode in (0, 5), done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_the_list_names_tests_and_cases_that_exist(request: pytest.FixtureRequest) -> None:
    names = request.config.stash.get(EVERY_TEST, None)
    if names is None:  # this run contains only some files
        names = collected(ROOT, "--full", "--every")
    cases = defaultdict(set)
    for name in names:
        test, _, rest = name.removeprefix("tests/").partition("[")
        cases[test].add(rest.removesuffix("]"))
    unknown = []
    for file, tests in read_list(ROOT / "tests").items():
        for name, entry in tests.items():
            known = cases.get(f"{file}::{name}", set())
            listed = [] if entry == "all" else entry.get("daily", entry.get("full"))
            unknown += [f"{file}::{name}"] * (not known)
            unknown += [f"{file}::{name}[{case}]" for case in listed if case not in known]
    assert unknown == []


@pytest.fixture
def some_tests(tmp_path: Path) -> Path:
    """A project with nine tests, of which six are listed."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = full\n")
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', range(3))\n"
        "def test_few(n): pass\n"
        "@pytest.mark.parametrize('n', range(4))\n"
        "def test_most(n): pass\n"
        "def test_long(): pass\n"
        "def test_short(): pass\n"
    )
    (folder / "full.yaml").write_text(
        "test_some.py:\n"
        "  test_few: {daily: ['1']}\n"
        "  test_most: {full: ['0', '2', '3']}\n"
        "  test_long: all\n"
    )
    return tmp_path


DAILY = ["test_few[1]", "test_most[1]", "test_short"]


def test_a_plain_run_leaves_out_what_is_listed_and_two_options_take_it_in(some_tests) -> None:
    plugin = ("-p", "support.full")
    file = "tests/test_some.py"
    assert collected(some_tests, *plugin) == [f"{file}::{name}" for name in DAILY]
    assert len(collected(some_tests, *plugin, "--full")) == 9
    assert len(collected(some_tests, *plugin, "-m", "full")) == 6
    named = f"{file}::test_most[3]"
    assert collected(some_tests, *plugin, named) == [named]


def test_some_cases_are_drawn_by_the_commit(some_tests) -> None:
    plugin, file = ("-p", "support.full"), "tests/test_some.py"
    some_tests.joinpath("tests", "full.yaml").write_text(
        "test_some.py:\n  test_most: {daily: ['1'], draw: 2}\n"
    )
    found = collected(some_tests, *plugin, "--full")
    most = [name for name in found if "test_most" in name]
    assert len(found) == 8
    assert len(most) == 3
    assert f"{file}::test_most[1]" in most
    assert collected(some_tests, *plugin, "--full") == found
    assert len(collected(some_tests, *plugin, "--full", "--every")) == 9
    named = next(name for name in (f"{file}::test_most[{n}]" for n in "023") if name not in most)
    assert collected(some_tests, *plugin, named) == [named]


def test_commits_draw_all_cases_in_the_end() -> None:
    cases = [f"file::test[{number}]" for number in range(12)]
    draws = [drawn(cases, 3, f"commit {seed}") for seed in range(40)]
    assert {len(draw) for draw in draws} == {3}
    assert set.union(*draws) == set(cases)


@pytest.mark.parametrize(
    "entry",
    ["none", [], {"daily": "1"}, {"daily": ["1"], "full": ["2"]}, {"draw": 2}],
)
def test_an_entry_that_says_nothing_is_refused(entry: object) -> None:
    with pytest.raises(pytest.UsageError, match=r"is none of all, \{daily"):
        is_full(entry, "1")
