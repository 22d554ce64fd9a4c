"""Losses as users write them, under every kind of strategy, compared with a plain torch loop.

The loop is written here: the user's model and function on the whole batch, without bigtrain. Rows
are padded by different lengths, so that ranks and micro-batches differ in their numbers of targets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.nets import TinyLM
from support.parity import sgd
from support.ranks import run_ranks
from torch import Tensor, nn

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.engine import Engine
from bigtrain.engine.first_batch import example_batch
from bigtrain.engine.first_steps import DifferentNumbersError
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import MeanLoss, as_loss

ROWS, STEPS = 8, 3
Batch = tuple[Any, Tensor]


def padded(step: int) -> tuple[Tensor, Tensor]:
    """Rows of 6 tokens; targets beyond a row's length do not count."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randint(0, 13, (ROWS, 6), generator=generator)
    lengths = torch.tensor([6, 2, 6, 3, 6, 6, 2, 5])
    return inputs, inputs.where(torch.arange(6) < lengths[:, None], -100)


def shifted_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def two_means(output: Tensor, target: Tensor) -> Tensor:
    return shifted_loss(output, target) + 0.1 * output.abs().mean()


def masked_loss(output: Tensor, target: Tensor) -> Tensor:
    mask = target != -100
    each = F.cross_entropy(output.transpose(1, 2), target, reduction="none")
    return (each * mask).sum() / mask.sum().clamp(min=1)


class OwnLoss(nn.Module):
    """Returns its loss in addition to its logits, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyLM()  # a name that a stage must not use itself

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = self.model(batch["ids"])
        loss = shifted_loss(logits, batch["labels"]) + 0.1 * logits.square().mean()
        return {"loss": loss, "logits": logits}


class WithPositions(nn.Module):
    """Adds positions that have one row for all samples, times a number without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = TinyLM(), nn.Linear(6, 13)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.net(batch["ids"]) + self.scale(batch["places"])[:, None] * batch["factor"]


def plain(batch: tuple[Tensor, Tensor]) -> Batch:
    return batch


def as_mapping(batch: tuple[Tensor, Tensor]) -> Batch:
    return {"ids": batch[0], "labels": batch[1]}, batch[1]


def with_positions(batch: tuple[Tensor, Tensor]) -> Batch:
    places = torch.linspace(-1, 1, 6)[None]
    return {"ids": batch[0], "places": places, "factor": torch.tensor(0.5)}, batch[1]


def model_loss(output: Any, _: Any) -> Tensor:
    return output["loss"]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Tensor], Any]] = {
    "shifted inside": (TinyLM, shifted_loss, plain),
    "two means of different counts": (TinyLM, two_means, plain),
    "masked by hand": (TinyLM, masked_loss, plain),
    "the model's own": (OwnLoss, model_loss, as_mapping),
    "inputs for all rows": (WithPositions, shifted_loss, with_positions),
}


def rows_of(batch: Batch, rows: slice) -> Batch:
    inputs, targets = batch
    if isinstance(inputs, dict):
        cut = {k: v[rows] if v.dim() and len(v) == ROWS else v for k, v in inputs.items()}
        return cut, targets[rows]
    return inputs[rows], targets[rows]


def plain_loop(case: str, dtype: torch.dtype) -> list[float]:
    """The losses of a plain torch loop on whole batches."""
    make, loss, shape = CASES[case]
    torch.manual_seed(0)
    model = make().to(dtype).train()
    optimizer, losses = sgd(model.parameters()), []
    for step in range(STEPS):
        inputs, targets = shape(padded(step))
        if isinstance(inputs, dict):
            inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


def train_all(context: Any, strategy: str, more: dict[str, Any]) -> dict[str, list[float]]:
    """The losses of each case under a strategy, in one set of ranks."""
    losses: dict[str, list[float]] = {}
    for case, (make, loss, shape) in CASES.items():
        keys = {"train.global_batch_size": ROWS, "train.micro_batch_size": 2, "device": "cpu"}
        more_keys = {"memory.predict": False, **more}
        job = job_from_keys(strategy, {**keys, **more_keys})
        plan = make_plan(job, context.world_size, "cpu")
        each = ROWS // context.dp_size
        rank_rows = slice(context.dp_rank * each, (context.dp_rank + 1) * each)
        first = rows_of(shape(padded(0)), slice(0, 2))
        torch.manual_seed(0)
        model, own_loss = make(), as_loss(loss)
        example = example_batch(first, own_loss, job, plan)
        with Engine(model, own_loss, sgd, job, context, example=example) as engine:
            steps = (rows_of(shape(padded(step)), rank_rows) for step in range(STEPS))
            losses[case] = [engine.step(batch).loss for batch in steps]
    return losses


