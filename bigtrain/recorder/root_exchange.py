"""Exchanges of the ranks that are left, where some may be lost: by messages through rank 0.

A collective needs every rank. gloo breaks off a message from a rank that has ended at once, and
leaves messages between others as they are: so rank 0 hears every rank that is there, and answers
each. Who is lost, it alone decides, and all have the same result. Rank 0 is never spare.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bigtrain.recorder.ring import FlightRecorder

_TAG = 2
"""Of these messages, beside others of the same group."""


@dataclass(frozen=True)
class RootExchange:
    """Rank 0 in the middle.

    Args:
        group: of all ranks, on the CPU.
        recorder: of this rank; its `losses` say who is lost.
        world_size: ranks of the run.
        watched: whether a wait that is longer than exchanges may be is one that hangs.
    """

    group: dist.ProcessGroup
    recorder: FlightRecorder
    world_size: int
    watched: bool

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's object, on every rank; None of one that is lost."""
        found: list[Any] = self.broadcast(self.gather(value))
        return found

    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's object on rank 0, None of one that is lost; None elsewhere."""
        if self.recorder.rank:
            self._send(0, value)
            return None
        return [value, *map(self._receive, range(1, self.world_size))]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's object, on every rank."""
        if self.recorder.rank:
            return self._receive(0)
        for rank in range(1, self.world_size):
            self._send(rank, value)
        return value

    def _send(self, rank: int, value: Any) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self._note("send to", rank, len(data))
        with going_on_without(rank, self.recorder):
            for tensor in (torch.tensor([len(data)]), data):
                dist.send(tensor, rank, self.group, tag=_TAG)

    def _receive(self, rank: int) -> Any:
        size, found = torch.zeros(1, dtype=torch.int64), []
        self._note("receive from", rank, size.nbytes)
        with going_on_without(rank, self.recorder):
            self._fill(size, rank)
            data = torch.empty(int(size), dtype=torch.uint8)
            self._fill(data, rank)
            found.append(pickle.loads(data.numpy().tobytes()))
        return found[0] if found else None

    def _fill(self, tensor: torch.Tensor, rank: int) -> None:
        work = dist.irecv(tensor, rank, self.group, tag=_TAG)
        if work is not None:
            work.wait()  # here, and not in torch: see `waiting`

    def _note(self, way: str, rank: int, nbytes: int) -> None:
        """What is waited for, in the words by which `waiting` knows it; or that it may last."""
        words = f"{way} rank {rank}, {nbytes} bytes"
        self.recorder.note(words if self.watched else "an exchange that may take long")


@contextmanager
def going_on_without(rank: int, recorder: FlightRecorder) -> Iterator[None]:
    """Leave the `with` block where an exchange with this rank breaks because it was lost.

    Any other error goes on its way.
    """
    try:
        yield
    except RuntimeError:
        if not recorder.lost_ranks.confirm(rank):
            raise
