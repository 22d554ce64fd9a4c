"""What one rank holds under DeepSpeed: its shards, its buffers, and what is whole for a moment.

All bytes are those of the fullest rank: the one whose shard of the gradients is begun first, at
the start of the backward pass, when the activations are all there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigtrain.forecast import Forecast, Profile
from bigtrain.strategies.zero.deepspeed_config import accumulates_in_fp32, precision_of
from bigtrain.strategy import Plan
from bigtrain.timeline import Kind, Phase, Span, Timeline


def forecast_of(
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
    stage = zero["stage"]
    size = precision_of(plan)
    bucket = int(zero.get("reduce_bucket_size", 500_000_000)) * size
    if stage == 3:
        return _cut(zero, forecast, profile, plan, bucket)
    share = -(-profile.trained_elements // (2 * plan.dp)) * 2
    bucket *= 2 if zero.get("overlap_comm", False) else 1
    states = replace(
        forecast.states,
        optimizer=_optimizer_bytes(profile, plan, share),
        gradients=4 * share,
        buffers=forecast.states.buffers + bucket,
    )
    step = _on_shard(profile.step, plan)
    result = replace(forecast, states=states, first=profile.next, step=step, next=None)
    if stage == 1 and plan.batch.accumulation_steps > 1:
        # Whole gradients wait for the last micro-batch, which reduces them into the shard.
        whole = size * profile.trained_elements
        result = replace(
            result,
            states=replace(states, gradients=0),
            first=profile.first,
            gradients=whole + 4 * share,
        )
    return result


def _cut(
    zero: dict[str, Any], forecast: Forecast, profile: Profile, plan: Plan, bucket: int
) -> Forecast:
    """Stage 3: a module's parameters are whole while it computes, and its gradients in passing."""
    size, ranks = precision_of(plan), plan.dp
    share = -(-profile.trained_elements // ranks)
    whole = [s.nbytes for s in profile.first.spans if s.kind == "gradients"]
    persists = size * int(zero.get("stage3_param_persistence_threshold", 100_000))
    kept = sum(nbytes for nbytes in whole if nbytes <= persists)
    frozen = profile.parameter_bytes - size * profile.trained_elements
    ahead = size * int(zero.get("stage3_prefetch_bucket_size", 50_000_000))
    live = min(max(whole, default=0) + ahead, sum(whole))
    accumulator = 4 if accumulates_in_fp32(plan, 3) else size
    states = replace(
        forecast.states,
        parameters=size * share + max(0, frozen) // ranks + kept + live,
        optimizer=_optimizer_bytes(profile, plan, share),
        gradients=accumulator * share,
        buffers=forecast.states.buffers + bucket,
    )
    step = _on_shard(profile.step, plan)
    if accumulator < 4:  # a sub-group's gradients are converted for its update
        group = min(share, int(zero.get("sub_group_size", 1_000_000_000)))
        step = _during("step", step, "temporary", 4 * max(group, _bytes(whole, size) // ranks))
    return replace(forecast, states=states, first=profile.next, step=step, next=None)


def _bytes(whole: list[int], size: int) -> int:
    """Numbers in the largest parameter."""
    return max(whole, default=0) // size


def _optimizer_bytes(profile: Profile, plan: Plan, share: int) -> int:
    """Moments in fp32, and in bf16 the fp32 values that are updated."""
    copies = 1 if plan.bf16_parameters else 0
    scalars = 4 if profile.state_scalars else 0
    return round(4 * share * (profile.state_slots + copies)) + scalars


def _on_shard(step: Timeline, plan: Plan) -> Timeline:
    """The optimizer's own temporaries, on fp32 shards."""
    factor = 4 / precision_of(plan) / plan.dp
    spans = tuple(
        replace(s, nbytes=round(s.nbytes * factor)) if s.nbytes > 8 else s for s in step.spans
    )
    return Timeline(spans, step.phases)


def _during(phase: Phase, timeline: Timeline, kind: Kind, nbytes: int) -> Timeline:
    """A timeline with something more alive from the beginning of a phase to the end."""
    if nbytes <= 0:
        return timeline
    begin = next((tick for tick, name in timeline.phases if name == phase), timeline.phases[0][0])
    end = max((span.death for span in timeline.spans), default=begin + 1)
    return Timeline(
        (*timeline.spans, Span(nbytes, kind, begin, max(end, begin + 1))), timeline.phases
    )
