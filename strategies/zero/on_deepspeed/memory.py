"""What one rank holds under DeepSpeed: its shards, its buffers, and what is whole for a moment.

Under stages 1 and 2 the ranks' shards are equal parts of all parameters in a row, and a rank's
shard of the gradients comes to be when the backward pass reaches its part: of one rank at its
start, when the activations are all there. That is the fullest one; of others a plan asks by
`dp_rank`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bigtrain.core.strategy import Plan
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.devices import is_accelerator
from bigtrain.job.deepspeed_json import json_section
from bigtrain.memory.timeline import Breakdown, MemoryKind, Span, Timeline, scale_timeline
from bigtrain.strategies.zero.on_deepspeed.config import accumulates_in_fp32, precision_of


def forecast_deepspeed(
    config: dict[str, Any], forecast: Forecast, profile: Profile, plan: Plan
) -> Forecast:
    """Turn a forecast into that of a rank under DeepSpeed.

    Args:
        config: what DeepSpeed is given; its buffer sizes are in numbers, not in bytes.
        forecast: of what comes before.
        profile: of one process.
        plan: ranks, precision, accumulation, offload.
    """
    zero = config["zero_optimization"]
    bucket = int(zero.get("reduce_bucket_size", 500_000_000)) * precision_of(plan)
    offloads = json_section(zero, "offload_optimizer").get("device", "none") != "none"
    if zero["stage"] == 3:
        found = _cut(zero, forecast, profile, plan, bucket)
    else:
        found = _flat(zero, forecast, profile, plan, bucket, offloads=offloads)
    return _offloaded(zero, found, profile, plan) if offloads else found


def _flat(
    zero: dict[str, Any],
    forecast: Forecast,
    profile: Profile,
    plan: Plan,
    bucket: int,
    *,
    offloads: bool,
) -> Forecast:
    """Stages 1 and 2: one flat buffer of parameters, of which a rank updates its part."""
    stage, size = zero["stage"], precision_of(plan)
    share = -(-profile.trained_elements // (2 * plan.dp)) * 2
    buckets = bucket * (2 if zero.get("overlap_comm", False) else 1)
    states = replace(
        forecast.states,
        optimizer=_optimizer_bytes(profile, plan, share),
        gradients=0,
        buffers=forecast.states.buffers + buckets,
    )
    shard = 4 * share
    backward = _Backward.of(profile)
    waits = stage == 1 and plan.batch.accumulation_steps > 1
    if offloads and (size == 4 or stage == 1):
        # What is reduced goes into the gradient of the optimizer's own copy, there from the start.
        first = _throughout(backward.timeline, "gradients", shard)
    else:
        first = backward.with_shard(shard, bucket, plan, waits=waits)
    later = forecast.passes["later"] if waits else backward.timeline
    if offloads:
        first = backward.with_host_copies(first, bucket, plan)
        later = later if waits else backward.with_host_copies(later, bucket, plan)
    held = shard
    if waits:
        # Whole gradients wait for the last micro-batch, which reduces them into the shard.
        held = size * profile.trained_elements
        first = backward.emptying(first, bucket)
    return replace(
        forecast.with_passes(first=first, later=later),
        states=states,
        step=_on_flat(profile, plan, _group_shares(profile, plan)),
        gradients=held,
        step_gradients=shard,
        building=Breakdown() if offloads else _flat_building(profile, plan, share),
        added_to_whole=size * profile.trained_elements,
    )


def _cut(
    zero: dict[str, Any], forecast: Forecast, profile: Profile, plan: Plan, bucket: int
) -> Forecast:
    """Stage 3: a module's parameters are whole while it computes, and its gradients in passing."""
    size, ranks = precision_of(plan), plan.dp
    share = -(-profile.trained_elements // ranks)
    backward = _Backward.of(profile)
    whole = [span.nbytes for span in backward.gradients]
    persistence_bytes = size * int(zero.get("stage3_param_persistence_threshold", 100_000))
    persistent_bytes = sum(nbytes for nbytes in whole if nbytes <= persistence_bytes)
    frozen = profile.parameter_bytes - size * profile.trained_elements
    accumulator = 4 if accumulates_in_fp32(plan, 3) else size
    states = replace(
        forecast.states,
        parameters=size * share + max(0, frozen) // ranks + persistent_bytes,
        optimizer=_optimizer_bytes(profile, plan, share),
        gradients=accumulator * share,
        buffers=forecast.states.buffers + bucket,
    )
    prefetch_bytes = size * int(zero.get("stage3_prefetch_bucket_size", 50_000_000))
    first = backward.with_gathered(persistence_bytes, min(prefetch_bytes, sum(whole)), size)
    first = backward.with_copies(first, bucket, plan)
    step = _on_flat(profile, plan, _sub_groups(zero, profile, plan))
    if accumulator < 4:  # a sub-group's gradients are converted for its update
        group = min(share, int(zero.get("sub_group_size", 1_000_000_000)))
        largest = max(whole, default=0) // size // ranks
        step = _throughout(step, "temporary", 4 * max(group, largest))
    building = Breakdown(
        parameters=states.parameters - persistent_bytes,
        gradients=states.gradients,
        optimizer=round(states.optimizer * profile.early_share),
        buffers=states.buffers,
        # DeepSpeed's own fp32 copy, and what is left of the last module that was cut.
        temporary=4 * share + max(whole, default=0),
    )
    return replace(forecast.with_passes(first=first), states=states, step=step, building=building)


def _flat_building(profile: Profile, plan: Plan, share: int) -> Breakdown:
    """While DeepSpeed makes its optimizer: a copy of a rank's part in fp32, and zeros for it."""
    kept = 4 * share if plan.bf16_parameters else 0  # the values before they were rounded
    return Breakdown(
        parameters=profile.parameter_bytes,
        optimizer=round(_optimizer_bytes(profile, plan, share) * profile.early_share),
        buffers=profile.buffer_bytes,
        temporary=8 * share + kept,
    )


def _offloaded(zero: dict[str, Any], found: Forecast, profile: Profile, plan: Plan) -> Forecast:
    """With the state on the host: off a GPU, or, where the host is the device, beside copies."""
    if is_accelerator(plan.device_type):
        return replace(found, states=replace(found.states, optimizer=0))
    size, share = precision_of(plan), -(-profile.trained_elements // plan.dp)
    backward = _Backward.of(profile)
    largest = max((span.nbytes for span in backward.gradients), default=0)
    # fp32 values apart from the parameters, and the gradient where the optimizer wants it.
    copies = 0 if plan.bf16_parameters else 4 * share
    if zero["stage"] == 3:
        copies += 4 * share + (2 * largest if plan.bf16_parameters else 0)
    else:
        copies += size * share + 2 * largest  # and a gradient's way there and back
        if zero["stage"] == 2 and plan.bf16_parameters:
            copies += 4 * share  # what is reduced into
        elif zero["stage"] == 2 and plan.batch.accumulation_steps > 1:
            copies += backward.accumulated_bytes(plan)
    return replace(found, states=replace(found.states, buffers=found.states.buffers + copies))


@dataclass(frozen=True)
class _Backward:
    """One micro-batch whose gradients go as soon as they are there, in the order they come."""

    timeline: Timeline
    gradients: tuple[Span, ...]
    """By birth; each lives until it is added to what there is."""
    offsets: tuple[int, ...]
    """Of each of them, where it begins among the gradients of all parameters in a row, in bytes."""
    viewed: Mapping[int, int] = field(default_factory=dict)
    """Births of the gradients of parameters of which a view is saved, with the tick from which on
    it is there no more; see `Profile`."""
    together: tuple[frozenset[int], ...] = ()
    """Births of the gradients of parameters that one module has."""
    begins: tuple[int | None, ...] = ()
    """Of each such module the tick from which on it is gone back through."""
    passes: tuple[tuple[tuple[int, int], ...], ...] = ()
    """And from which to which tick a forward pass goes through it."""
    largest: tuple[tuple[int, int, int], ...] = ()
    """Where modules are not known, as of sections put together: of each block, and of what comes
    after them, the numbers of its largest parameter, and from when to when it goes forward."""
    again: tuple[tuple[int, int], ...] = ()
    """From when to when blocks are computed again and gone back through."""

    @classmethod
    def of(cls, profile: Profile) -> _Backward:
        """The second micro-batch of a profile, the first one telling which spans are gradients."""
        timeline = profile.with_passing_gradients()
        first, later = (
            sorted(one.spans, key=lambda span: span.birth)
            for one in (profile.passes["first"], timeline)
        )
        pairs = [
            (was.birth, now)
            for was, now in zip(first, later, strict=True)
            if was.kind == "gradients"
        ]
        pass_number = int(not profile.copies_gradients())
        views = dict(profile.viewed_births)
        phases = profile.passes["first"].phases
        turn = next((t for t, phase in phases if phase == "backward"), phases[-1][0])
        births, ticks = [span.birth for span in first], [span.birth for span in later]

        def moved(tick: int | None) -> int | None:
            place = 0 if tick is None else bisect_right(births, tick)
            return ticks[place - 1] + 1 if place else None

        def following(tick: int | None) -> int | None:
            """What is reduced then goes before anything is gathered."""
            place = None if tick is None else bisect_right(births, tick)
            return ticks[place] if place is not None and place < len(ticks) else None

        offsets = _offsets({birth: now.nbytes for birth, now in pairs}, profile.gradient_births)
        return cls(
            timeline,
            tuple(now for _, now in pairs),
            tuple(offsets[birth] for birth, _ in pairs),
            {now.birth: moved(views[birth]) or now.birth for birth, now in pairs if birth in views},
            tuple(
                frozenset(now.birth for birth, now in pairs if birth in births)
                for births in profile.module_births
            ),
            tuple(following(tick) for tick in profile.module_begins),
            tuple(
                tuple(
                    (moved(begin) or ticks[0], moved(end) or ticks[0])
                    for begin, end in ways
                    if begin < turn  # those that are computed again are in `again`
                )
                for ways in profile.module_passes
            ),
            () if profile.module_passes else tuple(_largest(profile, timeline, pass_number)),
            _again(profile, pass_number),
        )

    def with_shard(self, nbytes: int, bucket: int, plan: Plan, *, waits: bool) -> Timeline:
        """With a rank's shard of the gradients, made when the first of them is reduced.

        What is in bf16 is converted, a gradient at a time, to be added to it.

        Args:
            nbytes: of the shard.
            bucket: bytes of gradients that are reduced together.
            plan: says which rank, and the precision.
            waits: whether whole gradients wait for the last micro-batch.
        """
        if not self.gradients:
            return _throughout(self.timeline, "gradients", nbytes)
        own_bytes = self._own_bytes(plan)
        added = [
            (tick, max(own_bytes[span] for span in sent))
            for tick, sent in self._reductions(bucket, waits=waits)
        ]
        begin = min(tick for tick, largest in added if largest)
        timeline = _from(begin, self.timeline, "gradients", nbytes)
        width = precision_of(plan)
        if width == 4:
            return timeline
        converted = (Span(4 * n // width, "temporary", tick, tick + 1) for tick, n in added if n)
        return Timeline((*timeline.spans, *converted), timeline.phases)

    def with_host_copies(self, timeline: Timeline, bucket: int, plan: Plan) -> Timeline:
        """With what is there while gradients go to the host.

        A gradient that is larger than the bucket is copied, and waits for the next one. Of what
        lies in a rank's part the norm is taken in fp64.
        """
        own_bytes = self._own_bytes(plan)
        wider = 8 // precision_of(plan)
        arrivals = sorted(self.gradients, key=lambda span: span.death)
        spans, waiting, filled = [], list[Span](), 0
        for span in (*arrivals, None):
            if waiting and (span is None or filled + span.nbytes > bucket):
                tick = (span or waiting[-1]).death
                largest = max(own_bytes[sent] for sent in waiting)
                spans.append(Span(wider * largest, "temporary", tick - 1, tick))
                spans += [
                    Span(sent.nbytes, "temporary", sent.death, max(tick, sent.death + 1))
                    for sent in waiting
                    if sent.nbytes > bucket
                ]
                waiting, filled = [], 0
            if span:
                waiting.append(span)
                filled += span.nbytes
        return Timeline((*timeline.spans, *spans), timeline.phases)

    def _reductions(self, bucket: int, *, waits: bool = False) -> Iterator[tuple[int, list[Span]]]:
        """When gradients are reduced, and which: a gradient that does not fit is there meanwhile.

        A small one is copied into the bucket and goes. One that is larger than the bucket is
        reduced where it lies, and what had been in the bucket before it. With `waits` it has been
        added to what waits for it.
        """
        waiting: list[Span] = []
        filled = tick = 0
        beside = 0 if waits else 1
        for span in self.gradients:
            tick = span.death
            if waiting and filled + span.nbytes > bucket:
                yield tick - beside, waiting
                waiting, filled = [], 0
            waiting.append(span)
            filled += span.nbytes
            if filled >= bucket:
                yield tick - (beside if span.nbytes > bucket else 0), waiting
                waiting, filled = [], 0
        if waiting:
            yield tick, waiting

    def _own_bytes(self, plan: Plan) -> dict[Span, int]:
        """How much of each gradient lies in a rank's part; without a rank, in that of any."""
        total = sum(span.nbytes for span in self.gradients)
        ranks = range(plan.dp) if plan.dp_rank is None else [plan.dp_rank]
        parts = [(total * rank // plan.dp, total * (rank + 1) // plan.dp) for rank in ranks]
        return {
            span: max(
                max(0, min(end, offset + span.nbytes) - max(begin, offset)) for begin, end in parts
            )
            for span, offset in zip(self.gradients, self.offsets, strict=True)
        }

    def accumulated_bytes(self, plan: Plan) -> int:
        """Of the gradients that reach into a rank's part: each accumulates whole on the host."""
        return max(
            sum(
                span.nbytes
                for span, own in self._own_bytes(replace(plan, dp_rank=rank)).items()
                if own
            )
            for rank in (range(plan.dp) if plan.dp_rank is None else [plan.dp_rank])
        )

    def emptying(self, timeline: Timeline, bucket: int) -> Timeline:
        """With whole gradients there from before, each until it is reduced or in the bucket."""
        begin = timeline.phases[0][0]
        spans = [
            Span(g.nbytes, "gradients", begin, g.death + (g.nbytes > bucket))
            for g in self.gradients
        ]
        return Timeline((*timeline.spans, *spans), timeline.phases)

    def with_copies(self, timeline: Timeline, bucket: int, plan: Plan) -> Timeline:
        """With the copies of what is reduced and scattered.

        DeepSpeed makes one of several gradients, or of one that the ranks cannot share evenly;
        gloo one of whatever it is given.
        """
        spans = []
        unit = precision_of(plan) * plan.dp
        for tick, sent in self._reductions(bucket):
            padded = sum(-(-span.nbytes // unit) * unit for span in sent)
            copies = int(plan.device_type == "cpu")
            copies += len(sent) > 1 or padded > sent[0].nbytes
            spans.append(Span(copies * padded, "temporary", tick, tick + 1))
        return Timeline((*timeline.spans, *spans), timeline.phases)

    def with_gathered(self, persists: int, ahead: int, width: int) -> Timeline:
        """With the parameter in use whole: that whose gradient is made next.

        Args:
            persists: parameters up to so many bytes are whole all the time.
            ahead: bytes that are gathered before their turn.
            width: bytes of a number of a parameter.
        """
        spans = []
        births = sorted(span.birth for span in self.timeline.spans)
        gathered = [gradient for gradient in self.gradients if gradient.nbytes > persists]
        for gradient in gathered:
            # All of a module are, when the first is wanted, and go with the last.
            places = (n for n, group in enumerate(self.together) if gradient.birth in group)
            place = next(places, None)
            own = () if place is None else self.together[place]
            alike = [g for g in gathered if g.birth in own] or [gradient]
            first, end = min(g.birth for g in alike), max(g.death for g in alike)
            # Gathered for the gradient of the module's input, which is made just before.
            begin = births[max(0, bisect_left(births, first) - 1)]
            # A block that is computed again has its parameters whole from then on.
            again = [a for a, b in self.again if a <= gradient.birth <= b]
            # Or as soon as its module is gone back through, if that takes longer.
            turn = self.begins[place] if place is not None and self.begins else None
            begin = min([begin, *(again or ([] if turn is None else [turn]))])
            spans.append(Span(gradient.nbytes + ahead, "parameters", begin, end))
            if gradient.birth in self.viewed and not again:  # the whole, by its view
                start = self.timeline.phases[0][0]
                until = self.viewed[gradient.birth]
                spans.append(Span(gradient.nbytes, "parameters", start, until))
        for own, ways in zip(self.together, self.passes, strict=False):
            # What a view keeps is whole from then on anyhow.
            sizes = [g.nbytes for g in gathered if g.birth in own and g.birth not in self.viewed]
            spans += [
                Span(sum(sizes) + ahead, "parameters", begin, end)
                for begin, end in ways
                if sizes and end > begin
            ]
        spans += [
            Span(numbers * width + ahead, "parameters", begin, end)
            for numbers, begin, end in self.largest
            if numbers * width > persists
        ]
        return Timeline((*self.timeline.spans, *spans), self.timeline.phases)


def _offsets(sizes: Mapping[int, int], births: Sequence[int]) -> dict[int, int]:
    """Where each gradient begins among those of all parameters in a row.

    Args:
        sizes: of the gradients, by birth.
        births: in the order of the parameters; where others are given, they are taken to come in
            the reverse of it.
    """
    is_known = sorted(births) == sorted(sizes)
    offsets, filled = {}, 0
    for birth in births if is_known else sorted(sizes, reverse=True):
        offsets[birth] = filled
        filled += sizes[birth]
    return offsets


def _largest(
    profile: Profile, timeline: Timeline, pass_number: int
) -> Iterator[tuple[int, int, int]]:
    """See `_Backward.largest`."""
    last = timeline.phases[0][0]
    for visits in profile.blocks:
        ticks = visits[pass_number]
        yield max(map(math.prod, ticks.shapes), default=0), *ticks.forward
        last = max(last, ticks.forward[1])
    rest = profile.outside_blocks
    if rest is not None and rest.shapes:
        first_turn, turn = (
            next((tick for tick, phase in one.phases if phase == "backward"), one.phases[-1][0])
            for one in (profile.passes["first"], timeline)
        )
        end = turn - max(0, first_turn - rest.forward[1])
        if end > last:
            yield max(map(math.prod, rest.shapes)), last, end


def _again(profile: Profile, pass_number: int) -> tuple[tuple[int, int], ...]:
    passes = [(name, visits[pass_number]) for name, *visits in profile.windows]
    return tuple(visit.backward for name, visit in passes if name in profile.recomputed)


def _optimizer_bytes(profile: Profile, plan: Plan, share: int) -> int:
    """Moments in fp32, and in bf16 the fp32 values that are updated."""
    copies = 1 if plan.bf16_parameters else 0
    scalars = 4 if profile.state_scalars else 0
    return round(4 * share * (profile.state_slots + copies)) + scalars


def _on_flat(profile: Profile, plan: Plan, pieces: Sequence[tuple[int, int]]) -> Timeline:
    """The optimizer's own temporaries, on flat fp32 pieces that are updated one after the other.

    Args:
        profile: of one process.
        plan: ranks and precision.
        pieces: of each its elements, and the number of its parameter group.
    """
    found = profile.step_memory.highest(pieces) if profile.step_memory is not None else None
    if found is None:  # no more is known than how it goes with whole parameters
        return scale_timeline(profile.step, 4 / precision_of(plan) / plan.dp)
    return found


def _group_shares(profile: Profile, plan: Plan) -> list[tuple[int, int]]:
    """Stages 1 and 2: a rank has one piece of each parameter group."""
    totals: dict[int, int] = {}
    for shape, group in profile.updated:
        totals[group] = totals.get(group, 0) + math.prod(shape)
    return [(-(-total // (2 * plan.dp)) * 2, group) for group, total in totals.items()]


def _sub_groups(zero: dict[str, Any], profile: Profile, plan: Plan) -> list[tuple[int, int]]:
    """Stage 3: a piece is full with the parameter by which it is as large as a sub-group."""
    most = int(zero.get("sub_group_size", 1_000_000_000))
    filled: dict[int, int] = {}
    pieces = []
    for shape, group in profile.updated:
        filled[group] = filled.get(group, 0) + -(-math.prod(shape) // plan.dp)
        if filled[group] >= most:
            pieces.append((filled.pop(group), group))
    return [*pieces, *((elements, group) for group, elements in filled.items())]


def _throughout(timeline: Timeline, kind: MemoryKind, nbytes: int) -> Timeline:
    """A timeline with something more alive all the time."""
    return _from(timeline.phases[0][0], timeline, kind, nbytes)


def _from(begin: int, timeline: Timeline, kind: MemoryKind, nbytes: int) -> Timeline:
    """A timeline with something more alive from a tick on."""
    end = max((span.death for span in timeline.spans), default=begin)
    more = Span(nbytes, kind, begin, max(end, begin + 1))
    return Timeline((*timeline.spans, more), timeline.phases)
