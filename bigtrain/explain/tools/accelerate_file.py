"""Read the YAML that `accelerate config` writes, on its own or named by another file."""

from __future__ import annotations

from typing import Any

from bigtrain.errors import ConfigError, did_you_mean
from bigtrain.explain.config_file import ConfigFile, find_referenced, read_config_file
from bigtrain.explain.request import Asked, FileSection, ToolRequest
from bigtrain.explain.tools.deepspeed_file import WHOLE_LOGITS, read_deepspeed
from bigtrain.explain.tools.key_rules import KeyRule, KeyTable, apply_rules, sort_remaining
from bigtrain.explain.tools.trainer_keys import read_fsdp

ACCELERATE_MARKS = ("distributed_type", "compute_environment")
"""Keys that identify a file of Accelerate."""
DISTRIBUTED_TYPES = (
    "NO",
    "MULTI_GPU",
    "MULTI_CPU",
    "MULTI_XPU",
    "FSDP",
    "DEEPSPEED",
    "MEGATRON_LM",
)
ELSEWHERE = ("XLA", "TPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_SDAA", "MULTI_HPU")
"""Values of `distributed_type` for devices that bigtrain does not support."""


def _lacks(kind: str) -> Any:
    return lambda section: section.get("distributed_type") != kind


_RULES = (
    KeyRule(
        "no effect",
        ("fsdp_config",),
        _lacks("FSDP"),
        "it is for distributed_type: FSDP",
        "Write distributed_type: FSDP, or leave it out.",
    ),
    KeyRule(
        "no effect",
        ("deepspeed_config",),
        _lacks("DEEPSPEED"),
        "it is for distributed_type: DEEPSPEED",
        "Write distributed_type: DEEPSPEED, or leave it out.",
    ),
    KeyRule(
        "no effect",
        ("megatron_lm_config",),
        _lacks("MEGATRON_LM"),
        "it is for distributed_type: MEGATRON_LM",
        "Leave it out.",
    ),
    KeyRule(
        "contradiction",
        ("fsdp_config", "deepspeed_config"),
        lambda section: bool(section.get("fsdp_config")) and bool(section.get("deepspeed_config")),
        "FSDP and DeepSpeed shard the same states, and only one of them runs",
        "Keep the one that distributed_type names.",
    ),
    KeyRule(
        "contradiction",
        ("use_cpu", "distributed_type"),
        lambda section: (
            section.is_on("use_cpu")
            and section.get("distributed_type") in ("MULTI_GPU", "DEEPSPEED")
        ),
        "use_cpu trains on CPUs, and the distributed type is for GPUs",
        "Write use_cpu: false, or distributed_type: MULTI_CPU.",
    ),
)
ACCELERATE_KEYS = KeyTable(
    tool="Accelerate",
    numbers={},
    read=frozenset(
        (
            *("distributed_type", "num_processes", "num_machines", "mixed_precision", "use_cpu"),
            *("fsdp_config", "deepspeed_config", "megatron_lm_config", "parallelism_config"),
            *("gradient_accumulation_steps", "gradient_clipping"),
        )
    ),
    outside=(
        *("compute_environment", "debug", "machine_rank", "main_process_*", "rdzv_*", "gpu_ids"),
        *("same_network", "main_training_function", "enable_cpu_affinity", "tpu_*", "commands"),
        *("command_file", "mpirun_config", "downcast_bf16", "num_cpu_threads_per_process"),
        "ipex_config",
    ),
    not_forecast={
        "fp8_config": ("fp8 has no counterpart; it is forecast as bf16", "Use bf16."),
        "dynamo_*": (
            "programs of torch.compile keep other activations",
            "Use train.compile=blocks, and measure with bigtrain compare.",
        ),
    },
    rules=_RULES,
)
_DEEPSPEED_OUTSIDE = (
    *("deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_exclusion_filter"),
    *("deepspeed_inclusion_filter", "zero3_init_flag", "zero3_save_16bit_model"),
)
_DEEPSPEED_READ = (
    *("zero_stage", "offload_optimizer_device", "offload_param_device", "gradient_clipping"),
    *("gradient_accumulation_steps", "deepspeed_config_file", "offload_optimizer_nvme_path"),
    "offload_param_nvme_path",
)
_IGNORED_WITH_FILE = (
    *("zero_stage", "offload_optimizer_device", "offload_param_device", "gradient_clipping"),
    *("gradient_accumulation_steps", "offload_optimizer_nvme_path", "offload_param_nvme_path"),
    "zero3_save_16bit_model",
)
"""Keys of the section that Accelerate refuses in addition to `deepspeed_config_file`."""
PRECISIONS = {"bf16": "bf16", "fp16": "bf16", "fp8": "bf16", "no": "fp32"}


