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
    """A plan with its choices for one workload; `assembly.resolve.resolve_plan` makes it."""

    plan: Plan
    layout: Layout | None = None
    """How the model is cut; None without a cut."""
    slices: ModelSlices | None = None
    """How the layers of the model are sliced; None without slices."""
    policies: Mapping[str, BlockPolicy] = field(default_factory=dict)
    """The policies of modules for their saved activations, by name in the whole model."""
    unreached: tuple[str, ...] = ()
    """Names of the parameters that are not trained: the loss does not depend on them, or they have
    no elements."""
    routes: Routes = field(default_factory=Routes)
    """The modules that only some passes call, if they matter to the plan."""
    notes: tuple[str, ...] = ()
    """Lines for the user about the choices."""

    @staticmethod
    def of(
        plan: Plan,
        model: nn.Module,
        layout: Layout | None = None,
        slices: ModelSlices | None = None,
    ) -> ResolvedPlan:
        """Return a resolved plan with the policies that its techniques choose without a budget.

        Args:
            plan: the plan of the run.
            model: the whole model, on any device.
            layout: how the model is cut; None without a cut.
            slices: how the layers of the model are sliced; None without slices.

        Raises:
            ConfigError: the model has no module of a name in a technique's options.
        """
        return ResolvedPlan(plan, layout, slices, plan.block_policies(model))
