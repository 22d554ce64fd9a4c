"""The profile of a whole model: two steps on fake tensors, over the branch that needs the most."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.workload import Workload
from bigtrain.costs.forecast import Profile
from bigtrain.data.loader import MicroBatch
from bigtrain.devices import tracing_device
from bigtrain.prediction.fullest_way import WAYS, OneWay
from bigtrain.prediction.record import profile_from_run, record_steps
from bigtrain.prediction.state_figures import state_bytes, storage_bytes
from bigtrain.tracing.watch import untraceable_reason


def make_profile(workload: Workload, resolved: ResolvedPlan) -> Profile:
    """Run two optimizer steps on fake tensors, the second one of two micro-batches.

    Of a model that may go several ways the fullest one is run, in every micro-batch.

    Args:
        workload: with an example.
        resolved: for the precision, the clipping, the device and what blocks keep.

    Returns:
        The profile; with only the states in it, and the reason, where the model cannot run so.
    """
    device = tracing_device(resolved.plan.device_type)
    error: Exception | None = None
    if not resolved.routes.vary:
        try:
            return profile_from_run(record_steps(workload, resolved, device), resolved.plan)
        except Exception as raised:  # noqa: BLE001 - user code of any kind runs here
            error = raised
    try:
        return _fullest_profile(workload, resolved, device)
    except Exception as raised:  # noqa: BLE001 - the same, with answers that are made up
        reason = untraceable_reason(error or raised)
        return profile_states_only(workload.model, workload.micro_batch, reason)


def _fullest_profile(workload: Workload, resolved: ResolvedPlan, device: torch.device) -> Profile:
    """Of the way through a model that comes by most of it, and of these the one that takes most.

    Raises:
        Exception: no way is known; of any kind that the model's own code raises.
    """
    found: list[tuple[tuple[int, int], Profile]] = []
    error: Exception | None = None
    for answer, passes in WAYS:
        way = OneWay(answer, passes)
        try:
            run = record_steps(workload, resolved, device, way, [way.install])
            profile = profile_from_run(run, resolved.plan)
        except Exception as raised:  # noqa: BLE001 - user code of any kind runs here
            error = error or raised
            continue
        profile = replace(profile, branch_condition=_way_taken(way, resolved))
        peak = max(one.peak().bytes for one in profile.passes.values())
        found.append(((-way.left_out, peak), profile))
        if not way.left_out:
            break
    if not found:
        raise error or RuntimeError("no way through the model is known")
    return max(found, key=lambda one: one[0])[1]


def _way_taken(way: OneWay, resolved: ResolvedPlan) -> str:
    """What makes a model's way."""
    if resolved.routes.vary:
        return f"not every pass uses {resolved.routes.names}"
    asked = "the model changes its way" if way.question is None else f"{way.question} decides"
    return f"{asked} what a pass does"


def profile_states_only(model: nn.Module, micro_batch: MicroBatch, reason: str) -> Profile:
    """The profile of a model that cannot run on fake tensors."""
    states = state_bytes(model, None)
    return Profile(
        parameter_bytes=states.parameters,
        gradient_bytes=states.gradients,
        buffer_bytes=states.buffers,
        optimizer_bytes=0,
        batch_bytes=storage_bytes(micro_batch.tensors()),
        untraceable=reason,
    )
