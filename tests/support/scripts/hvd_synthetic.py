"""A Horovod script like those that measure images per second.

Argument: a file for its losses.
"""

import json
import sys
import timeit
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import bigtrain.hvd as hvd  # was: import horovod.torch as hvd

BATCH, STEPS, ITERATIONS, LR = 8, 2, 3, 0.01


def net() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 10))


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a rank, the same in every step."""
    drawn = torch.Generator().manual_seed(rank)
    pixels = torch.randn(BATCH, 3, 8, 8, generator=drawn, dtype=torch.float64)
    return pixels, torch.randint(0, 10, (BATCH,), generator=drawn)


def log(line: str) -> None:
    if hvd.rank() == 0:
        print(line)


def main(file: str) -> None:
    torch.set_default_dtype(torch.float64)
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR * hvd.size())
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data, target = batch(hvd.rank())
    losses = []

    def step() -> None:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    for number in range(ITERATIONS):
        seconds = timeit.timeit(step, number=STEPS)
        log(f"Iter #{number}: {BATCH * STEPS / seconds:.1f} img/sec")
    log(f"Number of ranks: {hvd.size()}")
    if hvd.rank() == 0:
        Path(file).write_text(json.dumps(losses))


if __name__ == "__main__":
    main(*sys.argv[1:])
