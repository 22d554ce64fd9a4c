"""A model in sections: the memory and time of one micro-batch in each, forward and backward.

A section is a block of the model, or the part before the first block or after the last. It has a
window of clock ticks in the forward pass and one in the backward pass, or two if gradients of
inputs and of weights are computed in separate passes. Its record is cut to its windows, so sections
can be composed in another number and order than they were recorded: one block a hundred times, only
a stage's blocks, blocks under another policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bigtrain.memory.timeline import BlockTicks, MemoryKind, Phase, Span, Timeline
from bigtrain.slicing.exchange import TensorExchange
from bigtrain.slicing.scatter_gather import scattered_bytes

DETAILED_ENDS = 2
"""The number of sections at each end of a run of equal ones that are composed tick by tick."""


class Anchor(IntEnum):
    """The origin of the ticks of a birth or a death."""

    FORWARD = 0
    """The begin of the section's forward pass; the next ones likewise:"""
    INPUTS = 1
    """Its backward pass; where that is in two parts the one for the inputs' gradients."""
    WEIGHTS = 2
    """The part for the weights' gradients."""
    TURN = 3
    """The end of all forward passes."""
    END = 4
    """The end of the micro-batch."""
    OPTIMIZER = 5
    """The same, of what stays until the optimizer has used it."""
    FIRST = 6
    """The beginning of the first section's backward pass (a tied parameter's gradient)."""
    LAST = 7
    """The beginning of the last section's forward pass."""
    RETURN = 8
    """The end of the model's forward pass, before the loss: autocast frees its copies there."""


class Storage(NamedTuple):
    """One storage of a section, made in one of its windows. A tuple, as there are very many."""

    nbytes: int
    kind: MemoryKind
    window: Anchor
    """In which it is made."""
    birth: int
    """Ticks after that window has begun."""
    until: Anchor
    death: int
    """Ticks after that."""


class SectionWindow(NamedTuple):
    """Ticks begin < t <= end of one pass through a section."""

    begin: int
    end: int

    @property
    def length(self) -> int:
        """Ticks."""
        return self.end - self.begin

    def is_result(self, span: Span) -> bool:
        """Whether a storage is made in it."""
        return self.begin < span.birth <= self.end

    def frees(self, span: Span) -> bool:
        """Whether a storage is let go of in it."""
        return self.begin + 1 < span.death <= self.end + 1


