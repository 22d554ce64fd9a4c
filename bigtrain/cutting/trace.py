"""One run of a model on fake tensors, written down: calls, values, who makes and who uses them.

Nothing is known of the model but that it is a module: the user's own code runs, and modules,
functions and operations are watched at three heights. A *call* is one call of one module; a
*value* is one tensor object; a *tick* is one operation or the beginning of one call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from bigtrain.cutting.calls import unwatch, watch, watching
from bigtrain.cutting.structure import tensors_of
from bigtrain.errors import ConfigError

FOREVER = 1 << 60


@dataclass
class Call:
    """One call of a module."""

    name: str
    number: int
    """The how manieth call of this module, from 0."""
    parent: int
    """The call within which it happens; -1 for the model's own."""
    begin: int
    end: int = FOREVER
    outputs: list[int] = field(default_factory=list)
    """Values in what it returns, in the order of `map_tensors`."""
    given: list[int] = field(default_factory=list)
    """Values in its arguments."""
    result: Any = None


@dataclass
class Value:
    """One tensor object."""

    tensor: Tensor
    root: str
    """'input', 'parameter', 'buffer', or '' for what is computed."""
    name: str
    born: int
    frame: int
    """The call within which it was made."""
    uses: list[int] = field(default_factory=list)
    changed: int = -1
    """The last tick at which it was changed in place."""
    known: bool = False
    """Computed from the inputs and constants alone, without parameters or random numbers."""
    sources: tuple[int, ...] = ()


@dataclass(frozen=True)
class Cost:
    """One operation's work, forward only."""

    tick: int
    flops: int
    nbytes: int
    """Read and written."""


@dataclass
class Trace:
    """All that was seen."""

    calls: list[Call]
    values: list[Value]
    events: list[tuple[int, int, tuple[int, ...]]]
    """In order: (frame, call, ()) at the beginning of a call, (frame, -1, values) where a
    function of torch has returned tensors to a frame's own code."""
    costs: list[Cost]
    saved: dict[int, tuple[int, list[int]]]
    """By storage: bytes, and the ticks at which autograd kept it for the backward pass."""
    output: Any


