"""The predicted peak of each rank of a pipeline equals the tracked one, whatever the schedule."""

from __future__ import annotations

from typing import Any

import pytest
from nets import tokens
from parity import adamw
from ranks import run_ranks
from torch import nn

from bigtrain.build import make_plan
from bigtrain.data import MicroBatch
from bigtrain.distributed import RunContext
from bigtrain.engine import Engine
from bigtrain.loading import job_of
from bigtrain.tasks import CrossEntropy

# Where the schedule computes gradients of weights apart, torch keeps a little less than is said.
SLACK = {"zero_bubble": 0.04, "zbv": 0.03, "dualpipev": 0.02, "interleaved_1f1b": 0.02}


class Deep(nn.Module):
    """Six residual blocks between an embedding and a head: enough for four stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
            for _ in range(6)
        )
        self.head = nn.Linear(64, 13)

    def forward(self, inputs: Any) -> Any:
        x = self.embedding(inputs)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def peaks(context: RunContext, strategy: str, keys: dict[str, Any]) -> Any:
    """Train four steps; the predicted and the measured peak of this rank."""
    words = {"train.micro_batch_size": 8, "memory.track_steps": 4, **keys}
    job = job_of(strategy, {"train.global_batch_size": 64 * context.dp_size, **words})
    loss = CrossEntropy()
    samples = tokens(64, ignored=False)
    inputs, targets = samples.inputs[:8], samples.targets[:8]
    example = MicroBatch(inputs, targets, loss.count(targets), 8)
    with Engine(Deep, loss, adamw, job, context, example=example) as engine:
        for _ in range(4):
            engine.step((samples.inputs.clone(), samples.targets.clone()))
        return engine.predicted, engine.meter.measured().peak, engine.prediction_note


@pytest.mark.parametrize(
    ("strategy", "ranks", "pp"),
    [
        ("layer_split", 2, 2),
        ("gpipe", 2, 2),
        ("1f1b", 2, 2),
        ("interleaved_1f1b", 2, 2),
        ("zero_bubble", 2, 2),
        ("zbv", 2, 2),
        ("dualpipev", 2, 2),
        ("gpipe", 4, 4),
        ("1f1b", 4, 4),
        ("1f1b_ddp", 4, 2),
        ("1f1b_zero1", 4, 2),
    ],
)
def test_every_rank_of_every_schedule(strategy: str, ranks: int, pp: int) -> None:
    for predicted, measured, note in run_ranks(peaks, ranks, strategy, {}, pp=pp):
        assert note is None
        slack = SLACK.get(strategy, 0.005)
        assert predicted.bytes == pytest.approx(measured.bytes, rel=slack), (predicted, measured)


def test_recomputed_micro_batches() -> None:
    keys = {"strategy.cut.checkpoint": "always"}
    plain = run_ranks(peaks, 2, "gpipe", {}, pp=2)
    for (predicted, measured, _), (_, more, _) in zip(
        run_ranks(peaks, 2, "gpipe", keys, pp=2), plain, strict=True
    ):
        assert predicted.bytes == pytest.approx(measured.bytes, rel=0.05), (predicted, measured)
        assert measured.bytes < 0.8 * more.bytes


def test_a_rank_never_holds_the_whole_model() -> None:
    """What is tracked while the stages are built stays below the whole model's parameters."""
    whole = 4 * sum(p.numel() for p in Deep().parameters())
    plan = make_plan(job_of("1f1b", {"train.global_batch_size": 64}), 4, "cpu")
    assert plan.pp == 4
    for built in run_ranks(build_peak, 4, pp=4):
        assert built < 0.6 * whole


def build_peak(context: RunContext) -> int:
    job = job_of("1f1b", {"train.global_batch_size": 64, "train.micro_batch_size": 8})
    samples = tokens(8, ignored=False)
    loss = CrossEntropy()
    example = MicroBatch(samples.inputs, samples.targets, loss.count(samples.targets), 8)
    with Engine(Deep, loss, adamw, job, context, example=example) as engine:
        peak = engine.meter.measured().peak
        return 0 if peak is None else peak.bytes
