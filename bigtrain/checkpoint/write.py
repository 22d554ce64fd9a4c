"""Writing tensor files, by all ranks at once, in buffers of bounded size.

In each round every writer gets one piece of its file together: what it has itself, and what the
other ranks send. While the next piece is on its way, threads hash and write the ones before; they
hold no lock of the interpreter meanwhile.
"""

from __future__ import annotations

import hashlib
import os
import queue
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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
from bigtrain.ranks.context import RunContext, long_timeout
from bigtrain.tensors.shards import Extent, StateTensor

_BUFFERS = 3
"""Pieces that a rank holds at most: one on its way to it, two that are hashed and written."""

FileRecord = dict[str, Any]
"""`bytes` of a file and the `sha256` of each of its pieces."""


def gather_entries(
    state: Mapping[str, StateTensor], context: RunContext, owners: Iterable[int]
) -> list[TensorEntry]:
    """What all ranks hold together, and who is to write it. Collective."""
    held = {name: Held.of(tensor) for name, tensor in state.items()}
    return plan_entries(context.all_gather_objects(held), list(owners))


def write_files(
    folder: Path,
    files: Sequence[TensorFile],
    state: Mapping[str, StateTensor],
    context: RunContext,
) -> dict[str, FileRecord]:
    """Write these files, each by its owner. Collective.

    A rank holds `_BUFFERS` pieces, and what it sends of a piece of each of the others.

    Args:
        folder: where they are made; it is there.
        files: the same on every rank.
        state: what this rank holds.
        context: of all ranks.

    Returns:
        What is to be known of the files that this rank has written.

    Raises:
        OSError: this rank could not write; the exchange went on to its end all the same.
    """
    own = [file for file in files if file.owner == context.rank]
    longest = max((file.nbytes for file in own), default=0)
    with _Writer(folder, own, min(longest, PIECE_BYTES)) as writer:
        if context.mesh is None:
            _exchange(files, state, context.rank, writer)
        else:
            with long_timeout(context.device):  # a disk may be slower than exchanges may be
                _exchange(files, state, context.rank, writer)
        return writer.finish()


def write_tensors(path: Path, state: Mapping[str, StateTensor], context: RunContext) -> None:
    """Write one file of tensors, by rank 0. Collective."""
    entries = gather_entries(state, context, [0])
    write_files(path.parent, [tensor_file(path.name, 0, entries)], state, context)


def _exchange(
    files: Sequence[TensorFile], state: Mapping[str, StateTensor], rank: int, writer: _Writer
) -> None:
    pieces_of: dict[int, list[tuple[TensorFile, int]]] = {}
    for file in files:
        pieces_of.setdefault(file.owner, []).extend((file, n) for n in range(file.num_pieces))
    values = _Values(state)
    for number in range(max((len(pieces) for pieces in pieces_of.values()), default=0)):
        sends, keep = [], []
        for owner, pieces in pieces_of.items():
            if owner != rank and number < len(pieces):
                file, piece = pieces[number]
                mine = file.parts(piece).get(rank)
                if mine:
                    message = values.message(mine)
                    keep.append(message)
                    sends.append(dist.isend(message, owner))
        if number < len(pieces_of.get(rank, ())):
            _receive(*pieces_of[rank][number], values, rank, writer)
        for send in sends:
            if send is not None:
                send.wait()
        values.next_round()


def _receive(file: TensorFile, piece: int, values: _Values, rank: int, writer: _Writer) -> None:
    """Put a piece together, and hand it to the threads."""
    parts = file.parts(piece)
    arriving = []
    for source, theirs in sorted(parts.items()):
        if source != rank:
            message = torch.empty(sum(part.extent.size for part in theirs), dtype=torch.uint8)
            arriving.append((theirs, message, dist.irecv(message, source)))
    buffer = writer.buffer()
    begin = piece * PIECE_BYTES
    header = file.header[begin : begin + PIECE_BYTES]
    if header:
        buffer[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for part in parts.get(rank, ()):
        _place(buffer, part.extent, values.part(part))
    for theirs, message, work in arriving:
        if work is not None:
            work.wait()
        position = 0
        for part in theirs:
            _place(buffer, part.extent, message[position : position + part.extent.size])
            position += part.extent.size
    writer.write(file, piece, buffer)


def _place(buffer: Tensor, extent: Extent, values: Tensor) -> None:
    """Copy the bytes of an extent to where they belong."""
    if extent.count == 1:
        buffer[extent.start : extent.start + extent.length] = values
    else:
        size, stride = (extent.count, extent.length), (extent.pitch, 1)
        buffer.as_strided(size, stride, extent.start).copy_(values.view(size))


class _Values:
    """The bytes of this rank's tensors; those that are looked at in a round stay for the next."""

    def __init__(self, state: Mapping[str, StateTensor]) -> None:
        self._state = state
        self._bytes: dict[str, Tensor] = {}
        self._wanted: set[str] = set()

    def part(self, part: Part) -> Tensor:
        """A part's bytes, where the tensor is."""
        name = part.entry.name
        self._wanted.add(name)
        if name not in self._bytes:
            self._bytes[name] = self._state[name].values().contiguous().view(torch.uint8)
        return self._bytes[name][part.position : part.position + part.extent.size]

    def message(self, parts: Iterable[Part]) -> Tensor:
        """The bytes of parts one after the other, on the CPU."""
        return torch.cat([self.part(part).cpu() for part in parts])

    def next_round(self) -> None:
        """Let go of what was not looked at since the last call."""
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
        for _ in range(_BUFFERS):
            self._free.put(None)
        self._piece_bytes = piece_bytes
        self._threads = ThreadPoolExecutor(_BUFFERS - 1, thread_name_prefix="bigtrain-write")
        self._writes: list[Future[None]] = []
        self._error: OSError | None = None

    def buffer(self) -> Tensor:
        """A piece's room; it waits until one is free."""
        buffer = self._free.get()
        return torch.empty(self._piece_bytes, dtype=torch.uint8) if buffer is None else buffer

    def write(self, file: TensorFile, piece: int, buffer: Tensor) -> None:
        """Hash and write a piece of a file, beside what the caller does."""
        self._writes.append(self._threads.submit(self._write, file, piece, buffer))

    def _write(self, file: TensorFile, piece: int, buffer: Tensor) -> None:
        try:
            begin = piece * PIECE_BYTES
            data = memoryview(buffer.numpy())[: min(PIECE_BYTES, file.nbytes - begin)]  # type: ignore[arg-type]
            self._hashes[file.name][piece] = hashlib.sha256(data).hexdigest()
            if self._error is None:  # after the first there is nothing to be gained
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
        while len(data):
            written = os.pwrite(descriptor, data, offset)
            data, offset = data[written:], offset + written

    def finish(self) -> dict[str, FileRecord]:
        """Wait until all is on the disk.

        Raises:
            OSError: it is not.
        """
        for write in self._writes:
            write.result()
        if self._error is not None:
            raise self._error
        for descriptor in self._descriptors.values():
            os.fsync(descriptor)
        return {
            name: {"bytes": self._sizes[name], "sha256": hashes}
            for name, hashes in self._hashes.items()
        }

    def __enter__(self) -> _Writer:
        for name in self._paths:
            try:
                self._descriptor(name)
            except OSError as error:
                self._error = error
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True)
        for descriptor in self._descriptors.values():
            os.close(descriptor)
