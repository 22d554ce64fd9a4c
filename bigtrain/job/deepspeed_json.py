"""A DeepSpeed configuration file as a user wrote it, held against the keys of the job."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from bigtrain.errors import ConfigError, UnreadableError
from bigtrain.files.parse import read_json_object
from bigtrain.files.regular import check_name

AUTO_VALUE = "auto"
_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd"}
_SCHEDULES = {
    "warmuplr": "constant",
    "warmupdecaylr": "linear",
    "warmupcosinelr": "cosine",
}
_NEUTRAL = {
    "adam_w_mode": True,
    "bias_correction": True,
    "amsgrad": False,
    "nesterov": False,
    "maximize": False,
    "dampening": 0,
    "warmup_min_lr": 0,
    "warmup_min_ratio": 0,
    "warmup_type": "linear",
}
"""What a file may say beside the job's keys: this is what is done here anyhow."""
_KERNELS = ("torch_adam", "foreach", "fused", "fp32_optimizer_states", "total_num_steps")
"""What changes no number, or what the job says by `train.steps`."""


def read_deepspeed_json(path: str) -> dict[str, Any]:
    """Read the JSON of a DeepSpeed configuration.

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


def json_section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A part of the configuration, empty where it is left out."""
    part = values.get(name)
    return part if isinstance(part, dict) else {}


def check_optimizer_section(path: str, optim: Mapping[str, Any]) -> None:
    """Refuse an `optimizer` or `scheduler` section that says other than the job does.

    Args:
        path: of the file.
        optim: the job's `optim` section by its keys.

    Raises:
        ConfigError: with both keys, both values and the fix.
    """
    config = read_deepspeed_json(path)
    optimizer_section = json_section(config, "optimizer")
    optimizer_type = optimizer_section.get("type", AUTO_VALUE)
    name = _OPTIMIZERS.get(str(optimizer_type).lower())
    if optimizer_type != AUTO_VALUE and name != optim["name"]:
        fix = f"optim.name={name}" if name else f"optim.name=adamw with type AdamW in {path}"
        raise _refusal(path, "optimizer.type", optimizer_type, "name", optim["name"], fix)
    params = json_section(optimizer_section, "params")
    if (
        optimizer_type != AUTO_VALUE
        and str(optimizer_type).lower() == "adam"
        and params.get("adam_w_mode") is False
    ):
        raise _refusal(path, "optimizer.params.adam_w_mode", False, "name", optim["name"], "AdamW")
    expected = {k: optim[k] for k in ("lr", "weight_decay", "betas", "momentum")} | {"eps": 1e-8}
    for key, ours in expected.items():
        value = params.get(key, AUTO_VALUE)
        if value != AUTO_VALUE and not same_value(value, ours):
            shown = list(ours) if isinstance(ours, tuple) else ours
            fix = f"optim.{key}={value}" if key != "eps" else f"eps {ours}"
            raise _refusal(path, f"optimizer.params.{key}", value, key, shown, fix)
    _refuse_others(path, "optimizer", params, expected)
    _compare_schedule(path, json_section(config, "scheduler"), optim)


def _refuse_others(
    path: str, part: str, params: Mapping[str, Any], compared: Collection[str]
) -> None:
    """Refuse what the job has no key for and what would be left out silently."""
    for key, value in params.items():
        if key in compared or key in _KERNELS or value == AUTO_VALUE:
            continue
        neutral = _NEUTRAL.get(key)
        if neutral is None or not (value == neutral or same_value(value, neutral)):
            shown = str(value).lower() if isinstance(value, bool) else value
            allowed = "none" if neutral is None else f"{str(neutral).lower()} only"
            raise ConfigError(
                f"{path}: {part}.params.{key}={shown}, and a job has {allowed}. "
                f"Leave it out of the file."
            )


def _compare_schedule(path: str, scheduler: dict[str, Any], optim: Mapping[str, Any]) -> None:
    scheduler_type = scheduler.get("type", AUTO_VALUE)
    if scheduler_type != AUTO_VALUE:
        schedule = _SCHEDULES.get(str(scheduler_type).lower())
        if schedule != optim["schedule"]:
            fix = f"optim.schedule={schedule}" if schedule else "optim.schedule, and no scheduler"
            raise _refusal(
                path, "scheduler.type", scheduler_type, "schedule", optim["schedule"], fix
            )
    params = json_section(scheduler, "params")
    pairs = (
        ("warmup_num_steps", "warmup_steps"),
        ("warmup_max_lr", "lr"),
        ("cos_min_ratio", "final_lr_share"),
    )
    for key, ours in pairs:
        value = params.get(key, AUTO_VALUE)
        if value != AUTO_VALUE and not same_value(value, optim[ours]):
            fix = f"optim.{ours}={value}"
            raise _refusal(path, f"scheduler.params.{key}", value, ours, optim[ours], fix)
    _refuse_others(path, "scheduler", params, [key for key, _ in pairs])


def same_value(value: Any, ours: Any) -> bool:
    """Whether a value of the file is one of the job's: as numbers, however they are written."""
    if isinstance(ours, tuple):
        return (
            isinstance(value, list)
            and len(value) == len(ours)
            and all(map(same_value, value, ours))
        )
    try:
        return float(value) == float(ours)
    except (TypeError, ValueError):
        return False


def _refusal(path: str, key: str, value: Any, ours: str, ours_value: Any, fix: str) -> ConfigError:
    shown = str(value).lower() if isinstance(value, bool) else value
    return ConfigError(
        f"{path}: {key}={shown}, but optim.{ours}={ours_value}. Use {fix}, or write "
        '"auto" in the file.'
    )
