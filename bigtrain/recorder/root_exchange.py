"""Exchanges that survive the loss of ranks, by messages through rank 0.

A collective needs every rank. A message does not: gloo aborts a message from a rank that has ended
at once, and messages between other ranks are not affected. So rank 0 receives from every rank and
answers each. It alone decides which ranks are lost, so that all have the same result. Rank 0 is
never spare.
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
"""The tag of these messages, which differs from that of others in the group."""


@dataclass(frozen=True)
class RootExchange:
    """Exchanges between rank 0 and all others.

    Args:
        group: the group of all ranks, on the CPU.
        recorder: this rank's recorder; its `lost_ranks` has the lost ones.
        world_size: the number of ranks of the run.
        watched: whether a wait that is longer than `mesh.timeout` counts as a hang.
    """

    group: dist.ProcessGroup
    recorder: FlightRecorder
    world_size: int
    watched: bool

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's object on every rank; None for a lost rank."""
        values: list[Any] = self.broadcast(self.gather(value))
        return values

    def gather(self, value: Any) -> list[Any] | None:
        """Return every rank's object on rank 0, with None for a lost rank; None elsewhere."""
        if self.recorder.rank:
            self._send(0, value)
            return None
        return [value, *map(self._receive, range(1, self.world_size))]

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's object on every rank."""
        if self.recorder.rank:
            return self._receive(0)
        for rank in range(1, self.world_size):
            self._send(rank, value)
        return value

    def _send(self, rank: int, value: Any) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self._note("send to", rank, len(data))
        with tolerating_loss_of(rank, self.recorder):
            for tensor in (torch.tensor([len(data)]), data):
                dist.send(tensor, rank, self.group, tag=_TAG)

    def _receive(self, rank: int) -> Any:
        size, values = torch.zeros(1, dtype=torch.int64), []
        self._note("receive from", rank, size.nbytes)
        with tolerating_loss_of(rank, self.recorder):
            self._fill(size, rank)
            data = torch.empty(int(size), dtype=torch.uint8)
            self._fill(data, rank)
            values.append(pickle.loads(data.numpy().tobytes()))
        return values[0] if values else None

    def _fill(self, tensor: torch.Tensor, rank: int) -> None:
        work = dist.irecv(tensor, rank, self.group, tag=_TAG)
        if work is not None:
            work.wait()  # waits in this file, by which `waiting` recognises it

    def _note(self, direction: str, rank: int, nbytes: int) -> None:
        """Record the message in the words that `waiting` reads, or that it may take long."""
        words = f"{direction} rank {rank}, {nbytes} bytes"
        self.recorder.note(words if self.watched else "an exchange that may take long")


@contextmanager
def tolerating_loss_of(rank: int, recorder: FlightRecorder) -> Iterator[None]:
    """Leave the `with` block if an exchange with this rank breaks because the rank was lost.

    Raises:
        RuntimeError: the exchange broke for another reason.
    """
    try:
        yield
    except RuntimeError:
        if not recorder.lost_ranks.confirm(rank):
            raise
