"""Small nets of plain torch, with features that affect forecasts; their values do not matter."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 29


class Tied(nn.Module):
    """Residual blocks between an embedding and a head that is tied to it."""

    def __init__(self, width: int = 32, layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
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


class Residual(nn.Module):
    """Two convolutions with BatchNorm and a skip connection; the activations work in place."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(after)
        self.beside = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.first_norm(self.first(x)), inplace=True)
        return functional.relu(self.second_norm(self.second(inner)) + self.beside(x), inplace=True)


class Conv(nn.Module):
    """Residual blocks with buffers, of two widths."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(
            Residual(8, 8), Residual(8, 8), Residual(8, 12), Residual(12, 12), Residual(12, 12)
        )
        self.head = nn.Linear(12, 7)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


class Odd(nn.Module):
    """Dropout, prime sizes, a frozen layer, and a parameter without dimensions.

    Its blocks have different widths, and pass on two tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(19, 37)
        self.frozen = nn.Linear(37, 53).requires_grad_(False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(53, size), nn.SiLU(), nn.Dropout(0.3), nn.Linear(size, 53))
            for size in (41, 67, 31, 73, 59)
        )
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("scale", torch.arange(53.0))
        self.head = nn.Linear(53, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.into(x))
        x = self.frozen(x) * self.scale
        gate = torch.sigmoid(x)
        for layer in self.layers:
            x = functional.dropout(x + layer(x) * gate, 0.1, self.training)
        return self.head(x * self.gain)


class LooksAtValues(Tied):
    """Its computation depends on a value, so it does not run on fake tensors."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(self.layers[0](x) if float(x.sum()) > 0 else x)


def language(rows: int, length: int = 12) -> tuple[Tensor, Tensor]:
    tokens = torch.arange(rows * length).reshape(rows, length) % VOCABULARY
    return tokens, tokens.clone()


def images(rows: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, 3, 10, 10), torch.arange(rows) % 7


def features(rows: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, 19), torch.arange(rows) % 5


NETS = {
    "tied": (Tied, language),
    "conv": (Conv, images),
    "odd": (Odd, features),
    "looks": (LooksAtValues, language),
}
"""By name: a function that builds the net, and one that makes a batch of `rows` rows for it."""
