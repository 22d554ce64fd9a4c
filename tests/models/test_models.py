"""Models by name and by import path: their structure, and refusals."""

from __future__ import annotations

import functools
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision.models
from torch import nn

from bigtrain.errors import ConfigError
from bigtrain.job.load import load_job
from bigtrain.models import (
    GPT,
    GPTConfig,
    LeNet,
    check_model,
    list_models,
    make_model,
    model_defaults,
    sequence_length,
)
from bigtrain.models.blueprint import Blueprint, describe
from bigtrain.models.gpt import PRESETS

CLASSIFICATION = torchvision.models.list_models(module=torchvision.models)
SEGMENTATION = torchvision.models.list_models(module=torchvision.models.segmentation)

# The name states the parameters in millions, with tied weights, counted by hand from the table.
NAMED_SIZES = {
    "gpt": 3,
    "gpt-10m": 10,
    "gpt-50m": 50,
    "gpt2": 124,
    "gpt2-medium": 355,
    "gpt2-large": 774,
    "gpt2-xl": 1558,
    "gpt-124m": 124,
    "gpt-350m": 350,
    "gpt-760m": 760,
    "gpt-1.3b": 1300,
    "gpt-2.7b": 2700,
    "gpt-6.7b": 6700,
    "gpt-13b": 13000,
    "gpt-175b": 175000,
}


@functools.cache
def describe_model(name: str) -> Blueprint:
    """The blueprint of a model by name."""
    return describe(lambda: make_model(name, {}))


# gpt


def test_every_preset_has_a_named_size() -> None:
    assert list(PRESETS) == list(NAMED_SIZES)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_parameters_that_their_names_say(name: str) -> None:
    count = sum(parameter.numel() for parameter in describe_model(name).model.parameters())
    assert GPTConfig.from_preset(name, {}).num_parameters == count
    assert count / 1e6 == pytest.approx(NAMED_SIZES[name], rel=0.1)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_gpt2_has_its_parameters_to_the_last_one(name: str, published: int) -> None:
    assert GPTConfig.from_preset(name, {}).num_parameters == published


def test_the_job_gpt2_trains_gpt2_on_bytes() -> None:
    job = load_job("gpt2")
    defaults = model_defaults(job.model.name, num_classes=256, sequence_length=1024)
    config = GPTConfig.from_preset(job.model.name, {**defaults, **job.model.args})
    assert config.num_parameters == 124_439_808
    job = load_job("gpt2", overrides=["model.args.vocab_size=256"])  # for bytes only
    config = GPTConfig.from_preset(job.model.name, {**defaults, **job.model.args})
    assert config.num_parameters == 124_439_808 - (50257 - 256) * 768


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_the_formula_counts_parameters(bias: bool, tie_embeddings: bool) -> None:
    config = GPTConfig(num_layers=3, width=24, bias=bias, tie_embeddings=tie_embeddings)
    model = GPT(config)
    assert config.num_parameters == sum(p.numel() for p in model.parameters())
    assert (model.head.weight is model.embedding.token.weight) == tie_embeddings


def test_the_largest_is_described_quickly_and_filled_in_part() -> None:
    blueprint = describe_model("gpt-175b")
    assert blueprint.deferred, blueprint.reason
    name = "blocks.95.mlp.output.bias"
    blueprint.materialize("cpu", seed=0, only=[name])
    assert torch.equal(blueprint.model.get_parameter(name), torch.zeros(12288))
    assert blueprint.model.get_parameter("blocks.95.mlp.output.weight").is_meta


def test_initial_weights_have_the_stated_scale() -> None:
    model = describe(lambda: make_model("gpt", {"tie_embeddings": False})).materialize(
        "cpu", seed=0
    )
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            branch = ".output." in name
            std = 0.02 / math.sqrt(2 * 4) if branch else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name
        elif name.endswith("bias"):
            assert parameter.count_nonzero() == 0, name
        else:
            assert torch.equal(parameter, torch.ones_like(parameter)), name


def test_a_place_sees_only_what_stands_before_it() -> None:
    model = GPT(GPTConfig(num_layers=2, width=32, sequence_length=16)).eval()
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 16, 256)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])
    torch.testing.assert_close(model(tokens[:, :5]), before[:, :5])


