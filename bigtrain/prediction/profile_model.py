"""Record the profile of a whole model, by two steps on fake tensors, over its largest branch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.workload import Workload
from bigtrain.costs.forecast import Profile
from bigtrain.data.loader import MicroBatch
from bigtrain.devices import tracing_device
from bigtrain.prediction.largest_branch import BRANCHES, OneBranch
from bigtrain.prediction.record import profile_from_run, record_steps
from bigtrain.prediction.state_figures import state_bytes, storage_bytes
from bigtrain.tracing.watch import untraceable_reason


def make_profile(workload: Workload, resolved: ResolvedPlan) -> Profile:
    """Run two optimizer steps of a model on fake tensors, the second one of two micro-batches.

    If passes of the model may take several branches, every micro-batch takes the largest branch.

    Args:
        workload: a workload with an example.
        resolved: the plan with precision, clipping, device and policies.

    Returns:
        The profile. If the model cannot run on fake tensors, it has only the states and the reason.
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
    except Exception as raised:  # noqa: BLE001 - the same, with made-up answers
        reason = untraceable_reason(error or raised)
        return profile_states_only(workload.model, workload.micro_batch, reason)


def _fullest_profile(workload: Workload, resolved: ResolvedPlan, device: torch.device) -> Profile:
    """Return the profile of the branch that leaves out the fewest bytes of parameters.

    Of branches that leave out equally many bytes, the one with the highest peak is taken.

    Raises:
        Exception: no branch runs. It is the exception that the model's code raised.
    """
    profiles: list[tuple[tuple[int, int], Profile]] = []
    error: Exception | None = None
    for answer, passes in BRANCHES:
        branch = OneBranch(answer, passes)
        try:
            run = record_steps(workload, resolved, device, branch, [branch.install])
            profile = profile_from_run(run, resolved.plan)
        except Exception as raised:  # noqa: BLE001 - user code of any kind runs here
            error = error or raised
            continue
        profile = replace(profile, branch_condition=_branch_taken(branch, resolved))
        peak = max(candidate.peak().bytes for candidate in profile.passes.values())
        profiles.append(((-branch.left_out, peak), profile))
        if not branch.left_out:
            break
    if not profiles:
        raise error or RuntimeError("no branch of the model runs on fake tensors")
    return max(profiles, key=lambda candidate: candidate[0])[1]


def _branch_taken(branch: OneBranch, resolved: ResolvedPlan) -> str:
    """Return a clause on the reason why passes take different branches."""
    if resolved.routes.vary:
        return f"not every pass uses {resolved.routes.names}"
    asked = (
        "the model changes its branch" if branch.question is None else f"{branch.question} decides"
    )
    return f"{asked} what a pass does"


def profile_states_only(model: nn.Module, micro_batch: MicroBatch, reason: str) -> Profile:
    """Return the profile of a model that cannot run on fake tensors, without timelines.

    It has the bytes of the parameters, gradients, buffers and the batch. The bytes of the
    optimizer's state are 0, because they are not known without a step.

    Args:
        model: the model.
        micro_batch: one micro-batch.
        reason: the reason why the model cannot run; see `Profile.untraceable`.
    """
    states = state_bytes(model, None)
    return Profile(
        parameter_bytes=states.parameters + states.frozen,
        frozen_bytes=states.frozen,
        gradient_bytes=states.gradients,
        buffer_bytes=states.buffers,
        optimizer_bytes=0,
        batch_bytes=storage_bytes(micro_batch.tensors()),
        untraceable=reason,
    )
