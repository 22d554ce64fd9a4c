"""End a run in which a rank waits too long for another rank, and name the missing rank.

At a timeout, gloo raises an error in the waiting rank, and NCCL's watchdog aborts the process.
Neither names the missing rank. So this watch acts before the backend's timeout, while the main
threads still wait. It reads the record only after `mesh.timeout` without an event, so a healthy run
has no overhead.

Some exchanges may take hours, as during a checkpoint on a slow disk or a download. A rank that is
busy still answers the hub, with another thread. A rank that does not answer for `mesh.timeout` is
taken for stopped.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from bigtrain.errors import LaunchError
from bigtrain.ranks.exit_status import exit_process, write_error_file
from bigtrain.ranks.failure_hub import FailureListener
from bigtrain.recorder.page import Cause, show_page
from bigtrain.recorder.ring import FlightRecorder
from bigtrain.recorder.waiting import Wait, wait_of

BACKEND_GRACE_S = 10.0
"""Seconds by which the backend's timeout is longer than that of this watch."""
_LOOK_S = 1.0


@contextlib.contextmanager
def watch_for_hangs(
    listener: FailureListener | None, recorder: FlightRecorder, timeout_s: float
) -> Iterator[None]:
    """End the run if this rank waits too long for an exchange inside the block.

    Args:
        listener: the connection to the other ranks; None for no watch.
        recorder: the events of this rank, with the exchange that it waits for.
        timeout_s: seconds that an exchange may take, unless it has a longer timeout.
    """
    if listener is None:
        yield
        return
    over = threading.Event()

    def look() -> None:
        pause = shortest = min(_LOOK_S, timeout_s / 4)
        while not over.wait(pause):
            if recorder.idle_s < timeout_s:
                pause = shortest
                continue
            # A rank without events need not wait for an exchange: it may write a checkpoint.
            silent, pause = listener.silent_rank(pause), max(shortest, timeout_s / 10)
            text = _overdue_words(recorder, timeout_s, silent)
            if text and not over.is_set():
                _end(listener, recorder, text, timeout_s)

    threading.Thread(target=look, name="bigtrain-hangs", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def overdue(recorder: FlightRecorder, timeout_s: float) -> Wait | None:
    """Return the exchange that this rank has waited for longer than allowed; None without one.

    Args:
        recorder: the events of this rank.
        timeout_s: seconds that an exchange may take, unless it has a longer timeout.
    """
    if recorder.idle_s < timeout_s:
        return None
    try:
        wait = wait_of(recorder.record())
    except Exception:  # the format of torch's record differs between versions
        return None
    if wait is None:
        return None
    # If torch did not record a message, only the run's timeout is known for it.
    allowed = max(timeout_s, wait.timeout_s - BACKEND_GRACE_S)
    return wait if wait.seconds >= allowed else None


def _overdue_words(
    recorder: FlightRecorder, timeout_s: float, silent: tuple[int, float] | None
) -> str:
    """Return why the run must end; empty if it need not end."""
    wait = overdue(recorder, timeout_s)
    if wait is not None:
        return f"rank {wait.rank} waited {wait.seconds:.0f} s for {wait.kind} (mesh.timeout)"
    if silent is not None and silent[1] >= timeout_s:
        return (
            f"rank {silent[0]} has not answered for {silent[1]:.0f} s (mesh.timeout): it is "
            "stopped, or stuck in native code"
        )
    return ""


def _end(listener: FailureListener, recorder: FlightRecorder, text: str, timeout_s: float) -> None:
    if listener.report(text, 1) is not None:
        if listener.ending is None:  # the hub does not answer, and another rank prints the page
            listener.grace()
            exit_process(1)
        return  # another rank reported first, and the listener ends this process
    page = show_page(recorder, listener.records, Cause("waited", recorder.rank, text))
    write_error_file(
        LaunchError(
            f"{page.headline}. If that may take longer than {timeout_s:.0f} s, set mesh.timeout"
        )
    )
    exit_process(1)
