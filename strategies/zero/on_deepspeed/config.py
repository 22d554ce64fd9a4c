"""DeepSpeed's configuration, made from the job or from a user's file with "auto" values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigtrain.core.strategy import Plan
from bigtrain.devices import is_accelerator
from bigtrain.errors import ConfigError
from bigtrain.job.deepspeed_json import deepspeed_config, json_section, refusal, same_value
from bigtrain.job.deepspeed_sections import engine_part, is_true, unused_sections
from bigtrain.strategies.zero import Zero

_AUTO = "auto"


def zero_stage_of(options: Zero) -> int:
    """Return the stage of ZeRO: that of the DeepSpeed file, if the options name a file.

    Raises:
        ConfigError: the file cannot be read, or its stage differs from that of the options.
    """
    if options.config is None:
        return options.stage
    stage = json_section(deepspeed_config(options.config), "zero_optimization").get("stage", 0)
    if stage == _AUTO:
        return options.stage
    if not isinstance(stage, int) or stage not in range(4):
        raise ConfigError(
            f"{options.config}: zero_optimization.stage={stage!r} is not a stage. "
            "Write 0, 1, 2 or 3."
        )
    if "stage" in options.model_fields_set and options.stage != stage:
        raise ConfigError(
            f"strategy.replicate.stage={options.stage}, but zero_optimization.stage={stage} in "
            f"{options.config}. Use --strategy zero{stage} with it, or leave the strategy out."
        )
    return stage


def precision_of(plan: Plan) -> int:
    """Return the bytes of an element of the parameters that layers compute with."""
    return 2 if plan.bf16_parameters else 4


def deepspeed_settings(options: Zero, plan: Plan, elements: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration, with bucket sizes in elements.

    Args:
        options: the options of the technique. If they name a file, all values of the file are used,
            and each "auto" is replaced.
        plan: batch, precision, clipping, offload.
        elements: the number of elements of the trained parameters, from which the sizes of buffers
            are derived.

    Raises:
        ConfigError: the file contradicts the job.
    """
    batch, bf16 = plan.batch, plan.precision == "bf16"
    stage = zero_stage_of(options)
    defaults: dict[str, Any] = {
        "train_batch_size": batch.global_size,
        "train_micro_batch_size_per_gpu": batch.micro_size,
        "gradient_accumulation_steps": batch.accumulation_steps,
        "gradient_clipping": plan.clip_norm or 0.0,
        "bf16": {"enabled": bf16, "check_grad_overflow": False},
        "fp16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": _zero(options, plan, stage, elements),
        # DeepSpeed's timer would wait for the accelerator at each forward pass and each step.
        "timers": {"throughput": {"enabled": False}},
    }
    if bf16 and accumulates_in_fp32(plan, stage):
        defaults["data_types"] = {"grad_accum_dtype": "fp32"}
    if options.config is None:
        return defaults
    user_file = deepspeed_config(options.config)
    _refuse_contradictions(options.config, user_file, defaults, plan)
    filled: dict[str, Any] = _fill(engine_part(user_file), defaults)
    for key, value in defaults.items():
        if key not in ("zero_optimization", "data_types"):
            filled.setdefault(key, value)
    return filled


def accumulates_in_fp32(plan: Plan, stage: int) -> bool:
    """Return whether DeepSpeed adds bf16 gradients up in fp32.

    Stage 2 does, because the step reads its shard in fp32. Stage 3 does if a step has several
    micro-batches. Stage 1 does not: it would need whole fp32 gradients.
    """
    return stage == 2 or (stage == 3 and plan.batch.accumulation_steps > 1)


def overlaps_exchanges(zero: Mapping[str, Any]) -> bool:
    """Return whether DeepSpeed communicates while it computes: by default only in stage 3.

    Args:
        zero: the section `zero_optimization` of DeepSpeed's configuration.
    """
    given = zero.get("overlap_comm")
    return bool(zero["stage"] == 3 if given is None else given)


