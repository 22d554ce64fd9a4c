"""Records the calls of a loss without the values of the model's outputs.

Outputs are fake tensors. Tensors that depend only on targets and inputs are computed with real
values in addition to the fake tensors. So masks select the same elements as in a real run, and the
calls on targets can be made again with the targets of another micro-batch.
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
"""Functions through which Python reads the values of a tensor."""
_RANDOM = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("bernoulli", "bernoulli_", "multinomial", "normal", "normal_", "uniform_", "random_"),
    *("exponential_", "dropout", "dropout_", "feature_dropout", "alpha_dropout"),
}
_MASKED = {"__getitem__", "__setitem__", "masked_select", "index_put", "index_put_"}
IN_LOSS = "loss"
"""The frame of calls in the loss function itself; the names of modules' frames begin with
`model.`."""


class UnknownValueError(Exception):
    """Python reads a value that only the model's real outputs have."""


@dataclass(eq=False)
class Node:
    """A tensor that was passed to the loss, or that a call of the loss has returned."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    value: Tensor | None
    """The tensor's real values if it depends only on the batch or is a constant; else None."""
    constant: bool
    """Whether the tensor is neither passed to the loss nor computed by it, such as the class
    weights of the loss."""
    size_of: Node | None = None
    """The mask whose values decide the length of a dim of the tensor; None if shapes do."""

    @property
    def known(self) -> Tensor:
        """The tensor's real values.

        Raises:
            UnknownValueError: they are not known.
        """
        if self.value is None:
            raise UnknownValueError(f"tensor {self.number} of the loss has no known value")
        return self.value

    @property
    def size(self) -> int:
        """The number of elements."""
        return torch.Size(self.shape).numel()


@dataclass(eq=False)
class Call:
    """One call of a function of torch."""

    func: Any
    leaves: list[Any]
    """The flattened arguments, with nodes in place of tensors."""
    spec: TreeSpec
    """The structure of the arguments, from which `tree_unflatten` makes (args, kwargs)."""
    results: list[Node]
    known: bool
    """Whether the call can be replayed: all tensor arguments have real values, and the function is
    not random."""
    frame: tuple[str, int]
    """The module in whose forward pass the call was made, and the number of that module's call."""
    occurrence: int
    """The number of earlier calls of the same function in the frame."""

    @property
    def name(self) -> str:
        """The name of the function, or of the attribute that it reads."""
        return function_name(self.func)

    @property
    def nodes(self) -> list[Node]:
        """The arguments that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Node)]

    def replay(self, values: dict[int, Tensor], device: torch.device) -> None:
        """Make the call again with the values of other tensors.

        Args:
            values: by node number, the values of the arguments. Those of the results are added.
            device: the device of the values, on which the function makes new tensors.
        """
        leaves = [value_of(x, values, device) if isinstance(x, Node) else x for x in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        if isinstance(kwargs.get("device"), (str, torch.device)):
            kwargs = {**kwargs, "device": device}
        result = self.func(*args, **kwargs)
        tensors = [args[0]] if result is None else _tensors(result)
        for node, tensor in zip(self.results, tensors, strict=True):
            values[node.number] = tensor


def value_of(node: Node, values: dict[int, Tensor], device: torch.device) -> Tensor:
    """Return the value of a node in a replay, or else its value in the recording.

    Args:
        node: the node.
        values: by node number, the values of the replay. A value of the recording is added.
        device: the device to which a value of the recording is moved.

    Raises:
        UnknownValueError: neither value is known.
    """
    if node.number not in values:
        values[node.number] = node.known.to(device)
    return values[node.number]


@dataclass(eq=False)
class Read:
    """A value that Python has read from a known tensor."""

    node: Node
    value: Any


@dataclass(eq=False)
class Trace:
    """The recording of one run of a loss."""

    calls: list[Call] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    inputs: list[Node] = field(default_factory=list)
    """The tensors of the batch, in the order in which they were passed."""
    outputs: list[Node] = field(default_factory=list)
    """The tensors of the model's output, if the model itself was not recorded."""
    result: Node | None = None
    """The loss; None if it is no tensor that the recorder knows."""


