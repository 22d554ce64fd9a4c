"""One micro-batch under fully_shard: the units that are whole at each moment, and the buffers.

fully_shard does the following (observed in the storages of real runs). A unit's shards are cast, if
they have another dtype than its gathered parameters, until their exchange has begun. The parameters
are gathered into one flat buffer and copied out of it. The buffer is alive until the next unit is
gathered; the last unit's buffer is alive until the end of the model's forward pass. In the backward
pass the next unit is gathered while a unit computes. A unit's gradients are copied into one buffer,
which is reduced to this rank's shard and is alive until the next unit's gradients are reduced.

When a unit's backward pass ends, the order is this: the parameters of the unit are freed, the
gradient buffer of the previous unit is freed, the gradient buffer of the unit is allocated, and the
parameters of the next unit are allocated. The gradients are freed when they are in the buffer, and
that of the unit's last parameter when the buffer is reduced.

On one rank nothing is exchanged. Parameters are copied out of the shards one by one, in bf16 after
a cast, and gradients are copied out of the gradient buffer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

from bigtrain.memory.timeline import BlockTicks, MemoryKind, Span, Timeline
from bigtrain.strategies.zero.on_torch.unit_sizes import UnitSizes

GradientCourse = Literal["reduced", "kept", "last"]
"""The fate of the whole gradients of a micro-batch: they are reduced to shards; they are added to
those of earlier micro-batches and kept; or they are added, and then the sums are reduced."""

_FINE = 16
"""The number of moments in a tick of the profile's clock. All actions of a unit's hooks fall on one
tick, so the moments order them."""
# The moments in the order of the hooks: a unit's post-hook runs before the next unit's pre-hook.
_AFTER_RESHARD, _AFTER_LAST, _REDUCING, _COPIED, _SHARD, _EXCHANGE, _EXCHANGED = range(1, 8)
_NEXT_GATHERS, _UNIT_WHOLE, _NEXT_WHOLE, _BUFFER_FREE, _PREFETCH = range(9, 14)


@dataclass(frozen=True)
class UnitPass:
    """One micro-batch: forward and backward over the units, on a clock `_FINE` times as fine."""

    sizes: UnitSizes
    units: Sequence[BlockTicks]
    """The blocks in the order of the forward pass, with the ticks of the timeline."""
    kept: tuple[bool, ...]
    """For each block, whether it stays gathered from its forward to its backward pass."""
    prefetch: int | None = None
    """The number of blocks that are gathered ahead in both passes; None for fully_shard's default,
    which gathers one block ahead in the backward pass only."""

    @property
    def _freed(self) -> list[BlockTicks]:
        """The blocks that are freed after their forward pass and gathered again."""
        return [unit for unit, stays in zip(self.units, self.kept, strict=True) if not stays]

    def timeline(
        self,
        unsharded: Timeline,
        rest: BlockTicks,
        *,
        fresh: bool,
        resumed: bool = False,
        course: GradientCourse = "reduced",
    ) -> Timeline:
        """Return the pass of one process with the memory of gathering and reducing.

        Args:
            unsharded: the pass without any sharding.
            rest: the layers outside of blocks, which are whole until their gradients are reduced.
            fresh: whether the gradients that stay are allocated in this pass: the shards, or the
                whole gradients if they are kept.
            resumed: whether passes of other micro-batches come between this forward pass and this
                backward pass. The forward pass then finds units that an earlier pass has gathered.
                The backward pass finds no gathered units, because an earlier pass has freed them.
            course: what becomes of the whole gradients.
        """
        begin = unsharded.phases[0][0]
        last = max((span.death for span in unsharded.spans), default=begin)
        backward_start = next(
            (tick for tick, phase in unsharded.phases if phase == "backward"), last
        )
        forward_end = min(rest.forward[1], backward_start)
        # All units are reduced before a stage frees its outputs and the tensors that it received.
        end = min(last, rest.backward[1] + 1)
        closed = replace(self, units=_closed_after_rest(self.units, end))
        unsharded = _with_room(unsharded, end, closed._closing(rest, end)[1])
        last = max((span.death for span in unsharded.spans), default=begin)
        if course == "reduced":
            spans = closed._plain(unsharded, end)
        else:
            spans = closed._kept_gradients(unsharded, rest, (end, last), fresh=fresh, course=course)
        if resumed:
            spans += self._regathered_rest(rest, backward_start, end)
        else:
            whole_bytes = self.sizes.whole(rest)
            spans.append(_span(whole_bytes, "parameters", begin, 0, end - 1, _AFTER_RESHARD))
            spans += self._gathered_forward([rest, *self.units], begin, forward_end)
            spans += [
                _span(
                    self.sizes.whole(unit), "parameters",
                    unit.forward[0], _UNIT_WHOLE, unit.backward[1], _AFTER_RESHARD,
                )
                for unit, stays in zip(closed.units, self.kept, strict=True) if stays
            ]  # fmt: skip
        spans += self._in_forward()
        if resumed:
            spans += self._gathered_forward(self._freed, begin, forward_end)
        back = max(backward_start, rest.backward[0])
        if self.prefetch is not None:
            spans += closed._in_backward_ahead(back, end, resumed=resumed)
        else:
            spans += closed._again_in_backward() if resumed else closed._in_backward(back, end)
        if course != "kept":
            spans += closed._reduced(rest, (end, last), fresh=fresh, summed=course == "last")
        phases = tuple((tick * _FINE, phase) for tick, phase in unsharded.phases)
        return Timeline(tuple(span for span in spans if span.nbytes), phases)

    def strayed(self, usual: Timeline, rest: BlockTicks) -> Timeline:
        """Return a pass whose backward pass comes after forward passes of several micro-batches.

        Units are prefetched in the reverse order of all forward passes. So the last unit of the
        backward pass prefetches the last unit of the previous forward pass. Layers outside of
        blocks are still whole and are not gathered again.
        """
        if rest.shapes or len(self.units) < 2 or self.prefetch is not None:
            return usual
        end = max(span.death for span in usual.spans)
        begin = self.units[0].backward[0] * _FINE + _PREFETCH
        last = self.units[-1]
        stray = Span(self.sizes.padded(last), "temporary", begin, end)
        cast = Span(self.sizes.cast(last), "temporary", begin, begin + 1)
        return Timeline((*usual.spans, stray, cast), usual.phases)

    def _plain(self, plain: Timeline, end: int) -> list[Span]:
        """Return the spans of one process, with gradients until they are in their unit's buffer."""
        spans, done_at = [], self._closing_ticks(end)
        for nbytes, kind, birth, death in plain.spans:
            if kind == "gradients":
                last = done_at(birth) * _FINE + _COPIED
                spans.append(Span(nbytes, "temporary", birth * _FINE, last))
            else:
                spans.append(Span(nbytes, kind, birth * _FINE, death * _FINE))
        return spans

    def _kept_gradients(
        self,
        recorded: Timeline,
        rest: BlockTicks,
        ends: tuple[int, int],
        *,
        fresh: bool,
        course: GradientCourse,
    ) -> list[Span]:
        """Return the spans of one process if whole gradients are added up over micro-batches.

        The sums are in the precision of the shards. If gradients are computed in another one, those
        of the first micro-batch are converted when their unit's backward pass ends, one parameter
        after the other; those of later micro-batches are added and freed. In the last micro-batch
        the sums are freed when they are in their unit's buffer. They are states of the rank
        otherwise, so their bytes are negative here.

        Args:
            recorded: the pass of one process.
            rest: see `timeline`.
            ends: the tick after the backward pass, and the last tick.
            fresh: see `timeline`.
            course: see `timeline`.
        """
        end = ends[0]
        order, closed = self._closing(rest, end)
        stays_until = max(closed, ends[1]) + 1
        casts = self.sizes.used_width != self.sizes.shard_width
        spans = []
        done_at = self._closing_ticks(end)
        for span in recorded.spans:
            birth, death = span.birth * _FINE, span.death * _FINE
            if span.kind == "gradients" and casts:
                done = done_at(span.birth) * _FINE
                last = done + (_REDUCING if fresh and course == "kept" else _AFTER_RESHARD)
                spans.append(Span(span.nbytes, "temporary", birth, max(birth + 1, last)))
            elif span.kind == "gradients":
                spans.append(span._replace(birth=birth, death=stays_until * _FINE))
            else:
                spans.append(span._replace(birth=birth, death=death))
        for done, unit in order:
            whole_bytes = self.sizes.gradients(unit)
            if course == "last":
                spans.append(_span(-whole_bytes, "gradients", done, _COPIED, stays_until, 0))
            elif casts and fresh:
                spans.append(_span(whole_bytes, "gradients", done, _REDUCING, stays_until, 0))
                both = self.sizes.converted(unit)
                spans.append(_span(both, "temporary", done, _REDUCING, done, _COPIED))
        return spans

    def _closing_ticks(self, end: int) -> Callable[[int], int]:
        """Return a function of the birth of a gradient: the tick at which its unit is closed."""
        units = sorted(self.units, key=lambda unit: unit.backward)
        begins = [unit.backward[0] for unit in units]

        def done(birth: int) -> int:
            index = bisect_right(begins, birth) - 1
            if index >= 0 and birth <= units[index].backward[1]:
                return max(birth, units[index].backward[1])
            return max(birth, end - 1)

        return done

    def _gathered_forward(self, units: Sequence[BlockTicks], begin: int, end: int) -> list[Span]:
        """Return the flat buffers of gathered units, each until the next unit is gathered."""
        if not units:  # a stage that has less than a block
            return []
        starts = [begin if n == 0 else unit.forward[0] for n, unit in enumerate(units)]
        ends = [*((tick, _NEXT_WHOLE) for tick in starts[1:]), (end, _AFTER_LAST)]
        ahead = self._gathered_ahead(begin)
        spans = []
        for unit, at, until in zip(units, starts, ends, strict=True):
            own = (at, _NEXT_GATHERS)
            spans += self._buffers(unit, min(own, ahead.get(unit.forward, own)), until)
        return spans + [
            _span(self.sizes.copied(unit), "temporary", at, _UNIT_WHOLE, at, _BUFFER_FREE)
            for unit, at in zip(units, starts, strict=True)
        ]

    def _buffers(
        self, unit: BlockTicks, issued: tuple[int, int], freed: tuple[int, int]
    ) -> list[Span]:
        """Return the flat buffer of a unit, and the cast shard that is copied into it.

        Args:
            unit: the unit.
            issued: the tick and the moment at which the unit is gathered.
            freed: the tick and the moment at which the buffer is freed.
        """
        cast = self.sizes.cast(unit)
        return [
            _span(self.sizes.padded(unit), "temporary", *issued, *freed),
            _span(cast, "temporary", *issued, issued[0], issued[1] + 1),
        ]

    def _gathered_ahead(self, begin: int) -> dict[tuple[int, int], tuple[int, int]]:
        """Return by a block's forward ticks the tick and the moment at which its gather begins.

        Args:
            begin: the tick at which the model's forward pass begins.
        """
        if not self.prefetch:
            return {}
        begins = [begin] * self.prefetch + [unit.forward[0] for unit in self.units]
        return {unit.forward: (at, _PREFETCH) for unit, at in zip(self.units, begins, strict=False)}

    def _in_forward(self) -> list[Span]:
        """Return the gathered units that are freed after their forward pass."""
        return [
            _span(
                self.sizes.whole(unit), "parameters",
                unit.forward[0], _UNIT_WHOLE, unit.forward[1], _AFTER_RESHARD,
            )
            for unit in self._freed
        ]  # fmt: skip

    def _regathered_rest(self, rest: BlockTicks, back: int, end: int) -> list[Span]:
        """Return the spans of layers outside of blocks that are gathered for the backward pass."""
        whole_bytes, copied = self.sizes.whole(rest), self.sizes.copied(rest)
        return [
            *self._buffers(rest, (back, _AFTER_RESHARD), (back, _BUFFER_FREE)),
            _span(copied, "temporary", back, _AFTER_RESHARD, back, _BUFFER_FREE),
            _span(whole_bytes, "parameters", back, _AFTER_LAST, end - 1, _AFTER_RESHARD),
        ]

    def _again_in_backward(self) -> list[Span]:
        """Return the spans of units that are gathered for a backward pass which follows another.

        fully_shard then has no order of units, and gathers each unit when it is needed.
        """
        spans = []
        for unit in filter(_has_backward, self.units):
            at, done = unit.backward
            spans += self._buffers(unit, (at, _NEXT_GATHERS), (at, _BUFFER_FREE))
            copied = self.sizes.copied(unit)
            spans.append(_span(copied, "temporary", at, _NEXT_GATHERS, at, _BUFFER_FREE))
            whole_bytes = self.sizes.whole(unit)
            spans.append(_span(whole_bytes, "parameters", at, _UNIT_WHOLE, done, _AFTER_RESHARD))
        return spans

    def _in_backward(self, back: int, end: int) -> list[Span]:
        """Return the spans of freed units that are gathered again for their backward pass.

        Each unit is gathered while the previous unit in the backward pass computes.

        Args:
            back: the tick at which the gradient of the model's output is made. The first unit is
                gathered at this tick.
            end: see `_unused_prefetches`.
        """
        held = {unit.place for unit, stays in zip(self.units, self.kept, strict=True) if stays}
        spans, alone = self._unused_prefetches(back, end, held)
        ahead = (back, _AFTER_LAST)
        back_through = filter(_has_backward, self.units)
        for unit in sorted(back_through, key=lambda unit: unit.backward[0]):
            at, done = unit.backward
            if unit.place in held:
                ahead = (at, _PREFETCH)
                continue
            ahead = (at, _NEXT_GATHERS) if unit in alone else min(ahead, (at, _NEXT_GATHERS))
            whole_bytes = self.sizes.whole(unit)
            spans += self._buffers(unit, ahead, (at, _BUFFER_FREE))
            copied = self.sizes.copied(unit)
            spans.append(_span(copied, "temporary", at, _UNIT_WHOLE, at, _BUFFER_FREE))
            spans.append(_span(whole_bytes, "parameters", at, _UNIT_WHOLE, done, _AFTER_RESHARD))
            ahead = (at, _PREFETCH)
        return spans

    def _in_backward_ahead(self, back: int, end: int, *, resumed: bool) -> list[Span]:
        """Return the spans of gathered units if each unit gathers the `prefetch` units after it.

        Args:
            back: see `_in_backward`.
            end: see `_unused_prefetches`.
            resumed: see `timeline`.
        """
        spans = []
        for number, (unit, stays) in enumerate(zip(self.units, self.kept, strict=True)):
            if stays and not resumed:
                continue
            ahead = self._issued(number, (back, _PREFETCH if resumed else _AFTER_LAST))
            at, done = unit.backward
            if not _has_backward(unit):
                if ahead is not None:
                    spans += self._buffers(unit, ahead, (self._dropped(unit, back, end), 0))
                continue
            own = (at, _NEXT_GATHERS)
            spans += self._buffers(unit, min(ahead or own, own), (at, _BUFFER_FREE))
            copied = self.sizes.copied(unit)
            spans.append(_span(copied, "temporary", at, _UNIT_WHOLE, at, _BUFFER_FREE))
            whole_bytes = self.sizes.whole(unit)
            spans.append(_span(whole_bytes, "parameters", at, _UNIT_WHOLE, done, _AFTER_RESHARD))
        return spans

    def _issued(self, number: int, root: tuple[int, int]) -> tuple[int, int] | None:
        """Return the tick and moment at which a unit is gathered ahead; None if it is not.

        Args:
            number: the index of the unit.
            root: the tick and moment at which the layers outside of blocks gather units.
        """
        following = self.units[number + 1 : number + 1 + (self.prefetch or 0)]
        moments = [(unit.backward[0], _PREFETCH) for unit in following if _has_backward(unit)]
        if number + (self.prefetch or 0) >= len(self.units):
            moments.append(root)
        return min(moments, default=None)

    def _dropped(self, unit: BlockTicks, back: int, end: int) -> int:
        """Return the tick at which the buffer of a unit without a backward pass is freed."""
        closed = max((unit.backward[1] for unit in self.units), default=back) + 1
        reduced_later = (
            later.backward[1]
            for later in self.units
            if later.place > unit.place and _has_backward(later) and later.backward[1] >= end
        )
        return min(reduced_later, default=closed)

    def _unused_prefetches(
        self, back: int, end: int, held: Collection[int]
    ) -> tuple[list[Span], list[BlockTicks]]:
        """Return buffers of prefetched units without a backward pass, and units never prefetched.

        Units are prefetched in the reverse order of the forward pass. After the backward pass
        fully_shard closes the units in the order of the model's modules: it reduces the gradients
        that are left, and frees the buffers of units without a backward pass. The second list has
        each unit whose next unit in the forward pass has no backward pass: it is not prefetched.

        Args:
            back: see `_in_backward`.
            end: the first tick at which a unit is closed.
            held: the places of the units that the backward pass finds gathered.
        """
        spans, alone = [], []
        following = [*self.units[1:], *([None] if self.units else [])]
        for unit, after in zip(self.units, following, strict=True):
            if after is not None and not _has_backward(after):
                alone.append(unit)
            elif not _has_backward(unit) and unit.place not in held:
                ahead = (back, _AFTER_LAST) if after is None else (after.backward[0], _PREFETCH)
                spans += self._buffers(unit, ahead, (self._dropped(unit, back, end), 0))
        return spans, alone

    def _closing(self, rest: BlockTicks, end: int) -> tuple[list[tuple[int, BlockTicks]], int]:
        """Return the units with the ticks at which they are closed, in order; and the tick after.

        A unit is closed when its gradients are complete.
        """
        order = [(unit.backward[1], unit) for unit in self.units]
        if rest.shapes or not order:
            order.append((end - 1, rest))
        order.sort(key=lambda pair: pair[0])
        return order, max(end, order[-1][0] + 1)

    def _reduced(
        self, rest: BlockTicks, ends: tuple[int, int], *, fresh: bool, summed: bool
    ) -> list[Span]:
        """Return each unit's gradient buffer, until the next unit is reduced, and its shard.

        Args:
            rest: see `timeline`.
            ends: see `_kept_gradients`.
            fresh: see `timeline`.
            summed: whether the gradients are sums over several micro-batches.
        """
        spans = []
        order, closed = self._closing(rest, ends[0])
        stays_until = max(closed, ends[1]) + 1
        next_ones = [*((tick, _AFTER_LAST) for tick, _ in order[1:]), (closed, 0)]
        for (reduced_at, unit), next_reduced in zip(order, next_ones, strict=True):
            whole_bytes, shard = self.sizes.reduced(unit), self.sizes.shard(unit, trained=True)
            spans.append(_span(whole_bytes, "temporary", reduced_at, _REDUCING, *next_reduced))
            if self.sizes.copies_reduced:
                spans.append(
                    _span(whole_bytes, "temporary", reduced_at, _EXCHANGE, reduced_at, _EXCHANGED)
                )
            held = self.sizes.last_gradient(unit, summed=summed)
            held_until = (reduced_at, _EXCHANGED)
            spans.append(_span(held, "temporary", reduced_at, _COPIED, *held_until))
            kind: MemoryKind = "gradients" if fresh else "temporary"
            freed_at = (stays_until, 0) if fresh else (reduced_at, _EXCHANGED)
            spans.append(_span(shard, kind, reduced_at, _SHARD, *freed_at))
        return spans


