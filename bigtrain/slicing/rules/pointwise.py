"""Rules of pointwise functions: each rank applies them to its slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from bigtrain.errors import ConfigError
from bigtrain.slicing.sliced_tensor import (
    SlicedTensor,
    as_operand,
    is_sliced,
    leaves_of,
    local_of,
    matching_part,
    rule,
    rule_with_function,
)

_T: Any = torch.Tensor


def words(text: str) -> list[str]:
    """Return the words of a text."""
    return text.split()


_METHODS_AND_FUNCTIONS = words(
    """
abs absolute acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh arccos arcsin arctan
arctan2 bitwise_and bitwise_not bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift ceil
clamp clamp_max clamp_min clip complex conj conj_physical copysign cos cosh deg2rad digamma div
divide eq erf erfc erfinv exp exp2 expm1 fix float_power floor floor_divide fmax fmin fmod frac ge
greater greater_equal gt hypot i0 imag isclose isfinite isinf isnan isneginf isposinf isreal le lerp
less less_equal lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or
logical_xor logit lt masked_fill maximum minimum mul multiply nan_to_num ne neg negative nextafter
not_equal polar positive pow rad2deg real reciprocal remainder resolve_conj resolve_neg round rsqrt
rsub sgn sigmoid sign signbit sin sinc sinh sqrt square sub subtract tan tanh true_divide trunc
where relu selu celu threshold xlogy heaviside zeros_like ones_like full_like empty_like
"""
)
_METHODS = words(
    """
__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__
__rtruediv__ __itruediv__ __div__ __rdiv__ __idiv__ __floordiv__ __rfloordiv__ __ifloordiv__
__mod__ __rmod__ __imod__ __pow__ __rpow__ __ipow__ __neg__ __pos__ __abs__ __invert__
__and__ __rand__ __iand__ __or__ __ror__ __ior__ __xor__ __rxor__ __ixor__
__lshift__ __rlshift__ __ilshift__ __rshift__ __rrshift__ __irshift__
__eq__ __ne__ __lt__ __le__ __gt__ __ge__ bool double float half bfloat16 int long short byte char
cfloat cdouble cuda cpu type clone detach detach_ zero_ fill_ copy_ requires_grad_
"""
)
_FUNCTIONAL = words(
    """
relu relu6 relu_ elu elu_ selu selu_ celu celu_ gelu silu mish hardswish hardsigmoid hardtanh
hardtanh_ leaky_relu leaky_relu_ softplus softsign softshrink hardshrink tanhshrink logsigmoid
threshold threshold_ sigmoid tanh
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


def _changes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function changes its first argument, as its name or keywords say."""
    name: str = func.__name__
    if name.startswith("__"):
        return name.startswith("__i") and name != "__invert__"
    return name.endswith("_") or bool(kwargs.get("inplace"))


def _broadcast(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the shape to which these tensors are broadcast."""
    shape = [1] * max(tensor.dim() for tensor in tensors)
    for tensor in tensors:
        for dim in range(-tensor.dim(), 0):
            if tensor.shape[dim] != 1:
                shape[dim] = tensor.shape[dim]
    return tuple(shape)


@rule_with_function(*_ALL)
def _pointwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    tensors: list[Any] = [v for v in leaves_of((args, kwargs)) if isinstance(v, Tensor)]
    changes = _changes(func, kwargs)
    if kwargs.get("out") is not None or (changes and not is_sliced(args[0])):
        return NotImplemented
    if func is torch.where and len(args) + len(kwargs) < 3:
        return NotImplemented
    # An in-place function keeps the slices of its first argument; others use the largest tensor's.
    main = args[0] if changes else max(filter(is_sliced, tensors), key=Tensor.numel)
    slices, dim, group = main.slices, main.negative_dim, main.group
    shape = tuple(main.shape) if len(tensors) == 1 else _broadcast(tensors)
    local_arguments: Any = tree_map(
        lambda value: matching_part(value, slices, dim, group), (args, kwargs), is_leaf=is_sliced
    )
    local = func(*local_arguments[0], **local_arguments[1])
    if not isinstance(local, Tensor):
        return NotImplemented
    if changes:
        return main.change(local)
    return SlicedTensor(local, slices.at(len(shape) + dim), group, shape)


