"""Being asked at each call of a module, from outside of its hooks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class CallHandler(Protocol):
    """Who is asked."""

    def call(
        self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Do a module's call: `run(*args, **kwargs)` is the module with its hooks."""


class _Current(threading.local):
    watcher: CallHandler | None = None


_current = _Current()


def intercept_calls(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Let every call of these modules ask the watcher of its thread, if there is one.

    The place is the one that `nn.Module.compile` uses: before all hooks of the module, copied
    and pickled with no module.
    """
    for name, module in modules:
        module._compiled_call_impl = partial(_called, name, module)


def release_calls(modules: Iterable[nn.Module]) -> None:
    """Undo `intercept_calls`."""
    for module in modules:
        module._compiled_call_impl = None


def _called(name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    watcher = _current.watcher
    # What a mapped function calls is its own affair: its tensors are not those of the code around.
    if watcher is None or torch._C._are_functorch_transforms_active():
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
    return watcher.call(name, module._call_impl, args, kwargs)


@contextmanager
def handling_calls(watcher: CallHandler | None) -> Iterator[None]:
    """Ask this watcher in this thread, for the length of a `with` block; None asks nobody."""
    before = _current.watcher
    _current.watcher = watcher
    try:
        yield
    finally:
        _current.watcher = before


def is_watched() -> bool:
    """Whether a watcher is asked in this thread."""
    return _current.watcher is not None


@contextmanager
def pretend_compiling(on: bool = True) -> Iterator[None]:  # noqa: FBT001, FBT002
    """Tell the code that asks `torch.compiler.is_compiling()` not to look at values.

    What every stage runs must go the same way as its rehearsal, which has none. Libraries that
    take a short cut for a mask of all ones leave it out when they are compiled.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = on
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def returned_tensors(result: Any) -> list[Tensor]:
    """The tensors that a function of torch returns; none within a transform as vmap is."""
    if torch._C._are_functorch_transforms_active():
        return []
    # A sliced tensor is taken as it is: its shape is that of the whole.
    leaves = tree_leaves(result, is_leaf=lambda value: isinstance(value, Tensor))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
