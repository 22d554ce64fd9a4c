"""Runs of the `bigtrain` command in processes of their own, each with a time limit.

A run that crashes, hangs or is killed costs its caller one line and nothing else; and nothing
that it started outlives it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bigtrain.files.regular import MOST_LINES, read_text

END_TIMEOUT_S = 20.0
"""Seconds that a run gets to end its ranks by itself, before all of them are killed."""


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended."""

    status: int
    reason: str | None
    """One line on what went wrong; None where nothing did."""
    seconds: float
    timed_out: bool = False

    @property
    def out_of_memory(self) -> bool:
        """Whether memory was what it lacked."""
        words = ("out of memory", "host memory ran out", "an't allocate memory", "bad_alloc")
        return self.reason is not None and any(word in self.reason for word in words)


def run_bigtrain(
    words: Sequence[str],
    log: Path,
    limit_s: float,
    environ: Mapping[str, str] | None = None,
    module: str = "bigtrain",
) -> RunOutcome:
    """Run `bigtrain WORDS` and wait; what it prints goes to a file.

    Args:
        words: its command line.
        log: the file for all that it prints.
        limit_s: seconds after which it is ended.
        environ: added to this process's own environment.
        module: another one of bigtrain's that is run in its place.
    """
    command = [sys.executable, "-m", module, *words]
    run_mark = secrets.token_hex(8)
    began = time.monotonic()
    with log.open("w") as log_file:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            env={**os.environ, **(environ or {}), _MARK: run_mark},
            start_new_session=True,  # Ctrl-C comes to the caller, who ends it in good order
        )
        try:
            status = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            reason = f"not done after {limit_s:.0f} s. Raise --time-limit"
            return RunOutcome(1, reason, time.monotonic() - began, timed_out=True)
        finally:
            _end_run(child, run_mark)
    seconds = time.monotonic() - began
    return RunOutcome(status, None if status == 0 else reason_in(log, status), seconds)


_MARK = "BIGTRAIN_STARTED_AS"
"""A variable that all processes of a run inherit, by which they are found wherever they went."""


def _end_run(child: subprocess.Popen[bytes], mark: str) -> None:
    """End a run with all that it has started: asked to first, by force where that does not do."""
    try:
        if child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(END_TIMEOUT_S)
    finally:  # also where Ctrl-C comes once more
        end = time.monotonic() + END_TIMEOUT_S
        while sum(map(_kill, _marked(mark))) and time.monotonic() < end:
            time.sleep(0.05)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(END_TIMEOUT_S)


def _kill(pid: int) -> bool:
    """Kill a process; whether there was one."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _marked(mark: str) -> Iterator[int]:
    """The processes of a run that have not ended; an ended one has no variables any more."""
    wanted = f"{_MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


_BESIDE = re.compile(
    r" lost rank |^bigtrain: (rank \d+ failed (in|while|at|between|as) |the last events of each "
    r"rank: |stopped before the first step|nothing (more )?was saved: )"
)
"""Lines that say where ranks were, beside the one that says why a run failed."""


def reason_in(log: Path, status: int) -> str:
    """The one line of a run's output that says best why it failed."""
    lines = list(_lines(log))
    bigtrain_lines = [line for line in lines if line.startswith("bigtrain: ")]
    causes = [line for line in bigtrain_lines if not _BESIDE.search(line)]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    found = causes or errors or bigtrain_lines
    reason = (found or lines or ["it said nothing"])[-1].removeprefix("bigtrain: ")
    return reason if found else f"exit status {status}: {reason}"


def _lines(log: Path) -> Iterator[str]:
    for line in read_text(log, most=MOST_LINES, errors="replace").splitlines():
        if line.strip():
            yield line.strip()
