"""Pipelines on fairscale and on DeepSpeed: the numbers of one process, memory as predicted."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from nets import LENGTH, VOCABULARY, tokens
from parity import Record, adamw, largest_difference, sgd
from ranks import run_ranks
from torch import Tensor, nn

from bigtrain.build import make_plan
from bigtrain.data import GlobalOrder, MicroBatch, StepLoader
from bigtrain.distributed import RunContext
from bigtrain.engine import Engine
from bigtrain.errors import ConfigError
from bigtrain.loading import job_of
from bigtrain.tasks import CrossEntropy

# Not imported: the ranks import this module, and load the libraries as a run does.
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
    """A skip, a mask of bools, numbers that want no gradient, and integers cross every cut."""

    def __init__(self, width: int = 8, layers: int = 4, *, tied: bool = False) -> None:
        super().__init__()
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
            x = layer(x, mask)
        return self.head(x + skip * weight + self.positions(places) * mask)


class Tied(Deep):
    def __init__(self) -> None:
        super().__init__(tied=True)


class Images(nn.Module):
    """BatchNorm between convolutions, as a chain."""

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


def train(
    context: RunContext,
    model: Any,
    strategy: str,
    keys: dict[str, Any],
    steps: int = 4,
    optimizer: Any = sgd,
) -> Record:
    """As `parity.train`, with an example to cut by, and an evaluation between the steps."""
    job = job_of(strategy, {"train.global_batch_size": 8, **keys})
    loss, samples = CrossEntropy(), tokens(22)
    plan = make_plan(job, context.world_size, context.device.type)
    size = plan.batch.micro_size
    example = MicroBatch(samples.inputs[:size], samples.targets[:size], size * LENGTH, size)
    with Engine(model, loss, optimizer, job, context, example=example) as engine:
        assert engine.prediction_note is None, engine.prediction_note
        record = Record([], [], [], {})
        update = engine.runner.update

        def keep() -> float:
            found = engine.runner.gradients()
            record.gradients.append({n: t.read().detach().clone() for n, t in found.items()})
            return update()

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
            measured = engine.evaluate([example])
            if context.is_main:
                record.losses.append(measured["loss"])
        whole = {n: t.read().detach().clone() for n, t in engine.runner.state().items()}
        record.weights = {
            n.removeprefix("model."): t for n, t in whole.items() if n.startswith("model.")
        }
        return record


def several(context: RunContext, cases: list[tuple[Any, ...]]) -> list[Record]:
    return [train(context, *case) for case in cases]


CLIP = {"optim.clip_norm": 0.5}
# 22 samples: the fourth step has 4 of them, in micro-batches of 3 and 1.
SMALL = {"train.global_batch_size": 6, "train.micro_batch_size": 3}
PIPED = {
    "plain": (Deep, {}),
    "ragged": (Deep, {**SMALL, "strategy.cut.checkpoint": "except_last"}),
    "clipped, three stages": (Deep, {**CLIP, "strategy.cut.devices": 3}),
    "computed again": (Deep, {"strategy.cut.checkpoint": "always"}),
    "computed again but for the last": (Deep, {"strategy.cut.checkpoint": "except_last"}),
    "tied": (Tied, {"strategy.cut.checkpoint": "always"}),
    "one micro-batch": (Deep, {"train.micro_batch_size": 8}),
}


def alone(keys: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in keys.items() if "strategy" not in k}


@needs_fairscale
def test_fairscale_equals_one_process() -> None:
    cases = [
        (model, FAIRSCALE, {**FP64, "train.micro_batch_size": 2, **keys})
        for model, keys in PIPED.values()
    ]
    plain = [(model, "single", alone(keys)) for model, _, keys in cases]
    piped, expected = run_ranks(several, 1, cases)[0], run_ranks(several, 1, plain)[0]
    for name, one, other in zip(PIPED, expected, piped, strict=True):
        assert largest_difference(one, other) < NEAR, name


DEEPSPEED = "pipeline_deepspeed"
STAGED: dict[str, tuple[Any, ...]] = {
    "plain": (Deep, {}),
    "clipped, ragged": (Deep, {**CLIP, **SMALL}),
    "computed again": (Deep, {"strategy.cut.checkpoint": "always"}),
    "tied": (Tied, {"strategy.cut.checkpoint": "except_last"}),
    "one micro-batch": (Deep, {"train.micro_batch_size": 8}),
}


@needs_deepspeed
def test_deepspeed_equals_one_process() -> None:
    cases = [
        (model, DEEPSPEED, {**FP64, "train.micro_batch_size": 2, **keys})
        for model, keys in STAGED.values()
    ]
    plain = [(model, "single", alone(keys)) for model, _, keys in cases]
    expected = run_ranks(several, 1, plain)[0]
    for records in run_ranks(several, 2, cases, pp=2, timeout_s=120):
        for name, one, other in zip(STAGED, expected, records, strict=True):
            if len(other.losses) < len(one.losses):  # an evaluation is told on rank 0
                one.losses[:] = one.losses[::2]
            assert largest_difference(one, other) < NEAR, name
