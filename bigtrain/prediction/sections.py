"""A model in sections: the memory and operations of one micro-batch in each, forward and backward.

A section is a block of the model, or the part before the first block or after the last. It has a
window of clock ticks in the forward pass and one in the backward pass, or two if gradients of
inputs and of weights are computed in separate passes. The record of a section covers only its
windows. So sections can be composed in another number and order than they were recorded in: one
block a hundred times, the blocks of one stage, or blocks with another policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bigtrain.memory.timeline import BlockTicks, MemoryKind, Phase, Span, Timeline
from bigtrain.slicing.exchange import TensorExchange
from bigtrain.slicing.scatter_gather import scattered_bytes

DETAILED_ENDS = 2
"""The number of sections that are composed tick by tick, at each end of a run of equal sections."""


class Anchor(IntEnum):
    """The moment from which the ticks of a birth or a death are counted."""

    FORWARD = 0
    """The beginning of the section's forward pass."""
    INPUTS = 1
    """The beginning of the section's backward pass; if it is split, of the input backward."""
    WEIGHTS = 2
    """The beginning of the section's weight backward, if the backward pass is split."""
    TURN = 3
    """The end of all forward passes."""
    END = 4
    """The end of the micro-batch."""
    OPTIMIZER = 5
    """Also the end of the micro-batch, for storages that stay until the optimizer has used them."""
    FIRST = 6
    """The beginning of the first section's backward pass, for gradients of tied parameters."""
    LAST = 7
    """The beginning of the last section's forward pass."""
    RETURN = 8
    """The end of the model's forward pass, before the loss: autocast frees its copies there."""


class Storage(NamedTuple):
    """One storage of a section, made in one of its windows; a tuple, because there are many."""

    nbytes: int
    kind: MemoryKind
    window: Anchor
    """The window in which the storage is made."""
    birth: int
    """Ticks from the beginning of `window` until the storage is made."""
    until: Anchor
    """The moment from which `death` is counted."""
    death: int
    """Ticks from `until` until the storage is freed."""


class SectionWindow(NamedTuple):
    """The ticks t with begin < t <= end, which are one pass through a section."""

    begin: int
    end: int

    @property
    def length(self) -> int:
        """The number of ticks."""
        return self.end - self.begin

    def is_result(self, span: Span) -> bool:
        """Whether a storage is made in this window."""
        return self.begin < span.birth <= self.end

    def frees(self, span: Span) -> bool:
        """Whether a storage is freed in this window."""
        return self.begin + 1 < span.death <= self.end + 1


Windows = tuple[SectionWindow, ...]
"""A section's windows: forward and backward, or forward, input backward and weight backward."""


