"""The order in which techniques shape a run, and its forecast."""

from __future__ import annotations

from bigtrain.core.strategy import Plan, Strategy
from bigtrain.job.schema import Role

ORDER: tuple[Role, ...] = ("cut", "recompute", "offload", "replicate", "accumulate")
"""The order in which techniques shape a run, and its forecast."""


def in_order(plan: Plan) -> list[Strategy]:
    """The plan's techniques in the order of composition."""
    return [plan.techniques[role] for role in ORDER if role in plan.techniques]
