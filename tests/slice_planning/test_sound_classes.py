"""Dims that are sliced together can be permuted together without changing a model's output."""

from __future__ import annotations

import pytest
import torch
from support.fuzzed_nets import SMALL
from support.shuffled_units import difference, randomize
from support.sliced_nets import Block, GatedMLP, Heads
from torch import nn
from torchvision import models

from bigtrain.models.gpt import GPT, GPTConfig
from bigtrain.slice_planning.axis_classes import AxisClasses
from bigtrain.slice_planning.axis_trace import trace_axes
from bigtrain.slicing.slices import Slices, SliceSection

MOST = 8
"""The number of classes of a model that are tested: each takes a forward pass."""


def classes_of(model, inputs):
    classes = AxisClasses(trace_axes(model, inputs, -1)).classes.values()
    shuffled_classes = [
        axis_class
        for axis_class in classes
        if axis_class.units > 1
        and axis_class.in_activations
        and not axis_class.is_table
        and all(sent.kind != "all_gather" for sent in axis_class.exchanged)
    ]
    return (
        [shuffled_classes[n * len(shuffled_classes) // MOST] for n in range(MOST)]
        if len(shuffled_classes) > MOST
        else shuffled_classes
    )


def assert_shuffled_alike(model, count=MOST):
    classes = classes_of(model, torch.zeros(2, 3, 64, 64))
    assert len(classes) == count
    randomize(model)
    model.double().eval()
    images = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    for axis_class in classes:
        assert difference(model, lambda: model(images), axis_class.slices) < 1e-9, axis_class.name


@pytest.mark.parametrize("name", SMALL)
def test_classes_of_few_layers(name):
    torch.manual_seed(0)
    # Attention and MLP of each layer, or only the MLP, and the head.
    assert_shuffled_alike(SMALL[name]().train(), {"swin": 7, "convnext": 3}.get(name, MOST))


@pytest.mark.parametrize(
    "name",
    [
        "mobilenet_v3_small",
        "shufflenet_v2_x0_5",
        "resnet18",
        "densenet121",
        "googlenet",
        "swin_t",
    ],
)
def test_classes_of_torchvision(name):
    torch.manual_seed(0)
    options = {"init_weights": False, "aux_logits": False} if name == "googlenet" else {}
    model = models.get_model(name, weights=None, num_classes=10, **options)
    assert_shuffled_alike(model.train())


@pytest.mark.parametrize("layout", ["chunk", "3HD", "H3D", "H3D chunk", "split", "groups"])
def test_classes_of_attention(layout):
    torch.manual_seed(0)
    shared = 2 if layout in ("split", "groups") else 0
    attention = Block(32, Heads(layout, 32, 4, shared))
    model = nn.Sequential(attention, Block(32, GatedMLP(32, 24, fused=True)), nn.Linear(32, 7))
    classes = classes_of(model, torch.zeros(2, 5, 32))
    # Heads, hidden places, and the 7 places of the output.
    assert len(classes) == 3
    model.double()
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    for axis_class in classes:
        assert difference(model, lambda: model(x), axis_class.slices) < 1e-12, axis_class.name


def test_what_does_not_go_together_is_seen():
    model = GPT(GPTConfig(num_layers=1, width=32, num_heads=4, tie_embeddings=False)).double()
    tokens = torch.randint(0, 256, (2, 16))
    heads = {
        "blocks.0.attention.qkv.weight": Slices(0, (SliceSection(32, 8),) * 3),
        "blocks.0.attention.qkv.bias": Slices(0, (SliceSection(32, 8),) * 3),
        "blocks.0.attention.output.weight": Slices.even(1, 32, 8),
    }
    assert difference(model, lambda: model(tokens), heads) < 1e-12
    torn = {**heads, "blocks.0.attention.output.weight": Slices.even(1, 32, 4)}
    assert difference(model, lambda: model(tokens), torn) > 1e-6
    del heads["blocks.0.attention.output.weight"]
    assert difference(model, lambda: model(tokens), heads) > 1e-6
