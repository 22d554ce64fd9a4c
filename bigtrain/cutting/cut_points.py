"""Find where a traced model may be cut, and which tensors cross each cut.

A cut is before a call of a module, at any depth. The cut goes through the modules whose calls
enclose that call; every stage runs their code, the *outer code*. A cut is legal if the stages on
both sides can identify every tensor that is computed before the cut and used after it. They can
identify a tensor that the outer code gets, as the result of a call of a module or of a function of
torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from bigtrain.tracing.records import END_OF_PASS, ForwardTrace, TracedValue, UncuttableRange


@dataclass(frozen=True)
class CutPoint:
    """A legal cut."""

    call: int
    """The index, in the trace, of the call before which the cut is."""
    name: str
    number: int
    tick: int
    depth: int
    """The number of calls of modules that contain the cut: 1 before a child of the model."""
    crossing: tuple[int, ...]
    """The indices of the values that are computed before the cut and used after it."""
    nbytes: int
    """Bytes of these values."""


class OuterCalls:
    """The modules that cuts go through. Every stage runs their code.

    Args:
        trace: the trace of the model.
        calls: the indices of the calls before which the cuts are.
    """

    def __init__(self, trace: ForwardTrace, calls: Iterable[int]) -> None:
        self.names = {""}
        for call in calls:
            for index in ancestors(trace, call):
                self.names.add(trace.calls[index].name)
        self._trace = trace

    def contains(self, call: int) -> bool:
        """Whether a cut goes through the module of a call; true for -1, the caller of the model."""
        return call < 0 or self._trace.calls[call].name in self.names

    def reaches(
        self, value: int, frames_of: dict[int, list[int]], calls_of: dict[int, list[int]]
    ) -> bool:
        """Whether the outer code gets a value as the result of a torch function or of a whole call.

        Args:
            value: the index of the value.
            frames_of: the first result of `visible_values`.
            calls_of: the second result of `visible_values`.
        """
        if any(self.contains(frame) for frame in frames_of.get(value, ())):
            return True
        calls = self._trace.calls
        return any(
            not self.contains(call) and self.contains(calls[call].parent)
            for call in calls_of.get(value, ())
        )


def ancestors(trace: ForwardTrace, call: int) -> list[int]:
    """Return the indices of the calls that enclose a call, from the innermost to the model's."""
    enclosing = []
    call = trace.calls[call].parent
    while call >= 0:
        enclosing.append(call)
        call = trace.calls[call].parent
    return enclosing


