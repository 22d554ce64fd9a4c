"""What plans a model refuses, and which techniques meet its routes: looked at once for all plans.

A run looks at its one plan; the planner leaves out what a run would refuse.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from torch import nn

from bigtrain.assembly.inspection import Found, found_in_model, refuse_found
from bigtrain.assembly.optimizer_check import check_kind
from bigtrain.core.strategy import Plan
from bigtrain.core.workload import Workload
from bigtrain.optim.whole import WholeOptimizer, whole_optimizer
from bigtrain.tracing.parameter_uses import parameter_uses
from bigtrain.tracing.routes import Routes, find_routes


class ModelChecks:
    """A workload's model held against plans.

    Args:
        workload: without an example, nothing is said of what its forward pass does.
        passes_of: the model whose passes are looked at; None is the workload's own. The planner
            gives one with fewer of the blocks that are alike.
    """

    def __init__(self, workload: Workload, passes_of: nn.Module | None = None) -> None:
        self._workload = workload
        self._passes_of = workload.model if passes_of is None else passes_of

    def meet(self, plan: Plan) -> tuple[Plan, tuple[str, ...]]:
        """A plan whose techniques are ready for what the model does, and what is said of that.

        Raises:
            ConfigError: the model, or its optimizer, cannot be trained by this plan.
        """
        check_kind(self._optimizer, plan)
        refuse_found(plan, self._found)
        replicate = plan.techniques.get("replicate")
        if plan.dp == 1 or replicate is None or not self.routes_of(plan).vary:
            return plan, ()
        technique, line = replicate.meet_routes(self._routes, plan)
        if technique is not replicate:
            plan = replace(plan, techniques={**plan.techniques, "replicate": technique})
        return plan, (line,) if line else ()

    def routes_of(self, plan: Plan) -> Routes:
        """What some passes call and others do not, where that matters to a plan."""
        return Routes() if plan.dp == 1 or self._workload.example is None else self._routes

    @cached_property
    def _optimizer(self) -> WholeOptimizer:
        return whole_optimizer(self._workload.make_optimizer, self._workload.model)

    @cached_property
    def _found(self) -> tuple[Found, ...]:
        model, example = self._workload.model, self._workload.example
        if self._passes_of is model:
            return found_in_model(model, self._workload.parameter_uses)
        uses = None if example is None else parameter_uses(self._passes_of, example)
        return (*found_in_model(model, None), *found_in_model(self._passes_of, uses))

    @cached_property
    def _routes(self) -> Routes:
        return find_routes(self._passes_of, self._workload.micro_batch)
