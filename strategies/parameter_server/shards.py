"""The pieces of parameters that each server has, and the messages that carry them.

The trained parameters, one after the other in the model's order, are cut into equal shares, one for
each server. An optimizer that needs whole tensors gets whole parameters. A piece is the part of one
parameter in one share. Workers and servers compute the same list of pieces, so no list is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigtrain.optim.partition import Slice, merge_slices, partition_evenly
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.memory_format import flat_view

MESSAGE_ELEMENTS = 1 << 20
"""Elements of the largest message: a server has one receive buffer of this size for every worker
but the first."""


def pieces_of(
    parameters: Mapping[str, nn.Parameter], servers: int, *, may_split: bool
) -> list[Slice]:
    """Return the pieces in the order in which they are sent; `owner` is the server, from 0.

    Args:
        parameters: the trained parameters by plain name, on any device.
        servers: the number of servers.
        may_split: whether a parameter may be cut, which needs an elementwise optimizer.
    """
    sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    cuts = partition_evenly(sizes, servers, may_split)
    return [
        piece for piece in merge_slices(Slice(*cut) for cut in cuts) if piece.stop > piece.start
    ]


def messages_of(flat: Tensor) -> Sequence[Tensor]:
    """Return views of a flat tensor, one for each message that carries it."""
    return torch.split(flat, MESSAGE_ELEMENTS)


def piece_view(whole: Tensor, piece: Slice) -> Tensor:
    """Return a piece of a whole tensor as a 1-dim tensor: a view if the whole tensor is dense."""
    return flat_view(whole)[piece.start : piece.stop]


class Messages:
    """Point-to-point messages along the dp axis, received in the order in which they are sent.

    Args:
        context: the rank and its dp group, of which the first ranks are the servers.
        servers: the number of servers.
    """

    def __init__(self, context: RunContext, servers: int) -> None:
        self._ranks, self._group = context.ranks_of("dp"), context.dp_group
        self.num_servers, self.num_workers = servers, context.dp_size - servers
        self._waiting: list[dist.Work | None] = []
        self._sent: list[Tensor] = []  # keeps temporary tensors alive until `finish`

    def worker_place(self, worker: int) -> int:
        """Return the dp rank of a worker; servers come first."""
        return self.num_servers + worker

    def send(self, tensor: Tensor, index: int) -> None:
        """Begin to send to a dp rank; the tensor must not change until `finish`."""
        self._waiting.append(dist.isend(tensor, self._ranks[index], self._group))
        self._sent.append(tensor)

    def receive(self, tensor: Tensor, index: int) -> dist.Work | None:
        """Begin to receive a tensor from a dp rank; return the work to wait for."""
        return dist.irecv(tensor, self._ranks[index], self._group)

    def receive_later(self, tensor: Tensor, index: int) -> None:
        """Begin to receive a tensor from a dp rank; it is complete after `finish`."""
        self._waiting.append(self.receive(tensor, index))

    def finish(self) -> None:
        """Wait for all messages begun by `send` and `receive_later`."""
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            if work is not None:
                work.wait()
        self._sent.clear()

    def forget(self) -> None:
        """Drop all messages that have begun, without waiting: their other rank may be lost."""
        self._waiting.clear()
        self._sent.clear()
