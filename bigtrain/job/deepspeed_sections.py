"""Tables of all keys of a DeepSpeed file: passed to DeepSpeed, compared, ignored, or refused.

A key that would change the numbers, the memory or the ranks, and that bigtrain does not support, is
refused. Keys that only print, save or tune are ignored, and a log line lists them. A key in no
table is a typing error, or belongs to an unknown version of DeepSpeed; it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bigtrain.errors import ConfigError, did_you_mean

COMPARED = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("gradient_clipping", "bf16", "fp16", "optimizer", "scheduler", "zero_optimization"),
}
"""Keys that a job can set, too. The values of file and job are compared."""
PASSED = {
    *("communication_data_type", "prescale_gradients", "gradient_predivide_factor", "data_types"),
    *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "timers"),
}
"""Keys that are passed to DeepSpeed's engine."""
NOT_USED = {
    "activation_checkpointing": "strategy.recompute=full",
    "aio": "",
    "autotuning": "bigtrain plan",
    "checkpoint": "checkpoint.every and others",
    "comet": "metrics.jsonl",
    "comms_config": "bigtrain speedup",
    "comms_logger": "bigtrain speedup",
    "compile": "train.compile=blocks",
    "csv_monitor": "metrics.jsonl",
    "dataloader_drop_last": "",
    "datastates_ckpt": "checkpoint.asynchronous",
    "disable_python_gc": "",
    "flops_profiler": "bigtrain explain",
    "log_level": "",
    "monitor_config": "metrics.jsonl",
    "nebula": "checkpoint.asynchronous",
    "pipeline": "--strategy pipeline_deepspeed",
    "seq_parallel_communication_data_type": "",
    "tensorboard": "log.tensorboard=true",
    "use_data_before_expert_parallelism": "",
    "vocabulary_size": "",
    "wandb": "log.wandb=PROJECT",
    "zero_allow_untested_optimizer": "any optimizer is allowed",
    "zero_force_ds_cpu_optimizer": "torch's kernels are used",
}
"""Ignored keys, which print, save or tune, each with bigtrain's feature for it; may be empty."""
REFUSED = {
    "amp": "Use train.precision=bf16, and leave it out",
    "compression_training": "Leave it out: models are trained as they are",
    "curriculum_learning": "Leave it out: samples come in the order of train.seed",
    "data_efficiency": "Leave it out: samples come in the order of train.seed, with all tokens",
    "disable_allgather": "Leave it out: ranks would keep parameters that others updated",
    "eigenvalue": "Leave it out: models are trained as they are",
    "elasticity": "Use bigtrain train -n N --restarts K --min-ranks M, and leave it out",
    "expert_parallel": "Leave it out: experts are replicated",
    "fp8": "Use train.precision=bf16, and leave it out",
    "gradient_allreduce_op": "Leave it out: gradients are averaged",
    "graph_harvesting": "Leave it out",
    "hybrid_engine": "Leave it out: it generates text between the steps",
    "managed_gradient_accumulation": "Leave it out: a step is a global batch",
    "progressive_layer_drop": "Leave it out: every step trains all layers",
    "quantize_training": "Leave it out: models are trained as they are",
    "sequence_parallel": "Use --strategy tensor_sequence, and leave it out",
    "sequence_parallel_size": "Use --strategy tensor_sequence, and leave it out",
    "sparse_attention": "Leave it out: attention is the model's own",
    "sparse_gradients": "Leave it out: it has been removed from DeepSpeed, too",
    "tensor_parallel": "Use --strategy tensor mesh.tp=N, and leave it out",
    "torch_autocast": "Use train.precision=bf16, and leave it out",
    "weight_quantization": "Leave it out: models are trained as they are",
}
"""Keys that are refused if they are switched on, each with the fix.

They change the numbers, the memory or the ranks.
"""
_SIZES = ("autotp_size", "tp_size")
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "gradient_allreduce_op": ("mean", "avg", "average"),
    "managed_gradient_accumulation": (True,),
    "sequence_parallel_size": (1,),
}
"""By refused key, the values that request what bigtrain does in any case."""

