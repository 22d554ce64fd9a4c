"""Runs on real ranks, forked from one process that has imported everything.

The parent computes nothing and has one thread, so its children may use any library. For each run it
forks a leader, which prepares the data that all ranks need and forks the ranks. They meet by a file
in a folder for this run, so no port is used. The result of a run is the values that its ranks
return, or the reason for which one of them failed. A leader and its ranks are one process group,
which ends with the run.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from bigtrain.errors import ConfigError
from bigtrain.memory.allocator import allocator_environ
from bigtrain.ranks.launcher_env import RankInfo

ENVIRONMENT = {"OMP_NUM_THREADS": "1", **allocator_environ(os.environ)}
"""One thread a rank, and the allocator that ranks of the command have."""
LOADED = (
    *("torch", "torch._dynamo", "torch.distributed.device_mesh", "torch.distributed.fsdp"),
    *(
        "torch.distributed.pipelining",
        "torchvision",
        "bigtrain.engine.engine",
        "bigtrain.engine.setup",
    ),
)
THEIRS = ("fairscale.nn.pipe", "fairscale.optim", "fairscale.nn.data_parallel")
STRATEGIES = (
    *("accumulation", "checkpointing", "ddp", "offload", "single", "zero"),
    *("zero.on_torch.fully_shard", "zero.on_torch.stage1", "zero.on_deepspeed.engine"),
    *("zero.on_fairscale.engine", "pipeline.on_torch", "pipeline.on_fairscale"),
    *("pipeline.on_devices", "pipeline.on_deepspeed", "pipeline.deepspeed_runner"),
    "pipeline.fairscale_runner",
)
_FORK = multiprocessing.get_context("fork")
_LAST_WORDS_S = 5.0
"""How long a rank that ended without a word waits for another one's."""


@dataclass(frozen=True)
class Task:
    """One run: a function on some ranks."""

    name: str
    prepare: Callable[..., Any]
    """Called as `prepare(*args)` once, and may compute what it likes; its result is pickled."""
    call: Callable[..., Any]
    """Called as `call(context, prepared, *args)` on each rank; what it returns is pickled."""
    args: tuple[Any, ...]
    ranks: int
    pp: int
    limit_s: float
    group: bool = False
    """Whether one rank has a process group, too."""
    tp: int = 1


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    name: str
    values: tuple[Any, ...] = ()
    """What the ranks returned; empty where one failed."""
    refused: str | None = None
    """The message of the ConfigError that refused it."""
    failed: str | None = None
    """Any other reason, in one line."""


def load_everything() -> None:
    """Restart this program once with the right variables, and import what ranks may need."""
    if any(os.environ.get(key) != value for key, value in ENVIRONMENT.items()):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **ENVIRONMENT})
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (*LOADED, *THEIRS):
            import_module(name)
        import_module("bigtrain.strategies.deepspeed_adapter").load_deepspeed("cpu")
        for name in STRATEGIES:
            import_module(f"bigtrain.strategies.{name}")


def run_all(tasks: Iterable[Task], at_once: int) -> Iterator[Outcome]:
    """Run tasks, several at once; yield each outcome when it is there.

    Args:
        tasks: in the order in which they begin.
        at_once: the most ranks at a time, but for a task that alone has more.
    """
    waiting = list(tasks)
    going: list[_Going] = []
    try:
        while waiting or going:
            busy = sum(run.task.ranks for run in going)
            if waiting and (not going or busy + waiting[0].ranks <= at_once):
                going.append(_Going(waiting.pop(0)))
                continue
            left = min(run.deadline for run in going) - time.monotonic()
            wait([run.pipe for run in going], max(0.0, left))
            for run in list(going):
                outcome = run.look()
                if outcome is not None:
                    going.remove(run)
                    run.end()
                    yield outcome
    finally:
        for run in going:
            run.end()


class _Going:
    """A running task: its leader, as the parent sees it."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.deadline = time.monotonic() + task.limit_s
        self.pipe, child_pipe = _FORK.Pipe(duplex=False)
        self._process = _FORK.Process(target=_lead, args=(task, child_pipe))
        self._process.start()
        child_pipe.close()

    def look(self) -> Outcome | None:
        """Return the outcome if the run has ended, else None."""
        if self.pipe.poll():
            try:
                outcome: Outcome = pickle.loads(self.pipe.recv_bytes())
            except EOFError:
                return Outcome(self.task.name, failed="its leader ended without a message")
            return outcome
        if time.monotonic() > self.deadline:
            return Outcome(self.task.name, failed=f"not done after {self.task.limit_s:.0f} s")
        return None

    def end(self) -> None:
        """End the leader and its ranks."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.join()
        self._process.close()
        self.pipe.close()