def trace(
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    mode: FakeTensorMode,
    inputs: Any,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Trace:
    """Run a model of fake tensors once.

    Args:
        model: of fake tensors of `mode`; it is left as it is.
        run: calls the model with `inputs`.
        mode: the fake mode.
        inputs: fake tensors in any structure.
        around: entered around the forward pass, as autocast is.

    Raises:
        ConfigError: the model cannot run without values; the message names the submodule.
    """
    recorder = _Recorder(model, inputs)
    modules = list(model.named_modules())
    watch(modules)
    try:
        noting = (recorder.operations, around(), recorder.saving(), recorder.functions)
        with mode, noting[0], noting[1], noting[2], noting[3], watching(recorder):
            output = run(model)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(recorder.complaint(error)) from error
    finally:
        unwatch(module for _, module in modules)
    for index in recorder.ids_of(output):
        recorder.values[index].uses.append(FOREVER)
    return Trace(
        recorder.calls, recorder.values, recorder.events, recorder.costs, recorder.saved, output
    )


class _Recorder:
    """Watches calls, functions and operations; see `Trace`."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        self.calls: list[Call] = []
        self.values: list[Value] = []
        self.events: list[tuple[int, int, tuple[int, ...]]] = []
        self.costs: list[Cost] = []
        self.saved: dict[int, tuple[int, list[int]]] = {}
        self.operations = _Operations(self)
        self.functions = _Functions(self)
        self.clock = 0
        self._index: dict[int, int] = {}
        self._numbers: dict[str, int] = {}
        self._stack: list[int] = []
        self._own: set[int] = set()
        self._failed = ""
        for tensor in tensors_of(inputs):
            self.add(tensor, "input", known=True)
        for name, parameter in model.named_parameters():
            self.add(parameter, "parameter", name)
        for name, buffer in model.named_buffers():
            self.add(buffer, "buffer", name)

    def add(self, tensor: Tensor, root: str = "", name: str = "", *, known: bool = False) -> int:
        """Note a tensor object; the index of its value."""
        index = self._index.get(id(tensor))
        if index is None:
            index = self._index[id(tensor)] = len(self.values)
            self.values.append(Value(tensor, root, name, self.clock, self.frame, known=known))
            if root:
                self._own.add(tensor.untyped_storage()._cdata)
        return index

    @property
    def frame(self) -> int:
        return self._stack[-1] if self._stack else -1

    def ids_of(self, structure: Any) -> list[int]:
        return [self.add(tensor) for tensor in tensors_of(structure)]

    def call(
        self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See `Watcher.call`."""
        self.clock += 1
        number = self._numbers[name] = self._numbers.get(name, -1) + 1
        call = Call(name, number, self.frame, self.clock, given=self.ids_of((args, kwargs)))
        self.events.append((self.frame, len(self.calls), ()))
        self._stack.append(len(self.calls))
        self.calls.append(call)
        try:
            result = run(*args, **kwargs)
        except Exception:
            self._failed = self._failed or name
            raise
        finally:
            self._stack.pop()
        self.clock += 1
        call.end = self.clock
        call.result, call.outputs = result, self.ids_of(result)
        return result

    def function(self, result: Any) -> None:
        """A function of torch has returned to the code of the current frame."""
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if leaves:
            found = tuple(self.add(leaf) for leaf in leaves)
            self.events.append((self.frame, -1, found))

    def operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """One operation has been done."""
        self.clock += 1
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        sources = tuple(self.add(tensor) for tensor in given)
        for source in sources:
            self.values[source].uses.append(self.clock)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(value):
                    if isinstance(tensor, Tensor):
                        self.values[self.add(tensor)].changed = self.clock
        known = torch.Tag.nondeterministic_seeded not in func.tags and all(
            self.values[source].known for source in sources
        )
        for tensor in made:
            if id(tensor) not in self._index:
                index = self.add(tensor, known=known)
                self.values[index].sources = sources
            elif not known:
                self.values[self._index[id(tensor)]].known = False
        self.costs.append(Cost(self.clock, _flops(func, args, kwargs, result), _moved(given, made)))

    def saving(self) -> AbstractContextManager[Any]:
        """Notes what autograd keeps, as long as it is entered."""

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._own:
                nbytes, ticks = self.saved.setdefault(storage._cdata, (storage.nbytes(), []))
                ticks.append(self.clock)
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)

    def complaint(self, error: Exception) -> str:
        """What cannot be cut, where and why."""
        lines = str(error).strip().splitlines() or [""]
        kind = type(error).__name__
        if kind in ("DataDependentOutputException", "DynamicOutputShapeException"):
            why = f"the value of a tensor decides what it does ({lines[0]})"
        else:
            why = f"{kind}: {lines[0]}"
        where = f"{self._failed!r}" if self._failed else "its forward"
        return (
            f"strategy.cut: the model does not run on tensors without values; {where} fails: "
            f"{why}. Take what depends on values out of the forward pass, or use a strategy "
            "without a cut."
        )


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._recorder.operation(func, args, kwargs, result)
        return result


class _Functions(TorchFunctionMode):
    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._recorder.function(result)
        return result


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    formula = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def _moved(given: list[Tensor], made: list[Tensor]) -> int:
    """Bytes that an operation reads and writes; none for a view."""
    below = {t.untyped_storage()._cdata for t in given}
    fresh = [t for t in made if t.untyped_storage()._cdata not in below]
    if not fresh and made:
        changed = {id(t) for t in given} & {id(t) for t in made}
        if not changed:
            return 0
        fresh = made
    return sum(t.numel() * t.element_size() for t in (*given, *fresh))
