"""Check a model against plans. The model is inspected only once for all plans.

A run checks its plan, and the planner skips plans that fail the checks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from torch import nn

from bigtrain.assembly.inspection import Found, found_in_model, refuse_found
from bigtrain.assembly.optimizer_check import check_kind
from bigtrain.core.state import first_names
from bigtrain.core.strategy import Plan
from bigtrain.core.workload import Workload
from bigtrain.models.blocks import independent_blocks
from bigtrain.optim.whole import WholeOptimizer, whole_optimizer
from bigtrain.tracing.parameter_uses import ParameterUses, parameter_uses
from bigtrain.tracing.routes import Routes, find_routes


class ModelChecks:
    """Checks a workload's model against plans.

    Args:
        workload: the workload. Without an example its forward pass is not checked.
        passes_of: the model whose forward passes are run; None for the workload's model. The
            planner gives a model with fewer equal blocks, which takes less time.
    """

    def __init__(self, workload: Workload, passes_of: nn.Module | None = None) -> None:
        self._workload = workload
        self._passes_of = workload.model if passes_of is None else passes_of

    def meet(self, plan: Plan) -> tuple[Plan, tuple[str, ...]]:
        """Check that a plan can train the model, and adapt the plan's techniques to the model.

        Returns:
            The plan, with a changed replicate technique if the model needs it, and lines for the
            user about the model.

        Raises:
            ConfigError: the plan cannot train the model, or not with this optimizer.
        """
        check_kind(self._optimizer, plan)
        refuse_found(plan, self._findings)
        replicate = plan.techniques.get("replicate")
        if self._workload.example is None or replicate is None:
            return plan, ()
        notes = []
        if self._only_used and plan.replicate.moves_parameters and plan.replicate.engine == "torch":
            notes.append(
                f"{first_names(self._only_used)}: used but never called, so gathered with the "
                "nearest enclosing module that is called"
            )
        routes = self.routes_of(plan)
        if routes.vary:
            technique, line = replicate.meet_routes(routes, plan)
            notes += [line] if line else []
            if technique is not replicate:
                plan = replace(plan, techniques={**plan.techniques, "replicate": technique})
        return plan, tuple(notes)

    def routes_of(self, plan: Plan) -> Routes:
        """Return modules that only some passes call, those that all passes call, and used blocks.

        A used block is never called, although its parameters are used. With one replica it does not
        matter which passes call a module: the fields `modules`, `parameters` and `cause` are empty,
        and `called` has the modules that one forward pass calls. Without an example all fields are
        empty.
        """
        if self._workload.example is None:
            return Routes()
        called, only_used = self._uses.called, self._only_used
        if plan.dp == 1:
            return Routes(called=called, only_used=only_used)
        routes = self._routes
        return replace(routes, called=routes.called or called, only_used=only_used)

    @cached_property
    def _optimizer(self) -> WholeOptimizer:
        return whole_optimizer(self._workload.make_optimizer, self._workload.model)

    @cached_property
    def _uses(self) -> ParameterUses:
        if self._passes_of is self._workload.model:
            return self._workload.parameter_uses or ParameterUses()
        work = self._workload
        return parameter_uses(self._passes_of, work.micro_batch, work.loss) or ParameterUses()

    @cached_property
    def _only_used(self) -> tuple[str, ...]:
        return tuple(self._uses.only_used(independent_blocks(self._passes_of)))

    @cached_property
    def _findings(self) -> tuple[Found, ...]:
        model, has_example = self._workload.model, self._workload.example is not None
        uses = self._uses if has_example else None
        found = found_in_model(self._passes_of, uses)
        return found if self._passes_of is model else (*found_in_model(model, None), *found)

    @cached_property
    def _routes(self) -> Routes:
        return find_routes(self._passes_of, self._workload.micro_batch)
