"""What is known of jobs without running them is what it was: tests/golden, a part and the whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parent / "golden" / "check.py"


@pytest.mark.parametrize(
    "words",
    [
        ["--quick"],
        pytest.param([], marks=pytest.mark.full),
    ],
    ids=["a part", "the whole"],
)
def test_what_is_known_without_running_is_what_it_was(words: list[str]) -> None:
    command = [sys.executable, str(CHECK), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
