"""The one table that names the techniques; a module is imported when its name is chosen."""

from __future__ import annotations

from pydantic import ValidationError

from bigtrain.core.strategy import Strategy
from bigtrain.errors import ConfigError, nearest
from bigtrain.job.import_path import load_object
from bigtrain.job.load import explain
from bigtrain.job.schema import Role, RoleConfig

TECHNIQUES: dict[Role, dict[str, str]] = {
    "cut": {
        "layer_split": "bigtrain.strategies.layer_split:LayerSplit",
        "pipeline": "bigtrain.strategies.pipeline:Pipeline",
    },
    "replicate": {
        "single": "bigtrain.strategies.single:Single",
        "ddp": "bigtrain.strategies.ddp:DDP",
        "zero": "bigtrain.strategies.zero:Zero",
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


def technique_class(role: Role, name: str) -> type[Strategy]:
    """The class of a technique, by its name or as `package.module:Class`.

    Raises:
        ConfigError: the name is not in the table, or the import fails.
    """
    table = TECHNIQUES[role]
    target = table.get(name, name)
    if ":" not in target:
        known = ", ".join(sorted(table)) or "none yet"
        raise ConfigError(
            f"strategy.{role}: unknown {name!r}{nearest(name, table)} Known: {known}; "
            "your own is given as package.module:Class."
        )
    found = load_object(target, f"strategy.{role}")
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise ConfigError(f"strategy.{role}: {target} is not a subclass of bigtrain.Strategy.")
    if found.role != role:
        raise ConfigError(
            f"strategy.{role}: {name} plays the role {found.role!r}. "
            f"Write strategy.{found.role}={name}."
        )
    return found


def make_technique(role: Role, config: RoleConfig) -> Strategy:
    """Build a technique from its section of a job, its options checked.

    Raises:
        ConfigError: an unknown name or option, or a value of the wrong type.
    """
    kind = technique_class(role, config.name)
    try:
        return kind.model_validate(config.options)
    except ValidationError as error:
        reason = explain(error, kind)
        prefix = f"strategy.{role}."
        reason = reason.replace("unknown key ", f"unknown key {prefix}", 1)
        if not reason.startswith("unknown key"):
            reason = prefix + reason
        raise ConfigError(f"{reason} (strategy.{role}.name is {config.name})") from None
