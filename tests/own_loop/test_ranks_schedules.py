"""A scheduler on the engine's optimizer under strategies, compared with a plain torch loop.

Two parameter groups, one of which may be empty on a stage or shard; resumed halfway.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.parity import UNSEEN
from support.ranks import run_ranks
from support.schedules import SCHEDULES, STEPS, in_two_groups
from torch import nn

from bigtrain.core.state import module_tensors
from bigtrain.data import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.models.blueprint import describe
from bigtrain.ranks.context import RunContext

SCHEDULE = "one cycle"
HALF = STEPS // 2


def net() -> nn.Module:
    """A net whose first layer has no bias, so its stage has no parameter of the second group."""
    return nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)
    )


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [
        (torch.randn(8, 6, generator=draw), torch.randint(3, (8,), generator=draw))
        for _ in range(STEPS)
    ]


def plain() -> tuple[list[float], list[float]]:
    """Rates and losses of a plain loop on whole batches."""
    model = describe(net).materialize("cpu", seed=0)
    assert module_tensors(model.state_dict())
    optimizer = in_two_groups(model.parameters())
    scheduler = SCHEDULES[SCHEDULE](optimizer)
    rates, losses = [], []
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return rates, losses


def train_with_schedule(
    context: RunContext, strategy: str, keys: dict[str, Any], folder: Path
) -> tuple[list[float], list[float], list[int]]:
    """As `plain`, under a strategy; saved halfway and continued by another engine."""
    job = job_from_keys(strategy, {"train.global_batch_size": 8, **UNSEEN, **keys})
    rates, losses, counts = [], [], []
    whole_batches = batches()
    for part in range(2):
        x, y = whole_batches[0]
        example = MicroBatch(x[:4], y[:4], 4, 4)
        with Engine(net, F.cross_entropy, in_two_groups, job, context, example=example) as engine:
            scheduler = SCHEDULES[SCHEDULE](engine.optimizer)
            engine.attach(scheduler=scheduler)
            if part:
                engine.load(folder / f"step-{HALF}")
            for x, y in whole_batches[HALF:] if part else whole_batches[:HALF]:
                data_rank, size = engine.plan.data_rank(context.dp_rank), engine.plan.batch.dp_size
                rows = (
                    slice(0, 1)
                    if data_rank is None
                    else slice(data_rank * 8 // size, (data_rank + 1) * 8 // size)
                )
                result = engine.step((x[rows], y[rows]))
                scheduler.step()
                rates.append(result.lr)
                losses.append(result.loss)
            counts.append(len(engine.optimizer.param_groups))
            if not part:
                engine.save(folder)
    return rates, losses, counts


CASES = [
    ("ddp", 2, {}),
    ("zero1_torch", 2, {}),
    ("fsdp", 2, {}),
    ("oss", 2, {}),
    ("sharded_ddp", 2, {}),
    ("1f1b", 2, {}),
    ("1f1b_zero1", 4, {}),
    ("gpipe_fairscale", 1, {}),
    ("pipeline_deepspeed", 2, {}),
    ("pipeline_deepspeed_zero1", 4, {}),
    ("tensor", 2, {}),
    ("zero1", 2, {}),
    ("zero2", 2, {}),
    ("zero3", 2, {}),
    ("zero2_offload", 2, {}),
    ("hybrid", 4, {}),
    ("ddp_offload_disk", 2, {}),
    ("offload_optimizer_cpu", 1, {}),
    ("parameter_server", 3, {}),
    ("parameter_server_async", 3, {}),
    ("local_sgd", 2, {}),
    ("sync_sgd", 2, {}),
    ("ring", 2, {}),
    ("single", 1, {"optim.release_gradients": True}),
    ("fsdp", 2, {"optim.release_gradients": True}),
]
OWN_NUMBERS = ("parameter_server_async", "local_sgd")
"""For these only the rates are compared."""


@pytest.mark.parametrize(("strategy", "ranks", "keys"), CASES)
def test_a_scheduler_moves_what_updates(
    strategy: str, ranks: int, keys: dict[str, Any], tmp_path: Path
) -> None:
    expected_rates, expected_losses = plain()
    results = run_ranks(
        train_with_schedule, ranks, strategy, keys, tmp_path, **axes(strategy, ranks)
    )
    for rates, losses, counts in results:
        assert counts == [2, 2]
        assert rates == pytest.approx(expected_rates, rel=1e-12)
        if strategy not in OWN_NUMBERS:
            assert losses == pytest.approx(expected_losses, rel=2e-5)
    assert not math.isclose(expected_losses[0], expected_losses[-1], rel_tol=1e-2)


def axes(strategy: str, ranks: int) -> dict[str, int]:
    """The mesh axes with which `run_ranks` connects the ranks of a strategy."""
    if "1f1b" in strategy or strategy.startswith("pipeline"):
        return {"pp": 2}
    return {"tp": ranks} if strategy == "tensor" else {}
