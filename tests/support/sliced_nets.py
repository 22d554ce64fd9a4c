"""Small modules whose slices are known by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigtrain.losses.loss import CrossEntropy


def work_on(model: nn.Module, *shape: int, tokens: int = 0, loss: Any = None) -> Any:
    """A workload of a model on one micro-batch of a shape: random floats, or tokens below
    `tokens`.
    """
    inputs = torch.zeros(shape, dtype=torch.long) if tokens else torch.zeros(shape)
    batch = SimpleNamespace(inputs=inputs)
    return SimpleNamespace(model=model, micro_batch=batch, loss=loss or CrossEntropy())


class Block(nn.Module):
    """A norm, a layer and a residual connection."""

    def __init__(self, width: int, layer: nn.Module) -> None:
        super().__init__()
        self.norm, self.layer, self.last = nn.LayerNorm(width), layer, nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, places, width) to the same shape."""
        out: Tensor = self.last(x + self.layer(self.norm(x)))
        return out


class GatedMLP(nn.Module):
    """An MLP in which one projection gates the other, with one fused weight or two weights."""

    def __init__(self, width: int, inner: int, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            self.both = nn.Linear(width, 2 * inner)
        else:
            self.gate, self.up = nn.Linear(width, inner), nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to the same shape."""
        gate, up = self.both(x).chunk(2, -1) if self.fused else (self.gate(x), self.up(x))
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class Heads(nn.Module):
    """Attention with one of the usual layouts of queries, keys and values.

    Args:
        layout: "chunk", "3HD", "H3D", "H3D chunk", "split", "groups" or "separate".
        width: features of a token.
        heads: number of query heads.
        shared: number of heads of keys and values.
        plain: compute with matrix products and a softmax instead of torch's attention function.
    """

    def __init__(
        self, layout: str, width: int, heads: int, shared: int = 0, *, plain: bool = False
    ) -> None:
        super().__init__()
        self.layout, self.heads, self.shared = layout, heads, shared or heads
        self.width, self.plain = width // heads, plain
        inner = self.shared * self.width
        if layout == "separate":
            self.q = nn.Linear(width, width)
            self.k, self.v = nn.Linear(width, inner), nn.Linear(width, inner)
        else:
            self.qkv = nn.Linear(width, width + 2 * inner)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, places, width) to the same shape."""
        q, k, v = self._parts(x)
        if self.shared < self.heads:
            k, v = (t.repeat_interleave(self.heads // self.shared, 1) for t in (k, v))
        if self.plain:
            scores = (q @ k.transpose(-1, -2)) * self.width**-0.5
            mixed = scores.softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads, shared, width = self.heads, self.shared, self.width
        lead = x.shape[:2]
        if self.layout == "separate":
            parts = [self.q(x), self.k(x), self.v(x)]
        elif self.layout == "chunk":
            parts = list(self.qkv(x).chunk(3, -1))
        elif self.layout == "split":
            inner = shared * width
            parts = list(self.qkv(x).split([heads * width, inner, inner], -1))
        elif self.layout == "3HD":
            q, k, v = self.qkv(x).view(*lead, 3, heads, width).permute(2, 0, 3, 1, 4)
            return q, k, v
        elif self.layout == "H3D":
            q, k, v = self.qkv(x).view(*lead, heads, 3, width).permute(3, 0, 2, 1, 4)
            return q, k, v
        elif self.layout == "H3D chunk":
            q, k, v = self.qkv(x).view(*lead, heads, 3 * width).transpose(1, 2).chunk(3, -1)
            return q, k, v
        else:
            whole = self.qkv(x).view(*lead, shared, heads // shared + 2, width)
            q = whole[..., :-2, :].flatten(2, 3).transpose(1, 2)
            return q, whole[..., -2, :].transpose(1, 2), whole[..., -1, :].transpose(1, 2)
        q, k, v = (part.unflatten(-1, (-1, width)).transpose(1, 2) for part in parts)
        return q, k, v
