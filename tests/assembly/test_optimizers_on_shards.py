"""An optimizer of torch that does not work on the shards of fully_shard is refused in advance."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from bigtrain.assembly.make_plan import make_plan
from bigtrain.assembly.optimizer_check import check_kind
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.optim.whole import whole_optimizer


def check(strategy: str, make: Any) -> None:
    plan = make_plan(job_from_keys(strategy, {"train.global_batch_size": 4}), 2, "cpu")
    check_kind(whole_optimizer(make, nn.Linear(4, 4)), plan)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp_zero2"])
@pytest.mark.parametrize("options", [{}, {"foreach": True}])
def test_rprop_is_refused_on_shards(strategy: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        check(strategy, partial(torch.optim.Rprop, **options))
    assert str(refused.value) == (
        "optimizer: torch's Rprop assigns to elements selected by a mask, and torch does not "
        f"support that on DTensors, the shards of strategy {strategy}. Use --strategy "
        "zero1_torch, or another optimizer."
    )


@pytest.mark.parametrize("strategy", ["ddp", "zero1_torch"])
def test_rprop_is_taken_where_tensors_are_plain(strategy: str) -> None:
    check(strategy, torch.optim.Rprop)
