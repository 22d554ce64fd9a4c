"""The process of a rank: it answers one call after the other, and connects anew for each.

After each call it names what the call has changed in the process; if that is anything, the caller
ends the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import random
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.process_state import State, changes, state, watched

from bigtrain.ranks.launcher_env import RankInfo


@dataclass(frozen=True)
class Call:
    """A function to be called on a rank.

    Args:
        rank: of this process.
        world_size: ranks that are called together.
        meeting: a folder for these ranks and this call alone.
        cwd: the current folder.
        path: `sys.path`, by which functions are found.
        environ: all variables.
        options: further arguments of `bigtrain.ranks.connect`.
        seed: of torch, and in the context.
        function: pickled, with its arguments.
        is_last: whether the process ends with it.
    """

    rank: int
    world_size: int
    meeting: Path
    cwd: str
    path: list[str]
    environ: dict[str, str]
    options: dict[str, Any]
    seed: int
    function: bytes
    is_last: bool


def serve_calls(number: int) -> None:
    """Answer calls until the other end is closed, or a call fails.

    A call comes as one byte with the standard output and error of the caller, then a pickled
    `Call`. It is answered with ("result", value, None), or ("error", traceback, exception); after
    a result with the list of what the call has changed in this process.

    Args:
        number: the file descriptor of a Unix socket.
    """
    line = socket.socket(fileno=number)
    pipe = Connection(os.dup(number))
    # It does not take the processor from a thread of gloo that has woken it: see `support.peaks`.
    with contextlib.suppress(OSError):  # a sandbox may not let it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    known: State = {}
    while True:
        started, streams, _, _ = socket.recv_fds(line, 1, 2)
        if not started:
            os._exit(0)
        for stream, standard in zip(streams, (1, 2), strict=True):
            os.dup2(stream, standard)
            os.close(stream)
        call: Call = pickle.loads(pipe.recv_bytes())
        before = _answer(call, pipe, known)
        if call.is_last:
            # Nothing of a rank outlives it, so the interpreter's slow farewell is left out.
            os._exit(0)
        _let_go_of_streams()
        known = state()
        pipe.send_bytes(pickle.dumps(changes(before, known)))


def _let_go_of_streams() -> None:
    """Hold no file of the caller's until the next call brings its own."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for standard in (1, 2):
        os.dup2(nothing, standard)
    os.close(nothing)


def _answer(call: Call, pipe: Connection, known: State) -> State:
    """Call the function and answer; the process ends here if that fails.

    Args:
        call: what is asked for.
        pipe: for the answer.
        known: the state after the last call; empty before the first.

    Returns:
        the state before the call, with that of the modules which it was the first to import.
    """
    import torch

    os.chdir(call.cwd)
    sys.path[:] = call.path
    os.environ.clear()
    os.environ.update(call.environ)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    status: int | None = None
    before: State = {}
    with (call.meeting / f"stack-{call.rank}").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        try:
            function, arguments = pickle.loads(call.function)
            before = {} if call.is_last else _with_new_modules(known)
            random.seed()
            torch.manual_seed(call.seed)
            answer = _connect_and_call(call, function, arguments)
            sys.stdout.flush()
            sys.stderr.flush()
            pipe.send_bytes(answer)
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException as error:
            pipe.send_bytes(_as_answer(error, traceback.format_exc()))
            status = 1
        faulthandler.unregister(signal.SIGUSR1)
    sys.excepthook = sys.__excepthook__  # torch sets its own with a process group, for good
    gc.collect()
    if status is not None:
        pipe.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return before


def _with_new_modules(known: State) -> State:
    """Add the state of modules that have been imported since the last call."""
    return known if known.keys() >= set(watched()) else {**state(), **known}


def _connect_and_call(call: Call, function: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    """Connect, call the function, and return its result as an answer."""
    from bigtrain.ranks.connect import connect

    placement = RankInfo(
        rank=call.rank,
        local_rank=call.rank,
        world_size=call.world_size,
        local_world_size=call.world_size,
        launcher="python",
    )
    with connect(
        placement,
        device="cpu",
        setup_timeout=30.0,
        seed=call.seed,
        store_path=call.meeting / "meet",
        **call.options,
    ) as context:
        return pickle.dumps(("result", function(context, *arguments), None))


def _as_answer(error: BaseException, text: str) -> bytes:
    try:
        answer = pickle.dumps(("error", text, error))
        pickle.loads(answer)
    except Exception:
        answer = pickle.dumps(("error", text, None))
    return answer
