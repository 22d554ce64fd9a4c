"""Read a DeepSpeed configuration file as keys of the job.

Values of the file override the job file, as a strategy does. A command-line override that
contradicts the file is refused. "auto" in the file stands for the job's value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bigtrain.errors import ConfigError, UnreadableError, as_word, unquoted_word
from bigtrain.files.parse import read_json_object
from bigtrain.files.regular import check_name
from bigtrain.job.deepspeed_schedules import (
    HIGHEST,
    Schedule,
    read_schedule,
)
from bigtrain.job.deepspeed_sections import check_sections, is_true, modern, shown

AUTO_VALUE = "auto"
_ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
_SGD = {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
"""The defaults of DeepSpeed's optimizers, for a file that names a type."""
_TORCH_ADAMW_DECAY = 0.01
"""The default weight decay of torch's AdamW, which "torch_adam": true selects."""
_NEUTRAL = {
    "adam_w_mode": True,
    "bias_correction": True,
    "amsgrad": False,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
}
"""Optimizer parameters that no key of a job sets, each with the only value that a file may have."""
_KERNELS = ("torch_adam", "foreach", "fused", "fp32_optimizer_states", "set_grad_none")
"""Optimizer parameters that do not change the numbers."""
_LIKE = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
"""By DeepSpeed's scheduler type in lower case, the `optim.schedule` of the same shape."""
_BATCH = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.accumulation_steps",
}


@dataclass(frozen=True)
class Said:
    """A value that a DeepSpeed file sets for a key of the job."""

    key: str
    """The key in the file, with dots."""
    written: Any
    """The value in the file."""
    value: Any
    """The value for the job."""
    implied: bool = False
    """Whether the value is DeepSpeed's default and not in the file; an override may replace it."""


def read_deepspeed_json(path: str) -> dict[str, Any]:
    """Read a DeepSpeed configuration, with the keys as they are written.

    Raises:
        ConfigError: there is no such file, it cannot be read, or it is not a JSON object.
    """
    check_name(path, "strategy.deepspeed")
    try:
        return read_json_object(path, "Give the path of a DeepSpeed configuration (JSON).")
    except UnreadableError as error:
        if error.missing:
            raise ConfigError(
                f"strategy.deepspeed: there is no file {path}. Give the path of a DeepSpeed "
                "configuration (JSON)."
            ) from None
        raise ConfigError(f"strategy.deepspeed: {error}") from None


def deepspeed_config(path: str) -> dict[str, Any]:
    """Read a DeepSpeed configuration, with its keys renamed to DeepSpeed's current names.

    Raises:
        ConfigError: the file cannot be read, or has a key that is unknown or not supported.
    """
    config = modern(path, read_deepspeed_json(path))
    check_sections(path, config)
    return config


def json_section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a section of the configuration; an empty one if the file leaves it out."""
    part = values.get(name)
    return part if isinstance(part, dict) else {}


def typed_sections(path: str, names: Iterable[str]) -> list[str]:
    """Return those of the named sections for which a file sets a "type" other than "auto"."""
    config = deepspeed_config(path)
    return [n for n in names if json_section(config, n).get("type", AUTO_VALUE) != AUTO_VALUE]


def batch_keys_of(path: str) -> list[str]:
    """Return DeepSpeed's batch keys that a file sets. A job cannot contradict their values."""
    config = deepspeed_config(path)
    return [key for key in _BATCH if config.get(key, AUTO_VALUE) != AUTO_VALUE]


def said_of_job(path: str) -> dict[str, Said]:
    """Return the values that a file sets, by key of the job. Values of "auto" are left out.

    Raises:
        ConfigError: as in `deepspeed_config`, or a job does not support the file's optimizer or
            scheduler.
    """
    config, batch = deepspeed_config(path), batch_keys_of(path)
    values = {
        ours: Said(key, config[key], config[key]) for key, ours in _BATCH.items() if key in batch
    }
    clip = config.get("gradient_clipping", AUTO_VALUE)
    if clip != AUTO_VALUE:
        values["optim.clip_norm"] = Said("gradient_clipping", clip, clip or None)
    enabled = json_section(config, "bf16").get("enabled", AUTO_VALUE)
    if enabled != AUTO_VALUE and is_true(enabled):
        values["train.precision"] = Said("bf16.enabled", enabled, "bf16")
    section = json_section(config, "optimizer")
    values |= _of_optimizer(path, section.get("type") or AUTO_VALUE, section.get("params") or {})
    values |= _of_scheduler(path, json_section(config, "scheduler"))
    return values


