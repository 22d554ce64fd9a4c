"""Rules of norms, reductions, pooling and dropout: they act along dims that are not sliced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bigtrain import devices
from bigtrain.slicing.exchange import SliceGroup, all_gather, scattered, summed
from bigtrain.slicing.rules.pointwise import words
from bigtrain.slicing.sliced_tensor import (
    SlicedTensor,
    as_operand,
    is_sliced,
    local_of,
    rule,
    rule_with_function,
)
from bigtrain.slicing.slices import Slices

_T: Any = torch.Tensor


@contextmanager
def rank_random(group: SliceGroup, *, draws: bool = True) -> Iterator[None]:
    """Draw random numbers from a stream of this rank inside a `with` block, for sliced tensors.

    The seed of the stream is a number from the common stream plus the rank. So the common streams
    stay equal on all ranks, and recomputation draws the same numbers.
    """
    if not draws:
        yield
        return
    seed = int(torch.randint(1 << 62, ()).item()) if group.group is not None else 0
    if group.group is None:  # fake tensors draw nothing
        yield
        return
    generators = [torch.default_generator, *devices.own_generators()]
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed + group.rank)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def draw_whole(x: SlicedTensor, func: Any, *args: Any, **kwargs: Any) -> SlicedTensor:
    """Call a random function with the whole tensor and slice its result: see `Draws.whole`."""
    return x.like(scattered(func(x.whole(), *args, **kwargs), x.slices, x.group))


@rule_with_function(
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout
)
def _dropout(
    func: Any,
    tensor: SlicedTensor,
    p: float = 0.5,
    training: bool = True,  # noqa: FBT001, FBT002 - torch's own
    inplace: bool = False,  # noqa: FBT001, FBT002
) -> Any:
    if tensor.group.draws.whole and training and p > 0:
        return draw_whole(tensor, func, p, training)
    # Most of these functions drop whole channels. If the sliced dim is after the channel dim, all
    # ranks must then drop the same channels.
    channel = min(1, tensor.dim() - 2)
    by_channel = func not in (F.dropout, F.alpha_dropout) and tensor.slices.dim > channel
    with rank_random(tensor.group, draws=training and p > 0 and not by_channel):
        local = func(local_of(tensor), p, training, inplace)
    return tensor.like(local)


@rule(F.rrelu)
def _rrelu(x: SlicedTensor, *args: Any, **kwargs: Any) -> Any:
    if x.group.draws.whole:
        return draw_whole(x, F.rrelu, *args, **kwargs)
    with rank_random(x.group):
        return x.like(F.rrelu(local_of(x), *args, **kwargs))


_ALONG = words("softmax log_softmax cumsum cumprod cummax cummin logcumsumexp sort argsort")
_TRANSFORMS = words("fft ifft rfft irfft fft2 ifft2 rfft2 irfft2")


@rule_with_function(
    *(getattr(home, name) for home in (torch, _T) for name in _ALONG),
    *(F.softmax, F.log_softmax, F.softmin, F.normalize, F.glu),
    *(getattr(torch.fft, name) for name in _TRANSFORMS),
)
def _along_dim(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    name = func.__name__
    is_transform = name in _TRANSFORMS
    dim_position = 1 if func is F.normalize or is_transform else 0
    usual = 1 if func is F.normalize else (-2, -1) if name.endswith("fft2") else -1
    dim = kwargs.get("dim", args[dim_position] if len(args) > dim_position else usual)
    dims = [dim] if isinstance(dim, int) else dim
    if not is_sliced(x) or isinstance(dim, bool) or not isinstance(dims, (tuple, list)):
        return NotImplemented
    if kwargs.get("out") is not None:
        return NotImplemented
    if x.slices.dim in [d % x.dim() for d in dims]:
        return _gated(x) if func is F.glu else NotImplemented
    result = func(local_of(x), *args, **kwargs)
    if isinstance(result, Tensor):
        return x.like(result)
    return type(result)([x.like(part) for part in result])


def _gated(tensor: SlicedTensor) -> Any:
    first, gate = tensor.chunk(2, tensor.slices.dim)
    return first * torch.sigmoid(gate)


@rule_with_function(F.layer_norm, F.rms_norm, torch.rms_norm)
def _layer_norm(
    func: Any, x: Any, shape: Sequence[int], weight: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if not is_sliced(x) or x.negative_dim >= -len(shape):
        return NotImplemented

    def local(value: Any) -> Any:
        return as_operand(value, None, x.group) if isinstance(value, Tensor) else value

    named = {name: local(value) for name, value in kwargs.items()}
    return x.like(func(local_of(x), shape, local(weight), *map(local, args), **named))


class _Statistics:
    """Running statistics of a norm, and the part of them for a rank's channels."""

    def __init__(self, whole: Any, slices: Slices, group: SliceGroup) -> None:
        self._whole, self._slices, self._group = whole, slices, group
        self.own = None if whole is None else as_operand(whole, slices, group)
        if self.own is not None and not self._is_held():
            self.own = self.own.clone()

    def _is_held(self) -> bool:
        return is_sliced(self._whole) and self.own is local_of(self._whole)

    def put_back(self) -> None:
        """Write the updated part back to the buffer, if the part is a copy."""
        if self.own is None or self._is_held():
            return
        now = all_gather(self.own, self._slices, self._group)
        if is_sliced(self._whole):
            now = scattered(now, self._whole.slices, self._group)
        (local_of(self._whole) if is_sliced(self._whole) else self._whole).copy_(now)


_USES_BATCH = {F.batch_norm: ("training", False), F.instance_norm: ("use_input_stats", True)}
"""By norm, the name and default of its sixth argument: whether the input's statistics are used."""


