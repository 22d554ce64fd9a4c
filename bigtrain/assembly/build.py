"""Build a runner from a resolved plan; `build_runner` defines the order of all steps."""

from __future__ import annotations

from torch import nn

from bigtrain.activations.policy import Offloader, apply_policies
from bigtrain.assembly.materialize import Materializer
from bigtrain.core.gradient_hooks import GradientHooks
from bigtrain.core.loop import LoopRunner
from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.runner import Runner
from bigtrain.core.strategy import Assembly, Plan
from bigtrain.core.workload import Workload
from bigtrain.cutting.layout import Layout
from bigtrain.errors import ConfigError
from bigtrain.losses.chunked_cross_entropy import attach_head
from bigtrain.memory.meter import MemoryMeter
from bigtrain.models.blocks import find_blocks
from bigtrain.models.blueprint import Blueprint
from bigtrain.models.parameters import bf16_parameter_names, frozen_low_names, names_of
from bigtrain.optim.whole import whole_optimizer
from bigtrain.ranks.context import RunContext
from bigtrain.recorder.blocks import mark_blocks
from bigtrain.slicing.install import slice_modules
from bigtrain.slicing.state import SlicedState
from bigtrain.tensors.memory_format import set_channels_last
from bigtrain.tracing.unreached import unfreeze


def check_mesh(plan: Plan, context: RunContext) -> None:
    """Check that the ranks are connected as the plan's mesh; otherwise they would hang.

    Raises:
        ConfigError: the meshes differ; the message contains both.
    """
    planned = {"pp": plan.pp, "dp": plan.dp, "tp": plan.tp}
    connected = {
        "pp": context.pp_size,
        "dp": context.dp_size,
        "tp": context.world_size // (context.pp_size * context.dp_size),
    }
    if planned != connected:
        shown, expected = (
            ", ".join(f"{axis}={size}" for axis, size in sizes.items())
            for sizes in (connected, planned)
        )
        raise ConfigError(
            f"the ranks are connected as a mesh of {shown}, and the job plans {expected}. "
            f"Use connect({expected}), or give the job mesh.pp={context.pp_size}."
        )


def build_runner(
    resolved: ResolvedPlan,
    blueprint: Blueprint,
    workload: Workload,
    context: RunContext,
    meter: MemoryMeter,
    mover: Offloader | None = None,
) -> Runner:
    """Make the runner of a plan on this rank. Collective.

    The comments give the reason for the position of each step.

    Args:
        resolved: the plan with its choices.
        blueprint: the blueprint of the model.
        workload: the workload. Its optimizer is made once, from the parameters that this rank
            updates.
        context: this rank's context.
        meter: measures memory; it is notified of phases, and of the kind of each tensor.
        mover: the result of `plan.make_offloader`, which the caller closes.
    """
    meter.phase("build")
    unreached = _left_out(resolved, blueprint.model)
    with meter.window():
        plan, layout, model = resolved.plan, resolved.layout, blueprint.model
        # Before wrappers change names and shard parameters.
        attach_head(workload.loss, model)
        make_optimizer = whole_optimizer(workload.make_optimizer, model)
        # Before weights get values, which would drop the hooks.
        gradient_hooks = GradientHooks.take(model)
        bf16_names = _bf16_names(model, plan)
        slices = _own_slices(resolved, context, meter)
        materialize = Materializer(blueprint, context, plan.precision, bf16_names, slices)
        if layout is not None:
            # Before weights get values, so that a rank allocates only its own stages.
            _drop_other_stages(blueprint, plan, layout, context, materialize)
        # Weights depend only on the seed and their names, so each rank makes its own weights, and
        # none are sent. A technique that never holds the whole model makes them part by part.
        if not any(technique.traits.materializes for technique in plan.techniques.values()):
            materialize(names_of(model))
        # Before wrapping and cutting, because wrappers reference the modules and stages copy them.
        model = _changed_modules(model, plan, slices, context)
        _leave_hooks(model, plan, gradient_hooks)
        assembly = Assembly(
            context=context,
            plan=plan,
            loss=workload.loss,
            meter=meter,
            model=model,
            make_optimizer=make_optimizer,
            module=model,
            materialize=materialize,
            layout=layout,
            block_policies=resolved.policies,
            offloader=mover,
            slices=slices,
            routes=resolved.routes,
            unreached=unreached,
            gradient_hooks=gradient_hooks,
            saved_parts=materialize.saved_parts,
        )
        # cut: is first, so that later techniques see only this rank's layers.
        # slice: was applied above; later techniques see this rank's slices.
        # recompute: changes blocks while they are still the user's modules. If the model is cut,
        # the code that makes the stages applies it.
        # offload: sets where the optimizer's state will be, before the optimizer is made.
        # replicate: wraps or shards the changed modules, with the hooks of recomputation.
        # accumulate: sets how many micro-batches run before the optimizer steps.
        if layout is None:
            apply_policies(model, resolved.policies, mover, compiles=plan.compiles_blocks)
        for technique in plan.in_order:
            technique.apply(assembly)
        assembly.collect_parameters()
        # The runner makes the optimizer last, because sharding has changed the parameters.
        return _recorded_runner(assembly)


