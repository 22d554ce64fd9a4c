"""Profiles, and the traffic that a strategy states for them."""

from __future__ import annotations

from typing import Any

from bigtrain.core.strategy import Plan
from bigtrain.costs.forecast import Profile
from bigtrain.costs.traffic import (
    Traffic,
)
from bigtrain.memory.timeline import BlockTicks


def traffic_of_plan(profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
    """The traffic that the techniques of a plan state for a profile."""
    return tuple(
        t for technique in plan.techniques.values() for t in technique.traffic(profile, plan)
    )


PSI, REST = 4 * 1000 * 1000, 2000


def profile(**more: Any) -> Profile:
    """Four blocks of one large matrix each, and 2000 other elements; fp32 with AdamW."""
    block = BlockTicks(((1000, 1000),), (True,), (0, 1), (2, 3))
    outside = BlockTicks(((REST,),), (True,), (0, 4), (0, 4))
    elements = PSI + REST
    fields: dict[str, Any] = {
        "parameter_bytes": 4 * elements,
        "gradient_bytes": 4 * elements,
        "buffer_bytes": 0,
        "optimizer_bytes": 8 * elements,
        "batch_bytes": 0,
        "trained_elements": elements,
        "state_slots": 2.0,
        "blocks": ((block, block),) * 4,
        "outside_blocks": outside,
    }
    return Profile(**{**fields, **more})