Windows = tuple[SectionWindow, ...]
"""Of a section: forward and backward; or forward, for the inputs, for the weights."""


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
    """Bytes of those that are scalars, such as step counts."""

    @property
    def numbers(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
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
    products: NDArray[np.float64]
    """Of those that are matrix products the sizes, see `op_cost.ProductSize`: (operations, 4)."""

    def scaled(self, factor: float) -> OpLog:
        """Operations that are larger or smaller; the sizes of products stay."""
        flops, low_flops = self.flops * factor, self.low_flops * factor
        return replace(self, flops=flops, low_flops=low_flops, nbytes=self.nbytes * factor)


@dataclass(frozen=True)
class SectionPass:
    """One micro-batch through a section and back."""

    lengths: tuple[int, ...]
    """Ticks of its windows: see `Windows`."""
    storages: tuple[Storage, ...]
    ticks: BlockTicks | None = None
    """The ticks of the block, counted in the section from 1 to the sum of `lengths`; None outside
    of blocks."""
    gradients: tuple[int, ...] = ()
    """Which storages are gradients, those that are added to others, too."""
    wires: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
    """Which of them the section before hands over, and the gradient that the section after hands
    back: at the ends of a stage they come from other ranks, and stay until the end."""
    loss_ticks: int = 0
    """Of the last section's forward window those that come after the model's own pass."""

    @cached_property
    def saved(self) -> int:
        """Bytes that it keeps from its forward to its backward pass."""
        own = (Anchor.INPUTS, Anchor.WEIGHTS)
        return sum(s.nbytes for s in self.storages if not s.window and s.until in own)

    def at_stage_end(self, side: int, ranks: int) -> SectionPass:
        """The section at a stage's begin (0) or end (1), its boundary tensors scattered."""
        found = list(self.storages)
        for place in self.wires[side]:
            whole, sent = found[place], scattered_bytes(found[place].nbytes, ranks)
            found += [] if ranks == 1 else [whole]  # gathered tensors are freed as between blocks
            found[place] = whole._replace(nbytes=sent, until=Anchor.END, death=1)
        return replace(self, storages=tuple(found))

    @cached_property
    def flat(self) -> tuple[Storage, ...]:
        """Its effect on other sections: storages alive between its windows, or freed in theirs."""
        sums: dict[tuple[MemoryKind, Anchor, Anchor], int] = {}
        seen = [self.storages[place] for place in self.gradients]
        seen += [one for one in self.storages if one.until >= Anchor.FIRST]
        for one in self.storages:
            if one.window < one.until <= Anchor.WEIGHTS or one.until == Anchor.END:
                key = one.kind, one.window, one.until
                sums[key] = sums.get(key, 0) + one.nbytes
        for (kind, window, until), nbytes in sums.items():
            death = {Anchor.INPUTS: 2, Anchor.END: 1}.get(until) or self.lengths[until]
            seen.append(Storage(nbytes, kind, window, self.lengths[window], until, death))
        return tuple(seen)


PassPair = tuple[SectionPass, SectionPass]
"""The first micro-batch of a step, and every other one."""


@dataclass(frozen=True)
class Section:
    """One block, or the part before or after all blocks."""

    name: str
    """The name of the block; empty outside of blocks."""
    passes: PassPair
    forward: OpLog
    backward: OpLog
    tensors: tuple[SectionTensor, ...]
    incoming: int = 0
    """Bytes of the tensors that a block is called with."""
    incoming_gradients: int = 0
    """Of those that a gradient goes back to."""
    stretches: int = 0
    """Bytes of `incoming` that arrive as sequence shards: see `slicing.scatter_gather`."""
    slowdown: tuple[float, float] = (1.0, 1.0)
    """Measured seconds divided by the seconds at the device's rates, forward and backward."""
    exchanges: tuple[tuple[TensorExchange, ...], ...] = (), ()
    """Exchanges over the tp axis, forward and backward."""


def mark_gradients(first: SectionPass, later: SectionPass) -> PassPair:
    """The passes of a section with gradients marked; the first pass, which keeps them, tells."""
    near, others = (
        [(place, s) for place, s in enumerate(section_pass.storages) if s.until < Anchor.FIRST]
        for section_pass in (first, later)
    )
    first_order, later_order = (
        sorted((s.window, s.birth, place, s.nbytes) for place, s in every)
        for every in (near, others)
    )
    gradient_spans = [place for place, s in near if s.kind == "gradients"]
    later_gradients = {place for place, s in others if s.kind == "gradients"}
    if [size for *_, size in first_order] == [size for *_, size in later_order]:
        pairs = zip(first_order, later_order, strict=True)
        later_gradients |= {
            place for (*_, was, _), (*_, place, _) in pairs if was in gradient_spans
        }
    return (
        replace(first, gradients=tuple(gradient_spans)),
        replace(later, gradients=tuple(sorted(later_gradients))),
    )


def section_spans(
    spans: Sequence[Span],
    windows: Sequence[Windows],
    place: int,
    stop: int,
    returned: int | None = None,
) -> SectionPass:
    """The storages of a timeline that belong to a section.

    An output of the section before belongs to it from the begin of its window, if it frees it. Its
    own output belongs to it until its window ends.

    Args:
        spans: of one micro-batch.
        windows: of all sections.
        place: of the section.
        stop: the last tick of the micro-batch; what lives on stays for the optimizer.
        returned: the tick at which the model's own forward pass ends; None where nobody asks.
    """
    leaving = None
    if returned is not None:
        turn = windows[-1][0].end
        made = min((s.birth for s in spans if s.birth > returned), default=turn)
        leaving = returned, min(made, turn)
    kind = _Owner if len(windows[place]) == len(_WHOLE) else _SplitOwner
    owner = kind(windows, place, stop, leaving)
    storages: list[Storage] = []
    wires: tuple[list[int], list[int]] = [], []
    for span in spans:
        own_spans = owner.owned(span)
        if own_spans is not None:
            side = owner.side(span)
            if side is not None:
                wires[side].append(len(storages))
            storages.append(own_spans)
    gradients = (n for n, s in enumerate(storages) if s.until == Anchor.OPTIMIZER)
    lengths = tuple(window.length for window in windows[place])
    both = tuple(wires[0]), tuple(wires[1])
    is_last = place + 1 == len(windows) and returned is not None
    beyond = windows[-1][0].end - returned if is_last and returned is not None else 0
    return SectionPass(
        lengths, tuple(storages), gradients=tuple(gradients), wires=both, loss_ticks=beyond
    )


_WHOLE = (Anchor.FORWARD, Anchor.INPUTS)


class _Owner:
    """Selects the storages of a section from a timeline; the backward pass is whole.

    A storage that outlives its windows by a few ticks is ended with them. Copies of autocast are
    freed together after the model's forward pass, in an order without meaning.

    Args:
        windows: see `section_spans`.
        place: of the section.
        stop: see there.
        leaving: the end of the model's forward pass, and the next tick at which a storage is made;
            None if unknown.
    """

    def __init__(
        self,
        windows: Sequence[Windows],
        place: int,
        stop: int,
        leaving: tuple[int, int] | None = None,
    ) -> None:
        self._leaving = leaving
        self._own, self._all, self._place, self._stop = windows[place], windows, place, stop
        self._before = windows[place - 1] if place else None
        self._after = windows[place + 1] if place + 1 < len(windows) else None

    def owned(self, span: Span) -> Storage | None:
        """The storage in the section's ticks; None if it belongs to another section."""
        forward, backward = self._own
        born = Anchor(int(backward.is_result(span)))
        if forward.is_result(span) or backward.is_result(span):
            first, last = self._all[0][1], self._all[-1][0]
            if self._place > 1 and span.death <= self._stop and first.frees(span):
                return self._storage(span, born, Anchor.FIRST, span.death - first.begin)
            if not born and self._after and self._leaves(span):
                return self._storage(span, born, Anchor.RETURN, 1)
            if not born and self._place + 2 < len(self._all) and last.frees(span):
                return self._storage(span, born, Anchor.LAST, span.death - last.begin)
            if self._stays(span):
                return self._storage(span, born, Anchor.OPTIMIZER, 1)
            if not born and span.death <= backward.begin + 1:  # only the next section uses it
                death = min(span.death, forward.end + 1) - forward.begin
                return self._storage(span, born, Anchor.FORWARD, death)
            death = min(span.death, backward.end + 1) - backward.begin
            return self._storage(span, born, Anchor.INPUTS, death)
        side = self.side(span)
        if side is None:
            return None
        window = Anchor.FORWARD if forward.frees(span) else Anchor.INPUTS
        death = span.death - self._own[window].begin
        return Storage(span.nbytes, span.kind, Anchor(side), 1, window, death)

    def side(self, span: Span) -> int | None:
        """0 for inputs from the section before, 1 for gradients from the section after."""
        if span.death > self._stop or self._leaves(span):
            return None
        forward, backward = self._own
        freed = backward.frees(span)
        if self._before and self._before[0].begin < span.birth <= forward.begin:
            return 0 if freed or forward.frees(span) else None
        behind = self._after[1].begin if self._after else forward.end
        return 1 if freed and behind < span.birth <= backward.begin else None

    def _leaves(self, span: Span) -> bool:
        """Whether it goes when the model's own forward pass is over, before anything is made."""
        if self._leaving is None:
            return False
        returned, made = self._leaving
        return span.birth <= returned < span.death <= made

    def _stays(self, span: Span) -> bool:
        return span.death > self._stop and span.kind == "gradients"

    def _storage(self, span: Span, window: Anchor, until: Anchor, death: int) -> Storage:
        birth = span.birth - self._own[window].begin
        return Storage(span.nbytes, span.kind, window, birth, until, death)


class _SplitOwner(_Owner):
    """The same where the backward pass is in two parts; what lives on stays until the end."""

    def owned(self, span: Span) -> Storage | None:
        """See `_Owner.owned`."""
        forward, inputs, weights = self._own
        before, after = self._before, self._after
        if forward.is_result(span):
            return self._made_there(span)
        if inputs.is_result(span):
            if before is not None and _goes(span, before):
                return self._storage(span, Anchor.INPUTS, Anchor.INPUTS, inputs.length + 1)
            return self._storage(span, Anchor.INPUTS, *self._until(span))
        if weights.is_result(span):
            until = Anchor.WEIGHTS, min(span.death, weights.end + 1) - weights.begin
            if self._stays(span):
                until = Anchor.OPTIMIZER, 1
            return self._storage(span, Anchor.WEIGHTS, *until)
        arrived = (span.nbytes, span.kind)
        if span.birth <= forward.begin and (before is None or span.birth > before[0].begin):
            if span.death <= self._turn + 1:
                death = span.death - forward.begin
                if not forward.frees(span):
                    return None
                return Storage(*arrived, Anchor.FORWARD, 1, Anchor.FORWARD, death)
            is_own = _goes(span, self._own) or (before is None and span.death > self._stop)
            return Storage(*arrived, Anchor.FORWARD, 1, *self._until(span)) if is_own else None
        if after is not None and after[1].is_result(span) and _goes(span, self._own):
            # The gradient of an output.
            return Storage(*arrived, Anchor.INPUTS, 1, *self._until(span))
        return None

    def side(self, span: Span) -> int | None:
        """See `_Owner.side`; 0 also of the gradient that goes back to the section before."""
        forward, inputs, _ = self._own
        before, after = self._before, self._after
        if before is not None and (
            _goes(span, before)
            if inputs.is_result(span)
            else before[0].begin < span.birth <= forward.begin and _goes(span, self._own)
        ):
            return 0
        return 1 if after is not None and after[1].is_result(span) else None

    @property
    def _turn(self) -> int:
        return self._all[-1][0].end

    def _made_there(self, span: Span) -> Storage:
        forward, after = self._own[0], self._after
        until = self._until(span)
        if span.death <= forward.end + 1:
            until = Anchor.FORWARD, span.death - forward.begin
        elif after is not None and (span.death <= after[0].end + 1 or _goes(span, after)):
            until = Anchor.FORWARD, forward.length + 1  # it belongs to the section after from there
        elif span.death <= self._turn + 1:
            until = Anchor.TURN, 1
        return self._storage(span, Anchor.FORWARD, *until)

    def _until(self, span: Span) -> tuple[Anchor, int]:
        forward, inputs, weights = self._own
        if self._stays(span):
            return Anchor.OPTIMIZER, 1
        if span.death == inputs.begin + 1:
            return Anchor.FORWARD, forward.length + 1
        if inputs.frees(span):
            return Anchor.INPUTS, span.death - inputs.begin
        if weights.frees(span):
            return Anchor.WEIGHTS, span.death - weights.begin
        return Anchor.END, 1


def _goes(span: Span, windows: Windows) -> bool:
    """Whether a storage is freed in the backward pass of a section, in either part."""
    return any(window.frees(span) for window in windows[1:])


def concatenate_sections(
    passes: Sequence[SectionPass], *, begins: bool, is_sent: bool, dealt: tuple[int, int] = (1, 1)
) -> tuple[Timeline, list[BlockTicks], int]:
    """Compose sections one after another, forward and backward.

    In a run of equal sections, the live bytes outside of each grow or shrink by a constant from one
    to the next, so the peak is near the ends of the run. Only those are composed tick by tick,
    which is much quicker; of the others only the effect on them is.

    Args:
        passes: in the order of the forward pass.
        begins: whether inputs come from another rank.
        is_sent: whether outputs go to another rank.
        dealt: see `compose_profile`.

    Returns:
        Storages and phases on one clock that begins with tick 1, the visits of blocks, and the last
        tick.
    """
    passes = list(passes)
    if begins:
        passes[0] = passes[0].at_stage_end(0, dealt[0])
    if is_sent:
        passes[-1] = passes[-1].at_stage_end(1, dealt[1])
    lengths = zip(*(section_pass.lengths for section_pass in passes), strict=True)
    turn, *later = map(sum, lengths)
    forward_offset, backward_offset, stop = 0, turn + later[0], turn + sum(later)
    again = backward_offset
    # The backward pass ends with a tick in which the rest is done, where a block comes first.
    stop += 1 if begins and len(later) == 1 else 0
    far = stop - passes[0].lengths[1], turn if is_sent else turn - passes[-1].lengths[0]
    returned = turn if is_sent else turn - passes[-1].loss_ticks
    spans: list[Span] = []
    visits: list[BlockTicks] = []
    for place, section_pass in enumerate(passes):
        backward_offset -= section_pass.lengths[1]
        bases = (forward_offset, backward_offset, again, turn, stop, stop, *far, returned)
        around = passes[max(0, place - DETAILED_ENDS) : place + DETAILED_ENDS + 1]
        is_inside = len(around) > 2 * DETAILED_ENDS and all(
            other is section_pass for other in around
        )
        for nbytes, kind, window, birth, until, death in (
            section_pass.flat if is_inside else section_pass.storages
        ):
            born, died = bases[window] + birth, bases[until] + death
            if until >= Anchor.FIRST:
                died = min(died, (stop if until == Anchor.FIRST else turn) + 1)
            if died > born:  # otherwise its window is empty
                spans.append(Span(nbytes, kind, born, died))
        if section_pass.ticks is not None:
            behind = backward_offset - section_pass.lengths[0]
            visits.append(_moved(section_pass.ticks, forward_offset, behind, turn))
        forward_offset += section_pass.lengths[0]
        again += sum(section_pass.lengths[2:])
    starts = (turn + 1, turn + later[0] + 1)[: len(later)]
    phases: list[tuple[int, Phase]] = [(0, "forward"), *((tick, "backward") for tick in starts)]
    return Timeline(tuple(spans), tuple(phases)), visits, stop


def _moved(visit: BlockTicks, ahead: int, behind: int, turn: int) -> BlockTicks:
    forward = visit.forward[0] + ahead, visit.forward[1] + ahead
    begins = max(visit.backward[0] + behind, turn + 1)  # of the last of a stage: not before that
    return replace(visit, forward=forward, backward=(begins, visit.backward[1] + behind))
