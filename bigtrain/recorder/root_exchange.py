"""Exchanges that survive the loss of ranks, by messages through rank 0.

A collective needs every rank. A message needs only two: gloo at once aborts a message from a rank
that has ended, and messages between other ranks are not affected. So rank 0 receives a message from
every rank and sends every rank the result. The result depends only on the messages that reached
rank 0, so all ranks have the same result. Rank 0 is never spare.
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
"""The tag of these messages. Other messages in the group have other tags."""


@dataclass(frozen=True)
class RootExchange:
    """Exchanges of Python objects between rank 0 and all other ranks.

    Args:
        group: the process group of all ranks, with a backend for tensors on the CPU.
        recorder: this rank's recorder; its `lost_ranks` contains the lost ranks.
        world_size: the number of ranks of the run.
        watched: whether a wait that is longer than `mesh.timeout` counts as a hang.
    """

    group: dist.ProcessGroup
    recorder: FlightRecorder
    world_size: int
    watched: bool

    def all_gather(self, value: Any) -> list[Any]:
        """Return on every rank a list of every rank's object, with None for a lost rank."""
        values: list[Any] = self.broadcast(self.gather(value))
        return values

    def gather(self, value: Any) -> list[Any] | None:
        """Return on rank 0 a list of every rank's object, with None for a lost rank.

        On other ranks return None.
        """
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
            # Not `dist.recv`: `waiting` recognises a wait by this file on the stack.
            work.wait()

    def _note(self, direction: str, rank: int, nbytes: int) -> None:
        """Record a message in the words that `waiting` parses.

        If waits are not watched, record only that the exchange may take long.
        """
        words = f"{direction} rank {rank}, {nbytes} bytes"
        self.recorder.note(words if self.watched else "an exchange that may take long")


@contextmanager
def tolerating_loss_of(rank: int, recorder: FlightRecorder) -> Iterator[None]:
    """A context that ends quietly if an exchange in it breaks because the rank `rank` was lost.

    Raises:
        RuntimeError: the exchange broke for another reason.
    """
    try:
        yield
    except RuntimeError:
        if not recorder.lost_ranks.confirm(rank):
            raise
