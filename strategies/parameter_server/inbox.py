"""What goes before a push and its answer, and how a server hears of pushes in the order they come.

A thread for each worker waits for its next push. The connection of one that dies breaks at once,
and its thread says so: so a server that waits for pushes never waits for one that cannot come.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from bigtrain.ranks.context import RunContext

PUSH_NUMBERS = 4
"""Before a push: the version it was computed with (nan: there will be none any more), the summed
loss, over how many targets, the gradient's norm."""
ANSWER_NUMBERS = 3
"""Before an answer: the version, the staleness of the push, the mean loss of the last pushes."""
_TAG = 1
_END_S = 5.0


class Heads:
    """Numbers that go before, to some ranks and from some."""

    def __init__(self, context: RunContext) -> None:
        self._group = context.lost_ranks.group
        self._waiting: list[tuple[dist.Work | None, Tensor]] = []

    def send(self, numbers: Sequence[float], rank: int) -> None:
        """Begin to send."""
        head = torch.tensor(numbers, dtype=torch.float64)
        self._waiting.append((dist.isend(head, rank, self._group, tag=_TAG), head))

    def receive(self, size: int, rank: int) -> Tensor:
        """Begin to receive what is there after `finish`."""
        head = torch.empty(size, dtype=torch.float64)
        self._waiting.append((dist.irecv(head, rank, self._group, tag=_TAG), head))
        return head

    def finish(self) -> None:
        """Wait until all that was begun is over."""
        for work, _ in self._waiting:
            if work is not None:
                work.wait()
        self._waiting.clear()


class Inbox:
    """The pushes that workers have announced to this server.

    Args:
        context: its ranks may be lost, but for the servers.
        first: the rank of the first worker; the others follow it.
    """

    def __init__(self, context: RunContext, first: int) -> None:
        self._context, self._first = context, first
        self._come: SimpleQueue[tuple[int, list[float] | None]] = SimpleQueue()
        self._kept: dict[int, list[float]] = {}
        self._threads = [
            threading.Thread(target=self._listen, args=(n,), name=f"bigtrain-inbox-{n}")
            for n in range(context.world_size - first)
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def next(self, wanted: int | None, slowest: int) -> tuple[int, list[float] | None]:
        """Wait for a push; return the worker and what goes before it, None where it is lost.

        Args:
            wanted: the only worker that counts, but for losses; None for whoever comes first.
            slowest: the worker that the others may be waiting for.
        """
        for worker in (wanted,) if wanted is not None else tuple(self._kept):
            if worker in self._kept:
                return worker, self._kept.pop(worker)
        # The words by which a page of a run that hangs knows a wait.
        source = self._first + (slowest if wanted is None else wanted)
        self._context.recorder.note(f"receive from rank {source}, {8 * PUSH_NUMBERS} bytes")
        while True:
            worker, head = self._come.get()
            if head is None or wanted in (None, worker):
                return worker, head
            self._kept[worker] = head

    def close(self) -> None:
        """Wait for the threads: each ends with its worker."""
        for thread in self._threads:
            thread.join(_END_S)

    def _listen(self, worker: int) -> None:
        while True:
            heads = Heads(self._context)
            try:
                head = heads.receive(PUSH_NUMBERS, self._first + worker)
                heads.finish()
            except RuntimeError:  # whether it is lost, the hub knows
                self._come.put((worker, None))
                return
            if head[0].isnan():
                return
            self._come.put((worker, head.tolist()))
