"""A model whose code uses sizes of its tensors, and all its parameters together, in many ways."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

WORDS, WIDTH, INNER = 29, 32, 64


class OwnSizes(nn.Module):
    """A transformer block whose code computes with the sizes of its weights.

    Args:
        use: one of WAYS.
        heads: number of attention heads.
    """

    def __init__(self, use: str, heads: int = 4) -> None:
        super().__init__()
        self.use, self.heads = use, heads
        self.words = nn.Embedding(WORDS, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def attention(self, x: Tensor) -> Tensor:
        """(rows, places, WIDTH) to the same shape."""
        rows, places, width = x.shape
        parts = self.qkv(x).view(rows, places, 3, self.heads, width // self.heads)
        mixed = F.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4))
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, places, width))
        return out

    def forward(self, words: Tensor) -> Tensor:
        """(rows, places) to (rows, places, WORDS)."""
        x = self.words(words)
        x = x + self.attention(x)
        x = x + self.down(self.middle(F.gelu(self.up(x))))
        return WAYS[self.use](self, x, self.head(x))

    def middle(self, hidden: Tensor) -> Tensor:
        """Scale by sizes of weights and of `hidden`: (rows, places, INNER) to the same shape."""
        weight, options = self.up.weight, {"dtype": hidden.dtype}
        hidden = hidden.reshape(*hidden.shape[:2], weight.size(0) // 4, 4).flatten(2)
        hidden = hidden * (weight.numel() + len(weight) + self.down.weight.shape[1]) / 3000
        places = torch.linspace(0, 1, self.up.bias.shape[0], **options)
        return hidden + places * torch.ones(weight.shape[0], **options)


def _called(model: OwnSizes, x: Tensor, y: Tensor) -> Tensor:
    parameters = dict(model.up.named_parameters())
    return y * torch.func.functional_call(model.up, parameters, (x,)).mean()


WAYS: dict[str, Callable[[OwnSizes, Tensor, Tensor], Tensor]] = {
    "sizes": lambda _, __, y: y,
    "type": lambda own, _, y: y.to(next(own.parameters()).dtype),
    "squares": lambda own, _, y: y * sum(p.pow(2).sum() for p in own.up.parameters()) / 10,
    "values": lambda own, _, y: y * sum(p.sum() for p in own.up._parameters.values()).tanh(),
    "state": lambda own, _, y: y * own.up.state_dict()["weight"].pow(2).sum() / 20,
    "vector": lambda own, _, y: y * parameters_to_vector(own.up.parameters()).norm(),
    "by name": lambda own, _, y: y * dict(own.named_parameters())["up.weight"].pow(2).sum(),
    "numbers": lambda own, _, y: y * sum(p.numel() for p in own.up.parameters()) / 2000,
    "lengths": lambda own, _, y: y * sum(p.shape[0] for p in own.up.parameters()) / 100,
    "called": _called,
    "all numbers": lambda own, _, y: y * sum(p.numel() for p in own.parameters()) / 5000,
    "penalty": lambda own, _, y: y + sum(p.pow(2).mean() for p in own.parameters()),
}
ALL_LISTED = ("all numbers", "penalty")
"""The ways that use every parameter, so that none can be sliced."""
