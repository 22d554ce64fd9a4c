"""The messages of a save: bytes that a rank holds, for the rank that writes them.

Ranks of several hosts send them through sockets. Ranks of one host leave them in memory that they
share, and send only a word that they are ready or were read. This saves two copies of the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bigtrain.checkpoint.layout import TensorFile
from bigtrain.errors import BigtrainError
from bigtrain.ranks.context import RunContext
from bigtrain.ranks.shared_buffers import shared_memory
from bigtrain.recorder.root_exchange import tolerating_loss_of

Round = Mapping[int, tuple[TensorFile, int]]
"""By rank, the piece that it assembles: (file, number of the piece)."""
_READ_TAG = 1
"""The tag of a word that bytes were read. Bytes, and words that they are ready, have tag 0."""


class HostBuffer:
    """Host memory that is reused, as touching new memory takes several times as long as a copy.

    Args:
        memory: the memory; None to allocate what is needed.
    """

    def __init__(self, memory: Tensor | None = None) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8) if memory is None else memory
        self._filled = 0

    def clear(self, nbytes: int) -> None:
        """Discard the contents, and make room for `nbytes` bytes."""
        self._filled = 0
        if len(self._bytes) < nbytes:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # free the old before the new
            self._bytes = torch.empty(nbytes, dtype=torch.uint8)

    def next(self, nbytes: int) -> Tensor:
        """Return the next `nbytes` bytes, uninitialized."""
        self._filled += nbytes
        return self._bytes[self._filled - nbytes : self._filled]

    def copy(self, values: Sequence[Tensor]) -> Tensor:
        """Copy bytes from any device into one contiguous range, and return it."""
        copies = self.next(sum(map(len, values)))
        begin = 0
        for source in values:
            copies[begin : begin + len(source)].copy_(source)
            begin += len(source)
        return copies


class SocketMessages:
    """The messages of one rank, through the sockets of a group of all ranks.

    In each round a rank calls `room`, `send` for each message, `expect`, and `arrived`.
    """

    def __init__(self) -> None:
        self.lost: set[int] = set()
        """The ranks that were lost while they were needed."""
        self._leaving, self._arriving = HostBuffer(), HostBuffer()
        self._sends: list[tuple[int, Any]] = []
        self._expected: list[tuple[int, Tensor, Any]] = []

    def room(self, number: int, nbytes: int, context: RunContext) -> HostBuffer:
        """Return memory for the messages of a round.

        Args:
            number: the index of the round.
            nbytes: the bytes of the messages.
            context: the context of all ranks.
        """
        del number, context
        self._leaving.clear(nbytes)
        return self._leaving

    def send(self, number: int, owner: int, message: Tensor, context: RunContext) -> None:
        """Begin to send a message. Messages of a round are sent in the order of its ranks.

        Args:
            number: the index of the round.
            owner: the rank that assembles the piece.
            message: the bytes, on the CPU. They must not change until `arrived` is exhausted.
            context: the context of all ranks.
        """
        del number
        self._begin_send(owner, message, context)

    def expect(self, number: int, sizes: Mapping[int, int], context: RunContext) -> None:
        """Begin to receive the messages for a piece.

        Args:
            number: the index of the round.
            sizes: the bytes of each message, by the rank that sends it.
            context: the context of all ranks.
        """
        del number
        self._arriving.clear(sum(sizes.values()))
        for source, size in sizes.items():
            message = self._arriving.next(size)
            self._begin_receive(source, message, message, context)

    def arrived(self, context: RunContext) -> Iterator[tuple[int, Tensor]]:
        """Yield each expected message with its rank, then wait until all messages were sent.

        The bytes of a message may be overwritten after the next one was asked for.
        """
        expected, self._expected = self._expected, []
        for source, message, work in expected:
            with self._needing(source, context):
                if work is not None:
                    work.wait()
            yield source, message
            self._was_read(source, context)
        sends, self._sends = self._sends, []
        for owner, work in sends:
            with self._needing(owner, context):
                if work is not None:
                    work.wait()

    def pause(self, context: RunContext) -> None:  # noqa: ARG002
        """End the messages of several rounds, and free the memory that they do not need."""
        self._leaving, self._arriving = HostBuffer(), HostBuffer()

    def _begin_send(self, rank: int, message: Tensor, context: RunContext, tag: int = 0) -> None:
        with self._needing(rank, context):
            self._sends.append((rank, dist.isend(message, rank, context.group(), tag)))

    def _begin_receive(
        self, source: int, received: Tensor, message: Tensor, context: RunContext
    ) -> None:
        with self._needing(source, context):
            work = dist.irecv(received, source, context.group())
            self._expected.append((source, message, work))

    def _was_read(self, source: int, context: RunContext) -> None:
        """Note that the message of a rank was read."""

    @contextmanager
    def _needing(self, rank: int, context: RunContext) -> Iterator[None]:
        """Record a rank that is lost during an exchange, and continue with the others."""
        done = False
        with tolerating_loss_of(rank, context.recorder):
            yield
            done = True
        if not done:
            self.lost.add(rank)


class SharedMessages(SocketMessages):
    """The messages of one rank, in memory that all ranks share. Every rank makes the object.

    Each rank has memory for its messages of two rounds. It fills a half again when all readers have
    said that they have read, so a rank may be one round ahead of the others.

    Args:
        group: a group of all ranks, which are on one host, that exchanges tensors on the CPU.
        rounds: the rounds of all files.

    Raises:
        BigtrainError: a rank cannot open the memory of another; on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, rounds: Sequence[Round]) -> None:
        super().__init__()
        self._rank, self._places = group.rank(), [_places(round_) for round_ in rounds]
        ends = (sum(place) for places in self._places for place in places.values())
        stride = max(ends, default=0)
        if not stride:
            raise BigtrainError("the ranks have no messages")
        memory = shared_memory(group, 2 * group.size() * stride)
        self._halves = [
            [
                torch.frombuffer(memory, dtype=torch.uint8, count=stride, offset=place * stride)
                for place in range(half * group.size(), (half + 1) * group.size())
            ]
            for half in (0, 1)
        ]
        self._readers: list[list[tuple[int, Any]]] = [[], []]

    def room(self, number: int, nbytes: int, context: RunContext) -> HostBuffer:
        """See `SocketMessages.room`. Waits until the messages of two rounds before were read."""
        half = number % 2
        readers, self._readers[half] = self._readers[half], []
        for owner, work in readers:
            with self._needing(owner, context):
                work.wait()
        self._leaving = HostBuffer(self._halves[half][self._rank])
        return super().room(number, nbytes, context)

    def send(self, number: int, owner: int, message: Tensor, context: RunContext) -> None:
        """Say that a message is ready; see `SocketMessages.send`."""
        place = self._message(number, self._rank, owner)
        if place.data_ptr() != message.data_ptr():  # copied earlier, by an asynchronous save
            place.copy_(message)
        self._begin_send(owner, _word(), context)
        with self._needing(owner, context):
            work = dist.irecv(_word(), owner, context.group(), _READ_TAG)
            self._readers[number % 2].append((owner, work))

    def expect(self, number: int, sizes: Mapping[int, int], context: RunContext) -> None:
        """See `SocketMessages.expect`."""
        for source in sizes:
            message = self._message(number, source, self._rank)
            self._begin_receive(source, _word(), message, context)

    def pause(self, context: RunContext) -> None:
        """See `SocketMessages.pause`. Waits until all messages were read."""
        for half in (0, 1):
            self.room(half, 0, context)

    def _message(self, number: int, source: int, owner: int) -> Tensor:
        begin, size = self._places[number][source, owner]
        return self._halves[number % 2][source][begin : begin + size]

    def _was_read(self, source: int, context: RunContext) -> None:
        self._begin_send(source, _word(), context, _READ_TAG)


def messages_between(context: RunContext, rounds: Sequence[Round]) -> SocketMessages:
    """Return the messages of a save: in shared memory if all ranks can share it. Collective.

    Args:
        context: the context of all ranks.
        rounds: the rounds of all files.
    """
    group = context.group()
    one_host = context.local_world_size == context.world_size
    if group is None or not one_host or context.lost_ranks.spare:
        return SocketMessages()
    try:
        return SharedMessages(group, rounds)
    except BigtrainError:
        return SocketMessages()


def _word() -> Tensor:
    return torch.zeros(1, dtype=torch.uint8)


def _places(round_: Round) -> dict[tuple[int, int], tuple[int, int]]:
    """Return where the messages of a round are: by (source, owner) the begin and the bytes."""
    filled: dict[int, int] = {}
    places = {}
    for owner, (file, piece) in round_.items():
        for source, parts in file.parts(piece).items():
            if source != owner:
                size = sum(part.extent.size for part in parts)
                places[source, owner] = (filled.get(source, 0), size)
                filled[source] = filled.get(source, 0) + size
    return places
