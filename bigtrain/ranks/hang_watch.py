"""A rank that waits too long for another says so itself, whatever the backend would do.

gloo raises in the waiting rank, NCCL's watchdog aborts the process: neither says who did not come.
So this watch comes before them, while the main threads still stand where they wait. It looks only
where nothing has happened for as long as an exchange may take, so a run that works pays nothing.

Some exchanges may take hours: a checkpoint on a slow disk, a download. A rank that works at that
answers when it is called, by a thread of its own; one that does not for `mesh.timeout` is stopped.
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
"""How much later than this watch the backend itself breaks off."""
_LOOK_S = 1.0


@contextlib.contextmanager
def watch_for_hangs(
    listener: FailureListener | None, recorder: FlightRecorder, timeout_s: float
) -> Iterator[None]:
    """End the run where this rank waits for an exchange for longer than that, inside the block.

    Args:
        listener: tells the others; without one nobody watches.
        recorder: knows what this rank waits for.
        timeout_s: seconds an exchange may take, without those that have a patience of their own.
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
            # Nothing happens, and yet nobody may be waited for, as while a checkpoint is written.
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
    """What this rank waits for, where it has waited and done nothing else for so many seconds."""
    if recorder.idle_s < timeout_s:
        return None
    try:
        wait = wait_of(recorder.record())
    except Exception:  # torch's own record changes from version to version
        return None
    if wait is None:
        return None
    # Of a message that torch did not record there is no other time than the run's.
    allowed = max(timeout_s, wait.timeout_s - BACKEND_GRACE_S)
    return wait if wait.seconds >= allowed else None


def _overdue_words(
    recorder: FlightRecorder, timeout_s: float, silent: tuple[int, float] | None
) -> str:
    """Why the run is to end; empty where it is not."""
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
        if listener.ending is None:  # the hub is silent, and another rank speaks
            listener.grace()
            exit_process(1)
        return  # another rank was first, and the hub ends this process
    page = show_page(recorder, listener.records, Cause("waited", recorder.rank, text))
    write_error_file(
        LaunchError(
            f"{page.headline}. Where that may take longer than {timeout_s:.0f} s, set mesh.timeout"
        )
    )
    exit_process(1)
