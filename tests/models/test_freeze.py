"""`model.freeze`: patterns decide which parameters are trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys, load_job
from bigtrain.models.freeze import freeze
from bigtrain.models.spec import ModelSpec


def net(*, tied: bool = False) -> nn.Module:
    model = nn.ModuleDict(
        {
            "body": nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)),
            "table": nn.Embedding(4, 4),
            "head": nn.Linear(4, 4),
        }
    )
    if tied:
        model["head"].weight = model["table"].weight
    return model


@pytest.mark.parametrize(
    ("patterns", "trained"),
    [
        (["body"], ["table.weight", "head.weight", "head.bias"]),
        (["*", "!head"], ["head.weight", "head.bias"]),
        (["*", "!*.bias"], ["body.0.bias", "body.1.bias", "body.2.bias", "head.bias"]),
        (["!head", "*", "!body.[12]"], [f"body.{n}.{k}" for n in "12" for k in ("weight", "bias")]),
        (
            ["body.0.weight", "body.2", "table", "head"],
            ["body.0.bias", "body.1.weight", "body.1.bias"],
        ),
    ],
)
def test_the_last_pattern_that_fits_decides(patterns, trained):
    model = freeze(net(), patterns)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == trained


def test_both_names_of_a_tied_parameter_may_be_frozen():
    model = freeze(net(tied=True), ["table", "head.weight"])
    assert not model["head"].weight.requires_grad
    assert model["head"].bias.requires_grad


@pytest.mark.parametrize(
    ("patterns", "tied", "message"),
    [
        (["boddy"], False, "fits 'boddy', did you mean 'body'.*The model has body, table, head"),
        (["!nothing.*"], False, r"no parameter or module of the model fits '!nothing\.\*'"),
        (["*"], False, r"freezes all 9 parameters.*Add a pattern such as !head"),
        (["table"], True, "freezes table.weight and trains head.weight, which are one tensor"),
        (["*", "!head"], True, "freezes table.weight and trains head.weight.*Add head.weight"),
    ],
)
def test_patterns_that_do_not_fit_are_refused(patterns, tied, message):
    with pytest.raises(ConfigError, match=message):
        freeze(net(tied=tied), patterns)


def test_a_job_names_frozen_parameters():
    job = load_job("default", "ddp", ["model.freeze=['*', '!blocks.3.*']"])
    assert job.model.freeze == ("*", "!blocks.3.*")
    spec = ModelSpec.of(job.model)
    blueprint = spec.describe(num_classes=16, sequence_length=8)
    for model in (blueprint.model, blueprint.twin().model, blueprint.materialize("cpu", seed=0)):
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert trained
        assert all(name.startswith("blocks.3.") for name in trained)
    plain = ModelSpec.of(load_job("default", "ddp", []).model)
    values = plain.describe(num_classes=16, sequence_length=8).materialize("cpu", seed=0)
    for (name, one), other in zip(values.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_one_pattern_needs_no_list():
    assert job_from_keys("ddp", {"model.freeze": "embedding"}).model.freeze == ("embedding",)