def _of_optimizer(path: str, kind: object, params: Mapping[str, Any]) -> dict[str, Said]:
    """Return the values of `optim` for an `optimizer` section; a type adds DeepSpeed's defaults."""
    name = str(kind).lower()
    if name not in ("auto", "adam", "adamw", "sgd"):
        raise ConfigError(
            f"{path}: optimizer.type={kind} is not supported. Write AdamW, Adam or SGD, or leave "
            "the optimizer out, and set optim.name (adamw, adam, sgd, adafactor, adamw_8bit, "
            "adamw_4bit)."
        )
    is_adamw = name == "adamw" or is_true(params.get("adam_w_mode", True))
    defaults: dict[str, Any] = dict(_SGD if name == "sgd" else {} if name == "auto" else _ADAM)
    if is_adamw and defaults and is_true(params.get("torch_adam", False)):
        defaults["weight_decay"] = _TORCH_ADAMW_DECAY
    known = defaults or {**_ADAM, **_SGD}
    settings: dict[str, Said] = {}
    if name != "auto":
        ours = "sgd" if name == "sgd" else "adamw" if is_adamw else "adam"
        settings["optim.name"] = Said("optimizer.type", kind, ours)
    for key, value in {**defaults, **params}.items():
        if key in known and value != AUTO_VALUE:
            setting = Said(f"optimizer.params.{key}", value, value, implied=key not in params)
            settings[f"optim.{key}"] = setting
        elif key not in known:
            _refuse_parameter(path, key, value, is_adam=name.startswith("adam"))
    return settings


def _refuse_parameter(path: str, key: str, value: Any, *, is_adam: bool) -> None:
    """Refuse an optimizer parameter that no key of a job sets, if it could change the numbers.

    Args:
        path: the path of the file, for the message.
        key: the name of the parameter in `params` of the section `optimizer`.
        value: the value of the parameter in the file.
        is_adam: whether the optimizer is Adam or AdamW, whose `adam_w_mode` is read elsewhere.

    Raises:
        ConfigError: the parameter is unknown, or its value is not the only one that a job supports.
    """
    if key in _KERNELS or value == AUTO_VALUE or (key == "adam_w_mode" and is_adam):
        return
    neutral = _NEUTRAL.get(key)
    if neutral is not None and is_true(value) == neutral:
        return
    fix = "Leave it out of the file"
    if key == "max_grad_norm":
        fix = f'Write "gradient_clipping": {shown(value)} outside the optimizer'
    allowed = "none" if neutral is None else f"{str(neutral).lower()} only"
    raise ConfigError(
        f"{path}: optimizer.params.{key}={shown(value)}, and a job supports {allowed}. {fix}."
    )


def _of_scheduler(path: str, section: Mapping[str, Any]) -> dict[str, Said]:
    """Return the values of `optim` for a `scheduler` section; empty if the section has no type."""
    fill = dict.fromkeys(("total_num_steps", "warmup_num_steps", *HIGHEST), 1)
    schedule = read_schedule(path, section, fill, has_betas=False)
    if schedule is None:
        return {}
    kind = section["type"]
    params = section.get("params") or {}

    def setting(ours: str, key: str, value: Any) -> tuple[str, Said]:
        if key in params:
            return f"optim.{ours}", Said(f"scheduler.params.{key}", params[key], value)
        shape = f"{kind} ({key} is {value} by default)" if key else kind
        return f"optim.{ours}", Said("scheduler.type", shape, value)

    values = [setting("schedule", "", "deepspeed"), setting("milestones", "", [])]
    values.append(setting("base_batch_size", "", None))
    if params.get("warmup_num_steps") != AUTO_VALUE:
        key = "warmup_num_steps" if hasattr(schedule, "warmup_num_steps") else ""
        values.append(setting("warmup_steps", key, getattr(schedule, key, 0)))
        values.append(setting("warmup_epochs", "", 0))
    values.append(setting("warmup_factor", "", None))
    if params.get("cos_min_ratio") != AUTO_VALUE:
        key = "cos_min_ratio" if hasattr(schedule, "cos_min_ratio") else ""
        values.append(setting("final_lr_share", key, getattr(schedule, key, 0)))
    highest = schedule.own_highest
    value = getattr(schedule, highest, None)
    if value is not None and params.get(highest) != AUTO_VALUE:
        values.append(setting("lr", highest, value))
    return dict(values)


