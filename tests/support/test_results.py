"""The option `--results` keeps each result, and a later session goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.results import read_results

TESTS = """
import pathlib
import pytest

def test_passes(): pass
def test_fails(): assert pathlib.Path("mended").exists()
def test_is_skipped(): pytest.skip("no reason")
@pytest.fixture
def broken():
    yield
    assert pathlib.Path("mended").exists()
def test_fails_in_the_end(broken): pass
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_a_session_goes_on_with_what_has_not_passed(tmp_path: Path, workers: tuple[str]) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)

    def run() -> tuple[dict[str, str], str]:
        words = ["-q", "-p", "support.results", "--results=kept.jsonl", *workers]
        support = str(Path(__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": support, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": ""}
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
        kept = read_results(tmp_path / "kept.jsonl")
        outcomes = {name.partition("::")[2]: outcome for name, (outcome, _) in kept.items()}
        return outcomes, ended.stdout.splitlines()[-1]

    outcomes, summary = run()
    assert outcomes == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_is_skipped": "skipped",
        "test_fails_in_the_end": "failed",
    }
    (tmp_path / "mended").touch()
    outcomes, summary = run()
    assert [*outcomes.values()].count("passed") == 3
    assert "2 passed, 1 skipped" in summary


def test_a_file_that_is_not_there_has_no_results(tmp_path: Path) -> None:
    assert read_results(tmp_path / "none.jsonl") == {}
