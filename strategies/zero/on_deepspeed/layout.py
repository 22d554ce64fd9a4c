"""The layout of DeepSpeed's flat buffers: number and order of elements, and the rank that has them.

Stages 1 and 2 put the parameters of a group one after the other into one flat buffer. Each rank has
an equal share of the buffer; the length of a share is even. Stage 3 cuts every parameter by itself
into as many equal pieces as there are ranks. All sizes here are numbers of elements, not bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bigtrain.optim.partition import Slice

_Shape = tuple[int, ...]


@dataclass(frozen=True)
class BufferSizes:
    """The sizes in a `zero_optimization` section, with DeepSpeed's own defaults."""

    reduce_bucket: int
    """The size of the gradients that are reduced in one message."""
    prefetch: int
    """The size of the parameters that stage 3 gathers before a module needs them."""
    persistent_parameter: int
    """The largest size of a parameter that is whole on every rank under stage 3 (persistent)."""
    persistent_model: int
    """The largest size of all persistent parameters together."""
    sub_group: int
    """The size of the pieces in which stage 3 updates its shards.

    A piece ends with the parameter with which it reaches this size.
    """

    @classmethod
    def of(cls, zero: Mapping[str, Any]) -> BufferSizes:
        """Return the sizes in a section; an absent key has DeepSpeed's default."""
        return cls(
            reduce_bucket=int(zero.get("reduce_bucket_size", 500_000_000)),
            prefetch=int(zero.get("stage3_prefetch_bucket_size", 50_000_000)),
            persistent_parameter=int(zero.get("stage3_param_persistence_threshold", 100_000)),
            persistent_model=int(zero.get("stage3_model_persistence_threshold", 2**62)),
            sub_group=int(zero.get("sub_group_size", 1_000_000_000)),
        )

    def split_persistent(self, shapes: Iterable[_Shape]) -> tuple[list[_Shape], list[_Shape]]:
        """Return (shapes that are gathered for each use, shapes of persistent parameters)."""
        gathered, persistent, filled = [], [], 0
        for shape in shapes:
            size = math.prod(shape)
            if size <= self.persistent_parameter and filled + size <= self.persistent_model:
                persistent.append(shape)
                filled += size
            else:
                gathered.append(shape)
        return gathered, persistent


