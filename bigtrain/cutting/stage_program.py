"""What every stage does in a forward pass of one shape, so that all ranks count the same way.

The spine of the cuts is run by every stage. Along it *events* are counted: the beginning of each
call that its code makes, and each function of torch that gives it tensors. A tensor's *mark* is
(event, place in the result); a cut stands before an event. Both are the same on all ranks, since
they all run the same code over the same shapes.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bigtrain.cutting.cut_points import CutRules, OuterCalls, crossing_values, storage_id
from bigtrain.errors import ConfigError
from bigtrain.slicing.scatter_gather import Crossing, gather_boundary, scatter_boundary, sent_meta
from bigtrain.slicing.sliced_tensor import SlicedTensor, as_operand, whole_of
from bigtrain.tensors.tree import map_tensors, nested_tensors
from bigtrain.tracing.records import END_OF_PASS, ForwardTrace, ModuleCall

ValueId = tuple[int, int]
ExpectedEvent = tuple[object, ...]
"""Of a call its module's name, of a function the shapes of what it gives."""


@dataclass(frozen=True)
class BoundaryTensor:
    """One tensor that crosses a cut."""

    value_id: ValueId
    meta: Tensor
    """On the meta device: shape, stride, type; it requires a gradient where one comes back."""
    order: tuple[int, ...]
    """Its dims from the outermost in memory to the innermost: it is sent in this order."""

    @classmethod
    def of(cls, mark: ValueId, tensor: Tensor, *, trained: bool) -> BoundaryTensor:
        """The wire of a fake tensor."""
        order = tuple(sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim]))
        meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").requires_grad_(trained)
        return cls(mark, meta, order)

    def send(self, tensor: Tensor, crossing: Crossing) -> Tensor:
        """What a rank sends of it, contiguous."""
        lies = crossing.sequence_shard(self.meta)
        if lies is None:
            return scatter_boundary(self._pack(whole_of(tensor)), crossing.scatter_group)
        return self._pack(as_operand(tensor, *lies))

    def receive(self, sent: Tensor, crossing: Crossing) -> Tensor:
        """As it was, strides included; a new tensor object, on the same memory if it can be."""
        lies = crossing.sequence_shard(self.meta)
        if lies is None:
            return self._unpack(
                gather_boundary(sent, self._packed(self.meta.shape), crossing.scatter_group)
            )
        return SlicedTensor.of(self._unpack(sent), *lies)

    def sent_meta(self, crossing: Crossing) -> Tensor:
        """Shape and type of what a rank sends, on the meta device."""
        lies = crossing.sequence_shard(self.meta)
        if lies is None:
            return sent_meta(self._packed(self.meta.shape), crossing.scatter_group)
        slices, group = lies
        return self._packed(slices.local_shape(self.meta.shape, group.rank, group.size))

    def gathered_bytes(self, crossing: Crossing) -> int:
        """The bytes of all parts, where it is sent in parts that are gathered."""
        if crossing.sequence_shard(self.meta) is not None:
            return 0
        whole = self._packed(self.meta.shape)
        return 0 if sent_meta(whole, crossing.scatter_group) is whole else whole.nbytes

    def _pack(self, tensor: Tensor) -> Tensor:
        return tensor.resolve_conj().resolve_neg().permute(self.order).contiguous()

    def _unpack(self, tensor: Tensor) -> Tensor:
        back = [self.order.index(dim) for dim in range(len(self.order))]
        return tensor.permute(back)

    def _packed(self, shape: Sequence[int]) -> Tensor:
        packed = [shape[dim] for dim in self.order]
        empty = torch.empty(packed, dtype=self.meta.dtype, device="meta")
        return empty.requires_grad_(self.meta.requires_grad)


@dataclass(frozen=True)
class SkippedResult:
    """What a call returns where it is not run: metas in the place of tensors."""

    template: Any
    value_ids: tuple[ValueId | None, ...]
    """For each tensor: None, it is new; or the mark of the object that is handed on."""


@dataclass(frozen=True)
class StageProgram:
    """The cuts of one forward pass."""

    cuts: tuple[int, ...]
    """The events before which they stand."""
    boundaries: tuple[tuple[BoundaryTensor, ...], ...]
    """For each cut."""
    results: dict[int, SkippedResult]
    """By event: of each call of the spine's code that is not of the spine itself."""
    needed: frozenset[ValueId]
    """Marks that are asked for later."""
    expected: tuple[ExpectedEvent, ...]
    """What each event is: a stage that sees another one has taken another way than the rest."""
    copied: frozenset[int]
    """Which of the inputs the model changes: each stage needs its own."""
    random: bool
    """Whether the spine's code draws random numbers."""
    used: dict[str, tuple[int, ...]]
    """By parameter or buffer: the stages that use it."""

    def fingerprint(self) -> str:
        """The same for two scripts that fit each other, on whatever machine they were made."""
        wires = [
            [
                (w.value_id, tuple(w.meta.shape), w.meta.dtype, w.meta.requires_grad, w.order)
                for w in cut
            ]
            for cut in self.boundaries
        ]
        said = repr(
            (self.cuts, wires, self.expected, sorted(self.results), sorted(self.used.items()))
        )
        return hashlib.sha256(said.encode()).hexdigest()