@dataclass(frozen=True)
class SectionTensor:
    """A parameter or buffer of a section."""

    name: str
    """The name in the model. Tied tensors have the same name."""
    shape: tuple[int, ...]
    nbytes: int
    trained: bool = False
    kind: str = ""
    """The dtype of the elements, as text; empty for a buffer."""
    is_buffer: bool = False
    state_bytes: int = 0
    """Bytes of the optimizer's state of this tensor."""
    state_scalars: int = 0
    """The part of `state_bytes` that is single numbers, such as step counts."""
    is_left_out: bool = False
    """See `BlockTicks.left_out`."""
    is_between: bool = False
    """Whether it belongs to no block, and is used between the section's block and the next one."""

    @property
    def numbers(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def is_packed(self) -> bool:
        """Whether the elements are bytes; see `BlockTicks.packed`."""
        return self.kind == str(torch.uint8)


@dataclass(frozen=True, eq=False)
class OpLog:
    """The operations of a pass. Each array has one row per operation."""

    flops: NDArray[np.float64]
    """FLOPs in fp32 and fp64."""
    low_flops: NDArray[np.float64]
    """FLOPs in bf16 and fp16."""
    nbytes: NDArray[np.float64]
    """Bytes read and written."""
    times: NDArray[np.float64]
    """The number of times that each operation runs."""
    products: NDArray[np.float64]
    """The sizes of matrix products, of shape (operations, 4); see `op_cost.ProductSize`."""

    def scaled(self, factor: float) -> OpLog:
        """Return a copy with FLOPs and bytes times a factor, and unchanged sizes of products."""
        flops, low_flops = self.flops * factor, self.low_flops * factor
        return replace(self, flops=flops, low_flops=low_flops, nbytes=self.nbytes * factor)


@dataclass(frozen=True)
class SectionPass:
    """The forward and the backward pass of one micro-batch through a section."""

    lengths: tuple[int, ...]
    """The number of ticks of each of the section's `Windows`."""
    storages: tuple[Storage, ...]
    ticks: BlockTicks | None = None
    """The ticks of the block, counted from 1 to the sum of `lengths`; None outside of blocks."""
    gradients: tuple[int, ...] = ()
    """The indices of storages that are gradients, including gradients that are added to others."""
    boundary: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
    """Two groups of indices into `storages`: inputs that the section before makes, and gradients
    that the section after makes. At the ends of a stage, these storages are received from other
    ranks, and stay until the end of the micro-batch."""
    loss_ticks: int = 0
    """Ticks at the end of the last section's forward window that belong to the loss."""

    @cached_property
    def saved(self) -> int:
        """Bytes that the section saves from its forward to its backward pass."""
        backward = (Anchor.INPUTS, Anchor.WEIGHTS)
        return sum(s.nbytes for s in self.storages if not s.window and s.until in backward)

    def at_stage_end(self, side: int, ranks: int) -> SectionPass:
        """Return the passes of the section at an end of a stage.

        Args:
            side: 0 if the stage begins with the section, 1 if it ends with it.
            ranks: the number of ranks over which the boundary tensors are scattered.
        """
        storages = list(self.storages)
        for index in self.boundary[side]:
            storage, sent = storages[index], scattered_bytes(storages[index].nbytes, ranks)
            if side == 1:  # the gradients arrive before the first operation of the backward pass
                storage = storage._replace(birth=storage.birth - 1)
            if ranks > 1:  # the gathered tensor has the lifetime of a tensor between two blocks
                storages.append(storage)
            if side == 1 and ranks > 1:  # the part arrives before it is gathered
                storage = storage._replace(birth=storage.birth - 1)
            storages[index] = storage._replace(nbytes=sent, until=Anchor.END, death=1)
        return replace(self, storages=tuple(storages))

    @cached_property
    def flat(self) -> tuple[Storage, ...]:
        """The storages that are alive in windows of other sections, or are gradients.

        Storages with the same lifetime outside of this section's windows are merged.
        """
        sums: dict[tuple[MemoryKind, Anchor, Anchor], int] = {}
        seen = [self.storages[index] for index in self.gradients]
        seen += [storage for storage in self.storages if storage.until >= Anchor.FIRST]
        for storage in self.storages:
            if storage.window < storage.until <= Anchor.WEIGHTS or storage.until == Anchor.END:
                key = storage.kind, storage.window, storage.until
                sums[key] = sums.get(key, 0) + storage.nbytes
        for (kind, window, until), nbytes in sums.items():
            death = {Anchor.INPUTS: 2, Anchor.END: 1}.get(until) or self.lengths[until]
            seen.append(Storage(nbytes, kind, window, self.lengths[window], until, death))
        return tuple(seen)


PassPair = tuple[SectionPass, SectionPass]
"""The passes of the first micro-batch of a step, and those of every other micro-batch."""


@dataclass(frozen=True)
class Section:
    """One block, or the part before or after all blocks."""

    name: str
    """The name of the block; empty outside of blocks."""
    passes: PassPair
    forward: OpLog
    """The operations of the forward pass of one micro-batch."""
    backward: OpLog
    """The operations of the backward pass of one micro-batch."""
    tensors: tuple[SectionTensor, ...]
    """The parameters and buffers."""
    incoming: int = 0
    """Bytes of the tensors with which a block is called."""
    incoming_gradients: int = 0
    """Bytes of the incoming tensors that get a gradient."""
    sequence_shards: int = 0
    """Bytes of `incoming` that arrive as sequence shards: see `slicing.scatter_gather`."""
    slowdown: tuple[float, float] = (1.0, 1.0)
    """Measured seconds divided by the seconds at the device's rates, forward and backward."""
    exchanges: tuple[tuple[TensorExchange, ...], ...] = (), ()
    """Exchanges over the tp axis, forward and backward."""
    place: int = 0
    """See `BlockTicks.place`."""


def mark_gradients(first: SectionPass, later: SectionPass) -> PassPair:
    """Return the passes of a section with their gradients marked.

    In the first pass the gradients are known, because they stay alive. In a later pass the new
    gradients are added to those of the first pass, and freed. If both passes make storages of the
    same sizes in the same order, the gradients of the later pass are at the same positions.

    Args:
        first: the pass of the first micro-batch of a step.
        later: the pass of the second micro-batch.
    """
    near, others = (
        [(index, s) for index, s in enumerate(section_pass.storages) if s.until < Anchor.FIRST]
        for section_pass in (first, later)
    )
    first_order, later_order = (
        sorted((s.window, s.birth, index, s.nbytes) for index, s in every)
        for every in (near, others)
    )
    gradient_spans = [index for index, s in near if s.kind == "gradients"]
    later_gradients = {index for index, s in others if s.kind == "gradients"}
    if [size for *_, size in first_order] == [size for *_, size in later_order]:
        pairs = zip(first_order, later_order, strict=True)
        later_gradients |= {
            index for (*_, was, _), (*_, index, _) in pairs if was in gradient_spans
        }
    return (
        replace(first, gradients=tuple(gradient_spans)),
        replace(later, gradients=tuple(sorted(later_gradients))),
    )


def section_spans(
    spans: Sequence[Span],
    windows: Sequence[Windows],
    index: int,
    stop: int,
    returned: int | None = None,
) -> SectionPass:
    """Return the passes of a section, with the storages of a timeline that belong to it.

    Until the end of a section's window, an output belongs to the section that makes it. After that
    the output belongs to the next section, if the next section frees it.

    Args:
        spans: the storages of one micro-batch.
        windows: the windows of all sections.
        index: the index of the section.
        stop: the last tick of the micro-batch; gradients that outlive it stay for the optimizer.
        returned: the tick at which the model's forward pass ends and the forward pass of the loss
            begins; None to ignore storages that are freed at this moment.
    """
    leaving = None
    if returned is not None:
        backward_start = windows[-1][0].end
        made = min((s.birth for s in spans if s.birth > returned), default=backward_start)
        leaving = returned, min(made, backward_start)
    kind = _Owner if len(windows[index]) == len(_WHOLE) else _SplitOwner
    owner = kind(windows, index, stop, leaving)
    storages: list[Storage] = []
    boundary: tuple[list[int], list[int]] = [], []
    for span in spans:
        storage = owner.owned(span)
        if storage is not None:
            side = owner.side(span)
            if side is not None:
                boundary[side].append(len(storages))
            storages.append(storage)
    gradients = (n for n, s in enumerate(storages) if s.until == Anchor.OPTIMIZER)
    lengths = tuple(window.length for window in windows[index])
    both = tuple(boundary[0]), tuple(boundary[1])
    is_last = index + 1 == len(windows) and returned is not None
    beyond = windows[-1][0].end - returned if is_last and returned is not None else 0
    return SectionPass(
        lengths, tuple(storages), gradients=tuple(gradients), boundary=both, loss_ticks=beyond
    )


_WHOLE = (Anchor.FORWARD, Anchor.INPUTS)


class _Owner:
    """Selects the storages of a section from a timeline whose backward pass is whole.

    A storage that outlives its section's windows by a few ticks counts as freed at the end of
    the window. Autocast frees its copies of weights together after the model's forward pass. They
    count as freed at one tick.

    Args:
        windows: see `section_spans`.
        index: the index of the section.
        stop: see `section_spans`.
        leaving: the end of the model's forward pass, and the next tick at which a storage is made;
            None if unknown.
    """

    def __init__(
        self,
        windows: Sequence[Windows],
        index: int,
        stop: int,
        leaving: tuple[int, int] | None = None,
    ) -> None:
        self._leaving = leaving
        self._own, self._all, self._place, self._stop = windows[index], windows, index, stop
        self._before = windows[index - 1] if index else None
        self._after = windows[index + 1] if index + 1 < len(windows) else None

    def owned(self, span: Span) -> Storage | None:
        """Return a span as a storage of the section; None if it belongs to another section."""
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
        """Return the side from which a storage comes.

        It is 0 for an input that the section before makes, 1 for a gradient that the section after
        makes, and None for all other storages.
        """
        if span.death > self._stop or self._leaves(span):
            return None
        forward, backward = self._own
        freed = backward.frees(span)
        if self._before and self._before[0].begin < span.birth <= forward.begin:
            return 0 if freed or forward.frees(span) else None
        behind = self._after[1].begin if self._after else forward.end
        return 1 if freed and behind < span.birth <= backward.begin else None

    def _leaves(self, span: Span) -> bool:
        """Whether a storage is freed after the model's forward pass and before the loss.

        The loss begins when it makes its first storage.
        """
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
    """Selects the storages of a section from a timeline whose backward pass is split in two.

    A storage that outlives the windows of its section counts as freed at the end of the
    micro-batch.
    """

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
            if span.death <= self._backward_start + 1:
                death = span.death - forward.begin
                if not forward.frees(span):
                    return None
                return Storage(*arrived, Anchor.FORWARD, 1, Anchor.FORWARD, death)
            is_own = _goes(span, self._own) or (before is None and span.death > self._stop)
            return Storage(*arrived, Anchor.FORWARD, 1, *self._until(span)) if is_own else None
        if after is not None and after[1].is_result(span) and _goes(span, self._own):
            # The storage is the gradient of an output.
            return Storage(*arrived, Anchor.INPUTS, 1, *self._until(span))
        return None

    def side(self, span: Span) -> int | None:
        """See `_Owner.side`; it is also 0 for a gradient that the section before receives."""
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
    def _backward_start(self) -> int:
        return self._all[-1][0].end

    def _made_there(self, span: Span) -> Storage:
        forward, after = self._own[0], self._after
        until = self._until(span)
        if span.death <= forward.end + 1:
            until = Anchor.FORWARD, span.death - forward.begin
        elif after is not None and (span.death <= after[0].end + 1 or _goes(span, after)):
            # After this section's window the storage belongs to the section after.
            until = Anchor.FORWARD, forward.length + 1
        elif span.death <= self._backward_start + 1:
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
    passes: Sequence[SectionPass],
    *,
    begins: bool,
    is_sent: bool,
    scatter_ranks: tuple[int, int] = (1, 1),
) -> tuple[Timeline, list[BlockTicks], int]:
    """Compose the timeline of sections that run one after another, forward and backward.

    In a sequence of equal sections, the bytes that are alive outside of a section change by a
    constant from one section to the next. So the peak is near an end of the sequence. Only the
    sections at its ends are composed tick by tick. The others contribute `SectionPass.flat`, which
    is much faster.

    Args:
        passes: the sections' passes, in the order of the forward pass.
        begins: whether the inputs are received from another rank.
        is_sent: whether the outputs are sent to another rank.
        scatter_ranks: see `compose_profile`.

    Returns:
        The timeline, whose first tick is 1; the ticks of each block; and the last tick.
    """
    passes = list(passes)
    if begins:
        passes[0] = passes[0].at_stage_end(0, scatter_ranks[0])
    if is_sent:
        passes[-1] = passes[-1].at_stage_end(1, scatter_ranks[1])
    lengths = zip(*(section_pass.lengths for section_pass in passes), strict=True)
    backward_start, *later = map(sum, lengths)
    # A stage without the loss receives its gradients one tick after its backward pass begins. If
    # they come in parts, they are gathered in the next tick. Its first operation is a tick later.
    gap = 0 if not is_sent else 2 if scatter_ranks[1] == 1 else 3
    forward_offset, backward_offset = 0, backward_start + gap + later[0]
    stop = backward_start + gap + sum(later)
    again = backward_offset
    # If the stage begins with a block, the backward pass has one more tick, which is that of the
    # layers outside of blocks.
    stop += 1 if begins and len(later) == 1 else 0
    last_forward = backward_start if is_sent else backward_start - passes[-1].lengths[0]
    far = stop - passes[0].lengths[1], last_forward
    returned = backward_start if is_sent else backward_start - passes[-1].loss_ticks
    spans: list[Span] = []
    visits: list[BlockTicks] = []
    for index, section_pass in enumerate(passes):
        backward_offset -= section_pass.lengths[1]
        bases = (forward_offset, backward_offset, again, backward_start, stop, stop, *far, returned)
        around = passes[max(0, index - DETAILED_ENDS) : index + DETAILED_ENDS + 1]
        is_inside = len(around) > 2 * DETAILED_ENDS and all(
            neighbour is section_pass for neighbour in around
        )
        for nbytes, kind, window, birth, until, death in (
            section_pass.flat if is_inside else section_pass.storages
        ):
            born, died = bases[window] + birth, bases[until] + death
            if until >= Anchor.FIRST:
                died = min(died, (stop if until == Anchor.FIRST else backward_start) + 1)
            if died > born:  # otherwise its window is empty
                spans.append(Span(nbytes, kind, born, died))
        if section_pass.ticks is not None:
            behind = backward_offset - section_pass.lengths[0]
            begins_after = backward_start + max(0, gap - 1)
            visits.append(_moved(section_pass.ticks, forward_offset, behind, begins_after))
        forward_offset += section_pass.lengths[0]
        again += sum(section_pass.lengths[2:])
    starts = (backward_start + 1, backward_start + gap + later[0] + 1)[: len(later)]
    phases: list[tuple[int, Phase]] = [(0, "forward"), *((tick, "backward") for tick in starts)]
    return Timeline(tuple(spans), tuple(phases)), visits, stop


def _moved(visit: BlockTicks, ahead: int, behind: int, backward_start: int) -> BlockTicks:
    forward = visit.forward[0] + ahead, visit.forward[1] + ahead
    # The last block of a stage does not begin before it has the gradients of its outputs.
    begins = max(visit.backward[0] + behind, backward_start + 1)
    return replace(visit, forward=forward, backward=(begins, visit.backward[1] + behind))
