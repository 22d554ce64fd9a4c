"""torch's mode for tensors without numbers, at a quarter of the cost for what was seen before.

What a function gives of such tensors follows from their shapes and types. torch keeps that, too,
but under a key that covers far more than occurs here, and making the key costs more than all else
of a run. Whatever this mode has no plain key for goes torch's way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.utils._pytree import tree_leaves

from bigtrain.tensors.fake_kernels import CORRECTED, RULED, corrected, own_result

_PLAIN = {
    *(int, float, bool, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
}
_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}
_DEVICE = torch.ops.prim.device.default
_LOW = (torch.bfloat16, torch.float16)
_NORMS = {
    torch.ops.aten.native_layer_norm.default,
    torch.ops.aten.native_group_norm.default,
    torch.ops.aten.native_batch_norm.default,
}
VIEWS = {
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        *(("view", "default"), ("as_strided", "default"), ("detach", "default")),
        *(("slice", "Tensor"), ("select", "int"), ("t", "default"), ("transpose", "int")),
        *(("permute", "default"), ("expand", "default"), ("unsqueeze", "default")),
    )
}
"""Functions that give a view of their first argument, whatever else they are given."""
_MOST_KEYS = 100_000
_RESHAPING = ("resize", "set_", "swap")


class _Fresh(NamedTuple):
    """A result with storage of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Outcome(NamedTuple):
    """What a function was seen to give."""

    kind: str
    """fresh: new tensors; view: of what it was given; given: the argument of this number itself;
    unknown: torch is asked each time."""
    fresh: tuple[_Fresh | None, ...] = ()
    number: int = 0
    container: Callable[[Iterable[Any]], Any] | None = None
    """Of several results."""