def _lead(task: Task, pipe: Connection) -> None:
    """Prepare, fork the ranks, and send the parent their result."""
    os.setsid()
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)
    # In a separate process: autograd that has run in a parent does not run in its children.
    kind, value = _apart(lambda: task.prepare(*task.args))
    if kind == "done":
        with tempfile.TemporaryDirectory(prefix="bigtrain-forked-") as folder:
            outcome = _led(task, value, Path(folder))
    else:
        outcome = _outcome(task, kind, value)
    pipe.send_bytes(pickle.dumps(outcome))
    os._exit(0)


def _apart(run: Callable[[], Any]) -> tuple[str, Any]:
    parent_pipe, child_pipe = _FORK.Pipe(duplex=False)

    def answer() -> None:
        child_pipe.send_bytes(pickle.dumps(_answer(run)))
        os._exit(0)

    _FORK.Process(target=answer).start()
    child_pipe.close()
    try:
        kind_and_value: tuple[str, Any] = pickle.loads(parent_pipe.recv_bytes())
    except EOFError:
        return "failed", "it ended without a message while it was prepared"
    return kind_and_value


def _led(task: Task, prepared: Any, folder: Path) -> Outcome:
    ranks: dict[Connection, int] = {}
    for rank in range(task.ranks):
        parent_pipe, child_pipe = _FORK.Pipe(duplex=False)
        _FORK.Process(target=_rank, args=(task, prepared, rank, folder, child_pipe)).start()
        child_pipe.close()
        ranks[parent_pipe] = rank
    values: dict[int, Any] = {}
    silent: list[int] = []
    while ranks:
        ready = wait(list(ranks), _LAST_WORDS_S if silent else None)
        if not ready:
            break
        for pipe in ready:
            rank = ranks.pop(pipe)  # type: ignore[call-overload]
            try:
                kind, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except (
                EOFError
            ):  # mostly a consequence of another rank's failure, which is reported soon
                silent.append(rank)
                continue
            if kind != "done":
                reason = value if kind == "refused" else f"rank {rank}: {value}"
                return _outcome(task, kind, reason)
            values[rank] = value
    if silent:
        return Outcome(task.name, failed=f"rank {silent[0]} ended without a message")
    return Outcome(task.name, tuple(values[rank] for rank in range(task.ranks)))


def _outcome(task: Task, kind: str, reason: str) -> Outcome:
    if kind == "refused":
        return Outcome(task.name, refused=reason)
    return Outcome(task.name, failed=reason)


def _rank(task: Task, prepared: Any, rank: int, folder: Path, pipe: Connection) -> None:
    """Run one rank: connect, call, answer, and exit without the interpreter's slow shutdown."""
    import torch

    from bigtrain.ranks.connect import connect

    torch.set_num_threads(1)
    torch.manual_seed(0)
    ranks = task.ranks
    placement = RankInfo(
        rank=rank, local_rank=rank, world_size=ranks, local_world_size=ranks, launcher="python"
    )

    def run() -> Any:
        meet = folder / "meet"
        with connect(
            placement,
            device="cpu",
            pp=task.pp,
            tp=task.tp,
            store_path=meet,
            force_group=task.group,
        ) as context:
            _give_way()
            return task.call(context, prepared, *task.args)

    with suppress(SystemExit):  # another rank failed, and reports it itself
        pipe.send_bytes(pickle.dumps(_answer(run)))
    os._exit(0)


def _give_way() -> None:
    """Let gloo's threads end before this one: they hold tensors until then.

    With more ranks than cores they would be kept waiting, and what they hold counted, for as long
    as others work. To let go of a tensor that is tracked they need the interpreter, too.
    """
    sys.setswitchinterval(1e-6)
    with suppress(OSError, AttributeError):  # where the system has no such thing
        policy = os.SCHED_BATCH | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, policy, os.sched_param(0))


def _answer(run: Callable[[], Any]) -> tuple[str, Any]:
    """Return the result of a function: (done | refused | failed, the value or the reason)."""
    try:
        return "done", run()
    except ConfigError as error:
        return "refused", str(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is one row
        lines = str(error).strip().splitlines() or [""]
        where = traceback.extract_tb(error.__traceback__)[-1]
        source_line = f"{Path(where.filename).name}:{where.lineno}"
        return "failed", f"{type(error).__name__}: {lines[0]} ({source_line})"
