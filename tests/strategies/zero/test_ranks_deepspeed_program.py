"""A run with a DeepSpeed file, compared with a plain DeepSpeed program with the same file."""

from __future__ import annotations

import importlib
import itertools
import json
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.deepspeed_files import write_config
from support.nets import TinyLM, tokens
from support.parity import UNSEEN, shuffled_steps
from support.ranks import run_ranks
from support.whole import whole_tensors

from bigtrain.data import GlobalOrder, StepLoader
from bigtrain.engine.engine import Engine
from bigtrain.job.deepspeed_json import schedule_of
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.optim.factory import optimizer_factory
from bigtrain.strategies.deepspeed_adapter import connect_deepspeed

# Not imported here: the ranks import this module, and must load DeepSpeed as a run does.
pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is missing")
STEPS, BATCH = 12, 8
SCHEDULERS: dict[str, dict[str, Any]] = {
    "log": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 20, "warmup_num_steps": 6, "warmup_max_lr": 0.02},
    },
    "cosine": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": STEPS, "warmup_num_steps": 4, "warmup_min_ratio": 0.1},
    },
    "one cycle": {
        "type": "OneCycle",
        "params": {
            **{"cycle_min_lr": 1e-3, "cycle_max_lr": 0.02, "cycle_first_step_size": 5},
            "cycle_momentum": False,
        },
    },
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "log": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.9], "torch_adam": True}},
    "cosine": {
        "type": "Adam",
        "params": {
            **{"lr": 0.01, "eps": 1e-5, "weight_decay": 0.1},
            **{"torch_adam": True, "adam_w_mode": False},
        },
    },
    "one cycle": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
}
Curve = list[tuple[float, float]]
"""(loss, rate) of each step."""


def bigtrain_curve(context, path):
    """The curve of a bigtrain run with the file, and its initial weights."""
    keys = {"strategy.deepspeed": path, "train.steps": STEPS, **UNSEEN}
    job = job_from_keys("zero2", keys)
    schedule = schedule_of(path, dict(job.optim), job.optim.warmup_steps, STEPS)
    loss, samples = CrossEntropy(), tokens(16, ignored=False)
    curve: Curve = []
    with Engine(
        TinyLM,
        loss,
        optimizer_factory(job.optim),
        job,
        context,
        learning_rate=lambda step: schedule.rate(step, job.optim.lr),
    ) as engine:
        weights = whole_tensors(engine.runner.state())
        weights = {n: t.clone() for n, t in weights.items() if n.startswith("model.")}
        for batch in shuffled_steps(engine, samples, loss, STEPS):
            result = engine.step(batch)
            curve.append((result.loss, result.lr))
    return curve, weights


def deepspeed_curve(context, path, weights):
    """The curve of a plain DeepSpeed program with the file, on one rank."""
    with ExitStack() as closing:
        connect_deepspeed(context, closing)  # without this DeepSpeed would compile an extension
        return program(path, weights)


def program(path: str, weights: dict[str, torch.Tensor]) -> Curve:
    deepspeed: Any = importlib.import_module("deepspeed")
    config = {k: v for k, v in json.loads(Path(path).read_text()).items() if v != "auto"}
    config["train_batch_size"] = BATCH
    config.pop("train_micro_batch_size_per_gpu")
    model = TinyLM()
    model.load_state_dict({name.removeprefix("model."): t for name, t in weights.items()})
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, dist_init_required=False
    )
    samples = tokens(16, ignored=False)
    curve: Curve = []
    order = GlobalOrder(len(samples), BATCH, seed=3)
    loader = StepLoader(samples, order, count=CrossEntropy().count, micro_batch_size=BATCH)
    for step in itertools.islice(iter(loader), STEPS):
        (batch,) = step.micro_batches
        logits = engine(batch.inputs)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        rate = float(engine.optimizer.optimizer.param_groups[0]["lr"])
        engine.backward(loss)
        engine.step()
        curve.append((float(loss.detach()), rate))
    engine.destroy()
    return curve


@pytest.mark.parametrize("case", SCHEDULERS)
def test_losses_and_rates_are_those_of_a_program_of_deepspeeds_own(case, tmp_path):
    path = write_config(
        tmp_path,
        json.dumps(
            {
                "train_batch_size": BATCH,
                "train_micro_batch_size_per_gpu": 2,
                "gradient_clipping": 0.5,
                "optimizer": OPTIMIZERS[case],
                "scheduler": SCHEDULERS[case],
                "zero_optimization": {"stage": 2},
                "zero_allow_untested_optimizer": True,
            }
        ),
    )
    curve, weights = run_ranks(bigtrain_curve, 2, path)[0]
    (expected,) = run_ranks(deepspeed_curve, 1, path, weights, force_group=True)
    assert [rate for _, rate in curve] == pytest.approx([r for _, r in expected], rel=1e-12)
    assert [loss for loss, _ in curve] == pytest.approx([x for x, _ in expected], abs=2e-5)
    assert expected[-1][0] < expected[0][0] - 0.01
