"""The traffic of fairscale's stages.

Runs have confirmed the numbers of stages 1 and 2. Those of stage 3 follow fairscale's code.
"""

from __future__ import annotations

import math

from bigtrain.core.replicas import BUCKET_SIZE
from bigtrain.core.strategy import Plan
from bigtrain.costs.forecast import Profile
from bigtrain.costs.traffic import (
    Traffic,
    buffer_broadcast_traffic,
    gradient_average_traffic,
    message_count,
    parameter_shapes,
)
from bigtrain.strategies.zero import Zero
from bigtrain.strategies.zero.on_fairscale.memory import bucket_mib
from bigtrain.units import MIB


def fairscale_traffic(options: Zero, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
    """Return the messages of a rank; none if there is one rank.

    Args:
        options: the stage and the size of a bucket.
        profile: the profile of one process.
        plan: the mesh.
    """
    if plan.dp == 1:
        return ()
    return {1: _averaged, 2: _reduced, 3: _gathered}[options.stage](options, profile, plan)


def _averaged(options: Zero, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
    """Return DDP's average of stage 1, and the broadcast of each rank's updated parameters."""
    bucket, stride = options.bucket_size or BUCKET_SIZE, plan.pp * plan.tp
    return (
        *gradient_average_traffic(profile, plan.dp, stride, bucket=bucket, overlaps=True),
        _broadcast(profile, plan),
    )


def _reduced(
    options: Zero,  # noqa: ARG001
    profile: Profile,
    plan: Plan,
) -> tuple[Traffic, ...]:
    """Return the messages of stage 2.

    In each micro-batch each gradient is reduced to the rank that updates its parameter, and buffers
    are broadcast. After the step the updated parameters are broadcast.
    """
    stride, calls = plan.pp * plan.tp, len(parameter_shapes(profile))
    sent = Traffic(
        "reduce", profile.gradient_bytes, calls, "micro_batch", "backward", plan.dp, stride
    )
    follow = (
        [buffer_broadcast_traffic(profile, plan.dp, stride, "micro_batch")]
        if profile.buffer_bytes
        else []
    )
    return (sent, *follow, _broadcast(profile, plan))


def _gathered(options: Zero, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
    """Return the messages of stage 3, all in fp32.

    Parameters are gathered one by one, and gradients are reduced in buckets.
    """
    stride = plan.pp * plan.tp
    every, trained = parameter_shapes(profile, trained=False), parameter_shapes(profile)
    parameter_bytes = [4 * -(-math.prod(shape) // plan.dp) * plan.dp for shape in every]
    back = [4 * -(-math.prod(shape) // plan.dp) * plan.dp for shape in trained]
    calls = message_count(reversed(back), bucket_mib(options) * MIB)
    return (
        Traffic(
            "all_gather",
            sum(parameter_bytes),
            len(every),
            "micro_batch",
            "forward",
            plan.dp,
            stride,
        ),
        Traffic(
            "all_gather",
            sum(parameter_bytes),
            len(every),
            "micro_batch",
            "backward",
            plan.dp,
            stride,
        ),
        Traffic("reduce_scatter", sum(back), calls, "micro_batch", "backward", plan.dp, stride),
    )


def _broadcast(profile: Profile, plan: Plan) -> Traffic:
    """Return the broadcast of updated parameters, one buffer for each rank."""
    stride = plan.pp * plan.tp
    return Traffic("broadcast", profile.gradient_bytes, plan.dp, "step", "nothing", plan.dp, stride)
