"""Uses of parameters in a forward pass: writes, sparse gradients, gradients of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bigtrain.data.loader import MicroBatch
from bigtrain.losses.loss import Loss
from bigtrain.models.blueprint import kept_random_state
from bigtrain.tensors.fake import fake_model, run_without_numbers
from bigtrain.tensors.tree import tree_tensors
from bigtrain.tracing.unreached import graph_leaves

_EMBEDDINGS = {"aten::embedding": (0, 4), "aten::_embedding_bag": (0, 5)}
"""Positions of the weight, and of the flag for a sparse gradient, among the arguments."""


@dataclass(frozen=True)
class Write:
    """An in-place write to a parameter in a forward pass."""

    name: str
    of_parameters: bool
    """Whether the written values depend on parameters alone and not on the batch."""
    inside: tuple[str, ...]
    """The modules whose calls are active, from the outermost; '' is the model itself."""


@dataclass(frozen=True)
class ParameterUses:
    """The uses of parameters in one forward pass of training."""

    writes: tuple[Write, ...] = ()
    sparse: tuple[str, ...] = ()
    """Parameters whose gradient is sparse in at least one of their uses."""
    sparse_and_dense: tuple[str, ...] = ()
    """Parameters in `sparse` that also have uses with a dense gradient: the sum is dense."""
    called: frozenset[str] = frozenset()
    """Modules whose forward pass ran."""
    used: frozenset[str] = frozenset()
    """Parameters that are arguments of some operation."""
    graph_in_forward: str | None = None
    """The module whose forward pass computes a gradient with a graph, for a second derivative;
    '' for the model itself, None if there is none."""
    graph_in_loss: bool = False
    """Whether the loss computes a gradient of any kind, through the model's output."""
    reached: frozenset[str] | None = None
    """Parameters in the graph of the loss; None without a loss, or where the graph hides some."""

    def renamed(self, names_of: Callable[[str], Iterable[str]]) -> ParameterUses:
        """Return the same uses by other names.

        Args:
            names_of: returns the new names of a module or parameter; several if it represents
                several modules or parameters.
        """

        def every(names: Iterable[str]) -> Iterator[str]:
            return (new for name in names for new in names_of(name))

        def first(name: str) -> str:
            return next(iter(names_of(name)), name)

        # Writes are compared with the modules around them: one of the new names is enough.
        writes = (
            replace(write, name=first(write.name), inside=tuple(map(first, write.inside)))
            for write in self.writes
        )
        graph = self.graph_in_forward
        return replace(
            self,
            writes=tuple(writes),
            sparse=tuple(every(self.sparse)),
            sparse_and_dense=tuple(every(self.sparse_and_dense)),
            called=frozenset(every(self.called)),
            used=frozenset(every(self.used)),
            graph_in_forward=None if graph is None else first(graph),
            reached=None if self.reached is None else frozenset(every(self.reached)),
        )

    def only_used(self, named: Iterable[tuple[str, nn.Module]]) -> list[str]:
        """Return the names of the modules that are never called although their parameters are used.

        The model calls other methods of such a module, calls modules inside it, or reads its
        parameters.

        Args:
            named: the names of the modules that are checked, with the modules.
        """
        return [
            name
            for name, module in named
            if name not in self.called
            and any(f"{name}.{inner}" in self.used for inner, _ in module.named_parameters())
        ]


def parameter_uses(
    model: nn.Module, example: MicroBatch, loss: Loss | None = None
) -> ParameterUses | None:
    """Run a forward pass and return how it uses the model's parameters.

    Args:
        model: a model on any device; a copy without values runs.
        example: one micro-batch; only shapes matter.
        loss: the loss of the model's output; None to run the model alone.

    Returns:
        None if the model does not run without values.
    """
    try:
        with kept_random_state():
            return run_without_numbers(partial(_seen, model, example, loss))
    except Exception:  # noqa: BLE001 - user code of any kind runs here
        return None


