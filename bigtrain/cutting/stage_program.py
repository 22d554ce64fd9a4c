"""The program of the stages for a forward pass of one shape; it is the same on all ranks.

Every stage runs the outer code, which is the code of the modules that cuts go through. In the outer
code, *events* are counted: the begin of each call of a module, and each function of torch that
returns tensors. The *value id* of a tensor is (event, position in the result of the event). The
position of a cut is the event before which it is. Events and value ids are equal on all ranks,
because all ranks run the same code on the same shapes.
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
"""(event, position in the result of the event); the event of a model's input is -1."""
ExpectedEvent = tuple[object, ...]
"""The name of the called module, or the shapes of the tensors that a torch function returns."""


@dataclass(frozen=True)
class BoundaryTensor:
    """A tensor that crosses a cut."""

    value_id: ValueId
    meta: Tensor
    """The tensor on the meta device; it requires a gradient if its gradient is sent back."""
    order: tuple[int, ...]
    """The tensor's dims from the outermost in memory to the innermost. Elements are sent in this
    order."""

    @classmethod
    def of(cls, value_id: ValueId, tensor: Tensor, *, trained: bool) -> BoundaryTensor:
        """Describe a fake tensor.

        Args:
            value_id: the value id of the tensor.
            tensor: the fake tensor.
            trained: whether a gradient of the tensor is sent back.
        """
        order = tuple(sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim]))
        meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").requires_grad_(trained)
        return cls(value_id, meta, order)

    def send(self, tensor: Tensor, crossing: Crossing) -> Tensor:
        """Return the part of the tensor that this rank sends, contiguous."""
        lies = crossing.sequence_shard(self.meta)
        if lies is None:
            return scatter_boundary(self._pack(whole_of(tensor)), crossing.scatter_group)
        return self._pack(as_operand(tensor, *lies))

    def receive(self, sent: Tensor, crossing: Crossing) -> Tensor:
        """Return the tensor in the stage, with its strides, from the part that this rank received.

        It is a new object, on the memory of `sent` if no parts are gathered.
        """
        lies = crossing.sequence_shard(self.meta)
        if lies is None:
            return self._unpack(
                gather_boundary(sent, self._packed(self.meta.shape), crossing.scatter_group)
            )
        return SlicedTensor.of(self._unpack(sent), *lies)

    def sent_meta(self, crossing: Crossing) -> Tensor:
        """Return the part that this rank sends, as a meta tensor."""
        lies = crossing.sequence_shard(self.meta)
        if lies is None:
            return sent_meta(self._packed(self.meta.shape), crossing.scatter_group)
        slices, group = lies
        return self._packed(slices.local_shape(self.meta.shape, group.rank, group.size))

    def gathered_bytes(self, crossing: Crossing) -> int:
        """Bytes of the whole tensor if it is sent in parts that are gathered; otherwise 0."""
        if crossing.sequence_shard(self.meta) is not None:
            return 0
        packed = self._packed(self.meta.shape)
        return 0 if sent_meta(packed, crossing.scatter_group) is packed else packed.nbytes

    def _pack(self, tensor: Tensor) -> Tensor:
        return tensor.resolve_conj().resolve_neg().permute(self.order).contiguous()

    def _unpack(self, tensor: Tensor) -> Tensor:
        inverse = [self.order.index(dim) for dim in range(len(self.order))]
        return tensor.permute(inverse)

    def _packed(self, shape: Sequence[int]) -> Tensor:
        packed = [shape[dim] for dim in self.order]
        empty = torch.empty(packed, dtype=self.meta.dtype, device="meta")
        return empty.requires_grad_(self.meta.requires_grad)


@dataclass(frozen=True)
class SkippedResult:
    """The result of a call that a stage does not run."""

    template: Any
    """The result with meta tensors in place of its tensors."""
    value_ids: tuple[ValueId | None, ...]
    """For each tensor, its value id if the tensor existed before; None for a new tensor."""


@dataclass(frozen=True)
class StageProgram:
    """The cuts of one forward pass."""

    cuts: tuple[int, ...]
    """The events before which the cuts are."""
    boundaries: tuple[tuple[BoundaryTensor, ...], ...]
    """The tensors that cross each cut."""
    results: dict[int, SkippedResult]
    """The results of the calls in the outer code to modules that no cut goes through, by event."""
    needed: frozenset[ValueId]
    """Value ids of tensors that are sent, or that a later call returns again."""
    expected: tuple[ExpectedEvent, ...]
    """All events in order. A stage in which another event occurs takes another path than the
    trace."""
    copied: frozenset[int]
    """Positions of the inputs that the model changes in place, so that each stage copies them."""
    random: bool
    """Whether the outer code draws random numbers."""
    used: dict[str, tuple[int, ...]]
    """The stages that use each parameter and buffer, by name."""

    def fingerprint(self) -> str:
        """Return a hash that is equal on all ranks if their programs fit each other."""
        boundaries = [
            [
                (t.value_id, tuple(t.meta.shape), t.meta.dtype, t.meta.requires_grad, t.order)
                for t in boundary
            ]
            for boundary in self.boundaries
        ]
        text = repr(
            (self.cuts, boundaries, self.expected, sorted(self.results), sorted(self.used.items()))
        )
        return hashlib.sha256(text.encode()).hexdigest()


