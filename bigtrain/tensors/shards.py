"""The elements of a state tensor that a rank holds or that it reads from a saved tensor.

Under every technique a rank holds runs of the row-major order of a tensor: all of it, some rows
(DTensors), or a slice of the flattened tensor (DeepSpeed, fairscale). An `Extent` describes them.
Nothing here communicates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from bigtrain.tensors.memory_format import is_dense

COPIED_BYTES = 4 << 20
"""`copy_saved` reads this many bytes at a time."""


@dataclass(frozen=True)
class Extent:
    """Runs of equal length at equal distances in the row-major order of a tensor.

    The unit is an element or, after `scaled`, a byte. A single run is `Extent(start, length)`.
    """

    start: int
    length: int
    """The length of each run."""
    count: int = 1
    """Number of runs."""
    pitch: int = 0
    """Distance between the starts of two runs; at least `length` if there are several."""

    @property
    def size(self) -> int:
        """The total length of all runs."""
        return self.length * self.count

    def scaled(self, factor: int) -> Extent:
        """Return the extent in smaller units, such as bytes; an element has `factor` of them."""
        return Extent(self.start * factor, self.length * factor, self.count, self.pitch * factor)

    def within(self, begin: int, end: int) -> Iterator[tuple[int, Extent]]:
        """Yield the parts in [begin, end) of the whole tensor.

        Yields:
            The offset of a part in the concatenated values of the runs, and its extent in the
            whole tensor.
        """
        if self.count == 1:
            first, last = max(self.start, begin), min(self.start + self.length, end)
            if first < last:
                yield first - self.start, Extent(first, last - first)
            return
        lowest = max(0, (begin - self.start - self.length) // self.pitch + 1)
        highest = min(self.count - 1, -((self.start - end) // self.pitch) - 1)
        number = lowest
        while number <= highest:
            run = self.start + number * self.pitch
            first, last = max(run, begin), min(run + self.length, end)
            runs = 1
            if last - first == self.length:  # yields the runs after it too, but no cut last run
                is_cut = self.start + highest * self.pitch + self.length > end
                runs = max(1, highest - number + 1 - is_cut)
            runs_extent = Extent(run, self.length, runs, self.pitch) if runs > 1 else None
            yield number * self.length + first - run, runs_extent or Extent(first, last - first)
            number += runs

    def at(self, begin: int, end: int) -> Iterator[Extent]:
        """Yield the extents, in the whole tensor, of elements [begin, end) of the runs' values."""
        while begin < min(end, self.size):
            number, inside = divmod(begin, self.length)
            full = (min(end, self.size) - begin) // self.length
            if inside == 0 and full > 1:
                yield Extent(self.start + number * self.pitch, self.length, full, self.pitch)
                begin += full * self.length
            else:
                last = min(end, (number + 1) * self.length)
                yield Extent(self.start + number * self.pitch + inside, last - begin)
                begin = last


@dataclass(frozen=True)
class StateTensor:
    """A tensor of the training state, with the elements that one rank holds."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    extents: tuple[Extent, ...]
    """This rank's elements, in the order of `values`; empty if it holds none."""
    values: Callable[[], Tensor]
    """Returns these elements, of `dtype`, one-dimensional, on any device. Not collective."""
    replicas_differ: bool = False
    """Whether replicas may have different values (running statistics): those of the lowest rank are
    saved."""
    in_slices: bool = False
    """Whether each rank of the tp axis holds a different part."""
    read: Callable[[Sequence[Extent]], Tensor] | None = None
    """Reads only the elements of extents of the whole tensor; see `SavedTensor.read`. None if
    `values` is the only way to read them."""

    @classmethod
    def of(cls, tensor: Tensor, dtype: torch.dtype | None = None) -> StateTensor:
        """Describe a plain tensor, or this rank's part of a DTensor.

        Args:
            tensor: the tensor; its values are read when `values` is called.
            dtype: the dtype in which to save; None for the tensor's.
        """
        saved = dtype or tensor.dtype

        def values() -> Tensor:
            local = local_tensor(tensor.detach())
            if local.layout is not torch.strided:  # the state of an optimizer for sparse gradients
                local = local.to_dense()
            return local.reshape(-1).to(saved)

        return cls(saved, tuple(tensor.shape), extents_of(tensor), values)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class SavedTensor(Protocol):
    """A saved tensor that can be read in parts."""

    @property
    def dtype(self) -> torch.dtype:
        """The saved dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""

    def read(self, extents: Sequence[Extent]) -> Tensor:
        """Return the elements of these extents, concatenated: one-dimensional, on the CPU."""


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: a DTensor's local tensor, any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def as_dtensor_like(local: Tensor, like: Tensor) -> Tensor:
    """Return a DTensor of `local` in the layout of `like`; `local` if `like` is not a DTensor."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which several ranks hold parts or replicas."""
    return isinstance(tensor, DTensor)


def extents_of(tensor: Tensor) -> tuple[Extent, ...]:
    """Return this rank's elements of a tensor or DTensor, in row-major order of its part."""
    if not isinstance(tensor, DTensor):
        return whole_extents(tensor.shape)
    shape = tuple(tensor.shape)
    local, offset = compute_local_shape_and_global_offset(
        shape, tensor.device_mesh, tensor.placements
    )
    return box_extents(shape, offset, local)


def whole_extents(shape: Sequence[int]) -> tuple[Extent, ...]:
    """Return the extent of all elements of a tensor; an empty tuple if there are none."""
    return (Extent(0, math.prod(shape)),) if math.prod(shape) else ()


