"""Run a real launcher from a test; check its output and that no process is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HELLO = str(Path(__file__).parent / "scripts" / "hello.py")
# Variables that one launcher sets must not reach the next one.
_CLEARED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Finished:
    """A command that has ended: its exit status and output."""

    status: int
    output: str
    """Standard output and standard error, interleaved as they were written."""
    ended: float
    """The time at the end, in seconds of the machine's monotonic clock."""

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """The report that each rank has printed."""
        lines = [line for line in self.output.splitlines() if line.startswith('[{"rank"')]
        assert len(lines) == 1, self.output
        # Another rank's traceback may follow on the same line.
        reports, _ = json.JSONDecoder().raw_decode(lines[0])
        assert isinstance(reports, list)
        return reports

    @property
    def seconds_together(self) -> float:
        """Seconds from the time when all ranks had met to the end of the last rank."""
        return self.ended - max(rank["met"] for rank in self.ranks)

    def assert_all_gone(self) -> None:
        """Assert that every rank's process has ended; a launcher may need a moment to reap it."""
        end = time.monotonic() + 5
        alive = [rank["pid"] for rank in self.ranks]
        while alive and time.monotonic() < end:
            alive = [pid for pid in alive if _runs(pid)]
            time.sleep(0.05)
        assert not alive, f"still running: {alive}\n{self.output}"


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rfind(")") + 2] not in "ZX"


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's variables without a launcher's, with the checkout on the path, and `extra`."""
    variables = {name: value for name, value in os.environ.items() if name not in _CLEARED}
    path = f"{Path(sys.executable).parent}{os.pathsep}{variables.get('PATH', '')}"
    return {**variables, "PATH": path, "PYTHONPATH": str(ROOT), **(extra or {})}


def start(command: list[str], extra: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a command in a new session, with its output in a pipe."""
    return subprocess.Popen(
        command,
        env=environment(extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(
    command: list[str], extra: Mapping[str, str] | None = None, timeout_s: float = 90.0
) -> Finished:
    """Run a command to its end; after `timeout_s` seconds kill its session and fail the test."""
    return finish(start(command, extra), timeout_s)


def finish(process: subprocess.Popen[str], timeout_s: float = 90.0) -> Finished:
    """Wait for a started command; after `timeout_s` seconds kill its session and fail the test."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # The command has a session to itself, so the group holds only it and its children.
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{process.args!r} ran past {timeout_s:.0f} s:\n{output}")
    return Finished(process.returncode, output, time.monotonic())