def _closed_after_rest(units: Sequence[BlockTicks], end: int) -> list[BlockTicks]:
    """Return the blocks; the backward pass of each ends when its gradients are reduced.

    Blocks whose inputs need no gradient are reduced last, one by one in the order of the model's
    modules, after the layers outside of blocks.

    Args:
        units: the units in the order of the forward pass.
        end: the tick after the backward pass.
    """
    ticks = count(end)
    by_place = sorted(units, key=lambda unit: unit.place)
    closed = {
        unit.place: replace(unit, backward=(unit.backward[0], next(ticks)))
        for unit in by_place
        if unit.backward[1] >= end - 1 and _has_backward(unit)
    }
    return [closed.get(unit.place, unit) for unit in units]


def _with_room(unsharded: Timeline, end: int, closed: int) -> Timeline:
    """Return a pass in which nothing is made or freed from a tick until all units are reduced.

    A pass in which all tensors are freed at that tick is returned unchanged.

    Args:
        unsharded: the pass without any sharding.
        end: the tick.
        closed: the tick after all units are reduced.
    """
    if all(span.death <= end for span in unsharded.spans):
        return unsharded
    room = closed - end
    spans = (
        span._replace(
            birth=span.birth + room * (span.birth >= end),
            death=span.death + room * (span.death >= end),
        )
        for span in unsharded.spans
    )
    return replace(unsharded, spans=tuple(spans))


def gathered_again(
    units: Sequence[BlockTicks], kept: Sequence[bool], prefetch: int | None
) -> list[BlockTicks]:
    """Return the blocks that are gathered in the backward pass: used there, or gathered ahead.

    Args:
        units: the blocks, in the order of the forward pass.
        kept: see `UnitPass`.
        prefetch: see `UnitPass`.
    """
    ahead = 1 if prefetch is None else prefetch
    found = []
    for number, (unit, stays) in enumerate(zip(units, kept, strict=True)):
        following = units[number : number + 1 + ahead]
        if not stays and (len(following) <= ahead or any(map(_has_backward, following))):
            found.append(unit)
    return found


def _has_backward(unit: BlockTicks) -> bool:
    """Whether a unit has a backward pass; a frozen teacher, for example, has none."""
    return any(unit.trained) or unit.backward[0] < unit.backward[1]


def _span(
    nbytes: int, kind: MemoryKind, tick: int, sub_tick: int, end: int, end_place: int
) -> Span:
    birth = tick * _FINE + sub_tick
    return Span(nbytes, kind, birth, max(birth + 1, end * _FINE + end_place))
