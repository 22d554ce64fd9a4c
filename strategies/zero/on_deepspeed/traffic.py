"""What DeepSpeed's stages send, and what its offload moves; read off its code and counted in runs.

Stages 1 and 2 reduce each gradient to the rank that updates it, in the precision of the parameters,
and gather the updated parameters once a step; stage 2 reduces after every micro-batch. Stage 3
gathers each module's parameters before it computes, forward and backward, and again where a block
is computed again. Tied parameters, which a profile shows once, are gathered by it for each use:
that is not counted here. Moves to and from the host were read off the code alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from bigtrain.strategies.zero.on_deepspeed.config import accumulates_in_fp32, precision_of


def deepspeed_traffic(config: dict[str, Any], profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
    """What a rank exchanges and moves.

    Args:
        config: what DeepSpeed is given.
        profile: of one process.
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
    """Stage 1 inside DeepSpeed's pipelines: in fp32, when all micro-batches are through.

    Args:
        bucket: numbers that are reduced at once.
        profile: of one stage.
        plan: the mesh.
    """
    if plan.dp == 1:
        return ()
    group, nbytes = (plan.dp, plan.pp * plan.tp), 4 * profile.trained_elements
    calls = _reductions(profile, bucket, plan)
    return (
        Traffic("reduce", nbytes, calls, "step", "nothing", *group),
        Traffic("all_gather", 4 * _aligned(profile, plan), 1, "step", "nothing", *group),
    )


