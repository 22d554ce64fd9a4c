"""Models and runs whose gradients are freed inside the backward pass."""

from __future__ import annotations

import torch
from support.nets import TinyLM, tokens
from support.whole import whole_tensors
from torch import nn

from bigtrain.assembly.make_plan import make_plan
from bigtrain.data import GlobalOrder, StepLoader
from bigtrain.engine.engine import Engine
from bigtrain.errors import NonFiniteError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.optim.factory import optimizer_factory
from bigtrain.ranks.context import RunContext

RELEASE = {"optim.release_gradients": True}


class Block(nn.Module):
    """A residual linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + self.inner(x)


class Deep(nn.Module):
    """Equal layers, so that each gradient is a small part of all, and small activations."""

    def __init__(self, layers: int = 20, width: int = 768) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 13)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(context, strategy, keys, model=TinyLM, steps=5):
    """Return step results, final weights, and the measured and the predicted peak of this rank."""
    job = job_from_keys(strategy, {"train.global_batch_size": 8, "optim.lr": 1e-2, **keys})
    samples, loss = tokens(40), CrossEntropy()

    def loader(rows=None, **more):
        order = GlobalOrder(len(samples), rows or 8, seed=3)
        return StepLoader(samples, order, count=loss.count, **more)

    plan = make_plan(job, context.world_size, "cpu")
    size = plan.batch.micro_size
    example = next(iter(loader(size, micro_batch_size=size))).micro_batches[0]
    made = optimizer_factory(job.optim)
    options = {"example": example, "learning_rate": lambda step: 1e-2 / (step + 1)}
    with Engine(model, loss, made, job, context, **options) as engine:
        ranks = {"dp_rank": context.dp_rank, "dp_size": context.dp_size}
        batches = loader(micro_batch_size=size, **ranks)
        results = [engine.step(b) for _, b in zip(range(steps), batches, strict=False)]
        weights = whole_tensors(engine.runner.state())
        measured = engine.meter.measured().peak
    return results, weights, measured, engine.prediction.peak


def train_alone(keys, **more):
    """`train` in this process alone."""
    return train(RunContext.alone(torch.device("cpu")), "single", keys, **more)


class Broken(TinyLM):
    """Returns a loss that is not finite, or a finite loss with an infinite gradient."""

    def __init__(self, where="loss") -> None:
        super().__init__()
        self.where = where

    def forward(self, x):
        y = super().forward(x)
        if self.where == "loss":
            return y * float("nan")
        y.register_hook(lambda gradient: gradient * float("inf"))
        return y


def run_broken(context, where, strategy):
    """Run a step of `Broken`; return the message of its error and whether all weights
    are finite.
    """
    job = job_from_keys(strategy, {"train.global_batch_size": 8, **RELEASE})
    samples, loss = tokens(16), CrossEntropy()
    made = optimizer_factory(job.optim)
    rows = 8 // context.world_size
    order = GlobalOrder(len(samples), 8, seed=3)
    loader = StepLoader(
        samples,
        order,
        count=loss.count,
        micro_batch_size=rows,
        dp_rank=context.dp_rank,
        dp_size=context.dp_size,
    )
    with Engine(lambda: Broken(where), loss, made, job, context) as engine:
        try:
            engine.step(next(iter(loader)))
        except NonFiniteError as error:
            weights = list(whole_tensors(engine.runner.state()).values())
            return str(error), all(bool(w.isfinite().all()) for w in weights)
    return None
