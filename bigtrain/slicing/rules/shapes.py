"""Rules of functions that only rearrange elements; their arguments are shapes of whole tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bigtrain.slicing.sliced_tensor import (
    SlicedTensor,
    as_operand,
    is_sliced,
    local_of,
    rule,
    rule_with_function,
)
from bigtrain.slicing.slices import Slices, SliceSection, reshaped

_T: Any = torch.Tensor


def _sizes(sizes: Sequence[Any]) -> list[int]:
    """Return sizes that were given one by one or as a sequence."""
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        return [int(size) for size in sizes[0]]
    return [int(size) for size in sizes]


def _filled(target: list[int], total: int) -> list[int]:
    """Return the shape with -1 replaced by the missing length."""
    if -1 not in target:
        return target
    known = math.prod(size for size in target if size != -1)
    return [total // max(1, known) if size == -1 else size for size in target]


_known = functools.lru_cache(maxsize=4096)(reshaped)


def _reshape(tensor: SlicedTensor, target: list[int]) -> Any:
    target = _filled(target, tensor.numel())
    if math.prod(target) != tensor.numel():
        return NotImplemented  # torch raises the error
    slices = _known(tensor.slices, tuple(tensor.shape), tuple(target), tensor.group.size)
    if slices is None:
        return NotImplemented
    shape = slices.local_shape(target, tensor.group.rank, tensor.group.size)
    result = tensor.derived(local_of(tensor).reshape(shape), slices, target)
    if len(target) == 2 and tensor.dim() > 2 and target[-1] == tensor.shape[-1]:
        result.rows = tuple(tensor.shape[:-1])
    return result


@rule(_T.view, _T.reshape, torch.reshape)
def _view(tensor: SlicedTensor, *sizes: Any, **kwargs: Any) -> Any:
    sizes = sizes or tuple(value for name, value in kwargs.items() if name in ("shape", "size"))
    if not sizes or isinstance(sizes[0], torch.dtype):
        return NotImplemented
    return _reshape(tensor, _sizes(sizes))


@rule(_T.view_as, _T.reshape_as)
def _view_as(tensor: Tensor, other: Tensor) -> Any:
    return tensor.reshape(other.shape)


@rule(_T.flatten, torch.flatten)
def _flatten(tensor: SlicedTensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = start_dim % tensor.dim(), end_dim % tensor.dim()
    shape = list(tensor.shape)
    return _reshape(tensor, [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])


@rule(_T.ravel, torch.ravel)
def _ravel(tensor: SlicedTensor) -> Any:
    return _reshape(tensor, [-1])


@rule(_T.unflatten, torch.unflatten)
def _unflatten(tensor: SlicedTensor, dim: int, sizes: Sequence[int]) -> Any:
    shape, dim = list(tensor.shape), dim % tensor.dim()
    return _reshape(tensor, [*shape[:dim], *_filled(list(sizes), shape[dim]), *shape[dim + 1 :]])


@rule(_T.unsqueeze, torch.unsqueeze)
def _unsqueeze(tensor: SlicedTensor, dim: int) -> SlicedTensor:
    dim %= tensor.dim() + 1
    result_dim = tensor.slices.dim + (dim <= tensor.slices.dim)
    return tensor.like(local_of(tensor).unsqueeze(dim), result_dim)


@rule(_T.squeeze, torch.squeeze)
def _squeeze(tensor: SlicedTensor, dim: Any = None) -> Any:
    chosen = range(tensor.dim()) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    dims = [d % tensor.dim() for d in chosen]
    gone = [d for d in dims if tensor.shape[d] == 1]
    local = local_of(tensor)
    for d in sorted(gone, reverse=True):
        local = local.squeeze(d)
    return tensor.like(local, tensor.slices.dim - sum(d < tensor.slices.dim for d in gone))


def _permuted(tensor: SlicedTensor, order: Sequence[int]) -> SlicedTensor:
    order = [dim % tensor.dim() for dim in order]
    return tensor.like(local_of(tensor).permute(order), order.index(tensor.slices.dim))


@rule(_T.permute, torch.permute)
def _permute(tensor: SlicedTensor, *dims: Any, **kwargs: Any) -> SlicedTensor:
    return _permuted(tensor, _sizes(dims or (kwargs["dims"],)))


@rule(_T.transpose, torch.transpose, _T.swapaxes, torch.swapaxes, _T.swapdims, torch.swapdims)
def _transpose(tensor: SlicedTensor, dim0: int, dim1: int) -> SlicedTensor:
    order = list(range(tensor.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permuted(tensor, order)


@rule(_T.t, torch.t, _T.T.__get__)
def _transposed(tensor: SlicedTensor) -> Any:
    return _permuted(tensor, (1, 0)) if tensor.dim() == 2 else NotImplemented


@rule(_T.H.__get__)
def _conjugated(tensor: SlicedTensor) -> Any:
    return NotImplemented if tensor.is_complex() else tensor.t()


@rule(_T.mT.__get__)
def _matrices_transposed(tensor: SlicedTensor) -> Any:
    return tensor.transpose(-2, -1)


@rule(_T.movedim, torch.movedim, _T.moveaxis, torch.moveaxis)
def _movedim(tensor: SlicedTensor, source: Any, destination: Any) -> Any:
    if not isinstance(source, int):
        return NotImplemented
    order = [d for d in range(tensor.dim()) if d != source % tensor.dim()]
    order.insert(destination % tensor.dim(), source % tensor.dim())
    return _permuted(tensor, order)


@rule(_T.expand, _T.broadcast_to, torch.broadcast_to)
def _expand(tensor: SlicedTensor, *sizes: Any, **kwargs: Any) -> Any:
    target = _sizes(sizes or (kwargs["size"],))
    added = len(target) - tensor.dim()
    dim = tensor.slices.dim + added
    if target[dim] not in (-1, tensor.shape[tensor.slices.dim]):
        return NotImplemented
    local = local_of(tensor)
    target[dim] = local.shape[tensor.slices.dim]
    return tensor.like(local.expand(target), dim)


@rule(_T.expand_as)
def _expand_as(tensor: Tensor, other: Tensor) -> Any:
    return tensor.expand(other.shape)


@rule(torch.broadcast_tensors, torch.functional.broadcast_tensors)
def _broadcast_tensors(*tensors: Any) -> Any:
    operands = tensors[0] if isinstance(tensors[0], (tuple, list)) else tensors
    shape = torch.Size(torch.broadcast_shapes(*(tensor.shape for tensor in operands)))  # type: ignore[no-untyped-call]
    return tuple(tensor.expand(shape) for tensor in operands)


@rule(_T.repeat, torch.tile, _T.tile)
def _repeat(tensor: SlicedTensor, *sizes: Any, **kwargs: Any) -> Any:
    times = _sizes(sizes or (kwargs.get("dims", kwargs.get("repeats")),))
    times = [1] * (tensor.dim() - len(times)) + times
    dim = tensor.slices.dim + len(times) - tensor.dim()
    again = tensor.slices.sections * times[dim]
    return SlicedTensor.of(local_of(tensor).repeat(*times), Slices(dim, again), tensor.group)


@rule(_T.repeat_interleave, torch.repeat_interleave)
def _repeat_interleave(tensor: SlicedTensor, repeats: Any, dim: Any = None, **kwargs: Any) -> Any:
    if not isinstance(repeats, int) or dim is None or not is_sliced(tensor):
        return NotImplemented
    local = local_of(tensor).repeat_interleave(repeats, dim, **kwargs)
    if dim % tensor.dim() != tensor.slices.dim:
        return tensor.like(local)
    sections = tuple(
        SliceSection(n * repeats, unit * repeats) for n, unit in tensor.slices.sections
    )
    return SlicedTensor.of(local, Slices(tensor.slices.dim, sections), tensor.group)


@rule(_T.flip, torch.flip)
def _flip(tensor: SlicedTensor, *dims: Any, **kwargs: Any) -> Any:
    flipped = _sizes(dims or (kwargs["dims"],))
    if tensor.slices.dim in [dim % tensor.dim() for dim in flipped]:
        return NotImplemented
    return tensor.like(local_of(tensor).flip(flipped))


@rule(_T.roll, torch.roll)
def _roll(tensor: SlicedTensor, shifts: Any, dims: Any = None) -> Any:
    rolled = [dims] if isinstance(dims, int) else list(dims or ())
    if not rolled or tensor.slices.dim in [dim % tensor.dim() for dim in rolled]:
        return NotImplemented
    return tensor.like(local_of(tensor).roll(shifts, rolled))


def pieces(tensor: SlicedTensor, lengths: Sequence[int]) -> list[SlicedTensor] | None:
    """Split a tensor along its sliced dim between sections; None if a cut is inside a section."""
    sections, parts = list(tensor.slices.sections), []
    local, begin, dim = local_of(tensor), 0, tensor.slices.dim
    group = tensor.group
    for length in lengths:
        part_sections: list[SliceSection] = []
        while sections and sum(s.length for s in part_sections) < length:
            part_sections.append(sections.pop(0))
        if not part_sections or sum(s.length for s in part_sections) != length:
            return None
        slices = Slices(dim, tuple(part_sections))
        held_here = slices.length(group.rank, group.size)
        parts.append(tensor.derived(local.narrow(dim, begin, held_here), slices))
        begin += held_here
    return parts


def _split(tensor: SlicedTensor, lengths: Sequence[int], dim: int) -> Any:
    if dim % tensor.dim() == tensor.slices.dim:
        parts = pieces(tensor, lengths)
        return NotImplemented if parts is None else tuple(parts)
    local: Any = local_of(tensor)
    return tuple(tensor.like(part) for part in local.split(list(lengths), dim))


def _even(total: int, size: int) -> list[int]:
    return [min(size, total - begin) for begin in range(0, total, max(1, size))]


@rule(torch.split, torch.functional.split)
def _split_function(tensor: SlicedTensor, split_size_or_sections: Any, dim: int = 0) -> Any:
    size = split_size_or_sections
    return _split(tensor, _even(tensor.shape[dim], size) if isinstance(size, int) else size, dim)


@rule(_T.split, _T.split_with_sizes, torch.split_with_sizes)
def _split_method(tensor: SlicedTensor, split_size: Any, dim: int = 0) -> Any:
    return _split_function(tensor, split_size, dim)


@rule(_T.chunk, torch.chunk)
def _chunk(tensor: SlicedTensor, chunks: int, dim: int = 0) -> Any:
    return _split(tensor, _even(tensor.shape[dim], -(-tensor.shape[dim] // chunks)), dim)


@rule(_T.tensor_split, torch.tensor_split)
def _tensor_split(tensor: SlicedTensor, sections: Any, dim: int = 0) -> Any:
    if not isinstance(sections, int) or tensor.shape[dim] % sections:
        return NotImplemented
    return _split(tensor, _even(tensor.shape[dim], tensor.shape[dim] // sections), dim)


@rule(_T.unbind, torch.unbind)
def _unbind(tensor: SlicedTensor, dim: int = 0) -> Any:
    dim %= tensor.dim()
    if dim == tensor.slices.dim:
        return NotImplemented
    result_dim = tensor.slices.dim - (dim < tensor.slices.dim)
    return tuple(tensor.like(part, result_dim) for part in local_of(tensor).unbind(dim))


@rule(_T.__iter__)
def _iterate(tensor: SlicedTensor) -> Any:
    return iter(tensor.unbind(0))


@rule(torch.cat, torch.concat, torch.concatenate)
def _cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    return _joined(torch.cat, list(tensors), dim)


@rule(torch.stack)
def _stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    return _joined(torch.stack, list(tensors), dim)


def _joined(func: Any, tensors: list[Any], dim: int) -> Any:
    first = max((t for t in tensors if is_sliced(t)), key=Tensor.numel)
    group, slices = first.group, first.slices
    if any(tensor.dim() != first.dim() for tensor in tensors):
        return NotImplemented
    dim %= first.dim() + (func is torch.stack)
    if func is torch.stack or dim != slices.dim:
        local = func([as_operand(tensor, slices, group) for tensor in tensors], dim)
        return first.like(local, slices.dim + (func is torch.stack and dim <= slices.dim))
    if any(tensor.shape[dim] < group.size for tensor in tensors):
        return NotImplemented
    each = [
        t.slices if is_sliced(t) and t.slices.dim == dim else Slices.even(dim, t.shape[dim])
        for t in tensors
    ]
    local = torch.cat(
        [
            as_operand(t, slices_of_tensor, group)
            for t, slices_of_tensor in zip(tensors, each, strict=True)
        ],
        dim,
    )
    sections = tuple(section for slices_of_tensor in each for section in slices_of_tensor.sections)
    return SlicedTensor.of(local, Slices(dim, sections), group)


@rule(F.pad, torch._C._nn.pad)
def _pad(tensor: SlicedTensor, pad: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    position = -2 * tensor.negative_dim
    if any(pad[position - 2 : position]):
        return NotImplemented
    return tensor.like(F.pad(local_of(tensor), pad, *args, **kwargs))


@rule_with_function(_T.new_empty, _T.new_zeros, _T.new_ones, _T.new_full, _T.new_tensor)
def _new(func: Any, tensor: SlicedTensor, *args: Any, **kwargs: Any) -> Any:
    return func(local_of(tensor), *args, **kwargs) if is_sliced(tensor) else NotImplemented


@rule_with_function(torch.view_as_real, torch.view_as_complex)
def _complex(func: Any, tensor: SlicedTensor) -> Any:
    if func is torch.view_as_complex and tensor.negative_dim == -1:
        return NotImplemented
    return tensor.like(func(local_of(tensor)))


@rule_with_function(_T.tril, torch.tril, _T.triu, torch.triu)
def _triangle(func: Any, tensor: SlicedTensor, diagonal: int = 0) -> Any:
    return (
        tensor.like(func(local_of(tensor), diagonal))
        if tensor.negative_dim < -2
        else NotImplemented
    )


@rule(_T.unfold)
def _windows(tensor: SlicedTensor, dimension: int, size: int, step: int) -> Any:
    if dimension % tensor.dim() == tensor.slices.dim:
        return NotImplemented
    return tensor.like(local_of(tensor).unfold(dimension, size, step))


def resized(slices: Slices, divide: int, times: int, size: int) -> Slices | None:
    """Return slices of a dim after every `divide` elements are replaced by `times` elements.

    Returns:
        None if a rank has only some of `divide` elements that are replaced together.
    """
    sections = []
    for section in slices.sections:
        if any(n % divide for rank in range(size) for n in section.part(rank, size)):
            return None
        unit = section.unit // divide if section.unit % divide == 0 else 1
        sections.append(SliceSection(section.length // divide * times, unit * times))
    result = Slices(slices.dim, tuple(sections))
    for rank in range(size):
        parts = slices.parts(rank, size)
        if result.parts(rank, size) != tuple(
            (begin // divide * times, length // divide * times) for begin, length in parts
        ):
            return None
    return result


def _channels(tensor: SlicedTensor, local: Tensor, divide: int, times: int, dim: int) -> Any:
    """Wrap a result in which one channel became several channels, or several became one."""
    if tensor.slices.dim != dim:
        return tensor.like(local)
    slices = resized(tensor.slices, divide, times, tensor.group.size)
    return NotImplemented if slices is None else SlicedTensor.of(local, slices, tensor.group)


def _fits(tensor: Any, divide: int, dim: int) -> bool:
    """Whether the sliced dim is before `dim`, or is `dim` and keeps `divide` channels together."""
    if not is_sliced(tensor) or tensor.slices.dim > dim:
        return False
    size = tensor.group.size
    return tensor.slices.dim < dim or resized(tensor.slices, divide, 1, size) is not None


@rule(F.pixel_shuffle)
def _pixel_shuffle(tensor: Any, upscale_factor: int) -> Any:
    dim, each = tensor.dim() - 3, upscale_factor**2
    if not _fits(tensor, each, dim):
        return NotImplemented
    return _channels(tensor, F.pixel_shuffle(local_of(tensor), upscale_factor), each, 1, dim)


@rule(F.pixel_unshuffle)
def _pixel_unshuffle(tensor: Any, downscale_factor: int) -> Any:
    dim, each = tensor.dim() - 3, downscale_factor**2
    if not _fits(tensor, 1, dim):
        return NotImplemented
    return _channels(tensor, F.pixel_unshuffle(local_of(tensor), downscale_factor), 1, each, dim)


@rule(F.channel_shuffle)
def _channel_shuffle(tensor: Any, groups: int) -> Any:
    return tensor.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)


def _kernel(size: Any) -> int:
    return size * size if isinstance(size, int) else math.prod(size)


@rule(F.unfold)
def _unfold(tensor: Any, kernel_size: Any, *args: Any, **kwargs: Any) -> Any:
    if tensor.dim() != 4 or not _fits(tensor, 1, 1):
        return NotImplemented
    local = F.unfold(local_of(tensor), kernel_size, *args, **kwargs)
    return _channels(tensor, local, 1, _kernel(kernel_size), 1)


@rule(F.fold)
def _fold(tensor: Any, output_size: Any, kernel_size: Any, *args: Any, **kwargs: Any) -> Any:
    each = _kernel(kernel_size)
    if tensor.dim() != 3 or not _fits(tensor, each, 1):
        return NotImplemented
    local = F.fold(local_of(tensor), output_size, kernel_size, *args, **kwargs)
    return _channels(tensor, local, each, 1, 1)
