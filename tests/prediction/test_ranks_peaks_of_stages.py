"""The predicted peak of each rank of a pipeline equals the tracked one, for every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.nets import DeepResidual, tokens
from support.parity import adamw
from support.peaks import repeat_if_above
from support.ranks import run_ranks
from torch import Tensor, nn

from bigtrain.assembly.make_plan import make_plan
from bigtrain.data import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.optim.factory import optimizer_factory
from bigtrain.ranks.context import RunContext

SLACK = 0.002
OF_SHARDS = 600
"""Bytes. The forecast is that of the replica whose shards are the largest."""


class Tied(DeepResidual):
    """The same with one matrix for embedding and head: a V schedule has both on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


def peaks(
    context: RunContext, strategy: str, keys: dict[str, Any], model: Any = DeepResidual
) -> Any:
    """Train four steps; return the predicted and the measured peak of this rank."""
    words = {"train.micro_batch_size": 8, "memory.track_steps": 4, **keys}
    job = job_from_keys(strategy, {"train.global_batch_size": 64 * context.dp_size, **words})
    loss = CrossEntropy()
    samples = tokens(64, ignored=False)
    inputs, targets = samples.inputs[:8], samples.targets[:8]
    example = MicroBatch(inputs, targets, loss.count(targets), 8)
    with Engine(model, loss, adamw, job, context, example=example) as engine:
        for _ in range(4):
            engine.step((samples.inputs.clone(), samples.targets.clone()))
        return engine.prediction.peak, engine.meter.measured().peak, engine.prediction.note


class SavesMoreWhenTraced(DeepResidual):
    """The same, with more operations when it is traced or compiled, as transformers' masks are."""

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embedding(inputs)
        is_traced = torch.compiler.is_compiling()
        for layer in self.layers:
            x = x + layer(torch.maximum(x, x - 1) if is_traced else x)
        return self.head(x)


def stage_peaks(
    slack: float, ranks: int, strategy: str, keys: dict[str, Any], pp: int
) -> list[Any]:
    """(predicted, measured, note) of each rank."""
    return repeat_if_above(
        lambda: run_ranks(peaks, ranks, strategy, keys, pp=pp),
        lambda row: row[1].bytes > (1 + slack) * row[0].bytes,
    )


@pytest.mark.parametrize(
    ("strategy", "ranks", "pp"),
    [
        ("1f1b", 2, 2),
        ("interleaved_1f1b", 2, 2),
        ("zbv", 2, 2),
        ("1f1b_fsdp", 4, 2),
        ("layer_split", 2, 2),
        ("gpipe", 2, 2),
        ("zero_bubble", 2, 2),
        ("dualpipev", 2, 2),
        ("gpipe", 4, 4),
        ("1f1b", 4, 4),
        ("1f1b_ddp", 4, 2),
        ("1f1b_zero1", 4, 2),
        ("1f1b_zero2", 4, 2),
        ("1f1b_fsdp", 2, 2),
        ("zbv", 4, 4),
    ],
)
def test_every_rank_of_every_schedule(strategy: str, ranks: int, pp: int) -> None:
    for predicted, measured, note in stage_peaks(SLACK, ranks, strategy, {}, pp):
        assert note is None
        assert predicted.bytes == pytest.approx(measured.bytes, abs=OF_SHARDS)


@pytest.mark.parametrize("strategy", ["layer_split_devices", "gpipe_fairscale"])
def test_stages_of_one_process_are_forecast_as_they_were_traced(strategy: str) -> None:
    traced, written = (
        run_ranks(peaks, 1, strategy, {}, model)[0] for model in (SavesMoreWhenTraced, DeepResidual)
    )
    for predicted, measured, note in (traced, written):
        assert note is None
        assert predicted.bytes == pytest.approx(measured.bytes, rel=0.01), (predicted, measured)
    assert traced[0].bytes > 1.02 * written[0].bytes


@pytest.mark.parametrize("stage", [2, 3])
def test_several_stages_of_a_rank_are_sharded_with_nothing_left_over(stage: int) -> None:
    """The model's modules do not keep alive the whole parameters from which the stages
    were built.
    """
    replicate = {"strategy.replicate.name": "zero", "strategy.replicate.engine": "torch"}
    keys = {**replicate, "strategy.replicate.stage": stage, "mesh.pp": 2}
    for predicted, measured, _ in stage_peaks(SLACK, 4, "interleaved_1f1b", keys, pp=2):
        assert predicted.bytes == pytest.approx(measured.bytes, abs=OF_SHARDS)
        assert measured.breakdown.buffers < 4096


def step_peaks(context: RunContext, strategy: str, keys: dict[str, Any]) -> Any:
    """The same with micro-batches so small that the peak is in the optimizer's step."""
    words = {"train.micro_batch_size": 1, "memory.track_steps": 4, **keys}
    job = job_from_keys(strategy, {"train.global_batch_size": 8, **words})
    loss, samples = CrossEntropy(), tokens(8, ignored=False)
    targets = samples.targets[:1]
    example = MicroBatch(samples.inputs[:1], targets, loss.count(targets), 1)
    make_optimizer = optimizer_factory(job.optim, 0)
    with Engine(DeepResidual, loss, make_optimizer, job, context, example=example) as engine:
        for _ in range(4):
            engine.step((samples.inputs.clone(), samples.targets.clone()))
        return engine.prediction.peak, engine.meter.measured().peak


