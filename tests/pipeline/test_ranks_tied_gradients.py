"""Gradients of parameters that stages of several ranks share: their sums, and their memory."""

from __future__ import annotations

import pytest
import torch
from support.parity import adamw
from support.peaks import repeat_if_above
from support.ranks import run_ranks
from torch import Tensor, nn

from bigtrain.data import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.pipeline.tied_parameters import TiedGradients

VOCABULARY, WIDTH = 2048, 16


def gradient_of(rank: int) -> Tensor:
    """The gradient of a rank; that of rank 1 has the strides of a transposed tensor."""
    values = torch.randn(5, 3, generator=torch.Generator().manual_seed(rank)) * 10.0**rank
    return values.t().contiguous().t() if rank == 1 else values


def summed(context) -> tuple[Tensor, Tensor | None]:
    shared, own = nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.zeros(2))
    shared.grad = gradient_of(context.pp_rank)
    ties = [("shared", (0, 1, 2)), ("own", (context.pp_rank,))]
    named = {"shared": shared, "own": own}
    TiedGradients(ties, range(3), named, context).sum_gradients()
    return shared.grad, own.grad


def test_three_ranks_have_the_same_sum_to_the_bit() -> None:
    expected = gradient_of(0) + gradient_of(1) + gradient_of(2)
    for gradient, own in run_ranks(summed, 3, pp=3):
        assert torch.equal(gradient, expected)
        assert own is None


class WideTied(nn.Module):
    """A small model whose tied embedding is most of the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(rows, positions) -> (rows, positions, VOCABULARY)."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        logits: Tensor = self.head(hidden)
        return logits


def peaks(context, strategy: str, keys: dict[str, str]) -> tuple[int, int]:
    more = {"train.global_batch_size": 8, "train.micro_batch_size": 2, "memory.track_steps": 4}
    job = job_from_keys(strategy, {**more, **keys})
    tokens = torch.arange(8 // context.dp_size * 6).view(-1, 6) % 13
    loss, rows = CrossEntropy(), tokens[:2]
    example = MicroBatch(rows, rows, loss.count(rows), 2)
    with Engine(WideTied, loss, adamw, job, context, example=example) as engine:
        for _ in range(3):
            engine.step((tokens.clone(), tokens.clone()))
        return engine.prediction.peak.bytes, engine.meter.measured().peak.bytes


@pytest.mark.parametrize(
    ("strategy", "ranks", "precision"),
    [
        ("1f1b", 2, "fp32"),
        ("1f1b_ddp", 4, "fp32"),
        ("1f1b_zero1", 4, "bf16"),
        ("interleaved_1f1b", 2, "fp32"),
        ("pipeline_deepspeed_zero1", 4, "bf16"),
    ],
)
def test_every_rank_has_the_peak_that_was_predicted(strategy, ranks, precision) -> None:
    """On the first rank the sum of the embedding's gradients, or their norm, is the peak."""
    keys = {"train.precision": precision}
    rows = repeat_if_above(
        lambda: run_ranks(peaks, ranks, strategy, keys, pp=2),
        lambda row: row[1] > 1.005 * row[0],
    )
    for predicted, measured in rows:
        assert predicted == pytest.approx(measured, rel=0.005), rows
