"""An optimizer built for whole parameters and applied to pieces, and the needs of its step."""

from __future__ import annotations

import functools

import pytest
import torch
from support.odd_parameters import Counting, Global, Lars, SignDescent, by_dim
from torch import nn

from bigtrain.errors import ConfigError
from bigtrain.optim.whole import WholeOptimizer


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6))


def kind(make):
    return WholeOptimizer(make, small()).kind


KINDS = {
    "AdamW": (functools.partial(torch.optim.AdamW, lr=1e-3), (True, True, False)),
    "Adafactor": (torch.optim.Adafactor, (False, True, False)),
    "signs": (functools.partial(SignDescent, lr=0.1), (True, True, False)),
    "LARS": (functools.partial(Lars, lr=0.1), (False, True, False)),
    "global": (functools.partial(Global, lr=0.1), (True, False, False)),
    "counting": (functools.partial(Counting, lr=0.1), (True, True, True)),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_a_step_needs_is_found_out_by_steps(name):
    make, expected = KINDS[name]
    needs = kind(make)
    assert (needs.elementwise, needs.separable, needs.counts) == expected


class RoundedOtherwise(Lars):
    """Its norm is a few units in the last place off if the parameter is large, as sums in another
    order are."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                ratio = 7.0 * (1 + (4e-7 if p.numel() > 20_000 else 0.0))
                p.sub_(p.grad * (ratio * group["lr"]))


@pytest.mark.parametrize("lr", [1e-3, 0.1, 1.0])
def test_sums_that_are_rounded_otherwise_are_the_same_update(lr):
    assert kind(functools.partial(RoundedOtherwise, lr=lr)).elementwise


@pytest.mark.parametrize("make", [Lars, torch.optim.Adafactor])
@pytest.mark.parametrize("lr", [1e-5, 1e-3, 1.0])
def test_another_update_is_seen_with_every_learning_rate(make, lr):
    assert not kind(functools.partial(make, lr=lr)).elementwise


def test_a_class_that_is_only_called_as_torchs_is_tried():
    class SGD(Lars):
        pass

    assert not kind(functools.partial(SGD, lr=0.1)).elementwise


def test_a_closure_is_what_a_step_fails_for():
    assert "closure" in kind(torch.optim.LBFGS).failure


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_groups_are_made_of_whole_parameters_once(device):
    calls = []

    def make(parameters):
        calls.append([tuple(p.shape) for p in parameters])
        return by_dim(parameters)

    with torch.device(device):
        model = small()
    whole = WholeOptimizer(make, model)
    assert whole.groups == [["0.weight"], ["0.bias", "1.weight", "1.bias"]]
    halves = [nn.Parameter(torch.zeros(24)), nn.Parameter(torch.zeros(24))]
    optimizer = whole.put_on({"0.weight": halves, "1.bias": [nn.Parameter(torch.zeros(6))]})
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0]
    assert calls == [[(6, 8), (6,), (6,), (6,)]]


def test_it_holds_on_to_no_whole_parameter():
    import gc
    import weakref

    model = small()
    watched = weakref.ref(model[0].weight)
    whole = WholeOptimizer(by_dim, model)
    assert whole.groups
    del model
    gc.collect()
    assert watched() is None


def test_a_state_from_the_start_is_begun_on_the_pieces():
    make = functools.partial(torch.optim.Adagrad, initial_accumulator_value=0.25)
    piece = nn.Parameter(torch.zeros(5))
    optimizer = WholeOptimizer(make, small()).put_on({"0.weight": [piece]})
    assert optimizer.state[piece]["sum"].tolist() == [0.25] * 5


def test_notes_at_parameters_go_to_the_pieces():
    model = small()
    model[0].weight.rate = 3.0
    piece = nn.Parameter(torch.zeros(5))
    WholeOptimizer(by_dim, model).put_on({"0.weight": [piece]})
    assert piece.rate == 3.0


def test_what_is_kept_beside_the_state_is_made_again_or_refused():
    class Slow(Lars):
        def __init__(self, parameters, lr):
            super().__init__(parameters, lr)
            self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    model = small()
    whole = WholeOptimizer(functools.partial(Slow, lr=0.1), model)
    named = dict(model.named_parameters())
    optimizer = whole.put_on({name: [p] for name, p in named.items()})
    assert torch.equal(optimizer.slow[0], named["0.weight"])
    with pytest.raises(ConfigError, match=r"Slow copies parameters .*\(slow\).*--strategy ddp"):
        whole.put_on({"0.weight": [nn.Parameter(torch.zeros(4))]})


def test_a_tensor_that_is_no_parameter_of_the_model_is_refused():
    outside = nn.Parameter(torch.zeros(3))
    with pytest.raises(ConfigError, match=r"not a parameter of the model \(shape \[3\]\)"):
        _ = WholeOptimizer(lambda ps: torch.optim.SGD([*ps, outside], lr=0.1), small()).groups
