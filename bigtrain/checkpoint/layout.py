"""The rank that writes each tensor, the parts that others send to it, and each byte's offset.

Every rank derives the same layout from the list of all ranks' tensors, so nothing is negotiated.
The files are safetensors: a JSON header and raw bytes. Reading them runs no code, and any program
that reads models of the Hugging Face Hub reads them.
"""

from __future__ import annotations

import json
import math
import struct
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from bigtrain.errors import CheckpointError
from bigtrain.tensors.shards import Extent, StateTensor

PIECE_BYTES = 16 << 20
"""Files are written, sent and hashed in pieces of this many bytes."""
REPLICAS = "replicas"
"""The first word of the names of tensors in which replicas differ; see `core.state.replica_state`,
which names them."""
STATE_PARTS = ("model", "optimizer", REPLICAS)
"""The parts of the state, which have files of their own. A tensor's name begins with its part."""
NEARLY = 0.75
"""A rank may write a tensor if its part is at least this share of the largest part. If only the
largest part counted, one rank would write everything whenever parts differ by a row or a head."""
DTYPE_CODES = {
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of element types in safetensors."""


@dataclass(frozen=True)
class Held:
    """The description of a tensor that one rank holds, without its values; see `StateTensor`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    extents: tuple[Extent, ...]
    replicas_differ: bool

    @classmethod
    def of(cls, tensor: StateTensor) -> Held:
        """Return the description of a rank's tensor."""
        return cls(tensor.dtype, tensor.shape, tensor.extents, tensor.replicas_differ)


@dataclass(frozen=True)
class TensorEntry:
    """A whole tensor: the rank that writes it, and the ranks that hold its bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owner: int
    sources: tuple[tuple[int, tuple[Extent, ...]], ...]
    """(rank, bytes) pairs that cover the tensor, each byte once."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def plan_entries(
    held_by_rank: Sequence[Mapping[str, Held]], owners: Collection[int]
) -> list[TensorEntry]:
    """Assign each tensor to a rank that holds much of it, so that ranks write similar amounts.

    Args:
        held_by_rank: by rank, the tensors that it holds, by name.
        owners: the ranks that may write.

    Returns:
        One entry per tensor, in the order in which the ranks hold them.

    Raises:
        CheckpointError: the ranks' parts of a tensor do not add up to the whole, or differ in dtype
            or shape.
    """
    holders: dict[str, dict[int, Held]] = {}
    for rank, held_tensors in enumerate(held_by_rank):
        for name, tensor in held_tensors.items():
            holders.setdefault(name, {})[rank] = tensor
    classes = {name: _classes(name, held_tensors) for name, held_tensors in holders.items()}
    written, sent = dict.fromkeys(owners, 0), dict.fromkeys(range(len(held_by_rank)), 0)
    entries = {}
    sizes = {
        name: _nbytes(next(iter(held_tensors.values()))) for name, held_tensors in holders.items()
    }
    for name in sorted(holders, key=lambda n: -sizes[n]):  # largest first: the most even shares
        first = next(iter(holders[name].values()))
        parts = classes[name]
        most = max((sum(e.size for e in extents) for extents, _ in parts), default=0)
        near = [
            rank
            for extents, ranks in parts
            if sum(e.size for e in extents) >= NEARLY * most
            for rank in ranks
            if rank in written
        ]
        owner = min(near or written, key=lambda rank: (written[rank], rank))
        written[owner] += sizes[name]
        sources = []
        for extents, ranks in parts:
            rank = owner if owner in ranks else min(ranks, key=lambda r: (sent[r], r))
            sent[rank] += most if rank != owner else 0
            sources.append((rank, tuple(e.scaled(first.dtype.itemsize) for e in extents)))
        entries[name] = TensorEntry(name, first.dtype, first.shape, owner, tuple(sources))
    return [entries[name] for name in holders]


def _nbytes(tensor: Held) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _classes(
    name: str, tensors: Mapping[int, Held]
) -> list[tuple[tuple[Extent, ...], tuple[int, ...]]]:
    """Return the parts that make up a tensor, each with the ranks that hold it."""
    first = next(iter(tensors.values()))
    ranks_of: dict[tuple[Extent, ...], list[int]] = {}
    for rank, tensor in tensors.items():
        if (tensor.dtype, tensor.shape) != (first.dtype, first.shape):
            raise CheckpointError(
                f"{name}: rank {rank} has {tensor.dtype} {tensor.shape}, another rank "
                f"{first.dtype} {first.shape}"
            )
        if tensor.extents:
            ranks_of.setdefault(tensor.extents, []).append(rank)
    elements = math.prod(first.shape)
    complete = [e for e in ranks_of if sum(extent.size for extent in e) == elements]
    wanted = complete[:1] or list(ranks_of)
    present = sum(extent.size for extents in wanted for extent in extents)
    if present != elements:
        raise CheckpointError(f"{name}: the ranks hold {present} of its {elements} elements")
    return [
        (extents, tuple(ranks_of[extents][: 1 if first.replicas_differ else None]))
        for extents in wanted
    ]


