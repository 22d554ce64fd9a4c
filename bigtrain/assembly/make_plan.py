"""Make a plan from a job: the mesh, a technique for each role, and the batch."""

from __future__ import annotations

from typing import Any, Literal

from bigtrain.assembly.optimizer_check import check_optimizer
from bigtrain.core.registry import make_technique
from bigtrain.core.strategy import CutStrategy, Plan, Strategy
from bigtrain.devices import Kind, accelerator, is_accelerator
from bigtrain.errors import ConfigError
from bigtrain.job.batch import Batch, resolve_batch
from bigtrain.job.deepspeed_json import batch_keys_of
from bigtrain.job.schema import Job, RoleConfig, TrainConfig
from bigtrain.models.compiled import check_compiler
from bigtrain.ranks.context import resolve_mesh


def _refuse_budget(job: Job) -> None:
    """Refuse a budget, in whose place the planner puts a strategy before a plan is made."""
    if job.strategy.budget is not None:
        raise ConfigError(
            f"strategy.budget={job.strategy.budget} lets the planner choose, which only bigtrain "
            "train does. Here, run bigtrain plan ... --at SIZE, and use its plan.yaml."
        )


def default_replicas(*, shares: bool) -> RoleConfig:
    """Return the data parallelism of a job that names none.

    Args:
        shares: whether several ranks share the global batch.
    """
    return RoleConfig(name="ddp" if shares else "single")


def make_plan(job: Job, world_size: int, device_type: str, *, one_host: bool = True) -> Plan:
    """Make the plan of a job. Needs no process group.

    Args:
        job: the job.
        world_size: the number of ranks.
        device_type: 'cpu', 'cuda' or 'xpu'.
        one_host: whether all ranks are on one host.

    Raises:
        ConfigError: the mesh, the batch, a technique or another setting does not fit the others.
    """
    _refuse_budget(job)
    techniques = {
        role: make_technique(role, config) for role, config in job.strategy.roles().items()
    }
    cut = techniques.get("cut")
    is_distributed = isinstance(cut, CutStrategy) and cut.traits.is_distributed
    if (job.mesh.tp or 1) > 1 and "slice" not in techniques:
        techniques["slice"] = make_technique("slice", RoleConfig(name="tensor"))
    pp, dp, tp = _mesh(job, world_size, spans=is_distributed, slices="slice" in techniques)
    if "replicate" not in techniques:
        spread = is_distributed or "slice" in techniques
        shares = spread and dp > 1
        techniques["replicate"] = make_technique("replicate", default_replicas(shares=shares))
    if "accumulate" not in techniques:
        techniques["accumulate"] = make_technique("accumulate", RoleConfig(name="accumulation"))
    if not is_distributed and pp > 1:
        raise ConfigError(
            f"mesh.pp={pp} cuts the model over ranks, and strategy.cut names no technique that "
            "does. Use mesh.pp=1, or --strategy 1f1b."
        )
    replicate = techniques["replicate"].traits
    shares_engine = isinstance(cut, CutStrategy) and cut.traits.takes_over_from(replicate)
    given_up = "replicate" if shares_engine else None  # the cut's engine does replicate's work
    owners = [t.name for role, t in techniques.items() if t.traits.owns_step and role != given_up]
    if len(owners) > 1:
        fix = "Keep one of them."
        if "cut" in techniques and replicate.engine != "torch":
            fix = "Use strategy.replicate.engine=torch, or no strategy.cut."
        raise ConfigError(f"{' and '.join(owners)} both own the training step. {fix}")
    if job.train.sync_batchnorm and device_type != "cuda":
        raise ConfigError(
            "train.sync_batchnorm=true needs CUDA (torch's SyncBatchNorm has no CPU kernel). "
            "Use train.sync_batchnorm=false."
        )
    sharing = max(
        1, dp - replicate.num_servers
    )  # the technique's `check` refuses a plan without workers
    plan = Plan(
        strategy=job.strategy,
        techniques=techniques,
        pp=pp,
        dp=dp,
        tp=tp,
        batch=_batch(job, sharing, cut, pp),
        precision=job.train.precision,
        device_type=device_type,
        clip_norm=job.optim.clip_norm,
        checks_finite=job.train.check_finite,
        sync_batchnorm=job.train.sync_batchnorm,
        master_weights=job.optim.master_weights,
        release_gradients=job.optim.release_gradients,
        compiles_blocks=job.train.compile == "blocks",
        channels_last=job.train.memory_format == "channels_last",
        one_host=one_host,
    )
    check_optimizer(job.optim, plan)
    for technique in techniques.values():
        technique.check(plan)
    _check_kernels(plan, job.memory.cap)
    _check_messages(plan, job.mesh.backend)
    return plan


