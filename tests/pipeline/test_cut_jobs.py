"""Jobs with a cut model that are refused before the ranks connect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.nets import TinyLM, tokens
from support.parity import sgd

from bigtrain.assembly.make_plan import make_plan
from bigtrain.assembly.resolve import resolve_plan
from bigtrain.core.workload import Workload
from bigtrain.data import MicroBatch
from bigtrain.engine.setup import open_setup
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys, load_job
from bigtrain.losses.loss import CrossEntropy
from bigtrain.pipeline.deferred_batch_norm import DeferredBatchNorm
from bigtrain.prediction.predict import predict


@pytest.mark.parametrize(
    ("strategy", "words", "ranks", "message"),
    [
        ("1f1b", {}, 1, r"1f1b needs at least 2 ranks on the pp axis.*Start more ranks"),
        ("1f1b", {"mesh.pp": 3}, 4, r"mesh\.pp=3 .*does not divide the 4 ranks"),
        (
            "1f1b",
            {"mesh.pp": 2, "mesh.dp": 3},
            4,
            r"mesh\.pp=2 \* mesh\.dp=3 .* = 6, and there",
        ),
        (
            "1f1b",
            {"mesh.pp": 2, "mesh.tp": 3},
            4,
            r"mesh\.tp=3 = 6 does not divide the 4",
        ),
        ("1f1b", {"train.accumulation_steps": 1}, 2, r"at least 2 micro-batches.*there are 1"),
        ("dualpipev", {"train.accumulation_steps": 3}, 2, r"at least 4 micro-batches.*there are 3"),
        ("gpipe", {"strategy.cut.stages_per_rank": 2}, 2, r"schedule=gpipe has 1 stage on each"),
        ("1f1b", {"strategy.cut.at": ["a", "b"]}, 2, r"strategy\.cut\.at names 2 places.*1 cut"),
        ("1f1b", {"strategy.cut.schedule": "2f2b"}, 2, r"strategy\.cut\.schedule: .*'gpipe'"),
        (
            "1f1b",
            {"strategy.replicate.name": "zero", "strategy.replicate.stage": 2},
            2,
            "engine=torch",
        ),
        ("pipeline_deepspeed", {"strategy.cut.schedule": "gpipe"}, 2, r"engine=torch|1f1b"),
        ("layer_split", {}, 1, r"cut: naive needs at least 2 ranks.*strategy\.cut\.devices=2"),
        ("single", {"mesh.pp": 2}, 2, r"strategy\.cut names no technique that does"),
        (
            "single",
            {"strategy.cut": "pipelin"},
            2,
            r"cut: unknown 'pipelin', did you mean 'pipeline'\? Known: pipeline; your own",
        ),
    ],
)
def test_a_mesh_or_schedule_that_cannot_be(
    strategy: str, words: dict[str, Any], ranks: int, message: str
) -> None:
    job = job_from_keys(strategy, {"train.global_batch_size": 12, **words})
    with pytest.raises(ConfigError, match=message):
        make_plan(job, ranks, "cpu")


@pytest.mark.parametrize(
    ("words", "ranks", "message"),
    [
        ({}, 16, r"16 stages, and the model can be cut at \d+ places.*Use mesh\.pp="),
        ({"strategy.cut.at": ["upp"]}, 2, r"the model calls no module 'upp', did you mean 'up'\?"),
        ({"strategy.cut.memory": 100}, 2, r"no cut into 2 stages fits the memory"),
    ],
)
def test_a_model_that_cannot_be_cut_so(words: dict[str, Any], ranks: int, message: str) -> None:
    job = job_from_keys("1f1b", {"train.global_batch_size": 32, **words})
    plan = make_plan(job, ranks, "cpu")
    with pytest.raises(ConfigError, match=message):
        resolve_plan(plan, Workload(TinyLM(), language_example(), CrossEntropy(), sgd))


def language_example() -> MicroBatch:
    samples = tokens(2, ignored=False)
    return MicroBatch(samples.inputs, samples.targets, 12, 2)


@pytest.mark.parametrize(
    ("strategy", "words", "note"),
    [
        (
            "1f1b+fsdp",
            {},
            [
                "mesh: pp 4 x dp 1 is one pipeline of all ranks, and strategy.replicate=zero has "
                "no replicas. Use mesh.pp=2 for 2 replicas."
            ],
        ),
        ("1f1b+fsdp", {"mesh.pp": 2}, []),
        ("1f1b_fsdp", {}, []),
        ("1f1b", {}, []),
    ],
)
def test_replicas_that_there_are_none_of_are_told_of(
    strategy: str, words: dict[str, Any], note: list[str]
) -> None:
    job = job_from_keys(strategy, {"train.global_batch_size": 32, **words})
    plan = make_plan(job, 4, "cpu")
    workload = Workload(TinyLM(), language_example(), CrossEntropy(), sgd)
    # Four stages of a model this small are uneven, which adds a note.
    notes = [line for line in resolve_plan(plan, workload).notes if line.startswith("mesh: ")]
    assert notes == note


class LooksAtValues(TinyLM):
    """A model whose path depends on a value."""

    def forward(self, tokens: Any) -> Any:
        x = self.norm(self.embedding(tokens))
        return self.head(self.down(self.up(x)) if float(x.sum()) > 0 else x)


def test_a_module_that_looks_at_values_is_refused_with_its_name() -> None:
    plan = make_plan(job_from_keys("1f1b", {"train.global_batch_size": 32}), 2, "cpu")
    with pytest.raises(ConfigError, match="computation depends on the value of a tensor"):
        resolve_plan(plan, Workload(LooksAtValues(), language_example(), CrossEntropy(), sgd))


def test_a_norm_without_momentum_takes_the_mean_of_all_batches() -> None:
    plain, deferred = (torch.nn.BatchNorm1d(4, momentum=None) for _ in range(2))
    statistics_ = DeferredBatchNorm([deferred])
    for seed in range(3):
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        plain(batch)
        deferred(batch)
        assert deferred.num_batches_tracked == seed
        statistics_.commit()
    statistics_.commit()  # no batch was seen since the last commit
    assert torch.allclose(plain.running_mean, deferred.running_mean, atol=1e-6)
    assert torch.allclose(plain.running_var, deferred.running_var, atol=1e-6)


@pytest.mark.parametrize("strategy", ["layer_split_devices", "gpipe_fairscale"])
def test_a_block_that_no_stage_can_begin_with_again_is_refused(strategy):
    """ResNet's blocks change their inputs in place: allowed in whole blocks, not in a recomputed
    cut.
    """
    words = ["model.name=resnet18", "data.name=synthetic", "data.args.input_shape=[3,32,32]"]
    words += ["data.args.num_classes=10", "train.global_batch_size=4", "train.micro_batch_size=2"]
    words += ["strategy.cut.devices=2", "strategy.cut.at=[layer1.0.bn2]", "strategy.recompute=full"]
    job = load_job(None, strategy, words)
    parts = open_setup(job, make_plan(job, 1, "cpu"))
    with pytest.raises(ConfigError, match=r"changes its input in place.*strategy.recompute.layers"):
        predict(parts.resolved, parts.workload)
