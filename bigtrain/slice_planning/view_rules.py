"""Axis rules of views, concatenations, reductions and look-ups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bigtrain.slice_planning.dim_axes import (
    Dim,
    Dims,
    cut,
    dim_length,
    joined,
    new_dim,
    split_inner,
    unify,
    viewed,
)
from bigtrain.slice_planning.operations import OpCall, axis_rule, elementwise, opaque, same_dims


@axis_rule("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "flatten")
def in_another_shape(op: OpCall) -> list[Dims]:
    """Rule of reshapes."""
    return [viewed(op.dims_or_new(op.tensor("self")), op.results[0].shape)]


@axis_rule("t", "transpose", "permute", "movedim", "numpy_T", "adjoint")
def permuted(op: OpCall) -> list[Dims]:
    """Rule of functions that permute dims."""
    dims = list(op.dims_or_new(op.tensor("self")))
    if op.name == "permute":
        return [tuple(dims[n] for n in op.arg("dims"))]
    if op.name == "transpose":
        first, second = op.arg("dim0"), op.arg("dim1")
        dims[first], dims[second] = dims[second], dims[first]
        return [tuple(dims)]
    return [tuple(reversed(dims))]


@axis_rule("expand", "broadcast_to", "expand_copy")
def expanded_to(op: OpCall) -> list[Dims]:
    """Rule of expanding dims of length 1 and of adding dims in front."""
    return [same_dims(op.results[0].shape, [op.dims_or_new(op.tensor("self"))])]


@axis_rule("repeat")
def repeated(op: OpCall) -> list[Dims]:
    """Rule of repeating a tensor along each dim."""
    dims, times = op.dims_or_new(op.tensor("self")), op.arg("repeats")
    dims = (*([[]] * (len(times) - len(dims))), *dims)
    return [tuple([*new_dim(n), *dim] for n, dim in zip(times, dims, strict=True))]


@axis_rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk")
def split(op: OpCall) -> list[Dims]:
    """Rule of splits along a dim."""
    tensor = op.tensor("self")
    dim = op.arg("dim", 0) % tensor.dim()
    return _parts(op, tensor, dim, [result.shape[dim] for result in op.results])


def _parts(op: OpCall, tensor: Tensor, dim: int, lengths: Sequence[int]) -> list[Dims]:
    dims = op.dims_or_new(tensor)
    pieces = cut(dims[dim], lengths)
    if pieces is None:
        pieces = [op.blocked_dim(n, "is split where no parts begin") for n in lengths]
    return [(*dims[:dim], piece, *dims[dim + 1 :]) for piece in pieces]


@axis_rule("glu")
def gated(op: OpCall) -> list[Dims]:
    """Rule of `glu`: one half of a dim times the sigmoid of the other half."""
    tensor = op.tensor("self")
    dim = op.arg("dim", -1) % tensor.dim()
    half = tensor.shape[dim] // 2
    return [same_dims(op.results[0].shape, _parts(op, tensor, dim, [half, half]))]


@axis_rule("slice")
def sliced(op: OpCall) -> list[Dims]:
    """Rule of a range of a dim, with or without a step."""
    tensor, result = op.tensor("self"), op.results[0]
    dim = op.arg("dim", 0) % tensor.dim()
    length, count, step = tensor.shape[dim], result.shape[dim], op.arg("step", 1)
    start = op.arg("start") or 0
    start = min(max(start + length if start < 0 else start, 0), length)
    dims = op.dims_or_new(tensor)
    if count == length:
        return [dims]
    if step == 1:
        lengths = [n for n in (start, count, length - start - count) if n]
        return [_parts(op, tensor, dim, lengths)[1 if start else 0]]
    pieces = split_inner(dims[dim], step) if count * step == length else None
    if pieces is None:
        op.block(dims[dim], f"only every {step}th index of it is used")
        rest = op.blocked_dim(count, f"only every {step}th index is used")
    else:
        op.block(pieces[1], "a single index of it is selected")
        rest = pieces[0]
    return [(*dims[:dim], rest, *dims[dim + 1 :])]


@axis_rule("select", "unbind")
def selected(op: OpCall) -> list[Dims]:
    """Rule of functions that select single indices of a dim."""
    tensor = op.tensor("self")
    dim = op.arg("dim", 0) % tensor.dim()
    dims = op.dims_or_new(tensor)
    op.block(dims[dim], "a single index of it is selected")
    return [(*dims[:dim], *dims[dim + 1 :]) for _ in op.results]


@axis_rule("cat", "concat", "concatenate")
def concatenated(op: OpCall) -> list[Dims]:
    """Rule of concatenations along a dim."""
    result = op.results[0]
    dim = op.arg("dim", 0) % result.dim()
    parts = [t for t in op.arg("tensors") if t.dim() == result.dim() and t.shape[dim]]
    part_dims = [op.dims_or_new(tensor) for tensor in parts]
    others = [(*dims[:dim], [], *dims[dim + 1 :]) for dims in part_dims]
    shape = [1 if n == dim else length for n, length in enumerate(result.shape)]
    dims = same_dims(shape, others)
    joined_dim = joined([dims_of_part[dim] for dims_of_part in part_dims])
    return [(*dims[:dim], joined_dim, *dims[dim + 1 :])]


@axis_rule("stack")
def stacked(op: OpCall) -> list[Dims]:
    """Rule of stacks along a new dim."""
    result = op.results[0]
    dim = op.arg("dim", 0) % result.dim()
    shape = (*result.shape[:dim], *result.shape[dim + 1 :])
    dims = same_dims(shape, [op.dims_or_new(tensor) for tensor in op.arg("tensors")])
    new = op.blocked_dim(result.shape[dim], "tensors are stacked along it")
    return [(*dims[:dim], new, *dims[dim:])]


@axis_rule("sum", "mean", "amax", "amin", "var", "std", "var_mean", "std_mean", "prod", "any",
           "all", "logsumexp", "linalg_vector_norm", "norm", "argmax", "argmin", "max", "min",
           "median", "nansum", "aminmax", "count_nonzero")  # fmt: skip
def reduced(op: OpCall) -> list[Dims]:
    """Rule of reductions over some or all dims."""
    tensor = op.tensor("self")
    if isinstance(op.arg("other"), Tensor):
        return list(elementwise(op))
    dim_argument = op.arg("dim")
    over = (
        [dim_argument]
        if isinstance(dim_argument, int)
        else list(dim_argument or range(tensor.dim()))
    )
    over = [n % tensor.dim() for n in over] if tensor.dim() else []
    dims = op.dims_or_new(tensor)
    for n in over:
        op.block(dims[n], f"a {op.name} over it is taken")
    kept_dims = tuple([] if n in over else dim for n, dim in enumerate(dims))
    if not op.results or op.results[0].dim() == tensor.dim():
        return [kept_dims for _ in op.results]
    return [tuple(dim for n, dim in enumerate(dims) if n not in over) for _ in op.results]


@axis_rule("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "logcumsumexp", "roll",
      "flip", "sort", "topk", "kthvalue", "renorm")  # fmt: skip
def along_dims(op: OpCall) -> list[Dims]:
    """Rule of functions along some dims; the other dims are independent."""
    tensor = op.tensor("self")
    dim_argument = op.arg("dims") if op.arg("dims") is not None else op.arg("dim")
    over = (
        [dim_argument]
        if isinstance(dim_argument, int)
        else list(dim_argument or range(tensor.dim()))
    )
    return _as_before(op, tensor, [n % tensor.dim() for n in over if tensor.dim()])


def _as_before(op: OpCall, tensor: Tensor, over: Sequence[int]) -> list[Dims]:
    """Return results with the operand's dims; the dims `over` are blocked, or new if resized."""
    why = f"{op.name.strip('_')} goes along it"
    dims = op.dims_or_new(tensor)
    for n in over:
        op.block(dims[n], why)
    return [
        tuple(
            op.blocked_dim(length, why) if n in over and dim_length(dim) != length else dim
            for n, (dim, length) in enumerate(zip(dims, result.shape, strict=True))
        )
        for result in op.results
    ]


