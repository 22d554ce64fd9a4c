"""Sliced models, with replicas and with stages, compute the same as one process.

Compared are losses, norms, every gradient and every weight, with accumulation, a smaller last
batch, rows without valid targets, tied and untied heads, and parts that the ranks cannot divide
evenly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.own_sizes import ALL_LISTED, WAYS, OwnSizes
from support.parity import Record, largest_difference, train
from support.ranks import run_ranks
from support.sliced_nets import Block, GatedMLP, Heads
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.resnet import Bottleneck, ResNet
from torchvision.models.vision_transformer import VisionTransformer

from bigtrain.data.source import Samples, TensorSamples
from bigtrain.models.gpt import GPT, GPTConfig
from bigtrain.ranks.context import RunContext
from bigtrain.slicing import scatter_gather

WORDS, CLASSES, SIZES = 29, 5, {"num_layers": 2, "width": 24, "num_heads": 6, "vocab_size": 29}


class Own(nn.Module):
    """A user's module: grouped queries, a fused gate, unusual names."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.mix = Block(32, Heads("split", 32, 8, 4, plain=True))
        self.feed = Block(32, GatedMLP(32, 40, fused=True))
        self.scores = nn.Parameter(torch.empty(WORDS, 32).uniform_(-0.2, 0.2))

    def reset_parameters(self) -> None:
        """Initialize as in the constructor."""
        nn.init.uniform_(self.scores, -0.2, 0.2)

    def forward(self, words: Tensor) -> Tensor:
        """(rows, places) to (rows, places, WORDS)."""
        return self.feed(self.mix(self.words(words))) @ self.scores.t()


class Places(nn.Module):
    """A table of positions that receives no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """(1, places, width) of (rows, places, width)."""
        places = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
        return (1 + places / 8).cos()[None, :, None].expand(1, -1, x.shape[2]).contiguous()


class Placed(nn.Module):
    """A user's module that passes a table to every block, so it crosses all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 32), Places()
        self.blocks = nn.ModuleList(Block(32, GatedMLP(32, 40, fused=True)) for _ in range(4))
        self.head = nn.Linear(32, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """(rows, places) to (rows, places, WORDS)."""
        x = self.words(words)
        table = self.places(x)
        for block in self.blocks:
            x = block(x) * table
        return self.head(x)


def gpt(*, tied: bool) -> nn.Module:
    return GPT(GPTConfig(**SIZES, sequence_length=6, tie_embeddings=tied))


def vit() -> nn.Module:
    """Two layers of a ViT-B/16, whose heads four ranks cannot divide evenly."""
    return VisionTransformer(16, 4, 2, num_heads=6, hidden_dim=24, mlp_dim=48, num_classes=CLASSES)


def resnet() -> nn.Module:
    """The bottlenecks of a ResNet-50: one with a projection, one without, one with a stride."""
    model = ResNet(Bottleneck, [2, 1, 1, 1], num_classes=CLASSES, width_per_group=16)
    model.layer3 = model.layer4 = nn.Identity()
    model.fc = nn.Linear(512, CLASSES)
    return model


def smooth_resnet() -> nn.Module:
    """Without comparisons, whose outcome rounding would decide for nearly equal numbers."""
    model = resnet()
    for module in model.modules():
        if isinstance(getattr(module, "relu", None), nn.ReLU):
            module.relu = nn.SiLU()
    model.maxpool = nn.AvgPool2d(2)
    return model


def convnext() -> nn.Module:
    return ConvNeXt([CNBlockConfig(16, 24, 1), CNBlockConfig(24, None, 1)], num_classes=CLASSES)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: gpt(tied=False),
    "gpt, tied": lambda: gpt(tied=True),
    "own": Own,
    "vit": vit,
    "resnet": resnet,
    "resnet, smooth": smooth_resnet,
    "convnext": convnext,
}
OF_OWN_SIZES: dict[str, Callable[[], nn.Module]] = {
    **{way: partial(OwnSizes, way) for way in WAYS if way not in ALL_LISTED},
    "fewer heads than ranks": lambda: OwnSizes("sizes", heads=2),
}
ALL_MODELS = {**MODELS, **OF_OWN_SIZES, "placed": Placed}
TEXT = ("gpt", "gpt, tied", "own", "placed", *OF_OWN_SIZES)
SEQUENCES = (*TEXT, "vit")
CHOOSES = "resnet"
SMOOTH = "resnet, smooth"


def samples(name: str) -> Samples:
    """14 samples, some with few valid targets or none."""
    numbers = torch.Generator().manual_seed(4)
    if name in TEXT:
        words = torch.randint(WORDS, (14, 7), generator=numbers)
        inputs, targets = words[:, :-1].contiguous(), words[:, 1:].contiguous()
        share = torch.linspace(0, 1.2, 14)[:, None]
        targets[torch.rand(14, 6, generator=numbers) < share] = -100
    else:
        inputs = torch.randn(14, 3, 16, 16, generator=numbers)
        targets = torch.randint(CLASSES, (14,), generator=numbers)
        targets[::5] = -100
    return TensorSamples(inputs, targets)


