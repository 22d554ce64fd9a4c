"""How a failure is shown and what the process returns: once, by one rank, with the right status."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from bigtrain.errors import BigtrainError, OutOfMemoryError, plain_text
from bigtrain.ranks.launcher_env import in_slurm_step, launch_key, process_start_time
from bigtrain.ranks.restart import RestartRequest, restart_process

REQUEUE_STATUS = 75
"""Exit status of a run that saved and stopped because it was told to; it may be started again."""

HELD_OPEN: list[Callable[[BaseException], bool]] = []
"""One for each block of `connect` that is open: tells the other ranks of an error, and returns
whether this rank is the one to say it. No hook of the interpreter: `init_process_group` has one."""

_MOST_SHOWN = 5000
"""Letters of a message."""
_MULTI_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
# How gloo, NCCL and the store speak of a peer that is gone or late; they share no exception type.
_ECHOES = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "timed out",
    "timeout",
    "gloo",
    "nccl",
    "socket",
)


def exit_status_of(error: BaseException) -> int:
    """Return the exit status of a process that ends with this error.

    2 for the user's input, 130 and 143 for Ctrl-C and SIGTERM, what SystemExit says, else 1.
    """
    if isinstance(error, BigtrainError):
        return error.exit_status
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        return 1
    return 1


def is_clean_exit(error: BaseException) -> bool:
    """Whether this is a way to finish, which must not end the other ranks."""
    return isinstance(error, SystemExit) and exit_status_of(error) in (0, REQUEUE_STATUS)


def is_interrupt(error: BaseException) -> bool:
    """Whether somebody outside stopped the process; then nothing is to be explained."""
    stopped = (128 + signal.SIGINT, 128 + signal.SIGTERM)
    return isinstance(error, KeyboardInterrupt | SystemExit) and exit_status_of(error) in stopped


def is_peer_failure(error: BaseException) -> bool:
    """Whether an error may be the echo of another rank's end: a collective that broke or timed out.

    Only a hint: it decides how long to wait for news of the other ranks, not who is at fault.
    """
    if not isinstance(error, RuntimeError | ConnectionError | TimeoutError):
        return False
    text = str(error).lower()
    return any(word in text for word in _ECHOES)


def error_summary(error: BaseException) -> str:
    """Return type and first line of an error, at most 300 characters."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def mark_reporting_rank(error: BaseException) -> None:
    """Note on the error that all ranks have agreed to hear this one; `run_guarded` then says it."""
    error.bigtrain_first = True  # type: ignore[attr-defined]


def mark_as_echo(error: BaseException) -> None:
    """Note on a stop that a launcher ends this rank because another one has failed."""
    error.bigtrain_echo = True  # type: ignore[attr-defined]


def is_stop(error: BaseException) -> bool:
    """Whether somebody outside stopped the run, and not only this rank of one that has failed."""
    return is_interrupt(error) and not hasattr(error, "bigtrain_echo")


def write_error_file(error: BaseException) -> None:
    """Leave the traceback where torchrun's agent looks for it; nothing under other launchers."""
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with contextlib.suppress(OSError):
            get_error_handler().record_exception(error)


def run_guarded(main: Callable[[], int | None]) -> int:
    """Call `main` and return the exit status, with every failure shown the way it deserves.

    A `BigtrainError` becomes "bigtrain: ..." without a traceback, said once for all ranks of a
    node; Ctrl-C and SIGTERM are quiet; anything else keeps its traceback.

    In the rank that failed first among several, this does not return: the process ends as soon as
    the failure is shown. Native threads of the broken run can abort the interpreter's own farewell
    (seen about once in a hundred ends), and the exit status would then be 134.

    Example:
        sys.exit(run_guarded(main))
    """
    if signal.getsignal(signal.SIGINT) is _end_quietly:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return main() or 0
    except RestartRequest as error:
        restart_process(error.restart.text())
        return error.exit_status
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(error.code + "\n")
        return exit_status_of(error)
    except KeyboardInterrupt as error:
        return exit_status_of(error)
    except BaseException as error:
        return _show(error)


def end_quietly_on_interrupt() -> None:
    """Let Ctrl-C end this process without a traceback until `run_guarded` is called."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_quietly)


def _end_quietly(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


def _show(error: BaseException) -> int:
    """Say what failed, where this rank is the one to say it; return the exit status."""
    # A block of `connect` that the main function has left open: its other ranks must hear of it.
    if HELD_OPEN and not hasattr(error, "bigtrain_first"):
        if not HELD_OPEN[-1](error):
            return exit_status_of(error)
        mark_reporting_rank(error)
    if isinstance(error, BigtrainError):
        if getattr(error, "bigtrain_first", False) or is_first_to_report(os.environ):
            told = error.told if isinstance(error, OutOfMemoryError) else ""
            rest = _as_shown(error).removeprefix(told).lstrip("\n")
            sys.stderr.write(f"{rest}\n" if told else f"bigtrain: {rest}\n")
    else:
        # The frame of run_guarded says nothing to the user.
        shown = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, shown)
    if getattr(error, "bigtrain_first", False):
        exit_process(exit_status_of(error))
    return exit_status_of(error)


def _as_shown(error: BigtrainError) -> str:
    """A message as a terminal may be given it, whatever names of the user's are in it."""
    lines = [plain_text(line.replace("\t", " "), len(line) * 10) for line in str(error).split("\n")]
    text = "\n".join(lines)
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{text[: _MOST_SHOWN - 500]} [...] {text[-400:]}"  # the fix is at the end


def is_first_to_report(environ: Mapping[str, str]) -> bool:
    """Whether this rank is the first of its launch on this node to ask.

    Before the ranks are connected all of them find the same fault in the user's input; a file
    made by the first one keeps the others quiet, under every launcher.
    """
    if environ.get("WORLD_SIZE") == "1" or not (
        any(name in environ for name in _MULTI_RANK_VARIABLES) or in_slurm_step(environ)
    ):
        return True
    folder = Path(tempfile.gettempdir())
    with contextlib.suppress(OSError):
        for old in folder.glob("bigtrain-*.said"):
            if old.stat().st_uid == os.getuid() and old.stat().st_mtime < time.time() - 3600:
                old.unlink(missing_ok=True)
    said = folder / f"bigtrain-{launch_key(environ)}.said"
    try:
        # Ranks started by hand have one shell as their parent, launch after launch. What was said
        # before this process began was said of an earlier one.
        if said.stat().st_mtime < process_start_time() - 1:
            said.unlink()
    except OSError:
        pass
    try:
        said.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def exit_process(status: int) -> None:
    """End this process from any thread, with what it has printed, whatever the main thread does."""
    # The blocked main thread may hold the lock of a stream: flushing gets a second, no more.
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(1.0)
    os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
