"""Predict the memory of one rank before anything is built.

A profile of the model, or of the rank's stages, is recorded on fake tensors. A forecast is made
from the profile, and each technique changes the forecast. The prediction is the peak of the final
forecast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.strategy import CutStrategy, ModelFacts, Plan
from bigtrain.core.workload import Workload
from bigtrain.costs.forecast import Forecast, Profile, TiedBytes
from bigtrain.costs.rank_replay import join_stages
from bigtrain.costs.traffic import StepVolume, pinned_activations
from bigtrain.devices import tracing_note
from bigtrain.memory.timeline import Breakdown, Peak, highest_peak
from bigtrain.prediction.building import first_slice_bytes, loading_of, made_one_by_one
from bigtrain.prediction.compose import merge_steps
from bigtrain.prediction.loops import (
    add_input_weight_passes,
    profile_joined_stages,
    profile_stage,
)
from bigtrain.prediction.profile_model import make_profile
from bigtrain.tracing.watch import untraceable_reason


@dataclass(frozen=True)
class Prediction:
    """The predicted memory and exchanged bytes of one rank, or the reason why there are none."""

    peak: Peak | None
    """The peak of the replica that needs the most memory; None if nothing could be predicted."""
    note: str | None = None
    """The reason why there is no prediction; None if there is one."""
    advice: list[str] = field(default_factory=list)
    """Lines on the limits of the prediction, and on techniques that cannot help."""
    own_peak: Peak | None = None
    """The peak of the replica that `dp_rank` names."""
    states: Breakdown | None = None
    """The bytes that exist on this replica at every moment, also between steps. They include one
    micro-batch."""
    host_bytes: int = 0
    """The most bytes of host memory for this rank's saved activations, if the run is on an
    accelerator and offloads them to the host; 0 otherwise."""
    volume: StepVolume | None = None
    """The bytes that this rank exchanges in a step, according to `Strategy.traffic`."""


def predict(
    resolved: ResolvedPlan,
    workload: Workload,
    pp_rank: int = 0,
    dp_rank: int | None = None,
    tp_rank: int = 0,
) -> Prediction:
    """Predict the memory and the exchanged bytes of one rank.

    Args:
        resolved: the plan of the run.
        workload: a workload with an example.
        pp_rank: the index of the rank on the pp axis.
        dp_rank: its index on the dp axis; None for the replica that needs the most memory.
        tp_rank: its index on the tp axis.

    Raises:
        ConfigError: a technique cannot work with a model of this size.
    """
    resolved = replace(resolved, plan=replace(resolved.plan, tp_rank=tp_rank))
    rank, plan = forecast_rank(resolved, workload, pp_rank), resolved.plan
    if rank.forecast is None:
        return Prediction(None, rank.note)
    peak = highest_peak([rank.forecast.peak(), *_built(rank, rank.forecast, resolved, workload)])
    note = tracing_note(plan.device_type)
    lines = (note, _not_compiled(rank.profiles), _way(rank.profiles))
    told = [line for line in lines if line is not None]
    own_plan = replace(plan, dp_rank=dp_rank)
    volume = StepVolume.stated(
        (
            t
            for p in rank.profiles
            for technique in plan.in_order
            for t in technique.traffic(p, own_plan)
        ),
        plan.batch.accumulation_steps,
    )
    if _by_stages(resolved):
        states = rank.forecast.states
        return Prediction(peak, None, told, peak, states, rank.host_bytes, volume)
    profile = rank.profiles[0]
    own_forecast = forecast_rank_step({0: forecast_step(profile, own_plan)}, own_plan, pp_rank)
    own_peak = highest_peak([own_forecast.peak(), *_built(rank, own_forecast, resolved, workload)])
    told += collect_advice(profile, plan)
    states = own_forecast.states
    return Prediction(peak, None, told, own_peak, states, rank.host_bytes, volume)


def _built(
    rank: RankForecast, forecast: Forecast, resolved: ResolvedPlan, workload: Workload
) -> list[Peak]:
    """Return the peaks before the first step, while the model is built."""
    peaks = [Peak("build", forecast.building)]
    if workload.whole_bytes:
        temporary = forecast.added_to_whole
        if resolved.slices is not None:
            temporary = max(temporary, first_slice_bytes(resolved.slices, workload.model))
        breakdown = Breakdown(parameters=workload.whole_bytes, temporary=temporary)
        peaks.append(Peak("build", breakdown))
    else:
        peaks += made_one_by_one(rank.profiles, resolved, workload)
    return peaks


def _not_compiled(profiles: Sequence[Profile]) -> str | None:
    """Return a line if blocks are compiled in the run but not in the forecast; otherwise None."""
    reason = next((p.not_compiled for p in profiles if p.not_compiled is not None), None)
    if reason is None:
        return None
    return f"train.compile=blocks: bytes are forecast for blocks as written ({reason})"


def _way(profiles: Sequence[Profile]) -> str | None:
    """Return a line if passes of the model may take several branches; otherwise None."""
    reason = next((p.branch_condition for p in profiles if p.branch_condition is not None), None)
    return None if reason is None else f"{reason}: bytes are forecast for the largest branch"


@dataclass(frozen=True)
class RankForecast:
    """The forecast of one rank before anything is built."""

    forecast: Forecast | None
    """The forecast of the whole step; None if there is none."""
    note: str | None = None
    """The reason why there is no forecast; None if there is one."""
    profiles: tuple[Profile, ...] = ()
    """The profile of the model, or that of each of the rank's stages."""
    unit_forecasts: tuple[Forecast, ...] = ()
    """For each of `profiles` the forecast of one micro-batch with all techniques."""
    host_bytes: int = 0
    """See `Prediction.host_bytes`."""


