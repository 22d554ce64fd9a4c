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
    """A plan with the choices for one workload; see `bigtrain.assembly.resolve.resolve_plan`."""

    plan: Plan
    layout: Layout | None = None
    """How the model is cut; None without a cut."""
    slices: ModelSlices | None = None
    """How its layers are sliced; None without slices."""
    policies: Mapping[str, BlockPolicy] = field(default_factory=dict)
    """The policies of modules for their saved activations, by name in the whole model."""
    unreached: tuple[str, ...] = ()
    """Parameters that the loss does not reach; they are not trained."""
    routes: Routes = field(default_factory=Routes)
    """The modules that only some passes call, if that matters to the plan."""
    notes: tuple[str, ...] = ()
    """Lines on the choices."""

    @staticmethod
    def of(
        plan: Plan,
        model: nn.Module,
        layout: Layout | None = None,
        slices: ModelSlices | None = None,
    ) -> ResolvedPlan:
        """A plan without a budget, with the policies of its techniques.

        Raises:
            ConfigError: the model has no module of a name in a technique's options.
        """
        return ResolvedPlan(plan, layout, slices, plan.block_policies(model))
