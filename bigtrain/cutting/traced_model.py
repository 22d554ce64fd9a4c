"""Trace forward passes on fake tensors: one trace and one program for each shape of batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bigtrain.cutting.cut_points import crossing_values
from bigtrain.cutting.stage_program import StageProgram, make_stage_program
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.losses.loss import Loss
from bigtrain.tensors.cuda_program import cuda_program
from bigtrain.tensors.tree import map_tensors, tree_tensors
from bigtrain.tracing.module_state import check_closures
from bigtrain.tracing.records import ForwardTrace
from bigtrain.tracing.tracer import trace_forward
from bigtrain.tracing.watch import fake_twin

CallSite = tuple[str, int]
"""A call of a module: the module's name, and the number of the call among its calls, from 0."""


@dataclass(frozen=True)
class Numerics:
    """The settings that decide the dtypes of tensors in a forward pass."""

    double: bool = False
    """Whether parameters and inputs are float64."""
    autocast: bool = False
    """Whether the forward pass runs under autocast to bf16."""
    low: Callable[[nn.Module], Sequence[str]] | None = None
    """Returns the names of the parameters that layers have in bf16; None for none."""
    of_cuda: bool = False
    """Whether fake tensors are on the CPU and operations are those of CUDA; see `cuda_program`."""


MAX_TRACES = 4
"""The most traces that are cached. A cut needs two, for training and for evaluation."""


