"""Run a function on several real ranks from a test: `run_ranks(fn, 2, *args)`.

The ranks are forked from a server that has torch loaded, so a call costs a fork and a connection
and not an import of torch. They meet by a file in a folder of their own: no fixed port, no retry.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from bigtrain.ranks.launcher_env import Placement

_PRELOAD = [
    "torch",
    "torch._dynamo",  # every optimizer imports it
    "torch.distributed.device_mesh",
    "bigtrain.engine.engine",
    "bigtrain.strategies.ddp",
    "ranks",
]
# A rank that is told to end by the failing one does so within this time.
_END_S = 10.0


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

    Raises:
        RankFailure: a rank raised or was killed; the first one counts.
        TimeoutError: with the stack of every rank that was still running.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory(prefix="bigtrain-ranks-") as name:
        folder = Path(name)
        options = {"pp": pp, "dp": dp, "tp": tp, "timeout": timeout, "force_group": force_group}
        call = pickle.dumps((fn, args, options, seed))
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        try:
            for rank in range(world_size):
                mine, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main,
                    args=(rank, world_size, folder, call, theirs, dict(os.environ), sys.path),
                    daemon=True,
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(mine)
            return _collect(processes, pipes, folder, time.monotonic() + timeout_s, timeout_s)
        finally:
            _end(processes, pipes)


def _collect(
    processes: list[BaseProcess],
    pipes: list[Connection],
    folder: Path,
    deadline: float,
    timeout_s: float,
) -> list[Any]:
    results: dict[int, Any] = {}
    silent: dict[int, int] = {}
    while len(results) + len(silent) < len(pipes):
        waiting = {pipe: n for n, pipe in enumerate(pipes) if n not in results and n not in silent}
        # Ranks that ended without a word are most often the echo of one that is about to speak.
        patience = _END_S if silent else deadline - time.monotonic()
        ready = wait(list(waiting), max(0.0, min(patience, deadline - time.monotonic())))
        if not ready:
            if silent:
                break
            raise TimeoutError(_stacks(processes, folder, sorted(waiting.values()), timeout_s))
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting[pipe]
            try:
                kind, value, cause = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(_END_S)
                silent[rank] = processes[rank].exitcode or 0
                continue
            if kind == "error":
                raise RankFailure(rank, value, cause)
            results[rank] = value
    if silent:
        # A signal is the cause; an exit status is what the others answered to it.
        rank = min(silent, key=lambda n: (silent[n] >= 0, n))
        raise RankFailure(rank, f"it ended with exit status {silent[rank]} and no message", None)
    return [results[rank] for rank in range(len(pipes))]


def _stacks(processes: list[BaseProcess], folder: Path, ranks: list[int], timeout_s: float) -> str:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[rank].pid or 0, signal.SIGUSR1)
    time.sleep(0.5)
    parts = [f"ranks {ranks} of {len(processes)} were still running after {timeout_s:.0f} s"]
    for rank in ranks:
        file = folder / f"stack-{rank}"
        parts.append(f"--- rank {rank}\n{file.read_text() if file.exists() else '(not started)'}")
    return "\n".join(parts)


def _end(processes: list[BaseProcess], pipes: list[Connection]) -> None:
    for process in processes:
        # A rank that has answered only has to go; one that has not is not waited for.
        process.join(0.5 if process.exitcode is None else 0)
        if process.is_alive():
            process.kill()
        process.join()
        process.close()
    for pipe in pipes:
        pipe.close()


def _rank_main(
    rank: int,
    world_size: int,
    folder: Path,
    call: bytes,
    pipe: Connection,
    environ: dict[str, str],
    path: list[str],
) -> None:
    import torch

    from bigtrain.ranks.connect import connect

    # The fork server keeps the surroundings in which it was started; a test may have changed them.
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:] = path
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    stack = (folder / f"stack-{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack)
    placement = Placement(
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        launcher="python",
    )
    status = 0
    try:
        fn, args, options, seed = pickle.loads(call)
        torch.manual_seed(seed)
        with connect(
            placement,
            device="cpu",
            setup_timeout=30.0,
            seed=seed,
            store_path=folder / "meet",
            **options,
        ) as context:
            value = fn(context, *args)
            answer = pickle.dumps(("result", value, None))
        pipe.send_bytes(answer)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        text = traceback.format_exc()
        try:
            answer = pickle.dumps(("error", text, error))
            pickle.loads(answer)
        except Exception:
            answer = pickle.dumps(("error", text, None))
        pipe.send_bytes(answer)
        status = 1
    pipe.close()
    gc.collect()
    # Nothing of a rank outlives it, so the interpreter's slow farewell is left out.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
