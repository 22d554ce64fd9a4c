"""Find the class of transformers for a configuration, and make it with initial weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bigtrain.errors import ConfigError, did_you_mean
from bigtrain.hub.folder import HubFolder
from bigtrain.hub.libraries import import_library

ARCHITECTURE = "architecture"
"""The argument of `model.args` that names another class than the configuration does."""
_PRECISIONS = ("dtype", "torch_dtype")
_FALLBACKS = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageClassification")
"""Kinds of models that are tried, in this order, if a configuration names no class."""


@dataclass(frozen=True)
class Architecture:
    """A class of transformers with a configuration."""

    build: Callable[[Any], nn.Module]
    """Constructs the model from a configuration, with parameters in fp32."""
    name: str
    """The name of the class."""
    config: Any
    """A PretrainedConfig of transformers."""

    @property
    def vocabulary(self) -> int | None:
        """Number of tokens in the model's vocabulary; None if it has no vocabulary."""
        size = getattr(self.config.get_text_config(), "vocab_size", None)
        return size if isinstance(size, int) else None

    def make(self) -> nn.Module:
        """Construct the model with initial weights in fp32, on torch's default device."""
        transformers = import_library("transformers", "model.name")
        # Constructing a model may print its whole generation configuration as a warning.
        level = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()
        try:
            model = self.build(copy.deepcopy(self.config))
            # On the meta device a constructor of transformers skips the initialisation of weights.
            model.initialize_weights()  # type: ignore[operator]
        finally:
            transformers.logging.set_verbosity(level)
        return model


def read_architecture(folder: HubFolder, args: Mapping[str, Any]) -> Architecture:
    """Return the class and the configuration of a folder's model.

    Args:
        folder: the opened folder.
        args: `model.args`: fields that replace those of config.json, and `architecture`, the name
            of another class than the one in config.json.

    Raises:
        ConfigError: transformers has no such class, the folder needs code of its own, or a field
            is unknown.
    """
    transformers = import_library("transformers", folder.key)
    kind = folder.settings.get("model_type")
    known = import_library("transformers.models.auto.configuration_auto", folder.key)
    if kind not in known.CONFIG_MAPPING_NAMES:
        raise ConfigError(_unknown_kind(folder, kind, known.CONFIG_MAPPING_NAMES, transformers))
    fields = {name: value for name, value in args.items() if name != ARCHITECTURE}
    config = _configured(folder, transformers, fields)
    name = args.get(ARCHITECTURE) or _named(folder, transformers)
    if name is None:
        return _by_kind(folder, config, transformers)
    model_class: Any = getattr(transformers, str(name), None)
    base = transformers.PreTrainedModel
    if not (isinstance(model_class, type) and issubclass(model_class, base)):
        classes = [n for n in dir(transformers) if n.endswith(("LM", "Model", "Classification"))]
        key = (
            f"model.args.{ARCHITECTURE}" if ARCHITECTURE in args else f"{folder.key}: architecture"
        )
        raise ConfigError(
            f"{key}: transformers {transformers.__version__} has no model {name!r}"
            f"{did_you_mean(str(name), classes)} Set model.args.{ARCHITECTURE} to a class of "
            "transformers."
        )
    made_from: Any = getattr(model_class, "config_class", None)
    if made_from is None or not isinstance(config, made_from):
        raise ConfigError(
            f"model.args.{ARCHITECTURE}={name} is made from a "
            f"{getattr(made_from, '__name__', 'configuration of its own')}, "
            f"and {folder.path} has a {type(config).__name__}. Set model.args.{ARCHITECTURE} to a "
            f"class for {kind}."
        )
    return Architecture(_from_config(model_class), str(name), config)


def _unknown_kind(
    folder: HubFolder, kind: object, known: Mapping[str, str], transformers: Any
) -> str:
    """The message for a folder whose kind of model transformers does not know."""
    if folder.settings.get("auto_map"):
        return (
            f"{folder.key}: {folder.path} brings its own code (trust_remote_code), which is never "
            "run. Use a folder of a model that transformers has; or import your copy of that code: "
            "model.name=package.module:Class model.pretrained=" + str(folder.path)
        )
    if kind is None:
        return (
            f"{folder.key}: {folder.path}/config.json has no model_type. Save the model again with "
            "save_pretrained; for one of timm use model.name=timm:NAME model.pretrained=FILE."
        )
    return (
        f"{folder.key}: transformers {transformers.__version__} has no model type {kind!r}"
        f"{did_you_mean(str(kind), known)} Run: pip install --upgrade transformers"
    )


def _configured(folder: HubFolder, transformers: Any, fields: Mapping[str, Any]) -> Any:
    """Return the configuration of the folder, with the fields of `model.args`."""
    for name in _PRECISIONS:
        if name in fields:
            raise ConfigError(
                f"model.args.{name}={fields[name]}: the precision of the job decides the dtype of "
                f"the parameters. Leave model.args.{name} out, and set train.precision."
            )
    try:
        config, unused = transformers.AutoConfig.from_pretrained(
            str(folder.path), return_unused_kwargs=True, trust_remote_code=False, **fields
        )
    except Exception as error:
        # Each configuration class checks its fields by its own code, and may raise any error.
        said = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise ConfigError(
            f"{folder.key}: {folder.path}/config.json{' with model.args' if fields else ''} is not "
            f"taken by transformers {transformers.__version__}: {type(error).__name__}: {said}. "
            "Correct it."
        ) from error
    unknown = [name for name in fields if name in unused]
    if unknown:
        raise ConfigError(
            f"model.args.{unknown[0]}: {type(config).__name__} has no {unknown[0]!r}"
            f"{did_you_mean(unknown[0], vars(config))} Use a field of {type(config).__name__}, or "
            f"{ARCHITECTURE}=CLASS."
        )
    return config


def _named(folder: HubFolder, transformers: Any) -> str | None:
    """Return the class that config.json names; None if no class or one of the folder's own code."""
    names = folder.settings.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    # A folder with code of its own for a known type names classes that only that code has.
    if folder.settings.get("auto_map") and not hasattr(transformers, str(name)):
        return None
    return None if name is None else str(name)


def _by_kind(folder: HubFolder, config: Any, transformers: Any) -> Architecture:
    """Return the class of the first kind in `_FALLBACKS` that has one; else that of AutoModel."""
    for auto in (*_FALLBACKS, "AutoModel"):
        mapping = getattr(transformers, auto)._model_mapping
        if type(config) in mapping:
            model_class = mapping[type(config)]
            model_class = model_class[0] if isinstance(model_class, tuple) else model_class
            return Architecture(_from_config(model_class), model_class.__name__, config)
    raise ConfigError(
        f"{folder.key}: {folder.path}/config.json names no class, and transformers has none for a "
        f"{type(config).__name__}. Set model.args.{ARCHITECTURE}=CLASS."
    )


def _from_config(model_class: Any) -> Callable[[Any], nn.Module]:
    def build(config: Any) -> nn.Module:
        model: nn.Module = model_class._from_config(config, dtype=torch.float32)
        return model

    return build
