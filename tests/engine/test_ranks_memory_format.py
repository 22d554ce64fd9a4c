"""`train.memory_format=channels_last`: the same numbers, and memory as predicted."""

from __future__ import annotations

import pytest
import torch
from support.parity import adamw, largest_difference, train
from support.peaks import repeat_if_above
from support.ranks import run_ranks
from torch import nn

from bigtrain.assembly.make_plan import make_plan
from bigtrain.data import MicroBatch
from bigtrain.data.source import TensorSamples
from bigtrain.engine.engine import Engine
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy

LAST = {"train.memory_format": "channels_last"}


class Convolutions(nn.Module):
    """Without BatchNorm, whose sums are so sensitive that a different kernel changes the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()) for _ in range(3)
        )
        self.head = nn.Linear(16, 5)

    def forward(self, images):
        x = self.first(images)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def images(rows: int = 24) -> TensorSamples:
    generator = torch.Generator().manual_seed(3)
    return TensorSamples(torch.randn(rows, 3, 12, 12, generator=generator), torch.arange(rows) % 5)


def train_convolutions(context, strategy, keys):
    """Train the convolutions under a strategy."""
    return train(context, Convolutions, images(), strategy, keys)


def peaks(context, strategy):
    """The predicted and the measured peak, and whether the weights are stored channels last."""
    samples, loss = images(4), CrossEntropy()
    inputs, targets = samples.inputs, samples.targets
    size = len(targets) * context.world_size
    job = job_from_keys(strategy, {"train.global_batch_size": size, **LAST})
    example = MicroBatch(inputs, targets, loss.count(targets), len(targets))
    with Engine(Convolutions, loss, adamw, job, context, example=example) as engine:
        for _ in range(3):
            engine.step((inputs.clone(), targets.clone()))
        last = {
            p.is_contiguous(memory_format=torch.channels_last)
            for p in engine.model.parameters()
            if p.dim() == 4
        }
        return engine.prediction.peak.bytes, engine.meter.measured().peak.bytes, last


@pytest.mark.parametrize("strategy", ["ddp", "zero1_torch", "fsdp", "zero2"])
def test_it_equals_one_process_with_its_channels_first(strategy):
    (alone,) = run_ranks(train_convolutions, 1, "single", {})
    for record in run_ranks(train_convolutions, 2, strategy, LAST, timeout_s=120.0):
        if record.weights:
            assert largest_difference(record, alone) < 2e-6
    (last,) = run_ranks(train_convolutions, 1, "single", LAST)
    assert largest_difference(last, alone) < 2e-6


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_its_peak_is_predicted(strategy, ranks):
    rows = repeat_if_above(
        lambda: run_ranks(peaks, ranks, strategy, timeout_s=120.0),
        lambda row: row[1] > 1.001 * row[0],
    )
    for predicted, tracked, last in rows:
        assert predicted == pytest.approx(tracked, rel=1e-3)
        assert last == ({True} if strategy in ("single", "ddp") else last)


def test_stages_take_tensors_as_they_are_written():
    job = job_from_keys("1f1b", {"train.global_batch_size": 8, **LAST})
    with pytest.raises(ConfigError, match=r"Use train.memory_format=contiguous, or leave"):
        make_plan(job, 2, "cpu")
