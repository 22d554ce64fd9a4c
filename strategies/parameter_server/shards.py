"""Which server holds which parameters, and the messages that carry them.

The trained parameters, laid end to end in the model's order, are cut into as many equal stretches
as there are servers; an optimizer that needs whole tensors gets whole ones. A stretch of one
parameter is a piece. Workers and servers work the pieces out alike, so nothing is arranged.
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
"""Numbers in a message at most: a server holds one such message of every worker but the first."""


def pieces_of(
    parameters: Mapping[str, nn.Parameter], servers: int, *, may_split: bool
) -> list[Slice]:
    """The pieces in the order in which they are sent; `owner` counts the servers from 0.

    Args:
        parameters: the trained ones by their plain names, on any device.
        servers: how many share them.
        may_split: whether a parameter may be cut: the optimizer treats each element by itself.
    """
    sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    cuts = partition_evenly(sizes, servers, may_split)
    return [
        piece for piece in merge_slices(Slice(*cut) for cut in cuts) if piece.stop > piece.start
    ]


def messages_of(flat: Tensor) -> Sequence[Tensor]:
    """Views of a piece's numbers, each of one message."""
    return torch.split(flat, MESSAGE_ELEMENTS)


def piece_view(whole: Tensor, piece: Slice) -> Tensor:
    """A piece's numbers of a whole tensor, in one dimension: a view where it has no gaps."""
    return flat_view(whole)[piece.start : piece.stop]


class Messages:
    """Tensors from one rank to another along the dp axis, in the order in which they are sent.

    Args:
        context: the dp group; the first of its ranks are the servers.
        servers: how many.
    """

    def __init__(self, context: RunContext, servers: int) -> None:
        self._ranks, self._group = context.ranks_of("dp"), context.dp_group
        self.num_servers, self.num_workers = servers, context.dp_size - servers
        self._waiting: list[dist.Work | None] = []
        self._sent: list[Tensor] = []  # one that nobody else holds has to stay till then

    def worker_place(self, worker: int) -> int:
        """The place of a worker on the dp axis, where servers come first."""
        return self.num_servers + worker

    def send(self, tensor: Tensor, place: int) -> None:
        """Begin to send to a place of the dp axis; the tensor stays as it is until `finish`."""
        self._waiting.append(dist.isend(tensor, self._ranks[place], self._group))
        self._sent.append(tensor)

    def receive(self, tensor: Tensor, place: int) -> dist.Work | None:
        """Begin to receive."""
        return dist.irecv(tensor, self._ranks[place], self._group)

    def receive_later(self, tensor: Tensor, place: int) -> None:
        """Begin to receive what is there after `finish`."""
        self._waiting.append(self.receive(tensor, place))

    def finish(self) -> None:
        """Wait until all that was begun is over."""
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            if work is not None:
                work.wait()
        self._sent.clear()

    def forget(self) -> None:
        """Wait for nothing any more: the other rank may be lost."""
        self._waiting.clear()
        self._sent.clear()
