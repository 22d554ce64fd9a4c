"""Print failures and warnings once for all ranks, and compute the exit status of a process."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from bigtrain.errors import BigtrainError, OutOfMemoryError, plain_text
from bigtrain.ranks.launcher_env import in_slurm_step, launch_key, process_start_time
from bigtrain.ranks.restart import RestartRequest, restart_process

REQUEUE_STATUS = 75
"""Exit status of a run that a signal stopped and that has saved; it can be started again."""

OPEN_BLOCKS: list[Callable[[BaseException], bool]] = []
"""One function for each open block of `connect`.

The function reports an error to the other ranks, and returns whether this rank prints it.
`sys.excepthook` is not enough: `init_process_group` replaces it.
"""

_MOST_SHOWN = 5000
"""The largest number of characters of a message."""
_MULTI_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
# Words in errors of gloo, NCCL and the store about a lost or late peer; the errors have no common
# type.
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

_LIBRARIES = ("transformers", "huggingface_hub", "datasets", "diffusers", "accelerate", "timm")
"""Libraries whose loggers print the same warnings on every rank."""
_VARIABLES = {
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
"""Variables that these libraries read on import; values that the user has set are not replaced."""


def exit_status_of(error: BaseException) -> int:
    """Return the exit status of a process that ends with this error.

    The status is that of a `BigtrainError` (2 if the user's input is at fault), 130 for Ctrl-C, 143
    for SIGTERM, the code of a `SystemExit`, and otherwise 1.
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
    """Whether this error is a normal exit, which must not end the other ranks."""
    return isinstance(error, SystemExit) and exit_status_of(error) in (0, REQUEUE_STATUS)


def is_interrupt(error: BaseException) -> bool:
    """Whether Ctrl-C or SIGTERM stopped the process. No explanation is printed then."""
    stopped = (128 + signal.SIGINT, 128 + signal.SIGTERM)
    return isinstance(error, KeyboardInterrupt | SystemExit) and exit_status_of(error) in stopped


def is_peer_failure(error: BaseException) -> bool:
    """Whether an error may be a consequence of another rank's end: a collective broke or timed out.

    The result is a guess from the error's text. It affects the error message, and how long this
    rank waits for a reply from rank 0's `FailureHub`.
    """
    if not isinstance(error, RuntimeError | ConnectionError | TimeoutError):
        return False
    text = str(error).lower()
    return any(word in text for word in _ECHOES)


def error_summary(error: BaseException) -> str:
    """Return the type and the first line of an error, at most 300 characters."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def mark_reporting_rank(error: BaseException) -> None:
    """Mark the error as the one that `run_guarded` prints for all ranks."""
    error.bigtrain_first = True  # type: ignore[attr-defined]


def mark_as_echo(error: BaseException) -> None:
    """Mark an interrupt as the launcher's reaction to the failure of another rank."""
    error.bigtrain_echo = True  # type: ignore[attr-defined]


def is_stop(error: BaseException) -> bool:
    """Whether a signal stopped the whole run, and not only this rank after another rank failed."""
    return is_interrupt(error) and not hasattr(error, "bigtrain_echo")


def write_error_file(error: BaseException) -> None:
    """Write the traceback to torchrun's error file; no effect under other launchers."""
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with contextlib.suppress(OSError):
            get_error_handler().record_exception(error)


def run_guarded(main: Callable[[], int | None]) -> int:
    """Call `main`, print a failure, and return the exit status.

    A `BigtrainError` is printed as "bigtrain: ..." without a traceback, once for all ranks of a
    node. Ctrl-C and SIGTERM print nothing. Other errors are printed with their traceback.

    If there are several ranks, the function does not return in the rank that failed first: the
    process ends as soon as the failure is printed. Otherwise native threads of the broken run could
    abort the interpreter's shutdown (in about one of a hundred runs) with exit status 134.

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
    """Print the error if this rank should print it; return the exit status."""
    # If `main` has left a block of `connect` open, the error must be reported to the other ranks.
    if OPEN_BLOCKS and not hasattr(error, "bigtrain_first"):
        if not OPEN_BLOCKS[-1](error):
            return exit_status_of(error)
        mark_reporting_rank(error)
    if isinstance(error, BigtrainError):
        if getattr(error, "bigtrain_first", False) or is_first_to_report(os.environ):
            printed = error.printed if isinstance(error, OutOfMemoryError) else ""
            rest = _as_shown(error).removeprefix(printed).lstrip("\n")
            sys.stderr.write(f"{rest}\n" if printed else f"bigtrain: {rest}\n")
    else:
        # The traceback begins after the frame of `run_guarded`, which does not help the user.
        shown = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, shown)
    if getattr(error, "bigtrain_first", False):
        exit_process(exit_status_of(error))
    return exit_status_of(error)


def _as_shown(error: BigtrainError) -> str:
    """Return the message as printable text, as it may contain any text of the user."""
    lines = [plain_text(line.replace("\t", " "), len(line) * 10) for line in str(error).split("\n")]
    text = "\n".join(lines)
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{text[: _MOST_SHOWN - 500]} [...] {text[-400:]}"  # the fix is at the end


def is_first_to_report(environ: Mapping[str, str]) -> bool:
    """Whether this rank is the first of its launch on this node to call this function.

    Before the ranks are connected, all of them find the same fault in the user's input. The first
    rank creates a file, and the other ranks then print nothing. This works under every launcher.
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
    mark = folder / f"bigtrain-{launch_key(environ)}.said"
    try:
        # Ranks started by hand have the same parent, a shell, in every launch. A file that is older
        # than this process is from an earlier launch.
        if mark.stat().st_mtime < process_start_time() - 1:
            mark.unlink()
    except OSError:
        pass
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def exit_process(status: int) -> None:
    """Flush the streams and end this process, from any thread, even if the main thread blocks."""
    # A blocked main thread may hold the lock of a stream, so flushing may take one second at most.
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(1.0)
    os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def warn_on_rank_0(rank: int) -> None:
    """Suppress warnings on all ranks except rank 0; errors are never suppressed.

    The function changes nothing if the user has configured warnings (`python -W`, PYTHONWARNINGS).

    Args:
        rank: the rank of this process.
    """
    if rank == 0 or sys.warnoptions:
        return
    for kind in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.simplefilter("ignore", kind)
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)
