"""The `model` section of a job, looked up once: a name becomes a model that can be described."""

from __future__ import annotations

from dataclasses import dataclass

from bigtrain.job.schema import ModelConfig
from bigtrain.models import check_model, make_model, model_defaults, sequence_length, task_of
from bigtrain.models.blueprint import Blueprint, describe
from bigtrain.models.pretrained import use_pretrained


@dataclass(frozen=True)
class ModelSpec:
    """A model by its name and arguments, and what follows from the name alone."""

    config: ModelConfig
    task: str | None
    """The task that a built-in model is for; None for a user's own model."""
    sequence_length: int | None
    """The most tokens in a sample of a built-in language model; None for all others."""

    @classmethod
    def of(cls, config: ModelConfig) -> ModelSpec:
        """Look the name up. Nothing is constructed.

        Raises:
            ConfigError: an argument of a built-in language model is unknown or does not fit.
        """
        return cls(config, task_of(config.name), sequence_length(config.name, config.args))

    @property
    def is_language(self) -> bool:
        """Whether it is one of bigtrain's own language models, whose head has a known name."""
        return self.task == "language"

    @property
    def is_custom(self) -> bool:
        """Whether the name is an import path, `package.module:Class`."""
        return ":" in self.config.name

    def check(self) -> None:
        """Refuse a model that cannot be made. Allocates nothing, calls no user's constructor.

        Raises:
            ConfigError: with the key, `model.name` or `model.args.X`, and the fix.
        """
        check_model(self.config.name, self.config.args)

    def describe(self, *, num_classes: int | None, sequence_length: int | None) -> Blueprint:
        """The model on the meta device, with its initial values or those of `model.pretrained`.

        Args:
            num_classes: the number of the data's classes, or the size of their vocabulary;
                `model.args` goes before it.
            sequence_length: tokens of a sample of the data; `model.args` goes before it.

        Raises:
            ConfigError: the model cannot be made, or the file of its values is another model's.
        """
        config: ModelConfig = self.config
        defaults = model_defaults(
            config.name, num_classes=num_classes, sequence_length=sequence_length
        )
        args = {**defaults, **config.args}
        blueprint = describe(lambda: make_model(config.name, args))
        if config.pretrained is not None:
            use_pretrained(blueprint, config.name, config.pretrained, config.pretrained_except)
        return blueprint
