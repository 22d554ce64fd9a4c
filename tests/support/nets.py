"""Small models and data for the tests: real layers with few parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bigtrain.data.source import TensorSamples

VOCABULARY = 13
LENGTH = 6


class TinyLM(nn.Module):
    """Embedding, one residual block with a norm, and a head tied to the embedding."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))
        return self.head(x)


class TinyConv(nn.Module):
    """Convolution, BatchNorm and a linear head; has buffers and an integer counter."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(images))).mean(dim=(2, 3)))


class ReadsItsWeights(nn.Module):
    """Cannot be built on the meta device, because its constructor reads a value."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.scale = float(self.head.weight.detach().abs().max())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) / self.scale


class Sometimes(TinyLM):
    """A layer that every other training forward pass skips."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.calls % 2 == 0:
            x = x + self.extra(x)
        self.calls += self.training
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return self.head(x)


class Unreached(TinyLM):
    """Parameters without gradients: those of a layer that is never called, and one outside of
    layers.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.pooler = nn.Linear(width, 4 * width)
        self.spare = nn.Parameter(torch.ones(5))

    def forward(self, tokens: Tensor) -> Tensor:
        self.pooler(self.embedding(tokens))
        return super().forward(tokens)


class Gained(TinyLM):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.gain


def tokens(samples: int, *, ignored: bool = True) -> TensorSamples:
    """Sequences with very uneven numbers of valid targets; some samples have none."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randint(VOCABULARY, (samples, LENGTH), generator=generator)
    targets = torch.randint(VOCABULARY, (samples, LENGTH), generator=generator)
    if ignored:
        share = torch.linspace(0, 1.2, samples)[:, None]
        targets[torch.rand(samples, LENGTH, generator=generator) < share] = -100
    return TensorSamples(inputs, targets)


class BlockLM(nn.Module):
    """Four residual blocks between an embedding and a head tied to it."""

    def __init__(self, width: int = 16, dropout: float = 0.0, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
                nn.Dropout(dropout),
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class BlockConv(nn.Module):
    """Two residual blocks with BatchNorm and in-place activations, as in vision models."""

    def __init__(self, *, inplace: bool = True) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(8, 8, 3, padding=1, bias=False),
                    nn.BatchNorm2d(8),
                    nn.ReLU(inplace=inplace),
                    nn.Dropout2d(0.2),
                    nn.Conv2d(8, 8, 3, padding=1),
                    nn.ReLU(inplace=inplace),
                )
                for _ in range(2)
            )
        )
        self.head = nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(self.stem(images)).mean(dim=(2, 3)))


def small_vit(num_classes: int = 10, depth: int = 6) -> nn.Module:
    """Torchvision's ViT: the strides of its blocks' outputs are not those of contiguous tensors."""
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=depth,
        num_heads=2,
        hidden_dim=48,
        mlp_dim=96,
        num_classes=num_classes,
    )


class DeepResidual(nn.Module):
    """Six residual blocks between an embedding and a head, 0.8 MB: enough for four stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
            for _ in range(6)
        )
        self.head = nn.Linear(64, 13)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embedding(inputs)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class ResidualStage(nn.Module):
    """A stage: residual blocks of two layers, and a layer that changes the width."""

    def __init__(self, width: int, following: int, depth: int) -> None:
        super().__init__()
        blocks = (
            nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.blocks = nn.Sequential(*blocks)
        self.down = nn.Linear(width, following)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.down(x)


class StagedResidual(nn.Module):
    """Stages of different widths, with layers between their blocks that belong to no block."""

    def __init__(self) -> None:
        super().__init__()
        widths = (8, 16, 32, 5)
        stages = (ResidualStage(a, b, 4) for a, b in zip(widths, widths[1:], strict=False))
        self.stages = nn.Sequential(*stages)

    def forward(self, x: Tensor) -> Tensor:
        return self.stages(x)
