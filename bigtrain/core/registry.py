"""The table of techniques. The module of a technique is imported when its class is first used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from bigtrain.core.strategy import Strategy
from bigtrain.errors import ConfigError, did_you_mean
from bigtrain.job.import_path import load_object
from bigtrain.job.load import format_validation_error
from bigtrain.job.schema import Role, RoleConfig
from bigtrain.job.strategy_words import REMOVED


@dataclass(frozen=True)
class Engines:
    """A technique with several classes; its options choose the class."""

    options: str
    """The class that defines the options, as `package.module:Class`. The other classes inherit from
    it."""
    keys: tuple[str, ...]
    """The attributes of `options` that choose the class."""
    classes: Mapping[tuple[object, ...], str]
    """The classes by the values of `keys`. For other values, the class in `options` is used; its
    checks raise."""


TECHNIQUES: dict[Role, dict[str, str | Engines]] = {
    "cut": {
        "pipeline": Engines(
            "bigtrain.strategies.pipeline:Pipeline",
            ("place",),
            {
                ("torch",): "bigtrain.strategies.pipeline.on_torch:TorchPipeline",
                ("devices",): "bigtrain.strategies.pipeline.on_devices:DevicePipeline",
                ("fairscale",): "bigtrain.strategies.pipeline.on_fairscale:FairscalePipe",
                ("deepspeed",): "bigtrain.strategies.pipeline.on_deepspeed:DeepSpeedPipeline",
            },
        ),
    },
    "slice": {
        "tensor": "bigtrain.strategies.tensor:TensorSlices",
    },
    "replicate": {
        "single": "bigtrain.strategies.single:Single",
        "data_parallel": "bigtrain.strategies.data_parallel:DataParallel",
        "sync_sgd": "bigtrain.strategies.sync_sgd:SyncSGD",
        "ring": "bigtrain.strategies.ring:Ring",
        "ddp": "bigtrain.strategies.ddp:DDP",
        "local_sgd": "bigtrain.strategies.local_sgd:LocalSGD",
        "parameter_server": "bigtrain.strategies.parameter_server:ParameterServer",
        "zero": Engines(
            "bigtrain.strategies.zero:Zero",
            ("engine", "stage"),
            {
                ("deepspeed", 1): "bigtrain.strategies.zero.on_deepspeed.engine:DeepSpeed",
                ("deepspeed", 2): "bigtrain.strategies.zero.on_deepspeed.engine:DeepSpeed",
                ("deepspeed", 3): "bigtrain.strategies.zero.on_deepspeed.engine:DeepSpeed",
                ("torch", 1): "bigtrain.strategies.zero.on_torch.stage1:ShardedOptimizer",
                ("torch", 2): "bigtrain.strategies.zero.on_torch.fully_shard:FullySharded",
                ("torch", 3): "bigtrain.strategies.zero.on_torch.fully_shard:FullySharded",
                ("fairscale", 1): "bigtrain.strategies.zero.on_fairscale.engine:FairscaleOSS",
                (
                    "fairscale",
                    2,
                ): "bigtrain.strategies.zero.on_fairscale.engine:FairscaleShardedDDP",
                ("fairscale", 3): "bigtrain.strategies.zero.on_fairscale.fsdp:FairscaleFSDP",
            },
        ),
    },
    "recompute": {
        "checkpointing": "bigtrain.strategies.checkpointing:Checkpointing",
    },
    "offload": {
        "offload": "bigtrain.strategies.offload:Offload",
    },
    "accumulate": {
        "accumulation": "bigtrain.strategies.accumulation:Accumulation",
    },
}


TECHNIQUE_ALIASES: dict[Role, dict[str, tuple[str, dict[str, Any]]]] = {
    "cut": {"layer_split": ("pipeline", {"schedule": "naive"})},
}
"""Former names of techniques, each with the technique and the options that it means."""


def technique_class(role: Role, name: str) -> type[Strategy]:
    """Return the class that defines the options of a technique.

    Args:
        role: the role of the technique.
        name: the name in the table, or `package.module:Class`.

    Raises:
        ConfigError: the name is not in the table, the import fails, or the class is not a strategy
            of this role.
    """
    table = TECHNIQUES[role]
    name, _ = TECHNIQUE_ALIASES.get(role, {}).get(name, (name, {}))
    entry = table.get(name, name)
    target = entry.options if isinstance(entry, Engines) else entry
    if target in REMOVED:
        raise ConfigError(f"strategy.{role}: {target} was removed. {REMOVED[target]}")
    if ":" not in target:
        raise ConfigError(
            f"strategy.{role}: unknown {name!r}{did_you_mean(name, table)} "
            f"Known: {', '.join(sorted(table))}; your own is given as package.module:Class."
        )
    return _loaded(role, name, target)


def _loaded(role: Role, name: str, target: str) -> type[Strategy]:
    loaded = load_object(target, f"strategy.{role}")
    if not (isinstance(loaded, type) and issubclass(loaded, Strategy)):
        raise ConfigError(f"strategy.{role}: {target} is not a subclass of bigtrain.Strategy.")
    if loaded.role != role:
        raise ConfigError(
            f"strategy.{role}: {name} plays the role {loaded.role!r}. "
            f"Write strategy.{loaded.role}={name}."
        )
    return loaded


def techniques_of(role: Role) -> list[Strategy]:
    """Return the techniques of a role with their default options, in the order of the table."""
    return [technique_class(role, name)() for name in TECHNIQUES[role]]


_made_once: dict[tuple[Role, str, str], Strategy] = {}
"""Techniques of the table by role, name and options. A technique has no state, and a search for
plans makes the same techniques thousands of times."""


def make_technique(role: Role, config: RoleConfig) -> Strategy:
    """Return a technique with the options of its section of a job, which are checked.

    Raises:
        ConfigError: the name or an option is unknown, or a value has the wrong type.
    """
    if ":" in config.name:
        return _make_technique(role, config)
    key = role, config.name, repr(config.options)
    if key not in _made_once:
        _made_once[key] = _make_technique(role, config)
    return _made_once[key]


def _make_technique(role: Role, config: RoleConfig) -> Strategy:
    kind = technique_class(role, config.name)
    name, implied = TECHNIQUE_ALIASES.get(role, {}).get(config.name, (config.name, {}))
    options = {**implied, **config.options}
    try:
        technique = kind.model_validate(options)
    except ValidationError as error:
        reason = format_validation_error(error, kind, section=f"strategy.{role}.")
        raise ConfigError(f"{reason} (strategy.{role}.name is {config.name})") from None
    entry = TECHNIQUES[role].get(name)
    if isinstance(entry, Engines):
        target = entry.classes.get(tuple(getattr(technique, key) for key in entry.keys))
        if target is not None:
            return _loaded(role, name, target).model_validate(options)
    return technique
