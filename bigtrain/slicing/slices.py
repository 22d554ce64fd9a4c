"""How one tensor lies in slices on the ranks of the tp axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bigtrain.tensors.shards import Extent, box_extents


@dataclass(frozen=True)
class Slices:
    """One dim of a tensor is dealt out: each section of it in as many parts as ranks.

    A rank holds its part of every section, one after the other. One section is the plain case; a
    weight that makes queries, keys and values has three, so that a rank has its heads of each.
    Where a section does not divide, the first ranks have one element more: nothing is padded.
    """

    dim: int
    """Of the whole tensor; 0 or more."""
    sections: tuple[int, ...]
    """Their lengths along the dim, in order: together the whole of it."""

    def parts(self, rank: int, size: int) -> tuple[tuple[int, int], ...]:
        """For each section where a rank's part of it begins in the whole, and its length."""
        found, begin = [], 0
        for length in self.sections:
            few, more = divmod(length, size)
            own = few + (rank < more)
            found.append((begin + rank * few + min(rank, more), own))
            begin += length
        return tuple(found)

    def length(self, rank: int, size: int) -> int:
        """What a rank holds along the dim."""
        return sum(length for _, length in self.parts(rank, size))

    def local_shape(self, shape: Sequence[int], rank: int, size: int) -> tuple[int, ...]:
        """The shape of what a rank holds of a tensor of this shape."""
        own = self.length(rank, size)
        return tuple(own if dim == self.dim else n for dim, n in enumerate(shape))

    def local(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """What a rank holds of a whole tensor: a view where there is one section."""
        pieces = [whole.narrow(self.dim, *part) for part in self.parts(rank, size)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def join(self, held: Sequence[Tensor]) -> Tensor:
        """The whole tensor, from what each rank holds."""
        size = len(held)
        if len(self.sections) == 1:
            return torch.cat(list(held), self.dim)
        lengths = [[n for _, n in self.parts(rank, size)] for rank in range(size)]
        by_rank = [
            torch.split(tensor, own, self.dim) for tensor, own in zip(held, lengths, strict=True)
        ]
        return torch.cat(
            [part for section in zip(*by_rank, strict=True) for part in section], self.dim
        )

    def extents(self, shape: Sequence[int], rank: int, size: int) -> tuple[Extent, ...]:
        """The elements of a whole tensor that a rank holds, section by section.

        In the order of what `local` gives only where `dim` is 0 or there is one section.
        """
        found: list[Extent] = []
        for begin, length in self.parts(rank, size):
            offset = [begin if dim == self.dim else 0 for dim in range(len(shape))]
            own = [length if dim == self.dim else n for dim, n in enumerate(shape)]
            found += box_extents(shape, offset, own)
        return tuple(found)