def make_stage_program(
    trace: ForwardTrace, calls: Sequence[int], trained: Sequence[frozenset[int]]
) -> StageProgram:
    """Write down what the stages do.

    Args:
        trace: of a forward pass.
        calls: the calls before which the cuts stand, in order.
        trained: for each cut the values to which a gradient comes back.

    Raises:
        ConfigError: a cut that is legal alone is not with the others.
    """
    spine = OuterCalls(trace, calls)
    rules = CutRules(trace)
    events, marks, starts = _count(trace, spine)
    wires = []
    for call, trained_values in zip(calls, trained, strict=True):
        values = crossing_values(trace, call, calls)
        objection = rules.objection(call, spine, values)
        if not objection and not all(value in marks for value in values):
            objection = "a tensor cannot be named on both sides of it"
        if objection:
            raise ConfigError(
                f"strategy.cut: no cut can stand before {trace.calls[call].name!r}, in every "
                f"mode, with every shape and together with the others: {objection}. Name other "
                "places "
                "in strategy.cut.at."
            )
        wires.append(
            tuple(
                BoundaryTensor.of(
                    marks[value], trace.values[value].tensor, trained=value in trained_values
                )
                for value in values
            )
        )
    results = {
        event: _result(trace, trace.calls[call], marks, event) for event, call in events.items()
    }
    needed = {wire.value_id for cut in wires for wire in cut}
    needed |= {mark for result in results.values() for mark in result.value_ids if mark is not None}
    ticks = [trace.calls[call].begin for call in calls]
    inputs = [value for value in trace.values if value.root == "input"]
    return StageProgram(
        tuple(starts[call] for call in calls),
        tuple(wires),
        results,
        frozenset(needed),
        _expected(trace, spine),
        frozenset(i for i, value in enumerate(inputs) if storage_id(value) in trace.writes),
        any(spine.contains(frame) for frame in trace.random),
        stages_using(trace, ticks),
    )


def stages_using(trace: ForwardTrace, ticks: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """For each parameter and buffer that is used: the stages that do, for cuts at these ticks."""
    stages_of: dict[str, tuple[int, ...]] = {}
    for value in trace.values:
        if value.root in ("parameter", "buffer") and value.uses:
            used = {bisect_left(ticks, use) for use in value.uses if use < END_OF_PASS}
            stages_of[value.name] = tuple(sorted(used)) or (len(ticks),)
    return stages_of


def _expected(trace: ForwardTrace, spine: OuterCalls) -> tuple[ExpectedEvent, ...]:
    expected_events: list[ExpectedEvent] = []
    for frame, call, values in trace.events:
        if (frame < 0 and call < 0) or not spine.contains(frame):
            continue
        if call >= 0:
            expected_events.append((trace.calls[call].name,))
        else:
            expected_events.append(
                tuple(tuple(trace.values[value].tensor.shape) for value in values)
            )
    return tuple(expected_events)


def _count(
    trace: ForwardTrace, spine: OuterCalls
) -> tuple[dict[int, int], dict[int, ValueId], dict[int, int]]:
    """(event -> call outside the spine), (value -> its first mark), (call -> its event)."""
    call_of_event: dict[int, int] = {}
    starts: dict[int, int] = {}
    marks: dict[int, ValueId] = {}
    event = 0
    for frame, call, values in trace.events:
        if frame < 0 and call < 0:
            continue
        if not spine.contains(frame):
            continue
        if call >= 0:
            starts[call] = event
            if not spine.contains(call):
                call_of_event[event] = call
                for position, value in enumerate(trace.calls[call].outputs):
                    marks.setdefault(value, (event, position))
        else:
            for position, value in enumerate(values):
                marks.setdefault(value, (event, position))
        event += 1
    return call_of_event, marks, starts


def _result(
    trace: ForwardTrace, call: ModuleCall, marks: dict[int, ValueId], event: int
) -> SkippedResult:
    value_ids: list[ValueId | None] = []
    for position, value in enumerate(call.outputs):
        mark = marks.get(value)
        value_ids.append(mark if mark != (event, position) else None)
        if trace.values[value].root == "input":
            value_ids[-1] = (-1, _place(trace, value))
    template = map_tensors(call.result, _meta)
    if any(not tensor.is_meta for tensor in nested_tensors(template)):
        raise ConfigError(
            f"strategy.cut: what {call.name!r} returns holds tensors in objects within objects, "
            "where they cannot be replaced. Return tuples, mappings or dataclasses of tensors, "
            "or name places in strategy.cut.at around it."
        )
    return SkippedResult(template, tuple(value_ids))


def _place(trace: ForwardTrace, value: int) -> int:
    """The how manieth of the inputs a value is."""
    return sum(1 for other in trace.values[:value] if other.root == "input")


def _meta(tensor: Tensor) -> Tensor:
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return meta.requires_grad_(tensor.requires_grad)