def test_dropout_acts_in_training_only() -> None:
    model = GPT(GPTConfig(num_layers=1, width=32, dropout=0.5))
    tokens = torch.randint(256, (2, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_gpt_learns_to_repeat() -> None:
    model = GPT(GPTConfig(num_layers=1, width=32, vocab_size=7, sequence_length=8, num_heads=2))
    tokens = torch.arange(7).repeat(4, 2)[:, :9]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert loss.item() < 0.05


def test_too_long_an_input_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"sequence_length=128, but the input has 130 tokens\. Use "
        r"model\.args\.sequence_length=130, or shorter",
    ):
        make_model("gpt", {})(torch.zeros(1, 130, dtype=torch.long))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"hue": 3}, r"model\.args\.hue: gpt has no argument 'hue'\. Known: vocab_size"),
        ({"num_layer": 3}, r"model\.args\.num_layer: .*, did you mean 'num_layers'\?"),
        ({"num_layers": 0}, r"model\.args\.num_layers=0 needs a whole number, at least 1\."),
        ({"num_layers": 1.5}, r"num_layers=1\.5 needs a whole number"),
        ({"width": "wide"}, r"model\.args\.width='wide' needs a whole number"),
        ({"bias": 1}, r"model\.args\.bias=1 needs true or false\."),
        ({"dropout": "no"}, r"model\.args\.dropout='no' needs a number\."),
        ({"dropout": 1.0}, r"dropout=1\.0 is not in \[0, 1\)\. Use model\.args\.dropout=0\.1\."),
        ({"num_heads": 5}, r"num_heads=5 does not divide width=256\. Use model\.args\.num_heads=4"),
    ],
)
def test_wrong_arguments_of_gpt_are_refused(args: dict[str, Any], message: str) -> None:
    for refuse in (check_model, make_model, sequence_length):
        with pytest.raises(ConfigError, match=message):
            refuse("gpt", args)


# lenet


def test_lenet_has_its_sixty_thousand_parameters() -> None:
    model = make_model("lenet", {})
    assert isinstance(model, LeNet)
    # 6 and 16 maps of 5 x 5 (all connected), 120 of 400, 84 of 120, 10 of 84; and the biases.
    assert sum(p.numel() for p in model.parameters()) == 156 + 2416 + 48120 + 10164 + 850
    assert model(torch.randn(3, 1, 32, 32)).shape == (3, 10)
    colour = make_model("lenet", {"in_channels": 3, "num_classes": 7})
    assert colour(torch.randn(2, 3, 32, 32)).shape == (2, 7)