@rule_with_function(_T.to, _T.type_as)
def _to(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Cast or move slices; only dtype and device of the other tensor of `type_as` or `to` count."""
    arguments = [local_of(a) if is_sliced(a) else a for a in (tensor, *args)]
    named = {name: local_of(a) if is_sliced(a) else a for name, a in kwargs.items()}
    local = func(*arguments, **named)
    return tensor.like(local) if is_sliced(tensor) else local


@rule_with_function(F.prelu, _T.prelu)
def _prelu(func: Any, x: Any, weight: Any) -> Any:
    main = x if is_sliced(x) else weight
    dim = 1 if x.dim() > 1 else 0
    if weight.numel() == 1 or (is_sliced(x) and x.slices.dim != dim):
        local_weight = as_operand(weight, None, main.group)
    else:
        local_weight = as_operand(weight, main.slices.at(0), main.group)
    slices = x.slices if is_sliced(x) else main.slices.at(dim)
    return SlicedTensor.of(
        func(as_operand(x, slices, main.group), local_weight), slices, main.group
    )


@rule_with_function(torch.rand_like, torch.randn_like, torch.randint_like)
def _random(func: Any, tensor: SlicedTensor, *args: Any, **kwargs: Any) -> Tensor:
    """Draw numbers of the whole shape, as one process does."""
    drawn: Tensor = func(
        local_of(tensor).detach().new_empty(()).expand(tensor.shape), *args, **kwargs
    )
    return drawn


_DRAWN = words("bernoulli_ normal_ uniform_ random_ exponential_ geometric_ log_normal_ cauchy_")


@rule_with_function(*_named(_T, _DRAWN))
def _drawn(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Draw numbers of the whole shape, as one process does, and copy this rank's slices of them."""
    if not is_sliced(tensor) or any(isinstance(v, Tensor) for v in (*args, *kwargs.values())):
        return NotImplemented
    drawn = func(local_of(tensor).detach().new_empty(tensor.shape), *args, **kwargs)
    return tensor.change(local_of(tensor).copy_(as_operand(drawn, tensor.slices, tensor.group)))


@rule_with_function(
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits),
)
def _loss(func: Any, x: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute the loss of each element, then reduce."""
    reduction = kwargs.pop("reduction", "mean")
    if args or reduction == "none" or x.shape != target.shape:
        return NotImplemented
    each = _pointwise(func, x, target, reduction="none", **kwargs)
    return each.sum() if reduction == "sum" else each.mean()


@rule(_T.contiguous)
def _contiguous(tensor: SlicedTensor, **kwargs: Any) -> SlicedTensor:
    return tensor.like(local_of(tensor).contiguous(**kwargs))


@rule(_T.data.__get__)
def _data(tensor: SlicedTensor) -> SlicedTensor:
    return tensor.like(local_of(tensor).detach())


@rule(_T.data.__set__, _T.grad.__set__)
def _set(tensor: Any, value: Any) -> Any:
    del tensor, value
    raise ConfigError(
        "strategy.slice: `data` or `grad` of a sliced tensor is set by the model's code. Use "
        "copy_ there, or keep the module whole that does it: strategy.slice.keep=[NAME]."
    )


@rule(_T.grad.__get__)
def _grad(tensor: SlicedTensor) -> Any:
    gradient = local_of(tensor).grad
    return None if gradient is None else tensor.like(gradient)


@rule(_T.requires_grad.__set__)
def _set_requires_grad(tensor: SlicedTensor, value: bool) -> None:  # noqa: FBT001 - torch's own
    tensor.requires_grad_(value)


@rule(_T.retain_grad)
def _retain_grad(tensor: SlicedTensor) -> None:
    local_of(tensor).retain_grad()


@rule(_T.register_hook)
def _register_hook(tensor: SlicedTensor, hook: Any) -> Any:
    """Call a hook with sliced gradients, because the model's code sees sliced tensors."""
    slices, group = tensor.slices, tensor.group

    def called(gradient: Tensor) -> Any:
        result = hook(SlicedTensor.of(gradient, slices, group))
        return as_operand(result, slices, group) if isinstance(result, Tensor) else None

    local: Any = local_of(tensor)
    return local.register_hook(called)


def _on_wrapper(func: Any) -> Any:
    def ask(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    return ask


_FACTS = words(
    """
size dim ndimension numel nelement element_size is_floating_point is_complex stride get_device
is_contiguous is_same_size __len__ __hash__
"""
)
_PROPERTIES = words(
    """
shape dtype device ndim is_cuda is_cpu layout is_sparse is_nested is_quantized is_meta is_mps is_xpu
nbytes itemsize names
"""
)
for _function in (
    *_named(_T, _FACTS),
    *(getattr(_T, name).__get__ for name in _PROPERTIES if hasattr(_T, name)),
    *(torch.numel, torch.is_floating_point, torch.is_complex, torch.is_same_size),
):
    rule(_function)(_on_wrapper(_function))
rule(_T.grad_fn.__get__)(lambda tensor: local_of(tensor).grad_fn)
rule(_T.requires_grad.__get__)(lambda tensor: local_of(tensor).requires_grad)
rule(_T.is_leaf.__get__)(lambda tensor: local_of(tensor).is_leaf)
rule(_T._version.__get__)(lambda tensor: local_of(tensor)._version)
