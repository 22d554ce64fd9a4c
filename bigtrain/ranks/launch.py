"""Start the ranks of one node without a separate launcher: `bigtrain train -n N`.

The ranks are child processes of this process, which waits for them and forwards signals. If a rank
dies, this process starts all ranks again (`--restarts`). If the same rank is lost twice, fewer
ranks are started (`--min-ranks`). This module does not import torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from bigtrain.errors import ConfigError
from bigtrain.job.schema import Job
from bigtrain.memory.allocator import allocator_environ
from bigtrain.memory.host_memory import free_host_bytes, host_memory_line, oom_kill_count
from bigtrain.ranks.exit_status import REQUEUE_STATUS
from bigtrain.ranks.launcher_env import LAUNCH_VARIABLE, VISIBLE_DEVICES
from bigtrain.ranks.restart import RESTART_VARIABLE, Restart, RunNote, left_behind
from bigtrain.units import MIB, format_bytes

RANK_BYTES = 350 * MIB
"""Bytes of host memory of a rank without a model, measured with torch 2.14 on a CPU, without shared
pages."""
MAX_RANKS_A_CORE = 16
SAVE_S = 600.0
"""Seconds that ranks have to finish a step and save after SIGTERM, SIGUSR1 or Ctrl-C, before
SIGKILL."""
_SHUTDOWN_S = 15.0
"""Seconds that the other ranks have to end after a rank has failed, before SIGKILL."""
_POLL_S = 0.05
_PAGE_S = 0.5
"""Seconds from a failure until the other ranks get SIGTERM, in which they write the page."""
_SAME_S = 2.0
"""A signal within this many seconds of the first counts as the same signal, because `timeout` sends
its signal twice."""
_USUAL_TIMEOUT_S = 100.0
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_REMINDER_S = 1.0
_SAVING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_OF_OTHER_LAUNCHES = {"LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT", RESTART_VARIABLE}
_PR_SET_PDEATHSIG = 1


def start_ranks(
    num_ranks: int,
    arguments: list[str],
    script: Path,
    *,
    restarts: int = 0,
    min_ranks: int | None = None,
) -> int:
    """Run `python -u script arguments` as the ranks of one run on this node, and wait for them.

    Args:
        num_ranks: the number of ranks.
        arguments: the command line of the script.
        script: the path of the script.
        restarts: how often all ranks may be started again after a rank was lost.
        min_ranks: the smallest number of ranks to continue with; None is `num_ranks`.

    Returns:
        The exit status. It is 0 for success, and 2 or 75 if the failing rank ended with that
        status. After SIGTERM or SIGUSR1 it is 75 if the ranks have saved, and 1 if they could not.
        After Ctrl-C it is 130, unless a save failed. If there was nothing to save, it is 128 plus
        the number of the signal. In all other cases it is 1.

    Raises:
        ConfigError: there are fewer than 1 rank or too many for this machine, the script does not
            exist, or the numbers contradict each other.
    """
    if num_ranks < 1:
        raise ConfigError(f"-n {num_ranks}: at least 1 rank is needed. Use -n 1")
    if restarts < 0:
        raise ConfigError(f"--restarts {restarts}: at least 0 is needed. Use --restarts 3")
    if min_ranks is not None and not 1 <= min_ranks <= num_ranks:
        raise ConfigError(
            f"--min-ranks {min_ranks}: with {num_ranks} ranks it can be 1 to {num_ranks}. "
            f"Use --min-ranks {max(1, num_ranks - 1)}"
        )
    if min_ranks is not None and not restarts:
        raise ConfigError(
            f"--min-ranks {min_ranks} has an effect only after a restart. Add --restarts 3"
        )
    check_resources(num_ranks)
    if not script.is_file():
        raise ConfigError(f"{script} is not a file: {num_ranks} ranks cannot run it.")
    command = [sys.executable, "-u", str(script), *arguments]
    with tempfile.TemporaryDirectory(prefix="bigtrain-launch-") as folder, _Signals() as signals:
        run = _RestartingRun(command, Path(folder), signals, restarts, min_ranks or num_ranks)
        return run.to_the_end(num_ranks)


def check_resources(num_ranks: int) -> None:
    """Refuse more ranks than this machine has memory or cores for.

    Raises:
        ConfigError: the host's free memory is too small, or there are more than `MAX_RANKS_A_CORE`
            ranks for each core.
    """
    free = free_host_bytes()
    if free is not None and num_ranks > 1 and num_ranks * RANK_BYTES > free:
        raise ConfigError(
            f"-n {num_ranks}: a rank takes about {format_bytes(RANK_BYTES)} of host memory without "
            f"a model, all ranks {format_bytes(num_ranks * RANK_BYTES)}, and "
            f"{format_bytes(free)} are free. Use -n {max(1, free // (2 * RANK_BYTES))} or fewer"
        )
    cores = _usable_cores()
    if num_ranks > MAX_RANKS_A_CORE * cores:
        raise ConfigError(
            f"-n {num_ranks}: the run may use {cores} core{'s' if cores > 1 else ''} of this "
            f"machine, and at most {MAX_RANKS_A_CORE} ranks on each are started. Use "
            f"-n {MAX_RANKS_A_CORE * cores} or fewer"
        )


@contextlib.contextmanager
def as_first_of(num_ranks: int) -> Iterator[None]:
    """Let this process act as rank 0 of `num_ranks` in a dry run, which starts no other ranks.

    Raises:
        ConfigError: `num_ranks` is less than 1.
    """
    if num_ranks < 1:
        raise ConfigError(f"-n {num_ranks}: at least 1 rank is needed. Use -n 1")
    size = str(num_ranks)
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    variables[LAUNCH_VARIABLE] = "none"
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def check_shares(job: Job, num_ranks: int) -> None:
    """Refuse more replicas than the global batch has samples, before any rank is started.

    If the model is cut or sliced, or some ranks are parameter servers, the ranks check this later.

    Args:
        job: the job of the run.
        num_ranks: the number of ranks.

    Raises:
        ConfigError: there are more ranks than samples; the message contains both numbers.
    """
    roles, batch = job.strategy.roles(), job.train.global_batch_size
    replicate = roles.get("replicate")
    served = replicate is not None and replicate.name == "parameter_server"
    if batch is None or served or "cut" in roles or "slice" in roles:
        return
    if num_ranks > batch:
        raise ConfigError(
            f"-n {num_ranks}: each rank needs at least one sample of every step, and "
            f"train.global_batch_size is {batch}. Use -n {batch} or fewer, or "
            f"train.global_batch_size={num_ranks}"
        )


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True)
class _Failure:
    """The first rank that failed after a start of the ranks, and the progress of the run."""

    rank: int
    exitcode: int
    """The exit code of the process; if a signal ended it, minus the number of the signal."""
    first_step: int
    """The step of the checkpoint from which this start of the ranks resumed; 0 without one."""
    last_step: int
    """The last step that the run has done."""

    @property
    def killed(self) -> bool:
        return self.exitcode < 0

    @property
    def stopped(self) -> bool:
        """Whether Ctrl-C or SIGTERM ended the rank."""
        return self.exitcode in _STOPPED

    def repeats(self, before: _Failure | None) -> bool:
        """Whether the program failed twice after the same step, so that a restart does not help."""
        return (
            before is not None
            and not (self.killed or before.killed)
            and self.last_step == before.last_step
        )

    def is_gone(self, before: _Failure | None) -> bool:
        """Whether the same rank was lost twice, and no step was done between the losses."""
        return (
            before is not None
            and self.killed == before.killed
            and self.rank == before.rank
            and self.last_step <= self.first_step
        )


def devices_without(rank: int, num_ranks: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that hide the device of a lost rank from all ranks.

    A device that answers but fails would otherwise be given to another rank. If no variable names
    the visible devices, they are assumed to be the first `num_ranks`.

    Args:
        rank: the lost rank; its device is at this place among the visible ones.
        num_ranks: the number of ranks that had a device.
        environ: the environment of the ranks.

    Returns:
        Variables to set; none if the ranks share a device.
    """
    names = [name for name in VISIBLE_DEVICES if environ.get(name)] or [VISIBLE_DEVICES[0]]
    hidden = {}
    for name in names:
        visible = (
            environ[name].split(",") if environ.get(name) else list(map(str, range(num_ranks)))
        )
        if len(visible) >= num_ranks > 1:
            hidden[name] = ",".join(visible[:rank] + visible[rank + 1 :])
    return hidden


