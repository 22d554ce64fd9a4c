"""ZeRO on DeepSpeed: the numbers of one process, memory as predicted, one checkpoint for all."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from nets import TinyConv, TinyLM, tokens
from parity import Record, adamw, largest_difference, sgd, train
from ranks import run_ranks
from test_prediction import text, wide
from torch import nn
from torch.utils.checkpoint import checkpoint

from bigtrain.build import make_plan
from bigtrain.data import MicroBatch
from bigtrain.data.source import TensorSamples
from bigtrain.engine import Engine
from bigtrain.errors import ConfigError, NonFiniteError
from bigtrain.forecast import Forecast, Profile
from bigtrain.loading import job_of
from bigtrain.tasks import CrossEntropy
from bigtrain.timeline import Breakdown, Timeline

# Not imported: the ranks import this module, and load DeepSpeed as a run does.
pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is missing")

STAGES = ["zero1", "zero2", "zero3"]
CLIP = {"optim.clip_norm": 0.5}


class Recomputed(TinyLM):
    """Its block is computed a second time in the backward pass."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + checkpoint(self.block, x, use_reentrant=False)
        return self.head(x)

    def block(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


def several(context, strategy, cases):
    """One record for each case: a start of DeepSpeed costs more than a run."""
    found = []
    for model, keys, steps, optimizer in cases:
        found.append(train(context, model, tokens(22), strategy, keys, steps, optimizer))
    return found


BF16 = {**CLIP, "train.precision": "bf16"}
CASES = {
    "whole batch": (TinyLM, CLIP, 6, sgd),
    "accumulating": (TinyLM, {**CLIP, "train.micro_batch_size": 1}, 6, sgd),
    "recomputing": (Recomputed, {**CLIP, "train.micro_batch_size": 2}, 6, sgd),
    "large buckets": (TinyLM, {**CLIP, "strategy.replicate.bucket_size": "1MiB"}, 6, sgd),
    "adamw": (TinyLM, {}, 10, adamw),
    "bf16": (TinyLM, BF16, 6, sgd),
    "bf16, accumulating": (TinyLM, {**BF16, "train.micro_batch_size": 2}, 6, sgd),
}


@pytest.fixture(scope="module")
def one_process() -> dict[str, Record]:
    plain = {
        name: (model, {k: v for k, v in keys.items() if "bucket" not in k}, *how)
        for name, (model, keys, *how) in CASES.items()
    }
    records = run_ranks(several, 1, "single", list(plain.values()))[0]
    return dict(zip(CASES, records, strict=True))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("strategy", STAGES)
def test_it_equals_one_process(one_process, strategy, world_size):
    short = ("accumulating", "adamw")
    cases = {name: case for name, case in CASES.items() if world_size == 2 or name in short}
    ranks = run_ranks(several, world_size, strategy, list(cases.values()), timeout_s=120.0)
    for records in ranks:
        for name, record in zip(cases, records, strict=True):
            expected = one_process[name]
            if name == "adamw":
                assert record.losses == pytest.approx(expected.losses, abs=2e-6)
            elif name.startswith("bf16"):
                assert record.losses == pytest.approx(expected.losses, rel=5e-3)
                assert all(t.dtype == torch.float32 for t in record.weights.values())
            else:
                assert largest_difference(expected, record) < 1e-5, name


def in_two_groups(parameters):
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


class Frozen(TinyLM):
    """A norm that is not trained, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.requires_grad_(False)
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, tokens):
        return super().forward(tokens) * self.scale


def trained(context, strategy, runs):
    """For each run: losses with changing rates and an evaluation between the steps, and state."""
    found = []
    samples, size = tokens(8), 8 // context.world_size
    mine = slice(context.rank * size, (context.rank + 1) * size)
    batch = samples.inputs[mine], samples.targets[mine]
    for model, optimizer, keys in runs:
        job = job_of(strategy, {"train.global_batch_size": 8, **keys})
        how = {"learning_rate": (1e-2, 5e-3, 1e-3, 2e-2).__getitem__}
        with Engine(model, CrossEntropy(), optimizer, job, context, **how) as engine:
            losses = []
            for _ in range(4):
                losses.append(engine.step(batch).loss)
                engine.evaluate([MicroBatch(*batch, engine.loss.count(batch[1]), size)])
            state = {name: s.read().clone() for name, s in engine.runner.state().items()}
        found.append((losses, state))
    return found


RUNS = [(TinyLM, in_two_groups, {}), (Frozen, adamw, {}), (Frozen, sgd, {})]


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_groups_rates_frozen_parameters_and_evaluation(strategy):
    for one, two in zip(
        run_ranks(trained, 1, "single", RUNS)[0],
        run_ranks(trained, 2, strategy, RUNS, timeout_s=120.0)[1],
        strict=True,
    ):
        assert two[0] == pytest.approx(one[0], abs=2e-6)
        assert one[1].keys() == two[1].keys()
        for name, tensor in one[1].items():
            assert (tensor - two[1][name]).abs().max() < 1e-4, name


def images() -> TensorSamples:
    generator = torch.Generator().manual_seed(3)
    return TensorSamples(torch.randn(16, 1, 8, 8, generator=generator), torch.arange(16) % 3)


def convolving(context, strategy, precision):
    keys = {"train.precision": precision}
    return train(context, TinyConv, images(), strategy, keys, 4)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_buffers_follow_the_first_rank_as_under_ddp(strategy):
    one = run_ranks(convolving, 2, "ddp", "fp32")[0]
    record = run_ranks(convolving, 2, strategy, "fp32")[0]
    assert largest_difference(one, record) < 1e-5
    with pytest.raises(AssertionError, match="kernels of BatchNorm2d.*--strategy zero1_torch"):
        run_ranks(convolving, 2, strategy, "bf16")


def continued(context, strategy, folder, optimizer, load, precision):
    """Three steps, or a checkpoint of them; then three more: (path, their losses)."""
    job = job_of(strategy, {"train.global_batch_size": 8, **CLIP, "train.precision": precision})
    samples, size = tokens(48), 8 // context.world_size

    def step(engine):
        start = 8 * engine.steps_done + context.rank * size
        part = slice(start, start + size)
        return engine.step((samples.inputs[part], samples.targets[part])).loss

    with Engine(TinyLM, CrossEntropy(), optimizer, job, context) as engine:
        if load is not None:
            engine.load(Path(load))
        else:
            for _ in range(3):
                step(engine)
        path = engine.save(folder)
        return str(path), [step(engine) for _ in range(3)]


WAYS = [
    ("ddp", 2, "zero3", 4, adamw, "fp32"),
    ("zero3", 2, "ddp", 1, adamw, "fp32"),
    ("zero1", 4, "zero2", 2, sgd, "fp32"),
    ("zero2", 2, "zero3", 2, sgd, "fp32"),
    ("zero3", 2, "zero1", 2, adamw, "bf16"),
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way[0]}-{way[2]}-{way[5]}")
def test_a_checkpoint_goes_from_one_strategy_to_another(way, tmp_path):
    saver, savers, loader, loaders, optimizer, precision = way
    saved = run_ranks(continued, savers, saver, tmp_path / "a", optimizer, None, precision)
    path, losses = saved[0]
    again = run_ranks(continued, loaders, loader, tmp_path / "b", optimizer, path, precision)
    for _, found in again:
        close = {"abs": 2e-6} if precision == "fp32" else {"rel": 5e-3}
        assert found == pytest.approx(losses, **close)
    # What is written right after loading is what was loaded, file by file.
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (Path(path) / name).read_bytes() == (Path(again[0][0]) / name).read_bytes()
