"""One run under a strategy, with everything that must equal the run of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bigtrain.data import GlobalOrder, StepLoader
from bigtrain.data.source import Samples
from bigtrain.distributed import RunContext
from bigtrain.engine import Engine
from bigtrain.loading import job_of
from bigtrain.tasks import CrossEntropy


@dataclass
class Record:
    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-2)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def train(
    context: RunContext,
    model: Callable[[], nn.Module],
    samples: Samples,
    strategy: str,
    keys: dict[str, Any],
    steps: int = 6,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
) -> Record:
    """Train and keep losses, norms, gradients before each step, and the final weights."""
    job = job_of(strategy, {"train.global_batch_size": 8, **keys})
    loss = CrossEntropy()
    with Engine(model, loss, optimizer, job, context) as engine:
        names = {id(p): n for n, p in engine.model.named_parameters()}
        record = Record([], [], [], {})

        def keep(of: torch.optim.Optimizer, *_: Any) -> None:
            groups = [p for group in of.param_groups for p in group["params"]]
            record.gradients.append({names[id(p)]: p.grad.detach().clone() for p in groups})

        engine.runner.optimizer.register_step_pre_hook(keep)
        loader = StepLoader(
            samples,
            GlobalOrder(len(samples), engine.plan.batch.global_size, seed=3),
            count=loss.count,
            dp_rank=context.dp_rank,
            dp_size=context.dp_size,
            micro_batch_size=engine.plan.batch.micro_size,
        )
        for _, batch in zip(range(steps), loader, strict=False):
            result = engine.step(batch)
            record.losses.append(result.loss)
            record.norms.append(result.grad_norm)
        record.weights = {n: t.clone() for n, t in engine.model.state_dict().items()}
        return record


def largest_difference(one: Record, other: Record) -> float:
    """The largest absolute difference in losses, norms, gradients and weights."""
    pairs = [(torch.tensor(one.losses), torch.tensor(other.losses))]
    pairs.append((torch.tensor(one.norms), torch.tensor(other.norms)))
    for mine, theirs in zip(one.gradients, other.gradients, strict=True):
        assert mine.keys() == theirs.keys()
        pairs += [(mine[name], theirs[name]) for name in mine]
    assert one.weights.keys() == other.weights.keys()
    pairs += [(one.weights[name], other.weights[name]) for name in one.weights]
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel())
