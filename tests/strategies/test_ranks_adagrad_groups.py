"""DeepSpeed steps the Adagrad that it receives, with the options of its groups."""

from __future__ import annotations

import pytest
import torch
from support.ranks import run_ranks
from torch import nn

from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import MeanLoss

STEPS = 4


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))


def adagrad(parameters):
    """Two groups that differ in every option of Adagrad."""
    listed = list(parameters)
    first = {"params": listed[:2], "lr": 0.1, "eps": 1e-2}
    last_group = {"params": listed[2:], "lr": 0.02, "weight_decay": 0.3}
    return torch.optim.Adagrad([first, last_group], initial_accumulator_value=0.5)


def batch(step):
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(8, 12, generator=drawn), torch.randn(8, 4, generator=drawn)


def plain_losses():
    model, losses = net(), []
    optimizer = adagrad(model.parameters())
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def train_on_rank(context, strategy):
    """The losses of a few steps on this rank's rows."""
    job = job_from_keys(strategy, {"train.global_batch_size": 8})
    rows = slice(4 * context.dp_rank, 4 * context.dp_rank + 4)
    with Engine(net(), MeanLoss(nn.functional.mse_loss), adagrad, job, context) as engine:
        return [engine.step(tuple(t[rows] for t in batch(n))).loss for n in range(STEPS)]


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_an_adagrad_with_groups_is_that_of_one_process(strategy):
    losses = run_ranks(train_on_rank, 2, strategy, timeout_s=150)[0]
    assert losses == pytest.approx(plain_losses(), rel=1e-5)