def train_models(
    context: RunContext, strategies: tuple[str, ...], names: tuple[str, ...], keys: dict[str, Any]
) -> dict[tuple[str, str], Record]:
    """Two steps of each model under each strategy: with eight rows, and with the six
    that remain.
    """
    keys = {"train.micro_batch_size": 2, "optim.clip_norm": 0.5, **keys}
    return {
        (strategy, name): train(context, ALL_MODELS[name], samples(name), strategy, keys, 2)
        for strategy in strategies
        for name in names
        if name in SEQUENCES or strategy != "tensor_sequence"
    }


def assert_equal_one_process(
    strategies: tuple[str, ...], names: tuple[str, ...], precision: str, ranks: int, **mesh: int
) -> None:
    keys: dict[str, Any] = {"train.precision": precision}
    (single,) = run_ranks(train_models, 1, ("single",), names, keys, timeout_s=200)
    keys |= {f"mesh.{axis}": size for axis, size in mesh.items()}
    results = run_ranks(train_models, ranks, strategies, names, keys, timeout_s=400, **mesh)
    far = {
        (case, rank): distance
        for rank, records in enumerate(results)
        for case, record in records.items()
        if not (distance := largest_difference(single["single", case[1]], record))
        < {"fp64": 1e-10, "fp32": 1e-5}[precision]
    }
    assert not far


@pytest.mark.parametrize(
    ("precision", "tp"),
    [
        ("fp64", 4),
        ("fp32", 2),
        ("fp64", 2),
        ("fp32", 4),
    ],
)
def test_models_in_slices_equal_one_process(precision: str, tp: int) -> None:
    left_out = SMOOTH if precision == "fp64" else CHOOSES
    names = tuple(name for name in MODELS if name != left_out)
    assert_equal_one_process(("tensor", "tensor_sequence"), names, precision, tp, tp=tp)


def test_models_that_look_at_their_own_sizes_equal_one_process() -> None:
    """A parameter that the model reads from a list stays whole."""
    assert_equal_one_process(("tensor",), tuple(OF_OWN_SIZES), "fp64", 4, tp=4)


def test_slices_beside_stages_and_replicas_on_eight_ranks_equal_one_process() -> None:
    """Three axes: replicas that shard the optimizer state, or all states."""
    strategies = ("1f1b+zero1_torch+tensor", "1f1b+fsdp+tensor", "1f1b+fsdp+tensor_sequence")
    assert_equal_one_process(strategies, ("gpt, tied", "own"), "fp64", 8, pp=2, tp=2)


STAGES = {"pp": 2, "tp": 2}
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble", "zbv", "layer_split")


@pytest.mark.parametrize(
    ("slices", "names"),
    [
        ("tensor", ("gpt, tied", "own")),
        # The patches of an image and its class token are 17 places.
        ("tensor_sequence", ("gpt, tied",)),
        ("tensor_sequence", ("placed", "vit")),
        # Images are sharded along channels or along rows.
        ("tensor_sequence", (SMOOTH, "convnext")),
    ],
)
def test_stages_that_send_each_other_parts_equal_one_process(
    slices: str, names: tuple[str, ...]
) -> None:
    """Every rank sends its part to the next stage; in a V schedule some stages send nothing."""
    strategies = tuple(f"{schedule}+{slices}" for schedule in (*SCHEDULES, "1f1b+full"))
    assert_equal_one_process(strategies, names, "fp64", 4, **STAGES)


def ends_of_steps(
    context: RunContext, strategies: tuple[str, ...], names: tuple[str, ...], keys: dict[str, Any]
) -> list[dict[tuple[str, str], Record]]:
    """The results with scattered boundary tensors, and with whole ones from every rank."""
    results = [train_models(context, strategies, names, keys)]
    least, scatter_gather.MIN_SCATTERED_BYTES = scatter_gather.MIN_SCATTERED_BYTES, 2**60
    try:
        return [*results, train_models(context, strategies, names, keys)]
    finally:
        scatter_gather.MIN_SCATTERED_BYTES = least


@pytest.mark.parametrize(
    ("strategies", "more"),
    [
        (("1f1b+tensor", "zero_bubble+tensor"), {}),
        # A stage saves only its part of its input, and gathers it once more.
        (("gpipe+tensor",), {"strategy.cut.checkpoint": "always"}),
    ],
)
def test_parts_change_no_bit(strategies: tuple[str, ...], more: dict[str, Any]) -> None:
    keys = {"train.precision": "fp32", **{f"mesh.{axis}": n for axis, n in STAGES.items()}, **more}
    arguments = (strategies, ("gpt", "own"), keys)
    for parts, whole in run_ranks(ends_of_steps, 4, *arguments, timeout_s=300, **STAGES):
        assert parts.keys() == whole.keys()
        for case, record in parts.items():
            assert largest_difference(record, whole[case]) == 0.0, case
