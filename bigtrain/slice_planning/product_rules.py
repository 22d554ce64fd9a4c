"""Axis rules of matrix products, convolutions, attention and norms."""

from __future__ import annotations

from torch import Tensor

from bigtrain.slice_planning.dim_axes import Dim, Dims, split_inner, split_outer, unify
from bigtrain.slice_planning.operations import OpCall, axis_rule, opaque, same_dims


@axis_rule("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "linear")
def axis_product(op: OpCall) -> list[Dims]:
    """Rule of matrix products, batched if there are three dims."""
    left, right = _factors(op)
    left_dims, right_dims = op.dims_or_new(left), op.dims_or_new(right)
    if op.name == "linear":
        right_dims = tuple(reversed(right_dims))
    _sum_over(op, left_dims[-1], right_dims[max(0, len(right_dims) - 2)], (left, right))
    if left.dim() >= right.dim() == 2:
        op.use_weight((left, right), right_dims[1], right_dims[0])
    if left.dim() == right.dim() == 3:
        unify(left_dims[0], right_dims[0])
    rows = [left_dims[-2]] if len(left_dims) > 1 else []
    columns = [right_dims[-1]] if len(right_dims) > 1 else []
    dims = (*left_dims[:-2], *rows, *columns)
    added = op.arg("bias") if op.name == "linear" else op.arg("self")
    known = op.dims(added) if isinstance(added, Tensor) and added is not left else None
    return [same_dims(op.results[0].shape, [dims, known] if known is not None else [dims])]


def _factors(op: OpCall) -> tuple[Tensor, Tensor]:
    if op.name == "linear":
        return op.tensor("input"), op.tensor("weight")
    left, right = [t for t in op.tensors if t is not op.arg("self")][-2:] if op.name in (
        "addmm", "baddbmm", "addmv") else op.tensors[-2:]  # fmt: skip
    return left, right


def _sum_over(op: OpCall, first: Dim, second: Dim, factors: tuple[Tensor, Tensor]) -> None:
    """Unify a contracted dim; block it unless one of the factors is computed from weights alone."""
    unify(first, second)
    if any(map(op.of_weights, factors)):
        op.summed.append(first)
    else:
        op.block(first, "activations are summed over it")


@axis_rule("convolution", "_convolution", "mkldnn_convolution", "cudnn_convolution")
def convolved(op: OpCall) -> list[Dims]:
    """Rule of convolutions: channels of a group are summed over; pixels cannot be sliced."""
    tensor, weight, result = op.tensor("input"), op.tensor("weight"), op.results[0]
    groups, transposed = op.arg("groups", 1), bool(op.arg("transposed"))
    dims, kernel = op.dims_or_new(tensor), op.dims_or_new(weight)
    lead = tensor.dim() - weight.dim() + 1  # samples in front, if there are any
    outer, inner = kernel[0], kernel[1]
    grouped = split_outer(dims[lead], groups)
    outs = split_outer(outer, groups)
    if grouped is None or outs is None:
        return opaque(op)
    unify(grouped[0], outs[0])
    if transposed:
        channels = [*outs[0], *inner]
        _sum_over(op, grouped[1], outs[1], (tensor, weight))
    else:
        channels = outer
        _sum_over(op, grouped[1], inner, (tensor, weight))
    if groups == 1 or not transposed:
        out, summed = (inner, outer) if transposed else (outer, inner)
        op.use_weight((tensor, weight), out, summed if groups == 1 else None)
    bias = op.arg("bias")
    known = op.dims(bias) if isinstance(bias, Tensor) else None
    if known is not None:
        unify(channels, known[0])
    why = "a convolution runs along it"
    for dim in (*dims[lead + 1 :], *kernel[2:]):
        op.block(dim, why)
    pixels = [op.blocked_dim(length, why) for length in result.shape[lead + 1 :]]
    return [(*dims[:lead], channels, *pixels)]


@axis_rule("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
      "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
      "_scaled_dot_product_fused_attention_overrideable",
      "_scaled_dot_product_attention_math")  # fmt: skip
def attended(op: OpCall) -> list[Dims]:
    """Rule of attention, (batch, heads, positions, width): heads are independent."""
    query, key, value = (op.tensor(name) for name in ("query", "key", "value"))
    q, k, v = (op.dims_or_new(tensor) for tensor in (query, key, value))
    unify(q[0], k[0])
    unify(q[0], v[0])
    unify(k[1], v[1])
    if query.shape[1] == key.shape[1]:
        unify(q[1], k[1])
    elif key.shape[1] > 1:  # grouped queries: several query heads share a key head
        pieces = split_outer(q[1], key.shape[1])
        if pieces is None:
            return opaque(op)
        unify(pieces[0], k[1])
    for dim in (k[2], v[2]):
        op.block(dim, "attention runs along it")
    for dim in (q[3], k[3], v[3]):
        op.block(dim, "it is the width of a head")
    mask = op.arg("attn_bias") if op.arg("attn_bias") is not None else op.arg("attn_mask")
    known = op.dims(mask) if isinstance(mask, Tensor) else None
    if known is not None:
        same_dims((*query.shape[:3], key.shape[2]), [known, (q[0], q[1], q[2], k[2])])
    first: Dims = (q[0], q[1], q[2], v[3])
    more = [
        (q[0], q[1], q[2]) if tuple(t.shape) == tuple(query.shape[:3]) else _new(op, t)
        for t in op.results[1:]
    ]
    return [first, *more]


def _new(op: OpCall, tensor: Tensor) -> Dims:
    return tuple(op.blocked_dim(length, "it is a statistic") for length in tensor.shape)


@axis_rule("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm")
def layer_normed(op: OpCall) -> list[Dims]:
    """Rule of norms over the last dims."""
    tensor = op.tensor("input")
    dims = op.dims_or_new(tensor)
    over = len(op.arg("normalized_shape"))
    for name in ("weight", "bias"):
        known = op.dims(op.arg(name))
        if known is not None:
            same_dims(tensor.shape, [dims, known])
    for dim in dims[len(dims) - over :]:
        op.block(dim, "a norm goes along it")
    statistics = (*dims[: len(dims) - over], *([[]] * over))
    return [dims, *(statistics for _ in op.results[1:])]


@axis_rule("native_group_norm", "group_norm")
def group_normed(op: OpCall) -> list[Dims]:
    """Rule of norms over the channels of a group and the pixels."""
    tensor = op.tensor("input")
    dims = op.dims_or_new(tensor)
    groups = op.arg("group") or op.arg("num_groups")
    pieces = split_outer(dims[1], groups)
    if pieces is None:
        return opaque(op)
    for name in ("weight", "bias"):
        known = op.dims(op.arg(name))
        if known is not None:
            unify(dims[1], known[0])
    for dim in (pieces[1], *dims[2:]):
        op.block(dim, "a norm goes along it")
    return [dims, *((dims[0], pieces[0]) for _ in op.results[1:])]


@axis_rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
      "cudnn_batch_norm", "_batch_norm_with_update", "_batch_norm_no_update",
      "batch_norm", "instance_norm")  # fmt: skip