ZERO_PASSED = {
    *("stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "overlap_comm"),
    *("use_multi_rank_bucket_allreduce", "allgather_partitions", "allgather_bucket_size"),
    *("offload_param", "offload_optimizer", "sub_group_size", "ignore_unused_parameters"),
    *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
    *("stage3_model_persistence_threshold", "stage3_max_live_parameters"),
    *("stage3_max_reuse_distance", "stage3_module_granularity_threshold", "leaf_module"),
    *("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential"),
    *("round_robin_gradients", "parameter_alignment", "memory_efficient_linear"),
    *("override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks"),
}
ZERO_NOT_USED = {
    "compute_grad_norm": "the norm is always known",
    "elastic_checkpoint": "checkpoints fit any number of ranks",
    "load_from_fp32_weights": "checkpoints hold fp32",
    "pipeline_loading_checkpoint": "",
    "save_muon_momentum_buffer_in_memory": "",
    "stage3_gather_16bit_weights_on_model_save": "bigtrain checkpoint export",
    "stage3_gather_fp16_weights_on_model_save": "bigtrain checkpoint export",
}
ZERO_REFUSED = {
    "legacy_stage1": "Leave it out: it has been removed from DeepSpeed, too",
    "mics_hierarchical_params_gather": "Use --strategy hybrid, and leave it out",
    "mics_shard_size": "Use --strategy hybrid_N for N ranks, and leave it out",
    "zenflow": "Leave it out: it steps with gradients of earlier steps",
    "zero_hpz_partition_size": "Use --strategy hybrid, and leave it out",
    "zero_quantized_gradients": "Leave it out: gradients are sent as they are",
    "zero_quantized_nontrainable_weights": "Leave it out: weights are sent as they are",
    "zero_quantized_weights": "Leave it out: weights are sent as they are",
    "zeropp_loco_param": "Leave it out: gradients are sent as they are",
}
_OLD_NAMES = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}
"""Switches of older files, each with the section that replaced it in DeepSpeed."""
_SHORT_NAMES = {
    name.removeprefix("stage3_"): name
    for name in (*ZERO_PASSED, *ZERO_NOT_USED)
    if name.startswith("stage3_")
}
"""Short names that DeepSpeed accepts for keys of stage 3."""
_ZERO_NEUTRAL: dict[str, tuple[object, ...]] = {
    "mics_shard_size": (-1, 0),
    "zero_hpz_partition_size": (0, 1),
}
_BF16_REFUSED = {
    "bf16_master_weights_and_grads": "Use optim.master_weights, and leave it out",
    "bf16_optimizer_states": "Use optim.state, and leave it out",
}
_OFFLOAD_NEUTRAL = {"ratio": 1.0, "super_offload": False}
_COMMENT = ("_", "/", "#")
"""The first letter of keys that are comments."""
_PARTS = {
    "bf16": {"enabled", "immediate_grad_update", "check_grad_overflow", *_BF16_REFUSED},
    "optimizer": {"type", "params", "legacy_fusion"},
    "scheduler": {"type", "params"},
    "zero_optimization.offload_optimizer": {
        *("device", "nvme_path", "buffer_count", "pin_memory", "pipeline_read"),
        *("pipeline_write", "fast_init", "ratio", "super_offload", "cpuadam_cores_perc"),
    },
    "zero_optimization.offload_param": {
        *("device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory"),
    },
    "data_types": {"grad_accum_dtype"},
}
"""By section, its known keys. DeepSpeed, or a job, would silently ignore any other key."""


