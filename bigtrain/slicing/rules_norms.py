"""What norms, reductions, pooling and dropout do with slices: they act along other dims."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bigtrain.slicing.exchange import SliceGroup, part_of, summed, to_all
from bigtrain.slicing.rules_pointwise import words
from bigtrain.slicing.sliced_tensor import SlicedTensor, held, is_sliced, rule, rule_with_function
from bigtrain.slicing.slices import Slices

T = torch.Tensor


@contextmanager
def own_random(group: SliceGroup, *, draws: bool = True) -> Iterator[None]:
    """Random numbers of this rank's own, for what is sliced, inside of a `with` block.

    They begin with one number of the common stream and the rank's place, so that the ranks stay in
    step outside, and a block that is computed again draws the same.
    """
    if not draws:
        yield
        return
    seed = int(torch.randint(1 << 62, ()).item()) if group.group is not None else 0
    if group.group is None:  # fakes draw nothing
        yield
        return
    with torch.random.fork_rng(devices=_devices()):
        torch.manual_seed(seed + group.rank)
        yield


def _devices() -> list[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_available() else []


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
    with own_random(tensor.group, draws=training and p > 0):
        local = func(held(tensor), p, training, inplace)
    return tensor.like(local)


@rule_with_function(
    F.softmax,
    torch.softmax,
    T.softmax,
    F.log_softmax,
    torch.log_softmax,
    T.log_softmax,
    torch.cumsum,
    T.cumsum,
    torch.sort,
    T.sort,
    T.argsort,
    torch.argsort,
    F.normalize,
    F.softmin,
    F.glu,
    torch.cumprod,
    T.cumprod,
)
def _along_dim(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    place = 1 if func is F.normalize else 0
    default = 1 if func is F.normalize else -1
    dim = kwargs.get("dim", args[place] if len(args) > place else default)
    if not is_sliced(tensor) or not isinstance(dim, int):
        return NotImplemented
    if dim % tensor.dim() == tensor.slices.dim:
        return _gated(tensor) if func is F.glu else NotImplemented
    found = func(held(tensor), *args, **kwargs)
    if isinstance(found, Tensor):
        return tensor.like(found)
    return type(found)(tensor.like(part) for part in found)


def _gated(tensor: SlicedTensor) -> Any:
    first, gate = tensor.chunk(2, tensor.slices.dim)
    return first * torch.sigmoid(gate)


@rule_with_function(F.layer_norm, F.rms_norm, torch.rms_norm)
def _layer_norm(
    func: Any, x: Any, shape: Sequence[int], weight: Any = None, *args: Any, **kwargs: Any
) -> Any:
    tensors = [t for t in (weight, *args) if isinstance(t, Tensor)]
    if not is_sliced(x) or x.negative_dim >= -len(shape) or any(map(is_sliced, tensors)):
        return NotImplemented
    own = [to_all(t, x.group) if isinstance(t, Tensor) else t for t in (weight, *args)]
    named = {k: to_all(v, x.group) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    return x.like(func(held(x), shape, *own, **named))


def _channels(value: Any, slices: Slices, group: SliceGroup) -> Any:
    """A rank's channels of a parameter or a buffer of a norm."""
    if value is None:
        return None
    if is_sliced(value):
        return held(value)
    return part_of(value, slices.at(0), group)


