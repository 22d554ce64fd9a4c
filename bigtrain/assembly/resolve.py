"""From a plan and a workload to all that is chosen before a run: stages, and what blocks keep."""

from __future__ import annotations

from bigtrain.assembly.recompute_budget import meet_budget
from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.strategy import CutStrategy, ModelFacts, Plan, RecomputeStrategy
from bigtrain.core.workload import Workload
from bigtrain.cutting.layout import Layout
from bigtrain.errors import ConfigError


def resolve_plan(plan: Plan, workload: Workload) -> ResolvedPlan:
    """Cut the model, and choose what its blocks keep.

    Needs no process group, and is the same on all ranks.

    Args:
        plan: what will be run.
        workload: with an example where the plan has a cut or a budget.

    Raises:
        ConfigError: the model cannot be cut so; a name is none of the model's; the smallest peak
            is above the budget.
    """
    layout = make_layout(plan, workload)
    technique = plan.techniques.get("recompute")
    limit = technique.limit(plan) if isinstance(technique, RecomputeStrategy) else None
    if not isinstance(technique, RecomputeStrategy) or limit is None:
        return ResolvedPlan.of(plan, workload.model, layout)
    return meet_budget(plan, technique, limit, workload, layout)


def make_layout(plan: Plan, workload: Workload) -> Layout | None:
    """Cut the model as the plan says; None where it is not to be cut. Needs no process group.

    Raises:
        ConfigError: it cannot be cut so.
    """
    cut_strategy = plan.techniques.get("cut")
    if not isinstance(cut_strategy, CutStrategy):
        return None
    if workload.example is None:
        raise ConfigError(
            f"strategy {plan.strategy.name} cuts the model, and for that it must see one "
            "micro-batch. Give prepare(..., example=(inputs, targets))."
        )
    layout = cut_strategy.lay_out(workload, plan)
    plan.check_model(ModelFacts(shared=layout.shared))
    return layout
