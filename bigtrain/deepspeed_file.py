"""A DeepSpeed configuration file as a user wrote it, held against the keys of the job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bigtrain.errors import ConfigError

AUTO = "auto"
_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd"}
_SCHEDULES = {
    "warmuplr": "constant",
    "warmupdecaylr": "linear",
    "warmupcosinelr": "cosine",
}


def read_file(path: str) -> dict[str, Any]:
    """Read the JSON of a DeepSpeed configuration.

    Raises:
        ConfigError: there is no such file, it cannot be read, or it is not a JSON object.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"strategy.deepspeed: there is no file {path}. Give the path of a DeepSpeed "
            "configuration (JSON)."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"strategy.deepspeed: {path} cannot be read ({error}).") from None
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"strategy.deepspeed: {path}:{error.lineno}: not JSON ({error.msg})."
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(
            f"strategy.deepspeed: {path} holds {type(found).__name__}, and a JSON object is needed."
        )
    return found


def section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A part of the configuration, empty where it is left out."""
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def compare_optimizer(path: str, optim: Mapping[str, Any]) -> None:
    """Refuse an `optimizer` or `scheduler` section that says other than the job does.

    Args:
        path: of the file.
        optim: the job's `optim` section by its keys.

    Raises:
        ConfigError: with both keys, both values and the fix.
    """
    given = read_file(path)
    wanted = section(given, "optimizer")
    kind = wanted.get("type", AUTO)
    name = _OPTIMIZERS.get(str(kind).lower())
    if kind != AUTO and name != optim["name"]:
        fix = f"optim.name={name}" if name else f"optim.name=adamw with type AdamW in {path}"
        raise _refusal(path, "optimizer.type", kind, "name", optim["name"], fix)
    params = section(wanted, "params")
    if kind != AUTO and str(kind).lower() == "adam" and params.get("adam_w_mode") is False:
        raise _refusal(path, "optimizer.params.adam_w_mode", False, "name", optim["name"], "AdamW")
    expected = {k: optim[k] for k in ("lr", "weight_decay", "betas", "momentum")} | {"eps": 1e-8}
    for key, ours in expected.items():
        value = params.get(key, AUTO)
        if value != AUTO and not _same(value, ours):
            shown = list(ours) if isinstance(ours, tuple) else ours
            fix = f"optim.{key}={value}" if key != "eps" else f"eps {ours}"
            raise _refusal(path, f"optimizer.params.{key}", value, key, shown, fix)
    _compare_schedule(path, section(given, "scheduler"), optim)


def _compare_schedule(path: str, wanted: dict[str, Any], optim: Mapping[str, Any]) -> None:
    kind = wanted.get("type", AUTO)
    if kind != AUTO:
        schedule = _SCHEDULES.get(str(kind).lower())
        if schedule != optim["schedule"]:
            fix = f"optim.schedule={schedule}" if schedule else "optim.schedule, and no scheduler"
            raise _refusal(path, "scheduler.type", kind, "schedule", optim["schedule"], fix)
    params = section(wanted, "params")
    pairs = (("warmup_num_steps", "warmup_steps"), ("warmup_max_lr", "lr"))
    for key, ours in pairs:
        value = params.get(key, AUTO)
        if value != AUTO and not _same(value, optim[ours]):
            fix = f"optim.{ours}={value}"
            raise _refusal(path, f"scheduler.params.{key}", value, ours, optim[ours], fix)


def _same(value: Any, ours: Any) -> bool:
    if isinstance(ours, tuple):
        return isinstance(value, list) and len(value) == len(ours) and all(map(_same, value, ours))
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