def flat_size(elements: int, ranks: int) -> int:
    """Return the size of a flat buffer with its padding: a multiple of 2 * `ranks`."""
    unit = 2 * ranks
    return -(-elements // unit) * unit


def flat_share(elements: int, ranks: int) -> int:
    """Return the size of one rank's share of a flat buffer."""
    return flat_size(elements, ranks) // ranks


def piece_size(elements: int, ranks: int) -> int:
    """Return the size of one rank's piece of a parameter under stage 3."""
    return -(-elements // ranks)


def padded_size(shapes: Iterable[_Shape], ranks: int) -> int:
    """Return the size of all parameters, each padded so that its pieces are equal."""
    return sum(piece_size(math.prod(shape), ranks) * ranks for shape in shapes)


def overlap(start: int, stop: int, share: range) -> range:
    """Return the part of [start, stop) that is in a rank's share; an empty range if none is."""
    first = max(start, share.start)
    return range(first, max(first, min(stop, share.stop)))


def rank_share(size: int, rank: int) -> range:
    """Return the positions of one rank's share in a flat buffer.

    Args:
        size: the size of one share.
        rank: the rank in the dp axis.
    """
    return range(rank * size, (rank + 1) * size)


def flat_group_shares(updated: Iterable[tuple[_Shape, int]], ranks: int) -> list[tuple[int, int]]:
    """Return (elements, parameter group) of each flat share that a rank updates in stages 1 and 2.

    Args:
        updated: shape and parameter group of each parameter, as `Profile.updated`.
        ranks: the number of ranks in the dp axis.
    """
    totals: dict[int, int] = {}
    for shape, group in updated:
        totals[group] = totals.get(group, 0) + math.prod(shape)
    return [(flat_share(total, ranks), group) for group, total in totals.items()]


def flat_slices(groups: Iterable[Mapping[str, int]], ranks: int) -> list[Slice]:
    """Return the elements of each parameter that each rank updates in stages 1 and 2.

    Args:
        groups: the optimizer's parameter groups: elements by name, in the order of the buffer.
        ranks: the number of ranks in the dp axis.
    """
    slices = []
    for sizes in groups:
        share, offset = flat_share(sum(sizes.values()), ranks), 0
        for name, size in sizes.items():
            for rank in range(ranks):
                part = overlap(offset, offset + size, rank_share(share, rank))
                if part:
                    slices.append(Slice(name, rank, part.start - offset, part.stop - offset))
            offset += size
    return slices


def sub_group_shares(
    updated: Iterable[tuple[_Shape, int]], ranks: int, sub_group: int
) -> list[tuple[int, int]]:
    """Return (elements, parameter group) of each sub-group that a rank updates in stage 3.

    Args:
        updated: shape and parameter group of each parameter, as `Profile.updated`.
        ranks: the number of ranks in the dp axis.
        sub_group: see `BufferSizes.sub_group`.
    """
    filled: dict[int, int] = {}
    shares = []
    for shape, group in updated:
        filled[group] = filled.get(group, 0) + piece_size(math.prod(shape), ranks)
        if filled[group] >= sub_group:
            shares.append((filled.pop(group), group))
    return [*shares, *((elements, group) for group, elements in filled.items())]


def gradient_offsets(sizes: Mapping[int, int], births: Sequence[int]) -> dict[int, int]:
    """Return the offset of each gradient in the flat buffer, by the gradient's birth.

    Args:
        sizes: the size of each gradient, in elements or bytes, by birth: the tick at which the
            gradient is made.
        births: the births in the order of the parameters. If they differ from those in `sizes`,
            gradients are assumed to be made in the reverse order of the parameters.
    """
    is_known = sorted(births) == sorted(sizes)
    offsets, filled = {}, 0
    for birth in births if is_known else sorted(sizes, reverse=True):
        offsets[birth] = filled
        filled += sizes[birth]
    return offsets


def flatten_in_place(tensors: Sequence[Tensor], default: Callable[..., Tensor]) -> Tensor:
    """Return tensors as one flat tensor: a view if they are adjacent in memory.

    Args:
        tensors: one or more tensors.
        default: DeepSpeed's function, which copies. It is called if the tensors are not adjacent.
    """
    view = adjacent_view(tensors)
    return default(tensors) if view is None else view


def pad_in_place(
    tensors: Sequence[Tensor], unit: int, default: Callable[..., Sequence[Tensor]]
) -> Sequence[Tensor]:
    """Return tensors and their padding up to a multiple of a unit.

    The padding is a view of the memory behind the last tensor, if the tensors are adjacent and
    their storage is large enough.

    Args:
        tensors: one or more tensors.
        unit: the unit in elements.
        default: DeepSpeed's function, which allocates the padding. It is called in all other cases.
    """
    view = adjacent_view(tensors)
    padding = 0 if view is None else -view.numel() % unit
    if view is None or not padding:
        return default(tensors, unit)
    stop = view.storage_offset() + view.numel()
    free_elements = view.untyped_storage().nbytes() // view.element_size() - stop
    if free_elements < padding:
        return default(tensors, unit)
    return [*tensors, view.as_strided((padding,), (1,), stop)]


def adjacent_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return one flat view of tensors that are adjacent in memory, in order; None for others."""
    first = tensors[0].detach()
    offset, storage = first.storage_offset(), first.untyped_storage()._cdata
    start = offset
    for tensor in tensors:
        if (
            tensor.dtype != first.dtype
            or not tensor.is_contiguous()
            or tensor.untyped_storage()._cdata != storage
            or tensor.storage_offset() != offset
        ):
            return None
        offset += tensor.numel()
    return first.as_strided((offset - start,), (1,), start)
