"""A loss run without the numbers of the model's outputs, each of its calls recorded.

Outputs are fake tensors. What follows from the targets (and from the inputs) alone is computed
with its real values beside the fakes, so that masks select what they select in a real run, and
the recording can be replayed later on the targets of another micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from bigtrain.tensors.fake import fake_tensor
from bigtrain.tensors.tree import map_tensors, tree_tensors

_READS = {
    *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero"),
    *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "__array__"),
}
"""Functions that give Python a value of a tensor."""
_RANDOM = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("bernoulli", "bernoulli_", "multinomial", "normal", "normal_", "uniform_", "random_"),
    *("exponential_", "dropout", "dropout_", "feature_dropout", "alpha_dropout"),
}
_MASKED = {"__getitem__", "__setitem__", "masked_select", "index_put", "index_put_"}
IN_LOSS = "loss"
"""The frame of calls in the loss function itself; no module's name has it in the first place."""


class UnknownValueError(Exception):
    """Python asked for a number that only the model's real outputs have."""


@dataclass(eq=False)
class Node:
    """A tensor that the loss was given, or that one of its calls returned."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    value: Tensor | None
    """Its real values, where they follow from the batch alone or are a constant."""
    constant: bool
    """Not of the batch: a weight, a buffer."""
    size_of: Node | None = None
    """The mask by whose values one of its dims is so long."""

    @property
    def known(self) -> Tensor:
        """Its real values, of a node that has them."""
        if self.value is None:
            raise UnknownValueError(f"tensor {self.number} of the loss has no known value")
        return self.value

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return torch.Size(self.shape).numel()


@dataclass(eq=False)
class Call:
    """One call of a function of torch."""

    func: Any
    leaves: list[Any]
    """Its arguments, flattened; nodes where they were tensors."""
    spec: TreeSpec
    results: list[Node]
    known: bool
    """All its tensor arguments are known, so that it can be replayed."""
    frame: tuple[str, int]
    """The module in whose forward pass it was called, and which call of that module it was."""
    occurrence: int
    """How many calls of the same function the frame had before it."""

    @property
    def name(self) -> str:
        """The function's name; of an attribute, the attribute's."""
        return function_name(self.func)

    @property
    def nodes(self) -> list[Node]:
        """The arguments that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Node)]

    def replay(self, values: dict[int, Tensor], device: torch.device) -> None:
        """Compute it again from the values of its arguments; adds those of its results."""
        leaves = [value_of(x, values, device) if isinstance(x, Node) else x for x in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        if isinstance(kwargs.get("device"), (str, torch.device)):
            kwargs = {**kwargs, "device": device}
        result = self.func(*args, **kwargs)
        made = [args[0]] if result is None else _tensors(result)
        for node, tensor in zip(self.results, made, strict=True):
            values[node.number] = tensor


def value_of(node: Node, values: dict[int, Tensor], device: torch.device) -> Tensor:
    """The value of a node in a replay: computed before, or a constant of the recording."""
    if node.number not in values:
        values[node.number] = node.known.to(device)
    return values[node.number]


@dataclass(eq=False)
class Read:
    """A number that Python took out of a known tensor."""

    node: Node
    value: Any


@dataclass(eq=False)
class Trace:
    """What one run of a loss did."""

    calls: list[Call] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    given: list[Node] = field(default_factory=list)
    """Tensors of the batch, in the order in which they were given."""
    outputs: list[Node] = field(default_factory=list)
    """Tensors of the model's output, where the model itself was not recorded."""
    result: Node | None = None
    """The loss."""


def function_name(func: Any) -> str:
    """The plain name of a function of torch."""
    name = str(getattr(func, "__name__", func))
    if name == "__get__":  # an attribute such as `x.T`
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return name


def changes_arguments(func: Any) -> bool:
    """Whether a function of torch changes its first argument."""
    name = function_name(func)
    in_place = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__")
    return name in in_place or (name.endswith("_") and not name.endswith("__"))


class CallRecorder(TorchFunctionMode):
    """Records the calls of torch's functions in a `with` block; see the module.

    Args:
        fakes: whether unknown tensors are fakes; otherwise all have numbers, of which those of the
            outputs are invented.
        step: which recording of the same loss it is; invented numbers differ between recordings.
    """

    def __init__(self, *, fakes: bool, step: int) -> None:
        super().__init__()
        self.trace = Trace()
        self._fakes = fakes
        self._invented = 0.71 + 0.117 * step
        self._nodes: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._twins: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._alive: list[Tensor] = []  # a node belongs to its tensor as long as that lives
        self._count = 0
        self._frames: list[tuple[str, int, dict[Any, int]]] = [(IN_LOSS, 0, {})]
        self._calls_of: dict[str, int] = {}

    def give(self, batch: Any, *, known: bool) -> Any:
        """Hand a structure of real tensors to what is recorded.

        Args:
            batch: inputs, outputs or targets.
            known: its values may be looked at; else only the shapes are used.

        Returns:
            The structure of the tensors to call with.
        """

        def enter(tensor: Tensor) -> Tensor:
            twin = self._twin(tensor) if known else tensor
            with unset_fake_temporarily():
                value = tensor.detach().cpu().clone() if known else None
            node = self._node(twin, value, constant=False)
            (self.trace.given if known else self.trace.outputs).append(node)
            return twin

        with torch._C.DisableTorchFunction():  # what is done here is no part of the loss
            return map_tensors(batch, enter)

    def result(self, loss: Any) -> None:
        """Say which tensor the loss is."""
        if isinstance(loss, Tensor) and loss in self._nodes:
            self.trace.result = self._nodes[loss]

    @contextmanager
    def frames(self, model: nn.Module) -> Iterator[None]:
        """Note, inside of a `with` block, in which module of a model a call is made."""
        handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            handles += [
                module.register_forward_pre_hook(partial(self._enter, f"model.{name}")),
                module.register_forward_hook(lambda *_: self._leave(), always_call=True),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, *_: Any) -> None:
        number = self._calls_of[name] = self._calls_of.get(name, 0) + 1
        self._frames.append((name, number, {}))

    def _leave(self) -> None:
        self._frames.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function_name(func)
        if torch._C._are_functorch_transforms_active():
            return func(*args, **(kwargs or {}))
        leaves, spec = tree_flatten((args, kwargs or {}))
        leaves = [self._entered(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        nodes = [self._nodes[leaf] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        tensors = [node for node in nodes if isinstance(node, Node)]
        if tensors and tensors[0].constant and changes_arguments(func):
            self._copy_constant(tensors[0], leaves)
        known = all(node.value is not None for node in tensors) and name not in _RANDOM
        if name in _READS:
            return self._read(func, name, nodes, leaves, spec, known=known)
        if known and self._fakes:
            result = self._on_values(func, leaves, nodes, spec)
        else:
            result = self._on_fakes(func, name, leaves, nodes, spec)
        made = result if result is not None else (args[0] if name == "__setitem__" else None)
        results = _tensors(made)
        if results:
            self._note(func, nodes, spec, results, known=known)
        return result

    def _entered(self, tensor: Tensor) -> Tensor:
        """A tensor as it can be called with: what the loss found elsewhere is a constant."""
        if tensor in self._nodes:
            entered: Tensor | None = self._twins.get(tensor)  # type: ignore[no-untyped-call]
            return tensor if entered is None else entered
        known = not tensor.is_meta and not isinstance(tensor, FakeTensor)
        twin = self._twin(tensor)
        with unset_fake_temporarily():
            value = tensor.detach() if known else None
        self._node(twin, value, constant=True)
        if twin is not tensor:
            self._nodes[tensor], self._twins[tensor] = self._nodes[twin], twin
        return twin

    def _copy_constant(self, node: Node, leaves: list[Any]) -> None:
        """Let a call that changes a tensor of the loss's own change a copy: the loss keeps its."""
        with unset_fake_temporarily():
            node.value = None if node.value is None else node.value.clone()
        if not self._fakes:
            place = next(i for i, x in enumerate(leaves) if isinstance(x, Tensor))
            leaves[place] = leaves[place].clone()
            self._nodes[leaves[place]] = node

    def _twin(self, tensor: Tensor) -> Tensor:
        if not self._fakes or isinstance(tensor, FakeTensor):
            return tensor
        twin: Tensor = fake_tensor(tensor, torch.device("cpu"))
        return twin

    def _node(self, tensor: Tensor, value: Tensor | None, *, constant: bool) -> Node:
        node = Node(self._count, tuple(tensor.shape), tensor.dtype, value, constant)
        self._count += 1
        self._nodes[tensor] = node
        self._alive.append(tensor)
        return node

    def _on_values(self, func: Any, leaves: list[Any], nodes: list[Any], spec: TreeSpec) -> Any:
        """Compute what is known with its real values, and give fakes of the results."""
        values = [node.value if isinstance(node, Node) else node for node in nodes]
        with unset_fake_temporarily():
            args, kwargs = tree_unflatten(values, spec)
            result = func(*args, **kwargs)
        pairs = zip(values, leaves, strict=True)
        fakes = {id(value): leaf for value, leaf in pairs if isinstance(value, Tensor)}
        if result is None:
            return None

        def fake(value: Tensor) -> Tensor:
            twin = fakes.get(id(value))  # changed in place: it stays what it was
            twin = self._twin(value) if twin is None else twin
            self._values[id(twin)] = value
            return twin

        self._values: dict[int, Tensor] = {}
        flat, structure = tree_flatten(result)
        return tree_unflatten([fake(v) if isinstance(v, Tensor) else v for v in flat], structure)

    def _on_fakes(
        self, func: Any, name: str, leaves: list[Any], nodes: list[Any], spec: TreeSpec
    ) -> Any:
        args, kwargs = tree_unflatten(leaves, spec)
        if func is F.ctc_loss and self._fakes:  # its kernel looks at the lengths
            reduction = kwargs.get("reduction", args[5] if len(args) > 5 else "mean")
            per_row = args[0].sum((0, 2)) if args[0].dim() == 3 else args[0].sum()
            return per_row if reduction == "none" else per_row.sum()
        if name in _MASKED and self._fakes:
            masks = [
                node
                for node in nodes
                if isinstance(node, Node) and node.dtype == torch.bool and node.value is not None
            ]
            if masks:
                return self._on_masked(func, name, leaves, nodes, spec)
        return func(*args, **kwargs)

    def _on_masked(
        self, func: Any, name: str, leaves: list[Any], nodes: list[Any], spec: TreeSpec
    ) -> Any:
        """Index by the places that are set in a mask, whose number is known."""
        if name == "masked_select":
            mask, value = leaves[1], nodes[1].value
            expanded = leaves[0].expand(_broadcast(leaves[0].shape, mask.shape))
            with unset_fake_temporarily():
                number = int(value.expand(expanded.shape).sum())
            return expanded.reshape(-1)[:1].expand(number) if number else expanded.reshape(-1)[:0]

        def places(position: int) -> Any:
            node = nodes[position]
            if not (isinstance(node, Node) and node.dtype == torch.bool and node.value is not None):
                return leaves[position]
            with unset_fake_temporarily():
                indices = node.value.nonzero(as_tuple=True)
            return tuple(self._twin(index) for index in indices)

        filled = [places(i) if i else leaf for i, leaf in enumerate(leaves)]
        args, kwargs = tree_unflatten(filled, spec)
        index = args[1] if isinstance(args[1], (tuple, list)) else (args[1],)
        flat = tuple(i for part in index for i in (part if isinstance(part, tuple) else (part,)))
        return func(args[0], flat, *args[2:], **kwargs)

    def _note(
        self,
        func: Any,
        nodes: list[Any],
        spec: TreeSpec,
        results: Sequence[Tensor],
        *,
        known: bool,
    ) -> None:
        values = getattr(self, "_values", {}) if known and self._fakes else {}
        tensors = [node for node in nodes if isinstance(node, Node)]
        in_place = func is not None and function_name(func) == "__setitem__"
        new = []
        for tensor in results:
            if not self._fakes and known:
                value: Tensor | None = tensor.detach()
            elif in_place and known:
                value = tensors[0].value
            else:
                value = values.get(id(tensor))
            node = self._node(tensor, value, constant=False)
            node.size_of = _size_source(tensors, node)
            new.append(node)
        name, number, seen = self._frames[-1]
        occurrence = seen.get(func, 0)
        seen[func] = occurrence + 1
        self.trace.calls.append(Call(func, nodes, spec, new, known, (name, number), occurrence))

    def _read(
        self,
        func: Any,
        name: str,
        nodes: list[Any],
        leaves: list[Any],
        spec: TreeSpec,
        *,
        known: bool,
    ) -> Any:
        if known:
            values = [node.value if isinstance(node, Node) else node for node in nodes]
            with unset_fake_temporarily():
                args, kwargs = tree_unflatten(values, spec)
                value = func(*args, **kwargs)
            self.trace.reads.append(Read(nodes[0], value))
            return value
        if not self._fakes:
            args, kwargs = tree_unflatten(leaves, spec)
            return func(*args, **kwargs)
        if name in ("item", "__float__"):  # mostly to be shown somewhere
            self._invented *= 1.0137
            return self._invented
        return self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise UnknownValueError(
            f"{name.strip('_')}() of a tensor whose values only a real forward pass has"
        )


def _size_source(arguments: Sequence[Node], result: Node) -> Node | None:
    """The mask by whose values a result is so long, if there is one."""
    if not result.shape or not arguments:
        return None
    for node in arguments[1:]:
        is_index = node.value is not None and not node.value.is_floating_point()
        if is_index and not node.constant and _selects(node, arguments[0], result):
            return node
    for node in arguments:
        source = node.size_of
        if source is not None and node.shape and node.shape[0] == result.shape[0]:
            return source
        if source is not None and node.shape and result.shape and node.shape[0] in result.shape:
            return source
    return None


def _selects(index: Node, source: Node, result: Node) -> bool:
    """Whether a bool mask has chosen what the result holds of a source."""
    return index.dtype == torch.bool and result.shape != source.shape


def _broadcast(*shapes: Sequence[int]) -> torch.Size:
    found: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return found


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if result is None or isinstance(result, (bool, int, float, str, torch.Size)):
        return []
    if isinstance(result, (tuple, list)):
        return [tensor for item in result for tensor in _tensors(item)]
    return tree_tensors(result)


RunLoss = Callable[[CallRecorder], Any]
"""Gives the recorder what the loss is called with, calls it and returns what it returns."""


def record_loss(run: RunLoss, *, fakes: bool, step: int) -> Trace:
    """Run a loss and record its calls.

    Args:
        run: is called inside of the recorder.
        fakes: see `CallRecorder`; the caller has entered a fake mode.
        step: see `CallRecorder`.

    Raises:
        Exception: of any kind, of the user's code.
        UnknownValueError: the loss looks at numbers that nobody knows yet.
    """
    recorder = CallRecorder(fakes=fakes, step=step)
    with recorder:
        loss = run(recorder)
    recorder.result(loss)
    return recorder.trace
