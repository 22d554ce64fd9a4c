"""What a forward pass does with parameters beside computing with them, seen without numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
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
"""Places of the weight, and of what says that its gradient is sparse."""


@dataclass(frozen=True)
class Write:
    """A parameter is written in place in a forward pass."""

    name: str
    of_parameters: bool
    """What is written follows from parameters alone, not from the batch."""
    inside: tuple[str, ...]
    """The modules that were at work, from the outermost on; the model itself is ''."""


@dataclass(frozen=True)
class ParameterUses:
    """What was seen of a model in one forward pass of training."""

    writes: tuple[Write, ...] = ()
    sparse: tuple[str, ...] = ()
    """Parameters whose gradients will be sparse, in one of their uses at least."""
    sparse_and_dense: tuple[str, ...] = ()
    """Of these, those that are used otherwise, too: what comes together is dense."""
    called: frozenset[str] = frozenset()
    """Modules whose forward pass ran."""
    used: frozenset[str] = frozenset()
    """Parameters that some operation was given."""
    graph_in_forward: str | None = None
    """The module whose forward pass asks for a gradient with a graph, so that another can
    be taken of it; '' for the model's own, None where there is none."""
    graph_in_loss: bool = False
    """Whether the loss asks for a gradient, of whatever kind: it goes back through the output."""
    reached: frozenset[str] | None = None
    """Parameters in the graph of the loss; None without a loss, or where the graph hides some."""

    def only_used(self, named: Iterable[tuple[str, nn.Module]]) -> list[str]:
        """Of some modules those that are never called, and of which parameters are used.

        Their methods are called, or modules inside them, or their parameters are taken.
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
    """See what a forward pass does with a model's parameters.

    Args:
        model: on any device; a copy without numbers runs.
        example: one micro-batch; only shapes matter.
        loss: of its output, where what it does is looked at, too.

    Returns:
        None where the model does not run without its numbers.
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
    with suppress(Exception), in_loss:  # a loss may want values, which says nothing of the model
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
    """Sees gradients that are asked for, of all kinds or with a graph of their own."""

    def __init__(self, watch: _Watch, *, all_kinds: bool) -> None:
        super().__init__()
        self._watch, self._all_kinds = watch, all_kinds
        self.where: str | None = None

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ASKING and self.where is None:
            place = _ASKING[func]
            with_graph = kwargs.get("create_graph") or any(args[place : place + 1])
            if self._all_kinds or with_graph:
                self.where = self._watch.innermost
        return func(*args, **kwargs)


_ASKING = {torch.autograd.grad: 4, torch.autograd.backward: 3, Tensor.backward: 3}
"""What asks for gradients, and the place of `create_graph` among its arguments."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation on the tensors of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held = {_place(p): name for name, p in model.named_parameters()}
        self._keep: list[Tensor] = list(model.parameters())
        self._pure = set(self._held)
        """Memory whose contents follow from parameters alone."""
        self._inside: list[str] = []
        self.called: set[str] = set()
        self.used: set[str] = set()
        self.writes: list[Write] = []
        self.sparse: list[str] = []
        self.dense: set[str] = set()
        """Parameters that get another gradient than of an embedding with sparse ones."""

    def enter(self, name: str, _module: nn.Module, _inputs: Any) -> None:
        self._inside.append(name)
        self.called.add(name)

    @property
    def innermost(self) -> str:
        """The module that is at work, '' for the model itself and outside of it."""
        return self._inside[-1] if self._inside else ""

    def leave(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._inside.pop()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = tree_tensors((args, kwargs))
        names = {self._held[_place(t)] for t in given if _place(t) in self._held}
        self.used |= names
        pure = all(_place(tensor) in self._pure for tensor in given)
        for tensor in _written(func, args, kwargs):
            name = self._held.get(_place(tensor))
            if name is not None and tensor.numel():
                self.writes.append(Write(name, pure, tuple(self._inside)))
        if pure and given:  # of the made ones, too: their memory must not come again meanwhile
            made = tree_tensors(result)
            self._keep += made
            self._pure.update(map(_place, made))
        places = _EMBEDDINGS.get(func._schema.name)
        if places is None:
            if torch.is_grad_enabled() and func is not torch.ops.aten.detach.default:
                self.dense |= names
        else:
            values = dict(enumerate(args)) | {
                number: kwargs[argument.name]
                for number, argument in enumerate(func._schema.arguments)
                if argument.name in kwargs
            }
            weight, is_sparse = values[places[0]], values.get(places[1], False)
            if _place(weight) in self._held:
                name = self._held[_place(weight)]
                self.sparse.append(name) if is_sparse else self.dense.add(name)
        return result


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that an operation writes in place."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from tree_tensors(value)