def _aligned(profile: Profile, plan: Plan) -> int:
    """Numbers of the flat buffer that is gathered: filled up to a multiple of twice the ranks."""
    alignment = 2 * plan.dp
    return -(-profile.trained_elements // alignment) * alignment


def _flat(zero: dict[str, Any], profile: Profile, plan: Plan) -> list[Traffic]:
    """Stages 1 and 2; what is updated comes back in one message."""
    group, nbytes = (plan.dp, plan.pp * plan.tp), precision_of(plan) * profile.trained_elements
    # DeepSpeed's own default averages a bucket on all ranks, of which each keeps its part.
    to_owner = zero.get("reduce_scatter", True) and not zero.get(
        "use_multi_rank_bucket_allreduce", True
    )
    kind: TrafficKind = "reduce" if to_owner else "all_reduce"
    calls = _reductions(profile, int(zero.get("reduce_bucket_size", 500_000_000)), plan)
    beside = _beside(zero, plan, "backward")
    # Stage 1 adds whole gradients up, and reduces with the last micro-batch.
    reduced = Traffic(
        kind, nbytes, calls, "step" if zero["stage"] == 1 else "micro_batch", beside, *group
    )
    gathered = precision_of(plan) * _aligned(profile, plan)
    return [reduced, Traffic("all_gather", gathered, 1, "step", "nothing", *group)]


def _cut(zero: dict[str, Any], profile: Profile, plan: Plan) -> list[Traffic]:
    """Stage 3; what persists is gathered once, after the step."""
    group, size = (plan.dp, plan.pp * plan.tp), precision_of(plan)
    _, persisting = _persistence(zero, parameter_shapes(profile, trained=False))
    messages = []
    for behind, tensors in _gathered(zero, profile):
        nbytes, beside = size * _padded(tensors, plan.dp), _beside(zero, plan, behind)
        calls = _gatherings(zero, tensors)
        messages.append(Traffic("all_gather", nbytes, calls, "micro_batch", beside, *group))
    bucket = int(zero.get("reduce_bucket_size", 500_000_000))
    trained = parameter_shapes(profile)
    nbytes, beside = size * _padded(trained, plan.dp), _beside(zero, plan, "backward")
    calls = message_count(map(math.prod, reversed(trained)), bucket)
    messages.append(Traffic("reduce_scatter", nbytes, calls, "micro_batch", beside, *group))
    if persisting:
        nbytes, calls = size * _padded(persisting, plan.dp), _gatherings(zero, persisting)
        messages.append(Traffic("all_gather", nbytes, calls, "step", "nothing", *group))
    return messages


def _flat_moves(zero: dict[str, Any], profile: Profile, plan: Plan) -> list[Traffic]:
    """Stages 1 and 2 with the update on the host: gradients over, values back."""
    if json_section(zero, "offload_optimizer").get("device", "none") == "none":
        return []
    own_elements = -(-profile.trained_elements // plan.dp)
    calls = -(-len(parameter_shapes(profile)) // plan.dp)
    own_bytes, steps = precision_of(plan) * own_elements, plan.batch.accumulation_steps
    messages = [
        Traffic("to_host", 4 * own_elements, calls, "step", "backward"),
        Traffic("from_host", own_bytes, 1, "step", "nothing"),
    ]
    if steps > 1:  # what waits on the host comes over to be added to, and at the end once more
        times = steps if zero["stage"] == 2 else 1
        messages.append(Traffic("to_host", times * own_bytes, times * calls, "step", "backward"))
        messages.append(Traffic("from_host", times * own_bytes, times * calls, "step", "backward"))
    return messages


def _cut_moves(zero: dict[str, Any], profile: Profile, plan: Plan) -> list[Traffic]:
    """Stage 3: parameters come for each gathering; gradients go, and come back to be added to."""
    size, own_elements = precision_of(plan), -(-profile.trained_elements // plan.dp)
    messages = []
    parameters_away = json_section(zero, "offload_param").get("device", "none") != "none"
    if parameters_away:
        for behind, tensors in _gathered(zero, profile):
            nbytes = size * _padded(tensors, plan.dp) // plan.dp
            beside = _beside(zero, plan, behind)
            messages.append(Traffic("from_host", nbytes, len(tensors), "micro_batch", beside))
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


def _beside(zero: dict[str, Any], plan: Plan, behind: OverlapPhase) -> OverlapPhase:
    """Without `overlap_comm` a GPU has one stream; on a CPU ranks compute in between either way."""
    return behind if plan.device_type == "cpu" or zero.get("overlap_comm", True) else "nothing"


def _reductions(profile: Profile, bucket: int, plan: Plan) -> int:
    """Buckets, and where one holds gradients of two ranks, one message to each."""
    return message_count(map(math.prod, reversed(parameter_shapes(profile))), bucket) + plan.dp - 1


def _padded(tensors: Sequence[tuple[int, ...]], ranks: int) -> int:
    """Numbers, each tensor cut into equal parts."""
    return sum(-(-math.prod(shape) // ranks) * ranks for shape in tensors)


def _gatherings(zero: dict[str, Any], tensors: Sequence[tuple[int, ...]]) -> int:
    """Messages: a tensor at a time where told so, else those of a layer together."""
    if zero.get("stage3_allgather_sequential", False):
        return len(tensors)
    return max(1, sum(len(shape) > 1 for shape in tensors))


def _persistence(
    zero: dict[str, Any], tensors: Sequence[tuple[int, ...]]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Those that are gathered for each use, and the small ones that stay whole."""
    least = int(zero.get("stage3_param_persistence_threshold", 100_000))
    max_persistent = int(zero.get("stage3_model_persistence_threshold", 2**62))
    gathered, persisting, filled = [], [], 0
    for shape in tensors:
        size = math.prod(shape)
        if size <= least and filled + size <= max_persistent:
            persisting.append(shape)
            filled += size
        else:
            gathered.append(shape)
    return gathered, persisting


def _gathered(
    zero: dict[str, Any], profile: Profile
) -> list[tuple[OverlapPhase, list[tuple[int, ...]]]]:
    """What comes in the two passes of a micro-batch."""
    coming, _ = _persistence(zero, parameter_shapes(profile, trained=False))
    return [("forward", coming), ("backward", [*coming, *_again(zero, profile)])]


def _again(zero: dict[str, Any], profile: Profile) -> list[tuple[int, ...]]:
    """What is gathered once more for blocks that are computed again.

    All but the layer that computes last: its backward pass begins where that ends.
    """
    found: list[tuple[int, ...]] = []
    for name, first, _ in profile.windows:
        if name in profile.recomputed:
            found += _without_last(first)
    return _persistence(zero, found)[0]


def _without_last(block: BlockTicks) -> list[tuple[int, ...]]:
    """The parameters of a block but for its last matrix and what follows it."""
    shapes = list(block.shapes)
    while shapes and len(shapes[-1]) < 2:
        shapes.pop()
    return shapes[:-1]
