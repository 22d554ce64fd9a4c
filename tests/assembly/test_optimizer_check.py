"""Optimizers that do not fit a strategy are refused, and the messages name the reason and
the fix.
"""

from __future__ import annotations

import pytest

from bigtrain.assembly.make_plan import make_plan
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys

ADAFACTOR = {"optim.name": "adafactor"}
LOW = {"train.precision": "bf16", "optim.master_weights": False}

REFUSED = {
    "adafactor on shards": ("fsdp", 2, ADAFACTOR, ["whole parameters", "shards", "--strategy ddp"]),
    "adafactor on pieces": ("zero1_torch", 2, ADAFACTOR, ["pieces", "--strategy ddp"]),
    "adafactor in DeepSpeed": ("zero2", 2, ADAFACTOR, ["flat copies", "--strategy ddp"]),
    "adafactor on disk": (
        "single_offload_disk",
        1,
        ADAFACTOR,
        ["strategy.offload.optimizer=disk", "strategy.offload=null"],
    ),
    "few bits on shards": (
        "fsdp",
        2,
        {"optim.name": "adamw_8bit"},
        ["blocks of a whole parameter", "optim.name=adamw optim.state=bf16"],
    ),
    "bf16 state in DeepSpeed": (
        "pipeline_deepspeed",
        2,
        {"optim.state": "bf16"},
        ["in fp32", "--strategy fsdp or --strategy zero1_torch", "optim.state=fp32"],
    ),
    "stochastic rounding of tied pieces": (
        "1f1b_zero1",
        4,
        {"optim.state": "bf16"},
        ["drift apart", "optim.stochastic_rounding=false", "--strategy 1f1b_fsdp"],
    ),
    "stochastic rounding of pieces beside slices": (
        "zero1_torch+tensor",
        4,
        {"optim.state": "bf16", "mesh.tp": 2},
        ["mesh.tp", "drift apart", "optim.stochastic_rounding=false", "--strategy fsdp+tensor"],
    ),
    "stochastic rounding of what is moved in pieces": (
        "tensor+offload_optimizer_cpu",
        2,
        {"optim.state": "bf16"},
        ["mesh.tp", "drift apart", "optim.stochastic_rounding=false"],
    ),
    "bf16 parameters in fp32": (
        "single",
        1,
        {"optim.master_weights": False},
        ["train.precision is fp32", "train.precision=bf16", "optim.master_weights=true"],
    ),
    "bf16 parameters in shards": ("fsdp", 2, LOW, ["shards of fp32 parameters", "--strategy ddp"]),
    "bf16 parameters in DeepSpeed": ("zero1", 2, LOW, ["flat copies", "--strategy ddp"]),
    "bf16 parameters with copies": (
        "single_offload_disk",
        1,
        LOW,
        ["strategy.offload.optimizer=disk", "strategy.offload=null"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_any_process_group(case):
    strategy, ranks, keys, words = REFUSED[case]
    with pytest.raises(ConfigError) as refusal:
        make_plan(job_from_keys(strategy, {"train.global_batch_size": 8, **keys}), ranks, "cpu")
    for word in words:
        assert word in str(refusal.value)


KEYS_REFUSED = {
    "state": ({"optim.name": "sgd", "optim.state": "bf16"}, "Leave optim.state out"),
    "masters": (
        {"optim.name": "adafactor", **LOW},
        "Use optim.name=adamw, or optim.master_weights=true",
    ),
    "nothing to round": (
        {"optim.stochastic_rounding": True},
        "Set optim.state=bf16 or optim.master_weights=false, or leave it out",
    ),
    "no fused adafactor": (
        {**ADAFACTOR, "optim.implementation": "fused"},
        "Use optim.implementation=auto",
    ),
    "its own kernel": (
        {"optim.state": "bf16", "optim.implementation": "foreach"},
        "Use optim.implementation=auto",
    ),
}


@pytest.mark.parametrize("case", KEYS_REFUSED)
def test_keys_that_exclude_each_other(case):
    keys, fix = KEYS_REFUSED[case]
    with pytest.raises(ConfigError) as refusal:
        job_from_keys("single", keys)
    assert fix in str(refusal.value)