def batch_normed(op: OpCall) -> list[Dims]:
    """Rule of norms over samples and pixels; channels are independent."""
    tensor = op.tensor("input")
    dims = op.dims_or_new(tensor)
    for name in ("weight", "bias", "running_mean", "running_var"):
        known = op.dims(op.arg(name))
        if known is not None:
            unify(dims[1], known[0])
    for dim in (dims[0], *dims[2:]):
        op.block(dim, "a norm goes along it")
    channels: Dims = (dims[1],)
    return [
        dims,
        *(channels if t.dim() == 1 and t.numel() > 1 else _new(op, t) for t in op.results[1:]),
    ]


@axis_rule("_grouped_mm", "transformers::grouped_mm_fallback")
def grouped_matmul(op: OpCall) -> list[Dims]:
    """Rule of grouped products (experts): each group of rows has its own matrix."""
    left, right = [t for t in op.tensors if t.is_floating_point()][:2]
    if left.dim() != 2 or right.dim() != 3:
        return opaque(op)
    left_dims, right_dims = op.dims_or_new(left), op.dims_or_new(right)
    op.block(right_dims[0], "rows choose among it")  # the experts
    _sum_over(op, left_dims[1], right_dims[1], (left, right))
    return [(left_dims[0], right_dims[2])]


@axis_rule("im2col")
def unfolded(op: OpCall) -> list[Dims]:
    """Rule of unfolding (samples, channels, pixels) to (samples, channels x window, windows)."""
    tensor, result = op.tensor("self"), op.results[0]
    dims = op.dims_or_new(tensor)
    why = "windows are taken along it"
    lead = tensor.dim() - 3
    for dim in dims[lead + 1 :]:
        op.block(dim, why)
    window = op.blocked_dim(result.shape[lead] // tensor.shape[lead], why)
    return [(*dims[:lead], [*dims[lead], *window], op.blocked_dim(result.shape[-1], why))]


@axis_rule("col2im")
def folded(op: OpCall) -> list[Dims]:
    """Rule of folding (samples, channels x window, windows) to (samples, channels, pixels)."""
    tensor, result = op.tensor("self"), op.results[0]
    dims = op.dims_or_new(tensor)
    why = "windows are taken along it"
    lead = tensor.dim() - 2
    pieces = split_inner(dims[lead], tensor.shape[lead] // result.shape[lead])
    if pieces is None:
        return opaque(op)
    op.block([*pieces[1], *dims[-1]], why)
    return [(*dims[:lead], pieces[0], *(op.blocked_dim(n, why) for n in result.shape[lead + 1 :]))]
