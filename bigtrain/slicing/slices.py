"""How one tensor is divided over the ranks of the tp axis."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bigtrain.tensors.shards import Extent, box_extents


class SliceSection(NamedTuple):
    """Consecutive elements of a dim that are divided over the ranks independently of the rest."""

    length: int
    """Number of elements; a multiple of `unit`."""
    unit: int = 1
    """Number of consecutive elements that stay on one rank, such as those of an attention head."""

    def part(self, rank: int, size: int) -> tuple[int, int]:
        """Return where a rank's part begins in the section, and the length of the part."""
        few, more = divmod(self.length // self.unit, size)
        begin = rank * few + min(rank, more)
        return begin * self.unit, (few + (rank < more)) * self.unit


@dataclass(frozen=True)
class Slices:
    """One dim of a tensor is divided over the ranks, section by section.

    A rank holds its part of every section, one after another. Most tensors have one section; a
    weight that computes queries, keys and values has three, so that a rank has its heads of each.
    If a section is not divisible, the first ranks get one unit more: nothing is padded.
    """

    dim: int
    """The dim of the whole tensor; 0 or more."""
    sections: tuple[SliceSection, ...]
    """In order; their lengths sum to the length of the dim."""

    @classmethod
    def even(cls, dim: int, length: int, unit: int = 1) -> Slices:
        """Return slices of one section."""
        return cls(dim, (SliceSection(length, unit),))

    @property
    def total(self) -> int:
        """The length of the whole dim."""
        return sum(section.length for section in self.sections)

    @property
    def most_ranks(self) -> int:
        """The largest number of ranks with which each rank gets a part of every section."""
        return min(section.length // section.unit for section in self.sections)

    def at(self, dim: int) -> Slices:
        """Return the same sections of another dim."""
        return Slices(dim, self.sections)

    def parts(self, rank: int, size: int) -> tuple[tuple[int, int], ...]:
        """Return, for each section, the begin and length of a rank's part, within the whole dim."""
        parts, begin = [], 0
        for section in self.sections:
            offset, length = section.part(rank, size)
            parts.append((begin + offset, length))
            begin += section.length
        return tuple(parts)

    def same(self, other: Slices, size: int) -> bool:
        """Whether each rank holds the same positions along the sliced dim, in the same order.

        The numbers of the dims (`dim`) are not compared.

        Args:
            other: the slices to compare with, of the same or another tensor.
            size: the number of ranks.
        """
        return self.sections == other.sections or _same(self, other, size)

    def length(self, rank: int, size: int) -> int:
        """Return the number of elements that a rank holds along the dim."""
        return sum(length for _, length in self.parts(rank, size))

    def local_shape(self, shape: Sequence[int], rank: int, size: int) -> tuple[int, ...]:
        """Return the shape of a rank's part of a tensor of this shape."""
        local_length = self.length(rank, size)
        return tuple(local_length if dim == self.dim else n for dim, n in enumerate(shape))

    def local(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Return a rank's part of a whole tensor: a view if there is one section, else a copy."""
        pieces = [whole.narrow(self.dim, *part) for part in self.parts(rank, size)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor from the part of each rank."""
        size = len(parts)
        if len(self.sections) == 1:
            return torch.cat(list(parts), self.dim)
        lengths = [[n for _, n in self.parts(rank, size)] for rank in range(size)]
        by_rank = [
            torch.split(part, sizes, self.dim) for part, sizes in zip(parts, lengths, strict=True)
        ]
        return torch.cat(
            [part for section in zip(*by_rank, strict=True) for part in section], self.dim
        )

    def extents(self, shape: Sequence[int], rank: int, size: int) -> tuple[Extent, ...]:
        """Return a rank's elements of a whole tensor, in the row-major order of its part."""
        outer, inner = math.prod(shape[: self.dim]), math.prod(shape[self.dim + 1 :])
        parts = [part for part in self.parts(rank, size) if part[1]]
        if not outer * inner:
            return ()
        if len(parts) == 1 or outer == 1:
            boxes: list[Extent] = []
            for begin, length in parts:
                offset = [begin if dim == self.dim else 0 for dim in range(len(shape))]
                local = [length if dim == self.dim else n for dim, n in enumerate(shape)]
                boxes += box_extents(shape, offset, local)
            return tuple(boxes)
        row = shape[self.dim] * inner
        return tuple(
            Extent(number * row + begin * inner, length * inner)
            for number in range(outer)
            for begin, length in parts
        )


@functools.lru_cache(maxsize=4096)
def _same(one: Slices, other: Slices, size: int) -> bool:
    return all(_joined(one, rank, size) == _joined(other, rank, size) for rank in range(size))


def _joined(slices: Slices, rank: int, size: int) -> list[tuple[int, int]]:
    """Return a rank's parts (begin, length), with adjacent parts joined."""
    joined: list[tuple[int, int]] = []
    for begin, length in slices.parts(rank, size):
        if joined and sum(joined[-1]) == begin:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((begin, length))
    return joined


def reshaped(
    slices: Slices, shape: Sequence[int], target: Sequence[int], size: int
) -> Slices | None:
    """Return the slices of a tensor after a reshape.

    Args:
        slices: the slices of the tensor.
        shape: the shape of the whole tensor.
        target: the new shape of the whole tensor, without -1.
        size: the number of ranks.

    Returns:
        None if the elements of a rank are not slices of one dim of the new shape.
    """
    inner = math.prod(shape[slices.dim + 1 :])
    flat = [SliceSection(length * inner, unit * inner) for length, unit in slices.sections]
    period = slices.total * inner
    for dim, length in enumerate(target):
        inner = math.prod(target[dim + 1 :])
        if length < size or not inner:
            continue
        repeated = _with_period(flat, period, length * inner)
        divided = _divided(repeated, inner, size) if repeated is not None else None
        if divided is not None:
            return Slices(dim, divided)
    return None


_MOST_SECTIONS = 4096


def _with_period(flat: list[SliceSection], period: int, wanted: int) -> list[SliceSection] | None:
    """Return sections that repeat every `period` elements as sections that repeat every `wanted`.

    Returns:
        None if the sections cannot be divided into equal repeats, or would be too many.
    """
    if wanted % period == 0:
        times = wanted // period
        return flat * times if times * len(flat) <= _MOST_SECTIONS else None
    if period % wanted or len(flat) % (period // wanted):
        return None
    count = len(flat) // (period // wanted)
    first = flat[:count]
    repeats = all(flat[at : at + count] == first for at in range(0, len(flat), count))
    return first if repeats and sum(section.length for section in first) == wanted else None


def _divided(
    sections: Sequence[SliceSection], inner: int, size: int
) -> tuple[SliceSection, ...] | None:
    """Return sections counted in groups of `inner` elements; None if a rank's part cuts a group."""
    divided = []
    for section in sections:
        if section.length % inner:
            return None
        larger = SliceSection(section.length // inner, max(1, section.unit // inner))
        for rank in range(size):
            begin, length = section.part(rank, size)
            if larger.part(rank, size) != (begin / inner, length / inner):
                return None
        divided.append(larger)
    return tuple(divided)