def function_name(func: Any) -> str:
    """Return the plain name of a function of torch, or of the attribute that it reads."""
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
    """Records the calls of torch's functions in a `with` block.

    Args:
        fakes: whether the model's outputs are fake tensors; if not, they have made-up values.
        step: the number of this recording of the loss. A read of a fake tensor returns a made-up
            number, which differs between recordings.
    """

    def __init__(self, *, fakes: bool, step: int) -> None:
        super().__init__()
        self.trace = Trace()
        self._fakes = fakes
        self._invented = 0.71 + 0.117 * step
        self._nodes: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._twins: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._alive: list[Tensor] = []  # tensors must stay alive: nodes are found by identity
        self._count = 0
        self._frames: list[tuple[str, int, dict[Any, int]]] = [(IN_LOSS, 0, {})]
        self._calls_of: dict[str, int] = {}

    def give(self, batch: Any, *, known: bool) -> Any:
        """Register a structure of real tensors with which the loss will be called.

        Args:
            batch: inputs, outputs or targets.
            known: whether the values may be used, as for inputs and targets; if not, only the
                shapes are used.

        Returns:
            The same structure with the tensors to call the loss with.
        """

        def enter(tensor: Tensor) -> Tensor:
            twin = self._twin(tensor) if known else tensor
            with unset_fake_temporarily():
                value = tensor.detach().cpu().clone() if known else None
            node = self._node(twin, value, constant=False)
            (self.trace.inputs if known else self.trace.outputs).append(node)
            return twin

        with torch._C.DisableTorchFunction():  # these calls are not calls of the loss
            return map_tensors(batch, enter)

    def result(self, loss: Any) -> None:
        """Set the result of the recording to the tensor that the loss has returned."""
        if isinstance(loss, Tensor) and loss in self._nodes:
            self.trace.result = self._nodes[loss]

    @contextmanager
    def frames(self, model: nn.Module) -> Iterator[None]:
        """Inside of a `with` block, record with each call the module that makes the call."""
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
        changed = args[0] if name == "__setitem__" else None
        results = _tensors(result if result is not None else changed)
        if results:
            self._note(func, nodes, spec, results, known=known)
        return result

    def _entered(self, tensor: Tensor) -> Tensor:
        """Return the tensor to call a function with; register an unknown one as a constant."""
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
        """Prepare a call that changes a constant in place: it has to change a copy."""
        with unset_fake_temporarily():
            node.value = None if node.value is None else node.value.clone()
        if not self._fakes:
            index = next(i for i, x in enumerate(leaves) if isinstance(x, Tensor))
            leaves[index] = leaves[index].clone()
            self._nodes[leaves[index]] = node

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
        """Make a call with real values, and return fake tensors for the results."""
        values = [node.value if isinstance(node, Node) else node for node in nodes]
        with unset_fake_temporarily():
            args, kwargs = tree_unflatten(values, spec)
            result = func(*args, **kwargs)
        pairs = zip(values, leaves, strict=True)
        fakes = {id(value): leaf for value, leaf in pairs if isinstance(value, Tensor)}
        if result is None:
            return None

        def fake(value: Tensor) -> Tensor:
            twin = fakes.get(id(value))  # a result that is an argument, changed in place
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
        if func is F.ctc_loss and self._fakes:  # its kernel reads the values of the lengths
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
        """Make a call that indexes by a known mask, with the positions where the mask is true."""
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
        if name in ("item", "__float__"):  # most often the number is only printed
            self._invented *= 1.0137
            return self._invented
        return self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise UnknownValueError(
            f"{name.strip('_')}() of a tensor whose values only a real forward pass has"
        )


def _size_source(arguments: Sequence[Node], result: Node) -> Node | None:
    """Return the mask whose values decide the length of a result; None if there is no such mask."""
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
    """Whether the result is a selection of the source by a bool mask."""
    return index.dtype == torch.bool and result.shape != source.shape


def _broadcast(*shapes: Sequence[int]) -> torch.Size:
    shape: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return shape


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if result is None or isinstance(result, (bool, int, float, str, torch.Size)):
        return []
    if isinstance(result, (tuple, list)):
        return [tensor for item in result for tensor in _tensors(item)]
    return tree_tensors(result)


RunLoss = Callable[[CallRecorder], Any]
"""Passes the batch to the recorder, calls the loss with it and returns the result."""


def record_loss(run: RunLoss, *, fakes: bool, step: int) -> Trace:
    """Run a loss and record its calls.

    Args:
        run: a function that calls the loss; it is called inside of the recorder's `with` block.
        fakes: see `CallRecorder`. With fakes, the caller has to have entered a fake mode.
        step: see `CallRecorder`.

    Raises:
        Exception: any exception from the user's code.
        UnknownValueError: the loss reads values that only a real forward pass has.
    """
    recorder = CallRecorder(fakes=fakes, step=step)
    with recorder:
        loss = run(recorder)
    recorder.result(loss)
    return recorder.trace