def _check_kernels(plan: Plan, cap: int | None) -> None:
    """Raise ConfigError for stages in channels-last, and for blocks that cannot be compiled."""
    if plan.channels_last and plan.cut is not None:
        raise ConfigError(
            "train.memory_format=channels_last is for whole models, and the stages of strategy.cut "
            "send each other contiguous tensors. Use train.memory_format=contiguous, or leave "
            "strategy.cut out."
        )
    if not plan.compiles_blocks:
        return
    if plan.splits_backward:
        raise ConfigError(
            "train.compile=blocks compiles a block's backward pass as one function, and this "
            "schedule splits it in two. Use strategy.cut.schedule=1f1b, or train.compile=none."
        )
    if plan.replicate.replaces_products:
        raise ConfigError(
            "train.compile=blocks: DeepSpeed's stage 3 gathers the parameters of each layer inside "
            "of a block. Use --strategy fsdp, which gathers whole blocks, or train.compile=none."
        )
    if cap is not None and plan.device_type == "cpu":
        raise ConfigError(
            f"train.compile=blocks: the compiler takes memory of the process, and on a CPU "
            f"memory.cap={cap} limits all of that. Use train.compile=none, or leave memory.cap out."
        )
    check_compiler(plan.device_type)


def _check_messages(plan: Plan, backend: str) -> None:
    """Raise ConfigError if gloo would send point-to-point messages of an accelerator's tensors.

    gloo copies the tensors of collectives to the host. In messages it uses an address on the device
    as an address on the host, which crashes the process.
    """
    if backend != "gloo" or not is_accelerator(plan.device_type):
        return
    senders = None
    if plan.pp > 1:
        senders = f"the stages of a pipeline (mesh.pp={plan.pp})"
    elif plan.replicate.sends_messages:
        senders = f"the ranks of strategy.replicate={plan.techniques['replicate'].name}"
    if senders is not None:
        raise ConfigError(
            f"mesh.backend=gloo sends messages from host memory only, and {senders} send each "
            f"other tensors of a {plan.device_type} device. Leave mesh.backend out, with one GPU "
            "for each rank, or use device=cpu; ddp, fsdp, zero and tensor work with gloo on a "
            "GPU."
        )


def _mesh(job: Job, world_size: int, *, spans: bool, slices: bool) -> tuple[int, int, int]:
    """Return the sizes of the axes pp, dp and tp.

    Without `mesh.pp` a distributed cut gets the ranks that dp and tp leave. Without `mesh.tp` a
    slice technique gets all remaining ranks, or 2 if another axis needs ranks as well.

    Args:
        job: the job.
        world_size: the number of ranks.
        spans: whether the job has a distributed cut.
        slices: whether the job has a slice technique.
    """
    pp, dp, tp = job.mesh.pp, job.mesh.dp, job.mesh.tp
    if tp is None:
        shares = dp == -1 and "replicate" in job.strategy.roles()
        left = world_size // (max(1, dp) * (pp or 1))
        tp = 1 if not slices else 2 if shares or (spans and pp is None) else max(1, left)
    if pp is None:
        pp = max(1, world_size // (max(1, dp) * tp)) if spans else 1
    return resolve_mesh(pp, dp, tp, world_size)


def _batch(job: Job, dp: int, cut: Strategy | None, pp: int) -> Batch:
    """Return the batch of a job.

    Raises:
        ConfigError: see `resolve_batch`. If a DeepSpeed file sets the numbers, the message contains
            the file's keys.
    """
    try:
        return _wanted_batch(job.train, dp, cut, pp)
    except ConfigError as error:
        file = job.strategy.deepspeed_file
        keys = batch_keys_of(file) if file is not None else []
        if not keys:
            raise
        raise ConfigError(
            f'{error} {file} says {" and ".join(keys)}: write the number there, or "auto".'
        ) from None


def _wanted_batch(train: TrainConfig, dp: int, cut: Strategy | None, pp: int) -> Batch:
    """Return the batch.

    If the job gives only the global batch size, the number of micro-batches is the largest divisor
    of a replica's batch that is at most the number that the cut wants.
    """
    micro_batches = cut.micro_batches(pp) if isinstance(cut, CutStrategy) else 1
    global_size = train.global_batch_size
    unspecified = train.micro_batch_size is None and train.accumulation_steps is None
    if unspecified and global_size is not None and global_size % dp == 0:
        per_replica = global_size // dp
        steps = max(
            n for n in range(1, max(1, min(micro_batches, per_replica)) + 1) if per_replica % n == 0
        )
        train = train.model_copy(update={"accumulation_steps": steps})
    elif unspecified and global_size is None:
        train = train.model_copy(update={"accumulation_steps": micro_batches})
    return resolve_batch(train, dp)


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain values for a YAML file, which the option `--plan` reads."""
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


def device_type_of(job: Job) -> Literal["cpu"] | Kind:
    """Return the type of the job's `device`; for "auto" that of this machine's accelerator or CPU.

    The result is 'cuda', 'xpu' or 'cpu'.
    """
    if job.device != "auto":
        return job.device
    return accelerator() or "cpu"
