"""Users' hooks on gradients are not in the forecast of memory, and a line says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.odd_nets import NETS, WIDTH
from support.parity import sgd

from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.ranks.context import RunContext


def advice_of(net: str, keys: dict[str, Any]) -> list[str]:
    job = job_from_keys("single", {"train.global_batch_size": 4, **keys})
    inputs, targets = torch.zeros(4, WIDTH), torch.zeros(4, 4)
    with Engine(NETS[net], F.mse_loss, sgd, job, RunContext.alone()) as engine:
        engine.step((inputs, targets))
        return [line for line in engine.advice if "hooks" in line]


@pytest.mark.parametrize("net", ["Hook", "NormHook"])
def test_a_line_names_a_parameter_whose_hooks_are_not_in_the_forecast(net: str) -> None:
    name = "a.weight" if net == "Hook" else "b.weight"
    (line,) = advice_of(net, {})
    assert line.startswith(
        f"the forecast of memory leaves out the hooks on the gradients of {name}"
    )
    assert not advice_of(net, {"memory.predict": False})


def test_without_hooks_there_is_no_line() -> None:
    assert not advice_of("Base", {})
