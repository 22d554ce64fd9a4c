"""The optimizer's step inside the backward pass: on one process, and the refusals."""

from __future__ import annotations

import pytest
import torch
from support.nets import TinyLM
from support.released import RELEASE, Deep, run_broken, train_alone
from torch import nn
from torch.utils.checkpoint import checkpoint

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.engine import Engine
from bigtrain.errors import BigtrainError, ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.optim.factory import optimizer_factory
from bigtrain.ranks.context import RunContext


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_numbers_are_the_same_bits(optimizer):
    keys = {"optim.name": optimizer, "optim.weight_decay": 0.1}
    keys |= {"optim.momentum": 0.9} if optimizer == "sgd" else {}
    plain, released = train_alone(keys), train_alone({**keys, **RELEASE})
    for plain_step, released_step in zip(plain[0], released[0], strict=True):
        assert (plain_step.loss, plain_step.lr) == (released_step.loss, released_step.lr)
        assert plain_step.grad_norm == pytest.approx(released_step.grad_norm, rel=1e-6)
    assert plain[1].keys() == released[1].keys()
    for name, value in plain[1].items():
        assert torch.equal(value, released[1][name]), name


def test_gradients_leave_the_peak_and_the_prediction_is_exact():
    keys = {"optim.name": "sgd"}
    _, weights, before, _ = train_alone(keys, model=Deep, steps=2)
    _, _, after, predicted = train_alone({**keys, **RELEASE}, model=Deep, steps=2)
    gradients = sum(v.numel() * 4 for n, v in weights.items() if n.startswith("model."))
    assert before.breakdown.gradients >= 0.85 * gradients
    assert before.bytes - after.bytes >= 0.85 * gradients
    assert after.breakdown.gradients <= 0.15 * gradients
    assert predicted.breakdown == after.breakdown


def test_a_gradient_that_is_no_number_is_told_after_the_update():
    message, _ = run_broken(RunContext.alone(torch.device("cpu")), "gradient", "single")
    assert "the gradient norm is" in message
    assert "with optim.release_gradients=true the parameters were updated already" in message
    assert "Resume from the last checkpoint with optim.release_gradients=false" in message


def test_there_are_no_gradients_to_look_at():
    job = job_from_keys("single", {"train.global_batch_size": 8, **RELEASE})
    made, context = optimizer_factory(job.optim), RunContext.alone(torch.device("cpu"))
    with (
        Engine(TinyLM, CrossEntropy(), made, job, context) as engine,
        pytest.raises(BigtrainError, match="Set optim.release_gradients=false"),
    ):
        engine.runner.gradients()


REFUSED = {
    "ddp": (2, {}, ["strategy ddp", "in buckets", "--strategy fsdp"]),
    "zero1_torch": (2, {}, ["strategy zero1_torch", "in buckets", "--strategy fsdp"]),
    "oss": (2, {}, ["strategy oss", "in buckets", "--strategy fsdp"]),
    "zero2": (2, {}, ["strategy zero2", "in buckets", "--strategy fsdp"]),
    "zero3": (1, {}, ["strategy zero3", "its own optimizer step", "--strategy single"]),
    "1f1b": (2, {}, ["strategy 1f1b", "stages", "--strategy fsdp"]),
    "layer_split": (2, {}, ["strategy layer_split", "stages", "--strategy fsdp"]),
    "single_offload_disk": (1, {}, ["strategy.offload", "strategy.offload=null"]),
    "single": (
        1,
        {"train.micro_batch_size": 2},
        ["this job has 4", "train.accumulation_steps=1", "train.micro_batch_size=8"],
    ),
}


@pytest.mark.parametrize("strategy", REFUSED)
def test_what_it_cannot_be_joined_with(strategy):
    ranks, keys, words = REFUSED[strategy]
    job = job_from_keys(strategy, {"train.global_batch_size": 8, **RELEASE, **keys})
    with pytest.raises(ConfigError) as refusal:
        make_plan(job, ranks, "cpu")
    for word in ("optim.release_gradients=true", "optim.release_gradients=false", *words):
        assert word in str(refusal.value)


def test_clipping_needs_all_gradients():
    with pytest.raises(ConfigError) as refusal:
        job_from_keys("single", {**RELEASE, "optim.clip_norm": 1.0})
    assert "clip_norm=1.0 needs it. Use optim.clip_norm=null" in str(refusal.value)


def test_a_second_gradient_in_a_step_is_refused():
    class Thrice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            for _ in range(3):
                x = checkpoint(lambda t: self.inner(t).relu() + t, x, use_reentrant=True)
            return self.head(x)

    with (
        engine_of(Thrice) as engine,
        pytest.raises(
            ConfigError, match=r"inner\.\w+ got a second gradient.*release_gradients=false"
        ),
    ):
        engine.step((torch.randn(8, 4, requires_grad=True), torch.arange(8) % 3))


def engine_of(model, optimizer=None):
    make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    words = {"train.global_batch_size": 8, "memory.predict": False, **RELEASE}
    context = RunContext.alone(torch.device("cpu"))
    return Engine(model, CrossEntropy(), make, job_from_keys("single", words), context)


def test_settings_that_are_loaded_or_replaced_count():
    def weights(change):
        torch.manual_seed(0)
        with engine_of(lambda: nn.Linear(4, 3)) as engine:
            change(engine.runner.optimizer)
            engine.step((torch.ones(8, 4), torch.arange(8) % 3))
            return engine.model.weight.detach().clone()

    def loaded(optimizer):
        state = optimizer.state_dict()
        state["param_groups"][0]["lr"] = 0.5
        optimizer.load_state_dict(state)

    def set_there(optimizer):
        optimizer.param_groups[0]["lr"] = 0.5

    assert torch.equal(weights(loaded), weights(set_there))
    assert not torch.equal(weights(loaded), weights(lambda _: None))


class Counting(torch.optim.Optimizer):
    """Counts its steps in the group, once for all parameters."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.1, "step": 0})

    def step(self, closure=None):
        del closure
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=group["lr"] / group["step"])


def test_an_optimizer_that_counts_for_all_parameters_is_refused():
    with (
        engine_of(lambda: nn.Linear(4, 3), Counting) as engine,
        pytest.raises(ConfigError, match="Counting counts 'step' for all parameters"),
    ):
        engine.step((torch.ones(8, 4), torch.arange(8) % 3))
