"""Where a traced model may be cut, and what would cross each cut.

A cut stands before a call of a module, at any depth. It is legal where everything that is
computed before it and used after it can be named on both sides: what a call returned, or what
a function of torch gave to the code of a module that the cut goes through.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bigtrain.cutting.trace import Trace


@dataclass(frozen=True)
class Point:
    """One legal cut."""

    call: int
    """It stands before this call of the trace."""
    name: str
    number: int
    tick: int
    depth: int
    """Calls that it goes through: 1 for a child of the model."""
    crossing: tuple[int, ...]
    """Values of the trace."""
    nbytes: int


class Spine:
    """The calls that cuts go through, of all cuts together: what every stage runs itself.

    Args:
        trace: of the model.
        calls: the calls before which cuts stand.
    """

    def __init__(self, trace: Trace, calls: Iterable[int]) -> None:
        self.names = {""}
        for call in calls:
            for index in ancestors(trace, call):
                self.names.add(trace.calls[index].name)
        self._trace = trace

    def has(self, call: int) -> bool:
        """Whether a call is gone through."""
        return call < 0 or self._trace.calls[call].name in self.names

    def sees(self, value: int, shown: dict[int, list[int]], given: dict[int, list[int]]) -> bool:
        """Whether a value reaches the code of the spine: a function's or a whole call's result."""
        if any(self.has(frame) for frame in shown.get(value, ())):
            return True
        calls = self._trace.calls
        return any(
            not self.has(call) and self.has(calls[call].parent) for call in given.get(value, ())
        )


def ancestors(trace: Trace, call: int) -> list[int]:
    """The calls around a call, innermost first, the model's own last."""
    found = []
    call = trace.calls[call].parent
    while call >= 0:
        found.append(call)
        call = trace.calls[call].parent
    return found


def visible(trace: Trace) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """For each value the frames whose code got it from a function; the calls that returned it."""
    shown: dict[int, list[int]] = {}
    given: dict[int, list[int]] = {}
    for frame, _, values in trace.events:
        for value in values:
            shown.setdefault(value, []).append(frame)
    for index, call in enumerate(trace.calls):
        for value in call.outputs:
            given.setdefault(value, []).append(index)
    return shown, given


def knows(trace: Trace, spine: Spine, value: int) -> bool:
    """Whether every stage computes a value itself: by the spine's code, from the inputs alone."""
    found = trace.values[value]
    if found.root == "input":
        return True
    if not found.known or found.root or not spine.has(found.frame):
        return False
    return all(knows(trace, spine, source) for source in found.sources)


def crossing(trace: Trace, spine: Spine, live: Iterable[int]) -> list[int]:
    """Of the values that are alive at a cut, those that must be sent over it."""
    return sorted(
        value for value in live if trace.values[value].root == "" and not knows(trace, spine, value)
    )


def crossing_values(trace: Trace, call: int, calls: Iterable[int]) -> list[int]:
    """What crosses the cut before one call, where cuts stand before all of `calls`."""
    tick = trace.calls[call].begin
    live = [
        index
        for index, value in enumerate(trace.values)
        if value.born <= tick and value.uses and max(value.uses) > tick
    ]
    return crossing(trace, Spine(trace, calls), live)


def legal_points(trace: Trace) -> tuple[list[Point], dict[str, str]]:
    """All legal cuts in the order of execution; and for each call before which none may stand, why.

    Of several at the same place (before a block, and before the block's first layer) the
    outermost is kept.
    """
    shown, given = visible(trace)
    mutated = _last_changes(trace)
    held = _changed_buffers(trace)
    work = sorted(cost.tick for cost in trace.costs)
    points: list[Point] = []
    refused: dict[str, str] = {}
    done, before = 0, -1
    alive = _Alive(trace)
    for index, call in enumerate(trace.calls[1:], start=1):
        while done < len(work) and work[done] < call.begin:
            done += 1
        if done == 0 or done == before:  # nothing is computed between this cut and the last
            continue
        spine = Spine(trace, [index])
        values = crossing(trace, spine, alive.at(call.begin))
        reason = _reason(trace, spine, values, call.begin, shown, given, mutated, held)
        if reason:
            refused.setdefault(call.name, reason)
            continue
        before = done
        depth = len(ancestors(trace, index))
        nbytes = sum(_nbytes(trace, value) for value in values)
        points.append(
            Point(index, call.name, call.number, call.begin, depth, tuple(values), nbytes)
        )
    return points, refused


def _reason(
    trace: Trace,
    spine: Spine,
    values: list[int],
    tick: int,
    shown: dict[int, list[int]],
    given: dict[int, list[int]],
    mutated: dict[int, int],
    held: dict[str, tuple[int, int]],
) -> str:
    for value in values:
        tensor = trace.values[value].tensor
        if not spine.sees(value, shown, given):
            kind = f"{tuple(tensor.shape)} of {tensor.dtype}"
            return f"a tensor {kind} is passed on past it otherwise than by arguments and results"
        if mutated.get(tensor.untyped_storage()._cdata, -1) > tick:
            return "a tensor from before it is changed in place after it"
    for name, (first, last) in held.items():
        if first < tick < last:
            return f"the buffer {name!r} is used before and after it, and changed"
    return ""


def _nbytes(trace: Trace, value: int) -> int:
    tensor = trace.values[value].tensor
    return tensor.numel() * tensor.element_size()


def _last_changes(trace: Trace) -> dict[int, int]:
    """By storage: the last tick at which anything in it is changed in place."""
    found: dict[int, int] = {}
    for value in trace.values:
        if value.changed >= 0:
            storage = value.tensor.untyped_storage()._cdata
            found[storage] = max(found.get(storage, -1), value.changed)
    return found


def _changed_buffers(trace: Trace) -> dict[str, tuple[int, int]]:
    """Buffers that the forward pass changes: their first and last use."""
    return {
        value.name: (min(value.uses), max(value.uses))
        for value in trace.values
        if value.root == "buffer" and value.changed >= 0 and value.uses
    }


class _Alive:
    """The computed values that exist at a tick and are used after it; asked in order of ticks."""

    def __init__(self, trace: Trace) -> None:
        self._births = sorted(
            (value.born, index)
            for index, value in enumerate(trace.values)
            if value.root == "" and value.uses
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
