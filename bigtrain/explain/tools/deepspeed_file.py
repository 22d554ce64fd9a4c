"""Read DeepSpeed's JSON, whether it stands alone or is a file or section of another tool.

`bigtrain.job.deepspeed_sections` decides which keys a job supports. This module decides which of
the supported keys do nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bigtrain.errors import ConfigError
from bigtrain.explain.config_file import ConfigFile
from bigtrain.explain.request import Asked, FileSection, ToolRequest, WrittenKey, said_true
from bigtrain.explain.tools.key_rules import fix_of_name
from bigtrain.job.deepspeed_json import Said, said_of_job
from bigtrain.job.deepspeed_sections import (
    COMPARED,
    NOT_USED,
    PASSED,
    REFUSED,
    ZERO_NOT_USED,
    ZERO_PASSED,
    engine_part,
    is_true,
    modern,
    section_faults,
)

AUTO = "auto"
DEEPSPEED_MARKS = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
"""Keys that identify a file of DeepSpeed."""
DEEPSPEED_KEYS = {*COMPARED, *PASSED, *NOT_USED, *REFUSED}
STRATEGIES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
"""bigtrain's preset for each ZeRO stage."""
STAGES_OF = {
    "allgather_bucket_size": (1, 2),
    "allgather_partitions": (1, 2),
    "ignore_unused_parameters": (1, 2),
    "parameter_alignment": (1, 2),
    "round_robin_gradients": (1, 2),
    "use_multi_rank_bucket_allreduce": (1, 2),
    "leaf_module": (3,),
    "log_trace_cache_warnings": (3,),
    "memory_efficient_linear": (3,),
    "offload_param": (3,),
    "sub_group_size": (3,),
}
"""By key of `zero_optimization`, the stages that read it. Only stage 3 reads stage3_ keys."""
BATCH = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.accumulation_steps",
}
WHOLE_LOGITS = "as transformers computes it; a loss of your own may have chunks"
"""Why the loss is computed from whole logits if a file does not set it."""
_OLD_NAMES = {
    "bf16": ("bfloat16",),
    "offload_optimizer": ("cpu_offload", "cpu_offload_use_pin_memory"),
    "offload_param": ("cpu_offload_param", "cpu_offload_params"),
}
"""By key, its older names, which a file may contain."""
_FP16_PARTS = (
    *("auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window"),
    *("hysteresis", "min_loss_scale", "consecutive_hysteresis"),
)


def read_deepspeed_file(file: ConfigFile) -> ToolRequest:
    """Read a DeepSpeed JSON that a custom training loop passes to `deepspeed.initialize`.

    Raises:
        ConfigError: a section is not an object, the stage is unknown, or a number is wrong.
    """
    request = ToolRequest("DeepSpeed", file)
    section = FileSection(file, file.values)
    read_deepspeed(request, section, trained_by=None)
    request.deepspeed_path = file.path
    request.keys.setdefault("model.chunked_loss", Asked(False, why=WHOLE_LOGITS))
    return request


def read_deepspeed(request: ToolRequest, section: FileSection, trained_by: str | None) -> None:
    """Add the settings of a DeepSpeed configuration.

    Args:
        request: the settings so far; its keys come from the trainer.
        section: the configuration.
        trained_by: the name of the trainer that replaces values "auto"; None without a trainer.

    Raises:
        ConfigError: a section is not an object, the stage is unknown, or a number is wrong.
    """
    written = dict(section.values)
    config = modern(section.file.path, written)
    _report_faults(request, section, config)
    zero: dict[str, Any] = dict(config.get("zero_optimization", {}))
    stage = _stage(request, section, zero)
    keys = tuple(_names(section, "zero_optimization.stage"))
    request.strategy = Asked(
        STRATEGIES[stage], tuple(section.written(*keys)), "" if keys else "stage 0 is the default"
    )
    _read_offload(request, section, zero, stage)
    _read_precision(request, section, config, trained_by)
    _read_batch(request, section, trained_by)
    _report_unused(request, section, zero, stage)
    supported = _supported(config, zero, stage)
    _read_optimizer(request, section, config, trained_by)
    request.deepspeed = supported if stage else None
    used_for_nothing = [key for key in section.values if key in NOT_USED]
    for key in used_for_nothing:
        if key == "activation_checkpointing":
            request.find(
                "no effect",
                section.written(key),
                "DeepSpeed recomputes only where the model's code calls its functions",
                "Leave it out, and switch recomputation on in the model (here: +full)",
            )
        else:
            request.outside.append(key)
    request.outside += [key for key in section.values if key in PASSED]


def _names(section: FileSection, key: str) -> list[str]:
    """Return the names of a key that a file contains: its own, its short or its older names."""
    above, _, own = key.rpartition(".")
    candidates = [own, own.removeprefix("stage3_"), *_OLD_NAMES.get(own, ())]
    names = [f"{above}.{name}" if above else name for name in candidates]
    return [name for name in dict.fromkeys(names) if section.written(name)]