def check_agreement(path: str, sections: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a job that contradicts its file.

    Args:
        path: the path of the file.
        sections: the values of `optim` and `train` of the job, by section and key.

    Raises:
        ConfigError: two values differ; the message contains both keys, both values and the fix.
    """
    for ours, setting in said_of_job(path).items():
        section, _, key = ours.partition(".")
        value = sections[section][key]
        if setting.implied or (key == "accumulation_steps" and value is None):
            continue  # a missing accumulation is computed from the other keys, and compared then
        if ours == "optim.schedule" and value == _LIKE.get(str(setting.written).lower()):
            continue  # of the same shape; the file's rates are used
        if not same_value(setting.value, value):
            raise refusal(path, setting.key, setting.written, ours, value, setting.value)
    kinds = json_section(deepspeed_config(path), "scheduler")
    optim, train = sections["optim"], sections["train"]
    fill = _fill(optim, optim["warmup_steps"] or 1, train["steps"] or 1)
    read_schedule(path, kinds, fill, has_betas=optim["name"] != "sgd")


def schedule_of(
    path: str, optim: Mapping[str, Any], warmup_steps: int, total_steps: int
) -> Schedule | None:
    """Return the schedule of a file's `scheduler` section in a run; None if the file has none.

    Args:
        path: the path of the file.
        optim: the values of `optim` of the job, by key.
        warmup_steps: the warm-up steps of the job, for "auto".
        total_steps: the number of optimizer steps of the run, for "auto".

    Raises:
        ConfigError: the run has more steps than the schedule.
    """
    section = json_section(deepspeed_config(path), "scheduler")
    fill = _fill(optim, warmup_steps, total_steps)
    schedule = read_schedule(path, section, fill, has_betas=optim["name"] != "sgd")
    total = None if schedule is None else schedule.total()
    if total is not None and total < total_steps:
        raise ConfigError(
            f"{path}: scheduler.params.total_num_steps={total}, but the run has {total_steps} "
            f"steps, more than the schedule has. Use train.steps={total}, or write "
            '"auto" in the file.'
        )
    return schedule


def _fill(optim: Mapping[str, Any], warmup_steps: int, total_steps: int) -> dict[str, Any]:
    """Return, by scheduler parameter, the value of the job that "auto" stands for."""
    return {
        "warmup_num_steps": warmup_steps,
        "total_num_steps": total_steps,
        "cos_min_ratio": optim["final_lr_share"],
        **dict.fromkeys(HIGHEST, optim["lr"]),
    }


def same_value(value: Any, ours: Any) -> bool:
    """Whether a value of the file equals a value of the job; numbers may be written differently."""
    if isinstance(ours, tuple | list):
        return (
            isinstance(value, list)
            and len(value) == len(ours)
            and all(map(same_value, value, ours))
        )
    if value is None or ours is None or (isinstance(value, str) and isinstance(ours, str)):
        return bool(value == ours)
    if isinstance(ours, bool):
        return is_true(value) == ours
    try:
        return float(value) == float(ours)
    except (TypeError, ValueError):
        return False


def refusal(
    path: str, key: str, written: Any, ours: str, ours_value: Any, wanted: Any
) -> ConfigError:
    """Return the error for a job that contradicts its file.

    Args:
        path: the path of the file.
        key: the key of the file, dotted.
        written: the value of `key` in the file.
        ours: the key of the job, dotted.
        ours_value: the value of `ours` in the job.
        wanted: the value of `ours` that would agree with the file.
    """
    fix = f'Use {as_word(ours, wanted)}, or write "auto" in the file'
    if key == "scheduler.type":
        fix = f"Leave {ours} out, or the scheduler out of the file"
    now = unquoted_word(ours, ours_value)
    return ConfigError(f"{path}: {key}={shown(written)}, but {now}. {fix}.")
