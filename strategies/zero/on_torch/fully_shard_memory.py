"""The memory of one rank under fully_shard: shards, and the units that are whole at each moment.

fully_shard does the following (observed in the storages of real runs). A unit's parameters are
gathered into one flat buffer and copied out of it. The buffer is alive until the next unit is
gathered; the last unit's buffer is alive until the end of the model's forward pass. In the backward
pass the next unit is gathered while a unit computes. A unit's gradients are copied into one buffer,
which is reduced to this rank's shard and is alive until the next unit's gradients are reduced.

When a unit's backward pass ends, the order is this: the parameters of the unit are freed, the
gradient buffer of the previous unit is freed, the gradient buffer of the unit is allocated, and the
parameters of the next unit are allocated.

On one rank nothing is exchanged. Parameters are copied out of the shards one by one, in bf16 after
a cast, and gradients are copied out of the gradient buffer.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from bigtrain.core.strategy import Plan
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.devices import is_accelerator
from bigtrain.memory.timeline import BlockTicks, MemoryKind, Span, Timeline, scale_timeline


def forecast_fully_shard(
    forecast: Forecast,
    profile: Profile,
    plan: Plan,
    *,
    kept: Sequence[bool],
    ranks: int,
) -> Forecast:
    """Return the forecast of a rank under fully_shard.

    Args:
        forecast: the forecast with the techniques that are applied before.
        profile: the profile of one process.
        plan: precision, accumulation, offload.
        kept: for each of `profile.blocks`, whether it stays gathered from its forward to its
            backward pass.
        ranks: the number of ranks that share one copy of the states.
    """
    if profile.outside_blocks is None:
        return forecast
    sizes = _Sizes(4 if plan.precision != "fp64" else 8, plan, ranks)
    units = [*(first for first, _ in profile.blocks), profile.outside_blocks]
    shards = sum(sizes.shard(unit) for unit in units)
    trained = sum(sizes.shard(unit, trained=True) for unit in units)
    full_bytes = profile.trained_elements * sizes.shard_width
    share = trained / full_bytes if full_bytes else 0.0
    full_optimizer_bytes = max(1, profile.optimizer_bytes)
    state = trained * profile.state_slots + profile.state_scalars
    states = replace(
        forecast.states,
        parameters=trained,
        frozen=shards - trained,
        # An offload leaves the same fraction of a shard's state on the device as of a whole state.
        optimizer=round(state * min(1.0, forecast.states.optimizer / full_optimizer_bytes)),
    )
    # Every micro-batch makes new whole gradients, and only their shards are added up. So every
    # micro-batch has the timeline of the first micro-batch of one process.
    unit_passes = _Pass(sizes, units[:-1], tuple(kept))
    unsharded = (profile.passes["first"], profile.outside_blocks)
    fresh = not (sizes.on_host or plan.release_gradients)
    first = later = unit_passes.timeline(*unsharded, fresh=fresh)
    if fresh and plan.batch.accumulation_steps > 1:
        later = unit_passes.timeline(*unsharded, fresh=False)
    if sizes.on_host:  # gradients and state are on the host too, gathered units on the GPU
        return replace(
            forecast.with_passes(first=first, later=later),
            states=replace(states, parameters=0, frozen=0, optimizer=0),
            step=replace(forecast.step, spans=()),
            gradients=0,
        )
    # The last micro-batch has the timeline of the others, which need at least as much memory.
    passes = {"first": first, "later": later}
    if plan.pp > 1:
        passes |= {
            "first_resumed": unit_passes.timeline(*unsharded, fresh=True, resumed=True),
            "later_resumed": unit_passes.timeline(*unsharded, fresh=False, resumed=True),
            "first_strayed": unit_passes.strayed(first, profile.outside_blocks),
            "later_strayed": unit_passes.strayed(later, profile.outside_blocks),
        }
    return replace(
        forecast,
        states=states,
        passes=passes,
        step=scale_timeline(forecast.step, share * sizes.shard_width / sizes.used_width),
        gradients=0 if plan.release_gradients else trained,
        added_to_whole=sizes.first_shards(units),
    )


@dataclass(frozen=True)
class _Sizes:
    """The bytes of a unit: of its gathered parameters, its gradient buffer, and a rank's shard."""

    shard_width: int
    """Bytes of an element of a shard, of parameters and of gradients."""
    plan: Plan
    ranks: int
    _known: dict[tuple[int, bool], tuple[BlockTicks, int]] = field(default_factory=dict)

    @property
    def used_width(self) -> int:
        """Bytes of an element of a gathered unit."""
        return 2 if self.plan.bf16_parameters else self.shard_width

    @property
    def frozen_width(self) -> int:
        """Bytes of an element of a frozen parameter's shard, which may have no fp32 values."""
        return self.used_width if self.plan.frozen_in_bf16 else self.shard_width

    def shard(self, unit: BlockTicks, *, trained: bool = False) -> int:
        """Bytes of a rank's shard of a unit, padded to as many rows as the first rank has."""
        key = (id(unit), trained)
        if key not in self._known:  # stored with the unit, so that the unit's id is not reused
            nbytes = sum(
                width * self._padded(shape)
                for shape, width, is_trained in zip(
                    unit.shapes, self._shard_widths(unit), unit.trained, strict=True
                )
                if is_trained or not trained
            )
            self._known[key] = unit, nbytes
        return self._known[key][1]

    def _shard_widths(self, unit: BlockTicks) -> tuple[int, ...]:
        """Bytes of an element of each parameter's shard."""
        return unit.widths(self.shard_width, self.frozen_width)

    def _padded(self, shape: tuple[int, ...]) -> int:
        """The number of elements of a rank's shard of a parameter, with padding."""
        return math.ceil(shape[0] / self.ranks) * math.prod(shape[1:]) if shape else 1

    def first_shards(self, units: Sequence[BlockTicks]) -> int:
        """The most bytes above those of the whole model, while its units are sharded one by one.

        A unit's shard is made before its whole parameters are freed.
        """
        excess = most = 0
        for unit in units:
            shard = self.shard(unit)
            most = max(most, excess + shard)
            excess += shard - sum(
                width * math.prod(shape)
                for shape, width in zip(unit.shapes, self._shard_widths(unit), strict=True)
            )
        return most

    @property
    def on_host(self) -> bool:
        """Whether the shards are on the host, and gathered units on the GPU."""
        return self.plan.offload_tiers.parameters == "cpu" and is_accelerator(self.plan.device_type)

    @property
    def alone(self) -> bool:
        """Whether each rank has a whole copy of the states: nothing is gathered or scattered."""
        return self.ranks == 1

    def padded(self, unit: BlockTicks) -> int:
        """Bytes of the flat buffer that a unit is gathered in, padding included."""
        return 0 if self.alone else self.whole(unit)

    def whole(self, unit: BlockTicks) -> int:
        """Bytes of a gathered unit after it is copied out of the flat buffer."""
        widths = unit.widths(self.used_width, self.used_width)
        elements = zip(map(self._padded, unit.shapes), widths, strict=True)
        return self.ranks * sum(count * width for count, width in elements)

    def copied(self, unit: BlockTicks) -> int:
        """The most bytes above those of a whole unit, while a single rank copies its parameters.

        The parameters are copied one after the other. Each is copied from the host, if the shards
        are on the host, then cast, and then copied into the unit. The result of a cast is freed
        after the result of the next cast is made. With several ranks the bytes are zero.
        """
        if not self.alone:
            return 0
        done = last = most = 0
        used_widths = unit.widths(self.used_width, self.used_width)
        for shape, width, used in zip(
            unit.shapes, self._shard_widths(unit), used_widths, strict=True
        ):
            elements = math.prod(shape)
            copies = [width * elements] if self.on_host else []
            copies += [used * elements] if used != width else []
            most = max(most, done + last + sum(copies))
            done, last = done + used * elements, copies[-1] if copies else 0
            most = max(most, done + last)
        return max(0, most - done)

    def reduced(self, unit: BlockTicks) -> int:
        """Bytes of the buffer in which a unit's gradients are reduced, padding included."""
        return self.shard(unit, trained=True) * self.ranks