@axis_rule("triu", "tril")
def triangular(op: OpCall) -> list[Dims]:
    """Rule of `triu` and `tril`, which fill one side of the diagonal with zeros."""
    tensor = op.tensor("self")
    return _as_before(op, tensor, [tensor.dim() - 2, tensor.dim() - 1])


@axis_rule("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool1d", "avg_pool2d",
      "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d",
      "adaptive_max_pool3d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
      "_upsample_nearest_exact2d", "upsample_bilinear2d", "_upsample_bilinear2d_aa",
      "upsample_bicubic2d", "_upsample_bicubic2d_aa", "upsample_trilinear3d", "upsample_linear1d",
      "reflection_pad1d", "reflection_pad2d", "replication_pad2d", "replication_pad1d",
      "constant_pad_nd", "pad")  # fmt: skip
def over_places(op: OpCall) -> list[Dims]:
    """Rule of functions over pixels; samples and channels are independent."""
    tensor, result = op.tensor("self"), op.results[0]
    inner = {"1d": 1, "2d": 2, "3d": 3}.get(
        next((s for s in ("1d", "2d", "3d") if s in op.name), ""), 0
    )
    over = range(tensor.dim() - inner, tensor.dim())
    if op.name in ("constant_pad_nd", "pad"):
        pairs = zip(tensor.shape, result.shape, strict=True)
        over_list = [n for n, (before, after) in enumerate(pairs) if before != after]
        return _as_before(op, tensor, over_list)
    return _as_before(op, tensor, list(over))


@axis_rule("embedding")
def looked_up(op: OpCall) -> list[Dims]:
    """Rule of looking up rows of a table: a rank returns zeros for rows that it does not have."""
    table, indices = op.dims_or_new(op.tensor("weight")), op.tensor("indices")
    places = op.dims(indices) or tuple(new_dim(length) for length in indices.shape)
    op.summed.append(table[0])
    return [(*places, table[1])]


