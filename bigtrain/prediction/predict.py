"""What a run will need on one rank, before anything is built: profile, techniques, peak."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import nn

from bigtrain.core.composition import in_order
from bigtrain.core.strategy import CutStrategy, Plan
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.cutting.layout import Layout
from bigtrain.data.loader import MicroBatch
from bigtrain.losses.loss import Loss
from bigtrain.memory.timeline import Peak
from bigtrain.optim.update import MakeOptimizer
from bigtrain.prediction.record import make_profile, reason_of
from bigtrain.prediction.record_stage import profile_stage


@dataclass(frozen=True)
class Prediction:
    """One rank's peak, or why there is none; and what the techniques advise, a line each."""

    peak: Peak | None
    """Of the fullest replica."""
    note: str | None = None
    advice: list[str] = field(default_factory=list)
    own: Peak | None = None
    """Of the replica that was asked about."""


def predict(
    plan: Plan,
    model: nn.Module,
    example: MicroBatch,
    loss: Loss,
    make_optimizer: MakeOptimizer,
    layout: Layout | None = None,
    pp_rank: int = 0,
    dp_rank: int | None = None,
) -> Prediction:
    """Predict one rank.

    Args:
        plan: what will be run.
        model: on the meta device or any other; it is left as it is.
        example: one micro-batch.
        loss: as in the run.
        make_optimizer: as in the run.
        layout: of a model that is cut.
        pp_rank: which of them.
        dp_rank: which replica; None for the fullest, where they are not alike.

    Raises:
        ConfigError: a technique cannot work with a model of this size.
    """
    found = rank_of(plan, model, example, loss, make_optimizer, layout, pp_rank)
    if found.forecast is None:
        return Prediction(None, found.note)
    peak = found.forecast.peak()
    if _by_stages(plan, layout):
        return Prediction(peak, None, [], peak)
    profile = found.profiles[0]
    own = forecast(profile, replace(plan, dp_rank=dp_rank)).peak()
    return Prediction(peak, None, advice(profile, plan), own)


@dataclass(frozen=True)
class Rank:
    """One rank before anything is built."""

    forecast: Forecast | None
    """Of its whole step; None where it cannot be known."""
    note: str | None = None
    """Why not."""
    profiles: tuple[Profile, ...] = ()
    """Of the model, or of each of the rank's stages."""
    parts: tuple[Forecast, ...] = ()
    """What the techniques make of each profile: of one micro-batch."""


def rank_of(
    plan: Plan,
    model: nn.Module,
    example: MicroBatch,
    loss: Loss,
    make_optimizer: MakeOptimizer,
    layout: Layout | None = None,
    pp_rank: int = 0,
) -> Rank:
    """Profile what is on one rank, and forecast its step. See `predict`.

    Raises:
        ConfigError: a technique cannot work with a model of this size, or with this model.
    """
    device = torch.device(plan.device_type)
    cut = plan.techniques.get("cut")
    given = (model, example, loss, make_optimizer, plan)
    if layout is None or not isinstance(cut, CutStrategy) or not _by_stages(plan, layout):
        profile = make_profile(*given, device)
        if profile.missing is not None:
            refuse_missing(profile.missing, plan)
            return Rank(None, f"the model does not run on fake tensors ({profile.missing})")
        check_sizes(profile, plan)
        if layout is not None and "recompute" in plan.techniques:
            _try_stages(layout, *given)
        found = forecast(profile, plan)
        return Rank(found, None, (profile,), (found,))
    profiles: dict[int, Profile] = {}
    halves: dict[int, Forecast] = {}
    try:
        own = layout.stages_of(pp_rank) if cut.spans_ranks else range(len(layout.ranks))
        for stage in own:
            profiles[stage] = profile_stage(layout, stage, *given)
            check_sizes(profiles[stage], plan)
            if plan.splits_backward:
                halves[stage] = forecast(profile_stage(layout, stage, *given, split=True), plan)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = reason_of(error)
        refuse_missing(reason, plan)
        return Rank(None, f"a stage does not run on fake tensors ({reason})")
    parts = {stage: forecast(profile, plan) for stage, profile in profiles.items()}
    step = cut.replayed(parts, plan, pp_rank, halves)
    return Rank(step, None, tuple(profiles.values()), tuple(parts.values()))


def _try_stages(
    layout: Layout,
    model: nn.Module,
    example: MicroBatch,
    loss: Loss,
    make_optimizer: MakeOptimizer,
    plan: Plan,
) -> None:
    """Run each stage on its own: a block may bear being computed again but as the first of one.

    Raises:
        ConfigError: one does not.
    """
    for stage in range(len(layout.ranks)):
        try:
            profile_stage(layout, stage, model, example, loss, make_optimizer, plan)
        except RuntimeError as error:
            refuse_missing(reason_of(error), plan)


def _by_stages(plan: Plan, layout: Layout | None) -> bool:
    cut = plan.techniques.get("cut")
    return layout is not None and isinstance(cut, CutStrategy) and cut.replays(plan)


def refuse_missing(reason: str, plan: Plan) -> None:
    """Let each technique refuse a model that could not be profiled because of it.

    Raises:
        ConfigError: with the key and the fix.
    """
    for technique in in_order(plan):
        technique.refuse_missing(reason)


def check_sizes(profile: Profile, plan: Plan) -> None:
    """Let each technique refuse a model that is too large for it, before anything is built.

    Raises:
        ConfigError: with the numbers; every rank has the same profile and raises it.
    """
    for technique in in_order(plan):
        technique.check_sizes(profile, plan)


def advice(profile: Profile, plan: Plan) -> list[str]:
    """What each technique has to say where it cannot help, a line each."""
    lines = []
    predicted = Forecast.of(profile)
    for technique in in_order(plan):
        line = technique.advise(predicted, profile, plan)
        if line is not None:
            lines.append(line)
        predicted = technique.estimate(predicted, profile, plan)
    return lines


def forecast(profile: Profile, plan: Plan) -> Forecast:
    """Predict one rank's memory: each technique turns the forecast of those before it."""
    predicted = Forecast.of(profile)
    for technique in in_order(plan):
        predicted = technique.estimate(predicted, profile, plan)
    return predicted
