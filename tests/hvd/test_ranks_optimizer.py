"""Horovod's interface: on real ranks the same numbers as one process has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import nn

import bigtrain.hvd as hvd
import bigtrain.hvd.optimizer as optimizer_module
from bigtrain.errors import ConfigError, LaunchError
from bigtrain.ranks.context import RunContext

STEPS = 4


@pytest.fixture(autouse=True)
def left():
    """No session of another test."""
    hvd.shutdown()
    yield
    hvd.shutdown()


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def rows(step: int, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(step)
    inputs = torch.randn(24, 5, generator=drawn, dtype=torch.float64)
    return inputs[part], inputs[part, :3].argmax(1)


def trained(
    context: RunContext, passes: int, options: dict[str, Any], fusion: int = 2**26
) -> list[torch.Tensor]:
    """The weights after a few steps in which each rank has its share of 24 rows."""
    hvd.init_with(context)
    optimizer_module.FUSION_BYTES = fusion
    model = net(hvd.rank())
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        plain,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=passes,
        **options,
    )
    assert isinstance(optimizer, torch.optim.SGD)
    hvd.broadcast_parameters(model.state_dict())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    share = 24 // (hvd.size() * passes)
    for step in range(STEPS):
        for part in range(passes):
            first = (hvd.rank() * passes + part) * share
            inputs, targets = rows(step, slice(first, first + share))
            loss = nn.functional.cross_entropy(model(inputs), targets) / passes
            loss.backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(("ranks", "passes", "fusion"), [(2, 1, 2**26), (3, 2, 600)])
def test_the_weights_are_those_of_one_process(ranks, passes, fusion):
    alone = trained(RunContext.alone(), 1, {})
    for options in ({}, {"gradient_predivide_factor": 2.0}):
        for weights in run_ranks(trained, ranks, passes, options, fusion):
            for weight, expected in zip(weights, alone, strict=True):
                assert torch.allclose(weight, expected, rtol=0, atol=1e-12)


def test_fp16_on_the_way_changes_the_numbers_a_little():
    alone = trained(RunContext.alone(), 1, {})
    compressed = run_ranks(trained, 2, 1, {"compression": hvd.Compression.fp16})[0]
    differences = [float((a - b).abs().max()) for a, b in zip(alone, compressed, strict=True)]
    assert 0 < max(differences) < 1e-2


def exchanged(context: RunContext) -> dict[str, Any]:
    hvd.init_with(context)
    mine = torch.full((3,), float(hvd.rank() + 1))
    model = net(hvd.rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 * (hvd.rank() + 1))
    if hvd.rank() == 1:  # as one that has read a checkpoint
        inputs, targets = rows(0, slice(0, 24))
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    state = optimizer.state_dict()
    return {
        "mean": hvd.allreduce(mine, name="mean").tolist(),
        "sum": hvd.allreduce(mine, op=hvd.Sum).tolist(),
        "older": hvd.allreduce(mine, average=False).tolist(),
        "mine": mine.tolist(),
        "object": hvd.broadcast_object({"from": hvd.rank()}, root_rank=1),
        "lr": state["param_groups"][0]["lr"],
        "moments": [state["state"][n]["exp_avg"] for n in range(4)],
        "who": (hvd.rank(), hvd.local_rank(), hvd.size(), hvd.local_size()),
    }


def test_what_goes_between_the_ranks():
    first, second = run_ranks(exchanged, 2)
    for found in (first, second):
        assert found["mean"] == [1.5] * 3
        assert found["sum"] == found["older"] == [3.0] * 3
        assert found["object"] == {"from": 1}
        assert found["lr"] == 1.0
        for moment, there in zip(found["moments"], second["moments"], strict=True):
            assert torch.equal(moment, there)
    assert (first["mine"], second["mine"]) == ([1.0] * 3, [2.0] * 3)
    assert (first["who"], second["who"]) == ((0, 0, 2, 2), (1, 1, 2, 2))


def twice(context: RunContext) -> str:
    """A second backward pass before the step, where one was said."""
    hvd.init_with(context)
    model = net(0)
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        for _ in range(2):
            model(rows(0, slice(0, 4))[0]).sum().backward()
    except ConfigError as error:
        return str(error)
    return ""


def test_too_many_backward_passes_are_refused():
    for said in run_ranks(twice, 2):
        assert "for the 2. time since the last step, and backward_passes_per_step=1" in said
        assert "Call step(), or give" in said


def test_what_is_not_here_is_refused_with_what_is(monkeypatch):
    with pytest.raises(LaunchError, match=r"not connected yet. Call hvd.init\(\) first"):
        hvd.rank()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert not hvd.is_initialized()
    hvd.init()
    hvd.init()
    assert hvd.is_initialized()
    assert (hvd.rank(), hvd.size(), hvd.local_rank()) == (0, 1, 0)
    assert hvd.broadcast_object("same") == "same"
    model = net(0)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"Adasum is not here. Use op=hvd.Average"):
        hvd.DistributedOptimizer(plain, op=hvd.Adasum)
    with pytest.raises(ConfigError, match=r"backward_passes_per_step=0, and 1 at least"):
        hvd.DistributedOptimizer(plain, backward_passes_per_step=0)
    with pytest.raises(ConfigError, match=r"an average of torch.int64 .* Give op=hvd.Sum"):
        hvd.allreduce(torch.ones(2, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"step\(closure\).*then call step\(\)"):
        hvd.DistributedOptimizer(plain).step(lambda: 0.0)
