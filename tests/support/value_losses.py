"""Losses that read values, and a model that changes the objects that its modules return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from support.frozen_stages import WIDTH, Layer
from support.routed import sgd
from torch import Tensor, nn
from torch.nn import functional

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.engine import Engine
from bigtrain.engine.first_batch import example_batch
from bigtrain.errors import BigtrainError
from bigtrain.job.load import job_from_keys
from bigtrain.ranks.context import RunContext

ROWS, TIMES = 8, 12


class Words(nn.Module):
    """Log probabilities of five words at each time: (rows, times, width) to (rows, times, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).log_softmax(-1)


@dataclass
class Output:
    """An object with tensors as attributes."""

    hidden: Tensor
    pooled: Tensor | None = None


class Part(Layer):
    """A layer that returns an object."""

    def forward(self, x: Tensor) -> Output:
        hidden = super().forward(x)
        return Output(hidden, hidden[:, 0])


class Changing(nn.Module):
    """Changes the fields of an object that a module has returned, and adds or removes fields."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Part() for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            output = layer(x)
            if number % 2:
                output.pooled = None
            else:
                output.hidden = output.hidden + output.pooled[:, None]
            x = output.hidden
        return self.head(x).log_softmax(-1)


def ctc(output: Tensor, targets: Tensor) -> Tensor:
    """CTC loss; its kernel reads the length of each target."""
    times = torch.full((output.shape[0],), output.shape[1])
    lengths = (targets > 0).sum(1)
    by_time = output.transpose(0, 1)
    return functional.ctc_loss(by_time, targets, times, lengths, reduction="none").mean()


def chosen(output: Tensor, targets: Tensor) -> Tensor:
    """The negative log-likelihood of the first times, selected by a mask over all rows."""
    keep = targets > 0
    return functional.nll_loss(output[:, : targets.shape[1]][keep], targets[keep])


def rows_of(step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step: (rows, times, width) and targets (rows, 4)."""
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, TIMES, WIDTH, generator=draw)
    return x, torch.randint(1, 5, (ROWS, 4), generator=draw)


MeanOf = Callable[[Tensor, Tensor], Tensor]
CASES: dict[str, tuple[type[nn.Module], MeanOf]] = {
    "ctc": (Words, ctc),
    "chosen": (Words, chosen),
    "changing": (Changing, chosen),
}


class SumOverRows:
    """A mean loss in which every row counts equally, converted to a sum."""

    def __init__(self, mean: MeanOf) -> None:
        self._mean = mean

    def __call__(self, output: Tensor, targets: Tensor, count: int) -> Tensor:
        return self._mean(output, targets) * count

    def count(self, targets: Tensor) -> int:
        return len(targets)


def plain_losses(case: str, steps: int) -> list[float]:
    """The losses of a loop in plain torch."""
    torch.manual_seed(0)
    net, loss = CASES[case][0](), CASES[case][1]
    optimizer, losses = sgd(net.parameters()), []
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(net(rows_of(step)[0]), rows_of(step)[1])
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


def strategy_losses(
    context: RunContext, case: str, strategy: str, keys: dict[str, Any], steps: int
) -> tuple[list[float], str | None]:
    """The losses of a strategy and its refusal, or None. Every row counts equally."""
    torch.manual_seed(0)
    net, losses = CASES[case][0](), []
    loss = SumOverRows(CASES[case][1])
    job_keys = {"train.global_batch_size": ROWS, "train.micro_batch_size": 2}
    job = job_from_keys(strategy, job_keys | keys)
    try:
        plan = make_plan(job, context.world_size, context.device.type)
        example = example_batch(tuple(t[:2] for t in rows_of(0)), loss, job, plan)
        with Engine(net, loss, sgd, job, context, example=example) as engine:
            rows = ROWS // context.dp_size
            for step in range(steps):
                first = context.dp_rank * rows
                batch = tuple(t[first : first + rows] for t in rows_of(step))
                losses.append(engine.step(batch).loss)
    except BigtrainError as error:
        return losses, str(error)
    return losses, None
