"""Record, in a forward pass on fake tensors, the axes of all parameter-dependent tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bigtrain.errors import ConfigError
from bigtrain.slice_planning import product_rules, view_rules
from bigtrain.slice_planning.dim_axes import MISFIT, Dims, block, new_dim
from bigtrain.slice_planning.operations import (
    HeldTensor,
    OpCall,
    OpRecord,
    opaque,
    rule_of,
)
from bigtrain.tensors.fake import fake_tensor
from bigtrain.tensors.op_cost import flops_of, mutated_tensors
from bigtrain.tensors.tree import map_tensors, tree_tensors
from bigtrain.tracing.watch import (
    NEEDS_VALUES,
    ForwardObserver,
    fake_twin,
    untraceable_message,
    watch_forward,
)

RULE_MODULES = (product_rules, view_rules)
"""Modules whose import registers the rules that `rule_of` finds."""


@dataclass
class AxisTrace:
    """The record of one forward pass: tensors with their axes, operations, saved tensors."""

    state: dict[str, HeldTensor]
    """Parameters and buffers by plain name; the names of a tied tensor share one object."""
    trained: frozenset[str]
    """Names of parameters."""
    records: list[OpRecord]
    saved: list[tuple[HeldTensor, int]]
    """The tensors that autograd saves for the backward pass, with their bytes."""
    failed: str = ""
    """The reason why the pass stopped early; '' if it was complete."""
    tensors: list[HeldTensor] = field(default_factory=list)
    guessed: str = ""
    """If the pass made up values, the reason why a pass without them stopped early; else ''."""
    listed: dict[str, str] = field(default_factory=dict)
    """By tensor name, the module whose code takes the tensor from a list of all tensors, such as
    `parameters()`, and uses its values or sizes. On a rank the list has only the rank's part of the
    tensor."""


def trace_axes(model: nn.Module, inputs: Any, class_dim: int | None) -> AxisTrace:
    """Run a fake twin of a model forward.

    If the values of tensors decide which operations run, the model runs once more with made-up
    values. The slices are then chosen for one of several branches, but a real run computes the
    right numbers in any branch.

    Args:
        model: a model on any device; it is not changed.
        inputs: the inputs of one micro-batch; only shapes matter.
        class_dim: the dim of the output along which the loss is a cross entropy; this dim may be
            sliced. None if the output is needed whole.
    """
    trace, by_values = _run(model, inputs, class_dim, guess=False)
    if not by_values:
        return trace
    guessed, _ = _run(model, inputs, class_dim, guess=True)
    return trace if guessed.failed else replace(guessed, guessed=trace.failed)


def _run(
    model: nn.Module, inputs: Any, class_dim: int | None, *, guess: bool
) -> tuple[AxisTrace, bool]:
    """Return a trace, and whether the pass stopped because values were needed."""
    cpu = torch.device("cpu")
    twin, mode = fake_twin(model, cpu)
    twin.train(model.training)
    with mode:
        fake_inputs = map_tensors(inputs, lambda tensor: fake_tensor(tensor, cpu))
    recorder = _Recorder(twin, fake_inputs, guess=guess)
    for module in twin.modules():
        for table in ("_parameters", "_buffers"):
            module.__dict__[table] = _Table(module.__dict__[table], recorder)
    failed, output, by_values = "", None, False
    try:
        with watch_forward(twin, recorder, mode, torch.enable_grad):
            output = twin(fake_inputs)
    except Exception as error:  # noqa: BLE001 - the user's code, on tensors without values
        is_explained = isinstance(error, ConfigError)
        failed = str(error) if is_explained else untraceable_message(error, recorder)
        by_values = isinstance(error, NEEDS_VALUES)
    if failed:
        recorder.leave_open()
    recorder.close(output, class_dim)
    trace = AxisTrace(
        recorder.state,
        frozenset(name for name, _ in model.named_parameters(remove_duplicate=False)),
        recorder.records,
        list(recorder.saved.values()),
        failed,
        recorder.tensors,
        listed={
            n: recorder.listed[h.name]
            for n, h in recorder.state.items()
            if h.name in recorder.listed
        },
    )
    return trace, by_values


def _made_up(name: str, args: Any, error: Exception) -> Any:
    """Return a possible result of an operation whose result depends on values."""
    operand = args[0]
    if name in ("_local_scalar_dense", "equal"):
        if name == "equal" or operand.dtype == torch.bool:
            return True
        return 1.0 if operand.is_floating_point() else 1
    count = max(1, operand.numel() // 2)
    if name == "nonzero":
        return operand.new_empty((count, operand.dim()), dtype=torch.int64)
    if name == "masked_select":
        return operand.new_empty(max(1, args[1].numel() // 2))
    if name == "index" and len(args[1]) == 1:
        mask = args[1][0]
        return operand.new_empty((max(1, mask.numel() // 2), *operand.shape[mask.dim() :]))
    raise error


class _Recorder(ForwardObserver):
    """Records calls of modules and operations."""

    def __init__(self, model: nn.Module, inputs: Any, *, guess: bool) -> None:
        self.guess = guess
        self.state: dict[str, HeldTensor] = {}
        self.records: list[OpRecord] = []
        self.saved: dict[int, tuple[HeldTensor, int]] = {}
        self.tensors: list[HeldTensor] = []
        self.listed: dict[str, str] = {}
        self._twins: dict[int, Tensor] = {}
        """By the id of a parameter or buffer, the tensor that `model.parameters()` or `buffers()`
        yields in its place, so that a use from a list is told from a use by a module."""
        self._listed: dict[int, HeldTensor] = {}
        self._traced: dict[int, HeldTensor] = {}
        self._whole: dict[int, HeldTensor] = {}
        """By storage, the first traced tensor that occupies the storage completely."""
        self._unclear: set[int] = set()
        """Storages that are written in several pieces."""
        self._of_inputs = {id(tensor) for tensor in tree_tensors(inputs)}
        self._alive: list[Any] = [inputs]
        self._stack: list[str] = []
        self._functions = _own_functions()
        named = (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        for name, tensor in named:
            trained = isinstance(tensor, nn.Parameter)
            if id(tensor) not in self._traced and (trained or tensor.is_floating_point()):
                dims = tuple(map(new_dim, tensor.shape))
                self._list(tensor, self._add(tensor, dims, name=name, trained=trained))
            if id(tensor) in self._traced:
                self.state[name] = self._traced[id(tensor)]

    def call(
        self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record a call of a module; see `CallHandler.call`."""
        self._stack.append(name)
        try:
            return super().call(name, run, args, kwargs)
        finally:
            self._stack.pop()

    def answer(self, func: Any, args: Any, error: Exception) -> Any:
        """Make up a result for an operation that needs values; without `guess`, raise its error."""
        if not self.guess:
            raise error
        return _made_up(func._overloadpacket.__name__, args, error)

    def function(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record that code reads the size of a tensor from `parameters()` or `buffers()`.

        This runs no operation, so `operation` does not see it.
        """
        del kwargs, result
        if func in _ASKS_SIZE:
            self.note_listed(args[0])

    def save(self, tensor: Tensor) -> None:
        """Record that autograd saves a tensor for the backward pass."""
        storage = tensor.untyped_storage()
        known = self._whole.get(storage._cdata)
        if known is not None and not known.name:
            self.saved[storage._cdata] = (known, storage.nbytes())

    def in_list(self, tensor: Any) -> Any:
        """Return the tensor that `model.parameters()` or `buffers()` yields for this tensor."""
        return self._twins.get(id(tensor), tensor)

    def _list(self, tensor: Tensor, traced: HeldTensor) -> None:
        twin = tensor.detach()
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
        self._twins[id(tensor)], self._listed[id(twin)] = twin, traced

    def note_listed(self, tensor: Any) -> HeldTensor | None:
        """Record the use of a tensor from a list; return its record, None for other tensors."""
        traced = self._listed.get(id(tensor))
        if traced is not None:
            self.listed.setdefault(traced.name, self._stack[-1] if self._stack else "")
        return traced

    def lookup(self, tensor: Tensor) -> HeldTensor | None:
        """Return the record of a tensor with its dims; None if it depends on no parameters."""
        traced = self._traced.get(id(tensor)) or self.note_listed(tensor)
        if traced is None and tensor.untyped_storage()._cdata in self._unclear:
            why = "it is written in pieces into a tensor"
            dims = tuple(new_dim(length, why) for length in tensor.shape)
            traced = self._add(tensor, dims)
        return traced

    def operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record an operation."""
        op = OpCall(
            func, (args, kwargs), result, self.lookup, self._stack[-1] if self._stack else ""
        )
        self._alive.append((args, kwargs, result))
        inputs = [known for tensor in op.tensors if (known := self.lookup(tensor)) is not None]
        if not inputs:
            random = torch.Tag.nondeterministic_seeded in func.tags
            if random or any(id(tensor) in self._of_inputs for tensor in op.tensors):
                self._of_inputs.update(map(id, op.results))
            return
        if op.name in _MAKES_ANEW or not any(tensor.numel() for tensor in op.results):
            return
        record = OpRecord(op.name, op.where, flops_of(func, args, kwargs, result), inputs)
        for tensor in mutated_tensors(func, args, kwargs):
            if self.lookup(tensor) is None and not self._is_whole(tensor):
                self._unclear.add(tensor.untyped_storage()._cdata)
                self.lookup(tensor)
        result_dims = list(self._dims(op))
        of_weights = all(known.of_weights for known in inputs) and not any(
            id(tensor) in self._of_inputs for tensor in op.tensors
        )
        trained = any(known.trained for known in inputs) and op.name != "detach"
        for tensor, dims in zip(op.results, result_dims, strict=True):
            same = self._traced.get(id(tensor))
            if same is None:
                same = self._add(tensor, dims, of_weights=of_weights, trained=trained)
                same.view_of = self._viewed(tensor, op)
            same.trained = same.trained or trained
            same.of_weights = same.of_weights and of_weights
            record.outputs.append(same)
        record.summed, record.weight = op.summed, op.weight
        self.records.append(record)

    def leave_open(self) -> None:
        """Block the dims of results without recorded uses, because later uses are unknown."""
        used = {tensor for record in self.records for tensor in record.inputs}
        for record in self.records:
            for tensor in record.outputs:
                for dim in tensor.dims if tensor not in used else ():
                    block(dim, "the model could not be traced further")

    def close(self, output: Any, class_dim: int | None) -> None:
        """Block the dims of the model's outputs, except the dim of the classes."""
        for tensor in _heads(output):
            known = self.lookup(tensor)
            for n, dim in enumerate(known.dims if known is not None else ()):
                if class_dim is None or n != class_dim % tensor.dim():
                    block(dim, "it is returned by the model")

    def _dims(self, op: OpCall) -> list[Dims]:
        function = self._own_function()
        if function:
            return opaque(
                op, f"it is passed to {function}, a custom autograd function of the model,"
            )
        try:
            result_dims = list(rule_of(op)(op))
        except (TypeError, IndexError, ValueError):  # the rule does not know this overload
            result_dims = opaque(op)
        fits = len(result_dims) == len(op.results) and all(
            len(dims) == tensor.dim() for dims, tensor in zip(result_dims, op.results, strict=True)
        )
        return result_dims if fits else opaque(op, MISFIT)

    def _own_function(self) -> str:
        """Return the name of the custom autograd function that is running; '' if none is.

        Slices would lose their gradients in such a function, so it receives whole tensors.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not _Recorder.call.__code__:
            if frame.f_code in self._functions:
                return self._functions[frame.f_code]
            frame = frame.f_back
        return ""

    def _add(
        self,
        tensor: Tensor,
        dims: Dims,
        *,
        name: str = "",
        of_weights: bool = True,
        trained: bool = True,
    ) -> HeldTensor:
        nbytes = tensor.numel() * tensor.element_size()
        traced = HeldTensor(dims, nbytes, of_weights, trained, name)
        self._traced[id(tensor)] = traced
        self.tensors.append(traced)
        storage = tensor.untyped_storage()
        if storage.nbytes() == nbytes:
            self._whole.setdefault(storage._cdata, traced)
        self._alive.append(tensor)
        return traced

    def _viewed(self, tensor: Tensor, op: OpCall) -> HeldTensor | None:
        storage = tensor.untyped_storage()._cdata
        for operand in op.tensors:
            if operand is not tensor and operand.untyped_storage()._cdata == storage:
                return self.lookup(operand)
        return None

    def _is_whole(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _own_functions() -> dict[CodeType, str]:
    """Return the names of custom autograd functions by their code objects."""
    names: dict[CodeType, str] = {}
    pending = [torch.autograd.Function]
    while pending:
        function_class = pending.pop()
        pending += function_class.__subclasses__()
        code = getattr(function_class.__dict__.get("forward"), "__func__", None)
        if isinstance(code, FunctionType) and not function_class.__module__.startswith("torch."):
            names[code.__code__] = function_class.__name__
    return names


_ASKS_SIZE = frozenset(
    (Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__)  # type: ignore[attr-defined]
)
_MAKES_ANEW = {
    *("zeros_like", "empty_like", "ones_like", "full_like", "rand_like", "randn_like"),
    *("new_zeros", "new_empty", "new_ones", "new_full", "new_empty_strided", "bernoulli_"),
}
"""Operations that use a tensor's shape but not its values."""


def _heads(output: Any) -> list[Tensor]:
    """Return the outputs named logits, out, aux or aux_logits*, which a loss uses; else all."""
    if isinstance(output, Tensor):
        return [output]
    names = ("out", "aux", "logits", "aux_logits", "aux_logits1", "aux_logits2")
    outputs = [
        output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        for name in names
    ]
    heads = [tensor for tensor in outputs if isinstance(tensor, Tensor)]
    return heads or [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


class _Table(dict[str, Any]):
    """A module's parameters or buffers; iteration yields other tensors than look-ups by name."""

    def __init__(self, tensors: Mapping[str, Any], recorder: _Recorder) -> None:
        super().__init__(tensors)
        self._recorder = recorder

    def __reduce__(self) -> Any:
        """Pickle and copy as a plain dict, so that a copy of the module has no recorder."""
        return dict, (dict(super().items()),)

    def items(self) -> Any:
        """Return names, each with the tensor that a list of all yields for it."""
        return {name: self._recorder.in_list(tensor) for name, tensor in super().items()}.items()

    def values(self) -> Any:
        """Return the tensors that a list of all yields."""
        return dict(self.items()).values()
