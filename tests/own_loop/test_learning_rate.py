"""Learning rates in a custom loop: torch's schedulers on engine.optimizer, and `learning_rate`.

In one process, compared with a plain torch loop; `test_ranks_schedules.py` tests strategies.
"""

from __future__ import annotations

import functools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.schedules import SCHEDULES, STEPS, in_two_groups
from torch import nn
from torch.optim import lr_scheduler

import bigtrain
from bigtrain.errors import ConfigError

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def open_engine(optimizer: Any = in_two_groups, **more: Any) -> bigtrain.Engine:
    """An engine of one process for the linear model."""
    more = {"memory__predict": False, **more}
    return bigtrain.prepare(linear, F.cross_entropy, optimizer, strategy="single", **more)


def plain_rates(schedule: str) -> tuple[list[list[float]], list[float]]:
    """The rates and momenta before each step of a plain loop, and the loss of each step."""
    model = linear()
    with open_engine() as engine:
        model.load_state_dict(engine.model.state_dict())
    optimizer = in_two_groups(model.parameters())
    scheduler = SCHEDULES[schedule](optimizer)
    settings, losses = [], []
    for _ in range(STEPS):
        settings.append([g[k] for g in optimizer.param_groups for k in ("lr", "momentum")])
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return settings, losses


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_scheduler_on_the_engines_optimizer_does_what_it_does_in_a_plain_loop(
    schedule: str, tmp_path: Path
) -> None:
    """Two steps are run and saved by one engine, and continued by a second one."""
    expected, plain = plain_rates(schedule)
    settings, losses = [], []
    for part in range(2):
        with open_engine() as engine, warnings.catch_warnings():
            warnings.simplefilter("error")  # a scheduler warns if it steps before the optimizer
            scheduler = SCHEDULES[schedule](engine.optimizer)
            engine.attach(scheduler=scheduler)
            if part:
                assert engine.load(tmp_path / "step-2") == {"epoch": 7}
            for _ in range(STEPS - 2 if part else 2):
                groups = engine.optimizer.param_groups
                settings.append([g[k] for g in groups for k in ("lr", "momentum")])
                result = engine.step((X, Y))
                scheduler.step()
                losses.append(result.loss)
                assert result.lr == settings[-1][0]
            if not part:
                engine.save(tmp_path, extra={"epoch": 7})
    assert settings == expected
    assert losses == pytest.approx(plain, abs=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "one cycle", "in turn"])
def test_prepare_steps_a_scheduler_and_resumes_it(schedule: str, tmp_path: Path) -> None:
    expected, plain = plain_rates(schedule)
    rates, losses = [], []
    for part in range(2):
        with open_engine(learning_rate=SCHEDULES[schedule]) as engine:
            if part:
                engine.load(tmp_path / "step-2")
            for _ in range(STEPS - 2 if part else 2):
                result = engine.step((X, Y))
                rates.append(result.lr)
                losses.append(result.loss)
            if not part:
                engine.save(tmp_path)
    assert rates == [rate[0] for rate in expected]
    assert losses == pytest.approx(plain, abs=1e-6)


def test_a_number_a_function_and_one_with_a_rate_for_each_group() -> None:
    for rate, expected in (
        (0.02, [[0.02, 0.02]] * 3),
        (lambda step: 0.1 / (step + 1), [[0.1 / n] * 2 for n in (1, 2, 3)]),
        (lambda step: [0.1, 0.01 * step], [[0.1, 0.01 * n] for n in range(3)]),
    ):
        with open_engine(learning_rate=rate) as engine:
            seen = []
            for _ in range(3):
                lr = engine.step((X, Y)).lr
                seen.append([group["lr"] for group in engine.runner.optimizer.param_groups])
                assert lr == seen[-1][0]
        assert seen == expected


def test_a_schedule_begins_where_it_would_be_in_a_run_that_had_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_engine(SGD) as engine:
        for _ in range(3):
            engine.step((X, Y))
        engine.save(tmp_path)
    cosine = functools.partial(lr_scheduler.CosineAnnealingLR, T_max=6)
    with open_engine(SGD, learning_rate=cosine) as engine:
        engine.load(tmp_path / "step-3")
        assert engine.step((X, Y)).lr == pytest.approx(0.1 * (1 + math.cos(math.pi / 2)) / 2)
    assert (
        "no schedule: this run's CosineAnnealingLR was stepped 3 times" in capsys.readouterr().err
    )


