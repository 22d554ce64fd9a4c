"""Tensors with a shape and no values: what a stage computes with where the work is another's.

A ghost says its shape, type and device, so that the user's own code runs over it as over the
real thing, on the meta device underneath. When the stage's own part begins, `become_real` puts the
values that have come from the stage before into the very objects that the user's code holds.
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
    """A forward pass in which ghosts may be computed with until `forbid_placeholders`."""
    before, _phase.real = _phase.real, False
    try:
        yield
    finally:
        _phase.real = before


def forbid_placeholders() -> None:
    """From here on in this forward pass all tensors are there: whoever takes a ghost is told."""
    _phase.real = True


class PlaceholderTensor(Tensor):
    """A tensor of shape, stride, type and device, without values."""

    _meta: Tensor
    _trained: bool
    _is_param: bool
    """Whether it stands for an nn.Parameter: torch asks for this name."""

    @staticmethod
    def __new__(
        cls, meta: Tensor, device: torch.device, trained: bool = False
    ) -> PlaceholderTensor:  # noqa: FBT001, FBT002
        """A ghost of what `meta` describes, as if it were on `device`.

        `trained`: it says that it requires a gradient; autograd knows nothing of it.
        """
        ghost: PlaceholderTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
        )
        ghost._meta = meta
        ghost._trained, ghost._is_param = trained, False
        return ghost

    @property
    def requires_grad(self) -> bool:
        """What the real tensor says: the user's code may ask."""
        return self._trained

    @requires_grad.setter
    def requires_grad(self, trained: bool) -> None:
        self._trained = trained

    def requires_grad_(self, requires_grad: bool = True) -> PlaceholderTensor:  # noqa: FBT001, FBT002
        """Say so from now on."""
        self._trained = requires_grad
        return self

    def register_hook(self, hook: Any) -> RemovableHandle:
        """Nothing: the real tensor has the hook."""
        return RemovableHandle(OrderedDict({0: hook}))

    def retain_grad(self) -> None:
        """Nothing."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # noqa: ARG002
        return f"Ghost({tuple(self.shape)}, {self.dtype}, {self.device})"

    # With these two, whoever watches operations lets a ghost take them apart, and sees metas.
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
                f"strategy.cut: {func} is given a tensor of another stage that was not sent: it is "
                "passed on otherwise than by arguments and results. Name other places in "
                "strategy.cut.at, or use a strategy without a cut."
            )
        kwargs = kwargs or {}
        ghosts: dict[int, Tensor] = {}
        device: torch.device | None = None
        trained = False
        metas: list[Tensor] = []  # held, so that no other tensor gets one's id

        def unwrap(leaf: Any) -> Any:
            nonlocal device, trained
            if isinstance(leaf, Tensor):
                trained = trained or (leaf.requires_grad and torch.is_grad_enabled())
            if isinstance(leaf, PlaceholderTensor):
                # A number on the CPU goes with tensors of any device.
                if device is None or leaf.dim():
                    device = leaf.device
                ghosts[id(leaf._meta)] = leaf
                return leaf._meta
            if isinstance(leaf, Tensor):
                meta = leaf.detach().to(_META)
                ghosts[id(meta)] = leaf
                metas.append(meta)
                return meta
            return _META if isinstance(leaf, torch.device) else leaf

        low_args, low_kwargs = tree_map(unwrap, (args, kwargs))
        wanted = kwargs.get("device")
        target_device = (
            torch.device(wanted) if wanted is not None else device or torch.device("cpu")
        )
        result = func(*low_args, **low_kwargs)
        trained = trained and func is not torch.ops.aten.detach.default

        def wrap(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            # A conjugate is lazy: its bit would have to be the ghost's as well.
            leaf = leaf.resolve_conj().resolve_neg()
            # What an operation changes in place stays the same object.
            same = ghosts.get(id(leaf))
            differs = leaf.is_floating_point() or leaf.is_complex()
            return (
                PlaceholderTensor(leaf, target_device, trained and differs)
                if same is None
                else same
            )

        return tree_map(wrap, result)


def placeholder_like(tensor: Tensor, device: torch.device) -> PlaceholderTensor:
    """A new ghost of a tensor's shape, stride and type."""
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
    return PlaceholderTensor(meta, device, tensor.requires_grad)


def become_real(ghost: Tensor, real: Tensor) -> None:
    """Make a ghost's object the real tensor, wherever references to it are held.

    torch.utils.swap_tensors does this and refuses objects that views or autograd still point
    to from below; of a ghost they may: nothing will ever be computed with what they see.
    """
    ghost.__class__, real.__class__ = real.__class__, ghost.__class__
    mine, theirs = dict(ghost.__dict__), dict(real.__dict__)
    ghost.__dict__.clear()
    real.__dict__.clear()
    ghost.__dict__.update(theirs)
    real.__dict__.update(mine)
    torch._C._swap_tensor_impl(ghost, real)
