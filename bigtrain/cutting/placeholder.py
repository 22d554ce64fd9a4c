"""Placeholders: tensors with a shape and no values, for the parts of other stages.

A placeholder has a shape, dtype and device, so the user's code computes with it as with a real
tensor. Its operations run on a meta tensor. When the stage's own part begins, `become_real` turns
the objects to which the user's code has references into the tensors from the previous stage.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from bigtrain.errors import ConfigError

_META = torch.device("meta")


class _Phase(threading.local):
    real = False


_phase = _Phase()


@contextmanager
def placeholder_phase() -> Iterator[None]:
    """Allow computing with placeholders inside a `with` block, until `forbid_placeholders`."""
    before, _phase.real = _phase.real, False
    try:
        yield
    finally:
        _phase.real = before


def forbid_placeholders() -> None:
    """Make operations on placeholders raise until the end of this forward pass."""
    _phase.real = True


class PlaceholderTensor(Tensor):
    """A tensor with shape, strides, dtype and device, but without values."""

    _meta: Tensor
    _trained: bool
    _is_param: bool
    """Whether the real tensor is an nn.Parameter; torch reads this attribute."""

    @staticmethod
    def __new__(
        cls, meta: Tensor, device: torch.device, trained: bool = False
    ) -> PlaceholderTensor:  # noqa: FBT001, FBT002
        """Make a placeholder with the shape and dtype of `meta` that reports `device`.

        `trained` is the value of its `requires_grad`, which autograd does not see.
        """
        placeholder: PlaceholderTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
        )
        placeholder._meta = meta
        placeholder._trained, placeholder._is_param = trained, False
        return placeholder

    @property
    def requires_grad(self) -> bool:
        """Whether the real tensor requires a gradient; the user's code may read it."""
        return self._trained

    @requires_grad.setter
    def requires_grad(self, trained: bool) -> None:
        self._trained = trained

    def requires_grad_(self, requires_grad: bool = True) -> PlaceholderTensor:  # noqa: FBT001, FBT002
        """Set `requires_grad`."""
        self._trained = requires_grad
        return self

    def register_hook(self, hook: Any) -> RemovableHandle:
        """Do nothing: the stage with the real tensor registers the hook."""
        return RemovableHandle(OrderedDict({0: hook}))

    def retain_grad(self) -> None:
        """Do nothing: the stage with the real tensor retains its gradient."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # noqa: ARG002
        return f"Placeholder({tuple(self.shape)}, {self.dtype}, {self.device})"

    # With these two methods, a dispatch mode unwraps placeholders and sees their meta tensors.
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_meta"], self.device

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], device: Any, _size: Any, _stride: Any
    ) -> PlaceholderTensor:
        return PlaceholderTensor(inner["_meta"], device)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if _phase.real:
            raise ConfigError(
                f"strategy.cut: {func} uses a tensor of another stage that was not sent, because "
                "it is not passed on by arguments and results. Name other places in "
                "strategy.cut.at, or use a strategy without a cut."
            )
        kwargs = kwargs or {}
        placeholders: dict[int, Tensor] = {}
        device: torch.device | None = None
        trained = False
        metas: list[Tensor] = []  # references, so that no other tensor gets the id of one of them

        def unwrap(leaf: Any) -> Any:
            nonlocal device, trained
            if isinstance(leaf, Tensor):
                trained = trained or (leaf.requires_grad and torch.is_grad_enabled())
            if isinstance(leaf, PlaceholderTensor):
                # A 0-dim CPU tensor may be combined with tensors of any device.
                if device is None or leaf.dim():
                    device = leaf.device
                placeholders[id(leaf._meta)] = leaf
                return leaf._meta
            if isinstance(leaf, Tensor):
                meta = leaf.detach().to(_META)
                placeholders[id(meta)] = leaf
                metas.append(meta)
                return meta
            return _META if isinstance(leaf, torch.device) else leaf

        low_args, low_kwargs = tree_map(unwrap, (args, kwargs))
        named = kwargs.get("device")
        target_device = torch.device(named) if named is not None else device or torch.device("cpu")
        result = func(*low_args, **low_kwargs)
        trained = trained and func is not torch.ops.aten.detach.default

        def wrap(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            # A lazy conjugate has a flag that a placeholder would need as well.
            leaf = leaf.resolve_conj().resolve_neg()
            # An in-place operation returns the object that it got.
            same = placeholders.get(id(leaf))
            has_gradient = leaf.is_floating_point() or leaf.is_complex()
            return (
                PlaceholderTensor(leaf, target_device, trained and has_gradient)
                if same is None
                else same
            )

        return tree_map(wrap, result)


def placeholder_like(tensor: Tensor, device: torch.device) -> PlaceholderTensor:
    """Return a new placeholder with a tensor's shape, strides, dtype and `requires_grad`."""
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
    return PlaceholderTensor(meta, device, tensor.requires_grad)


def become_real(placeholder: Tensor, real: Tensor) -> None:
    """Turn a placeholder into the real tensor, for all code that has a reference to it.

    `torch.utils.swap_tensors` does this too, but refuses a tensor to which a view or autograd has a
    reference. For a placeholder such a reference is harmless, because it has no values.
    """
    placeholder.__class__, real.__class__ = real.__class__, placeholder.__class__
    mine, theirs = dict(placeholder.__dict__), dict(real.__dict__)
    placeholder.__dict__.clear()
    real.__dict__.clear()
    placeholder.__dict__.update(theirs)
    real.__dict__.update(mine)
    torch._C._swap_tensor_impl(placeholder, real)
