"""End all ranks when one rank fails; only the failed rank shows a traceback."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from bigtrain.errors import ConfigError, NonFiniteError, OutOfMemoryError
from bigtrain.ranks.exit_status import (
    OPEN_BLOCKS,
    error_summary,
    exit_process,
    exit_status_of,
    is_clean_exit,
    is_interrupt,
    is_peer_failure,
    mark_as_echo,
    mark_reporting_rank,
    write_error_file,
)
from bigtrain.ranks.failure_hub import FailureHub, FailureListener, RunEnd
from bigtrain.ranks.hang_watch import watch_for_hangs
from bigtrain.ranks.launcher_env import RankInfo
from bigtrain.ranks.preemption import PreemptionNotice
from bigtrain.ranks.rendezvous import Rendezvous
from bigtrain.ranks.restart import RestartRequest, left_behind
from bigtrain.recorder.page import Cause, show_page
from bigtrain.recorder.ring import FlightRecorder

_ECHO_PATIENCE_S = 3.0
"""Seconds to wait for the hub's message after a collective broke. If a peer died, the message comes
within milliseconds."""
_SIGNAL_PATIENCE_S = 3.0
"""Seconds within which the main thread must run a signal's handler; otherwise it is taken for
blocked."""
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_FINISH_S = 20.0
"""Seconds that the failing rank has to print, clean up and exit, before it is ended."""


@contextlib.contextmanager
def guard_ranks(
    placement: RankInfo,
    meeting: Rendezvous,
    recorder: FlightRecorder,
    *,
    timeout_s: float = math.inf,
) -> Iterator[None]:
    """End all ranks if one rank fails inside a `with` block.

    The rank that fails first raises its exception. Every other rank ends without a message and with
    the same exit status, even if its main thread is blocked.

    Args:
        placement: the rank of this process.
        meeting: the rendezvous; its store gets the address of the hub.
        recorder: records the events of this rank.
        timeout_s: seconds that a rank may wait for an exchange.
    """
    if placement.world_size == 1:
        with guard_alone(recorder):
            yield
        return
    watch = _connect_listener(placement, meeting, recorder)
    # Signals are outermost, because a launcher may end the remaining ranks while they still report.
    hangs = watch_for_hangs(watch, recorder, timeout_s)
    with _signals(watch), _reported(watch), _last_words(watch), hangs:
        yield


@contextlib.contextmanager
def _reported(watch: FailureListener | None) -> Iterator[None]:
    """Report how the block ends; end without a message if another rank failed first."""
    try:
        yield
    except GeneratorExit:
        # The block is still open at the interpreter's end: `_last_words` has reported already, and
        # no thread can be started.
        if not sys.is_finalizing():
            _close(watch)
        raise
    except RestartRequest as error:
        _ask_for_restart(watch, error)
        raise
    except BaseException as error:
        if is_clean_exit(error):
            _close(watch)
            raise
        ending = _report(watch, error)
        if is_interrupt(error):
            if ending is not None and ending.status not in _STOPPED:
                mark_as_echo(error)
            raise
        if ending is not None and watch is not None:
            try:
                watch.grace()
            except (SystemExit, KeyboardInterrupt) as late:
                mark_as_echo(late)
                raise
            raise _quiet_end(error, ending.status) from None
        write_error_file(error)
        mark_reporting_rank(error)
        _end_later(exit_status_of(error))
        raise
    _close(watch)


class _QuietConfigError(ConfigError, SystemExit):
    """The `ConfigError` of a rank, after another rank has reported its own.

    A script can catch it as on any other rank. If nobody catches it, the process ends without a
    message, as with `SystemExit`.
    """


def _quiet_end(error: BaseException, status: int) -> BaseException:
    """Return the exception that ends a rank without a message.

    Args:
        error: the error of this rank.
        status: the exit status of the rank that failed first.
    """
    if not isinstance(error, ConfigError) or status != error.exit_status:
        return SystemExit(status)
    quiet = _QuietConfigError(str(error))
    quiet.code = status
    return quiet


@contextlib.contextmanager
def guard_alone(recorder: FlightRecorder) -> Iterator[None]:
    """Write the flight recorder's page if a run of one process fails inside the block.

    SIGUSR2 writes the page, too.

    Args:
        recorder: records the events of this process.
    """
    try:
        with _shown_on_signal(recorder):
            yield
    except Exception as error:
        if exit_status_of(error) == 1 and recorder.folder is not None:
            recorder.fail(error)
            cause = Cause("failed", recorder.rank, error_summary(error))
            show_page(recorder, {recorder.rank: recorder.record()}, cause)
        raise


@contextlib.contextmanager
def _shown_on_signal(recorder: FlightRecorder) -> Iterator[None]:
    """Show the flight recorder's page on SIGUSR2, unless the signal has another handler."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL:
        yield
        return

    def show() -> None:
        show_page(recorder, {recorder.rank: recorder.record()}, Cause("asked", recorder.rank))

    def on_question(_number: int, _frame: FrameType | None) -> None:
        threading.Thread(target=show, name="bigtrain-page", daemon=True).start()

    signal.signal(signal.SIGUSR2, on_question)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGUSR2) is on_question:
            signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def _connect_listener(
    placement: RankInfo, meeting: Rendezvous, recorder: FlightRecorder
) -> FailureListener | None:
    """Return a connection to the hub, which rank 0 starts; None if a firewall blocks it.

    Without a connection, only collectives notice the failure of another rank.
    """
    if placement.rank == 0:
        hub = FailureHub(
            one_node=placement.one_node, token=meeting.secret, world_size=placement.world_size
        )
        # Every program that reaches the store can read it, so a secret is not written there.
        open_token = "" if meeting.secret else hub.token
        meeting.store.set("hub", f"{hub.port} {open_token}")
    port, _, open_token = meeting.store.get("hub").decode().partition(" ")
    token = meeting.secret or open_token
    host = "127.0.0.1" if placement.one_node or placement.rank == 0 else meeting.host
    try:
        return FailureListener(host, int(port), token, placement.rank, recorder)
    except OSError:
        return None