def test_lenet_refuses_what_it_cannot_take() -> None:
    with pytest.raises(ConfigError, match="images are 28 x 28, needed are 32 x 32. Pad or resize"):
        LeNet()(torch.randn(1, 1, 28, 28))
    for args, message in (
        ({"num_classes": 0}, r"model\.args\.num_classes=0 needs a whole number, at least 1"),
        ({"in_channels": "rgb"}, r"model\.args\.in_channels='rgb' needs a whole number"),
        ({"classes": 2}, r"args\.classes: lenet has no argument 'classes', did you mean 'num_cla"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_model("lenet", args)


# by import path


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    (tmp_path / "my_models.py").write_text(
        "from torch import nn\n"
        "VERSION = 3\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, width, depth=1):\n"
        "        super().__init__()\n"
        "        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))\n"
        "class Group:\n"
        "    Net = Net\n"
        "def anything(**args):\n"
        "    return args\n"
    )
    (tmp_path / "my_broken.py").write_text("import no_such_package_of_mine\n")
    (tmp_path / "my_failing.py").write_text("raise RuntimeError('no licence\\nfound')\n")
    yield tmp_path
    for name in ("my_models", "my_broken", "my_failing"):
        sys.modules.pop(name, None)


def test_a_users_model_is_found_in_the_current_directory(own: Path) -> None:
    path = list(sys.path)
    check_model("my_models:Net", {"width": 3})
    model = make_model("my_models:Net", {"width": 3, "depth": 2})
    assert len(model.layers) == 2  # type: ignore[arg-type]
    assert isinstance(make_model("my_models:Group.Net", {"width": 3}), nn.Module)
    assert sys.path == path
    assert os.getcwd() == str(own)
    assert describe(lambda: make_model("my_models:Net", {"width": 3})).deferred
    assert isinstance(
        make_model("torch.nn:Linear", {"in_features": 2, "out_features": 2}), nn.Linear
    )


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("my_models:", {}, r"model\.name='my_models:' is not an import path\. Write it like"),
        ("my_modells:Net", {}, r"no module named 'my_modells' in the current directory or among"),
        ("my_models.sub:Net", {}, r"model\.name=my_models\.sub:Net: no module named"),
        (
            "my_broken:Net",
            {},
            r"importing my_broken failed: ModuleNotFoundError: No module named 'no_such_package_of",
        ),
        (
            "my_failing:Net",
            {},
            r"importing my_failing failed: RuntimeError: no licence\. See: py",
        ),
        ("my_models:Nett", {}, r"my_models has no 'Nett', did you mean 'Net'\? Name a class"),
        ("my_models:VERSION", {}, r"VERSION is a int, which cannot be called\. Name a class"),
        ("my_models:Net", {}, r"args\.width: my_models:Net needs it.*Set model\.args\.width=VALUE"),
        (
            "my_models:Net",
            {"width": 2, "dept": 2},
            r"model\.args\.dept: .* did you mean 'depth'\? Known: width, depth\.",
        ),
    ],
)
def test_a_users_model_that_cannot_be_made_is_refused(
    own: Path, name: str, args: dict[str, Any], message: str
) -> None:
    for refuse in (check_model, make_model):
        with pytest.raises(ConfigError, match=message) as caught:
            refuse(name, args)
        assert "\n" not in str(caught.value)


def test_a_constructor_that_fails_is_explained(own: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"model\.args: my_models:Net\(width='a'\) raised TypeError: .*\. Correct these argum",
    ):
        make_model("my_models:Net", {"width": "a"})
    with pytest.raises(ConfigError, match=r"my_models:anything made a dict, not a torch\.nn\.Modu"):
        make_model("my_models:anything", {"a": 1})


# names, and arguments that follow from the data


def test_all_names_are_listed_once() -> None:
    names = list_models()
    assert names == [*PRESETS, "lenet", *CLASSIFICATION, *SEGMENTATION]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "near"),
    [("resnet81", "resnet18"), ("gpt-1.3", "gpt-1.3b"), ("lenet5", "lenet")],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, near: str) -> None:
    message = rf"model\.name: unknown model '{name}', did you mean '{re.escape(near)}'\? Use gpt, "
    for refuse in (check_model, make_model):
        with pytest.raises(ConfigError, match=message):
            refuse(name, {})


def test_the_data_fills_in_what_was_left_out() -> None:
    assert model_defaults("lenet", num_classes=7, sequence_length=None) == {"num_classes": 7}
    assert model_defaults("resnet18", num_classes=7, sequence_length=3) == {"num_classes": 7}
    language = model_defaults("gpt2", num_classes=256, sequence_length=64)
    assert language == {"sequence_length": 64}  # its vocabulary is larger than the data's and stays
    larger = model_defaults("gpt2", num_classes=60000, sequence_length=None)
    assert larger == {"vocab_size": 60000}
    for name in ("gpt", "gpt-10m"):  # models of bytes use the vocabulary of the data
        defaults = model_defaults(name, num_classes=64, sequence_length=None)
        assert defaults == {"vocab_size": 64}
    assert model_defaults("gpt", num_classes=None, sequence_length=None) == {}
    assert model_defaults("a.b:C", num_classes=7, sequence_length=3) == {}
    check_model("gpt2", language)


def test_a_language_model_says_how_long_its_samples_are() -> None:
    assert sequence_length("gpt2", {}) == 1024
    assert sequence_length("gpt2", {"sequence_length": 32}) == 32
    for name in ("lenet", "resnet18", "a.b:C"):
        assert sequence_length(name, {}) is None