def test_a_plateau_is_the_loops_to_step() -> None:
    with open_engine(SGD) as engine:
        plateau = lr_scheduler.ReduceLROnPlateau(engine.optimizer, patience=0)
        engine.attach(plateau=plateau)
        for figure in (1.0, 2.0, 3.0):
            plateau.step(figure)
        assert engine.step((X, Y)).lr == pytest.approx(0.001)
    with pytest.raises(ConfigError, match=r"ReduceLROnPlateau steps by a figure.*engine\.attach"):
        open_engine(SGD, learning_rate=lr_scheduler.ReduceLROnPlateau)


def test_settings_that_the_loop_sets_come_to_the_optimizer_and_back(tmp_path: Path) -> None:
    with open_engine() as engine:
        first, second = engine.optimizer.param_groups
        assert (first["lr"], second["lr"]) == (0.1, 0.05)
        second["lr"], first["weight_decay"] = 0.0, 0.5
        bias = engine.model.bias.detach().clone()
        engine.step((X, Y))
        assert torch.equal(engine.model.bias, bias)
        assert engine.runner.optimizer.param_groups[0]["weight_decay"] == 0.5
        engine.runner.optimizer.param_groups[0]["lr"] = 0.25  # set on the inner optimizer directly
        assert engine.step((X, Y)).lr == 0.25
        engine.save(tmp_path)
    with open_engine() as engine:
        engine.load(tmp_path / "step-2")
        groups = engine.optimizer.param_groups
        assert [g["lr"] for g in groups] == [0.25, 0.0]
        assert groups[0]["weight_decay"] == 0.5


CAPTURED: list[torch.optim.Optimizer] = []


