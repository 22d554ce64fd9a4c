"""Which modules of a model are its blocks: repeated modules, and the blocks inside of stages."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torchvision
from support import hub_models
from support.nets import ResidualStage
from torch import nn

from bigtrain.models.blocks import find_blocks, modules_outside


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in find_blocks(model)]


def timm_model(name: str) -> nn.Module:
    import timm

    with torch.device("meta"):
        return timm.create_model(name)


def torchvision_model(name: str) -> nn.Module:
    with torch.device("meta"):
        return torchvision.models.get_model(name, weights=None)


def in_stages(prefix: str, depths: Sequence[int], suffix: str) -> list[str]:
    return [f"{prefix}.{i}.{suffix}.{j}" for i, depth in enumerate(depths) for j in range(depth)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("convnext_tiny", in_stages("stages", (3, 3, 9, 3), "blocks")),
        ("swin_tiny_patch4_window7_224", in_stages("layers", (2, 2, 6, 2), "blocks")),
        ("vit_tiny_patch16_224", [f"blocks.{i}" for i in range(12)]),
        ("resnet18", [f"layer{i}.{j}" for i in range(1, 5) for j in range(2)]),
    ],
)
def test_stages_of_timm_are_taken_apart(name, expected):
    assert names(timm_model(name)) == expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("inception_v4", "InceptionA"),
        ("efficientnet_b0", "InvertedResidual"),
        ("mobilenetv3_large_100", "InvertedResidual"),
        ("densenet121", "DenseLayer"),
    ],
)
def test_blocks_of_timm_stay_whole(name, kind):
    """A branch of several convolutions is no chain of blocks."""
    assert kind in {type(module).__name__ for _, module in find_blocks(timm_model(name))}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("efficientnet_b0", "MBConv"),
        ("mobilenet_v2", "InvertedResidual"),
        ("resnet18", "BasicBlock"),
        ("swin_t", "SwinTransformerBlock"),
    ],
)
def test_blocks_of_torchvision_stay_whole(name, kind):
    assert kind in {type(module).__name__ for _, module in find_blocks(torchvision_model(name))}


def test_stages_of_transformers_are_taken_apart():
    """A stage of a single block, too."""
    expected = in_stages("convnext.encoder.stages", (1, 1, 2, 1), "layers")
    assert names(hub_models.make("convnext")) == expected


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "llama", "t5", "bert"])
def test_layers_of_transformers_stay_whole(family):
    model = hub_models.make(family)
    layers = [name for name, _ in model.named_modules() if name.rpartition(".")[2].isdecimal()]
    outermost = [n for n in layers if not any(n.startswith(f"{o}.") for o in layers)]
    assert names(model) == outermost


def test_layers_with_experts_stay_whole():
    """They look like stages, but their shapes are the same."""
    model = nn.Sequential(*(ResidualStage(8, 8, 2) for _ in range(3)))
    assert names(model) == ["0", "1", "2"]


def test_stages_have_their_own_widths():
    widths = (4, 8, 16, 4)
    model = nn.Sequential(
        *(ResidualStage(a, b, 2) for a, b in zip(widths, widths[1:], strict=False))
    )
    assert names(model) == [f"{i}.blocks.{j}" for i in range(3) for j in range(2)]
    assert [name for name, _ in modules_outside(model)] == ["0.down", "1.down", "2.down"]


def test_parameters_that_deepspeed_has_emptied_count_with_their_shapes():
    widths = (4, 8, 16, 4)
    model = nn.Sequential(
        *(ResidualStage(a, b, 2) for a, b in zip(widths, widths[1:], strict=False))
    )
    before = names(model)
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    assert names(model) == before
