"""Models by name, described on the meta device and initialised later; and their blocks.

The package makes built-in models, models of torchvision and timm, and models by import path. It
computes initial weights from the seed and the name of a tensor (deferred initialisation), and
decides which modules are blocks and which parameters may be bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from bigtrain.errors import ConfigError, did_you_mean
from bigtrain.hub.folder import TIMM
from bigtrain.hub.timm_models import check_timm, make_timm
from bigtrain.job.import_path import load_object
from bigtrain.models import from_path, torchvision_models
from bigtrain.models.gpt import GPT, GPT2_VOCABULARY, PRESETS, GPTConfig
from bigtrain.models.lenet import LeNet

__all__ = [
    "GPT",
    "GPTConfig",
    "LeNet",
    "check_model",
    "list_models",
    "make_model",
    "model_defaults",
    "sequence_length",
    "task_of",
]

_OWN = (*PRESETS, "lenet")


def list_models() -> list[str]:
    """Return every built-in name, bigtrain's first, then torchvision's.

    Raises:
        ConfigError: torchvision cannot be imported.
    """
    return [*_OWN, *torchvision_models.torchvision_names()]


def make_model(name: str, args: Mapping[str, Any]) -> nn.Module:
    """Construct a model with initial weights, on torch's default device.

    Args:
        name: a built-in name, `timm:NAME`, or `package.module:Class`.
        args: arguments of the model's constructor; for a preset of GPT, fields of `GPTConfig`.

    Raises:
        ConfigError: the name or an argument is unknown, or the model cannot be made.
    """
    if name in PRESETS:
        return GPT(GPTConfig.from_preset(name, args))
    if name == "lenet":
        from_path.check_arguments(name, LeNet, args)
        return LeNet(**args)
    if name.startswith(TIMM):
        return make_timm(name.removeprefix(TIMM), args)
    if ":" in name:
        return from_path.make_from_path(name, args)
    _check_built_in(name)
    return torchvision_models.make_torchvision(name, args)


def check_model(name: str, args: Mapping[str, Any]) -> None:
    """Refuse a model that cannot be made, without allocating it and without calling user code.

    Args:
        name: see `make_model`.
        args: see `make_model`.

    Raises:
        ConfigError: the model cannot be made; the message has the key, `model.name` or
            `model.args.X`, and the fix.
    """
    if name in PRESETS:
        GPTConfig.from_preset(name, args)
    elif name == "lenet":
        with torch.device("meta"):
            make_model(name, args)
    elif name.startswith(TIMM):
        check_timm(name.removeprefix(TIMM), args)
    elif ":" in name:
        from_path.check_arguments(name, load_object(name, "model.name"), args)
    else:
        _check_built_in(name)
        torchvision_models.check_torchvision(name, args)


def model_defaults(
    name: str, *, num_classes: int | None, sequence_length: int | None
) -> dict[str, Any]:
    """Return arguments of a model that follow from the data; the user's arguments take precedence.

    Args:
        name: see `make_model`; the result is empty for a model by import path.
        num_classes: the number of classes of the targets, or the size of the vocabulary for a
            language model; None if it is unknown.
        sequence_length: tokens of a sample; None if samples are not tokens.
    """
    if ":" in name and not name.startswith(TIMM):
        return {}
    if name in PRESETS:
        # A preset with the vocabulary of GPT-2 keeps it even if the data need fewer tokens: users
        # expect the number of parameters and the memory of the logits that belong to its name.
        preset_vocabulary = PRESETS[name]["vocab_size"]
        keeps_preset = (
            preset_vocabulary == GPT2_VOCABULARY and (num_classes or 0) <= preset_vocabulary
        )
        arguments = {
            "vocab_size": None if keeps_preset else num_classes,
            "sequence_length": sequence_length,
        }
    else:
        arguments = {"num_classes": num_classes}
    return {key: value for key, value in arguments.items() if value is not None}


def sequence_length(name: str, args: Mapping[str, Any]) -> int | None:
    """Return the most tokens of a sample of a built-in language model; None for other models.

    Args:
        name: see `make_model`.
        args: see `make_model`.

    Raises:
        ConfigError: an argument is unknown or does not fit.
    """
    return GPTConfig.from_preset(name, args).sequence_length if name in PRESETS else None


def task_of(name: str) -> str | None:
    """Return the task of a model (see `losses.tasks`); None by import path or of the Hub."""
    if name.startswith(TIMM):
        return "classification"
    if ":" in name:
        return None
    if name in PRESETS:
        return "language"
    return "segmentation" if name in torchvision_models.segmentation_names() else "classification"


def _check_built_in(name: str) -> None:
    known = list_models()
    if name not in known:
        raise ConfigError(
            f"model.name: unknown model {name!r}{did_you_mean(name, known) or '.'} "
            f"Use {', '.join(_OWN)}, a model of torchvision such as resnet18, one of the Hub as "
            "hf:FOLDER_OR_ID, one of timm as timm:NAME, or your own as package.module:Class."
        )
