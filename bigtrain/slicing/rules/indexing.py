"""Rules of indexing by numbers, ranges and masks: they act along dims that are not sliced."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bigtrain.slicing.rules.shapes import pieces
from bigtrain.slicing.sliced_tensor import (
    SlicedTensor,
    as_operand,
    is_sliced,
    local_of,
    matching_part,
    rule,
    rule_with_function,
)

_T: Any = torch.Tensor


def _entries(tensor: Tensor, index: Any) -> list[Any] | None:
    """Return an index as one entry per dim and per added dim; None for an unsupported index."""
    entries = list(index) if isinstance(index, tuple) else [index]
    named = 0
    for position, entry in enumerate(entries):
        if isinstance(entry, bool) or is_sliced(entry):
            return None
        if isinstance(entry, list) and entry and all(type(n) is int for n in entry):
            entries[position] = entry = torch.tensor(entry, device=tensor.device)
        if isinstance(entry, Tensor):
            is_mask = entry.dtype in (torch.bool, torch.uint8)
            named += entry.dim() if is_mask else 1
            if is_mask and not entry.dim():
                return None
        elif entry is None or entry is Ellipsis:
            continue
        elif isinstance(entry, (int, slice)):
            named += 1
        else:
            return None
    rest = [slice(None)] * (tensor.dim() - named)
    at = next((n for n, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    return [*entries[:at], *rest, *entries[at + 1 :]]


def _range(tensor: SlicedTensor, index: slice) -> SlicedTensor | None:
    """Return a range of the sliced dim if it consists of whole sections; None for other ranges."""
    total = tensor.shape[tensor.slices.dim]
    start, stop, step = index.indices(total)
    if step != 1 or stop <= start:
        return None
    if (start, stop) == (0, total):
        return tensor
    parts = pieces(tensor, [n for n in (start, stop - start, total - stop) if n])
    return None if parts is None else parts[1 if start else 0]


def _with_result_dim(
    tensor: SlicedTensor, entries: list[Any]
) -> tuple[SlicedTensor, int, int] | None:
    """Return the tensor to index on each rank, the result's sliced dim, and its number of dims.

    torch applies numbers, ranges and added dims first, then index tensors. The dims of the index
    tensors come where the first of them is, or in front if other entries separate them. In
    `entries`, a range of the sliced dim becomes a full slice: the returned tensor is that range.

    Returns:
        None if the sliced dim is indexed by anything but a range of whole sections.
    """
    source, dim, index_dims, result_dim = 0, 0, 0, None
    chosen: list[int] = []
    for number, entry in enumerate(entries):
        if entry is None:
            dim += 1
            continue
        is_tensor = isinstance(entry, Tensor) and entry.dim() > 0
        is_mask = is_tensor and entry.dtype in (torch.bool, torch.uint8)
        width = entry.dim() if is_mask else 1
        if source <= tensor.slices.dim < source + width:
            part = _range(tensor, entry) if isinstance(entry, slice) else None
            if part is None:
                return None
            tensor, result_dim = part, dim
            entries[number] = slice(None)
        if is_tensor:
            chosen += range(dim, dim + width)
            index_dims = max(index_dims, 1 if is_mask else entry.dim())
        dim += width if is_tensor or isinstance(entry, slice) else 0
        source += width
    if result_dim is None:
        return None
    if chosen:
        in_a_row = chosen == list(range(chosen[0], chosen[0] + len(chosen)))
        before = sum(dim < result_dim for dim in chosen)
        result_dim += (index_dims if not in_a_row or chosen[0] < result_dim else 0) - before
    return tensor, result_dim, dim - len(chosen) + index_dims


@rule(_T.__getitem__)
def _get(tensor: Any, index: Any) -> Any:
    entries = _entries(tensor, index) if is_sliced(tensor) else None
    placed = None if entries is None else _with_result_dim(tensor, entries)
    if entries is None or placed is None:
        return NotImplemented
    part, dim, _ = placed
    return part.like(local_of(part)[tuple(entries)], dim)


@rule(_T.__setitem__)
def _set(tensor: Any, index: Any, value: Any) -> Any:
    entries = _entries(tensor, index) if is_sliced(tensor) else None
    placed = None if entries is None else _with_result_dim(tensor, entries)
    if entries is None or placed is None:
        return NotImplemented
    part, dim, count = placed
    value = matching_part(value, part.slices, dim - count, tensor.group)
    local_of(part)[tuple(entries)] = value
    tensor.change(local_of(tensor))
    return None


@rule(_T.select, torch.select)
def _select(tensor: SlicedTensor, dim: int, index: Any) -> Any:
    dim %= tensor.dim()
    if dim == tensor.slices.dim or is_sliced(index):
        return NotImplemented
    result_dim = tensor.slices.dim - (dim < tensor.slices.dim)
    return tensor.like(local_of(tensor).select(dim, int(index)), result_dim)


@rule(_T.narrow, torch.narrow)
def _narrow(tensor: SlicedTensor, dim: int, start: Any, length: int) -> Any:
    begin = int(start) % max(1, tensor.shape[dim])
    if dim % tensor.dim() != tensor.slices.dim:
        return tensor.like(local_of(tensor).narrow(dim, begin, length))
    part = _range(tensor, slice(begin, begin + length))
    return NotImplemented if part is None else part


@rule_with_function(_T.index_select, torch.index_select)
def _index_select(func: Any, tensor: Any, dim: int, index: Any) -> Any:
    if not is_sliced(tensor) or is_sliced(index) or dim % tensor.dim() == tensor.slices.dim:
        return NotImplemented
    return tensor.like(func(local_of(tensor), dim, index))


def _main_tensor(dim: int, tensors: list[Any], changed: Any = None) -> SlicedTensor | None:
    """Return the tensor whose slices the others follow; None if they cannot, or `dim` is sliced."""
    main: Any = changed
    if main is None:
        main = max((tensor for tensor in tensors if is_sliced(tensor)), key=Tensor.numel)
    if not is_sliced(main) or any(tensor.dim() != main.dim() for tensor in tensors):
        return None
    sliced_dim = main.slices.dim
    same = all(tensor.shape[sliced_dim] == main.shape[sliced_dim] for tensor in tensors)
    return main if same and dim % main.dim() != sliced_dim else None


@rule_with_function(_T.gather, torch.gather, _T.take_along_dim, torch.take_along_dim)
def _gather(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    names = ("indices", "dim") if "along" in func.__name__ else ("dim", "index")
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    index, dim = named.pop("indices", named.pop("index", None)), named.pop("dim", None)
    if named.pop("sparse_grad", False) or named or dim is None:
        return NotImplemented
    main = _main_tensor(dim, [tensor, index])
    if main is None:
        return NotImplemented
    values, indices = (as_operand(t, main.slices, main.group) for t in (tensor, index))
    if names[0] == "indices":
        return main.like(torch.take_along_dim(values, indices, dim))
    return main.like(values.gather(dim, indices))


@rule_with_function(
    *(getattr(home, name) for home in (_T, torch) for name in ("scatter", "scatter_add")),
    *(_T.scatter_, _T.scatter_add_),
)
def _scatter(func: Any, tensor: Any, dim: int, index: Any, src: Any = None, **kwargs: Any) -> Any:
    changes = func.__name__.endswith("_")
    tensors = [t for t in (tensor, index, src) if isinstance(t, Tensor) and t.dim()]
    main = _main_tensor(dim, tensors, tensor if changes else None)
    if main is None or kwargs.get("out") is not None:
        return NotImplemented
    operands = [as_operand(t, main.slices, main.group) for t in (tensor, index)]
    if isinstance(src, Tensor):
        kwargs["src"] = as_operand(src, main.slices if src.dim() else None, main.group)
    elif src is not None:
        kwargs["value"] = src
    local = func(operands[0], dim, operands[1], **kwargs)
    return main.change(local) if changes else main.like(local)


@rule_with_function(
    *(getattr(home, f"index_{name}") for home in (_T, torch) for name in ("add", "copy")),
    *(_T.index_add_, _T.index_copy_),
)
def _index_write(func: Any, tensor: Any, dim: int, index: Any, source: Any, **kwargs: Any) -> Any:
    if is_sliced(index) or not is_sliced(tensor) or dim % tensor.dim() == tensor.slices.dim:
        return NotImplemented
    if source.dim() != tensor.dim():
        return NotImplemented
    local_source = as_operand(source, tensor.slices, tensor.group)
    local = func(local_of(tensor), dim, index, local_source, **kwargs)
    return tensor.change(local) if func.__name__.endswith("_") else tensor.like(local)


@rule(F.one_hot)
def _one_hot(tensor: SlicedTensor, num_classes: int = -1) -> Any:
    if num_classes < 0:
        return NotImplemented
    return tensor.like(F.one_hot(local_of(tensor), num_classes))


@rule(F.grid_sample)
def _grid_sample(x: Any, grid: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_sliced(x) or x.slices.dim > 1:
        return NotImplemented
    slices = x.slices if x.slices.dim == 0 else None
    return x.like(F.grid_sample(local_of(x), as_operand(grid, slices, x.group), *args, **kwargs))
