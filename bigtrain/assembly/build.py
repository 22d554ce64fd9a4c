"""From a resolved plan to a live runner: the order of composition.

`build_runner` is the one place where that order stands.
"""

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
from bigtrain.models.parameters import bf16_parameter_names, names_of
from bigtrain.optim.whole import whole_optimizer
from bigtrain.ranks.context import RunContext
from bigtrain.recorder.blocks import mark_blocks
from bigtrain.slicing.install import slice_modules
from bigtrain.slicing.state import SlicedState
from bigtrain.tensors.memory_format import set_channels_last
from bigtrain.tracing.unreached import unfreeze


def check_mesh(plan: Plan, context: RunContext) -> None:
    """Refuse ranks that were connected as another mesh than the plan's: they would wait for ever.

    Raises:
        ConfigError: with both meshes.
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
    """Make the live runner of a plan. Every step below stands where it must.

    Args:
        resolved: what to build.
        blueprint: the model, described or given.
        workload: the optimizer is made once, of the parameters that this rank updates.
        context: what this process is.
        meter: told of phases and owners.
        mover: `plan.mover(...)`, which the caller closes.
    """
    meter.phase("build")
    unreached = _left_out(resolved, blueprint.model)
    with meter.window():
        plan, layout = resolved.plan, resolved.layout
        model = blueprint.model
        attach_head(workload.loss, model)  # while names are the user's own
        make_optimizer = whole_optimizer(workload.make_optimizer, model)  # and parameters whole
        gradient_hooks = GradientHooks.take(model)  # filling parameters in would lose them
        bf16_names = () if plan.master_weights else bf16_parameter_names(model)
        slices = _own_slices(resolved, context, meter)
        materialize = Materializer(blueprint, context, plan.precision, bf16_names, slices)
        if layout is not None:
            # Before any value is made: a rank pays for its own stages only.
            _drop_other_stages(blueprint, plan, layout, context, materialize)
        # Weights depend on seed and name only, so every rank makes its own and none are sent.
        # A technique that never holds the whole model makes them a piece at a time.
        if not any(technique.traits.materializes for technique in plan.techniques.values()):
            materialize(names_of(model))
        # While the model is plain: wrappers keep what they find, stages copy it.
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
        )
        # cut: stages first, so that all that follows sees only this rank's layers.
        # slice: done above; what follows finds parameters of this rank's own.
        # recompute: on blocks, while they are still the user's own modules; those of stages
        # where the stages are made.
        # offload: says where the optimizer's state will live, for those who make it.
        # replicate: wraps or shards what is left, hooks of recomputation included.
        # accumulate: says how often all of that runs before the optimizer does.
        if layout is None:
            apply_policies(model, resolved.policies, mover, compiles=plan.compiles_blocks)
        for technique in plan.in_order:
            technique.apply(assembly)
        assembly.collect_parameters()
        # The optimizer comes last, made by the runner: sharding has changed the parameters.
        return _recorded_runner(assembly)


def _left_out(resolved: ResolvedPlan, model: nn.Module) -> tuple[str, ...]:
    """The parameters that are left out of training, where the run cannot follow late ones."""
    if not _follows_late(resolved.plan):
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        # Parameters of no elements are frozen too, and their gradients say nothing.
        return tuple(name for name in resolved.unreached if sizes.get(name))
    unfreeze(model, resolved.unreached)  # it was forecast without them
    return ()


def _follows_late(plan: Plan) -> bool:
    """Whether a parameter may get its first gradient in any step: nothing is planned around it."""
    plain = plan.replicate.on_torch and not plan.replicate.sharded_states
    return plain and plan.dp == 1 and not {"cut", "slice"} & plan.techniques.keys()


def _drop_other_stages(
    blueprint: Blueprint,
    plan: Plan,
    layout: Layout,
    context: RunContext,
    materialize: Materializer,
) -> None:
    """Let the tensors of other ranks' stages go."""
    model = blueprint.model
    # A model that could not be described is whole on every rank anyhow, and comes from rank 0 as a
    # whole.
    if not blueprint.deferred:
        materialize(names_of(model))
    own_stages = layout.stages_of(context.pp_rank) if plan.pp > 1 else layout.all_stages
    layout.chosen.cut.strip(model, own_stages, context.device)


def _leave_hooks(model: nn.Module, plan: Plan, hooks: GradientHooks) -> None:
    """Leave hooks to autograd where a gradient is used at once, or slices act as whole tensors."""
    if plan.tp > 1 or plan.release_gradients:
        hooks.put_back(model)


def _changed_modules(
    model: nn.Module, plan: Plan, slices: SlicedState | None, context: RunContext
) -> nn.Module:
    """What a plan changes of the modules themselves."""
    if plan.uses_channels_last:
        set_channels_last(model)
    if plan.sync_batchnorm:
        convert = nn.SyncBatchNorm.convert_sync_batchnorm
        model = convert(model, context.dp_group)  # type: ignore[no-untyped-call]
    # After this the model's code sees whole parameters, everybody else this rank's slices.
    if slices is not None:
        slice_modules(model, slices.by_name, slices.group, slices.model.gathered)
    return model


def _own_slices(
    resolved: ResolvedPlan, context: RunContext, meter: MemoryMeter
) -> SlicedState | None:
    """How this rank holds a model's layers, where the plan slices them."""
    if resolved.slices is None:
        return None
    group = context.group("tp")
    return resolved.slices.on(context.tp_rank, group, exchanging=meter.exchanging)


def _recorded_runner(assembly: Assembly) -> Runner:
    """The runner, whose phases and blocks the flight recorder is told of."""
    recorder = assembly.meter.recorder = assembly.context.recorder
    for root in assembly.roots:
        mark_blocks(find_blocks(root), recorder)
    return (assembly.runner or LoopRunner)(assembly)
