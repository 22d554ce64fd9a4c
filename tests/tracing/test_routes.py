"""Modules that only some passes call are found without values."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from support.nets import TinyLM, tokens
from support.routed import ROUTED, rows_of, rows_of_batch
from torch import Tensor, nn

from bigtrain.data import MicroBatch
from bigtrain.tracing.made_up_answers import made_up_chance
from bigtrain.tracing.routes import Routes, find_routes


def routes_of(net: nn.Module) -> Routes:
    inputs, targets = rows_of_batch(rows_of(0), slice(0, 4))
    return find_routes(net, MicroBatch(inputs, targets, 4, 4))


TWO = ("towers.0", "towers.1")
EXPERTS = tuple(f"layers.{n}.experts.{m}" for n in range(2) for m in range(2))
CASES = {
    "Towers": (TWO, "nonzero in the model"),
    "Sizes": (TWO, "nonzero in the model"),
    "Masked": ((*TWO, "towers.2"), "item in the model"),
    "Branch": (TWO, "item in the model"),
    "Layers": (EXPERTS, "nonzero in layers.0"),
    "Dropped": (tuple(f"towers.{n}" for n in range(4)), "a random number of Python"),
    "SkipInside": (("towers.1",), None),
    "Late": ((), None),
    "Frozen": ((), None),
}


@pytest.mark.parametrize("name", CASES)
def test_modules_that_only_some_passes_call_are_found(name: str) -> None:
    net = ROUTED[name]()
    before = {n: p.clone() for n, p in net.state_dict().items()}
    routes = routes_of(net)
    assert (routes.modules, routes.cause) == CASES[name]
    assert routes.vary == bool(routes.modules)
    assert routes.differ == (routes.cause is not None)
    named = dict(net.named_parameters())
    assert set(routes.parameters) <= set(named)
    inside = {n for n in named if any(n.startswith(f"{m}.") for m in routes.modules)}
    assert inside <= set(routes.parameters)
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key])


def test_a_model_that_always_goes_the_same_way_has_none() -> None:
    samples = tokens(4)
    assert not find_routes(TinyLM(), MicroBatch(samples.inputs, samples.targets, 5, 4)).vary


class Asking(ROUTED["Late"]):  # type: ignore[misc]
    """Reads a value, but takes the same route whatever it is."""

    def route(self, x: Tensor, kind: Tensor) -> Tensor:
        if (kind == 1).all():
            x = x * 2
        return super().route(x, kind)


def test_a_question_whose_answer_changes_no_way_is_none() -> None:
    assert not routes_of(Asking()).vary


class OfNumpy(ROUTED["Branch"]):  # type: ignore[misc]
    """Its values go through numpy, which a pass without values cannot follow."""

    def route(self, x: Tensor, kind: Tensor) -> Tensor:
        return self.towers[int(kind.numpy().max()) % 2](x)


def test_what_lies_behind_a_question_without_an_answer_may_be_called_or_not() -> None:
    routes = routes_of(OfNumpy())
    assert routes.cause == "numpy in the model"
    assert routes.modules == ("head", *TWO)
    assert "first" in routes.called


class Broken(ROUTED["Late"]):  # type: ignore[misc]
    def route(self, _x: Tensor, _kind: Tensor) -> Tensor:
        raise RuntimeError("it runs on values only")


def test_of_a_model_that_does_not_run_without_numbers_nothing_is_said() -> None:
    assert routes_of(Broken()) == Routes()


class Alone(ROUTED["Late"]):  # type: ignore[misc]
    """A parameter outside of modules that is used only for some values."""

    def route(self, x: Tensor, kind: Tensor) -> Tensor:
        x = self.towers[1](self.towers[0](x))
        return x * self.gamma if kind.max() > 0 else x


def test_a_parameter_that_only_some_passes_use_is_found() -> None:
    routes = routes_of(Alone())
    assert (routes.modules, routes.parameters) == ((), ("gamma",))
    assert routes.differ


@pytest.mark.parametrize("answer", ["nothing", "everything", "chance"])
def test_chance_is_made_up_and_put_back(answer: str) -> None:
    random.seed(1)
    np.random.seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist()
    with made_up_chance(answer, 3) as drew:  # type: ignore[arg-type]
        assert not drew()
        drawn = [random.random(), np.random.rand()]
        assert drew()
    expected = {"nothing": (0.0, 0.0), "everything": (0.999, 1.0), "chance": (0.0, 1.0)}[answer]
    assert all(expected[0] <= number <= expected[1] for number in drawn)
    assert answer != "nothing" or drawn == [0.0, 0.0]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states


def test_routes_of_a_mixture_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.SwitchTransformersConfig(
        **{"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2},
        **{"num_layers": 2, "num_decoder_layers": 2, "num_experts": 2},
        **{"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    )
    net = transformers.SwitchTransformersForConditionalGeneration(config)
    words = torch.randint(0, 32, (2, 6))
    inputs = {"input_ids": words, "decoder_input_ids": words}
    routes = find_routes(_Called(net), MicroBatch(inputs, words, 12, 2))
    assert all("expert" in name for name in routes.modules)


class _Called(nn.Module):
    """Takes its inputs by name."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        logits: Tensor = self.net(**inputs).logits
        return logits


class Grouped(nn.Module):
    """Reads its mask; its grouped products have no meta kernel in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(2, 8, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, batch):
        if not batch["mask"].all():
            raise ValueError("padded")
        ends = torch.tensor([2, 4], dtype=torch.int32)
        return self.head(nn.functional.grouped_mm(batch["x"], self.experts, offs=ends))


def test_a_pass_that_meta_has_no_kernel_for_goes_on_fakes():
    batch = {"x": torch.zeros(4, 8), "mask": torch.ones(4, dtype=torch.bool)}
    routes = find_routes(Grouped(), MicroBatch(batch, torch.zeros(4), 4, 4))
    assert (routes.modules, routes.parameters) == ((), ())
    assert "head" in routes.called