def box_extents(
    shape: Sequence[int], offset: Sequence[int], local: Sequence[int]
) -> tuple[Extent, ...]:
    """Return the elements of a box of a tensor, in the row-major order of the box.

    Args:
        shape: the shape of the whole tensor.
        offset: where the box begins in each dim.
        local: the size of the box in each dim.
    """
    if not math.prod(local):
        return ()
    partial = [dim for dim, size in enumerate(shape) if local[dim] != size]
    if not partial:
        return whole_extents(shape)
    last = partial[-1]
    inner = math.prod(shape[last + 1 :])
    length, begin = local[last] * inner, offset[last] * inner
    if len(partial) == 1:
        outer, pitch = math.prod(shape[:last]), shape[last] * inner
        return (Extent(begin, length, outer, pitch) if outer > 1 else Extent(begin, length),)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(last)]
    ranges = [range(offset[dim], offset[dim] + local[dim]) for dim in range(last)]
    return tuple(
        Extent(begin + sum(i * s for i, s in zip(index, strides, strict=True)), length)
        for index in product(*ranges)
    )


def slice_extents(tensor: Tensor, start: int, stop: int) -> tuple[Extent, ...]:
    """Return where a range of this rank's part of a tensor is in the whole tensor.

    Args:
        tensor: a tensor or a DTensor whose local part has no gaps in memory, in any order of dims.
        start: the first element of the range. The elements of the local part are counted from 0 in
            memory order.
        stop: one past the last element of the range, counted in the same way.

    Returns:
        The extents of these elements in the whole tensor, whose elements are counted in row-major
        order. The extents are in the memory order of the local part. The result is empty if the
        range is empty.

    Raises:
        ValueError: the local part has gaps in memory.
    """
    local = local_tensor(tensor)
    if local.is_contiguous():
        inside = [Extent(start, stop - start)] if stop > start else []
    else:
        inside = list(_memory_runs(local, start, stop))
    return tuple(
        outer
        for extent in inside
        for run in range(extent.count)
        for outer in nested_extents(
            extents_of(tensor),
            extent.start + run * extent.pitch,
            extent.start + run * extent.pitch + extent.length,
        )
    )


def nested_extents(outer: Iterable[Extent], begin: int, end: int) -> Iterator[Extent]:
    """Yield the extents, in the whole tensor, of elements [begin, end) of the values of `outer`."""
    for extent in outer:
        yield from extent.at(max(0, begin), max(0, end))
        begin, end = begin - extent.size, end - extent.size


def _memory_runs(tensor: Tensor, start: int, stop: int) -> Iterator[Extent]:
    """Yield elements [start, stop) in memory order as runs of the row-major order.

    Raises:
        ValueError: the tensor has gaps in memory.
    """
    if not is_dense(tensor):
        raise ValueError(f"a tensor with gaps in memory: {tensor.shape}, {tensor.stride()}")
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    index = torch.arange(tensor.numel()).view(tensor.shape).permute(order).reshape(-1)[start:stop]
    breaks = torch.nonzero(index.diff() != 1).reshape(-1) + 1
    bounds = [0, *breaks.tolist(), len(index)]
    for first, last in zip(bounds[:-1], bounds[1:], strict=True):
        if last > first:
            yield Extent(int(index[first]), last - first)


def read_whole(saved: SavedTensor) -> Tensor:
    """Read a whole saved tensor to the CPU."""
    return saved.read(whole_extents(saved.shape)).view(saved.shape)


def copy_saved(saved: StateTensor, target: Tensor, extents: Sequence[Extent] | None = None) -> None:
    """Copy elements of a saved tensor into a tensor of any dtype and device, a piece at a time.

    Host memory holds one piece in addition to the target, or the whole tensor if the tensor can
    only be read as a whole (`StateTensor.read`).

    Args:
        saved: a tensor of which this rank can read all elements.
        target: the tensor that is changed.
        extents: the elements of the whole tensor that `target` holds, in its row-major order; None
            for all of them.
    """
    wanted = whole_extents(saved.shape) if extents is None else extents
    with torch.no_grad():
        if saved.read is None:
            values = saved.values()
            if extents is not None:
                values = torch.cat([elements(values, extent) for extent in wanted])
            target.copy_(values.view(target.shape))
            return
        if not target.is_contiguous():
            target.copy_(saved.read(wanted).view(target.shape))
            return
        flat, piece = target.view(-1), COPIED_BYTES // saved.dtype.itemsize
        for begin in range(0, flat.numel(), piece):
            end = min(begin + piece, flat.numel())
            flat[begin:end].copy_(saved.read(tuple(nested_extents(wanted, begin, end))))


def elements(values: Tensor, extent: Extent) -> Tensor:
    """Return the elements of an extent of a one-dimensional tensor, also one-dimensional."""
    size, stride = (extent.count, extent.length), (extent.pitch or extent.length, 1)
    return values.as_strided(size, stride, extent.start).reshape(-1)


def read_like(saved: SavedTensor, like: Tensor) -> Tensor:
    """Read this rank's part of a saved tensor, in the layout of another tensor.

    Args:
        saved: a tensor of the same shape as `like`.
        like: a DTensor or a plain tensor.

    Returns:
        A plain tensor of the saved dtype, on the CPU, in the shape of `like`'s local part.
    """
    return saved.read(extents_of(like)).view(local_tensor(like).shape)