def _bf16_names(model: nn.Module, plan: Plan) -> list[str]:
    """Return the names of the parameters whose only values are in bf16.

    Other bf16 copies are made by the engines.
    """
    if not plan.master_weights:
        return bf16_parameter_names(model)
    if not plan.frozen_in_bf16:
        return []
    low, cast = plan.bf16_parameters, plan.casts_when_gathered
    return frozen_low_names(model, bf16_parameters=low, cast_when_gathered=cast)


def _left_out(resolved: ResolvedPlan, model: nn.Module) -> tuple[str, ...]:
    """Return the parameters that stay frozen because the loss does not depend on them.

    If the run can begin to train a parameter in any step, they are unfrozen instead, and the result
    is empty.
    """
    if not resolved.plan.trains_late:
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        # Parameters without elements stay frozen too, but have no gradient to watch.
        return tuple(name for name in resolved.unreached if sizes.get(name))
    unfreeze(model, resolved.unreached)  # `resolve_plan` has frozen them
    return ()


def _drop_other_stages(
    blueprint: Blueprint,
    plan: Plan,
    layout: Layout,
    context: RunContext,
    materialize: Materializer,
) -> None:
    """Replace the parameters and buffers of other ranks' stages by placeholders.

    If the model could not be built on the meta device, it gets its values first. This is
    collective.
    """
    model = blueprint.model
    # A model that is not on the meta device is whole on every rank, and rank 0 sends it whole.
    if not blueprint.deferred:
        materialize(names_of(model))
    own_stages = layout.stages_of(context.pp_rank) if plan.pp > 1 else layout.all_stages
    layout.chosen.cut.strip(model, own_stages, context.device)


def _leave_hooks(model: nn.Module, plan: Plan, hooks: GradientHooks) -> None:
    """Register the gradient hooks again if autograd has to run them, not the runner.

    This is so if each gradient is used as soon as it is computed, or if slices act as whole
    tensors.
    """
    if plan.tp > 1 or plan.release_gradients:
        hooks.put_back(model)


def _changed_modules(
    model: nn.Module, plan: Plan, slices: SlicedState | None, context: RunContext
) -> nn.Module:
    """Apply the changes of a plan to the modules: memory format, SyncBatchNorm, slices."""
    if plan.uses_channels_last:
        set_channels_last(model)
    if plan.sync_batchnorm:
        convert = nn.SyncBatchNorm.convert_sync_batchnorm
        model = convert(model, context.dp_group)  # type: ignore[no-untyped-call]
    # Last: afterwards only the model's own code sees whole parameters, and all other code sees this
    # rank's slices.
    if slices is not None:
        slice_modules(model, slices.by_name, slices.group, slices.model.gathered)
    return model


def _own_slices(
    resolved: ResolvedPlan, context: RunContext, meter: MemoryMeter
) -> SlicedState | None:
    """Return the slices of this rank; None if the plan has no slices."""
    if resolved.slices is None:
        return None
    group = context.group("tp")
    return resolved.slices.on(context.tp_rank, group, exchanging=meter.exchanging)


def _recorded_runner(assembly: Assembly) -> Runner:
    """Make the runner, and let the flight recorder record its phases and blocks."""
    recorder = assembly.meter.recorder = assembly.context.recorder
    for root in assembly.roots:
        mark_blocks(find_blocks(root), recorder)
    return (assembly.runner or LoopRunner)(assembly)
