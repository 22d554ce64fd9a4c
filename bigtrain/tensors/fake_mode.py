"""torch's FakeTensorMode with a cheaper cache: a quarter of the cost for calls seen before.

The result of a function on fake tensors follows from their shapes and dtypes. torch caches results
as well, but its key covers far more cases than occur here, and making the key costs more than the
rest of a run. A call for which this mode has no simple key is passed to torch.
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

from bigtrain.tensors.fake_kernels import (
    HAS_CORRECTION,
    HAS_KERNEL_RULE,
    corrected_result,
    kernel_result,
)
from bigtrain.tensors.fake_masks import leave_out_unneeded_masks

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
"""Functions that always return a view of their first argument."""
_MOST_KEYS = 100_000
_RESHAPING = ("resize", "set_", "swap")


class _Fresh(NamedTuple):
    """A result with new storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Outcome(NamedTuple):
    """The cached outcome of a call."""

    kind: str
    """`fresh`: new tensors; `view`: views of the first argument; `argument`: the argument at
    `number` itself; `unknown`: call torch each time."""
    fresh: tuple[_Fresh | None, ...] = ()
    number: int = 0
    container: Callable[[Iterable[Any]], Any] | None = None
    """The type of several results, tuple or list; None for a single one."""


_UNKNOWN = _Outcome("unknown")
_seen: dict[tuple[Any, ...], _Outcome] = {}


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """`FakeTensorMode` with a cheaper cache, and with the dtypes of norms' statistics corrected.

    For a half-precision input torch's fake statistics are in half precision. CUDA's kernels save
    them in float32, and so do the CPU's kernels if another argument is float32.

    Args:
        of_cuda: whether the kernels are CUDA's.
        allow_non_fake_inputs: whether operations may mix real and fake tensors; real tensors are
            then converted to fake tensors.
    """

    def __init__(self, *, of_cuda: bool = False, allow_non_fake_inputs: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=allow_non_fake_inputs)
        leave_out_unneeded_masks()
        self._of_cuda = of_cuda
        self._is_inside = False
        self.on_operation: Callable[[Any, Any, Any, Any], None] | None = None
        """Called after each operation with function, args, kwargs and result; not for operations
        that torch calls inside another."""
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Return a cached outcome if there is one; otherwise see `FakeTensorMode`."""
        if func is _DEVICE and type(args[0]) is FakeTensor:  # the most frequent call by far
            return args[0].fake_device
        kwargs = kwargs or {}
        if self.on_operation is None or self._is_inside:
            return self._result_of(func, types, args, kwargs)
        self._is_inside = True
        try:
            result = self._result_of(func, types, args, kwargs)
        finally:
            self._is_inside = False
        self.on_operation(func, args, kwargs, result)
        return result

    def _result_of(self, func: Any, types: Sequence[type], args: Any, kwargs: Any) -> Any:
        if func in VIEWS and self._is_plain_fake(args[0]):
            return self._viewed(func, args, kwargs)
        parts = self._call_key(func, args, kwargs)
        if parts is None:
            return self._call_torch(func, types, args, kwargs)
        outcome = _seen.get(key := tuple(parts))
        if outcome is None:
            result = self._call_torch_uncached(func, types, args, kwargs)
            is_same = self._call_key(func, args, kwargs) == parts
            if len(_seen) >= _MOST_KEYS:
                _seen.clear()
            _seen[key] = _outcome(func, args, kwargs, result) if is_same else _UNKNOWN
            return result
        kind = outcome.kind
        if kind == "view":
            return self._viewed(func, args, kwargs)
        if kind == "fresh":
            results = [None if spec is None else self._new_tensor(*spec) for spec in outcome.fresh]
            return results[0] if outcome.container is None else outcome.container(results)
        if kind == "argument":
            return args[outcome.number]
        return self._call_torch_uncached(func, types, args, kwargs)

    def _call_torch_uncached(
        self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Any
    ) -> Any:
        """Call torch without its cache, whose results would not share storages as real ones do."""
        self.cache_enabled = False
        try:
            return self._call_torch(func, types, args, kwargs)
        finally:
            self.cache_enabled = True

    def _call_torch(
        self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Any
    ) -> Any:
        """Call torch, or a kernel's rule; correct the dtype of norms' statistics."""
        if func in HAS_KERNEL_RULE:
            with self:
                kernel_output = kernel_result(func, args, kwargs, of_cuda=self._of_cuda)
            if kernel_output is not None:
                return kernel_output
        result: Any = super().__torch_dispatch__(func, types, args, kwargs)
        if func in HAS_CORRECTION:
            with self:
                return corrected_result(func, args, kwargs, result)
        if func not in _NORMS or not isinstance(args[0], FakeTensor):
            return result
        if args[0].fake_device.type != "cpu" or args[0].dtype not in _LOW:
            return result
        others = [leaf for leaf in args[1:] if isinstance(leaf, Tensor)]
        if not self._of_cuda and all(operand.dtype != torch.float32 for operand in others):
            return result
        with self:
            return (result[0], *(statistic.float() for statistic in result[1:]))

    def _is_plain_fake(self, value: Any) -> bool:
        return (
            type(value) is FakeTensor
            and value.fake_mode is self
            and value.constant is None
            and value.dtype not in _COMPLEX
        )

    def _viewed(self, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """Call a function that returns views of its first argument."""
        with in_kernel_invocation_manager(self):
            result = func(*args, **kwargs)
        device = args[0].fake_device
        if isinstance(result, Tensor):
            return self._wrapped(result, device)
        return type(result)(self._wrapped(view, device) for view in result)

    def _new_tensor(
        self,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        return self._wrapped(torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)

    def _wrapped(self, meta: Tensor, device: torch.device) -> Tensor:
        """Return `FakeTensor(self, meta, device)`, but skip its checks, which are slow."""
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

    def _call_key(self, func: Any, args: Sequence[Any], kwargs: Any) -> list[Any] | None:
        """Return the cache key of a call; None if arguments do not determine the outcome."""
        modes = (self._of_cuda, torch.is_inference_mode_enabled(), torch.get_default_dtype())
        parts: list[Any] = [func, *modes]
        numbers: set[torch.dtype] = set()
        others: set[torch.dtype] = set()
        try:
            is_complete = self._append_to_key(args, parts, numbers, others)
            if kwargs and is_complete:
                parts += kwargs
                is_complete = self._append_to_key(kwargs.values(), parts, numbers, others)
        except (RuntimeError, NotImplementedError):  # a sparse tensor has no strides
            return None
        # 0-dim tensors take part in type promotion like Python numbers: if their dtype differs
        # from the others', torch decides.
        is_one_type = numbers <= others if others else len(numbers) <= 1
        return parts if is_complete and (is_one_type or _is_in_place(func)) else None

    def _append_to_key(
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
                if not self._append_to_key(value, parts, numbers, others):
                    return False
            else:
                return False
        return True


def _outcome(func: Any, args: Sequence[Any], kwargs: Any, result: Any) -> _Outcome:
    """Return the outcome to cache for a call that did not change the shapes of its arguments."""
    inputs = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, FakeTensor)]
    if any(word in func.name() for word in _RESHAPING):
        return _UNKNOWN
    if not inputs and kwargs.get("device") is None:
        return _UNKNOWN  # the result depends on the default device
    for number, tensor in enumerate(args):
        if result is tensor and isinstance(tensor, FakeTensor):
            return _Outcome("argument", number=number)
    several = isinstance(result, tuple | list)
    results = list(result) if several else [result]
    container = (tuple if isinstance(result, tuple) else list) if several else None
    tensors = [tensor for tensor in results if tensor is not None]
    if not tensors or not all(
        type(tensor) is FakeTensor and _is_plain(tensor) for tensor in tensors
    ):
        return _UNKNOWN
    storages = {_storage(tensor) for tensor in inputs}
    output_storages = [_storage(tensor) for tensor in tensors]
    if storages.isdisjoint(output_storages):
        if len(set(output_storages)) < len(output_storages) or not all(map(_is_whole, tensors)):
            return _UNKNOWN
        return _Outcome("fresh", tuple(map(_fresh, results)), container=container)
    first = args[0]
    is_view = isinstance(first, FakeTensor) and set(output_storages) == {_storage(first)}
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
    """Whether a new tensor with these strides would have a storage of the same size."""
    twin = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
    return (
        not result.storage_offset()
        and twin.untyped_storage().nbytes() == result.untyped_storage().nbytes()
    )


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