def _zero(options: Zero, plan: Plan, stage: int, elements: int) -> dict[str, Any]:
    """Return the section for ZeRO: small buffers on a CPU, large enough to overlap on CUDA."""
    on_gpu = is_accelerator(plan.device_type)
    bucket = bucket_elements(options, plan, elements)
    zero_settings: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "contiguous_gradients": True,
        # Without overlap stage 1 reduces after the backward pass, when all whole gradients exist.
        "overlap_comm": on_gpu or stage == 1,
        # Each gradient is then reduced to the rank that updates it, not to all ranks. This halves
        # the traffic, and avoids a copy of a gradient that is in the shares of two ranks.
        "use_multi_rank_bucket_allreduce": False,
    }
    if stage == 3:
        del zero_settings["use_multi_rank_bucket_allreduce"]
        share = elements // max(1, plan.dp)
        zero_settings |= {
            "sub_group_size": max(1, share // 16) if plan.bf16_parameters else max(1, share),
            "stage3_prefetch_bucket_size": bucket if on_gpu else 0,
            "stage3_max_live_parameters": 2 * bucket if on_gpu else 0,
            "stage3_max_reuse_distance": 0,
            # Biases and norms stay whole: they are 0.1 % of a model, but most of its tensors.
            "stage3_param_persistence_threshold": elements // 5000,
            "stage3_model_persistence_threshold": max(1, elements // 100),
            # Parameters that are gathered one by one need no second buffer.
            "stage3_allgather_sequential": not on_gpu,
        }
    offloads = plan.offload_tiers
    if offloads.optimizer != "device":
        zero_settings["offload_optimizer"] = _offload(offloads.optimizer, offloads.path, plan)
    if offloads.parameters != "device":
        zero_settings["offload_param"] = _offload(offloads.parameters, offloads.path, plan)
    return zero_settings


def _offload(tier: str, path: str | None, plan: Plan) -> dict[str, Any]:
    offload_settings: dict[str, Any] = {
        "device": "nvme" if tier == "disk" else "cpu",
        "pin_memory": is_accelerator(plan.device_type),
    }
    if tier == "disk":
        offload_settings["nvme_path"] = path
    return offload_settings


def bucket_elements(options: Zero, plan: Plan, elements: int) -> int:
    """Return the number of elements of a bucket of gradients; even, as DeepSpeed requires."""
    if options.bucket_size is not None:
        return max(2, options.bucket_size // precision_of(plan) // 2 * 2)
    if is_accelerator(plan.device_type):
        # Each bucket costs a wait: a small model has few buckets, a large model sixteen or more.
        return min(50_000_000, max(5_000_000, elements // 16 // 2 * 2))
    # A gradient larger than the bucket is reduced in place, without a copy.
    return min(1_000_000, max(256, elements // 512 // 2 * 2))


def _fill(file: Any, ours: Any) -> Any:
    """Replace each "auto" of a file by the value in `ours`; without a value omit the key."""
    if not isinstance(file, dict):
        return file
    known = ours if isinstance(ours, dict) else {}
    return {
        key: known[key] if value == _AUTO else _fill(value, known.get(key))
        for key, value in file.items()
        if value != _AUTO or key in known
    }


def _refuse_contradictions(
    path: str, user_file: dict[str, Any], defaults: dict[str, Any], plan: Plan
) -> None:
    """Refuse a file that differs from the plan in batch, clipping, precision or offload.

    `deepspeed_json` has already compared the keys of the job with the file.
    """
    _refuse_batch(path, user_file, plan)
    clip = user_file.get("gradient_clipping", _AUTO)
    if clip != _AUTO and not same_value(clip, defaults["gradient_clipping"]):
        wanted = clip or None
        raise refusal(path, "gradient_clipping", clip, "optim.clip_norm", plan.clip_norm, wanted)
    bf16 = json_section(user_file, "bf16").get("enabled", _AUTO)
    if bf16 != _AUTO and is_true(bf16) != defaults["bf16"]["enabled"]:
        wanted = "bf16" if is_true(bf16) else "fp32"
        raise refusal(path, "bf16.enabled", bf16, "train.precision", plan.precision, wanted)
    for name, tier in (
        ("offload_optimizer", plan.offload_tiers.optimizer),
        ("offload_param", plan.offload_tiers.parameters),
    ):
        device = json_section(json_section(user_file, "zero_optimization"), name).get(
            "device", _AUTO
        )
        known = {"none": "device", "cpu": "cpu", "nvme": "disk"}.get(str(device), device)
        if tier != "device" and known not in (_AUTO, tier):
            key = "optimizer" if name == "offload_optimizer" else "parameters"
            theirs, ours = f"zero_optimization.{name}.device", f"strategy.offload.{key}"
            raise refusal(path, theirs, device, ours, tier, known)


def _refuse_batch(path: str, user_file: dict[str, Any], plan: Plan) -> None:
    """Refuse a batch that does not fit the number of ranks, or is not the job's."""
    batch = plan.batch
    pairs = (
        ("train_batch_size", "train.global_batch_size", batch.global_size),
        ("train_micro_batch_size_per_gpu", "train.micro_batch_size", batch.micro_size),
        ("gradient_accumulation_steps", "train.accumulation_steps", batch.accumulation_steps),
    )
    written = [user_file.get(key, _AUTO) for key, _, _ in pairs]
    if _AUTO not in written and all(isinstance(value, int) for value in written):
        total, micro, accumulation = written
        if total != micro * accumulation * batch.dp_size:
            raise ConfigError(
                f"{path}: train_batch_size={total} is not train_micro_batch_size_per_gpu * "
                f"gradient_accumulation_steps * ranks = {micro} * {accumulation} * "
                f"{batch.dp_size} = {micro * accumulation * batch.dp_size}. Start as many ranks "
                'as the file is for, or write "auto" for one of the three.'
            )
    for (key, ours, value), in_file in zip(pairs, written, strict=True):
        if in_file != _AUTO and not same_value(in_file, value):
            raise refusal(path, key, in_file, ours, value, in_file)


def unused_line(path: str | None) -> str | None:
    """Return a line with the unused sections of a user's file; None if all sections are used."""
    names = [] if path is None else unused_sections(deepspeed_config(path))
    return f"{path}: not used: {', '.join(names)}" if names else None
