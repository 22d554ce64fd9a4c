"""Writing tensor files by all ranks at once, in buffers of bounded size.

In each round every writer assembles one piece of its file from its own bytes and the bytes that
other ranks send. While the next piece arrives, threads hash and write the earlier pieces without
holding Python's GIL.
"""

from __future__ import annotations

import os
import queue
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bigtrain.checkpoint.layout import (
    PIECE_BYTES,
    Held,
    Part,
    TensorEntry,
    TensorFile,
    plan_entries,
    tensor_file,
)
from bigtrain.checkpoint.manifest import hash_piece, record_of
from bigtrain.checkpoint.messages import HostBuffer, Round, SocketMessages, messages_between
from bigtrain.errors import LostRankError
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.shards import Extent, StateTensor

BUFFERS = 3
"""Largest number of pieces that a rank holds: one arrives, and two are hashed and written."""

FileRecord = dict[str, Any]
"""The record of a file in the manifest; see `record_of`."""


def gather_entries(
    state: Mapping[str, StateTensor], context: RunContext, owners: Iterable[int]
) -> list[TensorEntry]:
    """Return the entries of all ranks' tensors, each with the rank that writes it. Collective."""
    local = {name: Held.of(tensor) for name, tensor in state.items()}
    everyone = context.all_gather_objects(local)
    present = [rank for rank in owners if everyone[rank] is not None]  # other ranks are lost
    return plan_entries([entries or {} for entries in everyone], present)


def rounds_of(files: Iterable[TensorFile]) -> list[Round]:
    """Return the rounds of writing, in order; each has one piece of each rank's files."""
    pieces_of: dict[int, list[tuple[TensorFile, int]]] = {}
    for file in files:
        pieces_of.setdefault(file.owner, []).extend((file, n) for n in range(file.num_pieces))
    longest = max(map(len, pieces_of.values()), default=0)
    return [
        {owner: pieces[number] for owner, pieces in pieces_of.items() if number < len(pieces)}
        for number in range(longest)
    ]


def buffer_bytes(files: Iterable[TensorFile], rank: int) -> int:
    """Return the bytes of each buffer in which a rank assembles pieces of its files."""
    return min(PIECE_BYTES, max((file.nbytes for file in files if file.owner == rank), default=0))


def first_taken(rounds: Sequence[Round], most_bytes: int) -> int:
    """Return the first round whose bytes are copied; earlier rounds are written at once.

    The result is the number of rounds if no round can be copied.

    Args:
        rounds: the rounds of all files.
        most_bytes: limit of the copies, in bytes per rank.
    """
    last = len(rounds)
    sums: dict[int, int] = {}
    while last > 0:
        for file, piece in rounds[last - 1].values():
            for rank, parts in file.parts(piece).items():
                sums[rank] = sums.get(rank, 0) + sum(part.extent.size for part in parts)
        if max(sums.values(), default=0) > most_bytes:
            break
        last -= 1
    return last


def given_bytes(round_: Round, rank: int) -> tuple[int, int]:
    """Return how many bytes of a round a rank sends to others, and how many its own piece gets."""
    sent = kept_here = 0
    for owner, (file, piece) in round_.items():
        size = sum(part.extent.size for part in file.parts(piece).get(rank, ()))
        sent, kept_here = (sent, kept_here + size) if owner == rank else (sent + size, kept_here)
    return sent, kept_here


@dataclass
class _Contribution:
    """The bytes that a rank contributes to one round."""

    messages: dict[int, Tensor]
    """Bytes by the rank that they are sent to, on the CPU."""
    own: list[tuple[Part, Tensor]]
    """Bytes that stay on this rank, for its own piece."""