def visible_values(trace: ForwardTrace) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Return two mappings from values: to frames, and to calls.

    The first has the frames whose code got the value from a torch function. The second has the
    calls that returned the value.
    """
    frames_of: dict[int, list[int]] = {}
    calls_of: dict[int, list[int]] = {}
    for frame, _, values in trace.events:
        for value in values:
            frames_of.setdefault(value, []).append(frame)
    for index, call in enumerate(trace.calls):
        for value in call.outputs:
            calls_of.setdefault(value, []).append(index)
    return frames_of, calls_of


class KnownValues:
    """The values that every stage can compute before a tick, so that they need not be sent.

    Args:
        trace: the trace of the model.
        outer: the modules that the cuts go through.
        tick: the tick of the cut.
    """

    def __init__(self, trace: ForwardTrace, outer: OuterCalls, tick: int) -> None:
        self._trace, self._outer, self._tick = trace, outer, tick
        self._known: dict[int, bool] = {}

    def has(self, value: int) -> bool:
        """Whether the outer code computes a value from inputs and constants alone."""
        if value not in self._known:
            self._known[value] = True  # ends the recursion: a changed value is its own source
            self._known[value] = self._computed(value)
        return self._known[value]

    def _computed(self, value: int) -> bool:
        traced = self._trace.values[value]
        if not traced.root and not (traced.known and self._outer.contains(traced.frame)):
            return False
        if traced.root not in ("", "input", "constant"):
            return False
        return all(self.has(source) for source in traced.sources) and all(
            self._outer.contains(write.frame)
            and not write.random
            and all(self.has(source) for source in write.sources)
            for write in self._trace.writes.get(storage_id(traced), ())
            if write.tick <= self._tick
        )


def storage_id(value: TracedValue) -> int:
    """Return the key of the storage of a value in the trace."""
    return int(value.tensor.untyped_storage()._cdata)


def values_to_send(
    trace: ForwardTrace, outer: OuterCalls, live: Iterable[int], tick: int
) -> list[int]:
    """Return the indices of the values that have to be sent over a cut.

    Args:
        trace: the trace of the model.
        outer: the modules that the cuts go through.
        live: the indices of the values that are used after the cut.
        tick: the tick of the cut.
    """
    known = KnownValues(trace, outer, tick)
    return sorted(
        value
        for value in live
        if trace.values[value].root in ("", "input") and not known.has(value)
    )


def crossing_values(trace: ForwardTrace, call: int, calls: Iterable[int]) -> list[int]:
    """Return the values that cross the cut before one call, if cuts are before all of `calls`."""
    tick = trace.calls[call].begin
    return values_to_send(trace, OuterCalls(trace, calls), live_values(trace, tick), tick)


def live_values(trace: ForwardTrace, tick: int) -> list[int]:
    """Return the indices of the values that exist at a tick and are used after it."""
    return [
        index
        for index, value in enumerate(trace.values)
        if value.born <= tick and value.uses and max(value.uses) > tick
    ]


def legal_points(trace: ForwardTrace) -> tuple[list[CutPoint], dict[str, str]]:
    """Return the legal cuts in the order of execution, and by module name why others are refused.

    If nothing is computed between several legal cuts (before a block, and before its first layer),
    only the outermost cut is returned.
    """
    rules = CutRules(trace)
    work = sorted(cost.tick for cost in trace.costs)
    points: list[CutPoint] = []
    refused: dict[str, str] = {}
    num_done, done_before = 0, -1
    alive = _LiveValues(trace)
    for index, call in enumerate(trace.calls[1:], start=1):
        while num_done < len(work) and work[num_done] < call.begin:
            num_done += 1
        if num_done in (0, done_before):  # nothing is computed since the previous legal cut
            continue
        outer = OuterCalls(trace, [index])
        values = values_to_send(trace, outer, alive.at(call.begin), call.begin)
        reason = rules.objection(index, outer, values)
        if reason:
            refused.setdefault(call.name, reason)
            continue
        done_before = num_done
        depth = len(ancestors(trace, index))
        nbytes = sum(_nbytes(trace, value) for value in values)
        points.append(
            CutPoint(index, call.name, call.number, call.begin, depth, tuple(values), nbytes)
        )
    return points, refused


class CutRules:
    """Finds the reasons against cuts of a trace.

    Args:
        trace: the trace of the model.
    """

    def __init__(self, trace: ForwardTrace) -> None:
        self._trace = trace
        self.frames_of, self.calls_of = visible_values(trace)
        self._last = {storage: writes[-1].tick for storage, writes in trace.writes.items()}
        self._whole = [*trace.whole, *_changed_roots(trace)]

    def objection(self, call: int, outer: OuterCalls, values: Iterable[int]) -> str:
        """Return the reason against a cut before a call; "" if the cut is legal.

        Args:
            call: the index of the call.
            outer: the modules that the cuts go through.
            values: the values that cross the cut.
        """
        tick = self._trace.calls[call].begin
        around = ancestors(self._trace, call)
        for index in around:
            if index in self._trace.sealed:
                return self._trace.sealed[index]
        for index in (call, *around):
            if index in self._trace.enclosed:
                return self._trace.enclosed[index]
        for value in values:
            reason = self._unsendable(value, outer, call)
            if reason:
                return reason
        for backward_tick, frame in self._trace.backward:
            if backward_tick <= tick and outer.contains(frame):
                return "code that every stage runs asks for a gradient before it"
        for uncuttable in self._whole:
            if uncuttable.first <= tick < uncuttable.last:
                return uncuttable.why
        return ""

    def _unsendable(self, value: int, outer: OuterCalls, call: int) -> str:
        tick = self._trace.calls[call].begin
        traced = self._trace.values[value]
        tensor = traced.tensor
        kind = f"{tuple(tensor.shape)} of {tensor.dtype}"
        if traced.root == "input":
            return f"the input {kind} is changed in place before it, and used after it"
        if not outer.reaches(value, self.frames_of, self.calls_of):
            return (
                f"a tensor {kind} that {self._origin(value)} is passed on past it, but not by "
                "arguments and results: by an attribute, or by an object in which layers collect "
                "tensors. Let the layer return the tensor, or do without it"
            )
        if tensor.layout != torch.strided or tensor.is_quantized:
            return f"a tensor of {tensor.layout} would have to be sent"
        if self._last.get(storage_id(traced), -1) > tick:
            return "a tensor from before it is changed in place after it"
        return ""

    def _origin(self, value: int) -> str:
        """Return words for a message: the module that returns or makes a tensor."""
        sources = [call for call in self.calls_of.get(value, ()) if self._trace.calls[call].name]
        if sources:
            return f"{self._trace.calls[sources[0]].name!r} returns"
        name = self._trace.calls[max(0, self._trace.values[value].frame)].name
        return f"{name!r} makes" if name else "the model itself makes"


def _nbytes(trace: ForwardTrace, value: int) -> int:
    tensor = trace.values[value].tensor
    return tensor.numel() * tensor.element_size()


def _changed_roots(trace: ForwardTrace) -> list[UncuttableRange]:
    """Return the ranges between first and last use of parameters, buffers and constants.

    Only those that the forward pass changes in place are included.
    """
    names: dict[int, str] = {}
    uses: dict[int, list[int]] = {}
    for value in trace.values:
        storage = storage_id(value)
        if storage in trace.writes:
            uses.setdefault(storage, []).extend(use for use in value.uses if use < END_OF_PASS)
            if value.root in ("parameter", "buffer", "constant"):
                names[storage] = f"the {value.root} {value.name!r}" if value.name else "a tensor"
    return [
        UncuttableRange(
            min(uses[s]), max(uses[s]), f"{name} is used before and after it, and changed"
        )
        for s, name in names.items()
        if uses[s]
    ]


class _LiveValues:
    """Finds the values that exist at a tick and are used later, for increasing ticks."""

    def __init__(self, trace: ForwardTrace) -> None:
        self._births = sorted(
            (value.born, index)
            for index, value in enumerate(trace.values)
            if value.root in ("", "input") and value.uses
        )
        self._last = {i: max(v.uses) for i, v in enumerate(trace.values) if v.uses}
        self._next = 0
        self._live: set[int] = set()

    def at(self, tick: int) -> list[int]:
        while self._next < len(self._births) and self._births[self._next][0] <= tick:
            self._live.add(self._births[self._next][1])
            self._next += 1
        self._live = {value for value in self._live if self._last[value] > tick}
        return list(self._live)
