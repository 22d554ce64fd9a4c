"""A DeepSpeed configuration file: used unchanged, "auto" filled in, contradictions refused."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from support.deepspeed_files import write_config

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.prepare import left_to_the_loop
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys, load_job
from bigtrain.strategies.zero import Zero
from bigtrain.strategies.zero.on_deepspeed.config import deepspeed_settings


def keys_of(path: str, **more: Any) -> list[str]:
    keys = {
        "train.global_batch_size": 8,
        "train.micro_batch_size": 2,
        **more,
    }
    return [f"strategy.deepspeed={path}", *(f"{key}={value}" for key, value in keys.items())]


def test_auto_is_filled_in_and_the_rest_taken_as_it_is(tmp_path):
    path = write_config(tmp_path)
    words = [*keys_of(path), "optim.clip_norm=0.5", "train.precision=bf16"]
    job = load_job(None, "zero2", words)
    plan = make_plan(job, 2, "cpu")
    technique = plan.techniques["replicate"]
    assert isinstance(technique, Zero)
    settings = deepspeed_settings(technique, plan, 1_000_000)
    assert (settings["train_batch_size"], settings["train_micro_batch_size_per_gpu"]) == (8, 2)
    assert (settings["gradient_accumulation_steps"], settings["gradient_clipping"]) == (2, 0.5)
    assert (settings["bf16"]["enabled"], settings["fp16"]["enabled"]) == (True, False)
    assert "optimizer" not in settings
    assert "scheduler" not in settings
    assert settings["steps_per_print"] == 1000000
    zero = settings["zero_optimization"]
    assert (zero["stage"], zero["overlap_comm"]) == (2, True)
    assert zero["reduce_bucket_size"] == 1952
    assert "stage3_prefetch_bucket_size" not in zero  # the file does not have this key


def test_a_batch_of_the_file_that_does_not_divide_is_to_be_changed_there(tmp_path):
    path = write_config(tmp_path, train_batch_size=17, train_micro_batch_size_per_gpu=8)
    with pytest.raises(ConfigError) as refused:
        make_plan(load_job(None, None, [f"strategy.deepspeed={path}"]), 2, "cpu")
    assert "train.global_batch_size=17 is not a multiple" in str(refused.value)
    assert str(refused.value).endswith(
        f"{path} says train_batch_size and train_micro_batch_size_per_gpu: write the number "
        'there, or "auto".'
    )
    free = write_config(tmp_path, train_batch_size="auto")
    with pytest.raises(ConfigError, match=r"micro_batch_size out\.$"):
        make_plan(load_job(None, None, keys_of(free, **{"train.global_batch_size": 17})), 2, "cpu")


def test_the_stage_is_the_files(tmp_path):
    path = write_config(tmp_path, zero_optimization={"stage": 3})
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
    "ranks": (
        {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
        },
        r"train_batch_size=8 is not .* = 2 \* 1 \* 2 = 4. Start as many ranks",
    ),
    "micro": (
        {"train_micro_batch_size_per_gpu": 4},
        "per_gpu=4.*train.micro_batch_size=2. Use train.micro_batch_size=4",
    ),
    "accumulation": ({"gradient_accumulation_steps": 7}, "=7.*train.accumulation_steps=2"),
    "clipping": (
        {"gradient_clipping": 1.0},
        "clipping=1.0, but optim.clip_norm=null. Use optim.clip_norm=1.0",
    ),
    "bf16": (
        {"bf16": {"enabled": "true"}},
        "bf16.enabled=true, but train.precision=fp32. Use train.precision=bf16",
    ),
    "fp16": ({"fp16": {"enabled": True}}, "fp16.enabled=true.*bf16"),
    "stage 0": ({"zero_optimization": {"stage": 0}}, "shards nothing.*--strategy ddp"),
    "no stage": ({"zero_optimization": {"stage": 7}}, "stage=7 is not a stage"),
    "lr": (
        {"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}},
        r"optimizer.params.lr=0.5, but optim.lr=0.25. Use optim.lr=0.5, or",
    ),
    "betas": (
        {"optimizer": {"type": "AdamW", "params": {"betas": [0.8, 0.9]}}},
        r"betas=\[0.8, 0.9\], but optim.betas=\[0.9,0.95\]. Use 'optim.betas=\[0.8,0.9\]', or",
    ),
    "type": ({"optimizer": {"type": "SGD"}}, "type=SGD, but optim.name=adamw. Use optim.name=sgd"),
    "foreign": (
        {"optimizer": {"type": "Lamb"}},
        "optimizer.type=Lamb is not supported. Write AdamW, Adam or SGD",
    ),
    "schedule": (
        {
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "total_num_steps": "auto",
                    "warmup_num_steps": "auto",
                    "warmup_max_lr": "auto",
                },
            }
        },
        "scheduler.type=WarmupDecayLR, but optim.schedule=constant. Leave optim.schedule out",
    ),
    "no length": (
        {"scheduler": {"type": "WarmupDecayLR"}},
        'WarmupDecayLR needs params.total_num_steps. Write "auto"',
    ),
    "warm-up": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 17}}},
        "warmup_num_steps=17, but optim.warmup_steps=3. Use optim.warmup_steps=17",
    ),
    "another kind": (
        {"optimizer": {"type": "AdamW", "params": {"amsgrad": True, "torch_adam": True}}},
        "optimizer.params.amsgrad=true, and a job supports false only. Leave it out",
    ),
    "no such thing": (
        {"optimizer": {"type": "AdamW", "params": {"max_coeff": 0.3}}},
        "optimizer.params.max_coeff=0.3, and a job supports none. Leave it out",
    ),
    "another warm-up": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}},
        "scheduler.params.warmup_type='cubic': .*'log' or 'linear', as in DeepSpeed",
    ),
    "no warm-up": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
        'warmup_num_steps=0: .* Write "auto" with optim.warmup_steps=0 for none',
    ),
    "a typing error": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 5}}},
        "scheduler.params.warmup_steps: WarmupLR does not have it, did you mean 'warmup_num_steps'",
    ),
    "another schedule": (
        {"scheduler": {"type": "CosineAnnealingLR"}},
        "scheduler.type=CosineAnnealingLR. A job supports WarmupLR, WarmupDecayLR, Warm.*OneCycle",
    ),
    "no such warm-up": (
        {"scheduler": {"type": "WarmupLR"}},
        r"WarmupLR \(warmup_num_steps is 1000 by default\), but optim.warmup_steps=3.",
    ),
    "no number": ({"gradient_clipping": [1]}, r"clipping=\[1\], but optim.clip_norm=null"),
    "unknown": (
        {"zero_optimization": {"stage": 2, "no_such_key": 1}},
        "zero_optimization.no_such_key is not a key of DeepSpeed.",
    ),
    "DeepSpeed's own": (
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": -1}},
        "DeepSpeed refuses it: .*reduce_bucket_size",
    ),
    "removed": ({"sparse_gradients": True}, "sparse_gradients=true is not supported"),
}
CONTRADICTED = (
    *("optim.clip_norm=null", "optim.lr=0.25", "optim.betas=[0.9,0.95]", "optim.name=adamw"),
    *("train.precision=fp32", "optim.warmup_steps=3"),
)
"""Words of the command line that contradict the file."""


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_what_contradicts_the_job_is_refused_in_one_line(case, tmp_path):
    changes, words = CONTRADICTIONS[case]
    path = write_config(tmp_path, **changes)
    job_words = [*keys_of(path), *CONTRADICTED]
    job_words += ["optim.schedule=constant"] if case == "schedule" else []
    with pytest.raises(ConfigError, match=words) as refusal:
        make_plan(load_job(None, None, job_words), 2, "cpu")
    assert "\n" not in str(refusal.value)
    assert path in str(refusal.value)


@pytest.mark.parametrize(
    "params",
    [
        {"betas": [0.8, 0.9], "lr": 1e-05},
        {"weight_decay": 0, "eps": 1e-06, "betas": [0, 0.9]},
        {"adam_w_mode": False, "betas": [0.9, 0.95]},
    ],
)
def test_what_a_refusal_advises_can_be_pasted_until_it_is_none(params, tmp_path):
    kind = "Adam" if "adam_w_mode" in params else "AdamW"
    path = write_config(tmp_path, optimizer={"type": kind, "params": params}, gradient_clipping=0)
    words = [*keys_of(path), *CONTRADICTED, "optim.eps=1e-7", "optim.weight_decay=0.5"]
    for _ in range(len(CONTRADICTED) + 2):
        try:
            job = load_job(None, None, words)
            break
        except ConfigError as refused:
            words += shlex.split(str(refused).partition(" Use ")[2].partition(", or write ")[0])
    assert list(job.optim.betas) == params["betas"]
    assert job.optim.name == kind.lower()
    assert job.optim.clip_norm is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "there is no file"),
        ("{", "1 cannot be read: it is not JSON"),
        ("[1]", "holds list, and a JSON object"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(text, words, tmp_path):
    path = str(tmp_path / "none.json") if text is None else write_config(tmp_path, text)
    with pytest.raises(ConfigError, match=words) as refusal:
        load_job(None, None, [f"strategy.deepspeed={path}"])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"gradient_clipping": -1},
            r'clipping: needs more than 0 \(got -1\)\. .*"auto" and set opt',
        ),
        ({"train_batch_size": "many"}, r'batch_size: needs a whole number \(got .*, or "auto" and'),
        ({"train_batch_size": 10**400}, r"train_batch_size: .*a whole number is at most 9,223,"),
    ],
)
def test_a_value_that_is_none_is_changed_in_the_file(changes, words, tmp_path):
    path = write_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=words) as refusal:
        load_job(None, None, [f"strategy.deepspeed={path}"])
    assert str(refusal.value).startswith(f"{path}: ")
    assert "Set " not in str(
        refusal.value
    )  # setting it on the command line would contradict the file


def test_a_loop_of_the_users_own_is_told_what_it_does_itself(tmp_path):
    path = write_config(tmp_path)
    job = job_from_keys("zero2", {"strategy.deepspeed": path})
    (line,) = left_to_the_loop(job)
    assert line == (
        f"{path}: not used: optimizer, scheduler: the loop has its own optimizer and its rate"
    )
    path = write_config(tmp_path, optimizer={"type": "auto"}, scheduler={})
    assert left_to_the_loop(job_from_keys("zero2", {"strategy.deepspeed": path})) == []
    assert left_to_the_loop(job_from_keys("zero2", {})) == []


def test_another_technique_beside_the_file_is_refused(tmp_path):
    path = write_config(tmp_path)
    for strategy, words in (
        ("ddp", "strategy.replicate.name=ddp, but strategy.deepspeed="),
        ("fsdp", "strategy.replicate.engine=torch, but strategy.deepspeed="),
    ):
        with pytest.raises(ConfigError, match=words):
            load_job(None, strategy, [f"strategy.deepspeed={path}"])
