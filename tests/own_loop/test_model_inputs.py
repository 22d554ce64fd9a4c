# ruff: noqa: ARG005
"""The arguments of a model: a dict is passed by name if its forward takes the names."""

from __future__ import annotations

import copy
import pickle
from collections import UserDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.parity import sgd
from torch import Tensor, nn

import bigtrain
from bigtrain.errors import ConfigError
from bigtrain.own_loop.model_inputs import goes_by_name

IDS, MASK = torch.arange(8).reshape(4, 2) % 5, torch.tensor([[1.0, 0.0]] * 4)
TARGETS = torch.tensor([0, 1, 2, 0])


class Named(nn.Module):
    """A model with named inputs, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(
        self, input_ids: Tensor | None = None, mask: Tensor | None = None, **_: Any
    ) -> Tensor:
        assert isinstance(input_ids, Tensor)
        assert isinstance(mask, Tensor)
        return self.head((self.embedding(input_ids) * mask[..., None]).sum(1))


class OneDict(Named):
    def forward(self, batch: dict[str, Tensor], scale: float = 1.0) -> Tensor:  # type: ignore[override]
        return super().forward(**batch) * scale


def plain(forward: Any, model: Any = Named, steps: int = 3) -> list[float]:
    """The losses of a plain loop from the engine's first weights."""
    with bigtrain.prepare(model, F.cross_entropy, sgd, memory__predict=False) as engine:
        twin = Named()
        twin.load_state_dict(engine.model.state_dict())
    optimizer, losses = sgd(twin.parameters()), []
    for _ in range(steps):
        loss = F.cross_entropy(forward(twin), TARGETS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_on(model: Any, inputs: Any, **more: Any) -> list[float]:
    """The losses of three steps on these inputs."""
    with bigtrain.prepare(model, F.cross_entropy, sgd, **more) as engine:
        return [engine.step((inputs, TARGETS)).loss for _ in range(3)]


GIVEN = {"input_ids": IDS, "mask": MASK}


@pytest.mark.parametrize("model", [Named, OneDict, Named()], ids=["class", "one dict", "module"])
@pytest.mark.parametrize("inputs", [GIVEN, UserDict(GIVEN)], ids=["dict", "mapping"])
@pytest.mark.parametrize("shown", [True, False], ids=["example", "no example"])
def test_a_dict_goes_by_name_where_the_forward_has_the_names(
    model: Any, inputs: Any, shown: bool
) -> None:
    expected = plain(lambda twin: twin(**GIVEN), copy.deepcopy(model))
    example = {"example": (inputs, TARGETS)} if shown else {}
    assert train_on(model, inputs, **example) == pytest.approx(expected, abs=1e-6)


def test_a_module_comes_back_as_it_was() -> None:
    model = Named()
    train_on(model, GIVEN, example=(GIVEN, TARGETS))
    assert set(vars(model)) == set(vars(Named()))
    with pytest.raises(AssertionError):
        model(GIVEN)


def test_a_forward_of_the_users_own() -> None:
    def forward(model: Any, inputs: Any) -> Tensor:
        assert isinstance(model.head, nn.Linear)
        output: Tensor = model(inputs["ids"], mask=inputs["extra"]["mask"])
        return output * 2

    inputs = {"ids": IDS, "extra": {"mask": MASK}}
    expected = plain(lambda twin: twin(IDS, mask=MASK) * 2)
    more: dict[str, Any] = {"forward": forward, "train__accumulation_steps": 2}
    assert train_on(Named, inputs, **more) == pytest.approx(expected, abs=1e-6)
    more["example"] = (inputs, TARGETS)
    assert train_on(Named, inputs, **more) == pytest.approx(expected, abs=1e-6)


def test_a_forward_of_other_arguments_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"forward: it cannot be called with \(model, inputs\)"):
        train_on(Named, GIVEN, forward=lambda model: model)


def test_a_changed_model_can_be_copied_and_pickled() -> None:
    with bigtrain.prepare(Named, F.cross_entropy, sgd) as engine:
        copied = copy.deepcopy(engine.model)
        with torch.no_grad():
            copied.head.weight.zero_()
            assert not torch.equal(copied(GIVEN), engine.model(GIVEN))
            assert torch.equal(engine.model(IDS, MASK), engine.model(GIVEN))
            again = pickle.loads(pickle.dumps(engine.model))
            assert torch.equal(again(**GIVEN), engine.model(GIVEN))


def test_when_a_mapping_goes_by_name() -> None:
    tensors = {"x": IDS, "y": MASK}
    assert goes_by_name(lambda x, y: None, tensors)
    assert goes_by_name(lambda x, y=1, z=2: None, tensors)
    assert goes_by_name(lambda **kwargs: None, tensors)
    assert goes_by_name(lambda x=None, **kwargs: None, tensors)
    assert not goes_by_name(lambda x: None, tensors)  # it has no parameter for y
    assert not goes_by_name(lambda batch: None, tensors)
    assert not goes_by_name(lambda batch=None, **kwargs: None, tensors)
    assert not goes_by_name(lambda batch, y: None, tensors)
    assert not goes_by_name(lambda x, y: None, {0: IDS})
    assert not goes_by_name(lambda x, y: None, IDS)
