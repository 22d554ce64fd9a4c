"""The layer of Korthikanti et al.

2022 (arXiv 2205.05198), and the bytes that torch saves for it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class Core(nn.Module):
    """The core of attention: (seq, batch, 3 width) to (seq, batch, width), without fused
    kernels.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = nn.Dropout(0.1)

    def forward(self, qkv: Tensor) -> Tensor:
        s, b, _ = qkv.shape
        # A head's query, key and value are adjacent, so that all three are views of one tensor.
        heads = qkv.view(s, b * self.num_heads, -1).transpose(0, 1)
        query, key, value = heads.chunk(3, dim=-1)
        scores = torch.bmm(query, key.transpose(1, 2)) / math.sqrt(query.shape[-1])
        weights = self.dropout(torch.softmax(scores, dim=-1))
        return torch.bmm(weights, value).transpose(0, 1).reshape(s, b, -1)


class Layer(nn.Module):
    """The layer of the paper's Figures 2 and 3, on one device."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.core = Core(num_heads)
        self.projection = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.attention_dropout, self.mlp_dropout = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.projection(self.core(self.qkv(self.attention_norm(x))))
        x = x + self.attention_dropout(mixed)
        return x + self.mlp_dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))


class Layers(nn.Module):
    def __init__(self, count: int, width: int, num_heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, num_heads) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def saved_bytes(layer: nn.Module, x: Tensor) -> int:
    """Bytes of the distinct storages that autograd saves in a forward pass, except parameters."""
    parameter_ids = {p.untyped_storage()._cdata for p in layer.parameters()}
    saved: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameter_ids:
            saved[storage._cdata] = storage  # kept alive, so that its id is not reused
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    return sum(storage.nbytes() for storage in saved.values())
