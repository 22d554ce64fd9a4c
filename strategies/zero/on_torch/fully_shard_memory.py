"""What one rank holds under fully_shard: shards, and the units that are whole at each moment.

How fully_shard goes about it (read off the storages of real runs): a unit's parameters arrive in
one flat buffer and are copied out of it; the buffer stays until the next unit is gathered, the
last one's until the model's forward pass ends. In the backward pass the next unit is gathered while
one is at work. A unit's gradients are copied into one buffer, which is reduced to this rank's shard
and stays until the next unit's takes its place.
Between two units the first one's parameters go, then the buffer of the unit before it, and only
then comes its own; the next unit's parameters come when all that is done.

On one rank there is nothing to exchange: parameters are copied one by one out of the shards, by
way of a copy in bf16 where that is what is computed in, and gradients out of the one buffer.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from bigtrain.core.strategy import Plan
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.devices import is_accelerator
from bigtrain.memory.timeline import BlockTicks, MemoryKind, Span, Timeline, scale_timeline


def forecast_fully_shard(
    forecast: Forecast, profile: Profile, plan: Plan, *, stage: int, ranks: int
) -> Forecast:
    """Turn a forecast into that of a rank under fully_shard.

    Args:
        forecast: of what comes before.
        profile: of one process.
        plan: precision, accumulation, offload.
        stage: 2 keeps gathered units from the forward to the backward pass, 3 does not.
        ranks: over how many ranks the states are sharded.
    """
    if profile.outside_blocks is None:
        return forecast
    sizes = _Sizes(4 if plan.precision != "fp64" else 8, plan, ranks)
    units = [*(first for first, _ in profile.blocks), profile.outside_blocks]
    shards = sum(sizes.shard(unit) for unit in units)
    trained = sum(sizes.shard(unit, trained=True) for unit in units)
    full_bytes = profile.trained_elements * sizes.kept
    share = trained / full_bytes if full_bytes else 0.0
    full_optimizer_bytes = max(1, profile.optimizer_bytes)
    state = trained * profile.state_slots + profile.state_scalars
    states = replace(
        forecast.states,
        parameters=shards,
        # What of the state an offload has left here is left of the shard's, too.
        optimizer=round(state * min(1.0, forecast.states.optimizer / full_optimizer_bytes)),
    )
    # Whole gradients are new ones in every micro-batch, and only their shards are added up: each
    # goes as the first of one process.
    unit_passes = _Pass(sizes, units[:-1], stage)
    unsharded = (profile.passes["first"], profile.outside_blocks)
    fresh = not (sizes.on_host or plan.release_gradients)
    first = later = unit_passes.timeline(*unsharded, fresh=fresh)
    if fresh and plan.batch.accumulation_steps > 1:
        later = unit_passes.timeline(*unsharded, fresh=False)
    if sizes.on_host:  # with the gradients and the state; what is gathered stays on the GPU
        return replace(
            forecast.with_passes(first=first, later=later),
            states=replace(states, parameters=0, optimizer=0),
            step=replace(forecast.step, spans=()),
            gradients=0,
        )
    # The last micro-batch goes as the others: no less than it needs.
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
        step=scale_timeline(forecast.step, share * sizes.kept / sizes.used),
        gradients=0 if plan.release_gradients else trained,
        added_to_whole=sizes.first_shards(units),
    )


@dataclass(frozen=True)
class _Sizes:
    """Bytes of a unit: whole as it is computed with, whole as it is reduced, and a rank's shard."""

    kept: int
    """Bytes of a number in a shard: of parameters and gradients alike."""
    plan: Plan
    ranks: int
    _known: dict[tuple[int, bool], tuple[BlockTicks, int]] = field(default_factory=dict)

    @property
    def used(self) -> int:
        """Bytes of a number in a gathered unit."""
        return 2 if self.plan.bf16_parameters else self.kept

    def shard(self, unit: BlockTicks, *, trained: bool = False) -> int:
        """Rows are dealt out evenly, and the last ranks' are padded to the same number."""
        key = (id(unit), trained)
        if key not in self._known:  # the unit is kept, so that its id stays its own
            numbers = sum(
                math.ceil(shape[0] / self.ranks) * math.prod(shape[1:]) if shape else 1
                for shape, wanted in zip(unit.shapes, unit.trained, strict=True)
                if wanted or not trained
            )
            self._known[key] = unit, self.kept * numbers
        return self._known[key][1]

    def first_shards(self, units: Sequence[BlockTicks]) -> int:
        """The most of the shards beside what is left whole, of which units go one by one."""
        there = most = 0
        for unit in units:
            own = self.shard(unit)
            most = max(most, there + own)
            there += own - self.kept * sum(math.prod(shape) for shape in unit.shapes)
        return most

    @property
    def on_host(self) -> bool:
        """Whether the shards live on the host, and what is gathered on the GPU."""
        return self.plan.offload_tiers.parameters == "cpu" and is_accelerator(self.plan.device_type)

    @property
    def alone(self) -> bool:
        """Whether the shard of one rank is all there is, so that nothing is exchanged."""
        return self.ranks == 1

    def padded(self, unit: BlockTicks) -> int:
        """Bytes of the flat buffer that a unit is gathered in, padding included."""
        return 0 if self.alone else self.whole(unit)

    def whole(self, unit: BlockTicks) -> int:
        """Bytes of a gathered unit after it is copied out of the flat buffer."""
        return self.shard(unit) * self.ranks * self.used // self.kept

    def copied(self, unit: BlockTicks) -> int:
        """Bytes beside a whole unit at the most, while one rank copies its parameters.

        They go one after the other: each comes from the host where it lives there, is cast, and is
        copied from what was cast, which goes when the next one's is there.
        """
        if not self.alone:
            return 0
        done = last = most = 0
        for shape in unit.shapes:
            numbers = math.prod(shape)
            made = [self.kept * numbers] if self.on_host else []
            made += [self.used * numbers] if self.used != self.kept else []
            most = max(most, done + last + sum(made))
            done, last = done + self.used * numbers, made[-1] if made else 0
            most = max(most, done + last)
        return max(0, most - done)

    def reduced(self, unit: BlockTicks) -> int:
        """Bytes of a unit's gradients in the buffer that is reduced."""
        return self.shard(unit, trained=True) * self.ranks