def _report(watch: FailureListener | None, error: BaseException) -> RunEnd | None:
    """Report an error to the other ranks; return why the run has ended already, else None."""
    if watch is None:
        return None
    is_echo = is_peer_failure(error)
    watch.recorder.fail(error)
    patience = _ECHO_PATIENCE_S if is_echo else 0.0
    text = error_summary(error)
    ending = watch.report(text, exit_status_of(error), patience_s=patience)
    if ending is None and watch.records and exit_status_of(error) != 2:
        kind = "found" if isinstance(error, NonFiniteError) else "failed"
        cause = Cause("waited" if is_echo else kind, watch.rank, text)
        show_page(watch.recorder, watch.records, cause)
    return ending


def _ask_for_restart(watch: FailureListener | None, error: RestartRequest) -> None:
    """Request a restart of all ranks, and fail if the run has ended or there is no connection."""
    if watch is None:
        text = f"{error}, but the other ranks cannot be told: no connection to rank 0's host"
        failure = OutOfMemoryError(text)
        write_error_file(failure)
        mark_reporting_rank(failure)
        raise failure from None
    ending = watch.report(error.restart.text(), error.exit_status)
    if ending is not None and ending.status != error.exit_status:
        watch.grace()
        raise SystemExit(ending.status) from None


def _close(watch: FailureListener | None) -> None:
    if watch is not None:
        watch.close()


@contextlib.contextmanager
def _last_words(watch: FailureListener | None) -> Iterator[None]:
    """Report an error that ends the program while the block is open, as in a user's script."""
    if watch is None:
        yield
        return
    previous_hook = sys.excepthook

    def speaks(error: BaseException) -> bool:
        if _report(watch, error) is None:
            write_error_file(error)
            return True
        watch.grace()
        return False

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if speaks(error):
            previous_hook(kind, error, trace)

    OPEN_BLOCKS.append(speaks)  # under `run_guarded` no error reaches the hook
    sys.excepthook = show
    atexit.register(watch.close)
    try:
        yield
    finally:
        OPEN_BLOCKS.remove(speaks)
        atexit.unregister(watch.close)
        if sys.excepthook is show:
            sys.excepthook = previous_hook


def _end_later(status: int) -> None:
    def finish() -> None:
        time.sleep(_FINISH_S)
        os._exit(status)

    threading.Thread(target=finish, name="bigtrain-finish", daemon=True).start()


@contextlib.contextmanager
def _signals(watch: FailureListener | None) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end a blocked rank, and report a stop instead of a lost rank.

    A Python handler runs only when the main thread executes Python code again, which may never
    happen in a collective. But the interpreter writes the number of a signal to a socket at once,
    and a thread reads it there. Handlers of other code are not replaced, whether they are installed
    before the block or inside it.
    """
    if watch is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = threading.Event()
    replaced = _install(handled)
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def forward(number: int) -> None:
        handler = signal.getsignal(number)
        if isinstance(handler, PreemptionNotice):
            if not handler.is_second():
                return
        elif handler is None or handler is not replaced.get(number):
            return
        if number == signal.SIGUSR2:
            watch.ask()
            return
        status = 128 + (signal.SIGTERM if number == signal.SIGUSR1 else number)
        watch.report("", status)
        if not handled.wait(_SIGNAL_PATIENCE_S):
            _end_blocked(watch, status)

    def forward_signals() -> None:
        # This thread may outlive the process groups, so it must not hold a handler that refers to
        # them.
        while number := reader.recv(1):
            forward(number[0])

    threading.Thread(target=forward_signals, name="bigtrain-signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        writer.close()
        for number, handler in replaced.items():
            if signal.getsignal(number) is handler:
                is_interrupt_signal = number == signal.SIGINT
                signal.signal(
                    number, signal.default_int_handler if is_interrupt_signal else signal.SIG_DFL
                )


def _end_blocked(watch: FailureListener, status: int) -> None:
    """End a rank whose main thread is blocked; rank 0 prints what its main thread would print."""
    if watch.rank == 0:
        sys.stderr.write(f"bigtrain: {left_behind(watch.recorder.folder)}\n")
    exit_process(status)


def _install(handled: threading.Event) -> dict[int, Callable[[int, FrameType | None], Any]]:
    """Install handlers for SIGINT, SIGTERM and SIGUSR2 if they have the default; return them."""

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        handled.set()
        signal.default_int_handler(number, frame)

    def on_terminate(number: int, _frame: FrameType | None) -> None:
        handled.set()
        raise SystemExit(128 + number)

    def on_question(_number: int, _frame: FrameType | None) -> None:
        """Do nothing: the thread that reads the signals requests the page."""

    installed: dict[int, Callable[[int, FrameType | None], Any]] = {}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, on_interrupt)
        installed[signal.SIGINT] = on_interrupt
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, on_terminate)
        installed[signal.SIGTERM] = on_terminate
    if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, on_question)
        installed[signal.SIGUSR2] = on_question
    return installed