def forecast_rank(resolved: ResolvedPlan, workload: Workload, pp_rank: int = 0) -> RankForecast:
    """Profile the model or the stages of one rank, and forecast its step.

    Args:
        resolved: see `predict`.
        workload: see `predict`.
        pp_rank: see `predict`.

    Returns:
        The forecast of the rank; only the reason if the model or a stage does not run on fake
        tensors.

    Raises:
        ConfigError: a technique cannot work with a model of this size, or with this model.
    """
    plan, layout = resolved.plan, resolved.layout
    cut_strategy = plan.techniques.get("cut")
    if layout is None or not isinstance(cut_strategy, CutStrategy) or not _by_stages(resolved):
        profile = (
            make_profile(workload, resolved)
            if layout is None
            else profile_joined_stages(workload, resolved, layout)
        )
        if profile.untraceable is not None:
            plan.check_model(ModelFacts(untraceable=profile.untraceable))
            return RankForecast(
                None, f"the model does not run on fake tensors ({profile.untraceable})"
            )
        profile = replace(profile, loading=loading_of(workload, plan))
        plan.check_model(ModelFacts(profile=profile))
        if layout is not None and "recompute" in plan.techniques:
            _try_stages(workload, resolved, len(layout.ranks))
        unit_forecast = forecast_step(profile, plan)
        step = forecast_rank_step({0: unit_forecast}, plan, pp_rank)
        of_stages = cut_strategy.in_flight(plan) if isinstance(cut_strategy, CutStrategy) else ()
        away = _host_bytes(plan, {0: profile}, (max(of_stages, default=1),))
        return RankForecast(step, None, (profile,), (unit_forecast,), away)
    profiles: dict[int, Profile] = {}
    try:
        own_stages = (
            layout.stages_of(pp_rank)
            if cut_strategy.traits.is_distributed
            else range(len(layout.ranks))
        )
        for stage in own_stages:
            profile = profile_stage(workload, resolved, stage)
            plan.check_model(ModelFacts(profile=profile))
            if plan.splits_backward:
                profile = add_input_weight_passes(profile, workload, resolved, stage)
            profiles[stage] = profile
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = untraceable_reason(error)
        plan.check_model(ModelFacts(untraceable=reason))
        return RankForecast(None, f"a stage does not run on fake tensors ({reason})")
    stage_forecasts = forecast_stages(profiles, plan)
    tied = [gradient for profile in profiles.values() for gradient in profile.crossing.tied]
    step = forecast_rank_step(stage_forecasts, plan, pp_rank, tied)
    away = _host_bytes(plan, profiles, cut_strategy.in_flight(plan))
    forecasts = tuple(stage_forecasts.values())
    return RankForecast(step, None, tuple(profiles.values()), forecasts, away)


