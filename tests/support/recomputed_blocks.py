"""Blocks with unusual inputs and effects, and the recomputation that is chosen for them."""

from __future__ import annotations

from typing import Any

import torch
from support.parity import adamw
from support.recomputed import RECOMPUTE
from torch import nn

from bigtrain.assembly.make_plan import make_plan
from bigtrain.assembly.resolve import resolve_plan
from bigtrain.core.workload import Workload
from bigtrain.data import MicroBatch
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy


def plainly(block, x):
    """Call a block with one positional argument."""
    return block(x)


class Blocks(nn.Module):
    """Blocks of one kind; the function `call` calls each of them."""

    def __init__(self, kind, call=plainly, count=3) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.layers = nn.ModuleList(kind() for _ in range(count))
        self.head = nn.Linear(16, 3)
        self.call = call

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = self.call(layer, x)
        return self.head(x)


class Inner(nn.Module):
    """A block with dropout, which accepts further tensors and a list that it appends to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(16, 16), nn.Linear(16, 16), nn.Dropout(0.3)

    def forward(self, x=None, many=(), seen=None):
        for extra in many:
            x = extra if x is None else x + extra
        if seen is not None:
            seen.append(len(seen))
            x = x * len(seen)
        return x + self.b(self.drop(torch.tanh(self.a(x))))


class ChangesItsInput(nn.Module):
    """A block that changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x.mul_(0.5))))


def rows() -> tuple[Any, Any]:
    """Inputs (12, 8) and targets (12,)."""
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(7)), torch.arange(12) % 3


def resolved_plan_for(model, budget):
    """The plan of one process with this recomputation budget, resolved for the model."""
    job = job_from_keys("single", {"train.global_batch_size": 12, f"{RECOMPUTE}.budget": budget})
    loss = CrossEntropy()
    inputs, targets = rows()
    example = MicroBatch(inputs, targets, loss.count(targets), len(inputs))
    return resolve_plan(make_plan(job, 1, "cpu"), Workload(model(), example, loss, adamw))
