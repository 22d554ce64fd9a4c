"""What it costs on a CPU to issue an exchange, beside the exchange itself.

`link_rates` calls exchanges by themselves. `fully_shard` runs hooks around each unit and looks up
what belongs to it; an action of a pipeline's schedule looks up tables and walks the graph. On a GPU
that goes on while the device computes. All functions are collective.
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
"""Of layers that have hardly any work."""
UNITS = 12
STAGES, MICRO_BATCHES = 4, 2
"""Stages of a rank, and micro-batches for each rank."""


def unit_seconds(context: RunContext, gather: float, reduce: float) -> tuple[float, float]:
    """Seconds to issue an all-gather, and a reduce-scatter, in the hooks of `fully_shard`.

    Args:
        context: of all ranks, over which units are sharded.
        gather: seconds of an all-gather of so few numbers by itself.
        reduce: the same of a reduce-scatter.
    """
    group = context.group()
    if group is None:
        raise ValueError("one rank has nobody to shard with")
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

    plain, once, twice = _in_turn([step(gathers) for gathers in range(3)])
    again = (twice - once) / UNITS
    return max(0.0, again - gather), max(0.0, (once - plain) / UNITS - again - reduce)


def action_seconds(context: RunContext, send: float) -> float:
    """Seconds of an action of a pipeline's schedule beside its computing and its message.

    Args:
        context: of all ranks; each has several stages.
        send: seconds of a small message.
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
        given = (rows,) if context.rank == 0 else ()
        schedule.step(*given, target=rows if context.rank == ranks - 1 else None)

    (seconds,) = _in_turn([step], warm=1, times=5)
    # There and back; a rank is idle at the beginning and at the end for one action of each other.
    actions = 2 * (STAGES * micro_batches + ranks - 1)
    return max(0.0, seconds / actions - send)


def _in_turn(steps: Sequence[Callable[[], None]], warm: int = 2, times: int = 8) -> list[float]:
    """The usual seconds of each."""
    taken: list[list[float]] = [[] for _ in steps]
    for _ in range(warm + times):
        for step, own in zip(steps, taken, strict=True):
            began = time.perf_counter()
            step()
            own.append(time.perf_counter() - began)
    return [statistics.median(own[warm:]) for own in taken]
