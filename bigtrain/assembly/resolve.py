"""Resolve a plan for a workload: choose the stages, the slices, and the policies of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bigtrain.assembly.model_checks import ModelChecks
from bigtrain.assembly.recompute_budget import meet_budget
from bigtrain.core.layer_strategies import RecomputeStrategy, SliceStrategy
from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.state import first_names
from bigtrain.core.strategy import (
    CutStrategy,
    ModelFacts,
    Plan,
)
from bigtrain.core.workload import Workload
from bigtrain.cutting.layout import Layout
from bigtrain.errors import ConfigError
from bigtrain.slicing.state import ModelSlices
from bigtrain.tracing.parameter_uses import ParameterUses
from bigtrain.tracing.unreached import freeze_empty, freeze_unreached


def resolve_plan(plan: Plan, workload: Workload) -> ResolvedPlan:
    """Choose the stages, the slices and the policies of a plan for a workload's model.

    Also freeze parameters of the model without elements, and parameters on which the loss does not
    depend. Needs no process group, and gives the same result on all ranks.

    Args:
        plan: the plan of the run.
        workload: the workload. It needs an example if the plan has a cut, slices or a budget.
            Without an example, parameters are not frozen because of the loss.

    Raises:
        ConfigError: the plan cannot train the model; the model cannot be cut or sliced as planned;
            a key names a module that the model does not have; or the smallest peak exceeds the
            budget.
    """
    checks = ModelChecks(workload)
    plan, chosen = checks.meet(plan)
    routes = checks.routes_of(plan)
    empty = freeze_empty(workload.model)
    unreached: tuple[str, ...] = ()
    if workload.example is not None and not plan.replicate.finds_unused:
        uses = workload.parameter_uses  # cached: the checks above have run the pass
        unreached = freeze_unreached(
            workload.model,
            workload.example,
            workload.loss,
            reached=None if uses is None else uses.reached,
        )
    layout, slices = make_layout(plan, workload), lay_slices(plan, workload)
    stages = [] if layout is None else [layout.tensor_names(s) for s in layout.all_stages]
    plan.check_model(ModelFacts(model=workload.model, routes=routes, stages=stages))
    technique = plan.techniques.get("recompute")
    limit = technique.limit(plan) if isinstance(technique, RecomputeStrategy) else None
    if isinstance(technique, RecomputeStrategy) and limit is not None:
        resolved = meet_budget(plan, technique, limit, workload, layout, slices)
    else:
        resolved = ResolvedPlan.of(plan, workload.model, layout, slices)
    sliced = [slices.summary(workload.model)] if slices is not None else []
    notes = (
        *workload.notes,
        *_uneven(layout),
        *_not_trained(unreached),
        *chosen,
        *_written_often(plan, workload.parameter_uses),
        *sliced,
        *_no_replicas(plan),
        *_compiled(plan),
        *resolved.notes,
    )
    return replace(resolved, unreached=(*unreached, *empty), routes=routes, notes=notes)


def _not_trained(names: Sequence[str]) -> list[str]:
    """Return a line on the parameters on which the loss does not depend, if there are any."""
    return [f"not trained, as the loss does not reach it: {first_names(names)}"] if names else []


def _uneven(layout: Layout | None) -> list[str]:
    """Return a line if the cut gives one rank most of the work."""
    return [layout.chosen.uneven] if layout is not None and layout.chosen.uneven else []


def _written_often(plan: Plan, uses: ParameterUses | None) -> list[str]:
    """Return a line if forward passes write parameters in place, and a step has several passes."""
    steps, writes = plan.batch.accumulation_steps, () if uses is None else uses.writes
    if steps == 1 or not writes:
        return []
    return [
        f"{writes[0].name} is written in place in each forward pass, {steps} times a step: "
        f"train.accumulation_steps={steps}"
    ]


def _compiled(plan: Plan) -> list[str]:
    """Return a line on the forecasts of a run with compiled blocks, if blocks are compiled."""
    note = (
        "train.compile=blocks: bytes are forecast for compiled blocks; blocks are timed as written"
    )
    return [note] if plan.compiles_blocks else []


def check_known(plan: Plan, unreached: Sequence[str]) -> None:
    """Check that training does not wait for gradients of parameters that get none.

    Args:
        plan: the plan of the run.
        unreached: parameters on which the loss does not depend, found only after the model was
            wrapped.

    Raises:
        ConfigError: there are some, and a collective or an engine waits for their gradients.
    """
    replicate = plan.replicate
    waits = replicate.averaging_bucket is not None or replicate.engine != "torch"
    if unreached and waits and plan.dp > 1 and not replicate.finds_unused:
        raise ConfigError(
            f"strategy {plan.strategy.name} has to know which parameters get no gradient before "
            f"the first step, and the loss does not reach {first_names(unreached)}. "
            "Give prepare(..., example=(inputs, targets))."
        )


def _no_replicas(plan: Plan) -> list[str]:
    """Return a hint if one pipeline takes all ranks, so that there is nothing to replicate."""
    technique, traits = plan.techniques.get("replicate"), plan.replicate
    shares = traits.sharded_states > 0 or traits.averaging_bucket is not None
    if technique is None or not shares or plan.dp > 1 or plan.pp < 4 or plan.pp % 2:
        return []
    return [
        f"mesh: pp {plan.pp} x dp 1 is one pipeline of all ranks, and "
        f"strategy.replicate={technique.name} has no replicas. Use mesh.pp={plan.pp // 2} for 2 "
        "replicas."
    ]


def lay_slices(plan: Plan, workload: Workload) -> ModelSlices | None:
    """Return the slices of the model's layers under a plan; None if the plan has no slices.

    Needs no process group.

    Raises:
        ConfigError: the workload has no example, or no layer can be sliced over so many ranks.
    """
    technique = plan.techniques.get("slice")
    if not isinstance(technique, SliceStrategy) or plan.tp == 1:
        return None
    if workload.example is None:
        raise ConfigError(
            f"strategy {plan.strategy.name} slices the model's layers, and needs one micro-batch "
            "for that. Give prepare(..., example=(inputs, targets))."
        )
    return technique.lay_slices(workload, plan)


def make_layout(plan: Plan, workload: Workload) -> Layout | None:
    """Return the cut of the model into stages under a plan; None if the plan has no cut.

    Needs no process group.

    Raises:
        ConfigError: the workload has no example, the model cannot be cut into so many stages, or a
            technique does not support the cut model.
    """
    cut_strategy = plan.techniques.get("cut")
    if not isinstance(cut_strategy, CutStrategy):
        return None
    if workload.example is None:
        raise ConfigError(
            f"strategy {plan.strategy.name} cuts the model, and needs one micro-batch for that. "
            "Give prepare(..., example=(inputs, targets))."
        )
    layout = cut_strategy.lay_out(workload, plan)
    plan.check_model(ModelFacts(shared=layout.shared, untrained=layout.untrained))
    return layout
