"""A sliced model performs exactly the exchanges of its plan."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from support.fuzzed_nets import SMALL
from support.sliced_nets import Block, GatedMLP, Heads, work_on
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision import models

from bigtrain.models.gpt import GPT, GPTConfig
from bigtrain.slice_planning.choose import plan_slices
from bigtrain.slicing.exchange import SliceGroup, TensorExchange
from bigtrain.slicing.install import slice_modules, slice_tensors
from bigtrain.tensors.fake import fake_model


def exchanged(model, plan, *shape, tokens=0):
    """Return the exchanges of a rank, without the loss's, and the functions without a rule."""
    noted: list[TensorExchange] = []
    group = SliceGroup(0, plan.ranks, exchanges=noted)
    with FakeTensorMode(allow_non_fake_inputs=True):
        twin = fake_model(model, torch.device("cpu"), double=False).train()
        slice_tensors(twin, plan.slices, group)
        slice_modules(twin, plan.slices, group, plan.gathered)
        inputs = torch.zeros(shape, dtype=torch.long) if tokens else torch.zeros(shape)
        logits = twin(inputs)
        before = len(noted)
        rows = logits.flatten(0, -2) if logits.dim() > 2 else logits
        loss = F.cross_entropy(rows, torch.zeros(len(rows), dtype=torch.long))
        del noted[before:]
        loss.backward()
    return Counter((sent.kind, sent.nbytes) for sent in noted), group.gathers


def small_vit():
    return models.VisionTransformer(32, 8, 2, 4, 48, 96, num_classes=10)


LISTED = ("resnet18", "resnet50", "densenet121", "convnext_tiny", "efficientnet_b0", "swin_t",
          "regnet_y_400mf")  # fmt: skip
NETS = {
    "gpt": lambda: GPT(GPTConfig(vocab_size=501, num_layers=2, width=64)),
    "gpt untied": lambda: GPT(
        GPTConfig(vocab_size=501, num_layers=2, width=64, tie_embeddings=False)
    ),
    "shared keys": lambda: nn.Sequential(
        Block(64, Heads("separate", 64, 8, 2)),
        Block(64, GatedMLP(64, 96, fused=True)),
        nn.Linear(64, 10),
    ),
    "fused shared keys": lambda: nn.Sequential(
        Block(64, Heads("split", 64, 8, 4)), Block(64, GatedMLP(64, 96, fused=False))
    ),
    "one key": lambda: nn.Sequential(Block(64, Heads("separate", 64, 8, 1)), nn.Linear(64, 10)),
    "vit": small_vit,
    **SMALL,
    **{
        name: (lambda name=name: models.get_model(name, weights=None, num_classes=10))
        for name in ("shufflenet_v2_x0_5", "mobilenet_v3_small", *LISTED)
    },
}


@pytest.mark.parametrize(("name", "ranks"), [*product(NETS, [2, 4])])
def test_exchanges_of_a_plan_are_those_of_its_slices(name, ranks):
    model = NETS[name]()
    shape, tokens = ((2, 16), 501) if name.startswith("gpt") else ((2, 5, 64), 0)
    if name not in ("gpt", "gpt untied", "shared keys", "fused shared keys", "one key"):
        shape = (2, 3, 32, 32)
    plan = plan_slices(work_on(model, *shape, tokens=tokens), ranks)
    exchanges, without_rule = exchanged(model, plan, *shape, tokens=tokens)
    planned = Counter((sent.kind, sent.nbytes) for sent in plan.exchanges())
    assert (exchanges - planned, planned - exchanges) == (Counter(), Counter())
    assert without_rule == {}
