"""Keys in `prepare`: followed, or refused with the code to write instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import BaseModel
from support.parity import sgd
from torch import nn

import bigtrain
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Job
from bigtrain.own_loop.keys import FOLLOWED, INSTEAD


def keys_of(kind: type[BaseModel], prefix: str = "") -> set[str]:
    keys = set()
    for name, field in kind.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys |= keys_of(inner, f"{prefix}{name}.")
        else:
            keys.add(f"{prefix}{name}")
    return keys


def test_every_key_has_one_verdict() -> None:
    known = keys_of(Job)
    assert len(known) > 70
    assert FOLLOWED.isdisjoint(INSTEAD)
    assert known == FOLLOWED | INSTEAD.keys()


def linear() -> nn.Module:
    return nn.Linear(4, 3)


@pytest.mark.parametrize("key", sorted(INSTEAD))
def test_what_is_not_followed_is_refused_by_its_name(key: str) -> None:
    keyword = key.replace(".", "__")
    with pytest.raises(ConfigError) as refused:
        bigtrain.prepare(linear, F.cross_entropy, sgd, **{keyword: 1})  # type: ignore[arg-type]
    message = str(refused.value)
    assert message.startswith(f"prepare(..., {keyword}=...) would be ignored: ")
    assert message.endswith("Leave it out.")


def test_a_whole_section_is_looked_into() -> None:
    more: dict[str, Any] = {"train": {"epochs": 3}}
    with pytest.raises(
        ConfigError, match=r"train__epochs=\.\.\.\) would be ignored: the loop decides"
    ):
        bigtrain.prepare(linear, F.cross_entropy, sgd, **more)


def test_keys_that_are_followed_are_followed() -> None:
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    keys: dict[str, Any] = {
        "train__global_batch_size": 8,
        "train__precision": "fp64",
        "train__seed": 5,
        "optim__clip_norm": 1e-3,
        "memory__track_steps": 0,
        "checkpoint__keep": 7,
        "mesh__timeout": 50,
        "device": "cpu",
    }
    with bigtrain.prepare(linear, F.cross_entropy, sgd, **keys) as engine:
        before = engine.model.weight.detach().clone()
        engine.step((x, y))
        assert engine.model.weight.dtype == torch.float64
        # Weight decay is not affected by clipping
        assert (engine.model.weight - before).norm() < 5e-3
        assert engine.meter.measured().peak is None
        assert engine.job.checkpoint.keep == 7
        assert engine.context.seed == 5


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"train__global_batch_size": 8},
            r"24 rows on this rank are more than its 8 of train\.global_batch_size=8, which 1 "
            r"replica shares\. Give batches of 8 rows, or prepare\(\.\.\., train__global_batch_size"
            "=24",
        ),
        ({"train__micro_batch_size": 8}, r"24 rows are more than train\.micro_batch_size \* accum"),
        (
            {"train__global_batch_size": 8, "train__accumulation_steps": 2},
            "24 rows on this rank are more than its 8",
        ),
    ],
)
def test_more_rows_than_the_keys_say_are_refused(keys: dict[str, Any], said: str) -> None:
    batch = torch.randn(24, 4), torch.arange(24) % 3
    with (
        bigtrain.prepare(linear, F.cross_entropy, sgd, **keys) as engine,
        pytest.raises(ConfigError, match=said),
    ):
        engine.step(batch)


def test_a_batch_that_is_none_is_said() -> None:
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    with bigtrain.prepare(linear, F.cross_entropy, sgd) as engine:
        for batch, message in (
            (x, r"step: got a Tensor, and \(inputs, targets\)"),
            ((x, y, y), "step: got a tuple of 3 elements"),
            ({"x": x}, "step: got a dict with 'x'"),
            ((x[:0], y[:0]), "has no row"),
            (("text", "more"), "the inputs hold no tensor"),
        ):
            with pytest.raises(ConfigError, match=message):
                engine.step(batch)  # type: ignore[arg-type]
        engine.step((x, y))
