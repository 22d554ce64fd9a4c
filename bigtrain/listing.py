"""The strategies as a list: what each preset fills the roles with, and each technique's line."""

from __future__ import annotations

from typing import Any

from bigtrain.config import Role, RoleConfig, StrategyConfig
from bigtrain.loading import preset_names, read_preset
from bigtrain.registry import technique_class


def strategy_list() -> list[dict[str, Any]]:
    """One entry for each preset under configs/strategies, by name."""
    rows = []
    for name in preset_names("strategies"):
        values = read_preset("strategies", name, "strategy").values["strategy"]
        chosen = StrategyConfig.model_validate(values).roles()
        summaries = [_line(role, config) for role, config in chosen.items()]
        roles = {role: config.name for role, config in chosen.items()}
        rows.append({"name": name, "summary": "; ".join(summaries), "roles": roles})
    return rows


def _line(role: Role, config: RoleConfig) -> str:
    """A technique's line, and what the preset sets."""
    options = ", ".join(f"{key}={value}" for key, value in config.options.items())
    summary = technique_class(role, config.name).summary
    return f"{summary} ({options})" if options else summary
