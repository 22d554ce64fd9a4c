"""The memory of one rank under DeepSpeed: its shards, its buffers, and temporary whole tensors.

Under stages 1 and 2 the ranks' shards are equal shares of one flat buffer of all parameters. A rank
allocates its shard of the gradients when the first gradient of its share is reduced. One of the
ranks does so at the start of the backward pass, when all activations are still alive. This rank has
the highest peak. The forecast is for this rank; if the plan sets `dp_rank`, it is for that rank.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bigtrain.core.strategy import Plan
from bigtrain.costs.forecast import Forecast, GatheredUse, Profile
from bigtrain.costs.traffic import parameter_shapes
from bigtrain.devices import is_accelerator
from bigtrain.job.deepspeed_json import json_section
from bigtrain.memory.timeline import Breakdown, MemoryKind, Span, Timeline, scale_timeline
from bigtrain.strategies.zero.on_deepspeed.config import (
    accumulates_in_fp32,
    overlaps_exchanges,
    precision_of,
)
from bigtrain.strategies.zero.on_deepspeed.layout import (
    BufferSizes,
    flat_group_shares,
    flat_share,
    gradient_offsets,
    overlap,
    piece_size,
    sub_group_shares,
)


def forecast_deepspeed(
    config: dict[str, Any], forecast: Forecast, profile: Profile, plan: Plan
) -> Forecast:
    """Return the forecast of a rank under DeepSpeed.

    Args:
        config: DeepSpeed's configuration, with buffer sizes in elements, not in bytes.
        forecast: the forecast with the techniques that are applied before.
        profile: the profile of one process.
        plan: ranks, precision, accumulation, offload.
    """
    zero = config["zero_optimization"]
    bucket = BufferSizes.of(zero).reduce_bucket * precision_of(plan)
    offloads = json_section(zero, "offload_optimizer").get("device", "none") != "none"
    if zero["stage"] == 3:
        sharded = _cut(zero, forecast, profile, plan, bucket)
    else:
        sharded = _flat(zero, forecast, profile, plan, bucket, offloads=offloads)
    return _offloaded(zero, sharded, profile, plan) if offloads else sharded


def _flat(
    zero: dict[str, Any],
    forecast: Forecast,
    profile: Profile,
    plan: Plan,
    bucket: int,
    *,
    offloads: bool,
) -> Forecast:
    """Return the forecast of stages 1 and 2, where each rank updates a share of a flat buffer."""
    stage, size = zero["stage"], precision_of(plan)
    share = flat_share(profile.trained_elements, plan.dp)
    buckets = bucket * (2 if overlaps_exchanges(zero) else 1)
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
        # The optimizer's fp32 copy always has a gradient tensor. Gradients are reduced into it.
        first = _throughout(backward.timeline, "gradients", shard)
    else:
        first = backward.with_shard(shard, bucket, plan, waits=waits)
    later = forecast.passes["later"] if waits else backward.timeline
    if offloads:
        first = backward.with_host_copies(first, bucket, plan)
        later = later if waits else backward.with_host_copies(later, bucket, plan)
    between_passes = shard
    if waits:
        # Whole gradients are added up until the last micro-batch, which reduces them.
        between_passes = size * profile.trained_elements
        first = backward.emptying(first, bucket)
    return replace(
        forecast.with_passes(first=first, later=later),
        states=states,
        step=_flat_step(profile, plan, flat_group_shares(profile.updated, plan.dp)),
        gradients=between_passes,
        step_gradients=shard,
        building=Breakdown() if offloads else _flat_building(profile, plan, share),
        added_to_whole=size * profile.trained_elements,
    )


def _cut(
    zero: dict[str, Any], forecast: Forecast, profile: Profile, plan: Plan, bucket: int
) -> Forecast:
    """Return the forecast of stage 3, where parameters are whole while their module computes."""
    size, ranks, sizes = precision_of(plan), plan.dp, BufferSizes.of(zero)
    share = piece_size(profile.trained_elements, ranks)
    backward = _Backward.of(profile)
    gradient_bytes = [span.nbytes for span in backward.gradients]
    persistence_bytes = size * sizes.persistent_parameter
    persistent_bytes = sum(nbytes for nbytes in gradient_bytes if nbytes <= persistence_bytes)
    frozen_bytes = (size * math.prod(shape) for shape in _frozen_shapes(profile))
    persistent_bytes += sum(nbytes for nbytes in frozen_bytes if nbytes <= persistence_bytes)
    accumulator = 4 if accumulates_in_fp32(plan, 3) else size
    states = replace(
        forecast.states,
        parameters=size * share + persistent_bytes,
        frozen=_frozen_shards(profile, plan),
        optimizer=_optimizer_bytes(profile, plan, share),
        gradients=accumulator * share,
        buffers=forecast.states.buffers + bucket,
    )
    prefetch_bytes = size * sizes.prefetch
    first = backward.with_gathered(
        persistence_bytes, min(prefetch_bytes, sum(gradient_bytes)), size
    )
    first = backward.with_copies(first, bucket, plan)
    step = _flat_step(profile, plan, sub_group_shares(profile.updated, ranks, sizes.sub_group))
    if accumulator < 4:  # a sub-group's gradients are converted for its update
        group = min(share, sizes.sub_group)
        largest = max(gradient_bytes, default=0) // size // ranks
        step = _throughout(step, "temporary", 4 * max(group, largest))
    building = Breakdown(
        parameters=states.parameters - persistent_bytes,
        frozen=states.frozen,
        gradients=states.gradients,
        optimizer=_early_optimizer_bytes(profile, plan, share),
        buffers=states.buffers,
        # DeepSpeed's fp32 copy, and a parameter that it gathers to find where its hooks belong.
        temporary=4 * share + max(gradient_bytes, default=0),
    )
    # While a frozen parameter is cut, it is whole in fp32 and, in bf16 runs, in bf16, too, unless
    # its piece is read from a file.
    largest, unrounded = _largest_frozen(profile), 4 * share if size < 4 else 0
    reading = Breakdown(
        parameters=states.parameters - persistent_bytes,
        frozen=states.frozen,
        temporary=unrounded + _piece_bytes(profile),
    )
    cutting = replace(
        reading,
        frozen=states.frozen - size * piece_size(largest, ranks),
        temporary=unrounded + (4 + size if size < 4 else size) * largest,
    )
    building = max(building, reading, cutting, key=lambda breakdown: breakdown.total)
    return replace(forecast.with_passes(first=first), states=states, step=step, building=building)


def _flat_building(profile: Profile, plan: Plan, share: int) -> Breakdown:
    """Return the memory at the peak while the engine of stage 1 or 2 is built.

    The peak is at one of two moments. While DeepSpeed makes its optimizer, a rank has its share in
    fp32, and zeros of the same size. While a bf16 run casts frozen parameters, the largest of them
    also exists in fp32; of those that are read from a file, a piece of the file exists.
    """
    unrounded = 4 * share if plan.bf16_parameters else 0  # fp32 values of the bf16 parameters
    made = Breakdown(
        parameters=profile.parameter_bytes - profile.frozen_bytes,
        frozen=profile.frozen_bytes,
        buffers=profile.buffer_bytes,
        temporary=unrounded,
    )
    early = round(_optimizer_bytes(profile, plan, share) * profile.early_share)
    updating = replace(made, optimizer=early, temporary=8 * share + unrounded)
    largest = 4 * _largest_frozen(profile) if plan.bf16_parameters else 0
    casting = replace(made, temporary=unrounded + max(largest, _piece_bytes(profile)))
    return max(updating, casting, key=lambda breakdown: breakdown.total)


def _offloaded(zero: dict[str, Any], sharded: Forecast, profile: Profile, plan: Plan) -> Forecast:
    """Return the forecast with the optimizer's state on the host.

    A GPU then has no optimizer state. If the device is a CPU, nothing is freed, and the copies that
    DeepSpeed makes for the transfers are added.
    """
    if is_accelerator(plan.device_type):
        return replace(sharded, states=replace(sharded.states, optimizer=0))
    size, share = precision_of(plan), piece_size(profile.trained_elements, plan.dp)
    backward = _Backward.of(profile)
    largest = max((span.nbytes for span in backward.gradients), default=0)
    # An fp32 run has the optimizer's copy in addition to the parameters. The gradient that the
    # optimizer reads is added below.
    copies = 0 if plan.bf16_parameters else 4 * share
    if zero["stage"] == 3:
        copies += 4 * share + (2 * largest if plan.bf16_parameters else 0)
    else:
        copies += size * share + 2 * largest  # a gradient copied to the host and back
        if zero["stage"] == 2 and plan.bf16_parameters:
            copies += 4 * share  # the buffer into which gradients are reduced
        elif zero["stage"] == 2 and plan.batch.accumulation_steps > 1:
            copies += backward.accumulated_bytes(plan)
    buffers = sharded.states.buffers + copies
    return replace(sharded, states=replace(sharded.states, buffers=buffers))


@dataclass(frozen=True)
class _Backward:
    """One micro-batch in one process, with each gradient freed soon after it is made.

    The methods add the shards, buffers and copies that DeepSpeed allocates.
    """

    timeline: Timeline
    gradients: tuple[Span, ...]
    """The gradients by birth; each lives until it is added to those of earlier micro-batches."""
    offsets: tuple[int, ...]
    """The offset of each of these gradients in the flat buffer of all gradients, in bytes."""
    viewed: Mapping[int, int] = field(default_factory=dict)
    """For parameters of which autograd saves a view: the tick at which the view is freed, by the
    birth of the gradient; see `Profile.viewed_births`."""
    module_births: tuple[frozenset[int], ...] = ()
    """The births of the gradients of each module's own parameters."""
    backward_starts: tuple[int | None, ...] = ()
    """The tick at which the backward pass of each of these modules starts; None if unknown."""
    forward_passes: tuple[tuple[tuple[int, int], ...], ...] = ()
    """(first, last tick) of each forward pass through each of these modules."""
    largest: tuple[tuple[int, int, int], ...] = ()
    """The elements of the largest parameter of each block, and first and last tick of its pass.

    Only for a profile without modules, such as one that is composed of sections. The layers after
    the blocks count as a block.
    """
    uses: tuple[GatheredUse, ...] = ()
    """See `Profile.gathered_uses`."""
    recomputed: tuple[tuple[int, int], ...] = ()
    """(first, last tick) of the backward pass of each recomputed block, recomputation included."""

    @classmethod
    def of(cls, profile: Profile) -> _Backward:
        """Return the second micro-batch of a profile.

        Spans are marked as gradients only in the first micro-batch. Both micro-batches have the
        same spans in the same order, so the first shows which spans of the second are gradients.
        """
        timeline = profile.with_passing_gradients()
        first, later = (
            sorted(each.spans, key=lambda span: span.birth)
            for each in (profile.passes["first"], timeline)
        )
        pairs = [
            (was.birth, now)
            for was, now in zip(first, later, strict=True)
            if was.kind == "gradients"
        ]
        pass_number = int(not profile.copies_gradients())
        views = dict(profile.viewed_births)
        phases = profile.passes["first"].phases
        backward_start = next((t for t, phase in phases if phase == "backward"), phases[-1][0])
        births, ticks = [span.birth for span in first], [span.birth for span in later]

        def moved(tick: int | None) -> int | None:
            position = 0 if tick is None else bisect_right(births, tick)
            return ticks[position - 1] + 1 if position else None

        def following(tick: int | None) -> int | None:
            """Return the tick of the next birth of a span; gradients are freed before it."""
            position = None if tick is None else bisect_right(births, tick)
            return ticks[position] if position is not None and position < len(ticks) else None

        offsets = gradient_offsets(
            {birth: now.nbytes for birth, now in pairs}, profile.gradient_births
        )
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
                    for begin, end in passes
                    if begin < backward_start  # recomputations are in `recomputed`
                )
                for passes in profile.module_passes
            ),
            () if profile.module_passes else tuple(_largest(profile, timeline, pass_number)),
            tuple(
                GatheredUse(
                    use.nbytes,
                    tuple(moved(tick) or 0 if tick else 0 for tick in use.viewed),
                    tuple(
                        (moved(begin) or ticks[0], moved(end) or ticks[0])
                        for begin, end in use.forward
                    ),
                    (following(use.backward[0]), moved(use.backward[1])),
                    tuple(now.birth for birth, now in pairs if birth in use.births),
                )
                for use in profile.gathered_uses
            ),
            _recomputed(profile, pass_number),
        )

    def with_shard(self, nbytes: int, bucket: int, plan: Plan, *, waits: bool) -> Timeline:
        """Return the pass with a rank's shard, allocated when its first gradient is reduced.

        bf16 gradients are converted to fp32 one at a time, to be added to the shard.

        Args:
            nbytes: the bytes of the rank's shard of the gradients.
            bucket: the bytes of gradients that are reduced together.
            plan: has the rank and the precision.
            waits: whether whole gradients are added up until the last micro-batch.
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
        """Add to a timeline the temporary tensors that are needed to copy gradients to the host.

        A gradient larger than the bucket is copied, and the copy is alive until the next reduction.
        The norm of the rank's share is computed in fp64.
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
        """Yield the tick of each reduction and the gradients that are reduced then.

        A small gradient is copied into the bucket and freed. A gradient that does not fit into the
        rest of the bucket is alive until the bucket is reduced. A gradient larger than the bucket
        is reduced in place, after the bucket. With `waits` a gradient is added to the sum of
        earlier micro-batches and freed.
        """
        waiting: list[Span] = []
        filled = tick = 0
        stays = 0 if waits else 1  # ticks by which the gradient outlives the reduction
        for span in self.gradients:
            tick = span.death
            if waiting and filled + span.nbytes > bucket:
                yield tick - stays, waiting
                waiting, filled = [], 0
            waiting.append(span)
            filled += span.nbytes
            if filled >= bucket:
                yield tick - (stays if span.nbytes > bucket else 0), waiting
                waiting, filled = [], 0
        if waiting:
            yield tick, waiting

    def _own_bytes(self, plan: Plan) -> dict[Span, int]:
        """Return the bytes of each gradient in the rank's share.

        If `plan` has no dp_rank, they are the most bytes of the gradient in any share.
        """
        total = sum(span.nbytes for span in self.gradients)
        ranks = range(plan.dp) if plan.dp_rank is None else [plan.dp_rank]
        shares = [range(total * rank // plan.dp, total * (rank + 1) // plan.dp) for rank in ranks]
        return {
            span: max(len(overlap(offset, offset + span.nbytes, share)) for share in shares)
            for span, offset in zip(self.gradients, self.offsets, strict=True)
        }

    def accumulated_bytes(self, plan: Plan) -> int:
        """Return the bytes of the whole gradients of which a part is in the rank's share."""
        return max(
            sum(
                span.nbytes
                for span, own_bytes in self._own_bytes(replace(plan, dp_rank=rank)).items()
                if own_bytes
            )
            for rank in (range(plan.dp) if plan.dp_rank is None else [plan.dp_rank])
        )

    def emptying(self, timeline: Timeline, bucket: int) -> Timeline:
        """Add the whole summed gradients to a timeline, each until it is reduced or copied."""
        begin = timeline.phases[0][0]
        spans = [
            Span(g.nbytes, "gradients", begin, g.death + (g.nbytes > bucket))
            for g in self.gradients
        ]
        return Timeline((*timeline.spans, *spans), timeline.phases)

    def with_copies(self, timeline: Timeline, bucket: int, plan: Plan) -> Timeline:
        """Add the copies that reduce-scatters make to a timeline.

        DeepSpeed makes a copy of several gradients, or of a gradient that needs padding. gloo makes
        another copy of its input.
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
        """Return the pass with the whole parameters of each module while it computes.

        Args:
            persists: parameters of at most so many bytes are always whole, and not added.
            ahead: the bytes of other parameters that are prefetched.
            width: the bytes of an element.
        """
        spans = []
        births = sorted(span.birth for span in self.timeline.spans)
        elsewhere = {birth for use in self.uses for birth in use.births}
        gathered = [
            gradient
            for gradient in self.gradients
            if gradient.nbytes > persists and gradient.birth not in elsewhere
        ]
        for gradient in gathered:
            # All parameters of a module are gathered with the first and freed with the last one.
            places = (n for n, group in enumerate(self.module_births) if gradient.birth in group)
            index = next(places, None)
            of_module = () if index is None else self.module_births[index]
            together = [g for g in gathered if g.birth in of_module] or [gradient]
            first, end = min(g.birth for g in together), max(g.death for g in together)
            # They are gathered one birth earlier: for the gradient of the module's input.
            begin = births[max(0, bisect_left(births, first) - 1)]
            # In a recomputed block they are gathered when the recomputation starts.
            recomputed = [a for a, b in self.recomputed if a <= gradient.birth <= b]
            # Otherwise the backward pass of the module may have started earlier.
            starts = self.backward_starts
            start = starts[index] if index is not None and starts else None
            begin = min([begin, *(recomputed or ([] if start is None else [start]))])
            spans.append(Span(gradient.nbytes + ahead, "parameters", begin, end))
            # A saved view keeps the whole parameter alive.
            if gradient.birth in self.viewed and not recomputed:
                pass_begin = self.timeline.phases[0][0]
                until = self.viewed[gradient.birth]
                spans.append(Span(gradient.nbytes, "parameters", pass_begin, until))
        for births_of_module, passes in zip(self.module_births, self.forward_passes, strict=False):
            # Parameters with a saved view were added above.
            sizes = [
                g.nbytes
                for g in gathered
                if g.birth in births_of_module and g.birth not in self.viewed
            ]
            spans += [
                Span(sum(sizes) + ahead, "parameters", begin, end)
                for begin, end in passes
                if sizes and end > begin
            ]
        for use in self.uses:
            spans += self._use_spans(use, persists, ahead)
        spans += [
            Span(numbers * width + ahead, "parameters", begin, end)
            for numbers, begin, end in self.largest
            if numbers * width > persists
        ]
        return Timeline((*self.timeline.spans, *spans), self.timeline.phases)

    def _use_spans(self, use: GatheredUse, persists: int, ahead: int) -> Iterator[Span]:
        """Yield the spans of parameters that one module gathers; see `Profile.gathered_uses`.

        Args:
            use: the parameters that the module gathers.
            persists: see `with_gathered`.
            ahead: see `with_gathered`.
        """
        begin, end = use.backward
        passes = list(use.forward)
        if begin is not None:
            # Without a gradient of the input, the parameters are released with the last module's.
            passes.append((begin, end or max(span.death for span in self.timeline.spans)))
        pairs = [pair for pair in zip(use.nbytes, use.viewed, strict=True) if pair[0] > persists]
        sizes = [nbytes for nbytes, until in pairs if not until]
        if sizes:
            for start, stop in passes:
                if stop > start:
                    yield Span(sum(sizes) + ahead, "parameters", start, stop)
        for nbytes, until in pairs:
            if until:  # a saved view keeps the whole parameter alive
                yield Span(nbytes + ahead, "parameters", passes[0][0], max(until, passes[-1][1]))


def _frozen_shards(profile: Profile, plan: Plan) -> int:
    """Return the bytes of a rank's shards of frozen parameters, with padding."""
    size, shapes = precision_of(plan), _frozen_shapes(profile)
    if not shapes:  # the shapes are not known
        return profile.frozen_bytes // plan.dp
    return sum(size * piece_size(math.prod(shape), plan.dp) for shape in shapes)


def _frozen_shapes(profile: Profile) -> list[tuple[int, ...]]:
    if not profile.frozen_bytes:
        return []
    every = Counter(parameter_shapes(profile, trained=False))
    return list((every - Counter(parameter_shapes(profile))).elements())


def _largest_frozen(profile: Profile) -> int:
    """Return the elements of the largest frozen parameter that is whole while it gets values."""
    if profile.loading is not None:
        return profile.loading.whole_frozen
    return max(map(math.prod, _frozen_shapes(profile)), default=0)


def _piece_bytes(profile: Profile) -> int:
    """Return the bytes of the largest piece of a file that is read at a time."""
    return 0 if profile.loading is None else profile.loading.piece_bytes


def _largest(
    profile: Profile, timeline: Timeline, pass_number: int
) -> Iterator[tuple[int, int, int]]:
    """See `_Backward.largest`."""
    last = timeline.phases[0][0]
    for visits in profile.blocks:
        ticks = visits[pass_number]
        yield max(map(math.prod, ticks.shapes), default=0), *ticks.forward
        frozen = [n for n, wanted in zip(ticks.shapes, ticks.trained, strict=True) if not wanted]
        if frozen:
            yield max(map(math.prod, frozen)), *ticks.backward
        last = max(last, ticks.forward[1])
    rest = profile.outside_blocks
    if rest is not None and rest.shapes:
        first_start, start = (
            next((tick for tick, phase in each.phases if phase == "backward"), each.phases[-1][0])
            for each in (profile.passes["first"], timeline)
        )
        end = start - max(0, first_start - rest.forward[1])
        if end > last:
            yield max(map(math.prod, rest.shapes)), last, end


def _recomputed(profile: Profile, pass_number: int) -> tuple[tuple[int, int], ...]:
    passes = [(name, visits[pass_number]) for name, *visits in profile.windows]
    return tuple(visit.backward for name, visit in passes if name in profile.recomputed)


def _optimizer_bytes(profile: Profile, plan: Plan, share: int) -> int:
    """Return the bytes of a rank's optimizer state: fp32 moments and, in bf16, fp32 parameters."""
    copies = 1 if plan.bf16_parameters else 0
    scalars = 4 if profile.state_scalars else 0
    return round(4 * share * (profile.state_slots + copies)) + scalars


def _early_optimizer_bytes(profile: Profile, plan: Plan, share: int) -> int:
    """Return the bytes of fp32 values and of state that exist before the first step."""
    masters = 4 * share if plan.bf16_parameters else 0
    rest = _optimizer_bytes(profile, plan, share) - masters
    return masters + round(rest * profile.early_share)


def _flat_step(profile: Profile, plan: Plan, pieces: Sequence[tuple[int, int]]) -> Timeline:
    """Return the memory of a step that updates flat fp32 pieces one after the other.

    Args:
        profile: the profile of one process.
        plan: ranks and precision.
        pieces: (elements, number of the parameter group) of each piece.
    """
    timeline = profile.step_memory.highest(pieces) if profile.step_memory is not None else None
    if timeline is None:  # only the temporaries with whole parameters are known
        return scale_timeline(profile.step, 4 / precision_of(plan) / plan.dp)
    return timeline


def _throughout(timeline: Timeline, kind: MemoryKind, nbytes: int) -> Timeline:
    """Return the timeline with one span added that is alive all the time."""
    return _from(timeline.phases[0][0], timeline, kind, nbytes)


def _from(begin: int, timeline: Timeline, kind: MemoryKind, nbytes: int) -> Timeline:
    """Return the timeline with one span added that is alive from a tick to the end."""
    end = max((span.death for span in timeline.spans), default=begin)
    more = Span(nbytes, kind, begin, max(end, begin + 1))
    return Timeline((*timeline.spans, more), timeline.phases)
