"""Measure the seconds that a CPU takes to issue an exchange, in addition to the exchange itself.

`link_rates` measures bare exchanges. In a step, `fully_shard` also runs hooks around each unit and
looks up the unit's parameters. An action of a pipeline's schedule looks up tables and walks the
autograd graph. On a GPU this time overlaps with computation. All functions are collective.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from bigtrain.ranks.context import RunContext

WIDTH = 32
"""The width of the layers, so small that their computation takes almost no time."""
UNITS = 12
"""The number of layers that are sharded."""
STAGES, MICRO_BATCHES = 4, 2
"""The number of stages of each rank, and of micro-batches for each rank."""


def unit_seconds(context: RunContext, gather: float, reduce: float) -> tuple[float, float]:
    """Return the seconds to issue an all-gather and a reduce-scatter in the hooks of `fully_shard`.

    Args:
        context: the context of all ranks; the layers are sharded over them.
        gather: the seconds of a bare small all-gather, which are subtracted.
        reduce: the seconds of a bare small reduce-scatter, which are subtracted.

    Raises:
        ValueError: there is only one rank.
    """
    group = context.group()
    if group is None:
        raise ValueError("one rank cannot shard: at least 2 are needed")
    mesh = DeviceMesh.from_group(group, context.device.type)
    rows = torch.ones(8, WIDTH)

    def step(gathers: int) -> Callable[[], None]:
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))
        for layer in layers if gathers else ():
            fully_shard(layer, mesh=mesh, reshard_after_forward=gathers == 2)
        if gathers:
            fully_shard(layers, mesh=mesh)

        def run() -> None:
            layers(rows).sum().backward()
            for parameter in layers.parameters():
                parameter.grad = None

        return run

    # Steps without shards, with one all-gather of each layer, and with another all-gather in the
    # backward pass.
    plain, once, twice = _alternating([step(gathers) for gathers in range(3)])
    again = (twice - once) / UNITS
    return max(0.0, again - gather), max(0.0, (once - plain) / UNITS - again - reduce)


def action_seconds(context: RunContext, send: float) -> float:
    """Return the seconds of an action of a pipeline's schedule without computation and message.

    Args:
        context: the context of all ranks, each of which gets several stages.
        send: the seconds of a small message, which are subtracted.
    """
    ranks, micro_batches = context.world_size, MICRO_BATCHES * context.world_size
    count, rows = STAGES * ranks, torch.ones(micro_batches, WIDTH)

    def loss(output: Tensor, _target: Tensor) -> Tensor:
        return output.sum()

    stages = [
        PipelineStage(nn.Linear(WIDTH, WIDTH), number, count, context.device, group=context.group())
        for number in range(context.rank, count, ranks)
    ]
    schedule = ScheduleInterleaved1F1B(stages, micro_batches, loss)  # type: ignore[arg-type]

    def step() -> None:
        inputs = (rows,) if context.rank == 0 else ()
        schedule.step(*inputs, target=rows if context.rank == ranks - 1 else None)

    (seconds,) = _alternating([step], warm=1, times=5)
    # Each stage has an action for the forward and for the backward pass of each micro-batch. In the
    # bubble a rank idles for the time of one action of each other rank.
    actions = 2 * (STAGES * micro_batches + ranks - 1)
    return max(0.0, seconds / actions - send)


def _alternating(steps: Sequence[Callable[[], None]], warm: int = 2, times: int = 8) -> list[float]:
    """Return the median seconds of each step.

    The steps alternate, so that changes of the machine's speed affect all of them alike.
    """
    taken: list[list[float]] = [[] for _ in steps]
    for _ in range(warm + times):
        for step, seconds in zip(steps, taken, strict=True):
            began = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - began)
    return [statistics.median(seconds[warm:]) for seconds in taken]