class _RestartingRun:
    """A run whose ranks are started again after a failure.

    Args:
        command: the command line of every rank.
        folder: the folder of this launch, for the note of the run.
        signals: the signals that this process has received.
        restarts: the largest number of restarts.
        min_ranks: the smallest number of ranks to continue with.
    """

    def __init__(
        self, command: list[str], folder: Path, signals: _Signals, restarts: int, min_ranks: int
    ) -> None:
        self._command = command
        self._folder = folder
        self._signals = signals
        self._restarts = restarts
        self._min_ranks = min_ranks
        self._words: list[str] = []
        self._note: RunNote | None = None
        self._visible: dict[str, str] = {}
        """The variables that hide the devices of lost ranks from all ranks."""

    def to_the_end(self, num_ranks: int) -> int:
        """Run the ranks, restart them after failures, and return the exit status."""
        before: _Failure | None = None
        for start in range(self._restarts + 1):
            kills = oom_kill_count()
            first_step = self._note.saved_step() if self._note else 0
            ranks = _Ranks(self._command, num_ranks, self._environ(num_ranks, start))
            failed = ranks.wait(self._signals, lambda: RunNote.find(self._folder))
            self._note = RunNote.find(self._folder) or self._note
            if self._signals.first is not None:
                if ranks.exitcodes[0] == -signal.SIGKILL:  # rank 0 could not print this itself
                    _say(left_behind(Path(self._note.folder) if self._note else None))
                return _stopped_status(ranks.exitcodes_that_count, self._signals.first)
            if failed is None:
                return REQUEUE_STATUS if REQUEUE_STATUS in ranks.exitcodes else 0
            failure = _Failure(*failed, first_step, self._note.last_step() if self._note else 0)
            status = _status(failed, kills)
            refused = status == 2 and start > 0 and self._min_ranks < num_ranks
            if start == self._restarts or (status == 2 and not refused) or failure.stopped:
                return status
            gone = refused or failure.is_gone(before)
            fewer = self._fewer(num_ranks) if gone else None
            if fewer is None and failure.repeats(before):
                _say(f"it failed twice after step {failure.last_step} and is not started again")
                return status
            self._prepare_restart(fewer)
            before, reason = failure, ""
            if fewer is not None:
                if not refused:
                    environ = {**os.environ, **self._visible}
                    self._visible |= devices_without(failure.rank, num_ranks, environ)
                reason = f"rank {failure.rank} was lost twice in a row and is left out: "
                reason = f"{num_ranks} ranks were refused: " if refused else reason
                num_ranks = fewer
            _say(f"{reason}restart {start + 1} of {self._restarts} {self._origin(num_ranks)}")
        return 1

    def _environ(self, num_ranks: int, start: int) -> dict[str, str]:
        """Return the environment that all ranks of one start share."""
        environ = {n: v for n, v in os.environ.items() if n not in _OF_OTHER_LAUNCHES}
        environ = {n: v for n, v in environ.items() if not n.startswith("TORCHELASTIC_")}
        environ.setdefault("OMP_NUM_THREADS", str(max(1, _usable_cores() // num_ranks)))
        environ |= allocator_environ(environ)
        environ |= self._visible
        environ |= {LAUNCH_VARIABLE: str(self._folder / str(start))}
        if start:
            environ[RESTART_VARIABLE] = Restart(tuple(self._words), "").text()
        return environ

    def _prepare_restart(self, fewer: int | None) -> None:
        """Set the overrides with which the run continues; `fewer` is a smaller number of ranks."""
        if self._note is None:  # the run ended before it had a folder
            return
        self._words = self._note.restart_words(self._words)
        if fewer is not None:
            self._words += self._note.words_on(fewer) or []

    def _fewer(self, num_ranks: int) -> int | None:
        """Return the largest number of ranks below `num_ranks` that can continue, or None."""
        possible = range(num_ranks - 1, self._min_ranks - 1, -1)
        return next(
            (n for n in possible if not self._note or self._note.words_on(n) is not None), None
        )

    def _origin(self, num_ranks: int) -> str:
        """Return text with the number of ranks and the step from which the run continues."""
        ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
        if self._note is None:
            return f"on {ranks}, from the beginning"
        step = self._note.saved_step()
        return (
            f"on {ranks}, from {f'step-{step}' if step else 'the beginning'} (step "
            f"{self._note.last_step()} was the last one done), global batch "
            f"{self._note.global_size}"
        )


class _Ranks:
    """The processes of one start of a run.

    Args:
        command: the command line of every rank.
        num_ranks: the number of ranks.
        environ: the environment that the ranks share.
    """

    def __init__(self, command: list[str], num_ranks: int, environ: Mapping[str, str]) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stopped_s = [0.0] * num_ranks
        self._spare: tuple[int, ...] = ()
        with self._ended_on_error():
            for rank in range(num_ranks):
                size = str(num_ranks)
                variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                variables |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
                # preexec_fn is safe: no other thread of this process could hold a lock at the fork.
                process = subprocess.Popen(
                    command, env={**environ, **variables}, preexec_fn=_stop_with_parent()
                )
                self._processes.append(process)

    @property
    def exitcodes(self) -> list[int | None]:
        """The exit code of each rank: None while it runs; minus the number if a signal ended it."""
        return [process.poll() for process in self._processes]

    @property
    def exitcodes_that_count(self) -> list[int | None]:
        """The exit codes, with 0 for a spare rank that failed."""
        ended = self.exitcodes
        return [0 if _failed(c) and n in self._spare else c for n, c in enumerate(ended)]

    def wait(
        self, signals: _Signals, find_note: Callable[[], RunNote | None]
    ) -> tuple[int, int] | None:
        """Wait until all ranks have ended; end them after a rank has failed.

        Args:
            signals: the signals that this process has received. The first is forwarded once.
            find_note: returns the note that the ranks have written for this process, or None.

        Returns:
            The rank that failed first, and its exit code; None if no rank failed.
        """
        failed: tuple[int, int] | None = None
        forwarded, deadline, next_reminder = False, math.inf, math.inf
        with self._ended_on_error():
            while None in self.exitcodes:
                now = time.monotonic()
                if failed is None:
                    failed, next_reminder = self._first_failure(find_note), now + _PAGE_S
                if failed is not None and now >= next_reminder:
                    deadline = min(deadline, now + _SHUTDOWN_S)
                    self._send(signal.SIGTERM)
                    next_reminder = now + _REMINDER_S
                if signals.first is not None and not forwarded:
                    saves = signals.first in _SAVING
                    deadline = min(deadline, now + (SAVE_S if saves else _SHUTDOWN_S))
                    self._send(signals.first)
                    forwarded = True
                if signals.second or now > deadline:
                    self._send(signal.SIGKILL)
                self._kill_stopped_ranks(0.0 if failed else None, find_note)
                time.sleep(_POLL_S)
        return failed or self._first_failure(find_note)

    def _first_failure(self, find_note: Callable[[], RunNote | None]) -> tuple[int, int] | None:
        """Return the rank to blame and its exit code; None while only spare ranks have failed."""
        if any(map(_failed, self.exitcodes)):
            note = find_note()
            self._spare = note.spare if note else ()
        return _first_failure(self.exitcodes_that_count)

    def _kill_stopped_ranks(
        self, patience_s: float | None, find_note: Callable[[], RunNote | None]
    ) -> None:
        """Kill ranks that are stopped (SIGSTOP), which do not react to SIGTERM.

        Args:
            patience_s: 0 kills them at once; None waits for the timeout of the run.
            find_note: returns the note of the run, which contains its timeout, or None.
        """
        for rank, process in enumerate(self._processes):
            if process.poll() is not None or not _is_stopped(process.pid):
                self._stopped_s[rank] = 0.0
                continue
            # The time is counted, not read from a clock, because Ctrl-Z stops this process, too.
            self._stopped_s[rank] += _POLL_S
            if patience_s is None:
                note = find_note()
                limit = (note.timeout if note else _USUAL_TIMEOUT_S) + _REMINDER_S
                if self._stopped_s[rank] > limit:
                    _say(f"rank {rank} has been stopped (SIGSTOP) for {limit:.0f} s and is killed")
                    process.kill()
            else:
                process.kill()

    def _send(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    @contextlib.contextmanager
    def _ended_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._send(signal.SIGKILL)
            raise


class _Signals:
    """Record the signals that this process receives inside a `with` block."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.second = False
        """Whether another signal came later. The ranks are then killed at once."""
        self._at = 0.0
        self._before: dict[int, Any] = {}

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self._at = number, now
        elif now - self._at > _SAME_S:
            self.second = True

    def __enter__(self) -> _Signals:
        for number in _FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _first_failure(exitcodes: Sequence[int | None]) -> tuple[int, int] | None:
    """Return the failed rank to blame and its exit code: a killed rank, or else the lowest."""
    failed = [(n, c) for n, c in enumerate(exitcodes) if _failed(c)]
    return min(((n, c) for n, c in failed if c is not None), key=lambda f: f[1] >= 0, default=None)


def _failed(exitcode: int | None) -> bool:
    return exitcode not in (None, 0, REQUEUE_STATUS)


def _stopped_status(exitcodes: Sequence[int | None], number: int) -> int:
    """Return the exit status after a signal, which depends on whether the ranks have saved."""
    if set(exitcodes) <= {0, REQUEUE_STATUS}:
        return REQUEUE_STATUS if REQUEUE_STATUS in exitcodes else 0
    # A rank that could not save prints why and ends with 1.
    return 1 if number in _SAVING and 1 in exitcodes else 128 + number


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat[stat.rfind(")") + 2 :][:1] == "T"


def _stop_with_parent() -> Callable[[], None]:
    """Return a function that a rank calls first, so that it gets SIGTERM if this process dies."""
    if sys.platform != "linux":
        return lambda: None
    import ctypes

    library, parent = ctypes.CDLL(None), os.getpid()

    def call() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return call


def _say(text: str) -> None:
    sys.stderr.write(f"bigtrain: {text}\n")


def _status(first_failure: tuple[int, int], kills_before: int) -> int:
    """Return the exit status for the first failure; print the likely cause of a signal.

    Args:
        first_failure: the rank that failed first, and its exit code.
        kills_before: the number of processes that the kernel had killed before the start because
            memory ran out.
    """
    rank, exitcode = first_failure
    if exitcode < 0:
        number = -exitcode
        cause = "a crash in native code?"
        if number == signal.SIGABRT:
            cause = (
                "a crash in native code? On GPUs NCCL's watchdog aborts a rank, too, if an "
                "exchange takes longer than mesh.timeout: see its line above."
            )
        if number == signal.SIGKILL:
            cause = f"host memory ran out? ({host_memory_line()})"
            if oom_kill_count() > kills_before:
                cause = (
                    f"the kernel killed it because host memory ran out ({host_memory_line()}). Use "
                    "fewer ranks, a smaller train.micro_batch_size, or --cap SIZE, which explains "
                    "the use of memory."
                )
        sys.stderr.write(
            f"bigtrain: rank {rank} was killed (signal {number}): {cause} "
            "See the kernel's log: dmesg | tail\n"
        )
        return 1
    return exitcode if exitcode in (2, REQUEUE_STATUS, *_STOPPED) else 1
