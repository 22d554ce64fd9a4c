"""Pipelines on fairscale and on DeepSpeed: the numbers of one process, and memory as predicted."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from support.nets import LENGTH, VOCABULARY, tokens
from support.parity import Record, adamw, largest_difference, sgd
from support.ranks import run_ranks
from support.whole import as_saved, whole_tensors
from torch import Tensor, nn

from bigtrain.assembly.make_plan import make_plan
from bigtrain.core.runner import StepLoss
from bigtrain.data import GlobalOrder, MicroBatch, StepLoader
from bigtrain.data.source import TensorSamples
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.ranks.context import RunContext

# Not imported here: the ranks import this module, and must load the libraries as a run does.
needs_fairscale = pytest.mark.skipif(find_spec("fairscale") is None, reason="fairscale is missing")
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is missing")
NEAR = 1e-10
FP64 = {"train.precision": "fp64"}
FAIRSCALE = "gpipe_fairscale"


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * mask


class Deep(nn.Module):
    """A skip, a boolean mask, floats without a gradient, and integers cross every cut."""

    def __init__(
        self, width: int = 8, layers: int = 4, *, tied: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.positions = nn.Embedding(LENGTH, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        skip = self.embedding(words)
        mask = (words != 1).unsqueeze(-1)
        weight = skip.detach().mean(-1, keepdim=True).tanh()
        places = torch.arange(words.shape[1], device=words.device).expand(words.shape) + 0
        x = skip
        for layer in self.layers:
            x = self.dropout(layer(x, mask))
        return self.head(x + skip * weight + self.positions(places) * mask)


class Tied(Deep):
    def __init__(self) -> None:
        super().__init__(tied=True)


class Dropped(Deep):
    def __init__(self) -> None:
        super().__init__(dropout=0.3)


class Images(nn.Module):
    """BatchNorm between convolutions, in sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(1 if n == 0 else 4, 4, 3, padding=1), nn.BatchNorm2d(4))
                for n in range(4)
            )
        )
        self.head = nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(images)).mean(dim=(2, 3)))


def samples_of(rows: int, *, images: bool) -> tuple[Tensor, Tensor]:
    if images:
        pixels = torch.randn(22, 1, 6, 6, generator=torch.Generator().manual_seed(1))
        return pixels[:rows], torch.arange(rows) % 3
    samples = tokens(22)
    return samples.inputs[:rows], samples.targets[:rows]


def train(
    context: RunContext,
    model: Any,
    strategy: str,
    keys: dict[str, Any],
    steps: int = 4,
    optimizer: Any = sgd,
) -> Record:
    """As `parity.train`, with an example batch for the cut, and an evaluation between the steps."""
    job = job_from_keys(strategy, {"train.global_batch_size": 8, **keys})
    images = model is Images
    loss, samples = CrossEntropy(), TensorSamples(*samples_of(22, images=images))
    plan = make_plan(job, context.world_size, context.device.type)
    size = plan.batch.micro_size
    example = MicroBatch(*samples_of(size, images=images), size * LENGTH, size)
    with Engine(model, loss, optimizer, job, context, example=example) as engine:
        assert engine.prediction.note is None, engine.prediction.note
        record = Record([], [], [], {})
        update = engine.runner.update

        def keep(loss: StepLoss) -> float:
            gradients = engine.runner.gradients()
            record.gradients.append(whole_tensors(gradients))
            return update(loss)

        engine.runner.update = keep  # type: ignore[method-assign]
        loader = StepLoader(
            samples,
            GlobalOrder(len(samples), plan.batch.global_size, seed=3),
            count=loss.count,
            dp_rank=context.dp_rank,
            dp_size=context.dp_size,
            micro_batch_size=size,
        )
        for _, batch in zip(range(steps), loader, strict=False):
            result = engine.step(batch)
            record.losses.append(result.loss)
            record.norms.append(result.grad_norm)
            measured = engine.evaluate([MicroBatch(*samples_of(3, images=images), 3 * LENGTH, 3)])
            if context.is_main:
                record.losses.append(measured["loss"])
        whole = whole_tensors(engine.runner.state())
        record.weights = {
            n.removeprefix("model."): t for n, t in whole.items() if n.startswith("model.")
        }
        return record


def train_cases(context: RunContext, cases: list[tuple[Any, ...]]) -> list[Record]:
    return [train(context, *case) for case in cases]


