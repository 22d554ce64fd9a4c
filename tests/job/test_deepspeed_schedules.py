"""The schedulers of DeepSpeed files give the same rates as DeepSpeed's classes."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from support.deepspeed_files import write_config
from torch import nn

from bigtrain.errors import ConfigError
from bigtrain.job.deepspeed_json import schedule_of
from bigtrain.job.load import load_job
from bigtrain.strategies.deepspeed_adapter import load_deepspeed

STEPS, RATE = 50, 2e-3
CYCLE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 2e-3, "cycle_momentum": False}
SECTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "only defaults": ("WarmupLR", {}),
    "log, the optimizer's rate": ("WarmupLR", {"warmup_num_steps": 20}),
    "log, its own rates": (
        "WarmupLR",
        {"warmup_num_steps": 20, "warmup_max_lr": 3e-3, "warmup_min_lr": 1e-5},
    ),
    "linear": ("WarmupLR", {"warmup_num_steps": 7, "warmup_type": "linear"}),
    "one step": ("WarmupLR", {"warmup_num_steps": 1}),
    "decay, its own highest rate": (
        "WarmupDecayLR",
        {"total_num_steps": 50, "warmup_num_steps": 10},
    ),
    "decay, linear": (
        "WarmupDecayLR",
        {
            **{"total_num_steps": 80, "warmup_num_steps": 10, "warmup_type": "linear"},
            **{"warmup_max_lr": 1e-2, "warmup_min_lr": 1e-3},
        },
    ),
    "decay, shorter than its warm-up": (
        "WarmupDecayLR",
        {"total_num_steps": 60, "warmup_num_steps": 100},
    ),
    "cosine": ("WarmupCosineLR", {"total_num_steps": 50, "warmup_num_steps": 10}),
    "cosine, ratios": (
        "WarmupCosineLR",
        {
            **{"total_num_steps": 64, "warmup_num_steps": 8, "warmup_type": "linear"},
            **{"warmup_min_ratio": 0.1, "cos_min_ratio": 0.25},
        },
    ),
    "cosine, only defaults": ("WarmupCosineLR", {"total_num_steps": 2000}),
    "range test": ("LRRangeTest", {"lr_range_test_step_size": 5, "lr_range_test_step_rate": 0.3}),
    "range test, stairs": (
        "LRRangeTest",
        {
            **{"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 7},
            **{"lr_range_test_step_rate": 2.5, "lr_range_test_staircase": True},
        },
    ),
    "one cycle": ("OneCycle", {**CYCLE, "cycle_first_step_size": 12}),
    "one cycle, decay": (
        "OneCycle",
        {
            **CYCLE,
            **{"cycle_first_step_size": 9, "cycle_second_step_size": 15},
            **{"decay_step_size": 4, "decay_lr_rate": 0.7},
        },
    ),
    "one cycle, stairs": (
        "OneCycle",
        {
            **CYCLE,
            **{"cycle_first_step_size": 11, "cycle_second_step_size": 17},
            **{"cycle_first_stair_count": 4, "cycle_second_stair_count": 6},
        },
    ),
    "one cycle, only up": (
        "OneCycle",
        {**CYCLE, "cycle_first_step_size": 13, "cycle_second_step_size": 0},
    ),
}


def by_deepspeed(kind: str, params: dict[str, Any]) -> list[float]:
    """The rates with which an optimizer steps under DeepSpeed's scheduler class."""
    load_deepspeed("cpu")
    schedules = import_module("deepspeed.runtime.lr_schedules")
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler = getattr(schedules, kind)(optimizer, **params)
    rates = []
    for _ in range(STEPS):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        scheduler.step()
    return rates


