"""Models of timm by name. Nothing is downloaded: weights come from a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from bigtrain.errors import ConfigError, did_you_mean
from bigtrain.hub.folder import TIMM
from bigtrain.hub.libraries import import_library

_DOWNLOADS = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path")


def check_timm(name: str, args: Mapping[str, Any]) -> None:
    """Refuse a name that timm does not have, or an argument that asks for weights.

    Raises:
        ConfigError: timm is not installed, or the name or an argument is refused.
    """
    timm = import_library("timm", f"model.name={TIMM}{name}")
    if not timm.is_model(name):
        raise ConfigError(
            f"model.name={TIMM}{name}: timm {timm.__version__} has no model {name!r}"
            f"{did_you_mean(name, timm.list_models())} List them: "
            "python -c \"import timm; print(*timm.list_models(), sep='\\n')\""
        )
    for key in _DOWNLOADS:
        if args.get(key):
            raise ConfigError(
                f"model.args.{key}={args[key]!r}: weights are given by model.pretrained=FILE, and "
                f"nothing is downloaded. Leave model.args.{key} out."
            )


def image_shape(name: str) -> tuple[int, ...]:
    """Return the shape of one input of a model: (channels, height, width).

    Raises:
        ConfigError: timm is not installed, or has no such model.
    """
    check_timm(name, {})
    timm = import_library("timm", f"model.name={TIMM}{name}")
    config = timm.models.get_pretrained_cfg(name)
    return (3, 224, 224) if config is None else tuple(config.input_size)


def make_timm(name: str, args: Mapping[str, Any]) -> nn.Module:
    """Construct a model of timm with initial weights, on torch's default device.

    Raises:
        ConfigError: see `check_timm`; or the model does not accept these arguments.
    """
    check_timm(name, args)
    timm = import_library("timm", f"model.name={TIMM}{name}")
    try:
        model: nn.Module = timm.create_model(name, pretrained=False, **args)
    except (TypeError, ValueError, AssertionError) as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in args.items())
        raise ConfigError(
            f"model.args: timm's {name}({shown}) raised {type(error).__name__}: "
            f"{(str(error).splitlines() or [''])[0]}. Correct or leave out what it names."
        ) from error
    return model