class TracedModel:
    """Traces a model on fake tensors, with one trace for each shape of micro-batch.

    Args:
        model: a model on any device (also meta); a copy on fake tensors is traced.
        loss: the loss, which decides which boundary tensors get a gradient.
        device: the device of the fake tensors.
        numerics: the settings that decide the dtypes.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, device: torch.device, numerics: Numerics
    ) -> None:
        self._loss, self._device, self._numerics = loss, device, numerics
        check_closures(model)
        self.shared = shared_storages(model)
        self.hooked = [name for name, p in model.named_parameters() if p._backward_hooks]
        self._shapes_seen: MicroBatch | None = None
        self.fake_model, self._mode = fake_twin(model, device, double=numerics.double)
        with self._mode:
            for name in numerics.low(self.fake_model) if numerics.low is not None else ():
                parameter = self.fake_model.get_parameter(name)
                parameter.data = parameter.data.to(torch.bfloat16)
        self._programs: dict[object, StageProgram] = {}
        self._traces: dict[object, tuple[ForwardTrace, MicroBatch]] = {}

    def trace(self, micro_batch: MicroBatch, *, training: bool) -> tuple[ForwardTrace, MicroBatch]:
        """Return the trace for a micro-batch of this shape, and its micro-batch of fake tensors.

        Args:
            micro_batch: a micro-batch, of which only shapes matter.
            training: whether the model is in training mode, with gradients.

        Raises:
            ConfigError: the model does not run on tensors without values.
        """
        self._shapes_seen = micro_batch.map(_without_numbers)
        key = (*_shapes(micro_batch), training)
        if key not in self._traces:
            while len(self._traces) >= MAX_TRACES:
                self._traces.pop(next(iter(self._traces)))
            self._traces[key] = self._trace(micro_batch, training)
        return self._traces[key]

    def _trace(self, micro_batch: MicroBatch, training: bool) -> tuple[ForwardTrace, MicroBatch]:  # noqa: FBT001
        self.fake_model.train(training)
        with self._mode:
            batch = micro_batch.fake(self._device, double=self._numerics.double)
            batch = replace(batch, count=max(1, batch.count))
        # The model may change the containers of its inputs, so it gets new ones.
        inputs = map_tensors(batch.inputs, lambda tensor: tensor)
        with torch.set_grad_enabled(training):
            recorded = trace_forward(
                self.fake_model, lambda m: m(inputs), self._mode, batch.inputs, self.autocast
            )
        return recorded, batch

    def program(
        self, micro_batch: MicroBatch, *, training: bool, places: Sequence[CallSite]
    ) -> StageProgram:
        """Return the program of the stages for micro-batches of this shape; it is cached.

        Args:
            micro_batch: a micro-batch, of which only shapes matter.
            training: see `trace`.
            places: the calls before which the model is cut, in order.

        Raises:
            ConfigError: with this shape, the model does not make the calls before which it is cut,
                or a cut is not legal.
        """
        key = (*_shapes(micro_batch), training, tuple(places))
        if key not in self._programs:
            recorded, batch = self.trace(micro_batch, training=training)
            calls = [_call_at(recorded, call, micro_batch) for call in places]
            with torch.enable_grad():  # the caller may be under `no_grad`
                trained = (
                    self._trained(recorded, batch, calls)
                    if training
                    else (frozenset(),) * len(calls)
                )
            self._programs[key] = make_stage_program(recorded, calls, trained)
        return self._programs[key]

    def uses(self, places: Sequence[CallSite]) -> dict[str, tuple[int, ...]]:
        """Return the stages that use each tensor in evaluation, for the shape of the last trace.

        Args:
            places: the calls before which the model is cut, in order.

        Raises:
            ConfigError: a cut is not legal in evaluation.
        """
        if self._shapes_seen is None:
            return {}
        return self.program(self._shapes_seen, training=False, places=places).used

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """A context for forward passes, with the autocast and the operations of `Numerics`."""
        low, kind = self._numerics.autocast, self._device.type
        with (
            cuda_program() if self._numerics.of_cuda else nullcontext(),
            torch.autocast(kind, dtype=torch.bfloat16) if low else nullcontext(),
        ):
            yield

    def _trained(
        self, recorded: ForwardTrace, batch: MicroBatch, calls: Sequence[int]
    ) -> tuple[frozenset[int], ...]:
        """Return for each cut the crossing values that get a gradient from the stages after it."""
        loss: Sequence[Tensor] | None = None
        if batch.targets is not None:  # without targets, all stages are in one graph, with no loss
            try:
                with self._mode:
                    loss = [self._loss(recorded.output, batch.targets, batch.count)]
            except Exception:  # noqa: BLE001 - a user's loss may need values, as CTC does
                # This loss runs only on real tensors, in the last stage. It may depend on any
                # output of the model. The gradient of an output that the loss does not use is zero.
                loss = tree_tensors(recorded.output)
        trained_values = []
        for call in calls:
            edges = {
                torch.autograd.graph.get_gradient_edge(recorded.values[value].tensor): value
                for value in crossing_values(recorded, call, calls)
                if recorded.values[value].tensor.requires_grad
            }
            trained_values.append(
                frozenset(edges.values() if loss is None else _reached(loss, edges))
            )
        return tuple(trained_values)


def shared_storages(model: nn.Module) -> list[tuple[str, str]]:
    """Return pairs of names of parameters and buffers whose memory overlaps.

    Different names of one tensor object are no pair.
    """
    ranges_of: dict[int, list[tuple[int, int, str]]] = {}
    pairs = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout != torch.strided or not tensor.numel():
            continue
        size = tensor.element_size()
        extent = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        start = int(tensor.storage_offset()) * size
        stop = start + (int(extent) + 1) * size
        others = ranges_of.setdefault(tensor.untyped_storage()._cdata, [])
        pairs += [(other_name, name) for a, b, other_name in others if a < stop and start < b]
        others.append((start, stop, name))
    return pairs


def _call_at(recorded: ForwardTrace, call_site: CallSite, micro_batch: MicroBatch) -> int:
    for index, call in enumerate(recorded.calls):
        if (call.name, call.number) == call_site:
            return index
    shapes = ", ".join(str(tuple(t.shape)) for t in tree_tensors(micro_batch.inputs))
    raise ConfigError(
        f"strategy.cut: with inputs of {shapes} the model does not call {call_site[0]!r}, where it "
        "is cut. Name modules in strategy.cut.at that every batch calls."
    )


def _reached(ends: Sequence[Tensor], edges: Mapping[Any, int]) -> set[int]:
    """Return the values that the autograd graph of `ends` reaches directly.

    Values that are reached only through another value's edge are left out.

    Args:
        ends: the tensors from which the graph is followed.
        edges: the indices of the values, by gradient edge.
    """
    value_at = {(edge.node, edge.output_nr): value for edge, value in edges.items()}
    reached_values: set[int] = set()
    pending: list[Any] = []
    for end in ends:
        if end.requires_grad:
            edge = torch.autograd.graph.get_gradient_edge(end)
            key = edge.node, edge.output_nr
            if key in value_at:  # the value itself is returned
                reached_values.add(value_at[key])
            else:
                pending.append(edge.node)
    visited = set(pending)
    while pending:
        for node, number in pending.pop().next_functions:
            if (node, number) in value_at:
                reached_values.add(value_at[node, number])
            elif node is not None and node not in visited:
                visited.add(node)
                pending.append(node)
    return reached_values


def _without_numbers(tensor: Tensor) -> Tensor:
    # The batch is on meta, so that the shapes that are saved between steps keep no memory alive.
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _shapes(micro_batch: MicroBatch) -> tuple[object, object]:
    return _signature(micro_batch.inputs), _signature(micro_batch.targets)


def _signature(structure: Any) -> object:
    shapes: list[object] = []

    def note(tensor: Tensor) -> None:
        shapes.append((tuple(tensor.shape), tensor.stride(), tensor.dtype))

    return repr((map_tensors(structure, note), shapes))
