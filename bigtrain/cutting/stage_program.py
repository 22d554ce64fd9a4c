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

from bigtrain.cutting.cut_points import Rules, Spine, crossing_values, storage_of
from bigtrain.errors import ConfigError
from bigtrain.tensors.tree import hidden_tensors, map_tensors
from bigtrain.tracing.records import FOREVER, Call, Trace

Mark = tuple[int, int]
Expected = tuple[object, ...]
"""Of a call its module's name, of a function the shapes of what it gives."""


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
        return tensor.resolve_conj().resolve_neg().permute(self.order).contiguous()

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
    expected: tuple[Expected, ...]
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
                (w.mark, tuple(w.meta.shape), w.meta.dtype, w.meta.requires_grad, w.order)
                for w in cut
            ]
            for cut in self.wires
        ]
        said = repr(
            (self.cuts, wires, self.expected, sorted(self.results), sorted(self.used.items()))
        )
        return hashlib.sha256(said.encode()).hexdigest()


def script_of(trace: Trace, calls: Sequence[int], trained: Sequence[frozenset[int]]) -> Script:
    """Write down what the stages do.

    Args:
        trace: of a forward pass.
        calls: the calls before which the cuts stand, in order.
        trained: for each cut the values to which a gradient comes back.

    Raises:
        ConfigError: a cut that is legal alone is not with the others.
    """
    spine = Spine(trace, calls)
    rules = Rules(trace)
    events, marks, starts = _count(trace, spine)
    wires = []
    for call, wanted in zip(calls, trained, strict=True):
        values = crossing_values(trace, call, calls)
        why = rules.against(call, spine, values)
        if not why and not all(value in marks for value in values):
            why = "a tensor cannot be named on both sides of it"
        if why:
            raise ConfigError(
                f"strategy.cut: no cut can stand before {trace.calls[call].name!r}, in every "
                f"mode, with every shape and together with the others: {why}. Name other places "
                "in strategy.cut.at."
            )
        wires.append(
            tuple(
                Wire.of(marks[value], trace.values[value].tensor, trained=value in wanted)
                for value in values
            )
        )
    results = {
        event: _result(trace, trace.calls[call], marks, event) for event, call in events.items()
    }
    kept = {wire.mark for cut in wires for wire in cut}
    kept |= {mark for result in results.values() for mark in result.marks if mark is not None}
    ticks = [trace.calls[call].begin for call in calls]
    inputs = [value for value in trace.values if value.root == "input"]
    return Script(
        tuple(starts[call] for call in calls),
        tuple(wires),
        results,
        frozenset(kept),
        _expected(trace, spine),
        frozenset(i for i, value in enumerate(inputs) if storage_of(value) in trace.writes),
        any(spine.has(frame) for frame in trace.random),
        stages_using(trace, ticks),
    )


def stages_using(trace: Trace, ticks: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """For each parameter and buffer that is used: the stages that do, for cuts at these ticks."""
    found: dict[str, tuple[int, ...]] = {}
    for value in trace.values:
        if value.root in ("parameter", "buffer") and value.uses:
            used = {bisect_left(ticks, use) for use in value.uses if use < FOREVER}
            found[value.name] = tuple(sorted(used)) or (len(ticks),)
    return found


def _expected(trace: Trace, spine: Spine) -> tuple[Expected, ...]:
    found: list[Expected] = []
    for frame, call, values in trace.events:
        if (frame < 0 and call < 0) or not spine.has(frame):
            continue
        if call >= 0:
            found.append((trace.calls[call].name,))
        else:
            found.append(tuple(tuple(trace.values[value].tensor.shape) for value in values))
    return tuple(found)


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
    for place, value in enumerate(call.outputs):
        mark = marks.get(value)
        handed.append(mark if mark != (event, place) else None)
        if trace.values[value].root == "input":
            handed[-1] = (-1, _place(trace, value))
    template = map_tensors(call.result, _meta)
    if any(not tensor.is_meta for tensor in hidden_tensors(template)):
        raise ConfigError(
            f"strategy.cut: what {call.name!r} returns holds tensors in objects within objects, "
            "where they cannot be replaced. Return tuples, mappings or dataclasses of tensors, "
            "or name places in strategy.cut.at around it."
        )
    return Result(template, tuple(handed))


def _place(trace: Trace, value: int) -> int:
    """The how manieth of the inputs a value is."""
    return sum(1 for other in trace.values[:value] if other.root == "input")


def _meta(tensor: Tensor) -> Tensor:
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return meta.requires_grad_(tensor.requires_grad)
