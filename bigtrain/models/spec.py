"""The model that the `model` section of a job names, and how to describe it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import nn

from bigtrain.errors import ConfigError
from bigtrain.hub.folder import HF
from bigtrain.hub.hub_model import INITIAL, HubModel
from bigtrain.hub.lora import (
    DTYPES,
    QuantizedLayer,
    adapters_of,
    attach,
    name_without_adapter,
    quantized_value,
    word_of,
)
from bigtrain.job.schema import LoraConfig, ModelConfig
from bigtrain.models import check_model, make_model, model_defaults, sequence_length, task_of
from bigtrain.models.blueprint import Blueprint, describe
from bigtrain.models.freeze import freeze
from bigtrain.models.pretrained import use_pretrained
from bigtrain.tensors.shards import StateTensor


@dataclass(frozen=True)
class ModelSpec:
    """A model by its name and arguments, with the facts that follow from the name alone."""

    config: ModelConfig
    task: str | None
    """The task, see `losses.tasks`; None for a model by import path or of the Hub."""
    sequence_length: int | None
    """The most tokens in a sample of a built-in language model; None for other models."""

    @classmethod
    def of(cls, config: ModelConfig) -> ModelSpec:
        """Look up the name of a `model` section, without constructing the model.

        Raises:
            ConfigError: an argument of a built-in language model is unknown or does not fit.
        """
        return cls(config, task_of(config.name), sequence_length(config.name, config.args))

    @property
    def is_language(self) -> bool:
        """Whether the model is one of bigtrain's language models, whose head has a known name."""
        return self.task == "language"

    @property
    def is_custom(self) -> bool:
        """Whether the name is an import path, `package.module:Class`."""
        return ":" in self.config.name

    @cached_property
    def hub(self) -> HubModel | None:
        """The model of the Hub if the name begins with `hf:`, otherwise None. No file is read.

        Raises:
            ConfigError: the name has no folder or id after `hf:`.
        """
        config: ModelConfig = self.config
        if not config.name.startswith(HF):
            return None
        name = config.name.removeprefix(HF)
        if not name:
            raise ConfigError(f"model.name={HF} needs a folder or an id: model.name={HF}FOLDER.")
        return HubModel(name, config.args, config.pretrained, config.pretrained_except)

    @property
    def is_hub_language(self) -> bool:
        """Whether the model is a causal language model of the Hub, whose head a run finds."""
        if self.hub is None:
            return False
        return self.hub.architecture.name.endswith(("ForCausalLM", "LMHeadModel"))

    @property
    def begins_with_values(self) -> bool:
        """Whether the model begins with saved values, by default or by `model.pretrained`."""
        config: ModelConfig = self.config
        if self.hub is not None:
            return self.hub.has_weights
        return config.pretrained not in (None, INITIAL)

    def check(self) -> None:
        """Refuse a model that cannot be made, without allocating it or calling user code.

        Raises:
            ConfigError: the model cannot be made; the message has the key, `model.name` or
                `model.args.X`, and the fix.
        """
        if self.hub is not None:
            _ = self.hub.architecture
            return
        check_model(self.config.name, self.config.args)

    def describe(self, *, num_classes: int | None, sequence_length: int | None) -> Blueprint:
        """Describe the model, with its initial values or the values of `model.pretrained`.

        Args:
            num_classes: the number of classes of the data, or the size of the vocabulary; None if
                it is unknown. `model.args` takes precedence.
            sequence_length: tokens of a sample of the data; None if samples are not tokens.
                `model.args` takes precedence.

        Raises:
            ConfigError: the model cannot be made, or the file of its values is of another model.
        """
        config: ModelConfig = self.config
        if self.hub is not None:
            vocabulary = num_classes if sequence_length is not None else None
            self.hub.check(vocabulary)
            labels = {} if sequence_length is not None else self.hub.classes(num_classes)
            blueprint = _hub_blueprint(self.hub, labels, config.lora)
        else:
            defaults = model_defaults(
                config.name, num_classes=num_classes, sequence_length=sequence_length
            )
            blueprint = _blueprint(config, {**defaults, **config.args}, self.begins_with_values)
        if config.freeze:
            blueprint.change(lambda model: freeze(model, config.freeze))
        return blueprint


