"""The rules of NCCL for the order of exchanges, as a simulation, and recordings to play in it.

A rank's host begins exchanges and does not wait for them. Each communicator has one queue on each
rank, in the order of the calls. An exchange at the head of its queue starts when the work that the
host queued before it is done, and ends when all its partners have started theirs (rendezvous). The
first exchange of a communicator blocks the host until all its ranks are there.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple
from unittest.mock import patch

import torch.distributed as dist

from bigtrain.ranks.context import RunContext

HOOK = 7_001
GROUP_MAKERS = (
    "torch.distributed.new_group",
    "torch.distributed.distributed_c10d.new_group",
    "torch.distributed.device_mesh.new_group",
)
HOST_EXCHANGES = ("all_gather_rows", "gather_objects", "all_gather_objects")
"""Methods of `RunContext` that go by gloo, beside NCCL."""


class Communicator(NamedTuple):
    """A communicator of NCCL."""

    name: str
    ranks: tuple[int, ...]


class Begin(NamedTuple):
    """An exchange begins: messages that are one group, or a collective if there are none."""

    communicator: Communicator
    messages: tuple[tuple[str, int], ...] = ()
    """('send' or 'receive', the other rank) of each."""
    kind: str = ""
    """The kind of a collective."""


class Wait(NamedTuple):
    """The work that is queued from here on waits for the exchange at this place of the program."""

    place: int


class Gather(NamedTuple):
    """The host waits for its device, and then for the hosts of these ranks."""

    ranks: tuple[int, ...]


class HostWait(NamedTuple):
    """The host waits until its device is past all that was queued before this place."""

    place: int


Program = Sequence[Begin | Wait | Gather | HostWait]
"""What a thread of a rank does, in order."""


@dataclass
class _Thread:
    rank: int
    program: Program
    host: int = 0
    """The place of the next operation that the host does."""
    waits: deque[int] = field(default_factory=deque)
    """The places that the queued work waits for, in order."""
    queued: int = 0
    ended: int = 0
    """Waits that were queued, and those that are over."""
    done: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.waits_before = [0, *accumulate(isinstance(o, Wait) for o in self.program)]
        """By place, the waits in the program before it."""


class _Exchange(NamedTuple):
    thread: _Thread
    place: int
    after: int
    """The waits of its thread that must be over before it starts."""
    keys: tuple[tuple[Any, ...], ...]
    """Names of its parts, which are the same on both sides."""


class _Machine:
    def __init__(self, programs: Mapping[tuple[int, str], Program], made: bool) -> None:
        self.threads = [_Thread(rank, program) for (rank, _), program in programs.items()]
        self._all_made = made
        self._made: set[Communicator] = set()
        self._queues: dict[tuple[int, Communicator], deque[_Exchange]] = defaultdict(deque)
        self._counts: dict[tuple[Any, ...], int] = defaultdict(int)
        self._ready: dict[tuple[Any, ...], set[int]] = defaultdict(set)
        self.wrong: list[str] = []

    def run(self) -> list[str]:
        while any([self._hosts(), self._devices()]):  # both, in turn
            pass
        left = [t for t in self.threads if t.host < len(t.program) or t.waits]
        return self.wrong + [
            f"rank {t.rank} stands still at {t.host} of {len(t.program)}: "
            f"{t.program[t.host] if t.host < len(t.program) else 'the end'}; its device waits for "
            f"{t.program[t.waits[0]] if t.waits else 'nothing'}"
            for t in left
        ]

    def _hosts(self) -> bool:
        moved = False
        for thread in self.threads:
            while thread.host < len(thread.program):
                operation = thread.program[thread.host]
                if isinstance(operation, Gather):
                    break
                if isinstance(operation, HostWait):
                    if thread.ended < thread.waits_before[operation.place]:
                        break
                elif isinstance(operation, Begin):
                    if not self._is_made(operation.communicator):
                        break
                    self._queue(thread, operation)
                else:
                    thread.waits.append(operation.place)
                    thread.queued += 1
                thread.host += 1
                moved = True
        return self._gather() or moved

    def _is_made(self, communicator: Communicator) -> bool:
        """Whether a communicator exists; it is made when hosts of all its ranks begin with it."""
        if self._all_made or communicator in self._made:
            return True
        there = set()
        for thread in self.threads:
            if thread.host < len(thread.program):
                operation = thread.program[thread.host]
                if isinstance(operation, Begin) and operation.communicator == communicator:
                    there.add(thread.rank)
        if there == set(communicator.ranks):
            self._made.add(communicator)
            return True
        return False

    def _gather(self) -> bool:
        waiting = [
            (thread, thread.program[thread.host].ranks)  # type: ignore[union-attr]
            for thread in self.threads
            if thread.host < len(thread.program)
            and isinstance(thread.program[thread.host], Gather)
            and not thread.waits
        ]
        for _, ranks in waiting:
            members = [thread for thread, wanted in waiting if wanted == ranks]
            if {thread.rank for thread in members} == set(ranks):
                for thread in members:
                    thread.host += 1
                return True
        return False

    def _queue(self, thread: _Thread, begin: Begin) -> None:
        names: list[tuple[Any, ...]] = []
        for way, other in begin.messages:
            ends = (thread.rank, other) if way == "send" else (other, thread.rank)
            names.append((begin.communicator, way, *ends))
        names = names or [(begin.communicator, "all", thread.rank)]
        keys = []
        for name in names:
            number = self._counts[name]
            self._counts[name] += 1
            if begin.messages:
                keys.append((begin.communicator, *name[2:], number))
            else:
                keys.append((begin.communicator, begin.kind, number))
        exchange = _Exchange(thread, thread.host, thread.queued, tuple(keys))
        self._queues[thread.rank, begin.communicator].append(exchange)

    def _devices(self) -> bool:
        moved = False
        for thread in self.threads:
            while thread.waits and thread.waits[0] in thread.done:
                thread.waits.popleft()
                thread.ended += 1
                moved = True
        for (rank, _), queue in self._queues.items():
            if queue and queue[0].thread.ended >= queue[0].after:
                for key in queue[0].keys:
                    moved |= rank not in self._ready[key]
                    self._ready[key].add(rank)
        for (_, communicator), queue in self._queues.items():
            if queue and all(self._is_over(key, communicator) for key in queue[0].keys):
                exchange = queue.popleft()
                exchange.thread.done.add(exchange.place)
                moved = True
        return moved

    def _is_over(self, key: tuple[Any, ...], communicator: Communicator) -> bool:
        ranks = set(key[1:3]) if len(key) == 4 else set(communicator.ranks)
        return self._ready[key] == ranks


def play(programs: Mapping[tuple[int, str], Program], *, made: bool = False) -> list[str]:
    """Play the programs of all ranks under NCCL's rules.

    Args:
        programs: by rank and the name of the thread.
        made: whether all communicators exist before, as where the group has a bound device.

    Returns:
        Where each rank stands still; empty if all programs end.
    """
    return _Machine(programs, made).run()


class ProgramRecorder:
    """Records what this rank exchanges within a `with` block, as programs for `play`.

    Collectives count as waited for at once. That may make more stand still, and not less.

    Args:
        pairs: whether messages that begin alone use a communicator of the two ranks, as in runs
            with stages; otherwise they use that of the group.
    """

    def __init__(self, rank: int, *, pairs: bool) -> None:
        self._rank, self._pairs = rank, pairs
        self.programs: dict[str, list[Begin | Wait | Gather]] = defaultdict(list)
        self._groups: list[Any] = []
        self._local = threading.local()
        self._patches = ExitStack()

    def __enter__(self) -> ProgramRecorder:
        for group in list(dist.distributed_c10d._world.pg_names):
            self._watch(group)
        make = self._watching(dist.new_group)
        for name in GROUP_MAKERS:
            self._patches.enter_context(patch(name, make))
        for name in HOST_EXCHANGES:
            by_host = self._by_host(getattr(RunContext, name))
            self._patches.enter_context(patch.object(RunContext, name, by_host))
        for name in ("isend", "irecv"):
            call = self._message(getattr(dist, name), name)
            for module in ("torch.distributed", "torch.distributed.distributed_c10d"):
                self._patches.enter_context(patch(f"{module}.{name}", call))
        batch = self._batch(dist.batch_isend_irecv)
        self._patches.enter_context(patch("torch.distributed.batch_isend_irecv", batch))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()
        for group in self._groups:
            group.unregister_pre_hook(HOOK)

    @property
    def _program(self) -> list[Begin | Wait | Gather]:
        return self.programs[threading.current_thread().name]

    def _watch(self, group: Any) -> None:
        if not isinstance(group, dist.ProcessGroup) or any(g is group for g in self._groups):
            return
        self._groups.append(group)
        communicator = _communicator(group)

        def begins(call: Any) -> None:
            kind = call.name.name
            if kind in ("SEND", "RECV") or getattr(self._local, "host", False):
                return
            self._program.append(Begin(communicator, kind=kind))
            self._program.append(Wait(len(self._program) - 1))

        group.register_pre_hook(HOOK, begins)

    def _watching(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **options: Any) -> Any:
            group = make(*args, **options)
            self._watch(group)
            return group

        return made

    def _by_host(self, gather: Callable[..., Any]) -> Callable[..., Any]:
        def gathered(context: RunContext, value: Any, axis: Any = None) -> Any:
            ranks = tuple(dist.get_process_group_ranks(context.group(axis)))
            self._program.append(Gather(ranks))
            self._local.host = True
            try:
                return gather(context, value, *(() if axis is None else (axis,)))
            finally:
                self._local.host = False

        return gathered

    def _message(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        way = "send" if name == "isend" else "receive"

        def begun(*given: Any, **options: Any) -> Any:
            _, peer, group = (*given, None, None)[:3]
            group = options.get("group", group)
            local = options.get("group_dst", options.get("group_src"))
            other = options.get("dst", options.get("src", peer))
            if local is not None:
                other = dist.get_global_rank(group, local)
            batch = getattr(self._local, "batch", None)
            if batch is not None:
                batch.append((way, other))
                return call(*given, **options)
            communicator = _communicator(group)
            if self._pairs:
                pair = tuple(sorted((self._rank, other)))
                communicator = Communicator(f"{communicator.name} pair", pair)
            self._program.append(Begin(communicator, ((way, other),)))
            return self._waited(call(*given, **options), len(self._program) - 1)

        return begun

    def _batch(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def begun(operations: list[Any]) -> Any:
            self._local.batch = []
            try:
                works = call(operations)
            finally:
                messages, self._local.batch = self._local.batch, None
            self._program.append(Begin(_communicator(operations[0].group), tuple(messages)))
            place = len(self._program) - 1
            return [self._waited(work, place) for work in works]

        return begun

    def _waited(self, work: Any, place: int) -> Any:
        return _Work(work, lambda: self._program.append(Wait(place)))


class _Work:
    """A message's handle, whose `wait` is recorded."""

    def __init__(self, work: Any, note: Callable[[], None]) -> None:
        self._work, self._note = work, note

    def wait(self, *args: Any) -> Any:
        self._note()
        return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _communicator(group: Any) -> Communicator:
    group = group or dist.group.WORLD
    return Communicator(group.group_name, tuple(dist.get_process_group_ranks(group)))
