"""A resumed run continues exactly, for any memory layout of a parameter."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.optim.lean_adamw import LeanAdamW
from bigtrain.optim.low_bit_adamw import LowBitAdamW
from bigtrain.ranks.context import RunContext


class Net(nn.Module):
    """Weights in channels-last order, and one that is a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(8, 32).t())
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.relu(self.conv(x)).mean((2, 3)) @ self.turned)


def engine(make):
    words = {"train.global_batch_size": 8, "memory.predict": False}
    context = RunContext.alone(torch.device("cpu"))
    return Engine(Net, CrossEntropy(), make, job_from_keys("single", words), context)


def batch():
    images = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(2))
    return images.contiguous(memory_format=torch.channels_last), torch.arange(8) % 3


KINDS = {
    "fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "loop": partial(torch.optim.AdamW, lr=0.01, foreach=False),
    "sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True),
    "lean": partial(LeanAdamW, lr=0.01, state="bf16"),
    "8 bits": partial(LowBitAdamW, lr=0.01, bits=8),
}


@pytest.mark.parametrize("kind", KINDS)
def test_going_on_and_resuming_are_the_same(kind, tmp_path):
    with engine(KINDS[kind]) as continued, engine(KINDS[kind]) as resumed:
        for _ in range(3):
            continued.step(batch())
        continued.save(tmp_path)
        resumed.load(next(tmp_path.glob("step-*")))
        for _ in range(3):
            continued.step(batch())
            resumed.step(batch())
        for mine, theirs in zip(
            continued.model.parameters(), resumed.model.parameters(), strict=True
        ):
            assert torch.equal(mine, theirs)


def test_state_in_another_type_is_taken_over(tmp_path):
    with engine(KINDS["lean"]) as saver, engine(KINDS["fused"]) as loader:
        saver.step(batch())
        saver.save(tmp_path)
        loader.load(next(tmp_path.glob("step-*")))
        loader.step(batch())
        moments = [slots["exp_avg"] for slots in loader.runner.optimizer.state.values()]
        assert {moment.dtype for moment in moments} == {torch.float32}