CLIP = {"optim.clip_norm": 0.5}
# 22 samples: the fourth step has 4 of them, in micro-batches of 3 and 1.
SMALL = {"train.global_batch_size": 6, "train.micro_batch_size": 3}
PIPED = {
    "ragged": (Deep, {**SMALL, "strategy.cut.checkpoint": "always"}),
    "clipped, three stages": (Deep, {**CLIP, "strategy.cut.devices": 3}),
    "computed again but for the last": (Deep, {"strategy.cut.checkpoint": "except_last"}),
    "tied": (Tied, {"strategy.cut.checkpoint": "always"}),
    "one micro-batch": (Deep, {"train.micro_batch_size": 8}),
    "batch norm": (Images, {"train.micro_batch_size": 4, "strategy.cut.checkpoint": "always"}),
}


def keys_without_strategy(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys that are not of the strategy."""
    return {k: v for k, v in keys.items() if "strategy" not in k}


@needs_fairscale
def test_fairscale_equals_one_process() -> None:
    cases = [
        (model, FAIRSCALE, {**FP64, "train.micro_batch_size": 2, **keys})
        for model, keys in PIPED.values()
    ]
    plain = [(model, "single", keys_without_strategy(keys)) for model, _, keys in cases]
    piped, expected = run_ranks(train_cases, 1, cases)[0], run_ranks(train_cases, 1, plain)[0]
    for name, single, record in zip(PIPED, expected, piped, strict=True):
        assert largest_difference(single, record) < NEAR, name


DEEPSPEED = "pipeline_deepspeed"
STAGED: dict[str, tuple[Any, ...]] = {
    "clipped, ragged": (Deep, {**CLIP, **SMALL}),
    "computed again": (Deep, {"strategy.cut.checkpoint": "always"}),
    "tied": (Tied, {"strategy.cut.checkpoint": "except_last"}),
    "one micro-batch": (Deep, {"train.micro_batch_size": 8}),
}


def compare(expected: list[Record], ranks: list[list[Record]], names: Any, near: float) -> None:
    """Compare on each rank; the evaluation only on rank 0, which has its result."""
    for rank, records in enumerate(ranks):
        for name, single, record in zip(names, expected, records, strict=True):
            expected_record = single if rank == 0 else replace(single, losses=single.losses[::2])
            assert largest_difference(expected_record, record) < near, (name, rank)


@needs_deepspeed
def test_deepspeed_equals_one_process() -> None:
    cases = [
        (model, DEEPSPEED, {**FP64, "train.micro_batch_size": 2, **keys})
        for model, keys in STAGED.values()
    ]
    plain = [(model, "single", keys_without_strategy(keys)) for model, _, keys in cases]
    expected = run_ranks(train_cases, 1, plain)[0]
    compare(expected, run_ranks(train_cases, 2, cases, pp=2, timeout_s=120), STAGED, NEAR)


@needs_deepspeed
def test_replicas_on_deepspeed_equal_one_process() -> None:
    """Two pipelines of two stages: averaged, and with the optimizer's state in shards."""
    whole = {"train.micro_batch_size": 2}
    half = {"train.micro_batch_size": 1}
    cases = {
        "averaged": (Tied, DEEPSPEED, {**FP64, **half, "mesh.pp": 2}),
        "zero": (Deep, f"{DEEPSPEED}_zero1", half),
        "zero, tied, clipped": (Tied, f"{DEEPSPEED}_zero1", {**CLIP, **half}),
    }
    plain = [(m, "single", {**k, **whole, "mesh.pp": 1}) for m, _, k in cases.values()]
    expected = run_ranks(train_cases, 1, plain)[0]
    results = run_ranks(train_cases, 4, list(cases.values()), pp=2, timeout_s=120)
    compare(expected[:1], [records[:1] for records in results], ["averaged"], NEAR)
    compare(expected[1:], [records[1:] for records in results], list(cases)[1:], 1e-5)


@needs_fairscale
def test_replicas_of_fairscale_equal_one_process() -> None:
    keys = {**FP64, "train.micro_batch_size": 1}
    case = (Deep, FAIRSCALE, {**keys, "strategy.replicate": "ddp"})
    expected = run_ranks(train_cases, 1, [(Deep, "single", {**keys, "train.micro_batch_size": 2})])[
        0
    ]
    compare(expected, run_ranks(train_cases, 2, [case]), ["ddp"], NEAR)


def peaks(context: RunContext, cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    results = []
    for strategy, keys in cases:
        job = job_from_keys(
            strategy, {"train.global_batch_size": 64, "memory.track_steps": 3, **keys}
        )
        loss, samples = CrossEntropy(), tokens(64, ignored=False)
        size = make_plan(job, context.world_size, "cpu").batch.micro_size
        rows = 64 // context.dp_size
        example = MicroBatch(samples.inputs[:size], samples.targets[:size], size * LENGTH, size)
        with Engine(lambda: Deep(64, 6), loss, adamw, job, context, example=example) as engine:
            for _ in range(3):
                engine.step((samples.inputs[:rows].clone(), samples.targets[:rows].clone()))
            assert engine.prediction.peak is not None
            measured = engine.meter.measured().peak
            results.append((strategy, keys, engine.prediction.peak.bytes, measured.bytes))
    return results


EIGHT = {"train.micro_batch_size": 8}


@needs_fairscale
def test_the_memory_of_fairscale_is_predicted() -> None:
    again = {**EIGHT, "strategy.cut.checkpoint": "always"}
    for case in run_ranks(peaks, 1, [(FAIRSCALE, EIGHT), (FAIRSCALE, again)])[0]:
        assert case[2] == pytest.approx(case[3], rel=0.05), case


@needs_deepspeed
def test_the_memory_of_deepspeed_is_predicted() -> None:
    again = {**EIGHT, "strategy.cut.checkpoint": "always"}
    for rank in run_ranks(peaks, 2, [(DEEPSPEED, EIGHT), (DEEPSPEED, again)], pp=2):
        for case in rank:
            assert case[2] == pytest.approx(case[3], rel=0.02), case
    for rank in run_ranks(peaks, 4, [(f"{DEEPSPEED}_zero1", EIGHT)], pp=2):
        for case in rank:
            assert case[2] == pytest.approx(case[3], rel=0.05), case


@needs_fairscale
def test_dropout_is_the_same_when_computed_again() -> None:
    never, always = run_ranks(
        train_cases,
        1,
        [
            (Dropped, FAIRSCALE, {**FP64, **SMALL, "strategy.cut.checkpoint": mode}, 2)
            for mode in ("never", "always")
        ],
    )[0]
    assert largest_difference(never, always) < NEAR


@needs_fairscale
def test_deferred_statistics_follow_the_whole_batch() -> None:
    keys = {**FP64, "train.micro_batch_size": 2}
    piped, whole = run_ranks(
        train_cases,
        1,
        [
            (Images, FAIRSCALE, {**keys, "strategy.cut.batch_norm": "deferred"}, 1),
            (Images, "single", {**keys, "train.micro_batch_size": 8}, 1),
        ],
    )[0]
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        first = f"body.0.1.{name}"
        assert torch.allclose(piped.weights[first], whole.weights[first], atol=NEAR), name


def resume_state(
    context: RunContext, strategy: str, keys: dict[str, Any], state: dict[str, Tensor] | None
) -> tuple[float, dict[str, Tensor]]:
    """Load a state, or make one in a step; return the loss of one more step, and the state."""
    job = job_from_keys(strategy, {"train.global_batch_size": 8, **keys})
    loss, (inputs, targets) = CrossEntropy(), samples_of(8, images=False)
    example = MicroBatch(inputs[:2], targets[:2], loss.count(targets[:2]), 2)
    mine = slice(
        context.dp_rank * 8 // context.dp_size, (context.dp_rank + 1) * 8 // context.dp_size
    )
    with Engine(Tied, loss, adamw, job, context, example=example) as engine:
        if state is None:
            engine.step((inputs[mine], targets[mine]))
        else:
            engine.runner.load_state(as_saved(state))
        before = whole_tensors(engine.runner.state())
        return engine.step((inputs[mine], targets[mine])).loss, before


@needs_deepspeed
def test_state_goes_and_comes_in_shards() -> None:
    loss, state = run_ranks(resume_state, 1, "single", {"train.micro_batch_size": 2}, None)[0]
    keys = {"train.micro_batch_size": 1}
    for other, state_found in run_ranks(resume_state, 4, f"{DEEPSPEED}_zero1", keys, state, pp=2):
        assert other == pytest.approx(loss, abs=1e-6)
        assert state_found.keys() == state.keys()
        assert all(torch.equal(state_found[name], state[name]) for name in state)
