"""The lifetimes of tensor storages as data: their kinds, and the peak.

A measurement (on real tensors) and a prediction (on fake tensors) both give a `Timeline`, so that
the two can be compared. Bytes are per rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate
from typing import Literal, NamedTuple

MemoryKind = Literal[
    "parameters", "frozen", "gradients", "optimizer", "activations", "buffers", "temporary"
]
Phase = Literal["build", "forward", "backward", "step", "evaluate", "save"]


@dataclass(frozen=True)
class Breakdown:
    """Bytes by kind at one moment, per rank."""

    parameters: int = 0
    """Trained parameters, and whole copies of sharded parameters while a module computes."""
    frozen: int = 0
    """Frozen parameters, which have no gradients and no optimizer state."""
    gradients: int = 0
    optimizer: int = 0
    """The state of the optimizer."""
    activations: int = 0
    """Tensors saved for the backward pass, and the batch itself."""
    buffers: int = 0
    """The model's buffers, and memory that outlives a step: communication buckets and caches."""
    temporary: int = 0
    """Everything else: workspaces, intermediate results, gradients of activations."""

    @property
    def total(self) -> int:
        """The sum of the parts, in bytes."""
        return sum(asdict(self).values())

    def by_kind(self) -> dict[str, int]:
        """Return the parts, in the order of `MEMORY_KINDS`; `frozen` only if it is not zero.

        Files and tables of runs without frozen parameters have no such part.
        """
        parts: dict[str, int] = asdict(self)
        return {kind: size for kind, size in parts.items() if size or kind != "frozen"}

    def plus(self, other: Breakdown) -> Breakdown:
        """Return the sum of two breakdowns, part by part."""
        return Breakdown(*(getattr(self, kind) + getattr(other, kind) for kind in MEMORY_KINDS))


MEMORY_KINDS: tuple[MemoryKind, ...] = tuple(f.name for f in fields(Breakdown))  # type: ignore[misc]


def kinds_in(breakdowns: Iterable[Mapping[str, int] | None]) -> list[MemoryKind]:
    """Return the kinds that a table of breakdowns shows.

    They are all of `MEMORY_KINDS`, but `frozen` only if it is not zero in some breakdown.
    """
    has_frozen = any(parts and parts.get("frozen") for parts in breakdowns)
    return [kind for kind in MEMORY_KINDS if has_frozen or kind != "frozen"]


@dataclass(frozen=True)
class Peak:
    """The moment of a run, or of its prediction, at which one rank has the most bytes allocated."""

    phase: Phase
    breakdown: Breakdown

    @property
    def bytes(self) -> int:
        """The peak in bytes: the sum of its parts."""
        return self.breakdown.total


class Span(NamedTuple):
    """One storage, alive at the clock ticks `birth <= t < death`.

    A named tuple, because it is cheap and a forecast makes millions.
    """

    nbytes: int
    kind: MemoryKind
    birth: int
    death: int


@dataclass(frozen=True)
class BlockTicks:
    """The parameters of a block or another part of a model, and the ticks of its two passes."""

    shapes: tuple[tuple[int, ...], ...]
    """The shape of each parameter."""
    trained: tuple[bool, ...]
    forward: tuple[int, int]
    """The clock ticks at which the part's forward pass begins and ends."""
    backward: tuple[int, int]
    """The clock ticks at which the gradients of the part's outputs and of its inputs are
    computed."""
    packed: tuple[bool, ...] = ()
    """For each parameter, whether it consists of bytes (weights in 4 bits), whose size does not
    depend on the precision; empty if no parameter does."""
    left_out: tuple[bool, ...] = ()
    """For each parameter, whether it is frozen only because the loss does not depend on it; empty
    if no parameter is."""
    place: int = 0
    """The index of a block among the model's blocks, in the order of the modules."""
    name: str = ""
    """The name of a block in the model; empty for other parts of the model."""

    def widths(self, trained: int, frozen: int) -> tuple[int, ...]:
        """Return the bytes of an element of each parameter; 1 for a packed parameter.

        Args:
            trained: bytes of an element of a parameter that is trained or left out.
            frozen: bytes of an element of any other parameter that is not packed.
        """
        none = (False,) * len(self.shapes)
        every = zip(self.packed or none, self.left_out or none, self.trained, strict=True)
        return tuple(
            1 if is_packed else trained if is_trained or is_left_out else frozen
            for is_packed, is_left_out, is_trained in every
        )


