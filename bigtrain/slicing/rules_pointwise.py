"""What functions of one element at a time do with slices: the same, on each rank's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from bigtrain.slicing.exchange import SliceGroup, part_of, to_all
from bigtrain.slicing.sliced_tensor import (
    SlicedTensor,
    held,
    is_sliced,
    leaves_of,
    rule,
    rule_with_function,
)
from bigtrain.slicing.slices import Slices


def words(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


_METHODS_AND_FUNCTIONS = words(
    """
abs absolute acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not
bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip copysign cos cosh deg2rad div divide eq
erf erfc erfinv exp exp2 expm1 fix float_power floor floor_divide fmax fmin fmod frac ge greater
greater_equal gt hypot isclose isfinite isinf isnan le lerp less less_equal lgamma log log10 log1p
log2 logaddexp logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum
mul multiply nan_to_num ne neg negative nextafter not_equal positive pow rad2deg reciprocal
remainder round rsqrt rsub sgn sigmoid sign signbit sin sinc sinh sqrt square sub subtract tan tanh
true_divide trunc where relu selu celu rrelu threshold xlogy heaviside
zeros_like ones_like full_like empty_like
"""
)
_METHODS = words(
    """
__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__
__rtruediv__ __itruediv__ __div__ __rdiv__ __pow__ __rpow__ __neg__ __abs__ __and__ __or__ __xor__
__invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __mod__ __floordiv__ type_as bool double float
half bfloat16 int long to cuda cpu type masked_fill_ clone detach zero_ fill_ copy_ requires_grad_
"""
)
_FUNCTIONAL = words(
    """
relu relu6 relu_ elu elu_ selu selu_ celu gelu silu mish hardswish hardsigmoid hardtanh leaky_relu
leaky_relu_ softplus softsign softshrink hardshrink tanhshrink logsigmoid threshold sigmoid tanh
"""
)


def _named(home: Any, names: list[str]) -> list[Any]:
    return [getattr(home, name) for name in names if hasattr(home, name)]


_IN_PLACE = [f"{name}_" for name in _METHODS_AND_FUNCTIONS]
_ALL = {
    *_named(torch, _METHODS_AND_FUNCTIONS),
    *_named(torch, [f"{n}_" for n in ("relu", "selu", "sigmoid", "tanh", "clamp")]),
    *_named(torch.Tensor, _METHODS_AND_FUNCTIONS),
    *_named(torch.Tensor, _IN_PLACE),
    *_named(torch.Tensor, _METHODS),
    *_named(F, _FUNCTIONAL),
    *_named(torch.special, words("erf erfc expit exp2 expm1 log1p logit xlogy log_ndtr ndtr")),
}


def aligned(values: list[Any], group: SliceGroup) -> tuple[Slices, int, tuple[int, ...]] | None:
    """How the result of a function of these, broadcast together, is sliced.

    Returns:
        The slices, their dim counted from the last one (-1), and the shape of the whole; None
        where two are sliced in different ways.
    """
    sliced = [value for value in values if is_sliced(value)]
    first = sliced[0]
    dim = first.negative_dim
    for other in sliced[1:]:
        if other.negative_dim != dim or not other.slices.same(first.slices, group.size):
            return None
    shapes = [tuple(v.shape) for v in values if isinstance(v, Tensor)]
    shape = tuple(torch.broadcast_shapes(*shapes))
    if shape[dim] != first.shape[dim]:
        return None
    return first.slices, dim, shape


def own_part(value: Any, slices: Slices, dim: int, group: SliceGroup) -> Any:
    """What goes with slices of a dim, counted from the last one (-1), of an operand.

    A whole tensor that is broadcast along it is used by each rank in its own way.
    """
    if is_sliced(value):
        return held(value)
    if not isinstance(value, Tensor) or value.dim() == 0:
        return to_all(value, group) if isinstance(value, Tensor) else value
    if value.dim() < -dim or value.shape[dim] == 1:
        return to_all(value, group)
    return part_of(value, slices.at(value.dim() + dim), group)


@rule_with_function(*_ALL)
def _pointwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    values = leaves_of((args, kwargs))
    group: SliceGroup = next(v for v in values if is_sliced(v)).group
    found = aligned(values, group)
    if found is None:
        return NotImplemented
    slices, dim, shape = found
    target = args[0] if args else None
    changes = func.__name__.endswith("_") and not func.__name__.endswith("__")
    changes = changes or (func.__name__.startswith("__i") and func.__name__ != "__invert__")
    changes = changes or bool(kwargs.get("inplace"))
    if changes and not is_sliced(target):
        return NotImplemented
    if func in (torch.Tensor.type_as, torch.Tensor.to):  # the other tensor only lends its type
        args = (args[0], *(held(a) if is_sliced(a) else a for a in args[1:]))
        local = func(held(target), *args[1:], **kwargs)
    else:
        own = tree_map(lambda v: own_part(v, slices, dim, group), (args, kwargs), is_leaf=is_sliced)
        local = func(*own[0], **own[1])
    if not isinstance(local, Tensor):
        return local
    if changes:
        target.local = local
        return target
    return SlicedTensor(local, slices.at(len(shape) + dim), group, shape)


@rule(torch.Tensor.contiguous)
def _contiguous(tensor: SlicedTensor, **kwargs: Any) -> SlicedTensor:
    return tensor.like(held(tensor).contiguous(**kwargs))


@rule(torch.Tensor.data.__get__)  # type: ignore[attr-defined]
def _data(tensor: SlicedTensor) -> SlicedTensor:
    return tensor.like(held(tensor).detach())


@rule(torch.Tensor.register_hook)
def _register_hook(tensor: SlicedTensor, hook: Any) -> Any:
    return held(tensor).register_hook(hook)


def _on_wrapper(func: Any) -> Any:
    def ask(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    return ask


_FACTS = (
    "size dim ndimension numel nelement element_size is_floating_point is_complex stride get_device"
)
_PROPERTIES = """shape dtype device ndim requires_grad is_cuda is_cpu layout is_sparse is_leaf
is_nested is_quantized is_meta is_mps is_xpu nbytes itemsize names _version"""
for _name in (*_FACTS.split(), "is_contiguous", "__len__", "__hash__"):
    rule(getattr(torch.Tensor, _name))(_on_wrapper(getattr(torch.Tensor, _name)))
for _name in _PROPERTIES.split():
    if hasattr(torch.Tensor, _name):
        _getter = getattr(torch.Tensor, _name).__get__
        rule(_getter)(_on_wrapper(_getter))
for _function in (torch.numel, torch.is_floating_point, torch.is_complex):
    rule(_function)(_on_wrapper(_function))
rule(torch.Tensor.grad_fn.__get__)(lambda tensor: tensor.local.grad_fn)  # type: ignore[attr-defined]
