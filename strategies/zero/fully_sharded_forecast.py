"""What one rank holds under fully_shard: shards, and the units that are whole at each moment.

How fully_shard goes about it (read off the storages of real runs): a unit's parameters arrive in
one flat buffer and are copied out of it; the buffer stays until the next unit is gathered. In the
backward pass the next unit is gathered while one is at work. A unit's gradients are copied into
one buffer, which is reduced to this rank's shard and stays until the next unit's takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from bigtrain.forecast import Forecast, Profile
from bigtrain.strategy import Plan
from bigtrain.timeline import Kind, Span, Timeline, Visit, scaled


def forecast_of(
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
    if profile.rest is None:
        return forecast
    sizes = _Sizes(4 if plan.precision != "fp64" else 8, plan, ranks)
    units = [*(first for first, _ in profile.blocks), profile.rest]
    shards = sum(sizes.shard(unit) for unit in units)
    trained = sum(sizes.shard(unit, trained=True) for unit in units)
    whole = profile.trained_elements * sizes.kept
    share = trained / whole if whole else 0.0
    before = max(1, profile.optimizer_bytes)
    state = trained * profile.state_slots + profile.state_scalars
    states = replace(
        forecast.states,
        parameters=shards,
        # What of the state an offload has left here is left of the shard's, too.
        optimizer=round(state * min(1.0, forecast.states.optimizer / before)),
    )
    passes = [_Pass(sizes, [pair[which] for pair in profile.blocks], stage) for which in (0, 1)]
    again = None
    if plan.batch.accumulation_steps > 1:
        again = passes[1].timeline(profile.next, profile.rest, fresh=False)
    # On a GPU shards, gradients and state are then the host's; what is gathered stays.
    if plan.offloaded.parameters == "cpu" and plan.device_type == "cuda":
        return replace(
            forecast,
            states=replace(states, parameters=0, optimizer=0),
            first=passes[0].timeline(profile.first, profile.rest, fresh=False),
            next=again,
            step=replace(forecast.step, spans=()),
            gradients=0,
        )
    return replace(
        forecast,
        states=states,
        first=passes[0].timeline(profile.first, profile.rest, fresh=not plan.release_gradients),
        next=again,
        step=scaled(forecast.step, share * sizes.kept / sizes.used),
        gradients=0 if plan.release_gradients else trained,
    )


@dataclass(frozen=True)
class _Sizes:
    """Bytes of a unit: whole as it is computed with, whole as it is reduced, and a rank's shard."""

    kept: int
    """Bytes of a number in a shard: of parameters and gradients alike."""
    plan: Plan
    ranks: int

    @property
    def used(self) -> int:
        """Bytes of a number in a gathered unit."""
        return 2 if self.plan.bf16_parameters else self.kept

    def shard(self, unit: Visit, *, trained: bool = False) -> int:
        """Rows are dealt out evenly, and the last ranks' are padded to the same number."""
        return self.kept * sum(
            math.ceil(shape[0] / self.ranks) * math.prod(shape[1:]) if shape else 1
            for shape, wanted in zip(unit.shapes, unit.trained, strict=True)
            if wanted or not trained
        )

    def padded(self, unit: Visit) -> int:
        """Bytes of a gathered unit, padding included."""
        return self.shard(unit) * self.ranks * self.used // self.kept

    def whole(self, unit: Visit) -> int:
        """Bytes of a gathered unit after it is copied out of the flat buffer."""
        return self.padded(unit)

    def reduced(self, unit: Visit) -> int:
        """Bytes of a unit's gradients in the buffer that is reduced."""
        return self.shard(unit, trained=True) * self.ranks


@dataclass(frozen=True)
class _Pass:
    """One micro-batch: forward and backward over the units."""

    sizes: _Sizes
    units: Sequence[Visit]
    """The blocks in the order of the forward pass; the ticks are those of the timeline."""
    stage: int

    def timeline(self, plain: Timeline, rest: Visit, *, fresh: bool) -> Timeline:
        """The pass of one process with what gathering and reducing add.

        Args:
            plain: without any sharding.
            rest: what is in no block; whole from the first moment to the last.
            fresh: whether the shards of the gradients come to be in this pass.
        """
        begin = plain.phases[0][0]
        end = max((span.death for span in plain.spans), default=begin)
        back = next((tick for tick, phase in plain.phases if phase == "backward"), end)
        spans = self._activations(plain, end)
        spans.append(Span(self.sizes.whole(rest), "parameters", begin, end))
        spans += self._gathered(rest, begin, back)
        spans += self._reduced(rest, end, fresh=fresh)
        return Timeline(tuple(spans), plain.phases)

    def _activations(self, plain: Timeline, end: int) -> list[Span]:
        """All but the gradients, and those each until its unit is reduced."""
        spans = []
        for span in plain.spans:
            if span.kind == "gradients":
                done = next((u.backward[1] for u in self.units if _within(span.birth, u)), end)
                span = replace(span, kind="temporary", death=max(span.birth + 1, done + 1))
            spans.append(span)
        return spans

    def _gathered(self, rest: Visit, begin: int, back: int) -> list[Span]:
        sizes, spans = self.sizes, []
        starts = [begin, *(unit.forward[0] for unit in self.units), back]
        for unit, (at, after) in zip([rest, *self.units], pairwise(starts), strict=True):
            spans.append(Span(sizes.padded(unit), "temporary", at, max(at, after) + 1))
        for unit in self.units:
            until = unit.forward[1] if self.stage == 3 else unit.backward[1]
            spans.append(Span(sizes.whole(unit), "parameters", unit.forward[0], until))
        if self.stage == 3:
            order = sorted(self.units, key=lambda unit: unit.backward[0])
            ahead = back
            for unit in order:
                at, done = unit.backward
                spans.append(Span(sizes.padded(unit), "temporary", min(ahead, at), at + 1))
                spans.append(Span(sizes.whole(unit), "parameters", at, done))
                ahead = at + 1
        return spans

    def _reduced(self, rest: Visit, end: int, *, fresh: bool) -> list[Span]:
        spans = []
        order = sorted(self.units, key=lambda unit: unit.backward[1])
        ends = [*(unit.backward[1] for unit in order), end - 1, end]
        for unit, (at, after) in zip([*order, rest], pairwise(ends), strict=True):
            whole, shard = self.sizes.reduced(unit), self.sizes.shard(unit, trained=True)
            spans.append(Span(whole, "temporary", at, max(at + 1, after)))
            spans.append(Span(whole, "temporary", at + 1, at + 2))
            kind: Kind = "gradients" if fresh else "temporary"
            spans.append(Span(shard, kind, at + 1, end + 1 if fresh else at + 2))
        return spans


def _within(tick: int, unit: Visit) -> bool:
    return unit.backward[0] <= tick <= unit.backward[1]
