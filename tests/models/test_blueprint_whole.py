"""Constructors that cannot be deferred run completely, and the reason is reported."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from support.described import One, have_equal_values, module_with_buffer, values
from torch import nn

from bigtrain.models.blueprint import describe


def _numpy_weights() -> torch.Tensor:
    return torch.from_numpy(np.random.rand(3))


def _array_filled_later(make: Callable[[object], torch.Tensor]) -> torch.Tensor:
    array = np.zeros(3)
    tensor = make(array) + 1.0
    array[:] = 1.0
    return tensor


def _generator_weights() -> torch.Tensor:
    return torch.randn(3, generator=torch.Generator().manual_seed(5))


def _loose(module: nn.Module) -> None:
    module.cache = [torch.randn(3)]  # type: ignore[assignment]
    module.weight = nn.Parameter(torch.zeros(2))


class AsksForMeta(nn.Linear):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class Swallows(nn.Linear):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        try:
            self.scale = self.weight.sum().item()
        except Exception:
            self.scale = 0.0


class Pretrained(nn.Linear):
    """Skips its initialization on the meta device, as the models of transformers do."""

    __module__ = "transformers.modeling_utils"


REASONS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "random read": (
        module_with_buffer(lambda: torch.rand(3) / torch.rand(1).item()),
        "reads values that are ran",
    ),
    "swallowed": (lambda: Swallows(2, 2), "reads values that are random"),
    "generator": (
        module_with_buffer(_generator_weights),
        "draws random numbers from its own generator",
    ),
    "numpy": (module_with_buffer(_numpy_weights), "draws or seeds random numbers on the CPU"),
    "python": (
        module_with_buffer(lambda: torch.tensor(random.random())),
        "draws or seeds random numbers",
    ),
    "torch on cpu": (
        module_with_buffer(lambda: torch.rand(3, device="cpu")),
        "random numbers on the CPU",
    ),
    "legacy": (module_with_buffer(lambda: torch.Tensor(2).zero_()), "puts 'x' on cpu itself"),
    **{
        f"array, {make.__name__}": (
            module_with_buffer(partial(_array_filled_later, make)),
            "changes an array after making a tensor of it",
        )
        for make in (torch.from_numpy, torch.as_tensor, torch.asarray)
    },
    "asks": (lambda: AsksForMeta(2, 2), "reset_parameters asks whether a tensor is on meta"),
    "loose": (lambda: One(_loose), r"keeps a tensor at 'cache\[0\]'"),
    "no kernel": (
        module_with_buffer(lambda: torch.unique(torch.arange(4))),
        "NotImplementedError: aten::_unique",
    ),
    "transformers": (lambda: Pretrained(2, 2), "skips initialisation on the meta device"),
    "conjugate": (
        module_with_buffer(lambda: torch.ones(2, dtype=torch.cfloat).conj()),
        "lazily conjugated",
    ),
}


def _seeded(seed_all: Callable[[int], object]) -> nn.Module:
    seed_all(0)
    return nn.Linear(2, 2)


@pytest.mark.parametrize(
    "seed_all", [torch.manual_seed, random.seed, np.random.seed], ids=["torch", "python", "numpy"]
)
def test_a_constructor_that_seeds_is_run_whole_on_every_rank(
    seed_all: Callable[[int], object],
) -> None:
    """Also on a rank that has this seed already; otherwise the ranks wait for different things."""
    reasons = []
    for before in (0, 1):
        seed_all(before)
        reasons.append(describe(partial(_seeded, seed_all)).reason)
    assert reasons == ["it draws or seeds random numbers on the CPU"] * 2


@pytest.mark.parametrize("name", REASONS)
def test_a_constructor_that_cannot_be_deferred_is_run_whole(name: str) -> None:
    make, reason = REASONS[name]
    blueprint = describe(make)
    assert not blueprint.deferred
    assert reason.replace("\\", "") in blueprint.reason
    assert "\n" not in blueprint.reason
    objects = values(blueprint.model)
    assert {tensor.device.type for tensor in objects.values()} == {"cpu"}
    first = {k: v.detach().clone() for k, v in values(blueprint.materialize("cpu", seed=1)).items()}
    assert all(values(blueprint.model)[k] is v for k, v in objects.items())
    assert have_equal_values(first, values(describe(make).materialize("cpu", seed=1)))
    part = describe(make).materialize("cpu", seed=1, only=[next(iter(first))])
    assert have_equal_values(first, values(part))


def test_the_second_construction_keeps_no_values() -> None:
    """A rank drops other stages' tensors; a model in a reference cycle lives until collected."""
    made: list[nn.Module] = []

    def make() -> nn.Module:
        made.append(Pretrained(2, 2))
        return made[-1]

    blueprint = describe(make)
    model = blueprint.materialize("cpu", seed=1)
    assert len(values(model)["weight"]) == 2
    assert made[-1] is not model
    assert [tensor.untyped_storage().nbytes() for tensor in values(made[-1]).values()] == [0, 0]


def test_a_whole_construction_follows_the_seed_everywhere() -> None:
    blueprint = describe(lambda: One(_loose))
    one_seed = blueprint.materialize("cpu", seed=1).cache[0].clone()  # type: ignore[index]
    assert not torch.equal(blueprint.materialize("cpu", seed=2).cache[0], one_seed)  # type: ignore[index]
    assert torch.equal(blueprint.materialize("cpu", seed=1).cache[0], one_seed)  # type: ignore[index]


def test_a_tensor_made_elsewhere_is_not_deferred() -> None:
    elsewhere = torch.empty(2, device="meta")
    blueprint = describe(module_with_buffer(lambda: torch.zeros_like(elsewhere)))
    assert blueprint.reason == "it uses a tensor on meta that was made elsewhere"
