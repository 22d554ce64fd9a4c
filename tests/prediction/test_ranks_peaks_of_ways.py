"""The peak of models whose passes differ: the pass with the highest peak is forecast."""

from __future__ import annotations

import random

import pytest
import torch
from support.parity import sgd
from support.peaks import peaks, repeat_if_above
from support.ranks import run_ranks
from torch import Tensor, nn

WIDTH = 128


class Skips(nn.Module):
    """A layer that every other pass skips, by a count in the module."""

    passes = 0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x))
        return self.head(torch.tanh(self.b(y)) if self._takes_part(y) else y)

    def _takes_part(self, y: Tensor) -> bool:
        del y
        self.passes += self.training
        return self.passes % 2 == 0


class Branches(Skips):
    """A layer that a pass skips depending on a number."""

    def _takes_part(self, y: Tensor) -> bool:
        return bool(y.sum() > -1e9)


class Draws(Skips):
    """A layer that is skipped depending on a random number of Python."""

    def _takes_part(self, y: Tensor) -> bool:
        del y
        return random.random() < 0.5


class Experts(nn.Module):
    """Each row goes through the expert that is chosen for it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.router, self.head = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        choices, y = scores.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choices == number).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]).to(y.dtype))
        return self.head(torch.tanh(y + scores.sum(-1, keepdim=True)))


class Towers(Experts):
    """One of two towers, never both: every pass skips half of the weights."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        first = self.passes % 2
        for tower in self.experts[2 * first : 2 * first + 2]:
            x = x + torch.tanh(tower(x))
        return self.head(x) + self.router(x).sum(-1, keepdim=True)


NETS = (Skips, Branches, Draws, Experts, Towers)


def peaks_of_all(context, strategy, keys):
    batch = torch.randn(16, WIDTH), torch.arange(16) % 8
    return [peaks(context, net, batch, strategy, keys, sgd) for net in NETS]


CASES = [
    ("ddp", {}),
    ("ddp", {"train.micro_batch_size": 4}),
    ("ddp", {"train.precision": "bf16"}),
    ("zero1_torch", {}),
]


@pytest.mark.parametrize(("strategy", "keys"), CASES)
def test_the_fullest_way_is_forecast(strategy, keys):
    rows = repeat_if_above(
        lambda: [row for rank in run_ranks(peaks_of_all, 2, strategy, keys) for row in rank],
        lambda row: row[1].bytes > 1.01 * row[0].bytes,
    )
    for net, (predicted, measured, note) in zip(NETS * 2, rows, strict=True):
        assert note is None, net
        assert predicted.bytes == pytest.approx(measured.bytes, rel=0.01), (
            net,
            predicted,
            measured,
        )