@pytest.mark.parametrize(
    "strategy",
    ["single", "fsdp+full", "zero2", "1f1b", "tensor", "ddp", "zero3", "1f1b+full", "gpipe"],
)
def test_losses_of_users_are_those_of_a_plain_loop(strategy):
    ranks = 1 if strategy == "single" else 2
    axes = {"pp": 2} if strategy.startswith(("1f1b", "gpipe")) else {}
    axes |= {"tp": 2} if strategy == "tensor" else {}
    more: dict[str, Any] = {"train.precision": "fp64"}
    dtype, tolerance = torch.float64, 1e-12
    if strategy.startswith("zero"):  # DeepSpeed updates in fp32
        more, dtype, tolerance = {}, torch.float32, 1e-6
    if strategy in ("ddp", "1f1b"):
        more["train.check_first_steps"] = 2
    for record in run_ranks(train_all, ranks, strategy, more, **axes):
        for case, losses in record.items():
            assert losses == pytest.approx(plain_loop(case, dtype), rel=tolerance), case


def check_seeded_fault(context: Any, kind: str) -> str:
    """The error that the check of the first steps reports for a run with a fault."""
    keys = {"train.global_batch_size": ROWS, "train.micro_batch_size": 2, "device": "cpu"}
    job = job_from_keys("ddp", {**keys, "memory.predict": False, "train.check_first_steps": 2})
    plan = make_plan(job, context.world_size, "cpu")
    loss = as_loss(shifted_loss)
    if kind == "count":  # weight each micro-batch by its rows
        loss = MeanLoss(shifted_loss, count_of="rows")
    each = ROWS // context.dp_size
    rank_rows = slice(context.dp_rank * each, (context.dp_rank + 1) * each)
    example = example_batch(rows_of(padded(0), slice(0, 2)), loss, job, plan)
    torch.manual_seed(0)
    with Engine(TinyLM(), loss, decaying_sgd, job, context, example=example) as engine:
        if kind == "decay":
            for group in engine.runner.optimizer.param_groups:
                group["weight_decay"] = 0.0
        if kind == "hook" and context.is_main:  # as if the run dropped the user's hook
            next(engine.first_steps._loop._model.parameters()).register_hook(halve)
        if kind == "swapped" and context.rank == 1:
            linears = [m for m in engine.model.modules() if isinstance(m, nn.Linear)]
            linears[0].weight.data.neg_()
        try:
            for step in range(2):
                engine.step(rows_of(padded(step), rank_rows))
        except DifferentNumbersError as error:
            return str(error)
    return ""


def halve(gradient: Tensor) -> Tensor:
    return gradient / 2


def decaying_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, weight_decay=0.3)


@pytest.mark.parametrize(
    ("kind", "expected_message"),
    [
        ("none", ""),
        ("count", "step 1: the loss under ddp is"),
        ("decay", "step 2: the loss under ddp is"),
        ("hook", "step 1: the gradient norm under ddp is"),
        ("swapped", "step 1: the loss under ddp is"),
    ],
)
def test_the_check_of_first_steps_finds_seeded_faults(kind, expected_message):
    for message in run_ranks(check_seeded_fault, 2, kind):
        assert message.startswith(expected_message)
        assert bool(message) is bool(expected_message)


def refusal_of_shape(context: Any, dims: dict[str, int | None]) -> str:
    keys = {"train.global_batch_size": 8, "train.micro_batch_size": 2, "device": "cpu"}
    job = job_from_keys("single", {**keys, "memory.predict": False, "data.batch_dims": dims})
    with Engine(Turned, MeanLoss(F.mse_loss), sgd, job, context) as engine:
        batch = {"x": torch.ones(8, 3), "turned": torch.ones(3, 8, 3)}, torch.ones(8, 3)
        try:
            return str(engine.step(batch).loss)
        except ConfigError as error:
            return str(error)


class Turned(nn.Module):
    """Takes a tensor whose rows are its second dim."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 3)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.net(batch["x"]) + batch["turned"].sum(0)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({}, "inputs.turned has the shape (3, 8, 3) and the batch 8 rows"),
        ({}, 'prepare(..., data__batch_dims={"inputs.turned": 1})'),
        ({"inputs.other": 1}, "the batch has no tensor 'inputs.other'. Its tensors are inputs.x"),
        ({"inputs.turned": 0}, "needs the 8 rows of the batch in that dim"),
    ],
)
def test_a_dim_that_is_not_clear_is_refused_by_name(dims, message):
    assert message in run_ranks(refusal_of_shape, 1, dims)[0]


def test_a_dim_that_is_named_is_cut():
    assert float(run_ranks(refusal_of_shape, 1, {"inputs.turned": 1})[0]) > 0
