"""The predicted peak equals the tracked one, kind by kind, on every rank."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.nets import BlockConv, TinyConv, TinyLM
from support.parity import adamw, sgd
from support.peaks import images, peaks, repeat_if_above, text, wide_model
from support.ranks import run_ranks
from torch import Tensor, nn

from bigtrain.assembly.make_plan import make_plan
from bigtrain.data.source import TensorSamples
from bigtrain.engine.engine import Engine
from bigtrain.engine.setup import open_setup
from bigtrain.job.load import job_from_keys, load_job
from bigtrain.losses.loss import CrossEntropy
from bigtrain.memory.timeline import MEMORY_KINDS, Breakdown, Peak
from bigtrain.models.gpt import GPT, GPTConfig
from bigtrain.prediction.predict import predict
from bigtrain.ranks.context import RunContext

CASES: dict[str, tuple[Any, ...]] = {
    "single": (1, "single", {}, adamw),
    "single, clipped": (1, "single", {"optim.clip_norm": 1.0}, adamw),
    "single, accumulating": (1, "single", {"train.micro_batch_size": 8}, adamw),
    "single, sgd": (1, "single", {}, sgd),
    "single, bf16": (1, "single", {"train.precision": "bf16"}, adamw),
    "single, fp64": (1, "single", {"train.precision": "fp64"}, adamw),
    "ddp": (2, "ddp", {}, adamw),
    "ddp, accumulating": (2, "ddp", {"train.micro_batch_size": 8}, adamw),
    "ddp, clipped sgd": (2, "ddp", {"optim.clip_norm": 1.0}, sgd),
    "ddp, bf16": (2, "ddp", {"train.precision": "bf16", "train.micro_batch_size": 16}, adamw),
    "sync_sgd": (2, "sync_sgd", {}, adamw),
    "sync_sgd, accumulating": (2, "sync_sgd", {"train.micro_batch_size": 8}, adamw),
    "ring": (2, "ring", {}, adamw),
    "ring, accumulating": (3, "ring", {"train.micro_batch_size": 8}, adamw),
    "ring, small buckets, sgd": (2, "ring", {"strategy.replicate.bucket_size": "8KiB"}, sgd),
    "ring, bf16": (2, "ring", {"train.precision": "bf16", "train.micro_batch_size": 16}, adamw),
    "ddp on one rank": (1, "ddp", {}, adamw),
}


@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_predicted_part_by_part(case):
    world_size, strategy, keys, optimizer = CASES[case]
    for model, batch in ((wide_model, text()), (TinyConv, images())):
        if keys.get("train.micro_batch_size", 0) > len(batch[0]):
            continue
        results = run_ranks(peaks, world_size, model, batch, strategy, keys, optimizer)
        for predicted, measured, note in results:
            assert note is None
            assert predicted.bytes == pytest.approx(measured.bytes, rel=0.005), (
                predicted,
                measured,
            )
            assert predicted.phase == measured.phase
            for kind in MEMORY_KINDS:
                mine = getattr(predicted.breakdown, kind)
                real = getattr(measured.breakdown, kind)
                assert mine == pytest.approx(real, abs=0.01 * measured.bytes), kind


class Unpredictable(nn.Module):
    """The forward pass converts its tensors to numpy, which fake tensors cannot do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.detach().numpy().sum() > -1e9 else x


def test_a_model_that_cannot_be_predicted_still_trains_and_says_why():
    batch = torch.randn(4, 4), torch.arange(4) % 3
    predicted, measured, note = run_ranks(peaks, 1, Unpredictable, batch, "single", {}, sgd)[0]
    assert predicted is None
    assert measured.bytes > 0
    assert "does not run on fake tensors" in note
    assert "numpy() is not supported" in note


def test_prediction_changes_nothing_about_the_run():
    def losses(predict: bool) -> list[float]:
        keys = {"train.global_batch_size": 8, "memory.predict": predict}
        return run_ranks(train_steps, 1, keys)[0]

    assert losses(True) == losses(False)


def test_the_model_is_part_of_the_peak_where_each_rank_builds_it_whole():
    job = load_job("default", "single", ["train.global_batch_size=2"])
    setup = open_setup(job, make_plan(job, 1, "cpu"))
    assert predict(setup.resolved, setup.workload).peak.phase != "build"
    whole = predict(setup.resolved, replace(setup.workload, whole_bytes=2**40))
    assert whole.peak == whole.own_peak == Peak("build", Breakdown(parameters=2**40))


def train_steps(context, keys):
    """The losses of a few steps with dropout."""
    job = job_from_keys("single", keys)
    samples = TensorSamples(*text())
    batch = samples.inputs[:8], samples.targets[:8]
    with Engine(lambda: TinyLM(dropout=0.3), CrossEntropy(), adamw, job, context) as engine:
        return [engine.step(batch).loss for _ in range(4)]


