"""Divide the concatenation of all parameters into pieces; one rank updates each piece."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Slice:
    """Consecutive elements of a parameter that one rank updates."""

    name: str
    owner: int
    """The dp rank that updates these elements."""
    start: int
    stop: int
    """Elements [start, stop) of the parameter's local tensor, in memory order."""


def even_bounds(total: int, ranks: int) -> list[int]:
    """Return the index of the first element of each rank's share, followed by the total."""
    # Bounds at multiples of 64 elements keep the data of vector kernels aligned.
    return [round(total * rank / ranks / 64) * 64 for rank in range(ranks)] + [total]


def partition_evenly(
    sizes: Mapping[str, int], ranks: int, may_split: bool, max_elements: int | None = None
) -> list[tuple[str, int, int, int]]:
    """Divide the concatenation of all parameters into equal shares, one for each rank.

    Args:
        sizes: the number of elements of each parameter, in order.
        ranks: the number of shares.
        may_split: whether a parameter may be cut. Otherwise a parameter belongs whole to the rank
            whose share contains its middle element.
        max_elements: elements of the largest piece, if parameters are cut; None for no limit.

    Returns:
        (name, rank, start, stop) of each piece, in order. An empty parameter has an empty piece, so
        that its optimizer state has names.
    """
    bounds = even_bounds(sum(sizes.values()), ranks)
    pieces = []
    offset = 0
    for name, size in sizes.items():
        if not may_split or size == 0:
            middle = offset + size // 2
            owner = bisect_right(bounds, middle, hi=ranks) - 1
            pieces.append((name, owner, 0, size))
        else:
            for rank in range(bisect_right(bounds, offset, hi=ranks) - 1, ranks):
                if bounds[rank] >= offset + size:
                    break
                start = max(offset, bounds[rank]) - offset
                stop = min(offset + size, bounds[rank + 1]) - offset
                chunk = max_elements or max(1, stop - start)
                pieces += [
                    (name, rank, chunk_start, min(chunk_start + chunk, stop))
                    for chunk_start in range(start, stop, chunk)
                ]
        offset += size
    return pieces


def chunk_elements(elements: int, ranks: int) -> int:
    """Return the number of elements that are updated at a time if the update needs copies.

    It is a 32nd of a rank's share, but at least 2**18.

    Args:
        elements: elements of all parameters.
        ranks: the number of shares.
    """
    return max(1 << 18, math.ceil(elements / ranks / 32 / 64) * 64)


def split_into_chunks(sizes: Sequence[int], chunk_size: int | None) -> list[list[int]]:
    """Group consecutive pieces into chunks that are updated one after the other.

    Args:
        sizes: the number of elements of each piece.
        chunk_size: the most elements of a chunk of several pieces; None for one chunk.

    Returns:
        For each chunk, the indices of its pieces.
    """
    if chunk_size is None:
        return [list(range(len(sizes)))] if sizes else []
    chunks: list[list[int]] = []
    filled = 0
    for number, size in enumerate(sizes):
        if not chunks or filled + size > chunk_size:
            chunks.append([])
            filled = 0
        chunks[-1].append(number)
        filled += size
    return chunks


def merge_slices(slices: Iterable[Slice]) -> list[Slice]:
    """Merge consecutive slices of one parameter and owner."""
    merged: list[Slice] = []
    for current in slices:
        if merged and (merged[-1].name, merged[-1].owner) == (current.name, current.owner):
            merged[-1] = replace(merged[-1], stop=current.stop)
        else:
            merged.append(current)
    return merged
