"""Run the `bigtrain` command in separate processes, with a time limit.

If a run crashes, hangs or is killed, the caller gets one line of explanation. When a run ends, all
processes that it started are ended.
"""

from __future__ import annotations

import contextlib
import json
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
from typing import Any, Literal

from bigtrain.files.parse import read_json_object
from bigtrain.files.regular import MOST_LINES, read_text

END_TIMEOUT_S = 20.0
"""Seconds after SIGTERM in which a run may end its ranks; then all its processes are killed."""
QUIET = (
    *("train.eval_every=0", "checkpoint.every=0", "checkpoint.at_end=false"),
    *("checkpoint.resume=null", "memory.on_oom=stop"),
)
"""KEY=VALUE words for a run that is only measured. It begins at step 0, neither validates nor
saves, and stops if memory runs out."""
UNTRACKED = ("memory.track_steps=0", "memory.predict=false")
"""KEY=VALUE words for a run whose memory is neither tracked nor predicted."""


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run."""

    status: int
    """The exit status; 1 if the time limit was exceeded."""
    reason: str | None
    """The reason why the run failed, in one line; None if it succeeded."""
    seconds: float
    """The duration of the run."""
    timed_out: bool = False
    """Whether the time limit was exceeded."""
    leftovers: int = 0
    """How many processes of a run that ended by itself were still there, and were killed."""

    @property
    def out_of_memory(self) -> bool:
        """Whether the run failed because memory ran out."""
        words = ("out of memory", "host memory ran out", "an't allocate memory", "bad_alloc")
        return self.reason is not None and any(word in self.reason for word in words)


@dataclass(frozen=True, kw_only=True)
class QuietRun:
    """One measured run of a job: `bigtrain COMMAND` with the `QUIET` words."""

    command: Literal["train", "record", "pace"]
    strategy: str
    num_ranks: int
    folder: Path
    """The folder of the run's files; its printed output is in `FOLDER.log`."""
    words: Sequence[str]
    """KEY=VALUE words of the job. The words in `QUIET` override them."""
    last_words: Sequence[str] = ()
    """KEY=VALUE words that override those in `QUIET`."""
    job: str | None = None
    """The job's name or file; None for the default job."""
    options: Sequence[str] = ()
    """Further options of the command, such as `--cap`."""

    @property
    def line(self) -> list[str]:
        """The arguments of `bigtrain`, except those for `folder`, which `run` adds."""
        line = [self.command, "-n", str(self.num_ranks), "--strategy", self.strategy]
        if self.job is not None:
            line += ["--config", self.job]
        return [*line, *self.options, *self.words, *QUIET, *self.last_words]

    @property
    def log(self) -> Path:
        """The file into which the run's output is written."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def run(self, limit_s: float, environ: Mapping[str, str] | None = None) -> RunOutcome:
        """Run the command and wait for its end; see `run_bigtrain`.

        Args:
            limit_s: the seconds after which the run is ended.
            environ: variables that are added to this process's environment.
        """
        if self.command == "train":  # the command makes the folder itself
            parent, name = json.dumps(str(self.folder.parent)), json.dumps(self.folder.name)
            folder_words = [f"log.dir={parent}", f"log.name={name}"]
        else:
            self.folder.mkdir(exist_ok=True)
            folder_words = ["--record", str(self.folder)]
        return run_bigtrain([*self.line, *folder_words], self.log, limit_s, environ)

    def json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file of the run's folder.

        Raises:
            UnreadableError: the file is missing or does not contain a JSON object.
        """
        return read_json_object(self.folder / name)


def run_bigtrain(
    words: Sequence[str],
    log: Path,
    limit_s: float,
    environ: Mapping[str, str] | None = None,
    module: str = "bigtrain",
) -> RunOutcome:
    """Run `bigtrain` in a new process, write its output to a file, and wait for its end.

    Args:
        words: the arguments of the command.
        log: the file for standard output and standard error.
        limit_s: the seconds after which the run is ended.
        environ: variables that are added to this process's environment.
        module: the module that is run with `python -m`, normally `bigtrain`.
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
            start_new_session=True,  # so that Ctrl-C interrupts only the caller, which ends the run
        )
        try:
            status = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            reason = f"not done after {limit_s:.0f} s. Raise --time-limit"
            return RunOutcome(1, reason, time.monotonic() - began, timed_out=True)
        finally:
            leftovers = _end_run(child, run_mark)
    seconds = time.monotonic() - began
    cause = None if status == 0 else reason_in(log, status)
    return RunOutcome(status, cause, seconds, leftovers=leftovers)


_MARK = "BIGTRAIN_STARTED_AS"
"""An environment variable that all processes of a run inherit. It identifies processes that have
left the run's session."""


def _end_run(child: subprocess.Popen[bytes], mark: str) -> int:
    """Send SIGTERM to a run, wait for it, then kill all remaining processes that it started.

    Returns:
        How many processes were killed.
    """
    killed: set[int] = set()
    try:
        if child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(END_TIMEOUT_S)
    finally:  # also after a second Ctrl-C
        end = time.monotonic() + END_TIMEOUT_S
        while (left := set(filter(_kill, _marked(mark)))) and time.monotonic() < end:
            killed |= left
            time.sleep(0.05)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(END_TIMEOUT_S)
    return len(killed)


def _kill(pid: int) -> bool:
    """Kill a process; return whether it existed."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _marked(mark: str) -> Iterator[int]:
    """Yield the processes of a run that have not ended.

    A process that has ended, but is still listed, has no environment variables.
    """
    wanted = f"{_MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


_CIRCUMSTANCES = re.compile(
    r" lost rank |^bigtrain: (rank \d+ failed (in|while|at|between|as) |the last events of each "
    r"rank: |stopped before the first step|nothing (more )?was saved: )"
)
"""Matches lines that report the activity of ranks when a run failed, but not why it failed."""


def reason_in(log: Path, status: int) -> str:
    """Return the line of a failed run's output that best explains the failure.

    Args:
        log: the file with the run's output.
        status: the run's exit status, which precedes the line if no line explains the failure.
    """
    lines = list(_lines(log))
    bigtrain_lines = [line for line in lines if line.startswith("bigtrain: ")]
    causes = [line for line in bigtrain_lines if not _CIRCUMSTANCES.search(line)]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    explanations = causes or errors or bigtrain_lines
    reason = (explanations or lines or ["it printed nothing"])[-1].removeprefix("bigtrain: ")
    return reason if explanations else f"exit status {status}: {reason}"


def _lines(log: Path) -> Iterator[str]:
    for line in read_text(log, most=MOST_LINES, errors="replace").splitlines():
        if line.strip():
            yield line.strip()
