"""The learning rate as a function of the step, and the implementations of the optimizers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bigtrain.job.optim_keys import OptimConfig
from bigtrain.optim.factory import learning_rate, optimizer_factory


def rates(total, batch=32, epoch=5, **keys):
    config = OptimConfig(**keys)
    return [learning_rate(config, step, total, batch, epoch) for step in range(total)]


def test_warm_up_climbs_in_equal_steps_and_cosine_lets_down():
    schedule_rates = rates(10, lr=1.0, warmup_steps=4, schedule="cosine", final_lr_share=0.1)
    assert schedule_rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert schedule_rates[4] == pytest.approx(1.0)
    assert schedule_rates[7] == pytest.approx(0.1 + 0.9 / 2)
    assert schedule_rates[4:] == sorted(schedule_rates[4:], reverse=True)
    assert schedule_rates[-1] > 0.1


def test_constant_and_linear():
    assert rates(3, lr=0.5) == [0.5, 0.5, 0.5]
    assert rates(4, lr=1.0, schedule="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_poly_is_a_power_of_what_remains():
    schedule_rates = rates(4, lr=1.0, schedule="poly")
    assert schedule_rates == pytest.approx([share**0.9 for share in (1.0, 0.75, 0.5, 0.25)])
    assert rates(4, lr=1.0, schedule="poly", poly_power=1) == rates(4, lr=1.0, schedule="linear")


def test_steps_divide_the_rate_after_epochs_of_data():
    schedule_rates = rates(
        12, epoch=2, lr=1.0, warmup_epochs=1, schedule="step", milestones=[2, 4.5]
    )
    assert schedule_rates == pytest.approx([0.5, 1.0, 1.0, 1.0, *[0.1] * 5, *[0.01] * 3])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"schedule": "step"}, r"schedule=step with milestones=\[\].*milestones=\[30,60,80\]"),
        ({"milestones": [3]}, r"schedule=constant with milestones=\[3\.0\]: schedule=step needs"),
        ({"schedule": "step", "milestones": [4, 2]}, r"milestones=\[4\.0, 2\.0\] must ascend"),
        ({"warmup_steps": 3, "warmup_epochs": 1}, r"warmup_steps=3 and warmup_epochs=1\.0 both"),
    ],
)
def test_schedules_that_contradict_themselves_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        OptimConfig(**keys)


def test_the_rate_grows_with_the_global_batch():
    assert rates(1, batch=1024, lr=0.1, base_batch_size=256) == pytest.approx([0.4])
    assert rates(1, batch=1024, lr=0.1) == [0.1]


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_every_implementation_takes_the_same_step(name):
    results = []
    for implementation in ("auto", "fused", "foreach", "loop"):
        torch.manual_seed(0)
        layer = nn.Linear(5, 5)
        options = {"momentum": 0.5} if name == "sgd" else {"eps": 1e-3}
        config = OptimConfig(name=name, implementation=implementation, lr=0.1, **options)
        optimizer = optimizer_factory(config)(layer.parameters())
        for _ in range(3):
            layer(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(layer.weight.detach())
    for result in results[1:]:
        torch.testing.assert_close(results[0], result)
