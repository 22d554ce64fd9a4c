"""Advice before training when sharding the states cannot help."""

from __future__ import annotations

from dataclasses import replace

from bigtrain.core.replicas import with_averaged_gradients
from bigtrain.core.strategy import Plan
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.strategies.zero import Zero
from bigtrain.units import format_bytes

ACTIVATION_DOMINANCE = 0.6
"""If activations are more than this share of the peak, ZeRO is not the remedy."""


def advise(
    options: Zero,
    forecast_before: Forecast,
    forecast_after: Forecast,
    profile: Profile,
    plan: Plan,
) -> str | None:
    """Return one line if a stage of ZeRO cannot help; None if it can.

    Args:
        options: the stage and the engine.
        forecast_before: of one process, with the techniques that come before this one.
        forecast_after: with this technique, before accumulation.
        profile: of the model.
        plan: ranks, micro-batches, precision.
    """
    name = f"ZeRO stage {options.stage}"
    if plan.dp == 1:
        return f"{name} has nothing to shard on one rank. Use --strategy single, or more ranks."
    if profile.untraceable is not None:
        return None
    replicated = _replicated(forecast_before, profile, plan)
    before, after = replicated.peak().bytes, forecast_after.peak()
    if after.bytes >= before:
        return (
            f"{name} on {plan.dp} ranks is predicted to need {format_bytes(after.bytes)}, plain "
            f"DDP {format_bytes(before)}: its buffers exceed what it saves. Use --strategy ddp."
        )
    share = after.breakdown.activations / after.bytes
    if share > ACTIVATION_DOMINANCE:
        return (
            f"{share:.0%} of the predicted peak of {format_bytes(after.bytes)} are activations, "
            f"which {name} does not touch. Use a smaller train.micro_batch_size "
            f"(now {plan.batch.micro_size})."
        )
    return None


def _replicated(forecast: Forecast, profile: Profile, plan: Plan) -> Forecast:
    """Return the forecast under plain DDP: all states on every rank, in fp32."""
    factor = 2 if plan.bf16_parameters else 1
    forecast = with_averaged_gradients(forecast, profile)
    states = forecast.states
    states = replace(
        states,
        parameters=states.parameters * factor,
        optimizer=states.optimizer * factor,
        gradients=states.gradients * factor,
    )
    return replace(forecast, states=states)