@pytest.mark.parametrize(
    ("keys", "slack"),
    [
        ({"optim.implementation": "foreach"}, 0.0),
        # With state on disk, small buffers of all stages' updates are counted as if they existed
        # together, and so are the norms of one stage's slices of gradients with those of the other
        # stage.
        ({"strategy.offload.optimizer": "disk"}, 0.0003),
        ({"optim.name": "adamw_8bit"}, 0.004),
    ],
    ids=["all parameters at once", "state on disk", "one by one"],
)
@pytest.mark.parametrize("strategy", ["interleaved_1f1b", "zbv"])
def test_the_optimizers_step_is_one_for_all_stages_of_a_rank(
    strategy: str, keys: dict[str, Any], slack: float
) -> None:
    rows = repeat_if_above(
        lambda: run_ranks(step_peaks, 2, strategy, keys, pp=2),
        lambda row: row[1].bytes > (1 + slack) * row[0].bytes + 8,
    )
    for predicted, measured in rows:
        assert measured.phase == predicted.phase
        assert predicted.bytes == pytest.approx(measured.bytes, rel=slack, abs=8)


class FewBlocks(DeepResidual):
    """Two blocks beside a large embedding, whose gradient is reduced last."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers[2:]
        self.embedding = nn.Embedding(2000, 64)
        self.head = nn.Linear(64, 2000)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_received_gradients_exist_until_the_last_unit_is_reduced(precision: str) -> None:
    """The stage sends two tensors: the input of a block, and the output of the block's norm."""
    keys = {"strategy.cut.at": ["layers.1.1"], "train.precision": precision}
    rows = run_ranks(peaks, 2, "1f1b+fsdp_zero2", keys, FewBlocks, pp=2)
    for predicted, measured, note in rows:
        assert note is None
        assert predicted.bytes == pytest.approx(measured.bytes, abs=64), (predicted, measured)


def test_a_stage_of_less_than_a_block_is_sharded_as_a_whole() -> None:
    keys = {"strategy.cut.at": ["head"]}
    for predicted, measured, note in stage_peaks(SLACK, 4, "1f1b_fsdp", keys, pp=2):
        assert note is None
        assert predicted.bytes == pytest.approx(measured.bytes, abs=OF_SHARDS)


@pytest.mark.parametrize("strategy", ["zbv", "dualpipev"])
def test_what_two_stages_of_a_rank_share_counts_once(strategy: str) -> None:
    for predicted, measured, _ in run_ranks(peaks, 2, strategy, {}, Tied, pp=2):
        assert predicted.bytes == pytest.approx(measured.bytes, rel=SLACK), (predicted, measured)


class Wide(DeepResidual):
    """More bytes of gradients than of saved activations, so that averaging in copies is
    the peak.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)) for _ in range(6)
        )


def test_replicas_of_a_layer_split_average_in_buckets() -> None:
    keys = {"strategy.replicate": "ddp", "mesh.pp": 2}
    for predicted, measured, note in run_ranks(peaks, 4, "layer_split", keys, Wide, pp=2):
        assert note is None
        # The gradient that was sent last stays alive as well, which no forecast includes.
        assert predicted.bytes == pytest.approx(measured.bytes, rel=0.01), (predicted, measured)


def test_blocks_computed_again_on_shards() -> None:
    keys = {"strategy.recompute": "full"}
    for predicted, measured, _ in stage_peaks(SLACK, 4, "1f1b_fsdp", keys, pp=2):
        assert predicted.bytes == pytest.approx(measured.bytes, abs=OF_SHARDS)


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
@pytest.mark.parametrize("strategy", ["1f1b", "gpipe"])
def test_recomputed_micro_batches(strategy: str, checkpoint: str) -> None:
    keys = {"strategy.cut.checkpoint": checkpoint}
    for predicted, measured, _ in stage_peaks(SLACK, 2, strategy, keys, pp=2):
        assert predicted.bytes == pytest.approx(measured.bytes, rel=SLACK), (predicted, measured)


def test_recomputing_needs_less() -> None:
    keys = {"strategy.cut.checkpoint": "always"}
    plain = run_ranks(peaks, 2, "gpipe", {}, pp=2)
    for (predicted, measured, _), (_, more, _) in zip(
        run_ranks(peaks, 2, "gpipe", keys, pp=2), plain, strict=True
    ):
        assert predicted.bytes == pytest.approx(measured.bytes, rel=SLACK), (predicted, measured)
        assert measured.bytes < 0.8 * more.bytes


def test_a_rank_never_holds_the_whole_model() -> None:
    """The tracked memory while the stages are built stays below the whole model's parameters."""
    whole = 4 * sum(p.numel() for p in DeepResidual().parameters())
    plan = make_plan(job_from_keys("1f1b", {"train.global_batch_size": 64}), 4, "cpu")
    assert plan.pp == 4
    for built in run_ranks(build_peak, 4, pp=4):
        assert built < 0.6 * whole


def build_peak(context: RunContext) -> int:
    job = job_from_keys("1f1b", {"train.global_batch_size": 64, "train.micro_batch_size": 8})
    samples = tokens(8, ignored=False)
    loss = CrossEntropy()
    example = MicroBatch(samples.inputs, samples.targets, loss.count(samples.targets), 8)
    with Engine(DeepResidual, loss, adamw, job, context, example=example) as engine:
        peak = engine.meter.measured().peak
        return 0 if peak is None else peak.bytes