def scheduled_inside(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def captured_sgd(parameters: Any) -> torch.optim.Optimizer:
    """SGD that is also appended to CAPTURED, as a user's factory may do."""
    CAPTURED.append(torch.optim.SGD(parameters, lr=0.1))
    return CAPTURED[-1]


def test_a_scheduler_made_inside_of_the_factory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learning-rate scheduler.*engine\.optimizer.*T_max=STE"):
        open_engine(scheduled_inside)


def test_optimizers_that_forecasts_were_made_with_refuse_to_be_used() -> None:
    example = (X, Y)
    CAPTURED.clear()
    with open_engine(captured_sgd, memory__predict=True, example=example) as engine:
        engine.step((X, Y))
        used = [o for o in CAPTURED if o is engine.runner.optimizer]
        forecast_optimizers = [o for o in CAPTURED if o is not engine.runner.optimizer]
        assert len(used) == 1
        assert forecast_optimizers
        for dead in forecast_optimizers:
            with pytest.raises(ConfigError, match=r"made for a forecast.*is engine\.optimizer"):
                lr_scheduler.StepLR(dead, 1)
            with pytest.raises(ConfigError, match="updates nothing"):
                dead.param_groups[0]["lr"] = 0.5


def test_what_the_loops_optimizer_cannot_do_is_said() -> None:
    with open_engine(SGD) as engine:
        optimizer = engine.optimizer
        optimizer.zero_grad()
        with pytest.raises(ConfigError, match=r"engine\.step\(batch\) has done the backward"):
            optimizer.step()
        with pytest.raises(ConfigError, match=r"engine\.save\(folder\) saves the whole state"):
            optimizer.state_dict()
        with pytest.raises(ConfigError, match=r"engine\.load\(path\) loads a checkpoint under"):
            optimizer.load_state_dict({})
        with pytest.raises(ConfigError, match="the function that is passed to prepare makes all"):
            optimizer.add_param_group({"params": []})


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        ("cosine", r"learning_rate: got 'cosine'\. Give a number; a function of the step"),
        (lambda _: None, r"learning_rate: it gave a NoneType\. Give a number"),
        (lambda _: [0.1, 0.2, 0.3], r"gave \[0\.1, 0\.2, 0\.3\] for 2 parameter groups"),
        (lambda _: 1 / 0, r"called with the step 0 it gave ZeroDivisionError.*with the optimizer"),
        (lr_scheduler.StepLR, r"with the optimizer TypeError: .*step_size"),
    ],
)
def test_what_is_no_rate_is_refused(rate: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_engine(learning_rate=rate)


def test_objects_of_the_users_own_go_with_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Counter:
        def __init__(self) -> None:
            self.seen: dict[Any, Any] = {}

        def state_dict(self) -> dict[Any, Any]:
            return self.seen

        def load_state_dict(self, state: dict[Any, Any]) -> None:
            self.seen = state

    user_state = {
        1: (2, math.inf),
        "t": torch.tensor([1.5, math.nan], dtype=torch.bfloat16),
        None: [True],
    }
    counter = Counter()
    with open_engine(SGD) as engine:
        engine.attach(counter=counter, other=Counter())
        counter.seen = user_state
        engine.save(tmp_path, extra={"best": -math.inf})
        counter.seen = {"model": linear()}
        with pytest.raises(ConfigError, match=r"counter\.state_dict\(\)\['model'\] is a Linear"):
            engine.save(tmp_path)
        counter.seen = {"ema": torch.zeros(20_000)}
        with pytest.raises(ConfigError, match=r"20,000 numbers.*Make it a buffer"):
            engine.save(tmp_path)
        with pytest.raises(ConfigError, match=r"save\(extra=\.\.\.\): got a int"):
            engine.save(tmp_path, extra=3)
        with pytest.raises(ConfigError, match=r"attach\(n=\.\.\.\): a int has no state_dict"):
            engine.attach(n=3)
        with pytest.raises(ConfigError, match="the name is taken"):
            engine.attach(counter=Counter())
    again = Counter()
    with open_engine(SGD) as engine:
        engine.attach(counter=again, third=Counter())
        assert engine.load(tmp_path / "step-0") == {"best": -math.inf}
    assert again.seen.keys() == user_state.keys()
    assert again.seen[1] == (2, math.inf)
    assert again.seen["t"].dtype == torch.bfloat16
    assert again.seen["t"][0] == 1.5
    assert again.seen["t"][1].isnan()
    errors = capsys.readouterr().err
    assert "has no state of third, which stays as it is" in errors
    assert "has a state of other, which is not used: call engine.attach(other=...)" in errors


def test_an_optimizer_that_is_made_already_is_answered_with_what_makes_it() -> None:
    model = linear()

    def refused(optimizer: Any) -> str:
        with pytest.raises(ConfigError) as refusal:
            bigtrain.prepare(model, F.cross_entropy, optimizer)
        return str(refusal.value)

    message = refused(torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95)))
    assert "got an AdamW that is made already" in message
    assert "Give functools.partial(torch.optim.AdamW, lr=0.002, betas=(0.9, 0.95))." in message
    groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "lr": 1.0}]
    message = refused(torch.optim.SGD(groups, lr=0.5, momentum=0.9))
    maker = message.partition("lambda parameters: ")[2].partition(". A group")[0]
    weights, biases = (lambda p: p.dim() > 1), (lambda p: p.dim() == 1)
    names = {"torch": torch, "BELONGS_TO_0": weights, "BELONGS_TO_1": biases}
    made = eval(f"lambda parameters: {maker}", names)(list(model.parameters()))
    assert [g["weight_decay"] for g in made.param_groups] == [0.1, 0]
    assert [g["lr"] for g in made.param_groups] == [0.5, 1.0]
    assert [g["momentum"] for g in made.param_groups] == [0.9, 0.9]
    assert "got 2 parameters" in refused(list(model.parameters()))
    assert "got 2 parameters" in refused(model.parameters())
    assert "got the text 'adamw'" in refused("adamw")
    assert "the class Linear is no torch.optim.Optimizer" in refused(nn.Linear)
    assert "got a NoneType" in refused(None)
    assert "the function returned a int, not an optimizer" in refused(lambda _: 3)
