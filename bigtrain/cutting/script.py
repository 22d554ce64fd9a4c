"""What every stage does in a forward pass of one shape, so that all ranks count the same way.

The spine of the cuts is run by every stage. Along it *events* are counted: the beginning of each
call that its code makes, and each function of torch that gives it tensors. A tensor's *mark* is
(event, place in the result); a cut stands before an event. Both are the same on all ranks, since
they all run the same code over the same shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bigtrain.cutting.points import Spine, crossing_values, visible
from bigtrain.cutting.structure import map_tensors
from bigtrain.cutting.trace import Call, Trace
from bigtrain.errors import ConfigError

Mark = tuple[int, int]


@dataclass(frozen=True)
class Wire:
    """One tensor that crosses a cut."""

    mark: Mark
    meta: Tensor
    """On the meta device: shape, stride, type; it requires a gradient where one comes back."""
    order: tuple[int, ...]
    """Its dims from the outermost in memory to the innermost: it is sent in this order."""

    @classmethod
    def of(cls, mark: Mark, tensor: Tensor, *, trained: bool) -> Wire:
        """The wire of a fake tensor."""
        order = tuple(sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim]))
        meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").requires_grad_(trained)
        return cls(mark, meta, order)

    def pack(self, tensor: Tensor) -> Tensor:
        """As it is sent: contiguous."""
        return tensor.permute(self.order).contiguous()

    def unpack(self, tensor: Tensor) -> Tensor:
        """As it was, strides included; a new tensor object on the same memory."""
        back = [self.order.index(dim) for dim in range(len(self.order))]
        return tensor.permute(back)

    @property
    def sent(self) -> Tensor:
        """Shape and type of what is sent, on the meta device."""
        shape = [self.meta.shape[dim] for dim in self.order]
        empty = torch.empty(shape, dtype=self.meta.dtype, device="meta")
        return empty.requires_grad_(self.meta.requires_grad)


@dataclass(frozen=True)
class Result:
    """What a call returns where it is not run: metas in the place of tensors."""

    template: Any
    marks: tuple[Mark | None, ...]
    """For each tensor: None, it is new; or the mark of the object that is handed on."""


@dataclass(frozen=True)
class Script:
    """The cuts of one forward pass."""

    cuts: tuple[int, ...]
    """The events before which they stand."""
    wires: tuple[tuple[Wire, ...], ...]
    """For each cut."""
    results: dict[int, Result]
    """By event: of each call of the spine's code that is not of the spine itself."""
    kept: frozenset[Mark]
    """Marks that are asked for later."""


def script_of(trace: Trace, calls: Sequence[int], trained: frozenset[int]) -> Script:
    """Write down what the stages do.

    Args:
        trace: of a forward pass.
        calls: the calls before which the cuts stand, in order.
        trained: values to which a gradient comes back.

    Raises:
        ConfigError: a cut that is legal alone is not with the others.
    """
    spine = Spine(trace, calls)
    shown, given = visible(trace)
    events, marks, starts = _count(trace, spine)
    wires = []
    for call in calls:
        found = []
        for value in crossing_values(trace, call, calls):
            if value not in marks or not spine.sees(value, shown, given):
                raise ConfigError(
                    f"strategy.cut: no cut can stand before {trace.calls[call].name!r} together "
                    "with the others. Name other places in strategy.cut.at."
                )
            tensor = trace.values[value].tensor
            found.append(Wire.of(marks[value], tensor, trained=value in trained))
        wires.append(tuple(found))
    results = {
        event: _result(trace, trace.calls[call], marks, event) for event, call in events.items()
    }
    kept = {wire.mark for cut in wires for wire in cut}
    kept |= {mark for result in results.values() for mark in result.marks if mark is not None}
    return Script(tuple(starts[call] for call in calls), tuple(wires), results, frozenset(kept))


def _count(trace: Trace, spine: Spine) -> tuple[dict[int, int], dict[int, Mark], dict[int, int]]:
    """(event -> call outside the spine), (value -> its first mark), (call -> its event)."""
    units: dict[int, int] = {}
    starts: dict[int, int] = {}
    marks: dict[int, Mark] = {}
    event = 0
    for frame, call, values in trace.events:
        if frame < 0 and call < 0:
            continue
        if not spine.has(frame):
            continue
        if call >= 0:
            starts[call] = event
            if not spine.has(call):
                units[event] = call
                for place, value in enumerate(trace.calls[call].outputs):
                    marks.setdefault(value, (event, place))
        else:
            for place, value in enumerate(values):
                marks.setdefault(value, (event, place))
        event += 1
    return units, marks, starts


def _result(trace: Trace, call: Call, marks: dict[int, Mark], event: int) -> Result:
    handed: list[Mark | None] = []
    for value in call.outputs:
        mark = marks.get(value)
        handed.append(mark if mark is not None and mark[0] != event else None)
        if trace.values[value].root == "input":
            handed[-1] = (-1, _place(trace, value))
    return Result(map_tensors(call.result, _meta), tuple(handed))


def _place(trace: Trace, value: int) -> int:
    """The how manieth of the inputs a value is."""
    return sum(1 for other in trace.values[:value] if other.root == "input")


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
