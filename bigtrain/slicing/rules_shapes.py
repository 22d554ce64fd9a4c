"""What functions that only arrange elements do with slices: shapes are those of the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bigtrain.slicing.exchange import part_of
from bigtrain.slicing.sliced_tensor import SlicedTensor, held, is_sliced, rule, rule_with_function
from bigtrain.slicing.slices import Section, Slices, reshaped

T = torch.Tensor


def _sizes(sizes: Sequence[Any]) -> list[int]:
    """Sizes given one by one or as a sequence."""
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        return [int(size) for size in sizes[0]]
    return [int(size) for size in sizes]


def _filled(target: list[int], total: int) -> list[int]:
    """With -1 worked out."""
    if -1 not in target:
        return target
    known = math.prod(size for size in target if size != -1)
    return [total // known if size == -1 else size for size in target]


def _reshape(tensor: SlicedTensor, target: list[int]) -> Any:
    target = _filled(target, tensor.numel())
    slices = reshaped(tensor.slices, tuple(tensor.shape), target, tensor.group.size)
    if slices is None:
        return NotImplemented
    shape = slices.local_shape(target, tensor.group.rank, tensor.group.size)
    result = SlicedTensor(held(tensor).reshape(shape), slices, tensor.group, target)
    if len(target) == 2 and tensor.dim() > 2 and target[-1] == tensor.shape[-1]:
        result.rows = tuple(tensor.shape[:-1])
    return result


@rule(T.view, T.reshape, torch.reshape)
def _view(tensor: SlicedTensor, *sizes: Any, **kwargs: Any) -> Any:
    sizes = sizes or (kwargs["shape"],)
    if isinstance(sizes[0], torch.dtype):
        return NotImplemented
    return _reshape(tensor, _sizes(sizes))


@rule(T.view_as, T.reshape_as)
def _view_as(tensor: Tensor, other: Tensor) -> Any:
    return tensor.reshape(other.shape)


@rule(T.flatten, torch.flatten)
def _flatten(tensor: SlicedTensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = start_dim % tensor.dim(), end_dim % tensor.dim()
    shape = list(tensor.shape)
    return _reshape(tensor, [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])


@rule(T.unflatten, torch.unflatten)
def _unflatten(tensor: SlicedTensor, dim: int, sizes: Sequence[int]) -> Any:
    shape, dim = list(tensor.shape), dim % tensor.dim()
    return _reshape(tensor, [*shape[:dim], *_filled(list(sizes), shape[dim]), *shape[dim + 1 :]])


@rule(T.unsqueeze, torch.unsqueeze)
def _unsqueeze(tensor: SlicedTensor, dim: int) -> SlicedTensor:
    dim %= tensor.dim() + 1
    place = tensor.slices.dim + (dim <= tensor.slices.dim)
    return tensor.like(held(tensor).unsqueeze(dim), place)


@rule(T.squeeze, torch.squeeze)
def _squeeze(tensor: SlicedTensor, dim: Any = None) -> Any:
    chosen = range(tensor.dim()) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    dims = [d % tensor.dim() for d in chosen]
    gone = [d for d in dims if tensor.shape[d] == 1]
    local = held(tensor)
    for d in sorted(gone, reverse=True):
        local = local.squeeze(d)
    return tensor.like(local, tensor.slices.dim - sum(d < tensor.slices.dim for d in gone))


def _permuted(tensor: SlicedTensor, order: Sequence[int]) -> SlicedTensor:
    order = [dim % tensor.dim() for dim in order]
    return tensor.like(held(tensor).permute(order), order.index(tensor.slices.dim))


@rule(T.permute, torch.permute)
def _permute(tensor: SlicedTensor, *dims: Any, **kwargs: Any) -> SlicedTensor:
    return _permuted(tensor, _sizes(dims or (kwargs["dims"],)))


@rule(T.transpose, torch.transpose, T.swapaxes, torch.swapaxes, T.swapdims, torch.swapdims)
def _transpose(tensor: SlicedTensor, dim0: int, dim1: int) -> SlicedTensor:
    order = list(range(tensor.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permuted(tensor, order)


@rule(T.t, torch.t, T.T.__get__, T.mT.__get__)  # type: ignore[attr-defined]
def _transposed(tensor: SlicedTensor) -> Any:
    if tensor.dim() < 2:
        return tensor
    order = list(range(tensor.dim()))
    return _permuted(tensor, [*order[:-2], order[-1], order[-2]])


@rule(T.movedim, torch.movedim, T.moveaxis, torch.moveaxis)
def _movedim(tensor: SlicedTensor, source: Any, destination: Any) -> Any:
    if not isinstance(source, int):
        return NotImplemented
    order = [d for d in range(tensor.dim()) if d != source % tensor.dim()]
    order.insert(destination % tensor.dim(), source % tensor.dim())
    return _permuted(tensor, order)


@rule(T.expand, torch.Tensor.expand_as)
def _expand(tensor: SlicedTensor, *sizes: Any, **kwargs: Any) -> Any:
    if not is_sliced(tensor):
        return NotImplemented
    if sizes and isinstance(sizes[0], Tensor):
        sizes = (tuple(sizes[0].shape),)
    target = _sizes(sizes or (kwargs["size"],))
    added = len(target) - tensor.dim()
    dim = tensor.slices.dim + added
    if target[dim] not in (-1, tensor.shape[tensor.slices.dim]):
        return NotImplemented
    local = held(tensor)
    target[dim] = local.shape[tensor.slices.dim]
    return tensor.like(local.expand(target), dim)


@rule(T.repeat, torch.tile, T.tile)
def _repeat(tensor: SlicedTensor, *sizes: Any) -> Any:
    times = _sizes(sizes)
    added = max(0, len(times) - tensor.dim())
    if times[tensor.negative_dim] != 1 and -tensor.negative_dim <= len(times):
        return NotImplemented
    return tensor.like(held(tensor).repeat(*times), tensor.slices.dim + added)


@rule(T.repeat_interleave, torch.repeat_interleave)
def _repeat_interleave(tensor: SlicedTensor, repeats: Any, dim: Any = None, **kwargs: Any) -> Any:
    if not isinstance(repeats, int) or dim is None or not is_sliced(tensor):
        return NotImplemented
    local = held(tensor).repeat_interleave(repeats, dim, **kwargs)
    if dim % tensor.dim() != tensor.slices.dim:
        return tensor.like(local)
    sections = tuple(Section(n * repeats, unit * repeats) for n, unit in tensor.slices.sections)
    return SlicedTensor.of(local, Slices(tensor.slices.dim, sections), tensor.group)


@rule_with_function(T.flip, torch.flip, T.roll, torch.roll)
def _other_dims(func: Any, tensor: SlicedTensor, *args: Any, **kwargs: Any) -> Any:
    dims = kwargs.get("dims", args[-1] if args else None)
    dims = [dims] if isinstance(dims, int) else dims
    if dims is None or tensor.slices.dim in [d % tensor.dim() for d in dims]:
        return NotImplemented
    return tensor.like(func(held(tensor), *args, **kwargs))


def _pieces(tensor: SlicedTensor, lengths: Sequence[int]) -> list[SlicedTensor] | None:
    """The tensor split along its sliced dim, where the sections are split apart."""
    sections, pieces = list(tensor.slices.sections), []
    local, begin, dim = held(tensor), 0, tensor.slices.dim
    group = tensor.group
    for length in lengths:
        own: list[Section] = []
        while sections and sum(s.length for s in own) < length:
            own.append(sections.pop(0))
        if sum(s.length for s in own) != length:
            return None
        slices = Slices(dim, tuple(own))
        held_here = slices.length(group.rank, group.size)
        pieces.append(SlicedTensor.of(local.narrow(dim, begin, held_here), slices, group))
        begin += held_here
    return pieces


def _split_lengths(total: int, size: int) -> list[int]:
    return [min(size, total - begin) for begin in range(0, total, size)]


@rule(T.split, torch.split, torch.functional.split, T.split_with_sizes)
def _split(tensor: SlicedTensor, split_size_or_sections: Any, dim: int = 0, **kwargs: Any) -> Any:
    del kwargs
    dim, total = dim % tensor.dim(), tensor.shape[dim]
    size = split_size_or_sections
    lengths = _split_lengths(total, size) if isinstance(size, int) else list(size)
    if dim == tensor.slices.dim:
        pieces = _pieces(tensor, lengths)
        return NotImplemented if pieces is None else tuple(pieces)
    return tuple(tensor.like(part) for part in held(tensor).split(lengths, dim))


@rule(T.chunk, torch.chunk)
def _chunk(tensor: SlicedTensor, chunks: int, dim: int = 0) -> Any:
    size = -(-tensor.shape[dim] // chunks)
    return _split(tensor, size, dim)


@rule(T.tensor_split, torch.tensor_split)
def _tensor_split(tensor: SlicedTensor, sections: Any, dim: int = 0) -> Any:
    if not isinstance(sections, int) or tensor.shape[dim] % sections:
        return NotImplemented
    return _split(tensor, tensor.shape[dim] // sections, dim)


@rule(T.unbind, torch.unbind)
def _unbind(tensor: SlicedTensor, dim: int = 0) -> Any:
    dim %= tensor.dim()
    if dim == tensor.slices.dim:
        return NotImplemented
    place = tensor.slices.dim - (dim < tensor.slices.dim)
    return tuple(tensor.like(part, place) for part in held(tensor).unbind(dim))


@rule(T.__iter__)  # type: ignore[arg-type]
def _iterate(tensor: SlicedTensor) -> Any:
    return iter(tensor.unbind(0))


@rule(T.select, torch.select)
def _select(tensor: SlicedTensor, dim: int, index: int) -> Any:
    dim %= tensor.dim()
    if dim == tensor.slices.dim:
        return NotImplemented
    return tensor.like(
        held(tensor).select(dim, index), tensor.slices.dim - (dim < tensor.slices.dim)
    )


@rule(T.narrow, torch.narrow)
def _narrow(tensor: SlicedTensor, dim: int, start: Any, length: int) -> Any:
    index = [slice(None)] * tensor.dim()
    index[dim] = slice(int(start), int(start) + length)
    return _getitem(tensor, tuple(index))


def _along(tensor: SlicedTensor, index: slice) -> SlicedTensor | None:
    """A stretch of the sliced dim that is made of whole sections."""
    total = tensor.shape[tensor.slices.dim]
    start, stop, step = index.indices(total)
    if step != 1:
        return None
    if (start, stop) == (0, total):
        return tensor
    lengths = [n for n in (start, stop - start, total - stop) if n]
    pieces = _pieces(tensor, lengths)
    return None if pieces is None else pieces[1 if start else 0]


@rule(T.__getitem__)
def _getitem(tensor: Any, index: Any) -> Any:
    if not is_sliced(tensor):
        return NotImplemented
    entries = list(index) if isinstance(index, tuple) else [index]
    if not all(e is None or e is Ellipsis or isinstance(e, (int, slice)) for e in entries):
        return NotImplemented
    named = sum(e is not None and e is not Ellipsis for e in entries)
    rest = [slice(None)] * (tensor.dim() - named)
    at = next((n for n, e in enumerate(entries) if e is Ellipsis), len(entries))
    entries = [*entries[:at], *rest, *entries[at + 1 :]]
    source, place, found = 0, 0, None
    for number, entry in enumerate(entries):
        if entry is None:
            place += 1
            continue
        if source == tensor.slices.dim:
            if not isinstance(entry, slice):
                return NotImplemented
            part = _along(tensor, entry)
            if part is None:
                return NotImplemented
            tensor, found = part, place
            entries[number] = slice(None)
        place += not isinstance(entry, int)
        source += 1
    return tensor.like(held(tensor)[tuple(entries)], found)


@rule_with_function(torch.cat, torch.concat, torch.concatenate, torch.stack)
def _cat(func: Any, tensors: Sequence[Any], dim: int = 0, **kwargs: Any) -> Any:
    first = next(t for t in tensors if is_sliced(t))
    stacks = func is torch.stack
    group, place = first.group, first.slices.dim
    dim = kwargs.pop("axis", dim) % (first.dim() + stacks)
    joins = dim == place and not stacks
    parts = []
    for tensor in tensors:
        if is_sliced(tensor):
            if tensor.slices.dim != place:
                return NotImplemented
            if not joins and not tensor.slices.same(first.slices, group.size):
                return NotImplemented
            parts.append(held(tensor))
        elif joins:
            return NotImplemented
        else:
            parts.append(part_of(tensor, first.slices, group))
    local = func(parts, dim, **kwargs)
    if joins:
        sections = tuple(section for t in tensors for section in t.slices.sections)
        return SlicedTensor.of(local, Slices(place, sections), group)
    return first.like(local, place + (stacks and dim <= place))


@rule(F.pad, torch._C._nn.pad)
def _pad(tensor: SlicedTensor, pad: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    if -tensor.negative_dim * 2 <= len(pad):
        own = pad[-tensor.negative_dim * 2 - 2 : -tensor.negative_dim * 2 or None]
        if any(own):
            return NotImplemented
    return tensor.like(F.pad(held(tensor), pad, *args, **kwargs))


@rule_with_function(T.new_empty, T.new_zeros, T.new_ones, T.new_full, T.new_tensor)
def _new(func: Any, tensor: SlicedTensor, *args: Any, **kwargs: Any) -> Any:
    return func(held(tensor), *args, **kwargs)


@rule_with_function(T.index_select, torch.index_select)
def _index_select(func: Any, tensor: Any, dim: int, index: Tensor) -> Any:
    if not is_sliced(tensor) or is_sliced(index) or dim % tensor.dim() == tensor.slices.dim:
        return NotImplemented
    return tensor.like(func(held(tensor), dim, index))