def keys(path: str, *more: str) -> list[str]:
    return [f"strategy.deepspeed={path}", f"train.steps={STEPS}", *more]


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is missing")
@pytest.mark.parametrize("case", SECTIONS)
def test_each_step_has_the_rate_of_deepspeeds_own_class(case, tmp_path):
    kind, params = SECTIONS[case]
    path = write_config(tmp_path, scheduler={"type": kind, "params": params})
    by_optimizer = kind == "WarmupCosineLR" or (
        kind == "WarmupLR" and "warmup_max_lr" not in params
    )
    rate = [f"optim.lr={RATE}"] if by_optimizer else []
    job = load_job(None, None, keys(path, *rate))
    assert job.optim.schedule == "deepspeed"
    schedule = schedule_of(path, dict(job.optim), job.optim.warmup_steps, STEPS)
    assert schedule is not None
    rates = [schedule.rate(step, job.optim.lr) for step in range(STEPS)]
    assert rates == pytest.approx(by_deepspeed(kind, params), rel=1e-12, abs=1e-18)
    assert len(set(rates)) > 1


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is missing")
def test_auto_is_what_the_job_says(tmp_path):
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    section = {"type": "WarmupDecayLR", "params": dict.fromkeys(names, "auto")}
    path = write_config(tmp_path, scheduler=section)
    job = load_job(None, None, keys(path, "optim.lr=3e-3", "optim.warmup_steps=12"))
    assert (job.optim.lr, job.optim.warmup_steps) == (3e-3, 12)
    schedule = schedule_of(path, dict(job.optim), 12, STEPS)
    assert schedule is not None
    params = {"warmup_max_lr": 3e-3, "warmup_num_steps": 12, "total_num_steps": STEPS}
    expected = by_deepspeed("WarmupDecayLR", params)
    rates = [schedule.rate(step, job.optim.lr) for step in range(STEPS)]
    assert rates == pytest.approx(expected, rel=1e-12)
    without = schedule_of(path, dict(job.optim), 0, STEPS)
    assert without is not None
    assert without.rate(0, 3e-3) == 3e-3  # a job without a warm-up starts at the full rate


def test_a_run_that_is_longer_than_its_decay_is_refused(tmp_path):
    section = {"type": "WarmupCosineLR", "params": {"total_num_steps": 40, "warmup_num_steps": 4}}
    path = write_config(tmp_path, scheduler=section)
    job = load_job(None, None, keys(path))
    with pytest.raises(ConfigError, match=r"total_num_steps=40, but the run has 50 steps.*=40, or"):
        schedule_of(path, dict(job.optim), 4, STEPS)
    assert schedule_of(path, dict(job.optim), 4, 30) is not None


def test_a_momentum_that_cycles_is_refused_where_there_are_betas(tmp_path):
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.25}
    section = {"type": "OneCycle", "params": params}
    path = write_config(tmp_path, scheduler=section)
    with pytest.raises(ConfigError, match='cycle_momentum is true .*"cycle_momentum": false'):
        load_job(None, None, keys(path))
    path = write_config(tmp_path, scheduler=section, optimizer={"type": "SGD"})
    assert load_job(None, None, keys(path)).optim.lr == 0.25  # DeepSpeed does not cycle it either


def test_the_file_stands_above_the_job_and_words_agree_or_are_refused(tmp_path):
    section = {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 2e-3}}
    path = write_config(tmp_path, scheduler=section)
    job = load_job(None, None, keys(path))
    assert (job.optim.warmup_steps, job.optim.lr, job.optim.final_lr_share) == (20, 2e-3, 0)
    words = ("optim.schedule=constant", "optim.warmup_steps=20", "optim.lr=2e-3")
    assert load_job(None, None, keys(path, *words)).optim.schedule == "constant"
    again = load_job(None, None, [f"strategy.replicate={{name: zero, config: {path}}}"])
    assert again.optim.schedule == "deepspeed"
    with pytest.raises(ConfigError, match=r"schedule=cosine. Leave optim.schedule out"):
        load_job(None, None, keys(path, "optim.schedule=cosine"))
    with pytest.raises(
        ConfigError, match="optim.schedule=deepspeed needs the scheduler of a DeepSpeed file"
    ):
        load_job(None, None, ["optim.schedule=deepspeed"])