def _written(section: FileSection, key: str) -> list[WrittenKey]:
    return section.written(*_names(section, key)[:1])


def _report_faults(request: ToolRequest, section: FileSection, config: Mapping[str, Any]) -> None:
    """Report the keys that bigtrain does not support. The forecast ignores them."""
    fp16, bf16 = (config.get(name, {}).get("enabled") for name in ("fp16", "bf16"))
    for fault in section_faults(config):
        if fault.key == "fp16.enabled":
            continue
        written = _written(section, fault.key)
        if fault.key.startswith("tensor_parallel") or not written:
            written = written or section.written(fault.key.partition(".")[0])
        if fault.is_unknown:
            own = fault.key.rpartition(".")[2]
            fix = fix_of_name(own, {*DEEPSPEED_KEYS, *ZERO_PASSED, *ZERO_NOT_USED})
            request.find("not forecast", written, "it is not a key of DeepSpeed", fix)
        else:
            request.find("not forecast", written, "it has no counterpart", f"{fault.fix}.")
    if is_true(fp16) and is_true(bf16):
        request.find(
            "contradiction",
            section.written("bf16.enabled", "fp16.enabled"),
            "there is one precision, and DeepSpeed refuses both",
            'Leave "fp16" out; every GPU since A100 computes in bf16.',
        )


def _stage(request: ToolRequest, section: FileSection, zero: Mapping[str, Any]) -> int:
    stage = zero.get("stage", 0)
    if stage == AUTO:
        request.find(
            "no effect",
            section.written("zero_optimization.stage"),
            "DeepSpeed takes its default for it, stage 0",
            "Write 1, 2 or 3.",
        )
        stage = 0
    if isinstance(stage, bool) or stage not in STRATEGIES:
        raise ConfigError(
            f"{section.place('zero_optimization.stage')}: zero_optimization.stage={stage!r} is "
            "not a stage. Write 0, 1, 2 or 3."
        )
    return int(stage)


def _read_offload(
    request: ToolRequest, section: FileSection, zero: dict[str, Any], stage: int
) -> None:
    """Add the presets for states on the host. Disks are forecast as memory of the host."""
    words = {"offload_optimizer": "offload_cpu", "offload_param": "offload_parameters_cpu"}
    for key, word in words.items():
        part = zero.get(key)
        device = "none" if not isinstance(part, dict) else str(part.get("device", "none"))
        name = f"zero_optimization.{key}"
        written = section.written(*[f"{each}.device" for each in _names(section, name)])
        written = written or _written(section, name)
        if device == "none" or stage == 0 or (key == "offload_param" and stage != 3):
            continue
        if device == "nvme":
            request.find(
                "not forecast",
                written,
                "disks have no counterpart for this engine; it is forecast as the host's memory",
                "Use --strategy fsdp+offload_disk for the optimizer's state on a disk.",
            )
            zero[key] = {"device": "cpu"}
        request.added[word] = Asked(word, tuple(written))


def _read_precision(
    request: ToolRequest, section: FileSection, config: Mapping[str, Any], trained_by: str | None
) -> None:
    fp16, bf16 = (config.get(name, {}).get("enabled") for name in ("fp16", "bf16"))
    known = request.keys.get("train.precision")
    if is_true(fp16) and not is_true(bf16):
        request.find(
            "not forecast",
            section.written("fp16.enabled"),
            "fp16 and its loss scaling have no counterpart; it is forecast as bf16, which takes "
            "as much memory",
            'Write "bf16": {"enabled": true} in its place.',
        )
        request.keys["train.precision"] = section.asked("fp16.enabled", "bf16")
    elif is_true(bf16):
        if known is not None and known.value != "bf16" and known.written:
            request.find(
                "contradiction",
                [*section.written("bf16.enabled"), *known.written],
                f"{trained_by} refuses a DeepSpeed file with another precision than its own",
                'Write "auto" in the DeepSpeed file.',
            )
        name = next(iter(_names(section, "bf16")), "bf16")
        request.keys["train.precision"] = section.asked(f"{name}.enabled", "bf16")
    elif trained_by is None:
        request.keys["train.precision"] = Asked("fp32", why="neither bf16 nor fp16 is enabled")
    if not said_true(fp16):
        parts = section.written(*[f"fp16.{part}" for part in _FP16_PARTS])
        request.find("no effect", parts, "fp16 is off", "Leave the section fp16 out.")


