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
    """Check that the host has room for offloaded activations. Collective.

    The optimizer's state is checked by the technique that offloads it.

    Args:
        plan: nothing is checked if it offloads no activations to the host.
        host_bytes: predicted for this rank; see `Prediction.host_bytes`.
        context: the ranks, of which those of a node share its memory.

    Raises:
        ConfigError: they do not fit; the same message on every rank.
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