@rule_with_function(*_USES_BATCH)
def _channel_norm(
    func: Any,
    x: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    uses_batch: bool | None = None,  # noqa: FBT001 - torch's own
    momentum: float = 0.1,
    eps: float = 1e-5,
    **named: Any,
) -> Any:
    """Compute a BatchNorm or InstanceNorm, which treat each channel (dim 1) independently."""
    name, default = _USES_BATCH[func]
    if uses_batch is None:
        uses_batch = named.pop(name, default)
    sliced = [t for t in (running_mean, running_var, weight, bias) if is_sliced(t)]
    if is_sliced(x) and x.slices.dim == 1:
        sliced = [x]
    if named or not sliced or x.dim() < 2:
        return NotImplemented
    slices, group = sliced[0].slices.at(0), sliced[0].group
    running = [_Statistics(t, slices, group) for t in (running_mean, running_var)]
    affine = [None if t is None else as_operand(t, slices, group) for t in (weight, bias)]
    local_input = as_operand(x, slices.at(1), group)
    local = func(
        local_input, *(statistics.own for statistics in running), *affine, uses_batch, momentum, eps
    )
    if uses_batch:
        for statistics in running:
            statistics.put_back()
    return SlicedTensor.of(local, slices.at(1), group)


@rule(torch._weight_norm)
def _weight_norm(direction: Any, length: Any, dim: int = 0) -> Any:
    others = [d for d in range(direction.dim()) if d != dim]
    squares = (direction * direction).sum(others, keepdim=True)
    return direction * (length / squares.sqrt())


@rule(F.group_norm)
def _group_norm(
    x: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    if not is_sliced(x) or x.slices.dim > 1:
        return NotImplemented
    group, slices = x.group, x.slices
    if slices.dim == 0:
        local_weight, local_bias = (
            None if t is None else as_operand(t, None, group) for t in (weight, bias)
        )
        return x.like(F.group_norm(local_of(x), num_groups, local_weight, local_bias, eps))
    each = x.shape[1] // num_groups
    if any(
        n % each
        for rank in range(group.size)
        for part in slices.parts(rank, group.size)
        for n in part
    ):
        return NotImplemented
    local_groups = slices.length(group.rank, group.size) // each
    at = slices.at(0)
    local_weight, local_bias = (
        None if t is None else as_operand(t, at, group) for t in (weight, bias)
    )
    return x.like(F.group_norm(local_of(x), local_groups, local_weight, local_bias, eps))


_POOLS = words(
    """
avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d adaptive_avg_pool1d
adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d lp_pool1d lp_pool2d
interpolate upsample
"""
)
_INDEXED = [f"{kind}max_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)]
_DIMS = {"1d": 1, "2d": 2, "3d": 3}


@rule_with_function(
    *(getattr(F, name) for name in _POOLS),
    torch.max_pool1d,
    torch.max_pool2d,
    torch.max_pool3d,
    torch.avg_pool1d,
    torch.adaptive_avg_pool1d,
    torch.adaptive_max_pool1d,
    *(getattr(F, f"{name}_with_indices") for name in _INDEXED),
)
def _pool(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    name = func.__name__.removesuffix("_with_indices")
    spatial = _DIMS.get(name[-2:], x.dim() - 2)
    if not is_sliced(x) or x.negative_dim >= -spatial:
        return NotImplemented
    result = func(local_of(x), *args, **kwargs)
    return x.like(result) if isinstance(result, Tensor) else tuple(x.like(part) for part in result)


_REDUCTIONS = words(
    """
sum mean amax amin prod std var logsumexp all any norm max min argmax argmin topk nansum nanmean
median std_mean var_mean aminmax count_nonzero
"""
)


@rule_with_function(
    *(getattr(home, name) for home in (torch, _T) for name in _REDUCTIONS if hasattr(home, name)),
    torch.linalg.vector_norm,
)
def _reduce(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    values = (*args, *kwargs.values())
    if not is_sliced(x) or any(isinstance(value, Tensor) for value in values):
        return NotImplemented
    name = func.__name__
    dim_position = 1 if name in ("norm", "vector_norm", "linalg_vector_norm", "topk") else 0
    dim = kwargs.get(
        "dim", args[dim_position] if len(args) > dim_position else -1 if name == "topk" else None
    )
    if isinstance(dim, bool) or dim is None or dim in ((), []):
        dims = list(range(x.dim()))
    else:
        dims = [d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)]
    if x.slices.dim in dims:
        return _sum(x, name, args, kwargs) if name in ("sum", "mean") else NotImplemented
    result = func(local_of(x), *args, **kwargs)
    tensors = [result] if isinstance(result, Tensor) else list(result)
    keeps_dim = tensors[0].dim() == x.dim()
    at = x.slices.dim - (0 if keeps_dim else sum(d < x.slices.dim for d in dims))
    results = [x.like(t, at) for t in tensors]
    if isinstance(result, Tensor):
        return results[0]
    return tuple(results) if type(result) is tuple else type(result)(results)


def _sum(x: SlicedTensor, name: str, args: Any, kwargs: Any) -> Any:
    """Return a sum or a mean over the sliced dim, as the sum of the ranks' results."""
    local = local_of(x)
    if name == "sum":
        return summed(torch.sum(local, *args, **kwargs), x.group)
    # The weighted mean of the ranks' means, because the sum of all elements may overflow its dtype.
    share = local.shape[x.slices.dim] / x.slices.total
    return summed(torch.mean(local, *args, **kwargs) * share, x.group)
