"""From a job to a plan, and from a plan to a live runner: the order of composition.

`build` is the one place where that order stands.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from bigtrain.activations.policy import Moving, shape
from bigtrain.assembly.materialize import Materializer
from bigtrain.core.composition import in_order
from bigtrain.core.loop import LoopRunner
from bigtrain.core.runner import Runner
from bigtrain.core.strategy import Assembly, CutStrategy, Plan
from bigtrain.cutting.layout import Layout
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.losses.chunked_cross_entropy import attach
from bigtrain.losses.loss import Loss
from bigtrain.memory.meter import Meter
from bigtrain.models.bf16_parameters import low_precision_names
from bigtrain.models.blueprint import Blueprint
from bigtrain.models.names import names_of
from bigtrain.optim.update import MakeOptimizer
from bigtrain.ranks.context import RunContext


def lay_out(
    plan: Plan,
    model: nn.Module,
    micro_batch: MicroBatch,
    loss: Loss,
    make_optimizer: MakeOptimizer,
) -> Layout | None:
    """Cut the model as the plan says; None where it is not to be cut. Needs no process group.

    Raises:
        ConfigError: it cannot be cut so.
    """
    cut = plan.techniques.get("cut")
    if not isinstance(cut, CutStrategy):
        return None
    layout = cut.lay_out(model, micro_batch, loss, make_optimizer, plan)
    check_shared(layout.shared if layout is not None else [], plan)
    return layout


def check_shared(names: Sequence[str], plan: Plan) -> None:
    """Let each technique refuse parameters that several stages of one rank use.

    Raises:
        ConfigError: with a name and the fix.
    """
    if names:
        for technique in in_order(plan):
            technique.check_shared(names)


def check_mesh(plan: Plan, context: RunContext) -> None:
    """Refuse ranks that were connected as another mesh than the plan's: they would wait for ever.

    Raises:
        ConfigError: with both meshes.
    """
    planned = {"pp": plan.pp, "dp": plan.dp, "tp": plan.tp}
    found = {
        "pp": context.pp_size,
        "dp": context.dp_size,
        "tp": context.world_size // (context.pp_size * context.dp_size),
    }
    if planned != found:
        shown, wanted = (
            ", ".join(f"{axis}={size}" for axis, size in sizes.items())
            for sizes in (found, planned)
        )
        raise ConfigError(
            f"the ranks are connected as a mesh of {shown}, and the job plans {wanted}. "
            f"Use connect({wanted}), or give the job mesh.pp={context.pp_size}."
        )


def build(
    plan: Plan,
    blueprint: Blueprint,
    loss: Loss,
    make_optimizer: MakeOptimizer,
    context: RunContext,
    meter: Meter,
    layout: Layout | None = None,
    mover: Moving | None = None,
) -> Runner:
    """Make the live runner of a plan. Every step below stands where it must.

    Args:
        plan: what to build.
        blueprint: the model, described or given.
        loss: sums over valid targets.
        make_optimizer: called once, on the parameters that this rank updates.
        context: what this process is.
        meter: told of phases and owners.
        layout: of a model that is cut.
        mover: `plan.mover(...)`, which the caller closes.
    """
    meter.phase("build")
    with meter.window():
        model = blueprint.model
        attach(loss, model)  # while names are the user's own
        choices = plan.choices(model)
        low = () if plan.master_weights else low_precision_names(model)
        materialize = Materializer(blueprint, context, plan.precision, low)
        if layout is not None:
            # Before any value is made: a rank pays for its own stages only. A model that could
            # not be described is whole on every rank anyhow, and comes from rank 0 as a whole.
            if not blueprint.deferred:
                materialize(names_of(model))
            own = layout.stages_of(context.pp_rank) if plan.pp > 1 else range(len(layout.ranks))
            layout.chosen.cut.strip(model, own, context.device)
        # Weights depend on seed and name only, so every rank makes its own and none are sent.
        # A technique that never holds the whole model makes them a piece at a time.
        if not any(technique.materializes for technique in plan.techniques.values()):
            materialize(names_of(model))
        # BatchNorm is replaced while the model is still plain: wrappers keep what they find.
        if plan.sync_batchnorm:
            convert = nn.SyncBatchNorm.convert_sync_batchnorm
            model = convert(model, context.dp_group)  # type: ignore[no-untyped-call]
        assembly = Assembly(
            context=context,
            plan=plan,
            loss=loss,
            meter=meter,
            model=model,
            make_optimizer=make_optimizer,
            module=model,
            materialize=materialize,
            layout=layout,
            choices=choices,
            mover=mover,
        )
        # cut: stages first, so that all that follows sees only this rank's layers.
        # recompute: on blocks, while they are still the user's own modules; those of stages
        # where the stages are made.
        # offload: says where the optimizer's state will live, for those who make it.
        # replicate: wraps or shards what is left, hooks of recomputation included.
        # accumulate: says how often all of that runs before the optimizer does.
        if layout is None:
            shape(model, choices, mover)
        for technique in in_order(plan):
            technique.apply(assembly)
        assembly.rejoin()
        # The optimizer comes last, made by the runner: sharding has changed the parameters.
        return (assembly.runner or LoopRunner)(assembly)
