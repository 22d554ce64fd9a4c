"""The memory of one rank under fully_shard: the shards, and the passes of its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from bigtrain.core.strategy import Plan
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.memory.timeline import BlockTicks, Timeline, scale_timeline
from bigtrain.strategies.zero.on_torch.unit_passes import UnitPass
from bigtrain.strategies.zero.on_torch.unit_sizes import UnitSizes


def forecast_fully_shard(
    forecast: Forecast,
    profile: Profile,
    plan: Plan,
    *,
    kept: Sequence[bool],
    ranks: int,
    once: bool = False,
    prefetch: int | None = None,
    shared_memory: bool = False,
) -> Forecast:
    """Return the forecast of a rank under fully_shard.

    Args:
        forecast: the forecast with the techniques that are applied before.
        profile: the profile of one process.
        plan: precision, accumulation, offload.
        kept: for each of `profile.blocks`, whether it stays gathered from its forward to its
            backward pass.
        ranks: the number of ranks that share one copy of the states.
        once: whether gradients are reduced once a step, and whole until then.
        prefetch: see `UnitPass`.
        shared_memory: whether ranks reduce gradients in shared memory.
    """
    if profile.outside_blocks is None:
        return forecast
    width = 4 if plan.precision != "fp64" else 8
    sizes = UnitSizes(width, plan, ranks, shared_memory=shared_memory)
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
    before = forecast.passes
    forecast = replace(
        forecast,
        states=states,
        step=scale_timeline(forecast.step, share * sizes.shard_width / sizes.used_width),
        gradients=0 if plan.release_gradients else trained,
        added_to_whole=sizes.first_shards(units),
    )
    unit_passes = UnitPass(sizes, units[:-1], tuple(kept), prefetch)
    if once:
        forecast = _reduced_once(forecast, profile, plan, unit_passes)
    else:
        forecast = _always_reduced(forecast, profile, plan, unit_passes)
    if sizes.on_host:  # gradients and state are on the host too, gathered units on the GPU
        whole = once and plan.cut is None
        return replace(
            forecast,
            passes={**before, **forecast.passes},
            states=replace(states, parameters=0, frozen=0, optimizer=0),
            step=replace(forecast.step, spans=()),
            gradients=forecast.gradients if whole else 0,
            step_gradients=0 if whole else None,
            added_to_whole=0,
        )
    return forecast


def _always_reduced(
    forecast: Forecast, profile: Profile, plan: Plan, unit_passes: UnitPass
) -> Forecast:
    """Return the forecast with passes whose gradients are reduced in every micro-batch.

    Every micro-batch makes new whole gradients, and only their shards are added up. So every
    micro-batch has the timeline of the first micro-batch of one process. The last micro-batch has
    the timeline of the others, which need at least as much memory.
    """
    rest = cast(BlockTicks, profile.outside_blocks)
    unsharded = (profile.passes["first"], rest)
    fresh = not (unit_passes.sizes.on_host or plan.release_gradients)
    first = later = unit_passes.timeline(*unsharded, fresh=fresh)
    if fresh and plan.batch.accumulation_steps > 1:
        later = unit_passes.timeline(*unsharded, fresh=False)
    passes = {"first": first, "later": later}
    if plan.pp > 1 and not unit_passes.sizes.on_host:
        passes |= {
            "first_resumed": unit_passes.timeline(*unsharded, fresh=True, resumed=True),
            "later_resumed": unit_passes.timeline(*unsharded, fresh=False, resumed=True),
            "first_strayed": unit_passes.strayed(first, rest),
            "later_strayed": unit_passes.strayed(later, rest),
        }
    return replace(forecast, passes=passes)


def _reduced_once(
    forecast: Forecast, profile: Profile, plan: Plan, unit_passes: UnitPass
) -> Forecast:
    """Return the forecast with passes that add up whole gradients; the last one reduces them."""
    rest, sizes = cast(BlockTicks, profile.outside_blocks), unit_passes.sizes
    first = (profile.passes["first"], rest)
    again, again_passes = first, unit_passes
    if sizes.used_width == sizes.shard_width:  # gradients are added where they are made
        again = (profile.passes["later"], _later(rest, profile))
        again_passes = replace(unit_passes, units=[later for _, later in profile.blocks])
    fresh = not sizes.on_host

    def passes(*, resumed: bool) -> dict[str, Timeline]:
        keys: dict[str, Any] = {"resumed": resumed}
        return {
            "first": unit_passes.timeline(*first, fresh=True, course="kept", **keys),
            "later": again_passes.timeline(*again, fresh=False, course="kept", **keys),
            "later_last": again_passes.timeline(*again, fresh=fresh, course="last", **keys),
        }

    usual = passes(resumed=False)
    if plan.cut is not None:
        resumed = {f"{kind}_resumed": line for kind, line in passes(resumed=True).items()}
        strayed = {f"{kind}_strayed": unit_passes.strayed(usual[kind], rest) for kind in usual}
        return replace(forecast, passes={**usual, **resumed, **strayed})
    whole_bytes = sum(map(sizes.gradients, (*unit_passes.units, rest)))
    held = replace(forecast.states, gradients=whole_bytes)
    wanted = ["later_last"] + ["later"] * (plan.batch.accumulation_steps > 2)
    later = max((usual[kind] for kind in wanted), key=lambda line: line.peak(held).bytes)
    return replace(
        forecast,
        passes={"first": usual["first"], "later": later},
        gradients=whole_bytes,
        step_gradients=forecast.gradients,
    )


def _later(rest: BlockTicks, profile: Profile) -> BlockTicks:
    """Return the ticks in `later` of the layers outside of blocks: the forward passes are equal."""
    shift = profile.passes["later"].phases[0][0] - profile.passes["first"].phases[0][0]
    forward, backward = rest.forward, rest.backward
    return replace(
        rest,
        forward=(forward[0] + shift, forward[1] + shift),
        backward=(backward[0] + shift, backward[1] + shift),
    )
