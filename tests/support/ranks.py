"""Run a function on several real ranks from a test: `run_ranks(fn, 2, *args)`.

The ranks are forked from a zygote that has torch and bigtrain loaded (DeepSpeed, too, where a
strategy runs on it), so a call costs a fork and a connection and not an import. They meet by a
file in a folder of their own: no fixed port, no retry.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from support.zygote import Child, Flavour, zygote

from bigtrain.job.load import job_from_keys
from bigtrain.job.presets import preset_names
from bigtrain.ranks.launcher_env import RankInfo

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
    flavour: Flavour | None = None,
    killed: Collection[int] = (),
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

    Raises:
        RankFailure: a rank raised or was killed; the first one counts.
        TimeoutError: with the stack of every rank that was still running.
    """
    with tempfile.TemporaryDirectory(prefix="bigtrain-ranks-") as name:
        folder = Path(name)
        options = {"pp": pp, "dp": dp, "tp": tp, "timeout": timeout, "force_group": force_group}
        call = pickle.dumps((fn, args, options, seed))
        processes: list[Child] = []
        pipes: list[Connection] = []
        try:
            flavour = flavour or _flavour_for(args)
            for rank in range(world_size):
                mine, theirs = Pipe(duplex=False)
                pipes.append(mine)
                arguments = (rank, world_size, folder, call)
                with theirs:
                    process = zygote(flavour).call(_rank_main, arguments, [theirs.fileno()])
                processes.append(process)
            until = time.monotonic() + timeout_s
            return _collect(processes, pipes, folder, until, timeout_s, killed)
        finally:
            _end(processes, pipes)


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
    processes: list[Child],
    pipes: list[Connection],
    folder: Path,
    deadline: float,
    timeout_s: float,
    killed: Collection[int],
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
                status = processes[rank].wait(_END_S)
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


def _stacks(processes: list[Child], folder: Path, ranks: list[int], timeout_s: float) -> str:
    for rank in ranks:
        processes[rank].send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    parts = [f"ranks {ranks} of {len(processes)} were still running after {timeout_s:.0f} s"]
    for rank in ranks:
        file = folder / f"stack-{rank}"
        parts.append(f"--- rank {rank}\n{file.read_text() if file.exists() else '(not started)'}")
    return "\n".join(parts)


def _end(processes: list[Child], pipes: list[Connection]) -> None:
    for process in processes:
        # A rank that has answered only has to go; one that has not is not waited for.
        with contextlib.suppress(TimeoutError):
            process.wait(0.5)
        process.close()
    for pipe in pipes:
        pipe.close()


def _rank_main(
    rank: int,
    world_size: int,
    folder: Path,
    call: bytes,
    answers: int,
) -> None:
    import torch

    from bigtrain.ranks.connect import connect

    pipe = Connection(answers, readable=False)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    # It does not take the processor from a thread of gloo that has woken it: see `support.peaks`.
    with contextlib.suppress(OSError):  # a sandbox may not let it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    stack = (folder / f"stack-{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack)
    placement = RankInfo(
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