_FINE = 16
"""Moments to a tick of the profile's clock: what hooks do one after the other falls on one tick."""
# In the order of the hooks: a unit's post-hook runs before the pre-hook of the next one.
_AFTER_RESHARD, _AFTER_LAST, _REDUCING, _COPIED, _SHARD, _EXCHANGE, _EXCHANGED = range(1, 8)
_NEXT_GATHERS, _UNIT_THERE, _NEXT_HAS, _BUFFER_FREE, _PREFETCH = range(9, 14)


@dataclass(frozen=True)
class _Pass:
    """One micro-batch: forward and backward over the units, on a clock `_FINE` times as fine."""

    sizes: _Sizes
    units: Sequence[BlockTicks]
    """The blocks in the order of the forward pass; the ticks are those of the timeline."""
    stage: int

    def timeline(
        self, unsharded: Timeline, rest: BlockTicks, *, fresh: bool, resumed: bool = False
    ) -> Timeline:
        """The pass of one process with what gathering and reducing add.

        Args:
            unsharded: without any sharding.
            rest: what is in no block; whole from the first moment until its gradients are reduced.
            fresh: whether the shards of the gradients come to be in this pass.
            resumed: whether the forward pass finds what one before it has gathered and kept, and
                the backward pass finds none of it, as one before it has freed all.
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
            spans += self._kept_before(rest, backward_start, end)
        else:
            whole = self.sizes.whole(rest)
            spans.append(_span(whole, "parameters", begin, 0, end - 1, _AFTER_RESHARD))
            spans += self._gathered_forward([rest, *self.units], begin, forward_end)
        if self.stage == 2 and not resumed:
            spans += [
                _span(
                    self.sizes.whole(unit), "parameters",
                    unit.forward[0], _UNIT_THERE, unit.backward[1], _AFTER_RESHARD,
                )
                for unit in closed.units
            ]  # fmt: skip
        if self.stage == 3:
            spans += self._in_forward()
            if resumed:
                spans += self._gathered_forward(self.units, begin, forward_end)
        if self.stage == 3 or resumed:
            spans += closed._in_backward(max(backward_start, rest.backward[0]))
        spans += closed._reduced(rest, end, fresh=fresh)
        phases = tuple((tick * _FINE, phase) for tick, phase in unsharded.phases)
        return Timeline(tuple(span for span in spans if span.nbytes), phases)

    def strayed(self, usual: Timeline, rest: BlockTicks) -> Timeline:
        """The same where several forward passes came before.

        Units are gathered ahead in the reverse of all their forward passes. So the last unit of the
        backward pass has the one gathered that came before it in those: the last of the pass
        before. A unit that is still whole, as what is in no block, is not gathered once more.
        """
        if rest.shapes or len(self.units) < 2:
            return usual
        end = max(span.death for span in usual.spans)
        begin = self.units[0].backward[0] * _FINE + _PREFETCH
        stray = Span(self.sizes.padded(self.units[-1]), "temporary", begin, end)
        return Timeline((*usual.spans, stray), usual.phases)

    def _plain(self, plain: Timeline, end: int) -> list[Span]:
        """All that one process has; gradients each until its unit's are in one buffer."""
        spans = []
        units = sorted(self.units, key=lambda unit: unit.backward)
        begins = [unit.backward[0] for unit in units]
        for nbytes, kind, birth, death in plain.spans:
            if kind == "gradients":
                place = bisect_right(begins, birth) - 1
                done = end - 1
                if place >= 0 and birth <= units[place].backward[1]:
                    done = units[place].backward[1]
                last = max(birth, done) * _FINE + _COPIED
                spans.append(Span(nbytes, "temporary", birth * _FINE, last))
            else:
                spans.append(Span(nbytes, kind, birth * _FINE, death * _FINE))
        return spans

    def _gathered_forward(self, units: Sequence[BlockTicks], begin: int, end: int) -> list[Span]:
        """The flat buffers that units arrive in, each until the next one's is there."""
        if not units:  # a stage of less than a block
            return []
        starts = [begin if n == 0 else unit.forward[0] for n, unit in enumerate(units)]
        ends = [*((tick, _NEXT_HAS) for tick in starts[1:]), (end, _AFTER_LAST)]
        spans = [
            _span(self.sizes.padded(unit), "temporary", at, _NEXT_GATHERS, *until)
            for unit, at, until in zip(units, starts, ends, strict=True)
        ]
        return spans + [
            _span(self.sizes.copied(unit), "temporary", at, _UNIT_THERE, at, _BUFFER_FREE)
            for unit, at in zip(units, starts, strict=True)
        ]

    def _in_forward(self) -> list[Span]:
        """Units that are freed after their forward pass."""
        return [
            _span(
                self.sizes.whole(unit), "parameters",
                unit.forward[0], _UNIT_THERE, unit.forward[1], _AFTER_RESHARD,
            )
            for unit in self.units
        ]  # fmt: skip

    def _kept_before(self, rest: BlockTicks, back: int, end: int) -> list[Span]:
        """What is in no block comes whole at the beginning of the backward pass."""
        whole, buffer = self.sizes.whole(rest), self.sizes.padded(rest) + self.sizes.copied(rest)
        return [
            _span(buffer, "temporary", back, _AFTER_RESHARD, back, _BUFFER_FREE),
            _span(whole, "parameters", back, _AFTER_LAST, end - 1, _AFTER_RESHARD),
        ]

    def _in_backward(self, back: int) -> list[Span]:
        """Units that are gathered for their backward pass, while the one before is at work.

        Args:
            back: when the gradient of the model's output is there, and so the first one gathered.
        """
        spans, alone = self._gathered_in_vain(back)
        ahead = (back, _AFTER_LAST)
        back_through = filter(_goes_back, self.units)
        for unit in sorted(back_through, key=lambda unit: unit.backward[0]):
            at, done = unit.backward
            ahead = (at, _NEXT_GATHERS) if unit in alone else min(ahead, (at, _NEXT_GATHERS))
            buffer, whole = self.sizes.padded(unit), self.sizes.whole(unit)
            spans.append(_span(buffer, "temporary", *ahead, at, _BUFFER_FREE))
            copied = self.sizes.copied(unit)
            spans.append(_span(copied, "temporary", at, _UNIT_THERE, at, _BUFFER_FREE))
            spans.append(_span(whole, "parameters", at, _UNIT_THERE, done, _AFTER_RESHARD))
            ahead = (at, _PREFETCH)
        return spans

    def _gathered_in_vain(self, back: int) -> tuple[list[Span], list[BlockTicks]]:
        """Units that are gathered ahead, by the forward pass's order, and not gone back through.

        Their buffers stay until all is reduced. The second list has those before them, which nobody
        gathers ahead.
        """
        spans, alone = [], []
        end = max((unit.backward[1] for unit in self.units), default=back) + 1
        following = [*self.units[1:], *([None] if self.units else [])]
        for unit, after in zip(self.units, following, strict=True):
            if after is not None and not _goes_back(after):
                alone.append(unit)
            elif not _goes_back(unit):
                ahead = (back, _AFTER_LAST) if after is None else (after.backward[0], _PREFETCH)
                spans.append(_span(self.sizes.padded(unit), "temporary", *ahead, end, 0))
        return spans, alone

    def _reduced(self, rest: BlockTicks, end: int, *, fresh: bool) -> list[Span]:
        """Each unit's gradients in one buffer until the next unit's, and the shard made of it."""
        spans = []
        order = [(unit.backward[1], unit) for unit in self.units] + [(end - 1, rest)]
        order.sort(key=lambda pair: pair[0])
        closed = max(end, order[-1][0] + 1)
        next_ones = [*((tick, _AFTER_LAST) for tick, _ in order[1:]), (closed, 0)]
        for (reduced_at, unit), next_reduced in zip(order, next_ones, strict=True):
            whole, shard = self.sizes.reduced(unit), self.sizes.shard(unit, trained=True)
            spans.append(_span(whole, "temporary", reduced_at, _REDUCING, *next_reduced))
            if not self.sizes.alone:
                spans.append(
                    _span(whole, "temporary", reduced_at, _EXCHANGE, reduced_at, _EXCHANGED)
                )
            kind: MemoryKind = "gradients" if fresh else "temporary"
            freed_at = (closed + 1, 0) if fresh else (reduced_at, _EXCHANGED)
            spans.append(_span(shard, kind, reduced_at, _SHARD, *freed_at))
        return spans


def _closed_after_rest(units: Sequence[BlockTicks], end: int) -> list[BlockTicks]:
    """Blocks whose inputs need no gradient are closed last, one by one, after what is in no block.

    Args:
        units: in the order of the forward pass.
        end: the tick at which all is gone in one process.
    """
    ticks = count(end)
    return [
        replace(unit, backward=(unit.backward[0], next(ticks)))
        if unit.backward[1] >= end - 1 and _goes_back(unit)
        else unit
        for unit in units
    ]


def _goes_back(unit: BlockTicks) -> bool:
    """Not what is frozen, and hands on nothing that is trained: a teacher."""
    return any(unit.trained) or unit.backward[0] < unit.backward[1]


def _span(nbytes: int, kind: MemoryKind, tick: int, place: int, end: int, end_place: int) -> Span:
    birth = tick * _FINE + place
    return Span(nbytes, kind, birth, max(birth + 1, end * _FINE + end_place))