def read_accelerate_file(file: ConfigFile) -> ToolRequest:
    """Read a file for a training loop that calls `accelerator.prepare`.

    Raises:
        ConfigError: a value is impossible, or a file that the file names is missing.
    """
    request = ToolRequest("Accelerate", file)
    read_accelerate(request, file)
    request.keys.setdefault("model.chunked_loss", Asked(False, why=WHOLE_LOGITS))
    return request


def read_accelerate(request: ToolRequest, file: ConfigFile, trained_by: str = "Accelerate") -> None:
    """Add the settings of a file of Accelerate: ranks, strategy, precision, batch and clipping.

    Args:
        request: the settings so far, such as the settings of a trainer that names this file.
        file: the file of Accelerate.
        trained_by: the name of the trainer.

    Raises:
        ConfigError: a value is impossible, or a file that the file names is missing.
    """
    section = FileSection(file, file.values)
    kind = _kind(section)
    request.on_cpu = section.is_on("use_cpu") or kind == "MULTI_CPU"
    ranks = section.count("num_processes")
    if ranks is None and kind == "NO":
        ranks = Asked(1, why="distributed_type is NO")
    request.ranks = ranks or request.ranks
    _read_precision(request, section)
    for key, ours in (
        ("gradient_accumulation_steps", "train.accumulation_steps"),
        ("gradient_clipping", "optim.clip_norm"),
    ):
        asked = section.number(key) if key.endswith("clipping") else section.count(key)
        if asked is not None:
            request.keys.setdefault(ours, asked)
    if kind == "FSDP":
        options = section.inner("fsdp_config") or FileSection(file, {}, "fsdp_config.")
        read_fsdp(request, options, 1, tuple(section.written("distributed_type")))
    elif kind == "DEEPSPEED":
        _read_deepspeed(request, section, trained_by)
    elif kind == "MEGATRON_LM":
        _read_megatron(request, section)
    else:
        word = "single" if kind == "NO" else "ddp"
        request.strategy = Asked(word, tuple(section.written("distributed_type")))
    _read_mesh(request, section)
    apply_rules(request, section, ACCELERATE_KEYS.rules)
    sort_remaining(request, section, ACCELERATE_KEYS)


def _kind(section: FileSection) -> str:
    kind = str(section.get("distributed_type") or "NO").upper()
    place = section.place("distributed_type")
    if kind in ELSEWHERE:
        raise ConfigError(
            f"{place}: distributed_type={kind} is for devices that bigtrain does not have. Write "
            "MULTI_GPU, FSDP or DEEPSPEED to compare it with GPUs."
        )
    if kind not in DISTRIBUTED_TYPES:
        raise ConfigError(
            f"{place}: distributed_type={kind}{did_you_mean(kind, DISTRIBUTED_TYPES)} Write one of "
            f"{', '.join(DISTRIBUTED_TYPES)}."
        )
    return kind


def _read_precision(request: ToolRequest, section: FileSection) -> None:
    said = section.get("mixed_precision")
    name = "no" if said is False else str(said or "no").lower()
    if name not in PRECISIONS:
        raise ConfigError(
            f"{section.place('mixed_precision')}: mixed_precision={name} is none of Accelerate's. "
            f"Write one of {', '.join(PRECISIONS)}."
        )
    if said is None and "train.precision" in request.keys:
        return
    written = tuple(section.written("mixed_precision"))
    known = request.keys.get("train.precision")
    if known is not None and known.written and known.value != PRECISIONS[name] and written:
        request.find(
            "no effect",
            written,
            f"the trainer's own precision, {known.value}, goes before it",
            f"Write mixed_precision: {'bf16' if known.value == 'bf16' else 'no'}.",
        )
        return
    request.keys["train.precision"] = Asked(
        PRECISIONS[name], written, "" if written else "mixed_precision is not set"
    )
    if name in ("fp16", "fp8"):
        request.find(
            "not forecast",
            written,
            f"{name} has no counterpart; it is forecast as bf16",
            "Write mixed_precision: bf16.",
        )


