"""Run a function on several real ranks from a test: `run_ranks(fn, 2, *args)`.

The ranks are forked from a zygote that has torch and bigtrain loaded (DeepSpeed, too, where a
strategy runs on it). They meet by a file in a folder of their own: no fixed port, no retry.

A process that has answered a call also answers the next one, if the call has changed nothing in it
(`support.process_state`). It then connects anew and takes over the caller's folder, variables and
streams. This saves a quarter of the CPU time of a small training. A call that fails ends all of its
ranks. Processes with DeepSpeed answer one call only.
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

# A rank that is told to end by the failing one does so within this time.
_END_S = 10.0
_KEPT = 4
"""Ranks of one flavour and one set of variables that wait for the next call."""
_CALLS = 100
"""A process ends after so many, with whatever memory it has gathered."""
_NOT_OURS = "PYTEST_CURRENT_TEST"


class RankFailure(AssertionError):
    """A rank raised; the message holds its rank and its traceback, `cause` the error itself."""

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
        world_size: ranks, each a process with one thread.
        args: further arguments; they are pickled, and so are the results.
        timeout_s: seconds until the ranks are ended and their stacks shown.
        pp: ranks on the pipeline axis.
        dp: ranks on the data axis.
        tp: ranks on the tensor axis.
        timeout: seconds a collective may take.
        seed: the seed in the context.
        force_group: one rank has a process group, too.
        flavour: what the ranks have imported when they begin; where left out, DeepSpeed where an
            argument names a strategy that runs on it.
        killed: ranks that are killed: their results are None.
        fresh: in processes that have answered no other call, and answer none after it.

    Raises:
        RankFailure: a rank raised or was killed; the first one counts.
        TimeoutError: with the stack of every rank that was still running.
    """
    with tempfile.TemporaryDirectory(prefix="bigtrain-ranks-") as name:
        folder = Path(name)
        options = {"pp": pp, "dp": dp, "tp": tp, "timeout": timeout, "force_group": force_group}
        flavour = flavour or _flavour_for(args)
        fresh = fresh or flavour == "deepspeed"  # it remembers meshes and timers of earlier engines
        environ = {name: value for name, value in os.environ.items() if name != _NOT_OURS}
        function = pickle.dumps((fn, args))
        ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                ranks.append(_take(flavour, environ, fresh=fresh))
                is_last = fresh or rank >= _KEPT
                where = (rank, world_size, folder, os.getcwd(), list(sys.path), environ)
                ranks[rank].send(Call(*where, options, seed, function, is_last))
            until = time.monotonic() + timeout_s
            results = _collect(ranks, folder, until, timeout_s, killed)
            if not fresh and not killed:
                _waiting.setdefault(ranks[0].kind, [])[:0] = ranks[:_KEPT]
                del ranks[:_KEPT]
            return results
        finally:
            for left in ranks:
                left.end()


class _Rank:
    """A process of `support.rank_process`.

    Args:
        flavour: what it has imported.
        environ: all of its variables.
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
        """Have it answer a call, with this process's output and errors as its own."""
        self._calls += 1
        socket.send_fds(self._line, [b"!"], [1, 2])
        self.pipe.send_bytes(pickle.dumps(call))

    def is_as_new(self) -> bool:
        """Whether the last call, which it has answered, has changed nothing; waits for that."""
        try:
            changed = pickle.loads(self.pipe.recv_bytes())
            return not changed and self._calls < _CALLS
        except (EOFError, OSError):  # the zygote has ended, and its processes with it
            return False

    def end(self) -> None:
        """End it: one that has answered only has to go, one that has not is not waited for."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_WR)
        with contextlib.suppress(TimeoutError, RuntimeError):
            self.process.wait(0.5)
        with contextlib.suppress(RuntimeError):  # the zygote has ended, and this with it
            self.process.close()
        self.pipe.close()
        self._line.close()


_waiting: dict[tuple[str, frozenset[tuple[str, str]]], list[_Rank]] = {}


def _take(flavour: Flavour, environ: dict[str, str], *, fresh: bool) -> _Rank:
    """A rank that is as new, or a new one."""
    kind = (flavour, frozenset(environ.items()))
    for other in [other for other in _waiting if other[0] == flavour and other != kind]:
        for rank in _waiting.pop(other):  # a process reads some variables only once
            rank.end()
    while not fresh and _waiting.get(kind):
        rank = _waiting[kind].pop(0)
        if rank.is_as_new():
            return rank
        rank.end()
    return _Rank(flavour, environ)


def end_waiting_ranks() -> None:
    """End the processes that wait for another call."""
    for ranks in _waiting.values():
        for rank in ranks:
            rank.end()
    _waiting.clear()


def _flavour_for(arguments: Iterable[Any]) -> Flavour:
    for found in arguments:
        if isinstance(found, list | tuple) and _flavour_for(found) == "deepspeed":
            return "deepspeed"
        if isinstance(found, str) and _on_deepspeed() & set(found.split("+")):
            return "deepspeed"
    return "plain"


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
        # Ranks that ended without a word are most often the echo of one that is about to speak.
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
        # A signal is the cause; an exit status is what the others answered to it.
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
