"""A DeepSpeed configuration file: taken as it is, "auto" filled in, contradictions refused."""

from __future__ import annotations

from typing import Any

import pytest
from support.deepspeed_files import written

from bigtrain.assembly.make_plan import make_plan
from bigtrain.errors import ConfigError
from bigtrain.job.load import load_job
from bigtrain.strategies.zero import Zero
from bigtrain.strategies.zero.on_deepspeed.config import deepspeed_settings


def keys_of(path: str, **more: Any) -> list[str]:
    keys = {
        "train.global_batch_size": 8,
        "train.micro_batch_size": 2,
        "optim.schedule": "constant",
        **more,
    }
    return [f"strategy.deepspeed={path}", *(f"{key}={value}" for key, value in keys.items())]


def test_auto_is_filled_in_and_the_rest_taken_as_it_is(tmp_path):
    path = written(tmp_path)
    words = [*keys_of(path), "optim.clip_norm=0.5", "train.precision=bf16"]
    job = load_job(None, "zero2", words)
    plan = make_plan(job, 2, "cpu")
    technique = plan.techniques["replicate"]
    assert isinstance(technique, Zero)
    found = deepspeed_settings(technique, plan, 1_000_000)
    assert (found["train_batch_size"], found["train_micro_batch_size_per_gpu"]) == (8, 2)
    assert (found["gradient_accumulation_steps"], found["gradient_clipping"]) == (2, 0.5)
    assert (found["bf16"]["enabled"], found["fp16"]["enabled"]) == (True, False)
    assert "optimizer" not in found
    assert "scheduler" not in found
    assert found["steps_per_print"] == 1000000
    zero = found["zero_optimization"]
    assert (zero["stage"], zero["overlap_comm"]) == (2, True)
    assert zero["reduce_bucket_size"] == 1952
    assert "stage3_prefetch_bucket_size" not in zero  # there is nothing to fill in


def test_the_stage_is_the_files(tmp_path):
    path = written(tmp_path, zero_optimization={"stage": 3})
    job = load_job(None, None, keys_of(path))
    plan = make_plan(job, 2, "cpu")
    assert plan.techniques["replicate"].name == "zero"
    assert (
        deepspeed_settings(plan.techniques["replicate"], plan, 10)["zero_optimization"]["stage"]
        == 3
    )
    with pytest.raises(ConfigError, match=r"stage=2, but zero_optimization.stage=3.*zero3"):
        make_plan(load_job(None, "zero2", keys_of(path)), 2, "cpu")


CONTRADICTIONS = {
    "batch": ({"train_batch_size": 16}, "train_batch_size=16.*train.global_batch_size=8"),
    "micro": (
        {"train_micro_batch_size_per_gpu": 4},
        "per_gpu=4.*train.micro_batch_size=2. Use train.micro_batch_size=4",
    ),
    "accumulation": ({"gradient_accumulation_steps": 7}, "=7.*train.accumulation_steps=2"),
    "clipping": (
        {"gradient_clipping": 1.0},
        "clipping=1.0, but optim.clip_norm=null. Use optim.clip_norm=1.0",
    ),
    "bf16": ({"bf16": {"enabled": True}}, "bf16.enabled=true.*Use train.precision=bf16"),
    "fp16": ({"fp16": {"enabled": True}}, "fp16.enabled=true.*bf16"),
    "stage 0": ({"zero_optimization": {"stage": 0}}, "shards nothing.*--strategy ddp"),
    "no stage": ({"zero_optimization": {"stage": 7}}, "stage=7 is no stage"),
    "lr": (
        {"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}},
        r"optimizer.params.lr=0.5, but optim.lr=0.*Use optim.lr=0.5",
    ),
    "betas": (
        {"optimizer": {"type": "AdamW", "params": {"betas": [0.8, 0.9]}}},
        r"betas=\[0.8, 0.9\], but optim.betas=\[0.9",
    ),
    "type": ({"optimizer": {"type": "SGD"}}, "type=SGD, but optim.name=adamw. Use optim.name=sgd"),
    "foreign": ({"optimizer": {"type": "Lamb"}}, "type=Lamb, but optim.name=adamw"),
    "schedule": (
        {"scheduler": {"type": "WarmupDecayLR"}},
        "scheduler.type=WarmupDecayLR.*optim.schedule=linear",
    ),
    "warm-up": (
        {"scheduler": {"type": "auto", "params": {"warmup_num_steps": 17}}},
        "warmup_num_steps=17, but optim.warmup_steps=",
    ),
    "another kind": (
        {"optimizer": {"type": "AdamW", "params": {"amsgrad": True, "torch_adam": True}}},
        "optimizer.params.amsgrad=true, and a job has false only. Leave it out",
    ),
    "no such thing": (
        {"optimizer": {"type": "AdamW", "params": {"max_coeff": 0.3}}},
        "optimizer.params.max_coeff=0.3, and a job has none. Leave it out",
    ),
    "another warm-up": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-5}}},
        "scheduler.params.warmup_min_lr=1e-05, and a job has 0 only",
    ),
    "no number": ({"gradient_clipping": [1]}, r"clipping=\[1\], but optim.clip_norm=null"),
    "unknown": (
        {"zero_optimization": {"stage": 2, "no_such_key": 1}},
        "DeepSpeed does not take it: .*no_such_key",
    ),
    "removed": ({"sparse_gradients": True}, "DeepSpeed does not take it: .*has been removed"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_what_contradicts_the_job_is_refused_in_one_line(case, tmp_path):
    changes, words = CONTRADICTIONS[case]
    path = written(tmp_path, **changes)
    with pytest.raises(ConfigError, match=words) as said:
        make_plan(load_job(None, None, [*keys_of(path), "optim.clip_norm=null"]), 2, "cpu")
    assert "\n" not in str(said.value)
    assert path in str(said.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "there is no file"),
        ("{", "1 cannot be read: it is not JSON"),
        ("[1]", "holds list, and a JSON object"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(text, words, tmp_path):
    path = str(tmp_path / "none.json") if text is None else written(tmp_path, text)
    with pytest.raises(ConfigError, match=words) as said:
        load_job(None, None, [f"strategy.deepspeed={path}"])
    assert "\n" not in str(said.value)


def test_another_technique_beside_the_file_is_refused(tmp_path):
    path = written(tmp_path)
    for strategy, words in (
        ("ddp", "strategy.replicate.name=ddp, but strategy.deepspeed="),
        ("fsdp", "strategy.replicate.engine=torch, but strategy.deepspeed="),
    ):
        with pytest.raises(ConfigError, match=words):
            load_job(None, strategy, [f"strategy.deepspeed={path}"])
