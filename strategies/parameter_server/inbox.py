"""Headers of pushes and answers, and the inbox by which a server gets pushes as they arrive.

A thread for each worker waits for the header of its next push. If the worker dies, its connection
breaks at once and the thread reports it, so a server never waits for a push that cannot come.
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
"""The length of a push's header: the version of the parameters (nan if the worker will push no
more), the summed loss, the number of targets, and the gradient's norm."""
ANSWER_NUMBERS = 3
"""The length of an answer's header: the version, the staleness of the push, and the mean loss."""
_TAG = 1
_END_S = 5.0


class Heads:
    """Sends and receives headers of pushes and answers, as fp64 tensors on the CPU."""

    def __init__(self, context: RunContext) -> None:
        self._group = context.lost_ranks.group
        self._waiting: list[tuple[dist.Work | None, Tensor]] = []

    def send(self, numbers: Sequence[float], rank: int) -> None:
        """Begin to send a header to a rank."""
        head = torch.tensor(numbers, dtype=torch.float64)
        self._waiting.append((dist.isend(head, rank, self._group, tag=_TAG), head))

    def receive(self, size: int, rank: int) -> Tensor:
        """Begin to receive a header from a rank; the result is complete after `finish`."""
        head = torch.empty(size, dtype=torch.float64)
        self._waiting.append((dist.irecv(head, rank, self._group, tag=_TAG), head))
        return head

    def finish(self) -> None:
        """Wait for all sends and receives that have begun.

        Raises:
            RuntimeError: the connection to a rank broke.
        """
        for work, _ in self._waiting:
            if work is not None:
                work.wait()
        self._waiting.clear()


class Inbox:
    """The pushes that workers have announced to this server.

    Args:
        context: the ranks, of which all but the servers may be lost.
        first: the rank of the first worker; the other workers have the following ranks.
    """

    def __init__(self, context: RunContext, first: int) -> None:
        self._context, self._first = context, first
        self._arrived: SimpleQueue[tuple[int, list[float] | None]] = SimpleQueue()
        self._postponed: dict[int, list[float]] = {}
        self._threads = [
            threading.Thread(target=self._listen, args=(n,), name=f"bigtrain-inbox-{n}")
            for n in range(context.world_size - first)
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def next(self, wanted: int | None, slowest: int) -> tuple[int, list[float] | None]:
        """Wait for a push; return the worker and the header, which is None if the worker is lost.

        Args:
            wanted: the worker whose push is returned; None for any worker. The loss of a worker is
                returned in either case.
            slowest: the worker for which the others may be waiting; it is named in the record of
                this rank's exchanges.
        """
        for worker in (wanted,) if wanted is not None else tuple(self._postponed):
            if worker in self._postponed:
                return worker, self._postponed.pop(worker)
        # The flight recorder's page of a hung run parses this note.
        source = self._first + (slowest if wanted is None else wanted)
        self._context.recorder.note(f"receive from rank {source}, {8 * PUSH_NUMBERS} bytes")
        while True:
            worker, head = self._arrived.get()
            if head is None or wanted in (None, worker):
                return worker, head
            self._postponed[worker] = head

    def close(self) -> None:
        """Wait up to 5 seconds for each thread; a thread ends when its worker leaves."""
        for thread in self._threads:
            thread.join(_END_S)

    def _listen(self, worker: int) -> None:
        while True:
            heads = Heads(self._context)
            try:
                head = heads.receive(PUSH_NUMBERS, self._first + worker)
                heads.finish()
            except RuntimeError:  # the server asks the hub whether the worker is lost
                self._arrived.put((worker, None))
                return
            if head[0].isnan():
                return
            self._arrived.put((worker, head.tolist()))
