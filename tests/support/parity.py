"""One run under a strategy, with all numbers that must equal those of a one-process run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from support.whole import whole_tensors
from torch import Tensor, nn

from bigtrain.assembly.make_plan import make_plan
from bigtrain.core.runner import StepLoss
from bigtrain.data import GlobalOrder, Step, StepLoader
from bigtrain.data.source import Samples
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy, Loss
from bigtrain.ranks.context import RunContext

UNSEEN = {"memory.predict": False, "memory.track_steps": 0}
"""Switches off forecast and memory tracking, for tests that do not read them; no number changes."""


@dataclass
class Record:
    """The numbers of a run: one entry per step, and the final weights by name."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """SGD with momentum and weight decay."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-2)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Fused AdamW."""
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def train(
    context: RunContext,
    model: Callable[[], nn.Module],
    samples: Samples,
    strategy: str,
    keys: dict[str, Any],
    steps: int = 6,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    loss: Loss | None = None,
) -> Record:
    """Train; return the losses, norms, gradients before each step, and the final weights."""
    job = job_from_keys(strategy, {"train.global_batch_size": 8, **UNSEEN, **keys})
    loss = loss or CrossEntropy()
    example = None
    # An example lets a strategy cut the model, forecast a budget and find parameters that the loss
    # does not reach. A single process needs none, and so tests the run without one.
    if strategy != "single":
        plan = make_plan(job, context.world_size, context.device.type)
        order = GlobalOrder(len(samples), plan.batch.micro_size, shuffle=False)
        rows = plan.batch.micro_size
        loader = StepLoader(samples, order, count=loss.count, micro_batch_size=rows)
        example = next(iter(loader)).micro_batches[0]
    with Engine(model, loss, optimizer, job, context, example=example) as engine:
        record = Record([], [], [], {})
        update = engine.runner.update

        def keep(loss: StepLoss) -> float:
            gradients = engine.runner.gradients()
            record.gradients.append(whole_tensors(gradients))
            return update(loss)

        engine.runner.update = keep
        for batch in shuffled_steps(engine, samples, loss, steps):
            result = engine.step(batch)
            record.losses.append(result.loss)
            record.norms.append(result.grad_norm)
        whole = whole_tensors(engine.runner.state())
        prefix = "model."
        record.weights = {n[len(prefix) :]: t for n, t in whole.items() if n.startswith(prefix)}
        return record


def train_beside_plain_loop(
    context: RunContext,
    model: Callable[[], nn.Module],
    samples: Samples,
    strategy: str,
    keys: dict[str, Any],
    steps: int = 6,
    *more: Any,
) -> Record:
    """Call `train` with a check of all losses and norms against a plain torch loop."""
    checked = {"train.check_first_steps": steps, **keys}
    return train(context, model, samples, strategy, checked, steps, *more)


def shuffled_steps(engine: Engine, samples: Samples, loss: Loss, steps: int) -> Iterator[Step]:
    """This rank's part of the global batches, in an order that is the same on every mesh."""
    batch = engine.plan.batch
    loader = StepLoader(
        samples,
        GlobalOrder(len(samples), batch.global_size, seed=3),
        count=loss.count,
        dp_rank=engine.plan.data_rank(engine.context.dp_rank),
        dp_size=batch.dp_size,
        micro_batch_size=batch.micro_size,
    )
    return itertools.islice(iter(loader), steps)


def largest_difference(first: Record, second: Record) -> float:
    """The largest absolute difference in losses, norms, gradients and weights."""
    pairs = [(torch.tensor(first.losses), torch.tensor(second.losses))]
    pairs.append((torch.tensor(first.norms), torch.tensor(second.norms)))
    for mine, theirs in zip(first.gradients, second.gradients, strict=True):
        assert mine.keys() == theirs.keys()
        pairs += [(mine[name], theirs[name]) for name in mine]
    assert first.weights.keys() == second.weights.keys()
    pairs += [(first.weights[name], second.weights[name]) for name in first.weights]
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel())