def _host_bytes(plan: Plan, profiles: Mapping[int, Profile], in_flight: Sequence[int]) -> int:
    """Return the host bytes of offloaded activations, of all micro-batches in flight."""
    if plan.offload_tiers.activations != "cpu" or not plan.moves_activations:
        return 0
    return sum(
        pinned_activations(profile) * (in_flight[stage] if stage < len(in_flight) else 1)
        for stage, profile in profiles.items()
    )


def _try_stages(workload: Workload, resolved: ResolvedPlan, stages: int) -> None:
    """Run each stage alone on fake tensors.

    Recomputation may fail for a block that begins a stage, and work for it in the whole model.

    Raises:
        ConfigError: a stage does not run, and a technique refuses that.
    """
    for stage in range(stages):
        try:
            profile_stage(workload, resolved, stage)
        except RuntimeError as error:
            resolved.plan.check_model(ModelFacts(untraceable=untraceable_reason(error)))


def _by_stages(resolved: ResolvedPlan) -> bool:
    cut = resolved.plan.techniques.get("cut")
    is_cut = resolved.layout is not None
    return is_cut and isinstance(cut, CutStrategy) and cut.predicts_by_stage(resolved.plan)


def collect_advice(profile: Profile, plan: Plan) -> list[str]:
    """Return one line from each technique of the plan that cannot help this model."""
    lines = []
    predicted = Forecast.of(profile)
    for technique in plan.in_order:
        line = technique.advise(predicted, profile, plan)
        if line is not None:
            lines.append(line)
        predicted = technique.estimate(predicted, profile, plan)
    return lines


def forecast_stages(
    profiles: Mapping[int, Profile], plan: Plan, known: dict[int, Forecast] | None = None
) -> dict[int, Forecast]:
    """Forecast each stage of a rank over one micro-batch.

    Args:
        profiles: the profiles of the rank's stages, by the index of the stage.
        plan: the plan with the techniques to apply.
        known: forecasts of single profiles, by the `id` of the profile; new ones are added.

    Returns:
        The forecasts, by the index of the stage. The `step` of the first stage is that of all
        stages; the `step` of the others is empty.
    """
    known = {} if known is None else known
    for profile in profiles.values():
        if id(profile) not in known:
            known[id(profile)] = forecast_step(profile, plan)
    forecasts = {stage: known[id(profile)] for stage, profile in profiles.items()}
    if len(profiles) > 1:
        step = forecast_step(merge_steps(list(profiles.values())), plan).step
        for stage, forecast in forecasts.items():
            own_step = step if stage == min(forecasts) else replace(step, spans=())
            forecasts[stage] = replace(forecast, step=own_step)
    return forecasts


def forecast_rank_step(
    forecasts: Mapping[int, Forecast],
    plan: Plan,
    pp_rank: int,
    tied: Sequence[TiedBytes] = (),
) -> Forecast:
    """Forecast one rank's step in the order of its schedule.

    Args:
        forecasts: the forecasts of the rank's stages; a model that is not cut is stage 0.
        plan: the plan of the run.
        pp_rank: the index of the rank on the pp axis.
        tied: the gradients of those of the rank's parameters that other pp ranks have as well.
    """
    cut_strategy = plan.techniques.get("cut")
    actions = None
    if isinstance(cut_strategy, CutStrategy):
        actions = cut_strategy.actions(plan, pp_rank)
    if actions is None:
        (forecast,) = forecasts.values()
        return forecast
    shard = plan.gradient_shard
    received = max((gradient.received(*shard) for gradient in tied), default=0)
    return join_stages(actions, forecasts, tied=received, bucket=plan.averaging_bucket)


def forecast_step(profile: Profile, plan: Plan) -> Forecast:
    """Forecast a profile with all techniques of a plan, in the order of their composition."""
    predicted = Forecast.of(profile)
    for technique in plan.in_order:
        predicted = technique.estimate(predicted, profile, plan)
    return predicted
