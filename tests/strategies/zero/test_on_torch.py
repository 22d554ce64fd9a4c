"""ZeRO with torch's optimizers and fully_shard, without ranks: refusals and advice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.nets import BlockLM
from support.parity import adamw
from support.traffic import traffic_of_plan

from bigtrain.assembly.make_plan import make_plan
from bigtrain.assembly.resolve import resolve_plan
from bigtrain.core.registry import make_technique
from bigtrain.core.variants import Shape
from bigtrain.core.workload import Workload
from bigtrain.costs.traffic import StepVolume
from bigtrain.data import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.job.schema import RoleConfig, StrategyConfig
from bigtrain.losses.loss import CrossEntropy
from bigtrain.prediction.predict import forecast_rank, forecast_step

KEEP, REDUCE = "strategy.replicate.keep_gathered", "strategy.replicate.reduce"
REFUSED = {
    "shard_ranks=3 does not divide the 4 ranks": {"strategy.replicate.shard_ranks": 3},
    "bucket_size=1024 has no effect: torch's fully_shard": {"strategy.replicate.bucket_size": 1024},
    "strategy.replicate.stage": {"strategy.replicate.stage": 4},
    "stage=0 shards nothing": {"strategy.replicate.stage": 0},
    "strategy.replicate.engine": {"strategy.replicate.engine": "horovod"},
    "-1 is neither a number of units, at least 0, nor all, none": {f"{KEEP}": -1},
    "keep_gathered: true is neither": {f"{KEEP}": True},
    "keep_gathered=none: stage 2 keeps all blocks gathered.*stage=3, or leave": {
        "strategy.replicate.stage": 2,
        KEEP: "none",
    },
    "reduce=step has no effect: a step has one micro-batch.* train.accumulation_steps=2": {
        REDUCE: "step"
    },
    "step_between_groups needs several groups of ranks, and all 4 .*less than 4, or .*=step": {
        REDUCE: "step_between_groups",
        "train.micro_batch_size": 1,
    },
    "prefetch=1 has no effect: with strategy.replicate.shard_ranks=1": {
        "strategy.replicate.prefetch": 1,
        "strategy.replicate.shard_ranks": 1,
    },
    "prefetch=0 has no effect: all blocks stay gathered.*stage=3 .*keep_gathered=none": {
        "strategy.replicate.prefetch": 0,
        "strategy.replicate.stage": 2,
    },
    "outside_blocks=apart: strategy.recompute.budget chooses": {
        "strategy.replicate.outside_blocks": "apart",
        "strategy.recompute": "1GiB",
    },
    "outside_blocks=apart: the forecast of strategy.offload.activations": {
        "strategy.replicate.outside_blocks": "apart",
        "strategy.offload.activations": "disk",
    },
    "strategy.replicate.prefetch.* -1": {"strategy.replicate.prefetch": -1},
    "strategy.replicate.reduce: .*micro_batch.*step": {REDUCE: "never"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_work_is_refused_before_any_group(message):
    with pytest.raises(ConfigError, match=message):
        make_plan(
            job_from_keys("fsdp", {"train.global_batch_size": 8, **REFUSED[message]}), 4, "cpu"
        )


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("config", "ds.json", "config=ds.json is for engine=deepspeed, and engine is torch"),
        ("shard_ranks", 2, "shard_ranks=2 is for stages 2 and 3, and stage is 1"),
        ("reduce", "step", "reduce=step is for torch's stages 2 and 3.* torch, stage 1"),
        ("keep_gathered", 2, "keep_gathered=2 is for torch's stages 2 and 3.* torch, stage 1"),
    ],
)
def test_what_would_be_left_out_silently_is_refused(key, value, words):
    job = job_from_keys("zero1_torch", {f"strategy.replicate.{key}": value})
    with pytest.raises(ConfigError, match=words):
        make_plan(job, 4, "cpu")


def test_fp16_is_refused_with_what_to_use():
    with pytest.raises(ConfigError, match="train.precision"):
        job_from_keys("fsdp", {"train.precision": "fp16"})


def test_more_blocks_ahead_than_there_are_is_refused():
    keys = {"train.global_batch_size": 4, "strategy.replicate.prefetch": 5}
    with pytest.raises(ConfigError, match="prefetch=5, and the model has 4 units.*=4 or less"):
        resolve_plan(make_plan(job_from_keys("fsdp", keys), 2, "cpu"), a_workload())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (5, "=5, and the model has 4 units that are gathered.* Use .*=4 or less, or .*=all"),
        (
            "layer.*",
            "'layer.\\*' fits none of the 4 units.*did you mean 'layers.[0-3]'.*layers.0, ",
        ),
        (["layers.*", "head"], "'head' fits none of the 4 units"),
    ],
)
def test_units_that_a_model_lacks_are_refused_with_those_that_it_has(value, words):
    job = job_from_keys("fsdp", {"train.global_batch_size": 4, KEEP: value})
    with pytest.raises(ConfigError, match=words):
        resolve_plan(make_plan(job, 2, "cpu"), a_workload())


def a_workload() -> Workload:
    inputs = torch.zeros(1, 6, dtype=torch.int64)
    return Workload(BlockLM(), MicroBatch(inputs, inputs, 6, 1), CrossEntropy(), adamw)


def test_layers_outside_of_blocks_that_are_all_tied_cannot_be_units():
    keys = {"train.global_batch_size": 4, "strategy.replicate.outside_blocks": "apart"}
    with pytest.raises(ConfigError, match="apart has no effect: the model has no module outside"):
        resolve_plan(make_plan(job_from_keys("fsdp", keys), 2, "cpu"), a_workload())


class HeadInLoss(BlockLM):
    """The weights of the head are used, and the head is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(16, 13, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return torch.nn.functional.linear(x, self.head.weight)


def test_a_head_that_is_not_called_cannot_be_a_unit():
    keys = {"train.global_batch_size": 4, "strategy.replicate.outside_blocks": "apart"}
    workload = a_workload()
    workload = Workload(HeadInLoss(), workload.example, workload.loss, adamw)
    resolved = resolve_plan(make_plan(job_from_keys("fsdp", keys), 2, "cpu"), workload)
    with pytest.raises(ConfigError, match="apart: head is not called, because its parameters are"):
        forecast_rank(resolved, workload, 0)


class Turned(BlockLM):
    """The last block runs first."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in reversed(self.layers):
            x = x + layer(x)
        return self.head(x)


def test_blocks_in_another_order_than_that_of_the_modules_are_not_gathered_ahead():
    keys = {"train.global_batch_size": 4, "strategy.replicate.prefetch": 1}
    workload = a_workload()
    workload = Workload(Turned(), workload.example, workload.loss, adamw)
    resolved = resolve_plan(make_plan(job_from_keys("fsdp", keys), 2, "cpu"), workload)
    with pytest.raises(ConfigError, match="prefetch=1: the blocks of this model do not run in the"):
        forecast_rank(resolved, workload, 0)


def test_finer_variants_need_more_and_send_less_one_after_the_other():
    """One profile serves all of them."""
    keys = {"train.global_batch_size": 8, "train.micro_batch_size": 2}
    job = job_from_keys("fsdp", keys)
    plan = make_plan(job, 2, "cpu")
    inputs = torch.zeros(2, 6, dtype=torch.int64)
    whole = Workload(BlockLM(64), MicroBatch(inputs, inputs, 12, 2), CrossEntropy(), adamw)
    (profile,) = forecast_rank(resolve_plan(plan, whole), whole, 0).profiles
    shape = Shape(1, 2, 2, "cpu", num_blocks=4, micro_batches=2)
    technique = plan.techniques["replicate"]
    forms = [plan]
    for variant in technique.finer_variants(shape):
        section = StrategyConfig.model_validate({"name": "finer", "replicate": variant.options})
        forms.append(make_plan(job.model_copy(update={"strategy": section}), 2, "cpu"))
    assert len(forms) == 5  # three numbers of blocks, and all blocks with gradients reduced once
    peaks = [forecast_step(profile, form).peak().bytes for form in forms]
    assert peaks == sorted(peaks)
    assert peaks[-1] > peaks[0]
    sent = [StepVolume.stated(traffic_of_plan(profile, form), 2).sent_bytes for form in forms]
    assert sent == sorted(set(sent), reverse=True)
    assert list(technique.finer_variants(replace(shape, dp=1))) == []


def test_forms_for_a_pipeline_reduce_once_and_keep_blocks_of_a_stage():
    shape = Shape(2, 2, 4, "cuda", num_blocks=7, micro_batches=4)
    plain = RoleConfig.model_validate({"name": "zero", "engine": "torch", "stage": 3})
    variants = {v.label: v.options for v in make_technique("replicate", plain).variants(shape)}
    assert variants["fsdp, reduced once"]["reduce"] == "step"
    assert variants["fsdp_zero2, reduced once"]["reduce"] == "step"
    once = RoleConfig.model_validate(dict(variants["fsdp, reduced once"]))
    labels = [v.label for v in make_technique("replicate", once).finer_variants(shape)]
    assert labels[:3] == [f"fsdp_{number}, reduced once" for number in (1, 2, 3)]
    assert labels[3:] == ["fsdp, all kept and reduced once"]
