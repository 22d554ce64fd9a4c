"""A plan for which every open choice has been made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from bigtrain.activations.policy import BlockPolicy
from bigtrain.core.strategy import Plan
from bigtrain.cutting.layout import Layout
from bigtrain.slicing.state import ModelSlices
from bigtrain.tracing.routes import Routes


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan put to a workload: see `bigtrain.assembly.resolve.resolve_plan`."""

    plan: Plan
    layout: Layout | None = None
    """How the model is cut, where the plan has a cut."""
    slices: ModelSlices | None = None
    """How its layers are sliced, where the plan slices them."""
    policies: Mapping[str, BlockPolicy] = field(default_factory=dict)
    """What modules keep for the backward pass, by their names in the whole model."""
    unreached: tuple[str, ...] = ()
    """Parameters that the loss does not reach: they are not trained."""
    routes: Routes = field(default_factory=Routes)
    """What some passes of the model call and others do not, where that matters to the plan."""
    notes: tuple[str, ...] = ()
    """What there is to say of the choices made."""

    @staticmethod
    def of(
        plan: Plan,
        model: nn.Module,
        layout: Layout | None = None,
        slices: ModelSlices | None = None,
    ) -> ResolvedPlan:
        """A plan without a budget.

        Raises:
            ConfigError: a name that a technique was given is none of the model's.
        """
        return ResolvedPlan(plan, layout, slices, plan.block_policies(model))
