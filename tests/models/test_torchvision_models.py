"""torchvision's models by name: all can be deferred, and their initial weights are
torchvision's.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
import torchvision.models
from support.zoo import CLASSIFICATION, NAMES
from torch import nn

from bigtrain.errors import ConfigError
from bigtrain.models import check_model, make_model
from bigtrain.models.blueprint import describe

FULL = 25 * 10**6
"""A model of up to this many parameters is also built normally, for comparison."""
ALSO_FULL = ("convnext_tiny", "swin_t", "swin_v2_t")
"""The smallest models of their families, although larger."""
LARGE = 5 * 10**5
"""Only the first tensor with more elements is compared in a model: the others are similar."""


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("name", NAMES)
def test_every_torchvision_model_is_deferred_and_initialised_as_usual(name: str) -> None:
    blueprint = describe(lambda: make_model(name, {}))
    assert blueprint.deferred, blueprint.reason
    tensors = values(blueprint.model)
    assert all(tensor.is_meta for tensor in tensors.values())
    count = sum(parameter.numel() for parameter in blueprint.model.parameters())
    # Its published figure excludes auxiliary heads
    if name in CLASSIFICATION and name != "googlenet":
        published = torchvision.models.get_model_weights(name)
        assert count in [weights.meta["num_params"] for weights in published]

    chosen = compared(tensors)
    full = count <= FULL or name in ALSO_FULL
    if not full:
        chosen = chosen[:6] + chosen[-6:]
    blueprint.materialize("cpu", seed=7, only=chosen)
    first = {key: tensors[key].detach().clone() for key in chosen}
    for key in reversed(chosen[-4:]):
        blueprint.materialize("cpu", seed=7, only=[key])
        assert torch.equal(tensors[key], first[key]), key
    if full:
        torch.manual_seed(0)
        usual = values(make_model(name, {}))
        assert usual.keys() == tensors.keys()
        for key in chosen:
            assert_alike(f"{name}: {key}", first[key], usual[key].detach())


@pytest.mark.parametrize("name", ["resnet18", "swin_t", "regnet_y_400mf", "fcn_resnet50"])
def test_parts_of_torchvision_models_equal_the_whole(name: str) -> None:
    whole = values(describe(lambda: make_model(name, {})).materialize("cpu", seed=7))
    again = describe(lambda: make_model(name, {}))
    for key in list(whole)[::-7]:
        again.materialize("cpu", seed=7, only=[key])
    for key, tensor in values(again.model).items():
        assert tensor.is_meta or torch.equal(tensor, whole[key]), key


def compared(tensors: dict[str, torch.Tensor]) -> list[str]:
    """The names of all tensors except for the second and further large ones."""
    large = [key for key, tensor in tensors.items() if tensor.numel() > LARGE]
    return [key for key in tensors if key not in large[1:]]


def assert_alike(label: str, mine: torch.Tensor, usual: torch.Tensor) -> None:
    """Assert that fixed values are equal, and random ones alike within six standard errors.

    Compared are the mean and the size of the random values. The size is the mean absolute value
    instead of the deviation, because in older releases of torch one value in a million of
    trunc_normal_ is at its bound, a hundred deviations from the mean.
    """
    assert (mine.dtype, mine.shape, mine.stride()) == (usual.dtype, usual.shape, usual.stride())
    if torch.equal(mine, usual):
        return
    assert mine.is_floating_point(), label
    count, spread = mine.numel(), float(usual.std())
    assert spread > 0, f"{label} is constant, and differs from torchvision's"
    if count >= 64:
        error = abs(float(mine.mean()) - float(usual.mean()))
        assert error <= 6 * spread * math.sqrt(2 / count), label
        size = float(usual.abs().mean())
        assert float(mine.abs().mean()) == pytest.approx(size, rel=6 / math.sqrt(count)), label


def test_index_buffers_are_exact() -> None:
    name = "features.1.0.attn.relative_position_index"
    blueprint = describe(lambda: make_model("swin_t", {}))
    mine = values(blueprint.materialize("cpu", seed=0, only=[name]))[name]
    assert mine[0] == 6 * 13 + 6  # a zero offset is in the middle of 13 x 13 offsets
    assert torch.equal(mine, values(torchvision.models.swin_t(weights=None))[name])


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("resnet18", {"num_clases": 3}, r"num_clases: resnet18 has no .*, did you mean 'num_class"),
        ("resnet18", {"num_classes": 0}, r"args\.num_classes=0 needs a whole number, at least 1"),
        ("resnet18", {"num_classes": "ten"}, r"args\.num_classes='ten' needs a whole number"),
        (
            "resnet18",
            {"weights": "DEFAULT"},
            r"weights='DEFAULT': resnet18 starts from initial weights, nothing is downloaded\. Lea",
        ),
        ("resnet18", {"pretrained": True}, r"Leave model\.args\.pretrained out"),
        (
            "fcn_resnet50",
            {"weights_backbone": "DEFAULT"},
            r"model\.args\.weights_backbone='DEFAULT': fcn_resnet50 starts",
        ),
        (
            "resnet18",
            {"replace_stride_with_dilation": [True]},
            r"model\.args: torchvision's resnet18\(replace_stride_with_dilation=\[True\]\) raised "
            r"ValueError: .*\. Correct or leave out",
        ),
    ],
)
def test_wrong_arguments_of_torchvision_are_refused(
    name: str, args: dict[str, Any], message: str
) -> None:
    for refuse in (check_model, make_model):
        with pytest.raises(ConfigError, match=message):
            refuse(name, args)


def test_arguments_reach_torchvision() -> None:
    check_model("resnet18", {"num_classes": 3, "zero_init_residual": True})
    model = make_model("resnet18", {"num_classes": 3, "zero_init_residual": True})
    assert model.fc.out_features == 3  # type: ignore[union-attr]
    assert make_model("fcn_resnet50", {"num_classes": 2}).classifier[-1].out_channels == 2  # type: ignore[index,union-attr]


def test_a_missing_torchvision_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(ConfigError, match="its import failed: .*Run: pip install torchvision"):
        check_model("resnet18", {})
    check_model("gpt", {})


def test_a_resnet_for_small_images_keeps_their_size():
    model = make_model("resnet18", {"num_classes": 10, "small_images": True})
    seen = []
    model.layer1.register_forward_hook(lambda _m, _i, output: seen.append(tuple(output.shape)))
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert seen == [(2, 64, 32, 32)]
    # Kaiming's deviation by fan-out: sqrt(2 / (64 * 3 * 3)).
    assert model.conv1.weight.detach().std() == pytest.approx((2 / 576) ** 0.5, rel=0.1)
    assert model.conv1.bias is None
    plain = make_model("resnet18", {"num_classes": 10, "small_images": False})
    assert plain.conv1.kernel_size == (7, 7)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("vgg11", True, r"small_images=true is for the ResNets, and model\.name is vgg11\. Use"),
        ("resnet18", "yes", r"small_images='yes' needs true or false\. Use model\.args\.small"),
    ],
)
def test_small_images_are_refused_elsewhere(name, value, message):
    with pytest.raises(ConfigError, match=message):
        check_model(name, {"small_images": value})