class LargeEnd(nn.Module):
    """More weights outside of blocks than in all blocks, and few activations."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128)) for _ in range(3)
        )
        self.last = nn.Linear(128, 1000)
        self.classes = nn.Linear(1000, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.body:
            x = block(x)
        classes: Tensor = self.classes(self.last(x))
        return classes


def large_end_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 128), torch.arange(4) % 3


def peaks_of_large_ends(context, strategy):
    return peaks(context, LargeEnd, large_end_batch(), strategy, {}, adamw)[:2]


ALONE: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"train.precision": "bf16"},
    "accumulating": {"train.micro_batch_size": 2},
    "bf16, accumulating": {"train.precision": "bf16", "train.micro_batch_size": 2},
    "recomputed": {"strategy.recompute": "full"},
}


def peaks_alone(context, strategy, keys):
    models = [(wide_model, text()), (TinyConv, images()), (LargeEnd, large_end_batch())]
    if keys == ALONE["bf16"]:
        models.pop()  # its peak is in the norm of bf16 gradients, and shards are fp32
    return [peaks(context, *model, strategy, keys, adamw) for model in models]


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp_zero2"])
@pytest.mark.parametrize("case", ALONE)
def test_on_one_rank_fully_shard_copies_without_buffers_of_an_exchange(case, strategy):
    (result,) = run_ranks(peaks_alone, 1, strategy, ALONE[case], force_group=True)
    for predicted, measured, note in result:
        assert note is None
        assert predicted.phase == measured.phase
        for kind in MEMORY_KINDS:
            mine, real = getattr(predicted.breakdown, kind), getattr(measured.breakdown, kind)
            assert mine == pytest.approx(real, abs=64), kind


def test_at_the_peak_is_what_one_process_has_no_moment_for():
    # fsdp: parameters outside of blocks are freed before their gradients are reduced, and a block
    # whose input needs no gradient comes after them. zero2: a gradient larger than the bucket
    # exists while its shard is allocated. zero3: gloo's copies of reduced gradients, and a
    # parameter gathered until then.
    for strategy in ("fsdp", "zero2", "zero3"):
        rows = repeat_if_above(
            lambda name=strategy: run_ranks(peaks_of_large_ends, 2, name),
            lambda row: row[1].bytes > 1.005 * row[0].bytes,
        )
        for predicted, measured in rows:
            assert predicted.bytes == pytest.approx(measured.bytes, rel=0.005), strategy


def sliced_gpt() -> nn.Module:
    """Three ranks cannot divide its heads and words evenly."""
    return GPT(GPTConfig(num_layers=3, width=64, num_heads=4, vocab_size=257, sequence_length=32))


def sliced_text() -> tuple[Tensor, Tensor]:
    words = torch.arange(4 * 33).view(4, 33) * 7 % 257
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


IN_TURN = {"train.micro_batch_size": 2}
IN_SLICES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "two": ({"tp": 2}, {"tensor": {"optim.clip_norm": 1.0}, "tensor+full": {}}),
    "two, selective": ({"tp": 2}, {"tensor+selective": {}, "tensor_sequence": {}}),
    "three": ({"tp": 3}, {"tensor": {}, "tensor_sequence": {"train.precision": "bf16"}}),
    "replicas": ({"tp": 2, "dp": 2}, {"ddp+tensor": {}, "zero1_torch+tensor": {}}),
    "shards": ({"tp": 2, "dp": 2}, {"fsdp+tensor": {}, "fsdp+tensor_sequence": {}}),
    "stages": ({"tp": 2, "pp": 2}, {"1f1b+tensor": IN_TURN, "1f1b+tensor_sequence": IN_TURN}),
}
FOR_SLICES = ((sliced_gpt, sliced_text), (partial(BlockConv, inplace=False), images))


def peaks_in_slices(context: RunContext, cases: dict[str, Any], mesh: dict[str, int]) -> Any:
    keys = {f"mesh.{axis}": size for axis, size in mesh.items()}
    return {
        (case, number): peaks(context, make, batch(), case, {**keys, **more}, adamw)
        for case, more in cases.items()
        for number, (make, batch) in enumerate(FOR_SLICES)
    }


@pytest.mark.parametrize("case", IN_SLICES)
def test_each_rank_of_slices_has_the_peak_that_was_predicted(case: str) -> None:
    mesh, strategies = IN_SLICES[case]
    ranks = math.prod(mesh.values())
    for results in run_ranks(peaks_in_slices, ranks, strategies, mesh, timeout_s=150, **mesh):
        for key, (predicted, measured, note) in results.items():
            assert note is None, key
            assert predicted.bytes == pytest.approx(measured.bytes, rel=5e-4), key
            assert predicted.phase == measured.phase, key
