"""Forecasts, plans and messages equal the golden files: a part in every run, everything with
--full.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from golden.check import PARTS
from support.zygote import forked_script

CHECK = Path(__file__).parent / "golden" / "check.py"


@pytest.mark.parametrize("part", PARTS)
def test_some_of_what_is_known_without_running_is_what_it_was(part: str) -> None:
    done = forked_script(CHECK, ["--quick", "--jobs", "0", "--only", part], timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_what_is_known_without_running_is_what_it_was() -> None:
    command = [sys.executable, str(CHECK)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