@dataclass(frozen=True)
class MemoryCurve:
    """Memory over the time of one step, reduced to few points for a plot."""

    seconds: tuple[float, ...]
    """The moments, in seconds after the step began. Tracking makes the step slower than others."""
    parts: dict[MemoryKind, tuple[int, ...]]
    """Bytes of each kind at each of these moments."""
    phases: tuple[tuple[float, Phase], ...]
    """The seconds at which each phase began, and the phase."""


@dataclass(frozen=True)
class Timeline:
    """Spans on one clock, and the tick at which each phase begins."""

    spans: tuple[Span, ...]
    phases: tuple[tuple[int, Phase], ...]

    def peak(self, persistent: Breakdown = Breakdown()) -> Peak:  # noqa: B008 - frozen
        """Return the peak.

        Args:
            persistent: bytes that are alive all the time in addition to the spans.
        """
        tick = self.highest_tick()
        parts = dict.fromkeys(MEMORY_KINDS, 0)
        for span in self.spans:
            if span.birth <= tick < span.death:
                parts[span.kind] += span.nbytes
        return Peak(self.phase_at(tick), persistent.plus(Breakdown(**parts)))

    def phase_at(self, tick: int) -> Phase:
        """Return the phase to which a tick belongs."""
        current = self.phases[0][1]
        for start, phase in self.phases:
            if start > tick:
                break
            current = phase
        return current

    def highest_tick(self) -> int:
        """Return the tick at which the most bytes are alive; the first of several."""
        highest, at = 0, self.phases[0][0]
        for tick, alive in zip(*self.steps(), strict=True):
            if alive > highest:
                highest, at = alive, tick
        return at

    def steps(self) -> tuple[list[int], list[int]]:
        """Return the ticks at which a storage is made or freed, and the bytes alive from each."""
        changes: dict[int, int] = {}
        for nbytes, _, birth, death in self.spans:
            changes[birth] = changes.get(birth, 0) + nbytes
            changes[death] = changes.get(death, 0) - nbytes
        ticks = sorted(changes)
        return ticks, list(accumulate(changes[tick] for tick in ticks))

    def curve(self, start: int, times: Sequence[float], points: int = 120) -> MemoryCurve:
        """Return the bytes alive from a tick on, reduced to the highest value of each interval.

        Args:
            start: the tick at which the step begins.
            times: the time of each tick, in seconds.
            points: the number of equal intervals of time into which the step is divided.
        """
        last = len(times) - 1
        start_time, duration = (
            times[min(start, last)],
            max(times[-1] - times[min(start, last)], 1e-9),
        )
        changes: dict[int, list[tuple[MemoryKind, int]]] = {}
        for span in self.spans:
            changes.setdefault(span.birth, []).append((span.kind, span.nbytes))
            changes.setdefault(span.death, []).append((span.kind, -span.nbytes))
        alive: dict[MemoryKind, int] = dict.fromkeys(MEMORY_KINDS, 0)
        highest_by_bin: dict[int, tuple[float, dict[MemoryKind, int]]] = {}
        for tick in sorted(changes):
            for kind, nbytes in changes[tick]:
                alive[kind] += nbytes
            if start <= tick <= last:
                second = times[tick] - start_time
                bin_index = min(points - 1, int(second / duration * points))
                if bin_index not in highest_by_bin or sum(alive.values()) > sum(
                    highest_by_bin[bin_index][1].values()
                ):
                    highest_by_bin[bin_index] = (second, dict(alive))
        moments = [highest_by_bin[bin_index] for bin_index in sorted(highest_by_bin)]
        return MemoryCurve(
            tuple(second for second, _ in moments),
            {kind: tuple(parts[kind] for _, parts in moments) for kind in MEMORY_KINDS},
            tuple((times[min(t, last)] - start_time, p) for t, p in self.phases if t >= start),
        )

    def only(self, *phases: Phase, drop: Sequence[MemoryKind] = ()) -> Timeline:
        """Return the timeline of the storages made in the given phases, without kinds in `drop`."""
        selected = tuple(
            s for s in self.spans if s.kind not in drop and self.phase_at(s.birth) in phases
        )
        return Timeline(selected, self.phases)


def scale_timeline(timeline: Timeline, factor: float) -> Timeline:
    """Multiply the bytes of every storage, except single numbers (at most 8 bytes), by a factor."""
    spans = (
        s._replace(nbytes=round(s.nbytes * factor)) if s.nbytes > 8 else s for s in timeline.spans
    )
    return replace(timeline, spans=tuple(spans))


def highest_peak(peaks: Iterable[Peak]) -> Peak:
    """Return the highest of one or more peaks."""
    return max(peaks, key=lambda peak: peak.bytes)
