"""A model in sections: what one micro-batch does to memory and time in each, forward and back.

A section is a block of the model, or what runs before the first block or after the last. It has a
window of clock ticks in the forward pass and one in the backward pass. What is recorded of it is
cut to its own windows, so that sections can be put together in another number and order than they
were recorded in: a block a hundred times, a stage's blocks alone, blocks that keep less.

Ticks are a section's own: 1 to `forward` in the forward pass, `forward + 1` to `forward + backward`
in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from bigtrain.memory.timeline import BlockTicks, MemoryKind, Span

UNTIL_OPTIMIZER = -1
"""The death of what stays until the optimizer has used it."""


@dataclass(frozen=True, slots=True)
class SectionWindow:
    """Ticks a < t <= b of the forward pass and c < t <= d of the backward pass."""

    a: int
    b: int
    c: int
    d: int

    @property
    def forward(self) -> int:
        """Ticks of the forward window."""
        return self.b - self.a

    @property
    def backward(self) -> int:
        """Ticks of the backward window."""
        return self.d - self.c


@dataclass(frozen=True)
class SectionTensor:
    """A parameter or buffer of a section."""

    name: str
    """Tells tied ones from others."""
    shape: tuple[int, ...]
    nbytes: int
    trained: bool = False
    kind: str = ""
    """Of its numbers."""
    is_buffer: bool = False
    state_bytes: int = 0
    """Of the optimizer, for this one."""
    state_scalars: int = 0
    """Bytes of those that are step counts and the like."""

    @property
    def numbers(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class OpLog:
    """The operations of a pass, one to a row."""

    flops: NDArray[np.float64]
    """In fp32 and fp64."""
    low_flops: NDArray[np.float64]
    """In bf16."""
    nbytes: NDArray[np.float64]
    """Read and written."""
    times: NDArray[np.float64]
    """How often each is done."""

    def scaled(self, factor: float) -> OpLog:
        """Operations that are larger or smaller."""
        flops, low_flops, nbytes = (a * factor for a in (self.flops, self.low_flops, self.nbytes))
        return OpLog(flops, low_flops, nbytes, self.times)


@dataclass(frozen=True, slots=True)
class DistantSpan:
    """A storage that is let go of neither in its own section nor in the next one."""

    nbytes: int
    kind: MemoryKind
    birth: int
    """In the ticks of its own section."""
    forward: bool
    """Whether it goes in the forward pass of the last section (what autocast has converted), or
    in the backward pass of the first (a tied parameter's gradient)."""
    after: int
    """Ticks after that pass of that section has begun."""


@dataclass(frozen=True)
class SectionPass:
    """One micro-batch through a section and back."""

    forward: int
    backward: int
    spans: tuple[Span, ...]
    ticks: BlockTicks | None
    """Of the block, in the section's own ticks; None of what is in no block."""
    far: tuple[DistantSpan, ...] = ()
    gradients: tuple[int, ...] = ()
    """Which spans are gradients, those that are added to others, too."""
    wires: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
    """Which of them are what the section before hands over, and the gradient that the section after
    hands back: at the ends of a stage they come from other ranks, and stay until the end."""

    @cached_property
    def saved(self) -> int:
        """Bytes that it keeps from its forward to its backward pass."""
        return sum(
            span.nbytes
            for span in self.spans
            if span.birth <= self.forward
            and span.death != UNTIL_OPTIMIZER
            and span.death > self.forward + 1
        )

    def at_stage_end(self, side: int) -> SectionPass:
        """Where a stage begins with it (0), or ends with it (1)."""
        found = list(self.spans)
        for place in self.wires[side]:
            found[place] = found[place]._replace(death=UNTIL_OPTIMIZER)
        return replace(self, spans=tuple(found))

    @cached_property
    def flat(self) -> tuple[Span, ...]:
        """What others see of it: what waits between its passes, and its gradients."""
        sums: dict[MemoryKind, int] = {}
        for span in self.spans:
            if span.birth <= self.forward and span.death > self.forward + 1:
                sums[span.kind] = sums.get(span.kind, 0) + span.nbytes
        begin, end = self.forward, self.forward + 2
        made = (self.spans[place] for place in self.gradients)
        return (*(Span(n, kind, begin, end) for kind, n in sums.items()), *made)


@dataclass(frozen=True)
class Section:
    """One block, or what is before or after all blocks."""

    name: str
    """Of the block; empty for what is in none."""
    passes: tuple[SectionPass, SectionPass]
    """The first micro-batch of a step, and every other one."""
    forward: OpLog
    backward: OpLog
    tensors: tuple[SectionTensor, ...]
    incoming: int = 0
    """Bytes of the tensors that a block is called with."""
    incoming_gradients: int = 0
    """Of those that a gradient goes back to."""


def mark_gradients(first: SectionPass, later: SectionPass) -> tuple[SectionPass, SectionPass]:
    """The passes of a section with their gradients told: by the first, in which they stay."""
    before, after = (
        sorted((span.birth, place, span.nbytes) for place, span in enumerate(one.spans))
        for one in (first, later)
    )
    made = [place for place, span in enumerate(first.spans) if span.kind == "gradients"]
    added = {place for place, span in enumerate(later.spans) if span.kind == "gradients"}
    if [size for *_, size in before] == [size for *_, size in after]:
        pairs = zip(before, after, strict=True)
        added |= {place for (_, was, _), (_, place, _) in pairs if was in made}
    return (
        replace(first, gradients=tuple(made)),
        replace(later, gradients=tuple(sorted(added))),
    )


def section_spans(
    spans: Iterable[Span], windows: Sequence[SectionWindow], place: int, stop: int
) -> SectionPass:
    """What of a timeline belongs to a section, in its own ticks.

    What comes from the section before belongs to it from the beginning of its window on, where it
    lets go of it. What goes to the section after belongs to it until its window ends.

    Args:
        spans: of one micro-batch.
        windows: of all sections.
        place: of the section.
        stop: the last tick of the micro-batch; what lives on stays for the optimizer.
    """
    w = windows[place]
    before = windows[place - 1].a if place else w.a
    behind = windows[place + 1].c if place + 1 < len(windows) else w.b
    found: list[Span] = []
    far: list[DistantSpan] = []
    wires: tuple[list[int], list[int]] = [], []
    for span in spans:
        birth, death = span.birth, span.death
        made = w.a < birth <= w.b or w.c < birth <= w.d
        if made and _is_far_behind(death, windows, place, stop):
            born = birth - w.a if birth <= w.b else w.forward + birth - w.c
            at = death - windows[0].c
            far.append(DistantSpan(span.nbytes, span.kind, born, forward=False, after=at))
            continue
        if w.a < birth <= w.b:  # made in the forward pass
            if _is_far_ahead(death, windows, place):
                at = death - windows[-1].a
                far.append(DistantSpan(span.nbytes, span.kind, birth - w.a, forward=True, after=at))
                continue
            if w.b + 1 < death <= w.c + 1:
                death = w.b + 1  # only the next section uses it
            elif not (death > stop and span.kind == "gradients"):
                death = min(death, w.d + 1)
        elif w.c < birth <= w.d:  # made in the backward pass
            if death <= stop or span.kind != "gradients":
                death = min(death, w.d + 1)
        elif death > stop:  # another section's gradients
            continue
        elif before < birth <= w.a and (w.a + 1 < death <= w.b + 1 or w.c + 1 < death <= w.d + 1):
            birth = w.a + 1
            wires[0].append(len(found))
        elif behind < birth <= w.c and w.c + 1 < death <= w.d + 1:
            birth = w.c + 1
            wires[1].append(len(found))
        else:
            continue
        found.append(_local(span.nbytes, span.kind, birth, death, w, stop))
    both = tuple(wires[0]), tuple(wires[1])
    return SectionPass(w.forward, w.backward, tuple(found), None, tuple(far), wires=both)


def _local(
    nbytes: int, kind: MemoryKind, birth: int, death: int, w: SectionWindow, stop: int
) -> Span:
    born = birth - w.a if birth <= w.b else w.forward + birth - w.c
    if death > stop and kind == "gradients":
        return Span(nbytes, kind, born, UNTIL_OPTIMIZER)
    died = death - w.a if death <= w.b + 1 else w.forward + death - w.c
    return Span(nbytes, kind, born, died)


def _is_far_ahead(death: int, windows: Sequence[SectionWindow], place: int) -> bool:
    """Whether it is let go of in the last section's forward pass, and not next door."""
    last = windows[-1]
    return place + 2 < len(windows) and last.a + 1 < death <= last.b + 1


def _is_far_behind(death: int, windows: Sequence[SectionWindow], place: int, stop: int) -> bool:
    first = windows[0]
    return place > 1 and first.c + 1 < death <= min(first.d + 1, stop)


DETAILED_ENDS = 2
"""Sections at either end of a row of equal ones that are laid out tick by tick."""


def concatenate_sections(
    sections: Sequence[Section], number: int, *, is_sent: bool = False
) -> tuple[tuple[Span, ...], list[BlockTicks | None], int, int]:
    """Sections one after another, there and back.

    In a row of equal sections each has a little more or less waiting beside it than the one before,
    always the same: the highest moment is in one near the ends. The others are there as those see
    them, which is much quicker.

    Args:
        sections: in the order of the forward pass.
        number: of the pass: 0 for the first micro-batch, 1 for every other.
        is_sent: whether what comes out goes to another rank.

    Returns:
        Spans and visits on one clock that begins with tick 1, the tick after which the backward
        pass begins, and the last tick.
    """
    passes = [section.passes[number] for section in sections]
    if sections[0].name:
        passes[0] = passes[0].at_stage_end(0)
    if is_sent:
        passes[-1] = passes[-1].at_stage_end(1)
    turn = sum(one.forward for one in passes)
    # Where a block comes first there is a tick after its way back, in which the rest is done.
    back = turn + sum(one.backward for one in passes)
    stop = back + (1 if sections[0].name else 0)
    spans: list[Span] = []
    visits: list[BlockTicks | None] = []
    there = 0
    last, first = turn - passes[-1].forward, stop - passes[0].backward
    for place, one in enumerate(passes):
        back -= one.backward
        ahead, behind = there, back - one.forward
        turned = one.forward + 1
        around = passes[max(0, place - DETAILED_ENDS) : place + DETAILED_ENDS + 1]
        is_inside = len(around) > 2 * DETAILED_ENDS and all(other is one for other in around)
        for nbytes, kind, birth, death in one.flat if is_inside else one.spans:
            birth += ahead if birth < turned else behind
            death = (
                stop + 1
                if death == UNTIL_OPTIMIZER
                else death + (ahead if death <= turned else behind)
            )
            if death > birth:  # otherwise its window is empty
                spans.append(Span(nbytes, kind, birth, death))
        for away in one.far:
            birth = away.birth + (ahead if away.birth <= one.forward else behind)
            begin, end = (last, turn) if away.forward else (first, stop)
            over = away.forward and is_sent  # the last section is another rank's
            death = end + 1 if over else min(begin + away.after, end + 1)
            if death > birth:
                spans.append(Span(away.nbytes, away.kind, birth, death))
        visits.append(None if one.ticks is None else _moved(one.ticks, ahead, behind, turn))
        there += one.forward
    return tuple(spans), visits, turn, stop


def _moved(visit: BlockTicks, ahead: int, behind: int, turn: int) -> BlockTicks:
    forward = visit.forward[0] + ahead, visit.forward[1] + ahead
    # The last of a stage begins with its backward pass, not before.
    backward = max(visit.backward[0] + behind, turn + 1), visit.backward[1] + behind
    return BlockTicks(visit.shapes, visit.trained, forward, backward)
