"""Initial weights depend only on seed and name, and equal those of a complete construction."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.described import One, have_equal_values, module_with_buffer, values
from torch import nn
from torch.nn.utils import parametrizations

from bigtrain.errors import ConfigError
from bigtrain.models.blueprint import Blueprint, describe, initial_seed


def deferred_values(make: Callable[[], nn.Module], seed: int = 0) -> dict[str, torch.Tensor]:
    """Every value of a model, whose construction must have been deferred."""
    blueprint = describe(make)
    assert blueprint.deferred, blueprint.reason
    assert all(tensor.is_meta for tensor in values(blueprint.model).values())
    return values(blueprint.materialize("cpu", seed=seed))


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4, bias=False))


def test_the_seed_of_a_name_never_changes() -> None:
    assert initial_seed(0, "weight") == 9038299411707243525
    assert initial_seed(0, "weight") != initial_seed(1, "weight")
    assert initial_seed(1, "1.weight") != initial_seed(11, ".weight")
    assert 0 <= initial_seed(2**63, "x" * 999) < 2**63


def test_a_description_holds_no_memory_and_the_result_is_on_the_device() -> None:
    blueprint = describe(small)
    assert blueprint.deferred
    assert blueprint.reason == ""
    assert {t.device.type for t in values(blueprint.model).values()} == {"meta"}
    model = blueprint.materialize("cpu", seed=0)
    assert model is blueprint.model
    assert {t.device.type for t in values(model).values()} == {"cpu"}
    model(torch.randn(3, 8)).sum().backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_values_depend_on_seed_and_name_only() -> None:
    whole = deferred_values(small, seed=3)
    assert have_equal_values(whole, deferred_values(small, seed=3))
    assert not torch.equal(whole["0.weight"], deferred_values(small, seed=4)["0.weight"])

    reversed_order = describe(small)
    for name in reversed(list(whole)):
        reversed_order.materialize("cpu", seed=3, only=[name])
    assert have_equal_values(whole, values(reversed_order.model))

    # A different model with only one name in common.
    second_model = deferred_values(
        lambda: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16)), seed=3
    )
    assert torch.equal(whole["0.weight"], second_model["0.weight"])


def test_only_the_named_tensors_are_made() -> None:
    blueprint = describe(small)
    blueprint.materialize("cpu", seed=0, only={"2.weight", "1.running_var"})
    real = {name for name, tensor in values(blueprint.model).items() if not tensor.is_meta}
    assert real == {"2.weight", "1.running_var"}
    assert torch.equal(
        blueprint.model.get_parameter("2.weight"), deferred_values(small)["2.weight"]
    )


def test_tied_parameters_stay_one_object() -> None:
    def tied() -> nn.Module:
        model = nn.ModuleDict({"a": nn.Embedding(5, 3), "b": nn.Linear(3, 5, bias=False)})
        model["b"].weight = model["a"].weight
        return model

    for only in (None, ["a.weight"], ["b.weight"]):
        model = describe(tied).materialize("cpu", seed=0, only=only)
        assert model.get_parameter("a.weight") is model.get_parameter("b.weight")
        assert torch.equal(model.get_parameter("b.weight"), deferred_values(tied)["a.weight"])


class Special(nn.Parameter):
    """A subclass of Parameter with attributes."""


def odd_module() -> nn.Module:
    """A module with parameters and buffers of unusual kinds."""

    def fill(module: nn.Module) -> None:
        module.frozen = nn.Parameter(torch.randn(4, 6).t(), requires_grad=False)
        module.special = Special(torch.randn(3))
        module.special.group = "slow"  # type: ignore[attr-defined]
        module.small = nn.Parameter(torch.ones(3).half())
        module.register_buffer("expanded", torch.arange(5).expand(2, -1))
        module.register_buffer("hidden", torch.full((2,), 7.0), persistent=False)
        module.settings = {"a": [1, 2]}  # type: ignore[assignment]
        module.extra = nn.Buffer(torch.ones(2))

    return One(fill)


def test_what_a_tensor_is_stays_as_it_was() -> None:
    real, model = odd_module(), describe(odd_module).materialize("cpu", seed=0)
    for name, tensor in values(model).items():
        expected = values(real)[name]
        assert type(tensor) is type(expected)
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (
            expected.dtype,
            expected.shape,
            expected.stride(),
        )
        assert tensor.requires_grad == expected.requires_grad
    assert model.special.group == "slow"  # type: ignore[union-attr]
    assert model.settings == {"a": [1, 2]}
    assert torch.equal(model.expanded, real.expanded)  # type: ignore[arg-type]
    assert "hidden" not in model.state_dict()
    assert torch.equal(model.hidden, torch.full((2,), 7.0))  # type: ignore[arg-type]


def test_references_that_others_hold_stay_valid() -> None:
    blueprint = describe(small)
    parameters = list(blueprint.model.parameters())
    model = blueprint.materialize("cpu", seed=0)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))

    blueprint = describe(lambda: nn.LSTM(3, 4))
    model = blueprint.materialize("cpu", seed=0)
    # nn.RNN refers to its weights a second time, by weak references.
    assert all(a is b for a, b in zip(model._flat_weights, model.parameters(), strict=True))
    output, _ = model(torch.randn(2, 1, 3))
    assert output.shape == (2, 1, 4)


@pytest.mark.parametrize("deferred", [True, False])
def test_the_callers_random_numbers_are_left_alone(deferred: bool) -> None:
    def make() -> nn.Module:
        if not deferred:
            random.random(), np.random.rand()  # noqa: B018
        return small()

    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    blueprint = describe(make)
    assert blueprint.deferred == deferred
    blueprint.materialize("cpu", seed=0)
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1:] == (random.getstate(), np.random.get_state()[1].tolist())


INITIALISERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "trunc_normal": lambda x: nn.init.trunc_normal_(x, std=0.02),
    "trunc_normal_tail": lambda x: nn.init.trunc_normal_(x, mean=0.0, std=1.0, a=1.0, b=3.0),
    "orthogonal": nn.init.orthogonal_,
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "kaiming_normal": nn.init.kaiming_normal_,
    "normal": nn.init.normal_,
    "uniform": nn.init.uniform_,
}


@pytest.mark.parametrize("name", INITIALISERS)
def test_every_initialiser_draws_as_it_does_on_the_cpu(name: str) -> None:
    def make() -> torch.Tensor:
        with torch.no_grad():
            return INITIALISERS[name](torch.empty(128, 96))  # type: ignore[no-any-return]

    mine = deferred_values(module_with_buffer(make))["x"]
    torch.default_generator.manual_seed(initial_seed(0, "x"))
    assert torch.equal(mine, make())  # no other number is drawn between seed and initialiser


def test_an_initialiser_of_many_draws_does_what_it_says() -> None:
    mine = deferred_values(module_with_buffer(lambda: nn.init.sparse_(torch.empty(128, 96), 0.25)))[
        "x"
    ]
    assert (mine == 0).sum(0).tolist() == [32] * 96
    assert len({tuple(column.nonzero().flatten().tolist()) for column in mine.t()}) == 96


def test_fixed_initialisers_are_exact() -> None:
    for make in (
        lambda: nn.init.eye_(torch.empty(3, 5)),
        lambda: nn.init.dirac_(torch.empty(3, 4, 5, 5)),
        lambda: nn.init.constant_(torch.empty(3), 0.3),
    ):
        assert torch.equal(deferred_values(module_with_buffer(make))["x"], make())


def test_numbers_that_are_overwritten_are_not_drawn() -> None:
    def twice() -> torch.Tensor:
        return torch.empty(1000).uniform_().normal_(5.0)

    once = deferred_values(module_with_buffer(lambda: torch.empty(1000).normal_(5.0)))["x"]
    assert torch.equal(deferred_values(module_with_buffer(twice))["x"], once)


def chain() -> torch.Tensor:
    x = torch.zeros(4, 4)
    x[1] = 3.0
    x[:, 2].add_(torch.arange(4) / 2)
    x.view(-1)[5:7].mul_(10)
    x[x > 20] = -1.0
    torch.add(x, 1.0, out=x[0:4])
    return torch.cat([x, x.t()], dim=1).unbind(0)[2]


CONSTANTS: dict[str, Callable[[], torch.Tensor]] = {
    "chain": chain,
    "tensor": lambda: torch.tensor([[1.5, -2.0], [3.0, 4.0]]),
    "tensor_on_meta": lambda: torch.tensor([1, 2], device=torch.empty(0).device),
    "scalar": lambda: torch.tensor(7),
    "as_tensor": lambda: torch.as_tensor(np.arange(6.0).reshape(2, 3)),
    "legacy": lambda: torch.FloatTensor([1.0, 2.0]),
    "from_numpy": lambda: torch.from_numpy(np.arange(6)),
    "NaN of an array": lambda: torch.from_numpy(np.array([np.nan, 1.0])),
    "new_tensor": lambda: torch.ones(2).new_tensor([1, 2]),
    "empty": lambda: torch.empty(3).zero_(),
    "division": lambda: torch.arange(4) / 3,
    "complex": lambda: torch.polar(torch.ones(3), torch.arange(3.0)),
    "items": lambda: torch.tensor([x.item() for x in torch.linspace(0, 0.1, 5)]),
    "branch": lambda: torch.ones(1) if torch.arange(3).sum() > 2 else torch.zeros(1),
    "list": lambda: torch.tensor(torch.arange(3).mul(2).tolist()),
    "numpy": lambda: torch.from_numpy(torch.arange(3).cpu().numpy() + 1),
    "data": lambda: nn.Linear(2, 2).requires_grad_(False).weight.set_(torch.eye(2)),
    "resize": lambda: torch.empty(0).resize_(3).fill_(2.0),
}


@pytest.mark.parametrize("name", CONSTANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_random_is_exact(name: str, dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        expected = CONSTANTS[name]().detach()
        blueprint = describe(module_with_buffer(lambda: CONSTANTS[name]().detach()))
    finally:
        torch.set_default_dtype(before)
    assert blueprint.deferred, blueprint.reason
    actual = values(blueprint.materialize("cpu", seed=0))["x"]
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.get_default_dtype() == before


def test_memory_that_nothing_writes_is_zeros() -> None:
    assert deferred_values(module_with_buffer(lambda: torch.empty(1000)))["x"].count_nonzero() == 0


def test_tensors_made_from_each_other_agree() -> None:
    normed = deferred_values(lambda: parametrizations.weight_norm(nn.Linear(5, 3)))
    g, v = (normed[f"parametrizations.weight.original{i}"] for i in (0, 1))
    torch.testing.assert_close(g, v.norm(dim=1, keepdim=True))

    spectral = describe(lambda: parametrizations.spectral_norm(nn.Linear(5, 3)))
    assert spectral.deferred, spectral.reason
    weight = spectral.materialize("cpu", seed=0).weight
    assert torch.linalg.matrix_norm(weight, 2).item() == pytest.approx(1.0, abs=1e-3)

    orthogonal = describe(lambda: parametrizations.orthogonal(nn.Linear(5, 5)))
    weight = orthogonal.materialize("cpu", seed=0).weight
    torch.testing.assert_close(weight @ weight.T, torch.eye(5))

    def twins() -> nn.Module:
        layer = nn.Linear(3, 3)
        return nn.ModuleList([layer, copy.deepcopy(layer)])

    tensors = deferred_values(twins)
    assert torch.equal(tensors["0.weight"], tensors["1.weight"])
    assert tensors["0.weight"] is not tensors["1.weight"]


def halves() -> nn.Module:
    def fill(module: nn.Module) -> None:
        left, right = torch.randn(2000).split(1000)
        module.left, module.right = nn.Parameter(left), nn.Parameter(right)

    return One(fill)


def test_parts_of_one_draw_are_parts_of_one_draw() -> None:
    whole = deferred_values(halves)
    assert not torch.equal(whole["left"], whole["right"])
    assert whole["left"].untyped_storage()._cdata == whole["right"].untyped_storage()._cdata
    alone = describe(halves).materialize("cpu", seed=0, only=["right"])
    assert torch.equal(values(alone)["right"], whole["right"])


def test_a_slice_does_not_keep_the_whole() -> None:
    sliced = deferred_values(module_with_buffer(lambda: torch.arange(1000)[10:20].view(2, 5).t()))[
        "x"
    ]
    assert sliced.untyped_storage().nbytes() == 10 * 8
    assert torch.equal(sliced, torch.arange(10, 20).view(2, 5).t())


def test_constructors_read_layers_they_transformed() -> None:
    def converted() -> nn.Module:
        encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        return nn.TransformerEncoder(encoder, 2).double()

    tensors = deferred_values(converted)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float64}
    assert torch.equal(tensors["layers.0.linear1.weight"], tensors["layers.1.linear1.weight"])


def test_a_model_already_built_keeps_its_values() -> None:
    module = small()
    before = {name: tensor.detach().clone() for name, tensor in values(module).items()}
    blueprint = Blueprint.of(module)
    assert not blueprint.deferred
    assert blueprint.reason == "given already built"
    assert blueprint.materialize("cpu", seed=5) is module
    assert have_equal_values(before, values(module))


def test_errors_of_a_constructor_are_its_own() -> None:
    def broken() -> nn.Module:
        raise KeyError("no such layer")

    with pytest.raises(KeyError, match="no such layer"):
        describe(broken)


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"returned int, not a torch\.nn\.Module\. Let it return"):
        describe(lambda: 3)  # type: ignore[arg-type,return-value]
    with pytest.raises(
        ConfigError,
        match=r"'0\.weight' has no shape before the first batch\. Replace LazyLinear by Linear",
    ):
        describe(lambda: nn.Sequential(nn.LazyLinear(4)))
    with pytest.raises(ConfigError, match="'weight' is on the meta device and has no values. Give"):
        Blueprint.of(nn.Linear(2, 2, device="meta"))
    with pytest.raises(
        ConfigError, match=r"no parameter or buffer '0\.wieght', did you mean '0\.weight'\?"
    ):
        describe(small).materialize("cpu", seed=0, only=["0.wieght"])
    sizes = iter((2, 2, 3))
    grows = describe(module_with_buffer(lambda: torch.unique(torch.arange(next(sizes)))))
    with pytest.raises(
        ConfigError, match="two constructions differ at 'x'. Make the model's shape"
    ):
        grows.materialize("cpu", seed=0)


def test_model_that_cannot_be_deferred_is_there_once_while_it_is_built_again() -> None:
    earlier: list[torch.Tensor] = []
    bytes_before: list[int] = []

    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            bytes_before.append(sum(t.untyped_storage().nbytes() for t in earlier))
            self.register_buffer("x", torch.unique(torch.arange(1000)))

    blueprint = describe(Sorted)
    assert blueprint.whole_bytes == 8000
    earlier += values(blueprint.model).values()
    blueprint.materialize("cpu", seed=0)
    assert bytes_before[-1] == 0
    assert blueprint.model.x is earlier[0]
    assert torch.equal(earlier[0], torch.arange(1000))
    assert describe(small).whole_bytes == 0


def test_tensors_that_overlap_still_do_when_a_model_is_built_again() -> None:
    class Overlapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole = torch.unique(torch.arange(8))
            self.half = self.whole[:4]

    blueprint = describe(Overlapping)
    assert not blueprint.deferred
    model: Any = blueprint.materialize("cpu", seed=0)
    model.whole[0] = 5
    assert model.half.tolist() == [5, 1, 2, 3]


def test_statistics_are_those_of_the_formula() -> None:
    weight = deferred_values(lambda: nn.Linear(400, 300))["weight"].detach()
    bound = 1 / math.sqrt(400)
    assert weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.01)
    assert weight.mean().item() == pytest.approx(0.0, abs=6 * bound / math.sqrt(3 * weight.numel()))


class Hooked(nn.Module):
    """Its constructor registers hooks on parameters, as users do, including those of an RNN."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rnn = nn.Linear(3, 2), nn.GRU(2, 2)
        self.seen: list[str] = []
        for name, parameter in self.named_parameters():
            parameter.register_hook(lambda gradient: gradient * 2)
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: self.seen.append(name)
            )

    def forward(self, x):
        return self.rnn(self.linear(x))[0]


def test_hooks_of_the_constructor_run_after_values_are_filled_in():
    filled = describe(Hooked).materialize("cpu", seed=0)
    plain = Hooked()
    plain.load_state_dict(filled.state_dict())
    for model in (filled, plain):
        model(torch.ones(4, 3)).sum().backward()
        assert sorted(model.seen) == sorted(name for name, _ in model.named_parameters())
    for mine, expected in zip(filled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)
