"""From a job to a plan, and from a plan to a live runner: the order of composition.

`build` is the one place where that order stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bigtrain.blueprint import Blueprint
from bigtrain.chunked_loss import attach
from bigtrain.config import Batch, Job, Role, RoleConfig, TrainConfig, resolve_batch
from bigtrain.data.loader import MicroBatch
from bigtrain.distributed import RunContext, resolve_mesh
from bigtrain.errors import ConfigError
from bigtrain.fill import Materializer, names_of
from bigtrain.fitting import check_optimizer
from bigtrain.keeping import Moving, shape
from bigtrain.layout import Layout
from bigtrain.live import Runner
from bigtrain.memory import Meter
from bigtrain.precision import low_precision_names
from bigtrain.registry import make_technique
from bigtrain.runner import LoopRunner
from bigtrain.strategy import Assembly, CutStrategy, Plan, Strategy
from bigtrain.tasks import Loss
from bigtrain.update import MakeOptimizer

ORDER: tuple[Role, ...] = ("cut", "recompute", "offload", "replicate", "accumulate")
"""The order in which techniques shape a run, and its forecast."""


def make_plan(job: Job, world_size: int, device_type: str) -> Plan:
    """Decide what will be run, and refuse what cannot be. Needs no process group.

    Args:
        job: the configuration.
        world_size: how many ranks there are.
        device_type: 'cpu' or 'cuda'.

    Raises:
        ConfigError: the mesh, the batch or a technique does not fit.
    """
    techniques = {
        role: make_technique(role, config) for role, config in job.strategy.roles().items()
    }
    cut = techniques.get("cut")
    spans = isinstance(cut, CutStrategy) and cut.spans_ranks
    pp, dp, tp = _mesh(job, world_size, spans=spans)
    if "replicate" not in techniques:
        name = "ddp" if spans and dp > 1 else "single"
        techniques["replicate"] = make_technique("replicate", RoleConfig(name=name))
    if "accumulate" not in techniques:
        techniques["accumulate"] = make_technique("accumulate", RoleConfig(name="accumulation"))
    if not spans and pp * tp > 1:
        raise ConfigError(
            f"mesh.pp={pp} and mesh.tp={tp} cut the model over ranks, and strategy.cut names no "
            "technique that does. Use mesh.pp=1 mesh.tp=1, or --strategy 1f1b."
        )
    joins = isinstance(cut, CutStrategy) and cut.joins(techniques["replicate"])
    given_up = "replicate" if joins else None  # the cut's engine is that one's, too
    if tp > 1:
        raise ConfigError(
            f"mesh.tp={tp}: no technique here slices tensors over ranks. Use mesh.tp=1."
        )
    owners = [t.name for role, t in techniques.items() if t.owns_step and role != given_up]
    if len(owners) > 1:
        fix = "Keep one of them."
        if "cut" in techniques and techniques["replicate"].owns_step:
            fix = "Use strategy.replicate.engine=torch, or no strategy.cut."
        raise ConfigError(f"{' and '.join(owners)} both own the training step. {fix}")
    if job.train.sync_batchnorm and device_type != "cuda":
        raise ConfigError(
            "train.sync_batchnorm=true needs CUDA (torch's SyncBatchNorm has no CPU kernel). "
            "Use train.sync_batchnorm=false."
        )
    plan = Plan(
        strategy=job.strategy,
        techniques=techniques,
        pp=pp,
        dp=dp,
        tp=tp,
        batch=_batch(job.train, dp, cut.micro_batches(pp) if isinstance(cut, CutStrategy) else 1),
        precision=job.train.precision,
        device_type=device_type,
        clip_norm=job.optim.clip_norm,
        sync_batchnorm=job.train.sync_batchnorm,
        master_weights=job.optim.master_weights,
        release_gradients=job.optim.release_gradients,
    )
    check_optimizer(job.optim, plan)
    for technique in techniques.values():
        technique.check(plan)
    return plan


def _mesh(job: Job, world_size: int, *, spans: bool) -> tuple[int, int, int]:
    """The mesh; without `mesh.pp` a cut over ranks takes those that dp and tp leave."""
    pp, dp, tp = job.mesh.pp, job.mesh.dp, job.mesh.tp
    if pp is None:
        pp = max(1, world_size // (max(1, dp) * tp)) if spans else 1
    return resolve_mesh(pp, dp, tp, world_size)


def _batch(train: TrainConfig, dp: int, micro_batches: int) -> Batch:
    """The batch; where the job says nothing of micro-batches, about as many as are wanted."""
    total = train.global_batch_size
    silent = train.micro_batch_size is None and train.accumulation_steps is None
    if silent and total is not None and total % dp == 0:
        part = total // dp
        steps = max(n for n in range(1, max(1, min(micro_batches, part)) + 1) if part % n == 0)
        train = train.model_copy(update={"accumulation_steps": steps})
    elif silent and total is None:
        train = train.model_copy(update={"accumulation_steps": micro_batches})
    return resolve_batch(train, dp)


def in_order(plan: Plan) -> list[Strategy]:
    """The plan's techniques in the order of composition."""
    return [plan.techniques[role] for role in ORDER if role in plan.techniques]


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


def describe_plan(plan: Plan) -> dict[str, Any]:
    """The plan as plain YAML values, which `--plan` reads back."""
    strategy: dict[str, Any] = {"name": plan.strategy.name}
    for role, technique in plan.techniques.items():
        options = technique.model_dump(mode="json", exclude_defaults=True)
        config = plan.strategy.roles().get(role)
        strategy[role] = {"name": config.name if config else technique.name, **options}
    return {
        "mesh": {"pp": plan.pp, "dp": plan.dp, "tp": plan.tp},
        "strategy": strategy,
        "train": {
            "global_batch_size": plan.batch.global_size,
            "micro_batch_size": plan.batch.micro_size,
            "precision": plan.precision,
        },
    }


def device_type_of(job: Job) -> str:
    """'cuda' or 'cpu', as the job's `device` says for this machine."""
    if job.device != "auto":
        return job.device
    return "cuda" if torch.cuda.is_available() else "cpu"
