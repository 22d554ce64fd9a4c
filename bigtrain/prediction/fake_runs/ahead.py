"""Make runs on fake tensors before they are needed, in forked processes on idle cores."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from multiprocessing.synchronize import Semaphore
from typing import Any, NamedTuple

import torch

from bigtrain.devices import device_names, in_use
from bigtrain.machine.rates import usable_cores

LONGEST_WAIT = 120.0
"""Seconds to wait for a forked process before the run is made in this process instead."""

_idle_cores: ContextVar[Semaphore | None] = ContextVar("idle cores", default=None)
"""One token for each idle core; None if no process is forked."""


@contextmanager
def on_idle_cores(*, busy: int = 1) -> Iterator[None]:
    """A context in which runs are made ahead by forked processes, one on each idle core.

    It has no effect where torch sees a GPU: autograd then has a thread for each GPU, which a fork
    does not copy. It must not be used in a process that has a process group, or other threads that
    compute.

    Args:
        busy: the number of cores on which this process works. With 0, forked workers of this
            process claim their cores themselves, with `one_core`.
    """
    may_fork = hasattr(os, "fork") and not device_names()
    if not may_fork or usable_cores() <= 1 or _idle_cores.get() is not None:
        yield
        return
    # The first backward pass of a process starts autograd's threads, also for devices that are
    # fake. There is none yet, so this pass starts no thread, and later passes start none either.
    _run_backward()
    cores = multiprocessing.get_context("fork").Semaphore(usable_cores() - busy)
    token = _idle_cores.set(cores)
    try:
        yield
    finally:
        _idle_cores.reset(token)


@contextmanager
def one_core() -> Iterator[None]:
    """A context in which this process works on a core that no other process of it uses."""
    with _idle_cores.get() or nullcontext():
        yield


def can_fork() -> bool:
    """Whether a forked process can run a backward pass.

    It cannot if this process has used a GPU, or has run a backward pass where torch sees a GPU.
    """
    if not hasattr(os, "fork") or in_use():
        return False
    process = multiprocessing.get_context("fork").Process(target=_try_backward)
    process.start()
    process.join()
    return process.exitcode == 0


def _try_backward() -> None:
    try:
        _run_backward()
    except RuntimeError:  # the fork lacks autograd's threads
        os._exit(1)


def _run_backward() -> None:
    torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


class _Child(NamedTuple):
    """A forked process that makes a run."""

    process: BaseProcess
    results: Connection
    """Receives the result."""
    is_idle: Any
    """A shared number: 1 once the process has given its core back."""


class RunsAhead:
    """Runs that forked processes make while this process does something else.

    The runs are announced before they are needed. A forked process is started for an announced run
    as soon as a core is idle when this object is used.
    """

    def __init__(self) -> None:
        self._announced: dict[object, Callable[[], object]] = {}
        self._started: dict[object, _Child] = {}

    def announce(self, key: object, run: Callable[[], object]) -> None:
        """Have a run made ahead if a core is idle.

        Args:
            key: identifies the run.
            run: makes the run; it is called in a forked process. Its result has to pickle. A result
                of None means that the run has to be made in this process.
        """
        if _idle_cores.get() is not None and key not in self._started:
            self._announced.setdefault(key, run)
            self._start()

    def take(self, key: object) -> Any:
        """Return the result of an announced run; None if it has to be made in this process.

        If a forked process makes the run, this waits until it ends.
        """
        self._announced.pop(key, None)
        child = self._started.pop(key, None)
        self._start()
        return None if child is None else _result(child)

    def stop(self) -> None:
        """Forget all announced runs, and end the processes that make some."""
        self._announced.clear()
        for child in self._started.values():
            _end(child)
        self._started.clear()

    def _start(self) -> None:
        cores = _idle_cores.get()
        while self._announced and cores is not None and cores.acquire(block=False):
            key = next(iter(self._announced))
            context = multiprocessing.get_context("fork")
            results, into = context.Pipe(duplex=False)
            is_idle = context.RawValue("b", 0)
            process = context.Process(
                target=_send_result, args=(self._announced.pop(key), into, is_idle), daemon=True
            )
            process.start()
            into.close()
            self._started[key] = _Child(process, results, is_idle)


def _send_result(run: Callable[[], object], into: Connection, is_idle: Any) -> None:
    """Make a run in a forked process; if the run fails, so does the process."""
    cores = _idle_cores.get()
    _idle_cores.set(None)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent reports a Ctrl-C
    sys.stdout = sys.stderr = io.StringIO()  # the parent's runs print the same
    torch.set_num_threads(1)  # a fork has no copies of the threads that compute
    result = ForkingPickler.dumps(run())
    if cores is not None:
        is_idle.value = 1
        cores.release()
    into.send_bytes(result)  # waits until the parent reads


def _result(child: _Child) -> Any:
    """Return the result of a process; None if it fails."""
    try:
        return child.results.recv() if child.results.poll(LONGEST_WAIT) else None
    except EOFError:
        return None
    finally:
        _end(child)


def _end(child: _Child) -> None:
    """End a process, and give its core back unless the process has done so."""
    child.process.kill()
    child.process.join()
    child.results.close()
    cores = _idle_cores.get()
    if not child.is_idle.value and cores is not None:
        cores.release()