def _read_batch(request: ToolRequest, section: FileSection, trained_by: str | None) -> None:
    """Add the batch and the clipping; compare them with the values of the trainer."""
    for key, ours in {**BATCH, "gradient_clipping": "optim.clip_norm"}.items():
        is_clip = ours == "optim.clip_norm"
        asked = section.number(key) if is_clip else section.count(key)
        if asked is None:
            continue
        if is_clip and not asked.value:
            continue
        known = request.keys.get(ours)
        if known is not None and known.value != asked.value:
            request.find(
                "contradiction",
                [*asked.written, *known.written],
                f"{trained_by or 'the trainer'} has another value"
                + ("" if known.written else f", {known.value}: {known.why}"),
                f'Write "{key}": "auto" in the DeepSpeed file.',
            )
            continue
        request.keys[ours] = asked
    if trained_by is not None:
        return
    autos = [key for key in BATCH if section.get(key) == AUTO]
    request.find(
        "no effect",
        section.written(*autos),
        "auto is filled in by the Trainer of transformers, and DeepSpeed alone refuses it",
        "Write numbers if a loop of your own passes the file to deepspeed.initialize.",
    )
    rest = [key for key in section.names() if section.get(key) == AUTO and key not in BATCH]
    rest = [key for key in rest if key != "zero_optimization.stage"]
    request.find(
        "no effect",
        section.written(*rest),
        "auto is filled in by the Trainer of transformers, and DeepSpeed alone takes its default",
        "Write the values, or leave the keys out.",
    )


def _report_unused(
    request: ToolRequest, section: FileSection, zero: Mapping[str, Any], stage: int
) -> None:
    """Report keys of `zero_optimization` that the stage does not read."""
    silent: dict[str, list[WrittenKey]] = {}
    for key in zero:
        if key == "stage" or not (key in ZERO_PASSED or key in ZERO_NOT_USED):
            continue
        stages = (3,) if key.startswith("stage3_") else STAGES_OF.get(key, (1, 2, 3))
        if stage not in stages:
            has = " and ".join(map(str, stages)) if len(stages) < 3 else "1, 2 and 3"
            silent.setdefault(has, []).extend(_written(section, f"zero_optimization.{key}"))
        elif key in ZERO_NOT_USED:
            request.outside.append(f"zero_optimization.{key}")
    for has, written in silent.items():
        several = len(has) > 1
        request.find(
            "no effect",
            written,
            f"it is for stage{'s' if several else ''} {has}, and the stage is {stage}",
            "Leave it out." if len(written) == 1 else "Leave them out.",
        )
    for key in ("offload_optimizer", "offload_param"):
        part = zero.get(key)
        if isinstance(part, dict) and part.get("device", "none") == "none":
            others = [f"zero_optimization.{key}.{name}" for name in part if name != "device"]
            request.find(
                "no effect",
                section.written(*others),
                f"{key}.device is none",
                f"Leave {key} out.",
            )


def _supported(config: Mapping[str, Any], zero: Mapping[str, Any], stage: int) -> dict[str, Any]:
    """Return the part of a configuration that a job can use, without keys that do nothing."""
    faulty = {fault.key for fault in section_faults(config)}
    kept = {
        key: value
        for key, value in zero.items()
        if key in ZERO_PASSED
        and f"zero_optimization.{key}" not in faulty
        and stage in ((3,) if key.startswith("stage3_") else STAGES_OF.get(key, (1, 2, 3)))
    }
    for key in ("offload_optimizer", "offload_param"):
        part = kept.get(key)
        if isinstance(part, dict):
            name = f"zero_optimization.{key}"
            kept[key] = {k: v for k, v in part.items() if f"{name}.{k}" not in faulty}
    made = engine_part({**config, "zero_optimization": {**kept, "stage": stage}})
    return {k: v for k, v in made.items() if k not in ("bf16", "fp16") and k not in faulty}


def _read_optimizer(
    request: ToolRequest, section: FileSection, config: Mapping[str, Any], trained_by: str | None
) -> None:
    """Add the optimizer of the file. Its schedule changes neither the memory nor the seconds."""
    part = {key: value for key, value in config.items() if key == "optimizer"}
    try:
        said = said_of_values(part)
    except ConfigError as error:
        request.find(
            "not forecast",
            section.written("optimizer.type"),
            f"{str(error).partition(': ')[2].rstrip('.')}; it is forecast as adamw",
        )
        said = {}
    for ours, value in said.items():
        if not ours.startswith("optim.") or value.implied:
            continue
        known = request.keys.get(ours)
        written = section.written(value.key)
        if trained_by and known is not None and known.written and known.value != value.value:
            request.find(
                "contradiction",
                [*written, *known.written],
                f"{trained_by} has another value",
                'Write "auto" in the DeepSpeed file.',
            )
            continue
        request.keys[ours] = Asked(value.value, tuple(written))
    if config.get("scheduler"):
        request.outside.append("scheduler")


def said_of_values(values: Mapping[str, Any]) -> dict[str, Said]:
    """Return the values of a configuration by key of a job; see `said_of_job`.

    Raises:
        ConfigError: a job does not support the optimizer, one of its parameters, or another key.
    """
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="bigtrain-") as folder:
        path = write_json(Path(folder) / "engine.json", values)
        return said_of_job(path)


def write_json(path: Path, values: Mapping[str, Any]) -> str:
    """Write a JSON file and return its path."""
    path.write_text(json.dumps(values, indent=1) + "\n", "utf-8")
    return str(path)
