"""Watch a forward pass on tensors without values.

The user's own code runs. An observer sees calls of modules, functions of torch, operations (what
functions are made of) and the tensors that autograd saves for the backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bigtrain.tensors.fake import fake_model
from bigtrain.tensors.fake_mode import FakeMode
from bigtrain.tracing.call_hooks import (
    handling_calls,
    intercept_calls,
    pretend_compiling,
    release_calls,
)
from bigtrain.tracing.module_state import constant_tensors

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of an operation whose result or result shape depends on the values of a tensor."""


class ForwardObserver:
    """The base class of observers of one forward pass.

    `call` runs the module and `answer` raises an error; the other methods do nothing.
    """

    failed = ""
    """The innermost module whose call has raised an error; "" for none."""

    def call(
        self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the call of a module; see `CallHandler.call`."""
        try:
            return run(*args, **kwargs)
        except Exception:
            self.failed = self.failed or name
            raise

    def function(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Called when a function of torch has returned."""

    def operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Called when an operation has been done."""

    def save(self, tensor: Tensor) -> None:
        """Called when autograd saves a tensor for the backward pass."""

    def answer(self, func: Any, args: Any, error: Exception) -> Any:
        """Return a result for an operation that needs values; the base class raises the error."""
        del func, args
        raise error


@contextmanager
def watch_forward(
    model: nn.Module,
    observer: ForwardObserver,
    mode: FakeTensorMode,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[None]:
    """Let an observer see the forward pass of a model inside a `with` block.

    Args:
        model: a model whose tensors are fake tensors of `mode`.
        observer: its methods are called.
        mode: the fake mode.
        around: entered around the forward pass, as autocast is.
    """

    def save(tensor: Tensor) -> Tensor:
        observer.save(tensor)
        return tensor

    modules = list(model.named_modules())
    intercept_calls(modules)
    try:
        with (
            mode,
            _Operations(observer),
            around(),
            torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
            _Functions(observer),
            handling_calls(observer),
            pretend_compiling(),
        ):
            yield
    finally:
        release_calls(module for _, module in modules)


def fake_twin(
    model: nn.Module, device: torch.device, *, double: bool = False
) -> tuple[nn.Module, FakeTensorMode]:
    """Return a copy of a model with fake tensors, also in plain attributes, and its fake mode.

    Args:
        model: a model on any device; it is not changed.
        device: the device of the copy.
        double: whether floating-point tensors of the copy are fp64.
    """
    mode = FakeMode(allow_non_fake_inputs=True)
    with mode:
        constants = constant_tensors(model)
        return fake_model(model, device, double=double, constants=constants), mode


def untraceable_reason(error: Exception) -> str:
    """Return one line: why a model does not run on tensors without values."""
    lines = str(error).strip().splitlines()
    if isinstance(error, NEEDS_VALUES):
        return f"its computation depends on the value of a tensor ({lines[0] if lines else ''})"
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def untraceable_message(error: Exception, observer: ForwardObserver) -> str:
    """Return a message: which module of a watched model fails without values, and why."""
    where = repr(observer.failed) if observer.failed else "its forward"
    reason = untraceable_reason(error)
    return f"the model does not run on tensors without values; {where} fails: {reason}"


@dataclass
class CallLog:
    """The modules that passes have called, by name."""

    calls: Counter[str] = field(default_factory=Counter)
    stack: list[str] = field(default_factory=list)
    """The calls that have begun and not returned; after an error, the last has raised it."""

    def begin(self, name: str) -> None:
        """Record that a call begins."""
        self.calls[name] += 1
        self.stack.append(name)

    def end(self) -> None:
        """Record that the innermost call has returned."""
        if self.stack:  # an error leaves calls in the stack
            self.stack.pop()


@contextmanager
def log_calls(model: nn.Module, log: CallLog) -> Iterator[None]:
    """Log the calls of a model's modules by hooks, also calls inside transforms such as vmap."""
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_pre_hook(_begin_hook(log, name)).remove)
            hooks.callback(module.register_forward_hook(_end_hook(log)).remove)
        yield


def _begin_hook(log: CallLog, name: str) -> Callable[[nn.Module, object], None]:
    def begin(_module: nn.Module, _inputs: object) -> None:
        log.begin(name)

    return begin


def _end_hook(log: CallLog) -> Callable[[nn.Module, object, object], None]:
    def end(_module: nn.Module, _inputs: object, _output: object) -> None:
        log.end()

    return end


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, observer: ForwardObserver) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observer = observer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            result = func(*args, **kwargs)
        except NEEDS_VALUES as error:
            result = self._observer.answer(func, args, error)
        if func is not torch.ops.prim.device.default:  # no work; some versions call it more often
            self._observer.operation(func, args, kwargs, result)
        return result


class _Functions(TorchFunctionMode):
    def __init__(self, observer: ForwardObserver) -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._observer.function(func, args, kwargs, result)
        return result