def _blueprint(config: ModelConfig, args: Mapping[str, Any], has_values: bool) -> Blueprint:  # noqa: FBT001
    """Describe a model that is not of the Hub, with adapters if the job has `model.lora`."""

    def make() -> nn.Module:
        return make_model(config.name, args)

    lora, source = config.lora, config.pretrained if has_values else None
    blueprint = _adapted(make, lora, config.name)
    if source is not None:
        plain = blueprint if lora is None else describe(make)
        use_pretrained(plain, config.name, source, config.pretrained_except)
        blueprint.values = _adapted_values(blueprint.model, plain.values)
    _quantize_initial(blueprint, make)
    return blueprint


def _hub_blueprint(hub: HubModel, labels: Mapping[str, Any], lora: LoraConfig | None) -> Blueprint:
    """Describe a model of the Hub, with saved values if the folder has weights."""
    if labels and not labels.keys() & hub.args.keys():
        hub = replace(hub, args={**hub.args, **labels})
    blueprint = _adapted(hub.architecture.make, lora, hub.source, hub.architecture.name)
    saved = None
    if hub.has_weights:
        # Adapters change the names of the tensors; the files have the names of the plain model.
        saved = hub.values(blueprint.model if lora is None else _on_meta(hub))
        blueprint.values = _adapted_values(blueprint.model, saved.values)
        blueprint.saved_dtypes = saved.dtypes
    _quantize_initial(blueprint, hub.architecture.make)
    blueprint.files = hub.saved_files(saved).files
    return blueprint


def _on_meta(hub: HubModel) -> nn.Module:
    with torch.device("meta"):
        return hub.architecture.build(hub.architecture.config)


def _adapted(
    make: Callable[[], nn.Module],
    lora: LoraConfig | None,
    base: str,
    class_name: str | None = None,
) -> Blueprint:
    """Describe a model, with adapters if `lora` is set; other tensors keep their initial values."""
    if lora is None:
        return describe(make)
    return describe(lambda: attach(make(), lora, base, class_name), name_without_adapter)


def _adapted_values(
    model: nn.Module, values: Mapping[str, StateTensor]
) -> Mapping[str, StateTensor]:
    """Return values with the names and the form (such as 4 bits) of a model with adapters."""
    adapters = adapters_of(model)
    if adapters is None:
        return values
    found: dict[str, StateTensor] = {}
    layers = dict(adapters.quantized)
    for name, value in values.items():
        module, _, own = name.rpartition(".")
        packed = value
        if own == "weight" and module in layers:
            dtype = value.dtype if value.dtype in DTYPES.values() else torch.float32
            layers[module] = replace(layers[module], dtype=word_of(dtype))
            packed = quantized_value(value, layers[module])
        found[adapters.adapted_name(name)] = packed
    model.lora_adapters = replace(adapters, quantized=layers)  # type: ignore[assignment]
    return found


def _quantize_initial(blueprint: Blueprint, make: Callable[[], nn.Module]) -> None:
    """Give 4-bit weights without saved values the initial values of the model without adapters."""
    adapters = adapters_of(blueprint.model)
    if adapters is None or not blueprint.deferred:
        return  # a constructor that computes values has quantized them already
    plain = cache(lambda: describe(make))

    def made(name: str, layer: QuantizedLayer, seed: int) -> torch.Tensor:
        value = StateTensor.of(plain().initial_value(f"{name}.weight", seed))
        return quantized_value(value, layer).values()

    names = {name: adapters.adapted_name(f"{name}.weight") for name in adapters.quantized}
    blueprint.made = {
        names[name]: partial(made, name, layer)
        for name, layer in adapters.quantized.items()
        if names[name] not in blueprint.values
    }