_UNKNOWN = _Outcome("unknown")
_seen: dict[tuple[Any, ...], _Outcome] = {}


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """See the module. Statistics of norms have the precision of the kernels.

    torch's fakes have those of a low input in its precision; kernels keep them in float32 for the
    backward pass, those of the CPU where anything else that they are given is float32.

    Args:
        of_cuda: whether the kernels are CUDA's.
    """

    def __init__(self, *, of_cuda: bool = False) -> None:
        super().__init__()
        self._of_cuda = of_cuda
        self._is_inside = False
        self.told: Callable[[Any, Any, Any, Any], None] | None = None
        """Called after each operation, with function, arguments and result; not for those that
        torch makes of one."""
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Give what the function gave before, of tensors alike; otherwise see `FakeTensorMode`."""
        if func is _DEVICE and type(args[0]) is FakeTensor:  # asked more often than all else
            return args[0].fake_device
        kwargs = kwargs or {}
        if self.told is None or self._is_inside:
            return self._given(func, types, args, kwargs)
        self._is_inside = True
        try:
            result = self._given(func, types, args, kwargs)
        finally:
            self._is_inside = False
        self.told(func, args, kwargs, result)
        return result

    def _given(self, func: Any, types: Sequence[type], args: Any, kwargs: Any) -> Any:
        if func in VIEWS and self._is_own(args[0]):
            return self._viewed(func, args, kwargs)
        parts = self._described(func, args, kwargs)
        if parts is None:
            return self._asked(func, types, args, kwargs)
        outcome = _seen.get(key := tuple(parts))
        if outcome is None:
            result = self._asked_anew(func, types, args, kwargs)
            is_same = self._described(func, args, kwargs) == parts
            if len(_seen) >= _MOST_KEYS:
                _seen.clear()
            _seen[key] = _outcome(func, args, kwargs, result) if is_same else _UNKNOWN
            return result
        kind = outcome.kind
        if kind == "view":
            return self._viewed(func, args, kwargs)
        if kind == "fresh":
            results = [None if one is None else self._made(*one) for one in outcome.fresh]
            return results[0] if outcome.container is None else outcome.container(results)
        if kind == "given":
            return args[outcome.number]
        return self._asked_anew(func, types, args, kwargs)

    def _asked_anew(
        self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Any
    ) -> Any:
        """What torch gives if it does not remember: results that share storage share it."""
        self.cache_enabled = False
        try:
            return self._asked(func, types, args, kwargs)
        finally:
            self.cache_enabled = True

    def _asked(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Any) -> Any:
        """What torch gives, with the statistics of norms converted, or what kernels give."""
        if func in RULED:
            with self:
                own = own_result(func, args, kwargs, of_cuda=self._of_cuda)
            if own is not None:
                return own
        result: Any = super().__torch_dispatch__(func, types, args, kwargs)
        if func in CORRECTED:
            with self:
                return corrected(func, args, kwargs, result)
        if func not in _NORMS or not isinstance(args[0], FakeTensor):
            return result
        if args[0].fake_device.type != "cpu" or args[0].dtype not in _LOW:
            return result
        others = [leaf for leaf in args[1:] if isinstance(leaf, Tensor)]
        if not self._of_cuda and all(other.dtype != torch.float32 for other in others):
            return result
        with self:
            return (result[0], *(statistic.float() for statistic in result[1:]))

    def _is_own(self, value: Any) -> bool:
        return (
            type(value) is FakeTensor
            and value.fake_mode is self
            and value.constant is None
            and value.dtype not in _COMPLEX
        )

    def _viewed(self, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """One view of the first argument, or several."""
        with in_kernel_invocation_manager(self):
            result = func(*args, **kwargs)
        device = args[0].fake_device
        if isinstance(result, Tensor):
            return self._wrapped(result, device)
        return type(result)(self._wrapped(one, device) for one in result)

    def _made(
        self,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        return self._wrapped(torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)

    def _wrapped(self, meta: Tensor, device: torch.device) -> Tensor:
        """The same as `FakeTensor(self, meta, device)`, whose checks take longer than all else."""
        attributes = self._attributes.get(device)
        if attributes is None:
            first = FakeTensor(self, meta, device)
            self._attributes[device] = dict(vars(first))
            return first
        fake = Tensor._make_subclass(
            FakeTensor,
            meta,
            meta.requires_grad,
            dispatch_device=True,
            device_for_backend_keys=device,
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(attributes)
        return fake

    def _described(self, func: Any, args: Sequence[Any], kwargs: Any) -> list[Any] | None:
        """What a function is given; None where that does not decide what it gives."""
        modes = (self._of_cuda, torch.is_inference_mode_enabled(), torch.get_default_dtype())
        parts: list[Any] = [func, *modes]
        numbers: set[torch.dtype] = set()
        others: set[torch.dtype] = set()
        try:
            is_said = self._describe(args, parts, numbers, others)
            if kwargs and is_said:
                parts += kwargs
                is_said = self._describe(kwargs.values(), parts, numbers, others)
        except (RuntimeError, NotImplementedError):  # sparse: it has no strides
            return None
        # Numbers without a dim may count as Python's, and these as no type at all: where they are
        # of another type than all else, torch says what comes of them.
        is_one_type = numbers <= others if others else len(numbers) <= 1
        return parts if is_said and (is_one_type or _is_in_place(func)) else None

    def _describe(
        self,
        values: Iterable[Any],
        parts: list[Any],
        numbers: set[torch.dtype],
        others: set[torch.dtype],
    ) -> bool:
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                shape, dtype = value.shape, value.dtype
                if dtype in _COMPLEX or value.fake_mode is not self:
                    return False
                (others if shape else numbers).add(dtype)
                if value.constant is not None:
                    return False
                parts += (
                    shape,
                    value.stride(),
                    value.storage_offset(),
                    dtype,
                    value.fake_device,
                    value.requires_grad,
                )
            elif kind in _PLAIN:
                parts += (kind, value)
            elif kind is list or kind is tuple:
                parts += (kind, len(value))
                if not self._describe(value, parts, numbers, others):
                    return False
            else:
                return False
        return True


def _outcome(func: Any, args: Sequence[Any], kwargs: Any, result: Any) -> _Outcome:
    """What is to be kept of a call; the tensors given were left as they were."""
    given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, FakeTensor)]
    if any(word in func.name() for word in _RESHAPING):
        return _UNKNOWN
    if not given and kwargs.get("device") is None:
        return _UNKNOWN  # it depends on what is set by default
    for number, one in enumerate(args):
        if result is one and isinstance(one, FakeTensor):
            return _Outcome("given", number=number)
    several = isinstance(result, tuple | list)
    results = list(result) if several else [result]
    container = (tuple if isinstance(result, tuple) else list) if several else None
    tensors = [one for one in results if one is not None]
    if not tensors or not all(type(one) is FakeTensor and _is_plain(one) for one in tensors):
        return _UNKNOWN
    storages = {_storage(one) for one in given}
    own = [_storage(one) for one in tensors]
    if storages.isdisjoint(own):
        if len(set(own)) < len(own) or not all(map(_is_whole, tensors)):
            return _UNKNOWN
        return _Outcome("fresh", tuple(map(_fresh, results)), container=container)
    first = args[0]
    is_view = isinstance(first, FakeTensor) and set(own) == {_storage(first)}
    if is_view and len(tensors) == len(results):
        return _Outcome("view", container=container)
    return _UNKNOWN


@lru_cache
def _is_in_place(func: Any) -> bool:
    return bool(func._overloadpacket.__name__.endswith("_"))


def _fresh(result: Tensor | None) -> _Fresh | None:
    if result is None:
        return None
    return _Fresh(tuple(result.shape), result.stride(), result.dtype, result.device)


def _is_plain(result: Any) -> bool:
    return bool(
        result.constant is None
        and result.layout is torch.strided
        and not result.dtype.is_complex
        and not result.requires_grad
    )


def _is_whole(result: Tensor) -> bool:
    """Whether a tensor of these strides alone has as large a storage."""
    twin = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
    return (
        not result.storage_offset()
        and twin.untyped_storage().nbytes() == result.untyped_storage().nbytes()
    )


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
