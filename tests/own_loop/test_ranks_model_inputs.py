"""A dict of inputs passed by name, and a custom forward, with a cut or sharded model."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.parity import sgd
from support.ranks import run_ranks
from torch import Tensor, nn

from bigtrain.data import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.models.blueprint import describe
from bigtrain.own_loop.model_inputs import set_model_inputs
from bigtrain.ranks.context import RunContext


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden + self.outer(F.gelu(self.inner(self.norm(hidden)))) * mask[..., None]


class Tagger(nn.Module):
    """A mask, which is one of the inputs, reaches every block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **_: Any
    ) -> Tensor:
        if input_ids is None or attention_mask is None:
            raise TypeError("it takes two tensors by name")
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden, attention_mask)
        return self.head(hidden.mean(1))


def batch() -> tuple[dict[str, Tensor], Tensor]:
    draw = torch.Generator().manual_seed(2)
    mask = torch.randint(2, (8, 5), generator=draw).float()
    inputs = {"input_ids": torch.randint(11, (8, 5), generator=draw), "attention_mask": mask}
    return inputs, torch.randint(3, (8,), generator=draw)


def rename_inputs(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs under the names of the user's forward."""
    return {"ids": inputs["input_ids"], "m": inputs["attention_mask"]}


def forward_by_name(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """A user's forward, which passes the inputs by other names."""
    output: Tensor = model(inputs["ids"], attention_mask=inputs["m"])
    return output


def train_both_ways(context: RunContext, strategy: str) -> list[tuple[list[float], float]]:
    """Losses with inputs by name and with a custom function, and the error of the memory
    forecast.
    """
    results = []
    inputs, targets = batch()
    for forward in (None, forward_by_name):
        whole = inputs if forward is None else rename_inputs(inputs)
        parts = 2 if strategy.startswith(("1f1b", "gpipe")) else 1
        keys = {"train.global_batch_size": 8, "train.accumulation_steps": parts}
        job = job_from_keys(strategy, keys)
        rows = 8 // context.dp_size
        size = rows // parts
        example = MicroBatch({k: t[:size] for k, t in whole.items()}, targets[:size], size, size)
        blueprint = describe(Tagger)
        set_model_inputs(blueprint, forward, example.inputs)
        with Engine(blueprint, F.cross_entropy, sgd, job, context, example=example) as engine:
            mine = slice(context.dp_rank * rows, (context.dp_rank + 1) * rows)
            rank_batch = {name: tensor[mine] for name, tensor in whole.items()}, targets[mine]
            losses = [engine.step(rank_batch).loss for _ in range(3)]
            measured, predicted = engine.meter.measured().peak, engine.prediction.peak
            off = abs(predicted.bytes / measured.bytes - 1) if predicted and measured else 1.0
            results.append((losses, off))
    return results


def plain() -> list[float]:
    model, (inputs, targets) = describe(Tagger).materialize("cpu", seed=0), batch()
    optimizer, losses = sgd(model.parameters()), []
    for _ in range(3):
        loss = F.cross_entropy(model(**inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp+full", "zero2", "zero3", "1f1b", "1f1b+full", "tensor", "zero1_torch"]
)
def test_inputs_by_name_equal_a_plain_loop(strategy: str) -> None:
    axis = {"1f1b": {"pp": 2}, "tensor": {"tp": 2}}.get(re.split(r"\+", strategy)[0], {})
    expected = plain()
    for by_name, by_function in run_ranks(train_both_ways, 2, strategy, **axis):
        for losses, off in (by_name, by_function):
            assert losses == pytest.approx(expected, rel=2e-5)
            assert off < 0.03  # the peak is only a few kilobytes
