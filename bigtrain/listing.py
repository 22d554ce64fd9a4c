"""The strategies as a list: what each preset fills the roles with, and each technique's line."""

from __future__ import annotations

from typing import Any

from bigtrain.config import ROLES
from bigtrain.loading import preset_names, read_preset
from bigtrain.registry import technique_class


def strategy_list() -> list[dict[str, Any]]:
    """One entry for each preset under configs/strategies, by name."""
    rows = []
    for name in preset_names("strategies"):
        values = read_preset("strategies", name, "strategy").values["strategy"]
        roles = {}
        for role in ROLES:
            chosen = values.get(role)
            if chosen is not None:
                roles[role] = chosen if isinstance(chosen, str) else chosen["name"]
        summaries = [technique_class(role, technique).summary for role, technique in roles.items()]
        rows.append({"name": name, "summary": "; ".join(summaries), "roles": roles})
    return rows