def modern(path: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with DeepSpeed's current names, without comments and null values.

    Args:
        path: the path of the file, for messages.
        config: the configuration as it is written.

    Raises:
        ConfigError: a section is not an object.
    """
    made = {k: v for k, v in config.items() if v is not None and k[:1] not in _COMMENT}
    if "bfloat16" in made:
        made.setdefault("bf16", made.pop("bfloat16"))
    sections = ("bf16", "fp16", "optimizer", "scheduler", "zero_optimization", "data_types")
    for name in sections:
        _need_object(path, name, made.get(name, {}))
    for name in ("optimizer", "scheduler"):
        _need_object(path, f"{name}.params", made.get(name, {}).get("params") or {})
    options = made.get("zero_optimization", {}).items()
    zero = {_SHORT_NAMES.get(k, k): v for k, v in options if v is not None}
    pinned = zero.pop("cpu_offload_use_pin_memory", None)
    for old, new in _OLD_NAMES.items():
        if is_true(zero.pop(old, False)):
            pin = {} if pinned is None else {"pin_memory": is_true(pinned)}
            zero.setdefault(new, {"device": "cpu", **pin})
    for name in ("offload_optimizer", "offload_param"):
        _need_object(path, f"zero_optimization.{name}", zero.get(name, {}))
    if "zero_optimization" in made:
        made["zero_optimization"] = zero
    return made


def _need_object(path: str, name: str, value: object) -> None:
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path}: {name}={shown(value)} is not an object. Write one, as in "
            f'"{name.rpartition(".")[2]}": {{...}}.'
        )


@dataclass(frozen=True)
class Fault:
    """A key of a file that a job does not support."""

    key: str
    """The dotted key."""
    reason: str
    """The key, its value and why it is refused, as the beginning of a message."""
    fix: str
    """The remedy, as a sentence without its full stop."""
    is_unknown: bool = False
    """Whether DeepSpeed does not have the key, either."""


def check_sections(path: str, config: Mapping[str, Any]) -> None:
    """Refuse unknown keys, and keys that are switched on and not supported.

    Args:
        path: the path of the file.
        config: the configuration that `modern` returns.

    Raises:
        ConfigError: a key is refused; the message contains the key, its value and the fix.
    """
    for fault in section_faults(config):
        raise ConfigError(f"{path}: {fault.reason} {fault.fix}.")


def section_faults(config: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the keys that are unknown, and those that are switched on and not supported.

    Args:
        config: the configuration that `modern` returns.
    """
    yield from _unknown("", config, {*COMPARED, *PASSED, *NOT_USED, *REFUSED})
    for key in REFUSED:
        if key in config and _is_on(key, config[key], _NEUTRAL.get(key, ())):
            yield _refused(key, config[key], REFUSED[key])
    if is_true(config.get("fp16", {}).get("enabled")):
        yield Fault(
            "fp16.enabled",
            "fp16.enabled=true: fp16 is not supported, as it needs loss scaling.",
            "Write bf16 instead of fp16 in the file (train.precision=bf16)",
        )
    zero = config.get("zero_optimization", {})
    yield from _unknown("zero_optimization.", zero, {*ZERO_PASSED, *ZERO_NOT_USED, *ZERO_REFUSED})
    for key, fix in ZERO_REFUSED.items():
        if key in zero and _is_on(key, zero[key], _ZERO_NEUTRAL.get(key, ())):
            yield _refused(f"zero_optimization.{key}", zero[key], fix)
    for name, parts in _PARTS.items():
        yield from _unknown(f"{name}.", _section(config, name), parts)
    for key, fix in _BF16_REFUSED.items():
        if is_true(config.get("bf16", {}).get(key)):
            yield _refused(f"bf16.{key}", True, fix)
    for key, neutral in _OFFLOAD_NEUTRAL.items():
        value = zero.get("offload_optimizer", {}).get(key, neutral)
        if value != neutral:
            fix = "Leave it out: all of the state is offloaded, or none"
            yield _refused(f"zero_optimization.offload_optimizer.{key}", value, fix)


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section: Any = config
    for part in name.split("."):
        section = section.get(part, {})
    return section if isinstance(section, dict) else {}


def _unknown(prefix: str, keys: Iterable[str], known: Iterable[str]) -> Iterator[Fault]:
    for key in keys:
        if key not in known:
            near = did_you_mean(key, known)
            fix = "Leave it out" if near == "." else "Write that, or leave it out"
            name = f"{prefix}{key}"
            yield Fault(name, f"{name} is not a key of DeepSpeed{near}", fix, is_unknown=True)


def _refused(key: str, value: object, fix: str) -> Fault:
    value_words = "" if isinstance(value, dict) else f"={shown(value)}"
    return Fault(key, f"{key}{value_words} is not supported.", fix)


def _is_on(key: str, value: object, neutral: tuple[object, ...]) -> bool:
    """Whether a key switches something on in DeepSpeed."""
    if value in neutral or value is None:
        return False
    if key in _NEUTRAL:
        return True
    if not isinstance(value, dict):
        return value not in (False, 0, "", "false", "False")
    if key == "tensor_parallel":
        return any(size not in (None, 0, 1) for size in _values_of(value, _SIZES))
    if key == "sparse_attention":
        return bool(value)
    switches = list(_values_of(value, ("enabled",)))
    return any(map(is_true, switches)) if switches else key in ("zenflow", "weight_quantization")


def _values_of(section: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[object]:
    for key, value in section.items():
        if key in names:
            yield value
        elif isinstance(value, dict):
            yield from _values_of(value, names)


def is_true(value: object) -> bool:
    """Whether DeepSpeed treats a value as true; the value may also be a word such as "yes"."""
    return value is True or value == 1 or str(value).lower() in ("true", "yes", "on", "1")


def unused_sections(config: Mapping[str, Any]) -> list[str]:
    """Return the ignored keys that are switched on, each with bigtrain's feature for it, if any.

    Args:
        config: the configuration that `modern` returns.
    """
    zero = config.get("zero_optimization", {})
    named = [(key, value, NOT_USED.get(key)) for key, value in config.items()]
    named += [(f"zero_optimization.{k}", v, ZERO_NOT_USED.get(k)) for k, v in zero.items()]
    if zero.get("stage") in (1, 2):
        away = zero.get("offload_param", {}).get("device", "none") != "none"
        named.append(("zero_optimization.offload_param", away, "stage 3 has it"))
    return [
        f"{key} ({instead})" if instead else key
        for key, value, instead in named
        if instead is not None and _does_something(value)
    ]


def _does_something(value: object) -> bool:
    if not isinstance(value, dict):
        return value not in (False, None, "auto")
    return bool(value) and is_true(value.get("enabled", True))


def engine_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that is passed to DeepSpeed's engine."""
    engine_config = {k: v for k, v in config.items() if k in PASSED or k in ("bf16", "fp16")}
    zero = config.get("zero_optimization", {})
    engine_config["zero_optimization"] = {k: v for k, v in zero.items() if k in ZERO_PASSED}
    return engine_config


def shown(value: object) -> object:
    """Return a value for a message: booleans as in JSON, long values cut to 60 characters."""
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return value if len(text) <= 60 else f"{text[:57]}..."
