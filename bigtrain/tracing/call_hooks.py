"""Intercept the calls of modules, before their hooks run."""

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
    """Runs the calls of modules in its thread."""

    def call(
        self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a module's call: `run(*args, **kwargs)` calls the module with its hooks."""


class _Current(threading.local):
    handler: CallHandler | None = None


_current = _Current()


def intercept_calls(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Pass every call of these modules to the handler of its thread, if there is one.

    The calls are intercepted through the attribute that `nn.Module.compile` sets. torch reads this
    attribute before it runs any hooks of the module, and neither copies nor pickles it.
    """
    for name, module in modules:
        module._compiled_call_impl = partial(_called, name, module)


def release_calls(modules: Iterable[nn.Module]) -> None:
    """Undo `intercept_calls`."""
    for module in modules:
        module._compiled_call_impl = None


def _called(name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    handler = _current.handler
    # Calls inside functorch transforms such as vmap are not passed on: they have other tensors than
    # the code around them.
    if handler is None or torch._C._are_functorch_transforms_active():
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
    return handler.call(name, module._call_impl, args, kwargs)


@contextmanager
def handling_calls(handler: CallHandler | None) -> Iterator[None]:
    """Pass calls of this thread to a handler inside a `with` block; with None, to no handler."""
    before = _current.handler
    _current.handler = handler
    try:
        yield
    finally:
        _current.handler = before


def is_watched() -> bool:
    """Whether calls of this thread are passed to a handler."""
    return _current.handler is not None


@contextmanager
def pretend_compiling(on: bool = True) -> Iterator[None]:  # noqa: FBT001, FBT002
    """Make `torch.compiler.is_compiling()` true, so that library code does not look at values.

    Every stage must run the same code as the trace, whose tensors have no values. For example,
    libraries that treat a mask of all ones specially do not do so when they are compiled.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = on
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def returned_tensors(result: Any) -> list[Tensor]:
    """Return the tensors in the result of a torch function; none inside a functorch transform."""
    if torch._C._are_functorch_transforms_active():
        return []
    # A sliced tensor is one leaf: its shape is that of the whole tensor.
    leaves = tree_leaves(result, is_leaf=lambda value: isinstance(value, Tensor))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
