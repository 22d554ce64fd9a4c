"""Figures and outputs in a custom loop on one process: `evaluate` and `predict`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.parity import sgd
from torch import Tensor, nn

import bigtrain
from bigtrain.errors import ConfigError

DRAW = torch.Generator().manual_seed(4)
ROWS = [7, 3, 5]
BATCHES = [
    (torch.randn(n, 4, generator=DRAW), torch.randint(3, (n,), generator=DRAW)) for n in ROWS
]
X, Y = (torch.cat(parts) for parts in zip(*BATCHES, strict=True))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(-1) == targets).float().mean()


def spread(outputs: Tensor, targets: Tensor) -> tuple[float, int]:
    """A metric weighted by something other than rows: by the targets of the first class."""
    of_first = outputs[targets == 0]
    return float(of_first.abs().sum()), of_first.numel()


METRICS = {"accuracy": accuracy, "spread": spread}


def plain(model: nn.Module) -> dict[str, float]:
    model.eval()
    with torch.no_grad():
        outputs = model(X)
        total, count = spread(outputs, Y)
        return {
            "loss": F.cross_entropy(outputs, Y).item(),
            "accuracy": accuracy(outputs, Y).item(),
            "spread": total / count,
        }


@pytest.mark.parametrize("trained", [False, True], ids=["first", "after steps"])
def test_a_loop_measures_what_a_plain_loop_does_on_all_rows(trained: bool) -> None:
    """With batches of different sizes, before the first step and after steps."""
    with bigtrain.prepare(net, F.cross_entropy, sgd, metrics=METRICS) as engine:
        for _ in range(3 if trained else 0):
            engine.step((X, Y))
        model = net()
        model.load_state_dict(engine.model.state_dict())
        figures = engine.evaluate(BATCHES)
        assert figures == pytest.approx(plain(model), rel=1e-6)
        assert list(figures) == ["loss", "accuracy", "spread"]
        assert engine.evaluate(iter(BATCHES), {}) == pytest.approx({"loss": figures["loss"]})
        only = engine.evaluate(BATCHES[:1], {"rows": lambda outputs, _: (len(outputs), 1)})
        assert only["rows"] == 7
        engine.step((X, Y))


def test_modes_are_as_they_were_and_nothing_trains() -> None:
    with bigtrain.prepare(net, F.cross_entropy, sgd) as engine:
        engine.step((X, Y))
        engine.model[1].eval()
        before = [module.training for module in engine.model.modules()]
        state = {n: t.clone() for n, t in engine.model.state_dict().items()}
        engine.evaluate(BATCHES)
        outputs = engine.predict(X)
        assert [module.training for module in engine.model.modules()] == before
        assert all(torch.equal(state[n], t) for n, t in engine.model.state_dict().items())
        assert not outputs.requires_grad
        engine.model.eval()
        with torch.no_grad():
            assert torch.equal(outputs, engine.model(X))


def test_outputs_of_any_structure_come_as_they_are() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor, scale: Tensor) -> dict[str, Any]:
            results = self.linear(x) * scale
            return {"logits": results, "pair": (results.sum(), "text")}

    def loss(outputs: dict[str, Any], targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs["logits"], targets)

    inputs = {"x": X, "scale": torch.tensor(2.0)}
    with bigtrain.prepare(Odd, loss, sgd) as engine:
        results = engine.predict(inputs)
        assert results["logits"].shape == (15, 3)
        assert results["pair"][1] == "text"
        figures = engine.evaluate([(inputs, Y)], {"n": lambda o, t: (o["logits"].sum(), len(t))})
        assert figures["n"] == pytest.approx(float(results["logits"].sum()) / 15, rel=1e-6)


def test_nothing_to_measure_is_no_number() -> None:
    with bigtrain.prepare(net, F.cross_entropy, sgd, metrics={"accuracy": accuracy}) as engine:
        figures = engine.evaluate([])
        assert math.isnan(figures["accuracy"])


@pytest.mark.parametrize(
    ("batches", "metrics", "message"),
    [
        ([X], None, r"evaluate: got a Tensor, and \(inputs, targets\) is needed"),
        ([(X, Y, Y)], None, "evaluate: got a tuple of 3 elements"),
        ([{"x": X, "y": Y}], None, "evaluate: got a dict with 'x', 'y', and"),
        (BATCHES, {"a": lambda outputs, _: outputs}, r"metrics\['a'\] returned \(7, 3\)"),
        (BATCHES, {"a": lambda *_: "good"}, r"metrics\['a'\] returned str, and one number"),
        (BATCHES, {"loss": accuracy}, "'loss' is a figure of the loss or the task already"),
        (BATCHES, [accuracy], r"metrics: give functions of \(outputs, targets\) by their names"),
        (BATCHES, {"a": 3}, "metrics: give functions"),
    ],
)
def test_what_is_no_batch_or_no_metric_is_said(batches: Any, metrics: Any, message: str) -> None:
    with (
        bigtrain.prepare(net, F.cross_entropy, sgd) as engine,
        pytest.raises(ConfigError, match=message),
    ):
        engine.evaluate(batches, metrics)


def test_metrics_that_are_none_are_refused_before_a_step() -> None:
    with pytest.raises(ConfigError, match="metrics: give functions"):
        bigtrain.prepare(net, F.cross_entropy, sgd, metrics=accuracy)


def test_a_module_that_the_script_sets_to_evaluation_mode_stays_in_it() -> None:
    def modes(engine: bigtrain.Engine) -> list[bool]:
        return [module.training for module in engine.model.modules()]

    with bigtrain.prepare(net().eval(), F.cross_entropy, sgd) as engine:
        assert not any(modes(engine))
        engine.step((X, Y))
        assert all(modes(engine))  # models of libraries come in evaluation mode
        engine.model[1].eval()
        engine.step((X, Y))
        assert modes(engine).count(False) == 1
        engine.model.eval()
        engine.step((X, Y))
        assert all(modes(engine))
