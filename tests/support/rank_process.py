"""The process of a rank: it answers one call after another, and connects anew for each.

After each call it lists the changes that the call made to the process. If there are any, the caller
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
    """A function call on a rank.

    Args:
        rank: of this process.
        world_size: number of ranks in the call.
        meeting: a folder for the rendezvous of these ranks in this call.
        cwd: the current folder during the call.
        path: `sys.path`, by which the function's module is imported.
        environ: all environment variables.
        options: further arguments of `bigtrain.ranks.connect`.
        seed: for torch, and in the context.
        function: pickled, with its arguments.
        is_last: whether the process ends after the call.
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
    """Answer calls until the other end is closed or a call fails.

    A call arrives as one byte with the caller's standard output and error, then a pickled `Call`.
    The answer is ("result", value, None) or ("error", traceback, exception); a result is followed
    by the list of changes that the call made to this process.

    Args:
        number: the file descriptor of a Unix socket.
    """
    line = socket.socket(fileno=number)
    pipe = Connection(os.dup(number))
    # At low priority this thread does not delay a gloo thread that has woken it: see
    # `support.peaks`.
    with contextlib.suppress(OSError):  # a sandbox may forbid it
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
            # No work remains after a rank's last call, so we skip the interpreter's slow shutdown.
            os._exit(0)
        _let_go_of_streams()
        known = state()
        pipe.send_bytes(pickle.dumps(changes(before, known)))


def _let_go_of_streams() -> None:
    """Close the caller's streams until the next call brings new ones."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for standard in (1, 2):
        os.dup2(nothing, standard)
    os.close(nothing)


def _answer(call: Call, pipe: Connection, known: State) -> State:
    """Call the function and answer; if it fails, the process ends here.

    Args:
        call: the function and its surroundings.
        pipe: for the answer.
        known: the state after the last call; empty before the first.

    Returns:
        the state before the call, with the state of modules that the call was the first to import.
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
    sys.excepthook = sys.__excepthook__  # torch replaces it when it makes a process group
    gc.collect()
    if status is not None:
        pipe.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return before


def _with_new_modules(known: State) -> State:
    """Add the state of modules that were imported after the last call."""
    return known if known.keys() >= set(watched()) else {**state(), **known}


def _connect_and_call(call: Call, function: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    """Connect, call the function, and return the pickled answer with its result."""
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
