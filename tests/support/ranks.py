"""Run a function on several real ranks from a test: `run_ranks(fn, 2, *args)`.

The ranks are forked from a zygote that has imported torch and bigtrain (and DeepSpeed, if a
strategy runs on it). They rendezvous by a file in a temporary folder, without a fixed port and
without retries.

A process that has answered a call also answers the next one, unless the call has changed its global
state (`support.process_state`). It then connects anew and adopts the caller's folder, variables and
streams. This saves a quarter of the CPU time of a small training. A call that fails ends all of its
ranks. Processes with DeepSpeed answer only one call.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from support.rank_process import Call, serve_calls
from support.zygote import Child, Flavour, zygote

from bigtrain.job.load import job_from_keys
from bigtrain.job.presets import preset_names

# Seconds in which a rank that the failing rank tells to end does so.
_END_S = 10.0
_KEPT = 4
"""Idle ranks, by flavour and environment variables."""
_CALLS = 100
"""A process ends after this number of calls, to release the memory it has accumulated."""
_NOT_OURS = "PYTEST_CURRENT_TEST"


class RankFailure(AssertionError):
    """A rank raised; the message holds its rank and its traceback, and `cause` is the exception."""

    def __init__(self, rank: int, text: str, cause: BaseException | None) -> None:
        super().__init__(f"rank {rank} failed:\n{text}")
        self.rank = rank
        self.cause = cause


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    pp: int = 1,
    dp: int = -1,
    tp: int = 1,
    timeout: float = 30.0,
    seed: int = 0,
    force_group: bool = False,
    flavour: Flavour | None = None,
    killed: Collection[int] = (),
    fresh: bool = False,
) -> list[Any]:
    """Call `fn(context, *args)` on every rank and return the results in the order of ranks.

    Args:
        fn: a function at the top level of a module.
        world_size: number of ranks, each a process with one thread.
        args: further arguments; they are pickled, and so are the results.
        timeout_s: seconds after which the ranks are ended and their stacks shown.
        pp: size of the pipeline axis.
        dp: size of the data axis.
        tp: size of the tensor axis.
        timeout: seconds a collective may take.
        seed: the seed in the context.
        force_group: make a process group even for one rank.
        flavour: libraries that the ranks have imported at the start; they are DeepSpeed's if an
            argument names a strategy that runs on it, and plain by default.
        killed: ranks that the function kills; their results are None.
        fresh: use new processes, which answer only this call.

    Raises:
        RankFailure: a rank raised or was killed; the first failure is reported.
        TimeoutError: with the stack of every rank that was still running.
    """
    with tempfile.TemporaryDirectory(prefix="bigtrain-ranks-") as name:
        folder = Path(name)
        options = {"pp": pp, "dp": dp, "tp": tp, "timeout": timeout, "force_group": force_group}
        flavour = "deepspeed" if _names_deepspeed(args) else flavour or "plain"
        # DeepSpeed keeps global meshes and timers of earlier engines.
        fresh = fresh or flavour == "deepspeed"
        environ = {name: value for name, value in os.environ.items() if name != _NOT_OURS}
        function = pickle.dumps((fn, args))
        ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                ranks.append(_take(flavour, environ, rank, fresh=fresh))
                is_last = fresh or rank >= _KEPT
                where = (rank, world_size, folder, os.getcwd(), list(sys.path), environ)
                ranks[rank].send(Call(*where, options, seed, function, is_last))
            until = time.monotonic() + timeout_s
            results = _collect(ranks, folder, until, timeout_s, killed)
            if not fresh and not killed:
                _waiting.setdefault(ranks[0].kind, {}).update(enumerate(ranks[:_KEPT]))
                del ranks[:_KEPT]
            return results
        finally:
            for left in ranks:
                left.end()


class _Rank:
    """The caller's end of a process of `support.rank_process`.

    Args:
        flavour: libraries it has imported.
        environ: all of its environment variables.
    """

    def __init__(self, flavour: Flavour, environ: dict[str, str]) -> None:
        self.kind = (flavour, frozenset(environ.items()))
        self._calls = 0
        self._line, theirs = socket.socketpair()
        with theirs:
            self.process: Child = zygote(flavour).call(
                serve_calls, (), [theirs.fileno()], {**environ, "OMP_NUM_THREADS": "1"}
            )
        self.pipe = Connection(os.dup(self._line.fileno()))

    def send(self, call: Call) -> None:
        """Let the process answer a call, with this process's standard output and error."""
        self._calls += 1
        socket.send_fds(self._line, [b"!"], [1, 2])
        self.pipe.send_bytes(pickle.dumps(call))

    def is_as_new(self) -> bool:
        """Wait for the last, answered call; return whether it has left the process unchanged."""
        try:
            changed = pickle.loads(self.pipe.recv_bytes())
            return not changed and self._calls < _CALLS
        except (EOFError, OSError):  # the zygote has ended, and so have its processes
            return False

    def end(self) -> None:
        """End the process: close the pipe if it has answered, otherwise kill it."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_WR)
        with contextlib.suppress(TimeoutError, RuntimeError):
            self.process.wait(0.5)
        with contextlib.suppress(RuntimeError):  # the zygote has ended, and so has the process
            self.process.close()
        self.pipe.close()
        self._line.close()


_waiting: dict[tuple[str, frozenset[tuple[str, str]]], dict[int, _Rank]] = {}


def _take(flavour: Flavour, environ: dict[str, str], number: int, *, fresh: bool) -> _Rank:
    """Return an idle unchanged process that has only been rank `number`, or a new one.

    torch caches the shards of a rank by the mesh, and the mesh of another rank is equal to it.
    """
    kind = (flavour, frozenset(environ.items()))
    for other in [other for other in _waiting if other[0] == flavour and other != kind]:
        for rank in _waiting.pop(other).values():  # a process reads some variables only once
            rank.end()
    idle = None if fresh else _waiting.get(kind, {}).pop(number, None)
    if idle is not None:
        if idle.is_as_new():
            return idle
        idle.end()
    return _Rank(flavour, environ)


def end_waiting_ranks() -> None:
    """End the processes that wait for another call."""
    for ranks in _waiting.values():
        for rank in ranks.values():
            rank.end()
    _waiting.clear()


def _names_deepspeed(arguments: Iterable[Any]) -> bool:
    """Whether an argument names a strategy that runs on DeepSpeed."""
    for found in arguments:
        if isinstance(found, list | tuple) and _names_deepspeed(found):
            return True
        if isinstance(found, str) and _on_deepspeed() & set(found.split("+")):
            return True
    return False


@functools.cache
def _on_deepspeed() -> frozenset[str]:
    """The presets that run on DeepSpeed."""
    found = set()
    for name in preset_names("strategies"):
        said = job_from_keys(name, {}).strategy.model_dump(exclude={"name"}, exclude_none=True)
        for role in said.values():
            usual = "deepspeed" if role["name"] == "zero" else "torch"
            if role.get("engine", usual) == "deepspeed":
                found.add(name)
    return frozenset(found)


def _collect(
    ranks: list[_Rank],
    folder: Path,
    deadline: float,
    timeout_s: float,
    killed: Collection[int],
) -> list[Any]:
    results: dict[int, Any] = {}
    silent: dict[int, int] = {}
    pipes = [rank.pipe for rank in ranks]
    while len(results) + len(silent) < len(pipes):
        waiting = {pipe: n for n, pipe in enumerate(pipes) if n not in results and n not in silent}
        # A rank that ended without a message has usually ended because of another, whose error
        # follows.
        patience = _END_S if silent else deadline - time.monotonic()
        ready = wait(list(waiting), max(0.0, min(patience, deadline - time.monotonic())))
        if not ready:
            if silent:
                break
            raise TimeoutError(_stacks(ranks, folder, sorted(waiting.values()), timeout_s))
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting[pipe]
            try:
                kind, value, cause = pickle.loads(pipe.recv_bytes())
            except EOFError:
                status = ranks[rank].process.wait(_END_S)
                if rank in killed and status == -signal.SIGKILL:
                    results[rank] = None
                else:
                    silent[rank] = status
                continue
            if kind == "error":
                raise RankFailure(rank, value, cause)
            results[rank] = value
    if silent:
        # A signal is a cause; an exit status may be a reaction to another rank's failure.
        rank = min(silent, key=lambda n: (silent[n] >= 0, n))
        raise RankFailure(rank, f"it ended with exit status {silent[rank]} and no message", None)
    return [results[rank] for rank in range(len(pipes))]


def _stacks(ranks: list[_Rank], folder: Path, running: list[int], timeout_s: float) -> str:
    for rank in running:
        ranks[rank].process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    parts = [f"ranks {running} of {len(ranks)} were still running after {timeout_s:.0f} s"]
    for rank in running:
        file = folder / f"stack-{rank}"
        parts.append(f"--- rank {rank}\n{file.read_text() if file.exists() else '(not started)'}")
    return "\n".join(parts)