@dataclass(frozen=True)
class Part:
    """Bytes of an entry that a rank holds, within one piece of a file."""

    entry: TensorEntry
    position: int
    """Offset of the first byte within the rank's bytes of the entry."""
    extent: Extent
    """The same bytes, by their offsets within the piece."""


@dataclass(frozen=True)
class TensorFile:
    """The layout of a safetensors file with consecutive entries."""

    name: str
    owner: int
    header: bytes
    entries: tuple[TensorEntry, ...]

    @cached_property
    def offsets(self) -> list[int]:
        """The offset at which each entry begins, then the end of the file, in bytes."""
        offsets = [len(self.header)]
        for entry in self.entries:
            offsets.append(offsets[-1] + entry.nbytes)
        return offsets

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.offsets[-1]

    @property
    def num_pieces(self) -> int:
        """Number of pieces of `PIECE_BYTES`; the last one may be shorter."""
        return -(-self.nbytes // PIECE_BYTES)

    def parts(self, piece: int) -> dict[int, list[Part]]:
        """Return the parts of a piece, by the rank that holds them; the header is not a part."""
        begin, end = piece * PIECE_BYTES, min((piece + 1) * PIECE_BYTES, self.nbytes)
        parts: dict[int, list[Part]] = {}
        number = max(0, bisect_right(self.offsets, begin) - 1)
        while number < len(self.entries) and self.offsets[number] < end:
            entry, offset = self.entries[number], self.offsets[number]
            for rank, extents in entry.sources:
                before = 0
                for extent in extents:
                    for position, inside in extent.within(begin - offset, end - offset):
                        target = Extent(
                            inside.start + offset - begin, inside.length, inside.count, inside.pitch
                        )
                        parts.setdefault(rank, []).append(Part(entry, before + position, target))
                    before += extent.size
            number += 1
        return parts


def tensor_file(
    name: str, owner: int, entries: Iterable[TensorEntry], prefix: str = ""
) -> TensorFile:
    """Compute the layout of a file.

    Args:
        name: the name of the file.
        owner: the rank that writes it.
        entries: the tensors of the file.
        prefix: the prefix of the entries' names that the names in the file do not have.

    Raises:
        CheckpointError: safetensors has no code for a tensor's type.
    """
    # Widest types first, so that every tensor begins at a multiple of its element size.
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in ordered:
        if entry.dtype not in DTYPE_CODES:
            raise CheckpointError(f"{entry.name}: tensors of type {entry.dtype} cannot be saved")
        header[entry.name.removeprefix(prefix)] = {
            "dtype": DTYPE_CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return TensorFile(name, owner, struct.pack("<Q", len(text)) + text, tuple(ordered))


def checkpoint_files(entries: Sequence[TensorEntry]) -> list[TensorFile]:
    """Return the tensor files of a checkpoint: one per part of the state and rank that writes it.

    Args:
        entries: the tensors of the checkpoint. Their names begin with the part of the state.

    Raises:
        CheckpointError: safetensors has no code for a tensor's type.
    """
    files = []
    for part in STATE_PARTS:
        of_part = [entry for entry in entries if entry.name.startswith(f"{part}.")]
        owners = sorted({entry.owner for entry in of_part})
        for number, owner in enumerate(owners, start=1):
            name = f"{part}-{number:05d}-of-{len(owners):05d}.safetensors"
            owned = (entry for entry in of_part if entry.owner == owner)
            files.append(tensor_file(name, owner, owned, f"{part}."))
    return files


def index_texts(files: Iterable[TensorFile]) -> dict[str, str]:
    """Return the content of each index file by name, in the format of the Hub's libraries."""
    texts = {}
    for part in STATE_PARTS:
        of_part = [file for file in files if file.name.startswith(f"{part}-")]
        if of_part:
            places = {e.name.removeprefix(f"{part}."): f.name for f in of_part for e in f.entries}
            total = sum(entry.nbytes for file in of_part for entry in file.entries)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            texts[f"{part}.safetensors.index.json"] = json.dumps(index, indent=1)
    return texts
