"""Gradients that a model or a loss computes itself: as in a plain loop, or refused in one line.

A gradient penalty (double backward), an adversarial step on the inputs, and a weight that follows
from gradients, each under every kind of strategy. The reference is a plain torch loop on whole
batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.parity import sgd
from support.ranks import run_ranks
from torch import Tensor, nn

import bigtrain
from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.engine import Engine
from bigtrain.engine.first_batch import example_batch
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import as_loss

ROWS, STEPS = 8, 3


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 4, generator=draw), torch.randint(0, 3, (ROWS,), generator=draw)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = (4, 16, 16, 16)
        self.blocks = nn.ModuleList(
            nn.Linear(*pair) for pair in zip(sizes, sizes[1:], strict=False)
        )
        self.head = nn.Linear(16, 3)

    def logits(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)

    def forward(self, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        return {"x": x, "y": self.logits(x)}


class Penalised(Net):
    """Its forward pass computes a gradient with a graph (`create_graph`)."""

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():  # also in evaluation
            output = super().forward(x)
            (slope,) = torch.autograd.grad(output["y"].sum(), output["x"], create_graph=True)
        return {"y": output["y"], "penalty": (slope.norm(dim=1) - 1).square()}


class Adversarial(Net):
    """Its inputs first take an adversarial step, along a gradient without a graph."""

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            output = super().forward(x)
            (slope,) = torch.autograd.grad(output["y"].square().sum(), output["x"])
        return {"y": self.logits(x + 0.1 * slope.sign())}


def plain_loss(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output["y"], targets)


def with_penalty(output: Any, targets: Tensor) -> Tensor:
    return plain_loss(output, targets) + 0.1 * output["penalty"].mean()


def penalty_in_loss(output: Any, targets: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(output["y"].sum(), output["x"], create_graph=True)
    return plain_loss(output, targets) + 0.1 * (slope.norm(dim=1) - 1).square().mean()


def weighted_by_gradients(output: Any, targets: Tensor) -> Tensor:
    each = F.cross_entropy(output["y"], targets, reduction="none")
    (slope,) = torch.autograd.grad(each.sum(), output["x"], retain_graph=True)
    return (each * (1 + slope.norm(dim=1))).mean()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "penalty in the model": (Penalised, with_penalty),
    "penalty in the loss": (Net, penalty_in_loss),
    "adversarial inputs": (Adversarial, plain_loss),
    "weights by gradients": (Net, weighted_by_gradients),
}
IN_LOSS = ("penalty in the loss", "weights by gradients")


def plain_loop(case: str) -> list[float]:
    make, loss = CASES[case]
    torch.manual_seed(0)
    model, losses = make(), []
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


def train_all(context: Any, strategy: str, has_example: int) -> Any:
    """The losses of each case, or the message of its refusal."""
    outcomes: dict[str, Any] = {}
    for case, (make, loss) in CASES.items():
        sizes = {"train.global_batch_size": ROWS, "train.micro_batch_size": 2, "device": "cpu"}
        job = job_from_keys(strategy, {**sizes, "memory.track_steps": 0})
        plan = make_plan(job, context.world_size, "cpu")
        each = ROWS // context.dp_size
        rank_rows = slice(context.dp_rank * each, (context.dp_rank + 1) * each)
        torch.manual_seed(0)
        # The divisor of such a loss cannot be followed, so it is stated: its mean is over rows.
        prepared_loss = (
            bigtrain.MeanLoss(loss, count_of="rows") if case in IN_LOSS else as_loss(loss)
        )
        model, inputs = make(), batch(0)
        first = (
            example_batch((inputs[0][:2], inputs[1][:2]), prepared_loss, job, plan)
            if has_example
            else None
        )
        try:
            with Engine(model, prepared_loss, sgd, job, context, example=first) as engine:
                steps = [(x[rank_rows], y[rank_rows]) for x, y in map(batch, range(STEPS))]
                outcomes[case] = [engine.step(step).loss for step in steps]
        except ConfigError as error:
            outcomes[case] = str(error)
    return outcomes


HELD = ("single", "ddp", "ddp+full", "zero1_torch", "ddp+offload_disk", "oss")
OTHERS = ("fsdp", "zero1", "zero2", "zero3", "1f1b", "tensor")


@pytest.mark.parametrize(
    "strategy",
    [*HELD, *OTHERS],
)
def test_it_is_as_in_a_plain_loop_or_refused_in_a_line(strategy):
    axes = {"1f1b": {"pp": 2}, "tensor": {"tp": 2}}.get(strategy, {})
    ranks = 1 if strategy == "single" else 2
    (outcomes, *other_ranks) = run_ranks(train_all, ranks, strategy, 1, **axes)
    assert all(rank_outcomes == outcomes for rank_outcomes in other_ranks)
    for case, outcome in outcomes.items():
        if isinstance(outcome, str):
            assert strategy in OTHERS, outcome
            assert "\n" not in outcome
            assert "asks" in outcome or "a gradient is asked for" in outcome
            assert "se --strategy" in outcome or "Use a strategy without a cut" in outcome
        else:
            assert outcome == pytest.approx(plain_loop(case), rel=1e-5), case
    refused = {case for case, outcome in outcomes.items() if isinstance(outcome, str)}
    assert refused >= (set(IN_LOSS) if strategy in OTHERS else set())
    assert ("penalty in the model" in refused) is (strategy in ("fsdp", "zero3", "1f1b", "tensor"))


def test_without_an_example_it_is_refused_at_the_first_step():
    for outcomes in run_ranks(train_all, 2, "fsdp", 0):
        for case in ("penalty in the model", *IN_LOSS):
            assert "which strategy fsdp does not support" in outcomes[case]
            assert "use --strategy zero1_torch" in outcomes[case].replace("Use", "use")