class FileWriting:
    """Writes files together with all ranks, one piece of each rank's file in a round.

    A rank holds at most `BUFFERS` pieces, and the bytes that it exchanges with other ranks for one
    round.

    Args:
        folder: an existing folder for the files.
        files: all files, the same on every rank.
        state: the tensors of this rank.
        context: the context of all ranks.
        share_memory: whether ranks of one host share memory for their messages. The constructor is
            collective then.
    """

    def __init__(
        self,
        folder: Path,
        files: Sequence[TensorFile],
        state: Mapping[str, StateTensor],
        context: RunContext,
        *,
        share_memory: bool = False,
    ) -> None:
        self._rank = rank = context.rank
        self._rounds = rounds_of(files)
        self._next = 0
        self._values = _Values(state)
        self._contributions: dict[int, _Contribution] = {}
        self._messages = (
            messages_between(context, self._rounds) if share_memory else SocketMessages()
        )
        owned = [file for file in files if file.owner == rank]
        self._writer = _Writer(folder, owned, buffer_bytes(files, rank))

    def take(self, context: RunContext, most_bytes: int | None, room: HostBuffer) -> int:
        """Copy unwritten bytes to the host, so that the state may change. Collective.

        Args:
            context: the context of all ranks.
            most_bytes: limit of the copies, in bytes per rank. The rounds that exceed the limit are
                written at once. None copies everything.
            room: memory for the copies, in use until `finish` returns.

        Returns:
            The bytes that this rank copied.
        """
        first = 0 if most_bytes is None else first_taken(self._rounds, most_bytes)
        copied = sum(sum(given_bytes(round_, self._rank)) for round_ in self._rounds[first:])
        room.clear(copied)
        self._exchange(context, first)
        for number in range(first, len(self._rounds)):
            self._contributions[number] = self._contribute(number, room, keeps=True)
        self._values = _Values({})
        return copied

    def finish(self, context: RunContext) -> dict[str, FileRecord]:
        """Write the remaining rounds, and wait until everything is on the disk. Collective.

        Returns:
            The manifest's records of the files that this rank wrote, by name.

        Raises:
            OSError: this rank could not write. It has completed the exchange with other ranks.
            LostRankError: a rank whose bytes were needed is lost. The exchange is still completed.
        """
        try:
            self._exchange(context, len(self._rounds))
            if lost := self._messages.lost:
                raise LostRankError(f"it was lost while it was needed: rank {min(lost)}")
            return self._writer.finish()
        finally:
            self._writer.close()

    def _exchange(self, context: RunContext, last: int) -> None:
        with context.long_timeout():  # a disk may be slower than the usual timeout of an exchange
            for number in range(self._next, last):
                self._exchange_round(number, context)
            self._messages.pause(context)
        self._next = max(self._next, last)

    def _exchange_round(self, number: int, context: RunContext) -> None:
        """Run one round; all sends have completed when it returns."""
        contribution = self._contributions.pop(number, None)
        sent = given_bytes(self._rounds[number], self._rank)[0] if contribution is None else 0
        room = self._messages.room(number, sent, context)
        if contribution is None:
            contribution = self._contribute(number, room)
        for owner, message in contribution.messages.items():
            self._messages.send(number, owner, message, context)
        if self._rank in self._rounds[number]:
            self._assemble(number, contribution.own, context)
        else:
            deque(self._messages.arrived(context), maxlen=0)

    def _contribute(self, number: int, room: HostBuffer, *, keeps: bool = False) -> _Contribution:
        """Return this rank's bytes for a round; `keeps` also copies those for its own piece."""
        contribution = _Contribution({}, [])
        for owner, (file, piece) in self._rounds[number].items():
            mine = file.parts(piece).get(self._rank, [])
            values = [self._values.part(part) for part in mine]
            if mine and owner != self._rank:
                contribution.messages[owner] = room.copy(values)
            elif mine:
                contribution.own = [
                    (part, room.copy([tensor]) if keeps else tensor)
                    for part, tensor in zip(mine, values, strict=True)
                ]
        self._values.next_round()
        return contribution

    def _assemble(
        self, number: int, own_parts: list[tuple[Part, Tensor]], context: RunContext
    ) -> None:
        """Assemble this rank's piece of a round, and pass it to the writer's threads."""
        file, piece = self._rounds[number][self._rank]
        parts_of = {s: parts for s, parts in file.parts(piece).items() if s != self._rank}
        sizes = {s: sum(part.extent.size for part in parts_of[s]) for s in sorted(parts_of)}
        self._messages.expect(number, sizes, context)
        buffer = self._writer.buffer()
        begin = piece * PIECE_BYTES
        header = file.header[begin : begin + PIECE_BYTES]
        if header:
            buffer[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for part, values in own_parts:
            _copy_extent(buffer, part.extent, values)
        for source, message in self._messages.arrived(context):
            position = 0
            for part in parts_of[source]:
                _copy_extent(buffer, part.extent, message[position : position + part.extent.size])
                position += part.extent.size
        self._writer.write(file, piece, buffer)


def write_tensors(
    path: Path, state: Mapping[str, StateTensor], context: RunContext
) -> dict[str, FileRecord]:
    """Write one file of tensors on rank 0, and return its record by name on rank 0. Collective."""
    files = [tensor_file(path.name, 0, gather_entries(state, context, [0]))]
    return FileWriting(path.parent, files, state, context).finish(context)


def _copy_extent(buffer: Tensor, extent: Extent, values: Tensor) -> None:
    """Copy the bytes of an extent to its place in a buffer."""
    if extent.count == 1:
        buffer[extent.start : extent.start + extent.length] = values
    else:
        size, stride = (extent.count, extent.length), (extent.pitch, 1)
        buffer.as_strided(size, stride, extent.start).copy_(values.view(size))


class _Values:
    """The bytes of this rank's tensors; tensors that one round uses stay cached for the next."""

    def __init__(self, state: Mapping[str, StateTensor]) -> None:
        self._state = state
        self._bytes: dict[str, Tensor] = {}
        self._wanted: set[str] = set()

    def part(self, part: Part) -> Tensor:
        """Return a part's bytes, on the tensor's device."""
        name = part.entry.name
        self._wanted.add(name)
        if name not in self._bytes:
            self._bytes[name] = self._state[name].values().contiguous().view(torch.uint8)
        return self._bytes[name][part.position : part.position + part.extent.size]

    def next_round(self) -> None:
        """Release the tensors that were not used since the last call."""
        self._bytes = {name: self._bytes[name] for name in self._wanted}
        self._wanted = set()


class _Writer:
    """Threads that hash and write pieces of this rank's files."""

    def __init__(self, folder: Path, files: Sequence[TensorFile], piece_bytes: int) -> None:
        self._paths = {file.name: folder / file.name for file in files}
        self._hashes = {file.name: [""] * file.num_pieces for file in files}
        self._sizes = {file.name: file.nbytes for file in files}
        self._descriptors: dict[str, int] = {}
        self._free: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        for _ in range(BUFFERS):
            self._free.put(None)
        self._piece_bytes = piece_bytes
        self._threads = ThreadPoolExecutor(BUFFERS - 1, thread_name_prefix="bigtrain-write")
        self._writes: list[Future[None]] = []
        self._error: OSError | None = None
        for name in self._paths:
            try:
                self._descriptor(name)
            except OSError as error:
                self._error = error

    def buffer(self) -> Tensor:
        """Return a buffer for a piece; waits until one is free."""
        buffer = self._free.get()
        return torch.empty(self._piece_bytes, dtype=torch.uint8) if buffer is None else buffer

    def write(self, file: TensorFile, piece: int, buffer: Tensor) -> None:
        """Hash and write a piece of a file in the background."""
        self._writes.append(self._threads.submit(self._write, file, piece, buffer))

    def _write(self, file: TensorFile, piece: int, buffer: Tensor) -> None:
        try:
            begin = piece * PIECE_BYTES
            data = memoryview(buffer.numpy())[: min(PIECE_BYTES, file.nbytes - begin)]  # type: ignore[arg-type]
            self._hashes[file.name][piece] = hash_piece(data)
            if self._error is None:  # after an error the checkpoint is discarded anyway
                self._write_all(self._descriptor(file.name), data, begin)
        except OSError as error:
            self._error = self._error or error
        finally:
            self._free.put(buffer)

    def _descriptor(self, name: str) -> int:
        if name not in self._descriptors:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            self._descriptors[name] = os.open(self._paths[name], flags, 0o666)
        return self._descriptors[name]

    @staticmethod
    def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
        begin, size = offset, len(data)
        while len(data):
            written = os.pwrite(descriptor, data, offset)
            data, offset = data[written:], offset + written
        # Linux then begins to write to the disk, and `fsync` has less left to wait for.
        with suppress(OSError, AttributeError):  # a hint, which some systems do not take
            os.posix_fadvise(descriptor, begin, size, os.POSIX_FADV_DONTNEED)

    def finish(self) -> dict[str, FileRecord]:
        """Wait until everything is on the disk, and return the records by file name.

        Raises:
            OSError: a piece could not be written.
        """
        for write in self._writes:
            write.result()
        if self._error is not None:
            raise self._error
        for descriptor in self._descriptors.values():
            os.fsync(descriptor)
        return {name: record_of(self._sizes[name], hashes) for name, hashes in self._hashes.items()}

    def close(self) -> None:
        """Release threads, buffers and files."""
        self._threads.shutdown(wait=True)
        self._free = queue.SimpleQueue()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
