"""Trace a forward pass on fake tensors.

The model may be any module: the user's code runs, and calls of modules, functions and operations
are recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from bigtrain.errors import ConfigError
from bigtrain.tensors.op_cost import bytes_touched, flops_of, mutated_tensors
from bigtrain.tensors.tree import map_tensors, tree_tensors
from bigtrain.tracing.call_hooks import returned_tensors
from bigtrain.tracing.module_state import (
    Attribute,
    ChangedObject,
    ModuleSnapshot,
    constant_tensors,
    fields_of,
    refuse_host_randomness,
    traced_attributes,
)
from bigtrain.tracing.records import (
    END_OF_PASS,
    ForwardTrace,
    InPlaceWrite,
    ModuleCall,
    OpCost,
    TracedValue,
    UncuttableRange,
)
from bigtrain.tracing.watch import ForwardObserver, untraceable_message, watch_forward


def trace_forward(
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    mode: FakeTensorMode,
    inputs: Any,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> ForwardTrace:
    """Trace one forward pass of a model of fake tensors.

    Args:
        model: a model whose tensors are fake tensors of `mode`; it is not changed.
        run: calls the model with `inputs`.
        mode: the fake mode.
        inputs: fake tensors in any structure.
        around: entered around the forward pass, as autocast is.

    Raises:
        ConfigError: the model does not run on tensors without values; the message names the module.
    """
    snapshot = ModuleSnapshot(model)
    recorder = _Recorder(model, inputs)
    try:
        with refuse_host_randomness():
            output = _record(recorder, model, run, mode, around)
        changed = snapshot.changed()
        if changed:
            objects = snapshot.changed_objects()
            snapshot.restore()
            _watch_state(
                recorder,
                model,
                run=run,
                mode=mode,
                inputs=inputs,
                around=around,
                changed=changed,
                objects=objects,
            )
    finally:
        snapshot.restore()
    for index in recorder.ids_of(output):
        recorder.values[index].uses.append(END_OF_PASS)
    return recorder.finish(output)


def _record(
    recorder: _Recorder,
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    mode: FakeTensorMode,
    around: Callable[[], AbstractContextManager[Any]],
) -> Any:
    try:
        with watch_forward(model, recorder, mode, around):
            return run(model)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"strategy.cut: {untraceable_message(error, recorder)}. Move code that depends on "
            "values out of the forward pass, or use a strategy without a cut."
        ) from error


def _watch_state(
    recorder: _Recorder,
    model: nn.Module,
    *,
    run: Callable[[nn.Module], Any],
    mode: FakeTensorMode,
    inputs: Any,
    around: Callable[[], AbstractContextManager[Any]],
    changed: set[Attribute],
    objects: Sequence[ChangedObject],
) -> None:
    """Run two more passes, the second with the state that the first has left; record its uses.

    Each attribute that changes must belong to one stage. A module whose code takes another path in
    the second pass cannot be cut through: the program of the first pass would not fit.
    """
    touches: dict[Attribute, list[tuple[int, int]]] = {}
    written: set[Attribute] = set()
    recorders = []
    for _ in range(2):
        repeat = _Recorder(model, inputs)

        def touched(attribute: Attribute, writes: bool, to: _Recorder = repeat) -> None:  # noqa: FBT001
            touches.setdefault(attribute, []).append((to.clock, to.frame))
            written.update({attribute} if writes else ())

        with traced_attributes(model, changed, objects, touched), refuse_host_randomness():
            _record(repeat, model, run, mode, around)
        recorders.append(repeat)
    first, second = (repeat.signatures() for repeat in recorders)
    for index, call in enumerate(recorder.calls):
        if first.get((call.name, call.number)) != second.get((call.name, call.number)):
            recorder.sealed[index] = f"{_named(call)} behaves differently from call to call"
    for (name, key), touched_at in touches.items():
        ticks = [tick for tick, _ in touched_at]
        label = f"{name}.{key}" if name else key
        if first != second:  # ticks differ: use those of the enclosing calls in the first run
            ticks = [edge for _, frame in touched_at for edge in _edges(recorder, frame, recorders)]
        recorder.whole.append(UncuttableRange(min(ticks), max(ticks), _CHANGES.format(repr(label))))
    for changed_object in objects:
        for owner, key in changed_object.names().values():
            if (owner, key) not in written and not changed_object.holders & {*touches}:
                label = f"{owner}.{key}" if owner else key  # written past its class
                recorder.whole.append(UncuttableRange(0, END_OF_PASS, _CHANGES.format(repr(label))))


def _edges(recorder: _Recorder, frame: int, recorders: list[_Recorder]) -> tuple[int, int]:
    """Return the ticks at which, in the first run, the call of a frame begins and ends."""
    for repeat in recorders:
        if 0 <= frame < len(repeat.calls):
            call_site = (repeat.calls[frame].name, repeat.calls[frame].number)
            for call in recorder.calls:
                if (call.name, call.number) == call_site:
                    return call.begin, call.end
    return 0, END_OF_PASS


class _Recorder(ForwardObserver):
    """Records calls, functions and operations; see `ForwardTrace`."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        self.calls: list[ModuleCall] = []
        self.values: list[TracedValue] = []
        self.events: list[tuple[int, int, tuple[int, ...]]] = []
        self.costs: list[OpCost] = []
        self.saved: dict[int, tuple[int, list[int]]] = {}
        self.writes: dict[int, list[InPlaceWrite]] = {}
        self.whole: list[UncuttableRange] = []
        self.sealed: dict[int, str] = {}
        self.enclosed: dict[int, str] = {}
        self.random: set[int] = set()
        self.backward: list[tuple[int, int]] = []
        self.clock = 0
        self._index: dict[int, int] = {}
        self._numbers: dict[str, int] = {}
        self._stack: list[int] = []
        self._reach: list[set[int]] = [set()]
        """For each frame of the stack the values that its code has received."""
        self._own_storages: set[int] = set()
        self._storages: dict[int, int] = {}
        self._modules = dict(model.named_modules())
        for tensor in tree_tensors(inputs):
            self._reach[0].add(self.add(tensor, "input", known=True))
        for name, parameter in model.named_parameters():
            self.add(parameter, "parameter", name)
        for name, buffer in model.named_buffers():
            self.add(buffer, "buffer", name)
        for tensor in constant_tensors(model):
            self.add(tensor, "constant", known=True)

    def add(self, tensor: Tensor, root: str = "", name: str = "", *, known: bool = False) -> int:
        """Add a tensor object, if it is new; return the index of its value."""
        index = self._index.get(id(tensor))
        if index is None:
            if not root and not isinstance(tensor, FakeTensor):
                root, known = "constant", True
            index = self._index[id(tensor)] = len(self.values)
            self.values.append(TracedValue(tensor, root, name, self.clock, self.frame, known=known))
            if root:
                storage = tensor.untyped_storage()._cdata
                self._own_storages.add(storage)
                self._storages[index] = storage
        return index

    def finish(self, output: Any) -> ForwardTrace:
        """Return the trace."""
        for index, storage in self._storages.items():
            value = self.values[index]
            if value.uses and value.tensor.untyped_storage()._cdata != storage:
                why = f"{value.name!r} gets other data in the forward pass"
                self.whole.append(UncuttableRange(min(value.uses), max(value.uses), why))
        return ForwardTrace(
            self.calls,
            self.values,
            self.events,
            self.costs,
            self.saved,
            output,
            self.writes,
            self.whole,
            self.sealed,
            self.enclosed,
            self.random,
            self.backward,
        )

    def signatures(self) -> dict[tuple[str, int], list[object]]:
        """Return, for each call, the calls that it made and the shapes of tensors that it got."""
        behaviour: dict[tuple[str, int], list[object]] = {}
        for frame, index, values in self.events:
            call = self.calls[frame] if frame >= 0 else None
            entries = behaviour.setdefault((call.name, call.number) if call else ("", -1), [])
            if index >= 0:
                inner = self.calls[index]
                entries.append((inner.name, inner.number, repr(map_tensors(inner.result, _shape))))
            else:
                entries.append([tuple(self.values[value].tensor.shape) for value in values])
        return behaviour

    @property
    def frame(self) -> int:
        return self._stack[-1] if self._stack else -1

    def ids_of(self, structure: Any) -> list[int]:
        return [self.add(tensor) for tensor in tree_tensors(structure)]

    def call(
        self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See `CallHandler.call`."""
        self.clock += 1
        number = self._numbers[name] = self._numbers.get(name, -1) + 1
        call = ModuleCall(
            name, number, self.frame, self.clock, argument_values=self.ids_of((args, kwargs))
        )
        self._note_uses(call.argument_values)
        self.events.append((self.frame, len(self.calls), ()))
        why = why_sealed(self._modules[name])
        if why:
            self.sealed[len(self.calls)] = why
        why = why_enclosed() if self._stack else ""
        if why:
            self.enclosed[len(self.calls)] = why
        self._stack.append(len(self.calls))
        self._reach.append(set(call.argument_values))
        self.calls.append(call)
        contents = container_contents((args, kwargs))
        try:
            result = run(*args, **kwargs)
        except Exception:
            self.failed = self.failed or name
            raise
        except BaseException:
            self._stack.pop()
            self._reach.pop()
            raise
        self.clock += 1
        call.end = self.clock
        # In new containers, because the caller may change the containers that it gets.
        call.result = map_tensors(result, lambda tensor: tensor)
        call.outputs = self.ids_of(result)
        if container_contents((args, kwargs)) != contents:
            self.whole.append(UncuttableRange(self.clock, END_OF_PASS, _GIVEN))
        self._note_uses(call.outputs)
        self._stack.pop()
        self._reach.pop()
        self._reach[-1].update(call.outputs)
        return result

    def function(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record that a function of torch has returned to the code of the current frame."""
        leaves = returned_tensors(result)
        if leaves:
            indices = tuple(self.add(leaf) for leaf in leaves)
            self.events.append((self.frame, -1, indices))
            self._reach[-1].update(indices)
        if func in _OF_GRAPHS:
            leaves = tree_leaves((args, kwargs))
            inputs = [self.add(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
            births = [self.values[value].born for value in inputs]
            self.clock += 1
            self.whole.append(UncuttableRange(min(births, default=0), self.clock, _IN_FORWARD))
            if func not in _HOOKS:
                self.backward.append((self.clock, self.frame))

    def _note_uses(self, values: Iterable[int]) -> None:
        """Record uses of values that the frame's code got neither as arguments nor as results."""
        frame, reach = self.frame, self._reach[-1]
        for value in values:
            traced = self.values[value]
            if value in reach or traced.frame == frame or traced.root not in ("", "input"):
                continue
            self.whole.append(UncuttableRange(traced.born, self.clock, _STRAY))

    def operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record one operation."""
        self.clock += 1
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        sources = tuple(self.add(tensor) for tensor in inputs)
        for source in sources:
            self.values[source].uses.append(self.clock)
        self._note_uses(sources)
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random:
            self.random.add(self.frame)
        for tensor in mutated_tensors(func, args, kwargs):
            value = self.values[self.add(tensor)]
            value.changed = self.clock
            storage = tensor.untyped_storage()._cdata
            write = InPlaceWrite(self.clock, self.frame, sources, random)
            self.writes.setdefault(storage, []).append(write)
        known = not random and all(self.values[source].known for source in sources)
        for tensor in outputs:
            if id(tensor) not in self._index:
                index = self.add(tensor, known=known)
                self.values[index].sources = sources
        flops = flops_of(func, args, kwargs, result)
        self.costs.append(OpCost(self.clock, flops, bytes_touched(inputs, outputs)))

    def save(self, tensor: Tensor) -> None:
        """Record that autograd saves a tensor for the backward pass."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._own_storages:
            nbytes, ticks = self.saved.setdefault(storage._cdata, (storage.nbytes(), []))
            ticks.append(self.clock)


def _named(call: ModuleCall) -> str:
    return repr(call.name) if call.name else "the model's own code"


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


_STRAY = "a tensor from before it is read after it by another module, from an attribute or a list"
_GIVEN = "a module before it changes a list or mapping among its arguments"
_CHANGES = "{} changes in the forward pass and is used before and after it"
_IN_FORWARD = "a gradient is asked for or changed in the forward pass"
_HOOKS = (Tensor.register_hook, Tensor.retain_grad)
_OF_GRAPHS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward, *_HOOKS)
"""Functions that use the graph behind their arguments: it must be in one stage."""


def container_contents(structure: Any) -> list[object]:
    """Return the contents of lists, mappings and objects: plain values, and ids of the rest."""
    entries: list[object] = []

    def collect(value: Any) -> None:
        if value is None or isinstance(value, (bool, int, float, str)):
            entries.append(value)
            return
        entries.append(id(value))
        if isinstance(value, (list, tuple, set)):
            for item in value:
                collect(item)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                entries.append(str(key))
                collect(item)
        else:
            for key, item in (fields_of(value) or {}).items():
                entries.extend((key, id(item)))

    collect(structure)
    return entries[1:]


def why_sealed(module: nn.Module) -> str:
    """Return why no cut may go through a module's calls; "" if a cut may."""
    hooked = module._backward_hooks or module._backward_pre_hooks
    return "a backward hook is on a module around it" if hooked else ""


def why_enclosed() -> str:
    """Return why no cut may go through or precede the call that is being made; "" if a cut may."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not _Recorder.call.__code__:
        code = frame.f_code
        if code.co_filename == _CHECKPOINT:
            return "it is inside of a part that is recomputed (torch.utils.checkpoint)"
        if code.co_argcount and code.co_name == "forward":
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, torch.autograd.function.FunctionCtx):
                return "it is inside of a torch.autograd.Function"
        frame = frame.f_back
    return ""


_CHECKPOINT = torch.utils.checkpoint.__file__
