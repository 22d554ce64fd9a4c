"""Check that the host has memory for the activations that a run offloads to it."""

from __future__ import annotations

import platform

from bigtrain.core.strategy import Plan
from bigtrain.errors import ConfigError
from bigtrain.memory.disk import SpaceRequest, find_shortage
from bigtrain.memory.host_memory import free_host_bytes
from bigtrain.ranks.context import RunContext
from bigtrain.units import format_bytes


def ensure_host_room(plan: Plan, host_bytes: int, context: RunContext) -> None:
    """Check that each host has memory for the activations that its ranks offload. Collective.

    The technique that offloads the optimizer's state checks the memory for this state.

    Args:
        plan: the plan. If it offloads no activations to the host, nothing is checked.
        host_bytes: predicted bytes of this rank on the host; see `Prediction.host_bytes`.
        context: this rank's context.

    Raises:
        ConfigError: the activations do not fit on a host. Every rank raises the same message.
    """
    if plan.offload_tiers.activations != "cpu" or not plan.moves_activations:
        return
    free = free_host_bytes()
    wanted = 0 if free is None else host_bytes
    request = SpaceRequest(platform.node(), "memory", wanted, free or 0)
    requests = context.broadcast_object(context.gather_objects(request))
    shortage = find_shortage(requests or [])
    if shortage is None:
        return
    ranks = "the 1 rank" if shortage.ranks == 1 else f"the {shortage.ranks} ranks"
    raise ConfigError(
        f"strategy.offload.activations=cpu: the host has {format_bytes(shortage.free)} of memory "
        f"free ({shortage.free} bytes), and the activations that {ranks} there save for the "
        f"backward pass need {format_bytes(shortage.wanted)} ({shortage.wanted} bytes) of pinned "
        "memory, which is allocated in powers of two. Use strategy.offload.activations=disk, "
        "strategy.recompute=full, or a smaller train.micro_batch_size."
    )