@axis_rule("index", "_unsafe_index")
def indexed(op: OpCall) -> list[Dims]:
    """Rule of indexing some dims by tensors."""
    tensor, result = op.tensor("self"), op.results[0]
    dims = op.dims_or_new(tensor)
    indices = list(op.arg("indices"))
    indices += [None] * (len(dims) - len(indices))
    over = [n for n, index in enumerate(indices) if index is not None]
    masks = [index for index in indices if index is not None and index.dtype.itemsize == 1]
    if masks:
        return [_masked(op, dims, masks[0], over[0])] if len(over) == 1 else opaque(op)
    for n in over:
        op.block(dims[n], "it is indexed by values")
    width = result.dim() - (len(dims) - len(over))
    adjacent = over == list(range(over[0], over[0] + len(over)))
    front = over[0] if adjacent else 0
    kept_dims = [dim for n, dim in enumerate(dims) if n not in over]
    new = [
        op.blocked_dim(length, "it comes from an index by values")
        for length in result.shape[front : front + width]
    ]
    return [(*kept_dims[:front], *new, *kept_dims[front:])]


def _masked(op: OpCall, dims: Dims, mask: Tensor, first: int) -> Dims:
    """Return the dims of a tensor indexed by a mask; the dims that the mask covers become one."""
    for dim in dims[first : first + mask.dim()]:
        op.block(dim, "it is indexed by values")
    places = op.blocked_dim(op.results[0].shape[first], "it comes from an index by values")
    return (*dims[:first], places, *dims[first + mask.dim() :])


@axis_rule("index_put", "_index_put_impl", "_unsafe_index_put")
def put_at(op: OpCall) -> list[Dims]:
    """Rule of writing values at indices of the first dims; the last dims are independent."""
    tensor, values = op.tensor("self"), op.tensor("values")
    dims, indices = op.dims_or_new(tensor), list(op.arg("indices"))
    if any(index is None for index in indices):
        return opaque(op)
    count = sum(index.dim() if index.dtype.itemsize == 1 else 1 for index in indices)
    known = op.dims(values)
    for dim in (*dims[:count], *(known or ())[: max(0, values.dim() - tensor.dim() + count)]):
        op.block(dim, "it is written to by index")
    if known is not None:
        last = known[max(0, values.dim() - tensor.dim() + count) :]
        same_dims(tensor.shape[count:], [dims[count:], last])
    return [dims]


@axis_rule("index_select", "gather", "scatter", "scatter_add", "index_add", "index_copy",
           "index_fill", "take_along_dim", "select_scatter", "slice_scatter",
           "scatter_reduce")  # fmt: skip
def along_numbers(op: OpCall) -> list[Dims]:
    """Rule of indexing, or writing to, one dim by a tensor of indices."""
    tensor, result = op.tensor("self"), op.results[0]
    dim = op.arg("dim", 0) % max(1, tensor.dim())
    why = f"{op.name} goes along it"
    dims = op.dims_or_new(tensor)
    others = [t for t in op.tensors if t is not tensor and op.dims(t) is not None]
    if any(operand.dim() != tensor.dim() for operand in others):
        return opaque(op)
    for known in (dims, *(op.dims_or_new(operand) for operand in others)):
        op.block(known[dim], why)
    result_dims: list[Dim] = []
    for n, length in enumerate(result.shape):
        if n == dim:
            alike = dim_length(dims[n]) == length
            result_dims.append(dims[n] if alike else op.blocked_dim(length, why))
            continue
        if dim_length(dims[n]) != length:  # the index of `gather` may be shorter
            op.block(dims[n], why)
            result_dims.append(op.blocked_dim(length, why))
            continue
        for operand in others:
            other_dim = op.dims_or_new(operand)[n]
            if dim_length(other_dim) == length:
                unify(dims[n], other_dim)
            else:
                op.block(dims[n], why)
        result_dims.append(dims[n])
    return [tuple(result_dims)]


@axis_rule("view_as_complex", "view_as_real")
def as_complex(op: OpCall) -> list[Dims]:
    """Rule of viewing pairs of real numbers as complex numbers, or the reverse."""
    tensor = op.tensor("self")
    dims = op.dims_or_new(tensor)
    if op.name == "view_as_real":
        return [(*dims, op.blocked_dim(2, "real and imaginary parts"))]
    op.block(dims[-1], "real and imaginary parts")
    return [dims[:-1]]


@axis_rule("pixel_shuffle", "pixel_unshuffle")
def shuffled_pixels(op: OpCall) -> list[Dims]:
    """Rule of moving the inner part of the channels to pixels, or back."""
    tensor, result = op.tensor("self"), op.results[0]
    dims = op.dims_or_new(tensor)
    why = "pixels are shuffled"
    pixels = [op.blocked_dim(n, why) for n in result.shape[-2:]]
    channels: Any
    if result.shape[-3] < tensor.shape[-3]:
        pieces = split_inner(dims[-3], tensor.shape[-3] // result.shape[-3])
        if pieces is None:
            return opaque(op)
        channels, inner = pieces
        op.block(inner, why)
    else:
        factor = result.shape[-3] // tensor.shape[-3]
        channels = [*dims[-3], *op.blocked_dim(factor, why)]
    for dim in dims[-2:]:
        op.block(dim, why)
    return [(*dims[:-3], channels, *pixels)]
