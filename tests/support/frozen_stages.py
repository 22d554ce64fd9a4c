"""Chains of layers with frozen parts: the first layers, the middle ones or the last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.routed import MakeOptimizer, sgd
from torch import Tensor, nn
from torch.nn import functional

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.engine import Engine
from bigtrain.engine.first_batch import example_batch
from bigtrain.errors import BigtrainError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import as_loss
from bigtrain.ranks.context import RunContext

WIDTH, ROWS, LAYERS = 16, 16, 8


class Layer(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Adapter(nn.Module):
    """A frozen layer with two trained low-rank matrices next to it (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = Layer().requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Chain(nn.Module):
    """Eight layers and a head; the word `frozen` chooses the frozen ones."""

    def __init__(self, frozen: str) -> None:
        super().__init__()
        adapted = range(6, 8) if frozen == "adapted" else range(0)
        self.layers = nn.ModuleList(Adapter() if n in adapted else Layer() for n in range(LAYERS))
        self.head = nn.Linear(WIDTH, 5)
        for number in _FROZEN[frozen]:
            self.layers[number].requires_grad_(False)
        if frozen in ("last", "adapted"):
            self.head.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


_FROZEN = {
    "first": range(4),
    "middle": range(2, 6),
    "last": range(4, 8),
    "adapted": range(6),
}
FROZEN = tuple(_FROZEN)


def rows_of(step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step: (inputs, targets)."""
    draw = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=draw), torch.randint(0, 5, (ROWS,), generator=draw)


def chain_plain(frozen: str, steps: int, make: MakeOptimizer = sgd) -> list[float]:
    """The losses of a loop in plain torch."""
    torch.manual_seed(0)
    net, losses = Chain(frozen), []
    optimizer = make([p for p in net.parameters() if p.requires_grad])
    for step in range(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(rows_of(step)[0]), rows_of(step)[1])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def chain_losses(
    context: RunContext,
    frozen: str,
    strategy: str,
    keys: dict[str, Any],
    steps: int,
    make: MakeOptimizer = sgd,
) -> tuple[list[float], str | None, int]:
    """The losses of a strategy, its refusal or None, and the number of its state tensors."""
    torch.manual_seed(0)
    net, losses = Chain(frozen), []
    job_keys = {
        "train.global_batch_size": ROWS,
        "train.micro_batch_size": 2,
        "optim.clip_norm": 1e9,
    }
    job = job_from_keys(strategy, job_keys | keys)
    loss = functional.cross_entropy
    try:
        plan = make_plan(job, context.world_size, context.device.type)
        first_rows = tuple(t[:2] for t in rows_of(0))
        example = example_batch(first_rows, as_loss(loss), job, plan)
        with Engine(net, loss, make, job, context, example=example) as engine:
            rows = ROWS // context.dp_size
            for step in range(steps):
                first = context.dp_rank * rows
                batch = tuple(t[first : first + rows] for t in rows_of(step))
                losses.append(engine.step(batch).loss)
            state = engine.runner.state()
    except BigtrainError as error:
        return losses, str(error), 0
    return losses, None, len(state)


def chain_resumed(context: RunContext, frozen: str, folder: Path) -> list[float]:
    """Train two steps and save; if there is a checkpoint, load it and train the next two
    instead.
    """
    torch.manual_seed(0)
    strategy = "1f1b" if context.pp_size > 1 else "ddp"
    job_keys = {"train.global_batch_size": ROWS, "train.micro_batch_size": 2}
    job = job_from_keys(strategy, job_keys)
    loss, folder, losses = functional.cross_entropy, folder / frozen, list[float]()
    plan = make_plan(job, context.world_size, context.device.type)
    example = example_batch(tuple(t[:2] for t in rows_of(0)), as_loss(loss), job, plan)
    with Engine(Chain(frozen), loss, sgd, job, context, example=example) as engine:
        saved = folder / "step-2"
        begin = 2 if context.broadcast_object(saved.exists()) else 0
        if begin:
            engine.load(saved)
        rows = ROWS // context.dp_size
        first = context.dp_rank * rows
        for step in range(begin, begin + 2):
            batch = tuple(t[first : first + rows] for t in rows_of(step))
            losses.append(engine.step(batch).loss)
        if not begin:
            engine.save(folder)
    return losses
