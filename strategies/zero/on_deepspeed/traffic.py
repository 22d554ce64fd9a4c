"""The traffic of DeepSpeed's stages and of its offload, from its code and from counts in runs.

Stages 1 and 2 reduce each gradient to the rank that updates its elements, in the precision of the
parameters, and gather the updated parameters once a step. Stage 2 reduces after every micro-batch.
Stage 3 gathers each module's parameters before the module computes, forward and backward, and again
where a block is recomputed. Stage 3 gathers tied parameters for each use. This is not counted here,
because a profile has them once. Transfers to and from the host follow DeepSpeed's code alone; no
run has counted them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from bigtrain.core.strategy import Plan
from bigtrain.costs.forecast import Profile
from bigtrain.costs.traffic import (
    OverlapPhase,
    Traffic,
    TrafficKind,
    buffer_broadcast_traffic,
    message_count,
    parameter_shapes,
)
from bigtrain.devices import is_accelerator
from bigtrain.job.deepspeed_json import json_section
from bigtrain.memory.timeline import BlockTicks
from bigtrain.strategies.zero.on_deepspeed.config import (
    accumulates_in_fp32,
    overlaps_exchanges,
    precision_of,
)
from bigtrain.strategies.zero.on_deepspeed.layout import (
    BufferSizes,
    flat_size,
    padded_size,
    piece_size,
)


def deepspeed_traffic(config: dict[str, Any], profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
    """Return the messages and transfers of a rank in a step.

    Args:
        config: DeepSpeed's configuration.
        profile: the profile of one process.
        plan: ranks, precision, accumulation, offload.
    """
    zero = config["zero_optimization"]
    messages: list[Traffic] = []
    if plan.dp > 1:
        messages += _cut(zero, profile, plan) if zero["stage"] == 3 else _flat(zero, profile, plan)
        if profile.buffer_bytes:
            messages.append(
                buffer_broadcast_traffic(profile, plan.dp, plan.pp * plan.tp, "micro_batch")
            )
    if is_accelerator(plan.device_type):  # a CPU is the host
        messages += (_cut_moves if zero["stage"] == 3 else _flat_moves)(zero, profile, plan)
    return tuple(messages)


def shared_traffic(bucket: int, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
    """Return the messages of stage 1 in DeepSpeed's pipelines: fp32, after the last micro-batch.

    Args:
        bucket: the number of elements that are reduced in one message.
        profile: the profile of one pipeline stage.
        plan: the mesh.
    """
    if plan.dp == 1:
        return ()
    message, nbytes = _over_replicas(plan), 4 * profile.trained_elements
    calls = _reductions(profile, bucket, plan)
    return (
        message("reduce", nbytes, calls, "step", "nothing"),
        message(
            "all_gather", 4 * flat_size(profile.trained_elements, plan.dp), 1, "step", "nothing"
        ),
    )


def _over_replicas(plan: Plan) -> Callable[..., Traffic]:
    """Return a constructor of messages between the replicas."""
    return partial(Traffic, ranks=plan.dp, stride=plan.pp * plan.tp)


def _flat(zero: dict[str, Any], profile: Profile, plan: Plan) -> list[Traffic]:
    """Return the messages of stages 1 and 2, which gather updated parameters in one message."""
    message, nbytes = _over_replicas(plan), precision_of(plan) * profile.trained_elements
    # By default DeepSpeed averages a whole bucket on all ranks, and each rank uses its share.
    to_owner = zero.get("reduce_scatter", True) and not zero.get(
        "use_multi_rank_bucket_allreduce", True
    )
    kind: TrafficKind = "reduce" if to_owner else "all_reduce"
    calls = _reductions(profile, BufferSizes.of(zero).reduce_bucket, plan)
    overlaps = _overlaps(zero, plan, "backward")
    # Stage 1 adds whole gradients up, and reduces with the last micro-batch.
    reduced = message(
        kind, nbytes, calls, "step" if zero["stage"] == 1 else "micro_batch", overlaps
    )
    gathered = precision_of(plan) * flat_size(profile.trained_elements, plan.dp)
    return [reduced, message("all_gather", gathered, 1, "step", "nothing")]


def _cut(zero: dict[str, Any], profile: Profile, plan: Plan) -> list[Traffic]:
    """Return the messages of stage 3, which gathers persistent parameters once, after the step."""
    message, size = _over_replicas(plan), precision_of(plan)
    sizes = BufferSizes.of(zero)
    _, persistent = sizes.split_persistent(parameter_shapes(profile, trained=False))
    messages = []
    for phase, tensors in _gathered(zero, profile):
        nbytes, overlaps = size * padded_size(tensors, plan.dp), _overlaps(zero, plan, phase)
        calls = _gatherings(zero, tensors)
        messages.append(message("all_gather", nbytes, calls, "micro_batch", overlaps))
    trained = parameter_shapes(profile)
    nbytes, overlaps = size * padded_size(trained, plan.dp), _overlaps(zero, plan, "backward")
    calls = message_count(map(math.prod, reversed(trained)), sizes.reduce_bucket)
    messages.append(message("reduce_scatter", nbytes, calls, "micro_batch", overlaps))
    if persistent:
        nbytes, calls = size * padded_size(persistent, plan.dp), _gatherings(zero, persistent)
        messages.append(message("all_gather", nbytes, calls, "step", "nothing"))
    return messages


def _flat_moves(zero: dict[str, Any], profile: Profile, plan: Plan) -> list[Traffic]:
    """Return the transfers of stages 1 and 2 if the host updates: gradients, and parameters."""
    if json_section(zero, "offload_optimizer").get("device", "none") == "none":
        return []
    own_elements = piece_size(profile.trained_elements, plan.dp)
    calls = -(-len(parameter_shapes(profile)) // plan.dp)
    own_bytes, steps = precision_of(plan) * own_elements, plan.batch.accumulation_steps
    messages = [
        Traffic("to_host", 4 * own_elements, calls, "step", "backward"),
        Traffic("from_host", own_bytes, 1, "step", "nothing"),
    ]
    if steps > 1:  # sums on the host are copied to the device, added to, and copied back
        times = steps if zero["stage"] == 2 else 1
        messages.append(Traffic("to_host", times * own_bytes, times * calls, "step", "backward"))
        messages.append(Traffic("from_host", times * own_bytes, times * calls, "step", "backward"))
    return messages


def _cut_moves(zero: dict[str, Any], profile: Profile, plan: Plan) -> list[Traffic]:
    """Return the transfers of stage 3: parameters for each gathering, and sums of gradients."""
    size, own_elements = precision_of(plan), piece_size(profile.trained_elements, plan.dp)
    messages = []
    parameters_away = json_section(zero, "offload_param").get("device", "none") != "none"
    if parameters_away:
        for phase, tensors in _gathered(zero, profile):
            nbytes = size * padded_size(tensors, plan.dp) // plan.dp
            overlaps = _overlaps(zero, plan, phase)
            messages.append(Traffic("from_host", nbytes, len(tensors), "micro_batch", overlaps))
    if json_section(zero, "offload_optimizer").get("device", "none") != "none":
        calls = len(parameter_shapes(profile))
        waiting = (4 if accumulates_in_fp32(plan, 3) else size) * own_elements
        messages += [
            Traffic("to_host", waiting, calls, "micro_batch", "backward"),
            Traffic("from_host", waiting, calls, "micro_batch", "backward"),
            Traffic("to_host", 4 * own_elements, calls, "step", "backward"),
        ]
        if not parameters_away:
            messages.append(Traffic("from_host", size * own_elements, 1, "step", "nothing"))
    return messages


def _overlaps(zero: dict[str, Any], plan: Plan, phase: OverlapPhase) -> OverlapPhase:
    """Return `phase`, or "nothing" if messages do not overlap with the computation.

    Without `overlap_comm`, a GPU computes and communicates on one stream. On a CPU, some ranks
    compute while other ranks communicate, whatever the setting.
    """
    return phase if plan.device_type == "cpu" or overlaps_exchanges(zero) else "nothing"


def _reductions(profile: Profile, bucket: int, plan: Plan) -> int:
    """Return the number of reductions: one for each bucket, and for each cut between shares."""
    return message_count(map(math.prod, reversed(parameter_shapes(profile))), bucket) + plan.dp - 1


def _gatherings(zero: dict[str, Any], tensors: Sequence[tuple[int, ...]]) -> int:
    """Return the number of all-gathers: one for each tensor if sequential, or for each layer."""
    if zero.get("stage3_allgather_sequential", False):
        return len(tensors)
    return max(1, sum(len(shape) > 1 for shape in tensors))


def _gathered(
    zero: dict[str, Any], profile: Profile
) -> list[tuple[OverlapPhase, list[tuple[int, ...]]]]:
    """Return the shapes of parameters that are gathered in each pass of a micro-batch."""
    sizes = BufferSizes.of(zero)
    shapes, _ = sizes.split_persistent(parameter_shapes(profile, trained=False))
    regathered, _ = sizes.split_persistent(_recomputed_shapes(profile))
    return [("forward", shapes), ("backward", [*shapes, *regathered])]


def _recomputed_shapes(profile: Profile) -> list[tuple[int, ...]]:
    """Return the shapes of parameters that are gathered once more for recomputed blocks.

    The last layer of a block is not gathered again, because its backward pass begins right after
    its recomputation.
    """
    shapes: list[tuple[int, ...]] = []
    for name, first, _ in profile.windows:
        if name in profile.recomputed:
            shapes += _without_last(first)
    return shapes


def _without_last(block: BlockTicks) -> list[tuple[int, ...]]:
    """Return the shapes of a block's parameters before its last matrix."""
    shapes = list(block.shapes)
    while shapes and len(shapes[-1]) < 2:
        shapes.pop()
    return shapes[:-1]
