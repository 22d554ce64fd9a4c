"""Key-value caches for text generation are switched off in training and restored afterwards."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.caching_nets import Around, CachingLM, Settings
from torch import Tensor, nn

import bigtrain
from bigtrain.errors import ConfigError
from bigtrain.models.blueprint import Blueprint, describe
from bigtrain.models.caches import NOTE, switch_off_caches, switch_on_caches
from bigtrain.models.from_path import check_arguments, make_from_path


def test_every_configuration_that_keeps_them_is_switched_off_and_back():
    model = Around()
    changed = switch_off_caches(model)
    assert changed == [model.net.config.text]
    assert not model.net.config.text.use_cache
    switch_on_caches(changed)
    assert model.net.config.text.use_cache
    assert not model.net.config.use_cache  # it was off before the call


@pytest.mark.parametrize(
    "config", [None, SimpleNamespace(use_cache=False), {"use_cache": True}, "text", 5]
)
def test_what_is_no_such_configuration_is_left_alone(config):
    model = nn.Linear(2, 2)
    model.config = config
    assert switch_off_caches(model) == []
    assert Blueprint.of(model).notes == ()


def test_a_described_model_has_it_off_and_says_so():
    for blueprint in (describe(CachingLM), Blueprint.of(CachingLM())):
        assert not blueprint.model.config.use_cache
        assert blueprint.notes == (NOTE,)
        with blueprint.given_back():
            assert blueprint.model.config.use_cache
        assert not blueprint.model.config.use_cache
        assert not blueprint.twin().model.config.use_cache


def logits_loss(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), targets.flatten())


def test_a_callers_own_module_comes_back_with_its_cache(tmp_path, capfd):
    model = CachingLM()
    batch = torch.arange(12).view(3, 4), torch.ones(3, 4, dtype=torch.long)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with bigtrain.prepare(model, logits_loss, sgd, strategy="single", device="cpu") as engine:
        assert not model.config.use_cache
        engine.step(batch)
        saved = engine.save(tmp_path)
    assert model.config.use_cache
    assert json.loads((saved / "config.json").read_text()) == {"use_cache": True}
    assert NOTE in capfd.readouterr().err


class WithConfiguration(nn.Module):
    """Names its configuration class, as the classes of transformers do."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(config.width, config.width)


class Configuration(Settings):
    attribute_map = {"hidden_size": "width"}  # noqa: RUF012 - declared as in transformers

    def __init__(self, width: int = 3, depth: int = 1, **more: Any) -> None:
        if depth > 9:
            raise ValueError("depth is at most 9")
        super().__init__(width=more.get("hidden_size", width), depth=depth)

    @property
    def num_labels(self) -> int:
        return 2


WithConfiguration.config_class = Configuration  # type: ignore[attr-defined]
PATH = f"{__name__}:WithConfiguration"


@pytest.mark.parametrize(
    ("config", "width"), [({}, 3), ({"width": 5}, 5), ({"hidden_size": 4, "num_labels": 2}, 4)]
)
def test_a_mapping_makes_the_configuration(config, width):
    assert make_from_path(PATH, {"config": config}).layer.in_features == width


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            {"config": {"widht": 5}},
            rf"model.args.config.widht: Configuration, which {PATH} is made from, has no 'widht', "
            "did you mean 'width'",
        ),
        ({"config": {"depth": 10}}, "does not take these values: ValueError: depth is at most 9"),
        ({}, r"Set model.args.config=\{\} for the defaults, or model.args.config.KEY=VALUE"),
    ],
)
def test_a_mapping_with_what_the_configuration_has_not_is_refused(args, said):
    with pytest.raises(ConfigError, match=said):
        make_from_path(PATH, args)


def test_a_field_that_is_unknown_is_refused_before_anything_is_made():
    with pytest.raises(ConfigError, match="has no 'heads'"):
        check_arguments(PATH, WithConfiguration, {"config": {"heads": 2}})
