"""BatchNorm in a cut model on ranks, and the example that `prepare` needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.nets import TinyConv, TinyLM
from support.parity import sgd
from support.ranks import run_ranks
from support.whole import whole_tensors

from bigtrain.assembly.make_plan import make_plan
from bigtrain.data import MicroBatch
from bigtrain.data.source import TensorSamples
from bigtrain.engine.engine import Engine
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.losses.tasks import ClassificationTask, LanguageTask
from bigtrain.ranks.context import RunContext


def images() -> TensorSamples:
    generator = torch.Generator().manual_seed(3)
    return TensorSamples(torch.randn(8, 1, 8, 8, generator=generator), torch.arange(8) % 3)


def statistics(context: RunContext, strategy: str, keys: dict[str, Any]) -> dict[str, Any]:
    """The running statistics after one step on eight images, and the validation."""
    job = job_from_keys(strategy, {"train.global_batch_size": 8, **keys})
    loss = CrossEntropy()
    samples = images()
    rows = make_plan(job, context.world_size, "cpu").batch.micro_size
    example = MicroBatch(samples.inputs[:rows], samples.targets[:rows], rows, rows)
    task = ClassificationTask(num_classes=3)
    with Engine(TinyConv, loss, sgd, job, context, example=example, task=task) as engine:
        engine.step((samples.inputs, samples.targets))
        whole = MicroBatch(samples.inputs, samples.targets, 8, 8)
        results: dict[str, Any] = {"validation": engine.evaluate([whole])}
        for name, value in whole_tensors(engine.runner.state()).items():
            if "running" in name or "tracked" in name:
                results[name] = value.clone()
        return results


def test_deferred_statistics_are_those_of_the_whole_batch() -> None:
    keys = {"train.micro_batch_size": 2, "strategy.cut.batch_norm": "deferred"}
    whole = run_ranks(statistics, 1, "single", {})[0]
    for result in run_ranks(statistics, 2, "gpipe", keys, pp=2):
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            key = f"model.norm.{name}"
            assert torch.allclose(result[key].double(), whole[key].double(), atol=1e-6), key


def test_statistics_of_micro_batches_are_those_of_one_process() -> None:
    keys = {"train.micro_batch_size": 2}
    alone = run_ranks(statistics, 1, "single", keys)[0]
    for checkpoint in ("never", "always"):
        more = {**keys, "strategy.cut.checkpoint": checkpoint}
        for result in run_ranks(statistics, 2, "gpipe", more, pp=2):
            assert result["model.norm.num_batches_tracked"] == 4
            for name in ("running_mean", "running_var"):
                key = f"model.norm.{name}"
                assert torch.allclose(result[key], alone[key], atol=1e-6), (checkpoint, key)
            assert result["validation"] == pytest.approx(alone["validation"], abs=1e-5)


def refusal_without_example(context: RunContext) -> str:
    """The message of an engine with a cut and without an example."""
    job = job_from_keys("1f1b", {"train.global_batch_size": 8})
    with pytest.raises(ConfigError) as refusal:
        Engine(TinyLM, CrossEntropy(), sgd, job, context, task=LanguageTask(13))
    return str(refusal.value)


def test_a_cut_needs_an_example() -> None:
    for message in run_ranks(refusal_without_example, 2, pp=2):
        assert "Give prepare(..., example=(inputs, targets))" in message
