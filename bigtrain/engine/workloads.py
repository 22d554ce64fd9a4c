"""Make the workload of a user's model, loss and optimizer, and its plan, on connected ranks."""

from __future__ import annotations

from bigtrain.assembly.build import check_mesh
from bigtrain.assembly.make_plan import make_plan
from bigtrain.assembly.resolve import resolve_plan
from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.workload import Workload
from bigtrain.data.loader import MicroBatch
from bigtrain.engine.run_loss.follow_loss import agree_on_loss, with_own_totals
from bigtrain.engine.start_facts import start_facts
from bigtrain.job.schema import Job
from bigtrain.losses.loss import Loss
from bigtrain.models.blueprint import Blueprint
from bigtrain.optim.whole import MakeOptimizer, whole_optimizer
from bigtrain.own_loop.model_inputs import set_model_inputs
from bigtrain.ranks.context import RunContext


def resolve_on_ranks(
    blueprint: Blueprint,
    loss: Loss,
    optimizer: MakeOptimizer,
    example: MicroBatch | None,
    job: Job,
    context: RunContext,
) -> tuple[Workload, ResolvedPlan]:
    """Make the workload and the plan of a job on ranks that are connected already. Collective.

    Args:
        blueprint: the blueprint of the model. Afterwards the model accepts inputs in the form of
            the example.
        loss: the loss as the user gave it.
        optimizer: makes the optimizer from parameters.
        example: one micro-batch; None if there is none. A strategy that cuts or slices the model
            needs an example.
        job: this rank's job.
        context: this rank's context.

    Returns:
        The workload, whose loss has the divisors that follow from the example; and the plan.

    Raises:
        ConfigError: the job does not fit the mesh, the model or the loss; or the ranks have
            different jobs, models or losses.
    """
    one_node = context.world_size == context.local_world_size
    plan = make_plan(job, context.world_size, context.device.type, one_host=one_node)
    check_mesh(plan, context)
    if example is not None:
        set_model_inputs(blueprint, None, example.inputs)
    followed = agree_on_loss(loss, blueprint.model, example, plan.batch.num_parts, context)
    workload = Workload(
        blueprint.model,
        None if example is None else with_own_totals(followed, example),
        followed,
        whole_optimizer(optimizer, blueprint.model),
        whole_bytes=blueprint.whole_bytes,
        read_widths=blueprint.read_widths,
        notes=blueprint.notes,
    )
    resolved = resolve_plan(plan, workload)
    context.agreement.require(start_facts(job, workload, resolved, one_node=one_node))
    return workload, resolved


def resolved_workload(
    blueprint: Blueprint,
    loss: Loss,
    optimizer: MakeOptimizer,
    example: MicroBatch | None,
    resolved: ResolvedPlan,
    context: RunContext,
) -> Workload:
    """Return the workload of a plan that was resolved before the ranks connected. Collective.

    Args:
        blueprint: the blueprint of the model.
        loss: the loss with the divisors that were found when the plan was resolved.
        optimizer: makes the optimizer from parameters.
        example: one micro-batch; None if there is none.
        resolved: the plan.
        context: this rank's context.

    Raises:
        ConfigError: the loss divides by different counts on different ranks. It is raised on all
            ranks.
    """
    parts = resolved.plan.batch.num_parts
    return Workload(
        blueprint.model,
        example,
        agree_on_loss(loss, blueprint.model, None, parts, context),
        whole_optimizer(optimizer, blueprint.model),
        whole_bytes=blueprint.whole_bytes,
        read_widths=blueprint.read_widths,
        notes=blueprint.notes,
    )