def _read_deepspeed(request: ToolRequest, section: FileSection, trained_by: str) -> None:
    part = section.inner("deepspeed_config")
    if part is None:
        raise ConfigError(
            f"{section.place('distributed_type')}: distributed_type=DEEPSPEED, and there is no "
            "section deepspeed_config. Write one with zero_stage, or deepspeed_config_file."
        )
    path = part.get("deepspeed_config_file")
    if path is not None:
        request.find(
            "contradiction",
            [*part.written(*_IGNORED_WITH_FILE), *section.written("mixed_precision")],
            "Accelerate refuses it beside deepspeed_config_file",
            "Write it in the DeepSpeed file, and leave it out here.",
        )
        found = find_referenced(str(path), section.file, "deepspeed_config.deepspeed_config_file")
        if not section.written("mixed_precision"):
            request.keys.pop("train.precision", None)
        file = read_config_file(found, f"{section.file.path}: deepspeed_config_file")
        read_deepspeed(request, FileSection(file, file.values), trained_by)
        request.keys.setdefault("train.precision", Asked("fp32", why="no precision is enabled"))
    else:
        _read_plugin(request, part, trained_by)
    stage = {"zero3": 3}.get(str(request.strategy.value), 0)
    if stage != 3:
        request.find(
            "no effect",
            [
                each
                for each in part.written("zero3_init_flag", "zero3_save_16bit_model")
                if each.value
            ],
            "it is for stage 3",
            "Leave it out.",
        )
    for key in part.values:
        if part.get(key) is None or key in _DEEPSPEED_READ:
            continue
        if key in _DEEPSPEED_OUTSIDE:
            request.outside.append(f"deepspeed_config.{key}")
        else:
            request.find(
                "not forecast",
                part.written(key),
                "it has no counterpart"
                if key == "deepspeed_moe_layer_cls_names"
                else "it is not a key of Accelerate's DeepSpeed section that is known here",
                "Check its name.",
            )


def _read_plugin(request: ToolRequest, part: FileSection, trained_by: str) -> None:
    """Add the settings of a section that has DeepSpeed's values itself and names no file."""
    zero: dict[str, Any] = {
        "stage": 2 if part.get("zero_stage") is None else part.get("zero_stage")
    }
    lines = {}
    names = {"zero_optimization.stage": "zero_stage"}
    for which in ("optimizer", "param"):
        device = part.get(f"offload_{which}_device")
        if device is not None:
            zero[f"offload_{which}"] = {"device": device}
            names[f"zero_optimization.offload_{which}.device"] = f"offload_{which}_device"
    values: dict[str, Any] = {"zero_optimization": zero}
    for key in ("gradient_accumulation_steps", "gradient_clipping"):
        if part.get(key) is not None:
            values[key] = part.get(key)
            names[key] = key
    for name, key in names.items():
        line = part.file.line_of(f"deepspeed_config.{key}")
        if line is not None:
            lines[name] = line
    read_deepspeed(
        request, FileSection(ConfigFile(part.file.path, values, lines), values), trained_by
    )


def _read_megatron(request: ToolRequest, section: FileSection) -> None:
    """Add Megatron-LM's degrees as pipeline and tensor parallelism."""
    part = section.inner("megatron_lm_config")
    words, keys = [], {"tensor": "megatron_lm_tp_degree", "1f1b": "megatron_lm_pp_degree"}
    for word, key in keys.items():
        asked = None if part is None else part.count(key)
        if part is not None and asked is not None and asked.value > 1:
            words.append(word)
            request.keys["mesh.tp" if word == "tensor" else "mesh.pp"] = asked
    written = tuple(section.written("distributed_type"))
    if part is not None and part.is_on("megatron_lm_use_distributed_optimizer"):
        words.append("zero1_torch")
    request.strategy = Asked("+".join(sorted(words)) or "ddp", written)
    if part is not None and part.is_on("megatron_lm_recompute_activations"):
        request.added["selective"] = part.asked("megatron_lm_recompute_activations")
    request.find(
        "not forecast",
        section.written("distributed_type"),
        "Megatron-LM's own kernels and layers; it is forecast with the model's",
        "Compare with bigtrain plan.",
    )


def _read_mesh(request: ToolRequest, section: FileSection) -> None:
    """Add the mesh sizes of `parallelism_config`."""
    part = section.inner("parallelism_config")
    if part is None:
        return

    def size(name: str) -> Asked | None:
        asked = part.count(f"parallelism_config_{name}_size")
        return asked if asked is not None and asked.value > 1 else None

    for name in ("cp", "sp"):
        cut = size(name)
        if cut is not None:
            request.find(
                "not forecast",
                cut.written,
                "a sequence that is spread over ranks has no counterpart; activations are forecast "
                "for whole sequences",
                "Use --strategy fsdp+tensor_sequence mesh.tp=N, or shorter samples.",
            )
    sliced, copies, shards = size("tp"), size("dp_replicate"), size("dp_shard")
    if sliced is not None:
        request.added["tensor"] = Asked("tensor", sliced.written)
        request.keys["mesh.tp"] = sliced
    if copies is not None and shards is not None:
        request.strategy = Asked(f"hybrid_{shards.value}", (*copies.written, *shards.written))
    elif copies is not None:
        request.strategy = Asked("ddp", copies.written)
