"""What a run will need on one rank, before anything is built: profile, techniques, peak."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from bigtrain.build import in_order
from bigtrain.data.loader import MicroBatch
from bigtrain.forecast import Forecast, Profile
from bigtrain.layout import Layout
from bigtrain.profiles import make_profile, reason_of
from bigtrain.stage_profiles import profile_stage
from bigtrain.strategy import CutStrategy, Plan
from bigtrain.tasks import Loss
from bigtrain.timeline import Peak
from bigtrain.update import MakeOptimizer


@dataclass(frozen=True)
class Prediction:
    """One rank's peak, or why there is none; and what the techniques advise, a line each."""

    peak: Peak | None
    note: str | None = None
    advice: list[str] = field(default_factory=list)


def predict(
    plan: Plan,
    model: nn.Module,
    example: MicroBatch,
    loss: Loss,
    make_optimizer: MakeOptimizer,
    layout: Layout | None = None,
    pp_rank: int = 0,
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

    Raises:
        ConfigError: a technique cannot work with a model of this size.
    """
    device = torch.device(plan.device_type)
    cut = plan.techniques.get("cut")
    if layout is None or not isinstance(cut, CutStrategy) or not cut.replays(plan):
        profile = make_profile(model, example, loss, make_optimizer, plan, device)
        if profile.missing is not None:
            return Prediction(None, f"the model does not run on fake tensors ({profile.missing})")
        check_sizes(profile, plan)
        return Prediction(forecast(profile, plan).peak(), None, advice(profile, plan))
    found: dict[int, Forecast] = {}
    halves: dict[int, Forecast] = {}
    given = (model, example, loss, make_optimizer, plan)
    try:
        own = layout.stages_of(pp_rank) if cut.spans_ranks else range(len(layout.ranks))
        for stage in own:
            profile = profile_stage(layout, stage, *given)
            check_sizes(profile, plan)
            found[stage] = forecast(profile, plan)
            if cut.splits_backward:
                halves[stage] = forecast(profile_stage(layout, stage, *given, split=True), plan)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return Prediction(None, f"a stage does not run on fake tensors ({reason_of(error)})")
    return Prediction(cut.replayed(found, plan, pp_rank, halves).peak())


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