def make_stage_program(
    trace: ForwardTrace, calls: Sequence[int], trained: Sequence[frozenset[int]]
) -> StageProgram:
    """Make the program of the stages.

    Args:
        trace: the trace of a forward pass.
        calls: the indices of the calls before which the cuts are, in order.
        trained: for each cut, the values that get a gradient from the stages after it.

    Raises:
        ConfigError: a cut is not legal in this trace, or not together with the other cuts.
    """
    outer = OuterCalls(trace, calls)
    rules = CutRules(trace)
    events, value_ids, starts = _count(trace, outer)
    boundaries = []
    for call, trained_values in zip(calls, trained, strict=True):
        values = crossing_values(trace, call, calls)
        objection = rules.objection(call, outer, values)
        if not objection and not all(value in value_ids for value in values):
            objection = "a tensor has no name on both sides of it"
        if objection:
            raise ConfigError(
                f"strategy.cut: the model cannot be cut before {trace.calls[call].name!r} in "
                f"every mode, with every shape and together with the other cuts: {objection}. Name "
                "other places in strategy.cut.at."
            )
        boundaries.append(
            tuple(
                BoundaryTensor.of(
                    value_ids[value], trace.values[value].tensor, trained=value in trained_values
                )
                for value in values
            )
        )
    results = {
        event: _result(trace, trace.calls[call], value_ids, event) for event, call in events.items()
    }
    needed = {tensor.value_id for boundary in boundaries for tensor in boundary}
    needed |= {
        value_id
        for result in results.values()
        for value_id in result.value_ids
        if value_id is not None
    }
    ticks = [trace.calls[call].begin for call in calls]
    inputs = [value for value in trace.values if value.root == "input"]
    return StageProgram(
        tuple(starts[call] for call in calls),
        tuple(boundaries),
        results,
        frozenset(needed),
        _expected(trace, outer),
        frozenset(i for i, value in enumerate(inputs) if storage_id(value) in trace.writes),
        any(outer.contains(frame) for frame in trace.random),
        stages_using(trace, ticks),
    )


def stages_using(trace: ForwardTrace, ticks: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the stages that use each parameter and buffer, by name, for cuts at these ticks."""
    stages_of: dict[str, tuple[int, ...]] = {}
    for value in trace.values:
        if value.root in ("parameter", "buffer") and value.uses:
            used = {bisect_left(ticks, use) for use in value.uses if use < END_OF_PASS}
            stages_of[value.name] = tuple(sorted(used)) or (len(ticks),)
    return stages_of


def _expected(trace: ForwardTrace, outer: OuterCalls) -> tuple[ExpectedEvent, ...]:
    expected_events: list[ExpectedEvent] = []
    for frame, call, values in trace.events:
        if (frame < 0 and call < 0) or not outer.contains(frame):
            continue
        if call >= 0:
            expected_events.append((trace.calls[call].name,))
        else:
            expected_events.append(
                tuple(tuple(trace.values[value].tensor.shape) for value in values)
            )
    return tuple(expected_events)


def _count(
    trace: ForwardTrace, outer: OuterCalls
) -> tuple[dict[int, int], dict[int, ValueId], dict[int, int]]:
    """Return three mappings: from events to calls, values to value ids, and calls to events.

    The first has the calls of modules that no cut goes through. The second has the first value id
    of each value.
    """
    call_of_event: dict[int, int] = {}
    starts: dict[int, int] = {}
    value_ids: dict[int, ValueId] = {}
    event = 0
    for frame, call, values in trace.events:
        if frame < 0 and call < 0:
            continue
        if not outer.contains(frame):
            continue
        if call >= 0:
            starts[call] = event
            if not outer.contains(call):
                call_of_event[event] = call
                for position, value in enumerate(trace.calls[call].outputs):
                    value_ids.setdefault(value, (event, position))
        else:
            for position, value in enumerate(values):
                value_ids.setdefault(value, (event, position))
        event += 1
    return call_of_event, value_ids, starts


def _result(
    trace: ForwardTrace, call: ModuleCall, value_ids: dict[int, ValueId], event: int
) -> SkippedResult:
    result_ids: list[ValueId | None] = []
    for position, value in enumerate(call.outputs):
        value_id = value_ids.get(value)
        result_ids.append(value_id if value_id != (event, position) else None)
        if trace.values[value].root == "input":
            result_ids[-1] = (-1, _input_position(trace, value))
    template = map_tensors(call.result, _meta)
    if any(not tensor.is_meta for tensor in nested_tensors(template)):
        raise ConfigError(
            f"strategy.cut: the result of {call.name!r} has tensors in objects within objects, "
            "where they cannot be replaced. Return tuples, mappings or dataclasses of tensors, "
            "or name places in strategy.cut.at around it."
        )
    return SkippedResult(template, tuple(result_ids))


def _input_position(trace: ForwardTrace, value: int) -> int:
    """Return the position of a value among the inputs."""
    return sum(1 for value_before in trace.values[:value] if value_before.root == "input")


def _meta(tensor: Tensor) -> Tensor:
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return meta.requires_grad_(tensor.requires_grad)
