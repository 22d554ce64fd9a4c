"""Optimizer keys of public scripts: torch's numbers, for every division of the parameters."""

from __future__ import annotations

import pytest
import torch
from support.nets import TinyLM, tokens
from support.parity import largest_difference, train
from support.ranks import run_ranks

from bigtrain.errors import ConfigError
from bigtrain.job.load import load_job
from bigtrain.job.optim_keys import OptimConfig
from bigtrain.optim.factory import learning_rate, optimizer_factory

CASES = {
    "nesterov": (
        {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "dampening": (
        {"name": "sgd", "lr": 0.1, "momentum": 0.9, "dampening": 0.5},
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5),
    ),
    "adam": (
        {"name": "adam", "lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1},
        lambda p: torch.optim.Adam(p, 1e-2, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1),
    ),
    "adamw": (
        {"name": "adamw", "lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1},
        lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-3, weight_decay=0.1),
    ),
}


def job_records(context, strategy, keys):
    """A record for each case; the optimizers are made from the job's keys."""
    made = [optimizer_factory(OptimConfig(**given)) for given, _ in CASES.values()]
    data = tokens(22)
    return [train(context, TinyLM, data, strategy, keys, 4, optimizer) for optimizer in made]


def torch_records(context, keys):
    """The same with torch's optimizers in one process, checked against a plain loop."""
    checked = {**keys, "train.check_first_steps": 4}
    data = tokens(22)
    return [train(context, TinyLM, data, "single", checked, 4, make) for _, make in CASES.values()]


@pytest.fixture(scope="module")
def expected():
    return run_ranks(torch_records, 1, {"train.precision": "fp64"})[0]


@pytest.mark.parametrize(
    ("strategy", "ranks", "tolerance"),
    [
        *(("single", 1, 1e-12), ("zero1_torch", 2, 1e-10), ("fsdp", 2, 1e-10)),
        *(("1f1b", 2, 1e-10), ("oss", 2, 1e-10), ("single+offload_disk", 1, 1e-10)),
        *(("zero2", 2, 1e-4), ("zero3", 2, 1e-4)),
    ],
)
def test_every_engine_has_torchs_numbers(strategy, ranks, tolerance, expected):
    # DeepSpeed does not support fp64
    keys = {} if tolerance == 1e-4 else {"train.precision": "fp64"}
    pp = 2 if strategy == "1f1b" else 1
    for records in run_ranks(job_records, ranks, strategy, keys, pp=pp):
        for case, expected_record, record in zip(CASES, expected, records, strict=True):
            assert largest_difference(expected_record, record) < tolerance, case
            assert len(set(expected_record.losses)) == len(expected_record.losses), case


REFUSED = {
    "nesterov of adamw": (["optim.nesterov=true"], "nesterov=true is for sgd, and name is adamw"),
    "dampening of adam": (
        ["optim.name=adam", "optim.dampening=0.5"],
        "dampening=0.5 is for sgd, and name is adam. Leave optim.dampening out",
    ),
    "momentum of adafactor": (
        ["optim.momentum=0.9", "optim.name=adafactor"],
        "momentum=0.9 is for sgd, and name is adafactor",
    ),
    "betas of sgd": (
        ["optim.name=sgd", "optim.betas=[0.8,0.9]"],
        r"betas=\[0.8,0.9\] is for adamw, adam, adamw_8bit, adamw_4bit, and name is sgd",
    ),
    "eps of sgd": (["optim.name=sgd", "optim.eps=1e-6"], "eps=1e-06 is for adamw"),
    "nesterov without momentum": (
        ["optim.name=sgd", "optim.nesterov=true"],
        r".*momentum=0 dampening=0. Use optim.momentum=0.9 optim.dampening=0",
    ),
    "nesterov with dampening": (
        ["optim.name=sgd", "optim.momentum=0.9", "optim.nesterov=true", "optim.dampening=0.1"],
        r".*momentum=0.9 dampening=0.1. Use optim.momentum=0.9 optim.dampening=0",
    ),
    "a factor without a warm-up": (
        ["optim.warmup_steps=0", "optim.warmup_factor=0.1"],
        "warmup_factor=0.1 is for a warm-up, and there is none",
    ),
    "bf16 state of adam": (["optim.name=adam", "optim.state=bf16"], "state=bf16 is for name=adamw"),
    "no master weights of adam": (
        ["optim.name=adam", "optim.master_weights=false"],
        "master_weights=false is for adamw",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_key_that_an_optimizer_has_not_is_refused_by_name(case):
    words, message = REFUSED[case]
    with pytest.raises(ConfigError, match=f"optim: {message}"):
        load_job(None, "single", words)


def test_another_optimizer_leaves_what_only_the_one_below_it_has():
    job = load_job("default", "single", ["optim.name=sgd", "optim.momentum=0.9"])
    assert job.optim.betas == OptimConfig.model_fields["betas"].default
    assert load_job("imagenet", "single", ["optim.name=adamw"]).optim.momentum == 0


def test_a_warm_up_begins_at_its_factor():
    config = OptimConfig(lr=2.0, warmup_steps=4, warmup_factor=0.1)
    schedule_rates = [learning_rate(config, step, 10, 8, 5) for step in range(6)]
    assert schedule_rates == pytest.approx([0.2, 0.65, 1.1, 1.55, 2.0, 2.0])
    linear = torch.optim.lr_scheduler.LinearLR
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    scheduler = linear(optimizer, start_factor=0.1, total_iters=4)
    by_torch = []
    for _ in range(6):
        by_torch.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert schedule_rates == pytest.approx(by_torch)
    epochs = OptimConfig(lr=2.0, warmup_epochs=0.8, warmup_factor=0.1)
    assert [learning_rate(epochs, step, 10, 8, 5) for step in range(6)] == schedule_rates
