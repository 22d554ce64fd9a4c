"""Batches that are custom mappings, such as a tokenizer's output: forecast and training."""

from __future__ import annotations

from collections import UserDict
from collections.abc import MutableMapping
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigtrain.data.loader import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.ranks.context import RunContext

SGD = partial(torch.optim.SGD, lr=0.1)


class Encoding(UserDict):
    """Has an attribute in addition to its items; the attribute is kept when the batch is moved."""

    def __init__(self, items: dict[str, Any], origin: str) -> None:
        super().__init__(items)
        self.origin = origin


class Stored(MutableMapping):
    """Stores its items in a dict that a shallow copy shares."""

    def __init__(self, items: dict[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Any:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Reader(nn.Module):
    """Reads two entries of the batch; one of them is a floating-point number."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, batch: Any) -> Tensor:
        return self.head(self.embedding(batch["tokens"]).mean(1) * batch["weight"])


def items() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(11, (6, 4), generator=generator)
    return {"tokens": tokens, "weight": torch.rand(6, 1, generator=generator), "source": "a.txt"}


TARGETS = torch.arange(6) % 5
KINDS = [partial(Encoding, origin="tokenizer"), Stored]


def train_on(make: Any) -> tuple[Engine, list[float]]:
    """Train on a batch made by `make`; return the engine and its losses."""
    torch.manual_seed(5)
    keys = {"train.precision": "fp64", "train.micro_batch_size": 2, "train.accumulation_steps": 3}
    example = MicroBatch(make(items()), TARGETS, 6, 6).first_rows(2, CrossEntropy().count)
    context = RunContext.alone(torch.device("cpu"))
    arguments = (Reader().double(), F.cross_entropy, SGD, job_from_keys("single", keys), context)
    with Engine(*arguments, example=example) as engine:
        losses = [engine.step((make(items()), TARGETS)).loss for _ in range(3)]
    return engine, losses


@pytest.mark.parametrize("make", KINDS)
def test_a_batch_of_its_own_class_trains_as_a_plain_loop_does(make):
    torch.manual_seed(5)
    model = Reader().double()
    optimizer = SGD(model.parameters())
    expected = []
    for _ in range(3):
        batch = items()
        loss = F.cross_entropy(model({**batch, "weight": batch["weight"].double()}), TARGETS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    assert train_on(make)[1] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("make", KINDS)
def test_a_batch_of_its_own_class_is_forecast_as_a_plain_one(make):
    engine, _ = train_on(make)
    plain, _ = train_on(dict)
    assert engine.prediction.note is None
    assert engine.prediction.peak == plain.prediction.peak
    measured = engine.meter.peak_bytes()
    assert measured == plain.meter.peak_bytes()
    # Both inputs are views of one tensor
    assert measured == pytest.approx(engine.prediction.peak.bytes, rel=0.01)


@pytest.mark.parametrize("make", KINDS)
def test_what_is_made_of_a_batch_leaves_it_as_it_was(make):
    inputs = make(items())
    whole = MicroBatch(inputs, TARGETS, 6, 6)
    double, some = whole.double(), whole.first_rows(2, CrossEntropy().count)
    assert type(double.inputs) is type(some.inputs) is type(inputs)
    assert double.inputs["weight"].dtype == torch.float64
    assert double.inputs["tokens"].dtype == torch.int64
    assert (some.inputs["tokens"].shape, some.rows, some.count) == ((2, 4), 2, 2)
    assert some.inputs["source"] == "a.txt"
    assert vars(some.inputs).get("origin") == vars(inputs).get("origin")
    assert inputs["weight"].dtype == torch.float32
    assert inputs["tokens"].shape == (6, 4)


def test_a_mapping_that_cannot_be_changed_becomes_a_dict():
    inputs = MappingProxyType(items())
    double_inputs = MicroBatch(inputs, TARGETS, 6, 6).double().inputs
    assert type(double_inputs) is dict
    assert double_inputs["weight"].dtype == torch.float64
