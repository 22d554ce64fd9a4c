"""A parameter tied between two stages, whose replicas split its fp32 values at different
elements.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.continued import continue_run
from support.parity import adamw
from support.ranks import run_ranks
from torch import Tensor, nn


class WideTied(nn.Module):
    """The stages share the embedding and have different numbers of other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.positions = nn.Embedding(6, 16)  # in the first stage only
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(rows, positions) -> (rows, positions, 64)."""
        hidden = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        logits: Tensor = self.head(hidden)
        return logits


@pytest.mark.parametrize(
    ("strategy", "ranks", "tp"),
    [
        ("1f1b_zero1", 4, 1),
        ("1f1b_zero2", 4, 1),
        ("pipeline_deepspeed_zero1", 4, 1),
        ("3d", 8, 2),
    ],
)
def test_it_is_saved_once_and_goes_on_under_any_strategy(
    tmp_path: Path, strategy: str, ranks: int, tp: int
) -> None:
    def run(name: str, world_size: int, load: str | None, pp: int, tp: int) -> tuple[str, list]:
        arguments = (
            name,
            tmp_path / f"{name} {load is not None}",
            adamw,
            load,
            "bf16",
            WideTied,
            pp > 1,
        )
        return run_ranks(continue_run, world_size, *arguments, pp=pp, tp=tp)[0]

    path, losses = run(strategy, ranks, None, 2, tp)
    again, resumed = run(strategy, ranks, path, 2, tp)
    assert resumed == losses
    _, alone = run("single", 1, path, 1, 1)
    assert alone == pytest.approx(losses, rel=5e-3)  # sums in bf16 in a different order
    _, back = run("zero1_torch", 2, again, 1, 1)
    assert back == pytest.approx(losses, rel=5e-3)