_FINE = 16
"""The number of moments in a tick of the profile's clock. All actions of a unit's hooks fall on one
tick, so the moments order them."""
# The moments in the order of the hooks: a unit's post-hook runs before the next unit's pre-hook.
_AFTER_RESHARD, _AFTER_LAST, _REDUCING, _COPIED, _SHARD, _EXCHANGE, _EXCHANGED = range(1, 8)
_NEXT_GATHERS, _UNIT_WHOLE, _NEXT_WHOLE, _BUFFER_FREE, _PREFETCH = range(9, 14)


@dataclass(frozen=True)
class _Pass:
    """One micro-batch: forward and backward over the units, on a clock `_FINE` times as fine."""

    sizes: _Sizes
    units: Sequence[BlockTicks]
    """The blocks in the order of the forward pass, with the ticks of the timeline."""
    kept: tuple[bool, ...]
    """For each block, whether it stays gathered from its forward to its backward pass."""

    @property
    def _freed(self) -> list[BlockTicks]:
        """The blocks that are freed after their forward pass and gathered again."""
        return [unit for unit, stays in zip(self.units, self.kept, strict=True) if not stays]

    def timeline(
        self, unsharded: Timeline, rest: BlockTicks, *, fresh: bool, resumed: bool = False
    ) -> Timeline:
        """Return the pass of one process with the memory of gathering and reducing.

        Args:
            unsharded: the pass without any sharding.
            rest: the layers outside of blocks, which are whole until their gradients are reduced.
            fresh: whether the shards of the gradients are allocated in this pass.
            resumed: whether passes of other micro-batches come between this forward pass and this
                backward pass. The forward pass then finds units that an earlier pass has gathered.
                The backward pass finds no gathered units, because an earlier pass has freed them.
        """
        begin = unsharded.phases[0][0]
        end = max((span.death for span in unsharded.spans), default=begin)
        backward_start = next(
            (tick for tick, phase in unsharded.phases if phase == "backward"), end
        )
        forward_end = min(rest.forward[1], backward_start)
        closed = replace(self, units=_closed_after_rest(self.units, end))
        spans = closed._plain(unsharded, end)
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
        spans += closed._in_backward(back, end, found=() if resumed else self.kept)
        spans += closed._reduced(rest, end, fresh=fresh)
        phases = tuple((tick * _FINE, phase) for tick, phase in unsharded.phases)
        return Timeline(tuple(span for span in spans if span.nbytes), phases)

    def strayed(self, usual: Timeline, rest: BlockTicks) -> Timeline:
        """Return a pass whose backward pass comes after forward passes of several micro-batches.

        Units are prefetched in the reverse order of all forward passes. So the last unit of the
        backward pass prefetches the last unit of the previous forward pass. Layers outside of
        blocks are still whole and are not gathered again.
        """
        if rest.shapes or len(self.units) < 2:
            return usual
        end = max(span.death for span in usual.spans)
        begin = self.units[0].backward[0] * _FINE + _PREFETCH
        stray = Span(self.sizes.padded(self.units[-1]), "temporary", begin, end)
        return Timeline((*usual.spans, stray), usual.phases)

    def _plain(self, plain: Timeline, end: int) -> list[Span]:
        """Return the spans of one process, with gradients until they are in their unit's buffer."""
        spans = []
        units = sorted(self.units, key=lambda unit: unit.backward)
        begins = [unit.backward[0] for unit in units]
        for nbytes, kind, birth, death in plain.spans:
            if kind == "gradients":
                index = bisect_right(begins, birth) - 1
                done = end - 1
                if index >= 0 and birth <= units[index].backward[1]:
                    done = units[index].backward[1]
                last = max(birth, done) * _FINE + _COPIED
                spans.append(Span(nbytes, "temporary", birth * _FINE, last))
            else:
                spans.append(Span(nbytes, kind, birth * _FINE, death * _FINE))
        return spans

    def _gathered_forward(self, units: Sequence[BlockTicks], begin: int, end: int) -> list[Span]:
        """Return the flat buffers of gathered units, each until the next unit is gathered."""
        if not units:  # a stage that has less than a block
            return []
        starts = [begin if n == 0 else unit.forward[0] for n, unit in enumerate(units)]
        ends = [*((tick, _NEXT_WHOLE) for tick in starts[1:]), (end, _AFTER_LAST)]
        spans = [
            _span(self.sizes.padded(unit), "temporary", at, _NEXT_GATHERS, *until)
            for unit, at, until in zip(units, starts, ends, strict=True)
        ]
        return spans + [
            _span(self.sizes.copied(unit), "temporary", at, _UNIT_WHOLE, at, _BUFFER_FREE)
            for unit, at in zip(units, starts, strict=True)
        ]

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
        whole_bytes, buffer = (
            self.sizes.whole(rest),
            self.sizes.padded(rest) + self.sizes.copied(rest),
        )
        return [
            _span(buffer, "temporary", back, _AFTER_RESHARD, back, _BUFFER_FREE),
            _span(whole_bytes, "parameters", back, _AFTER_LAST, end - 1, _AFTER_RESHARD),
        ]

    def _in_backward(self, back: int, end: int, *, found: Sequence[bool]) -> list[Span]:
        """Return the spans of units that are gathered for their backward pass.

        Each unit is gathered while the previous unit in the backward pass computes.

        Args:
            back: the tick at which the gradient of the model's output is made. The first unit is
                gathered at this tick.
            end: see `_unused_prefetches`.
            found: for each unit, whether the backward pass finds it gathered; empty if none.
        """
        held = {unit.place for unit, stays in zip(self.units, found, strict=False) if stays}
        spans, alone = self._unused_prefetches(back, end, held)
        ahead = (back, _AFTER_LAST)
        back_through = filter(_has_backward, self.units)
        for unit in sorted(back_through, key=lambda unit: unit.backward[0]):
            at, done = unit.backward
            if unit.place in held:
                ahead = (at, _PREFETCH)
                continue
            ahead = (at, _NEXT_GATHERS) if unit in alone else min(ahead, (at, _NEXT_GATHERS))
            buffer, whole_bytes = self.sizes.padded(unit), self.sizes.whole(unit)
            spans.append(_span(buffer, "temporary", *ahead, at, _BUFFER_FREE))
            copied = self.sizes.copied(unit)
            spans.append(_span(copied, "temporary", at, _UNIT_WHOLE, at, _BUFFER_FREE))
            spans.append(_span(whole_bytes, "parameters", at, _UNIT_WHOLE, done, _AFTER_RESHARD))
            ahead = (at, _PREFETCH)
        return spans

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
        closed = max((unit.backward[1] for unit in self.units), default=back) + 1
        following = [*self.units[1:], *([None] if self.units else [])]
        for unit, after in zip(self.units, following, strict=True):
            reduced_later = (
                later.backward[1]
                for later in self.units
                if later.place > unit.place and _has_backward(later) and later.backward[1] >= end
            )
            freed = min(reduced_later, default=closed)
            if after is not None and not _has_backward(after):
                alone.append(unit)
            elif not _has_backward(unit) and unit.place not in held:
                ahead = (back, _AFTER_LAST) if after is None else (after.backward[0], _PREFETCH)
                spans.append(_span(self.sizes.padded(unit), "temporary", *ahead, freed, 0))
        return spans, alone

    def _reduced(self, rest: BlockTicks, end: int, *, fresh: bool) -> list[Span]:
        """Return each unit's gradient buffer, until the next unit is reduced, and its shard."""
        spans = []
        order = [(unit.backward[1], unit) for unit in self.units] + [(end - 1, rest)]
        order.sort(key=lambda pair: pair[0])
        closed = max(end, order[-1][0] + 1)
        next_ones = [*((tick, _AFTER_LAST) for tick, _ in order[1:]), (closed, 0)]
        for (reduced_at, unit), next_reduced in zip(order, next_ones, strict=True):
            whole_bytes, shard = self.sizes.reduced(unit), self.sizes.shard(unit, trained=True)
            spans.append(_span(whole_bytes, "temporary", reduced_at, _REDUCING, *next_reduced))
            if not self.sizes.alone:
                spans.append(
                    _span(whole_bytes, "temporary", reduced_at, _EXCHANGE, reduced_at, _EXCHANGED)
                )
            kind: MemoryKind = "gradients" if fresh else "temporary"
            freed_at = (closed + 1, 0) if fresh else (reduced_at, _EXCHANGED)
            spans.append(_span(shard, kind, reduced_at, _SHARD, *freed_at))
        return spans


def _closed_after_rest(units: Sequence[BlockTicks], end: int) -> list[BlockTicks]:
    """Return the blocks; the backward pass of each ends when its gradients are reduced.

    Blocks whose inputs need no gradient are reduced last, one by one in the order of the model's
    modules, after the layers outside of blocks.

    Args:
        units: the units in the order of the forward pass.
        end: the tick at which one process has freed everything.
    """
    ticks = count(end)
    by_place = sorted(units, key=lambda unit: unit.place)
    closed = {
        unit.place: replace(unit, backward=(unit.backward[0], next(ticks)))
        for unit in by_place
        if unit.backward[1] >= end - 1 and _has_backward(unit)
    }
    return [closed.get(unit.place, unit) for unit in units]


def _has_backward(unit: BlockTicks) -> bool:
    """Whether a unit has a backward pass; a frozen teacher, for example, has none."""
    return any(unit.trained) or unit.backward[0] < unit.backward[1]


def _span(
    nbytes: int, kind: MemoryKind, tick: int, sub_tick: int, end: int, end_place: int
) -> Span:
    birth = tick * _FINE + sub_tick
    return Span(nbytes, kind, birth, max(birth + 1, end * _FINE + end_place))