@rule(F.batch_norm)
def _batch_norm(
    x: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,  # noqa: FBT001, FBT002 - torch's own
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    of_norm = (running_mean, running_var, weight, bias)
    main = next(t for t in (x, *of_norm) if is_sliced(t))
    slices, group = main.slices, main.group
    if is_sliced(x) and x.slices.dim != 1:
        return NotImplemented
    if is_sliced(x) and training and any(t is not None and not is_sliced(t) for t in of_norm[:2]):
        return NotImplemented  # whole statistics follow whole batches
    if any(is_sliced(t) and not t.slices.same(slices, group.size) for t in of_norm):
        return NotImplemented
    own = held(x) if is_sliced(x) else part_of(x, slices.at(1), group)
    parts = [_channels(t, slices, group) for t in of_norm]
    local = F.batch_norm(own, *parts, training, momentum, eps)
    return SlicedTensor.of(local, slices.at(1), group)


@rule(F.group_norm)
def _group_norm(
    x: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    if not is_sliced(x):
        return NotImplemented
    group, slices = x.group, x.slices
    if slices.dim == 0:
        own = [to_all(t, group) if isinstance(t, Tensor) else t for t in (weight, bias)]
        if any(map(is_sliced, own)):
            return NotImplemented
        return x.like(F.group_norm(held(x), num_groups, *own, eps))
    each = x.shape[1] // num_groups
    if slices.dim != 1 or any(
        begin % each or length % each
        for rank in range(group.size)
        for begin, length in slices.parts(rank, group.size)
    ):
        return NotImplemented
    own_groups = slices.length(group.rank, group.size) // each
    parts = [_channels(t, slices, group) for t in (weight, bias)]
    return x.like(F.group_norm(held(x), own_groups, *parts, eps))


_POOLS = words(
    """
avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d adaptive_avg_pool1d
adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d lp_pool1d lp_pool2d
interpolate upsample instance_norm
"""
)
_DIMS = {"1d": 1, "2d": 2, "3d": 3}


@rule_with_function(
    *(getattr(F, name) for name in _POOLS),
    torch.max_pool1d,
    torch.max_pool2d,
    torch.max_pool3d,
    torch.avg_pool1d,
    torch.adaptive_avg_pool1d,
    torch.adaptive_max_pool1d,
)
def _pool(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    spatial = _DIMS.get(func.__name__[-2:], x.dim() - 2)
    if not is_sliced(x) or x.negative_dim >= -spatial:
        return NotImplemented
    found = func(held(x), *args, **kwargs)
    return x.like(found) if isinstance(found, Tensor) else NotImplemented


@rule_with_function(
    torch.sum,
    T.sum,
    torch.mean,
    T.mean,
    torch.amax,
    T.amax,
    torch.amin,
    T.amin,
    torch.prod,
    T.prod,
    torch.std,
    T.std,
    torch.var,
    T.var,
    torch.logsumexp,
    T.logsumexp,
    torch.all,
    T.all,
    torch.any,
    T.any,
    torch.norm,
    T.norm,
    torch.linalg.vector_norm,
    torch.max,
    T.max,
    torch.min,
    T.min,
    torch.argmax,
    T.argmax,
    torch.argmin,
    T.argmin,
    torch.topk,
    T.topk,
)
def _reduce(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_sliced(x) or any(is_sliced(a) for a in (*args, *kwargs.values())):
        return NotImplemented
    name = func.__name__
    if name in ("max", "min") and args and isinstance(args[0], Tensor):
        return NotImplemented
    place = 1 if name in ("norm", "vector_norm", "topk") else 0
    dim = kwargs.get("dim", args[place] if len(args) > place else None)
    if isinstance(dim, bool) or dim is None:
        dims = list(range(x.dim()))
    else:
        dims = [d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)] or list(
            range(x.dim())
        )
    if x.slices.dim in dims:
        return _sum(x, name, dims, args, kwargs)
    found = func(held(x), *args, **kwargs)
    tensors = [found] if isinstance(found, Tensor) else list(found)
    kept = tensors[0].dim() == x.dim()
    place = x.slices.dim - (0 if kept else sum(d < x.slices.dim for d in dims))
    own = [x.like(t, place) for t in tensors]
    return own[0] if isinstance(found, Tensor) else type(found)(own)


def _sum(x: SlicedTensor, name: str, dims: list[int], args: Any, kwargs: Any) -> Any:
    """A sum or a mean over the sliced dim: each rank's, added up."""
    if name not in ("sum", "mean"):
        return NotImplemented
    local = held(x)
    total = torch.sum(local, *args, **kwargs)
    if not x.dtype.is_floating_point and not total.dtype.is_floating_point:
        return NotImplemented
    total = summed(total, x.group)
    if name == "sum":
        return total
    count = 1
    for d in dims:
        count *= x.shape[d]
    return total / count
