"""Nets in which some modules or parameters do not take part in every step."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.engine import Engine
from bigtrain.engine.first_batch import example_batch
from bigtrain.errors import BigtrainError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import as_loss
from bigtrain.ranks.context import RunContext

WIDTH = 32
ROWS = 16


class Tower(nn.Module):
    """A residual MLP."""

    def __init__(self, inner: int = 48) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Routed(nn.Module):
    """The base class: a layer before and a layer after the routed part."""

    sizes: tuple[int, ...] = (48, 48)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.towers = nn.ModuleList(Tower(size) for size in self.sizes)

    def route(self, x: Tensor, _kind: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.head(torch.tanh(self.route(self.first(batch["x"]), batch["kind"])))

    def at_step(self, step: int) -> None:
        """Called by the user's loop before each step."""


class Towers(Routed):
    """Each row goes through the tower of its language; a tower without rows is not called."""

    def route(self, x: Tensor, kind: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, tower in enumerate(self.towers):
            rows = (kind == number).nonzero()[:, 0]
            if rows.numel():
                out = out.index_copy(0, rows, tower(x[rows]))
        return out


class Sizes(Towers):
    """Towers of different sizes."""

    sizes = (48, 16)


class Masked(Routed):
    """A mixture of experts with a mask, the selected rows, and an in-place addition."""

    sizes = (24, 24, 24)

    def route(self, x: Tensor, kind: Tensor) -> Tensor:
        out = x.clone()
        for number, tower in enumerate(self.towers):
            chosen = kind == number
            if not chosen.any():
                continue
            out.index_add_(0, torch.where(chosen)[0], tower(x[chosen]))
        return out


class Branch(Routed):
    """A number in the batch chooses one of two branches for the whole micro-batch."""

    def route(self, x: Tensor, kind: Tensor) -> Tensor:
        branch = int(kind.max().item())
        return self.towers[branch % 2](x)


class Inside(nn.Module):
    """A mixture of experts as a module, which is called in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Tower(24) for _ in range(2))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (kind == number).nonzero()[:, 0]
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]))
        return x + out


class Layers(Routed):
    """Blocks that are always called, each with experts inside."""

    sizes = ()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Inside() for _ in range(2))

    def route(self, x: Tensor, kind: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, kind)
        return x


class Dropped(Routed):
    """Each process draws a random number in Python that decides whether a layer is skipped."""

    sizes = (24, 24, 24, 24)

    def route(self, x: Tensor, _kind: Tensor) -> Tensor:
        for tower in self.towers:
            if not self.training or random.random() < 0.5:
                x = tower(x)
        return x


class Skip(Routed):
    """A layer without a gradient in every other step, for all rows."""

    steps = 0

    def route(self, x: Tensor, _kind: Tensor) -> Tensor:
        return self.towers[1](self.towers[0](x)) if self.steps % 2 else self.towers[0](x)

    def at_step(self, step: int) -> None:
        self.steps = step + 1


class SkipInside(Skip):
    """The same, but the model itself counts its passes."""

    def route(self, x: Tensor, kind: Tensor) -> Tensor:
        self.steps += self.training
        return super().route(x, kind)

    def at_step(self, step: int) -> None:
        pass


class SkipOnce(Routed):
    """A layer without a gradient in step 3 only, which no rehearsal sees."""

    skips = False

    def route(self, x: Tensor, _kind: Tensor) -> Tensor:
        x = self.towers[0](x)
        return x if self.skips else self.towers[1](x)

    def at_step(self, step: int) -> None:
        self.skips = step == 3


class Hidden(Routed):
    """From step 2 each rank takes a different branch, by a value that no tensor shows."""

    way: int | None = None

    def route(self, x: Tensor, _kind: Tensor) -> Tensor:
        if self.way is not None:
            return self.towers[self.way](x)
        return self.towers[1](self.towers[0](x))

    def at_step(self, step: int) -> None:
        if step >= 2 and torch.distributed.is_initialized():
            self.way = torch.distributed.get_rank() % 2


class Late(Routed):
    """A parameter that is used from step 2."""

    use = False

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(WIDTH))

    def route(self, x: Tensor, _kind: Tensor) -> Tensor:
        for tower in self.towers:
            x = tower(x)
        return x * self.gamma if self.use else x

    def at_step(self, step: int) -> None:
        self.use = step >= 2


class LateModule(Late):
    """A whole module that is called from step 2."""

    def route(self, x: Tensor, _kind: Tensor) -> Tensor:
        return self.towers[1](self.towers[0](x)) if self.use else self.towers[0](x)


class Unfrozen(Routed):
    """A layer that the loop unfreezes at step 2."""

    def __init__(self) -> None:
        super().__init__()
        self.towers[0].requires_grad_(False)

    def route(self, x: Tensor, _kind: Tensor) -> Tensor:
        return self.towers[1](self.towers[0](x))

    def at_step(self, step: int) -> None:
        if step == 2:
            self.towers[0].requires_grad_(True)


class Frozen(Routed):
    """A layer that the loop freezes at step 2."""

    def route(self, x: Tensor, _kind: Tensor) -> Tensor:
        return self.towers[1](self.towers[0](x))

    def at_step(self, step: int) -> None:
        if step == 2:
            self.towers[0].requires_grad_(False)


ROUTED: dict[str, type[Routed]] = {
    c.__name__: c
    for c in (
        *(Towers, Sizes, Masked, Branch, Layers, Dropped),
        *(Skip, SkipInside, SkipOnce, Hidden, Late, LateModule, Unfrozen, Frozen),
    )
}
"""The nets by name."""

sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def rows_of(step: int) -> tuple[dict[str, Tensor], Tensor]:
    """A global batch: the first half of the rows has one kind, the second half the other."""
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=draw)
    kind = torch.tensor([0] * (ROWS // 2) + [1] * (ROWS // 2))
    return {"x": x, "kind": kind}, torch.randint(0, 4, (ROWS,), generator=draw)


def rows_of_batch(
    batch: tuple[dict[str, Tensor], Tensor], rows: slice
) -> tuple[dict[str, Tensor], Tensor]:
    """Some rows of a batch."""
    return {key: value[rows] for key, value in batch[0].items()}, batch[1][rows]


def plain_losses(
    name: str, steps: int, make: MakeOptimizer = sgd, micro_rows: int = ROWS
) -> list[float]:
    """The losses of a plain torch loop, whose optimizer receives all parameters.

    Micro-batches are run one by one if a net's branch depends on a whole micro-batch.
    """
    torch.manual_seed(0)
    net, losses = ROUTED[name](), []
    optimizer = make(net.parameters())
    for step in range(steps):
        net.at_step(step)
        optimizer.zero_grad()
        total = 0.0
        for start in range(0, ROWS, micro_rows):
            inputs, targets = rows_of_batch(rows_of(step), slice(start, start + micro_rows))
            loss = functional.cross_entropy(net(inputs), targets, reduction="sum") / ROWS
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses


def routed_losses(
    context: RunContext,
    name: str,
    strategy: str,
    keys: dict[str, Any],
    steps: int,
    make: MakeOptimizer = sgd,
) -> tuple[list[float], str | None, list[str]]:
    """The losses of a strategy until it refuses, the refusal, and the lines about the choices."""
    torch.manual_seed(0)
    net, losses, notes = ROUTED[name](), [], []
    job = job_from_keys(
        strategy, {"train.global_batch_size": ROWS, "train.micro_batch_size": 4} | keys
    )
    loss = functional.cross_entropy
    try:
        plan = make_plan(job, context.world_size, context.device.type)
        example = example_batch(rows_of_batch(rows_of(0), slice(0, 4)), as_loss(loss), job, plan)
        with Engine(net, loss, make, job, context, example=example) as engine:
            notes = list(engine.notes)
            rows = ROWS // context.dp_size
            for step in range(steps):
                engine.model.at_step(step)
                first = context.dp_rank * rows
                batch = rows_of_batch(rows_of(step), slice(first, first + rows))
                losses.append(engine.step(batch).loss)
    except BigtrainError as error:
        return losses, str(error), notes
    return losses, None, notes