def _seen(
    model: nn.Module, example: MicroBatch, loss: Loss | None, device: torch.device
) -> ParameterUses:
    twin, batch = fake_model(model, device, double=False), example.fake(device)
    watch = _Watch(twin)
    for name, module in twin.named_modules():
        module.register_forward_pre_hook(partial(watch.enter, name))
        module.register_forward_hook(watch.leave, always_call=True)
    in_forward, in_loss = _Graphs(watch, all_kinds=False), _Graphs(watch, all_kinds=True)
    reached: frozenset[str] | None = None
    with watch, in_forward:
        output = twin.train()(batch.inputs)
    with suppress(Exception), in_loss:  # a loss may need values although the model needs none
        if loss is not None and batch.targets is not None:
            reached = _reached(twin, loss(output, batch.targets, max(1, batch.count)))
    sparse = tuple(dict.fromkeys(watch.sparse))
    return ParameterUses(
        tuple(watch.writes),
        sparse,
        tuple(name for name in sparse if name in watch.dense),
        frozenset(watch.called),
        frozenset(watch.used),
        in_forward.where,
        in_loss.where is not None,
        reached,
    )


def _reached(twin: nn.Module, total: Any) -> frozenset[str] | None:
    leaves, is_whole = graph_leaves(total)
    if not is_whole:
        return None
    return frozenset(name for name, p in twin.named_parameters() if id(p) in leaves)


class _Graphs(TorchFunctionMode):
    """Records where a gradient is computed: a gradient of any kind, or only one with a graph."""

    def __init__(self, watch: _Watch, *, all_kinds: bool) -> None:
        super().__init__()
        self._watch, self._all_kinds = watch, all_kinds
        self.where: str | None = None

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ASKING and self.where is None:
            position = _ASKING[func]
            with_graph = kwargs.get("create_graph") or any(args[position : position + 1])
            if self._all_kinds or with_graph:
                self.where = self._watch.innermost
        return func(*args, **kwargs)


_ASKING = {torch.autograd.grad: 4, torch.autograd.backward: 3, Tensor.backward: 3}
"""Functions that compute gradients, and the position of `create_graph` among their arguments."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operation on the tensors of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameter_names = {_storage_of(p): name for name, p in model.named_parameters()}
        self._keep: list[Tensor] = list(model.parameters())
        self._pure = set(self._parameter_names)
        """Storages whose contents depend on parameters alone."""
        self._inside: list[str] = []
        self.called: set[str] = set()
        self.used: set[str] = set()
        self.writes: list[Write] = []
        self.sparse: list[str] = []
        self.dense: set[str] = set()
        """Parameters with a use other than in an embedding with sparse gradients."""

    def enter(self, name: str, _module: nn.Module, _inputs: Any) -> None:
        self._inside.append(name)
        self.called.add(name)

    @property
    def innermost(self) -> str:
        """The innermost module whose call is active; '' for the model itself and outside of it."""
        return self._inside[-1] if self._inside else ""

    def leave(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._inside.pop()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operands = tree_tensors((args, kwargs))
        names = {
            self._parameter_names[_storage_of(t)]
            for t in operands
            if _storage_of(t) in self._parameter_names
        }
        self.used |= names
        pure = all(_storage_of(tensor) in self._pure for tensor in operands)
        for tensor in _written(func, args, kwargs):
            name = self._parameter_names.get(_storage_of(tensor))
            if name is not None and tensor.numel():
                self.writes.append(Write(name, pure, tuple(self._inside)))
        if pure and operands:  # results are kept alive, so that no other storage gets their address
            made = tree_tensors(result)
            self._keep += made
            self._pure.update(map(_storage_of, made))
        positions = _EMBEDDINGS.get(func._schema.name)
        if positions is None:
            if torch.is_grad_enabled() and func is not torch.ops.aten.detach.default:
                self.dense |= names
        else:
            values = dict(enumerate(args)) | {
                number: kwargs[argument.name]
                for number, argument in enumerate(func._schema.arguments)
                if argument.name in kwargs
            }
            weight, is_sparse = values[positions[0]], values.get(positions[1], False)
            if _storage_of(weight) in self._parameter_names:
                name = self._parameter_names[_storage_of(weight)]
                self.sparse.append(name) if is_sparse else self.dense.add(name)
        return result


def _storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors that an operation writes in place."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from tree_tensors(value)
