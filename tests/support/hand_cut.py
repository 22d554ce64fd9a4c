"""A model that is cut by hand, with a skip, an integer boundary tensor, and tied embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from support.nets import VOCABULARY
from torch import Tensor, nn

from bigtrain.data.loader import MicroBatch
from bigtrain.losses.loss import Loss

WIDTH = 8
LAYERS = 8


class Layer(nn.Module):
    """A residual MLP with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class HandCut(nn.Module):
    """Layers; the embedding is added again before the head, and positions cross cuts as
    integers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.positions = nn.Embedding(64, WIDTH)
        self.bias = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        skip = self.embedding(tokens)
        places = torch.arange(tokens.shape[1]).expand(tokens.shape).contiguous()
        x = skip
        for layer in self.layers:
            x = layer(x)
        return self.head(x + skip * self.bias + self.positions(places))


def bounds(count: int) -> list[int]:
    """The layers at which stages begin, and the number of layers: `count` + 1 numbers."""
    return [LAYERS * number // count for number in range(count + 1)]


class HandStage(nn.Module):
    """Stage `index` of `count`: (x, skip, places, bias) cross cuts; bias is added by the second.

    The bias depends on no other boundary tensor: its part of the graph is reached by no input.
    """

    cut_through = frozenset({"layers"})

    def __init__(self, model: HandCut, index: int, count: int, loss: Loss) -> None:
        super().__init__()
        self.index, self.count, self.loss = index, count, loss
        self.wrong: Exception | None = None
        begin, end = bounds(count)[index : index + 2]
        if index in (0, count - 1):  # a tied parameter has all its names in each of its stages
            self.embedding, self.head = model.embedding, model.head
        if index == 0:
            self.seen: Tensor
            self.register_buffer("seen", model.seen)
        self.layers = nn.ModuleDict({str(n): model.layers[n] for n in range(begin, end)})
        if index == 1:
            self.bias = model.bias
        if index == count - 1:
            self.positions = model.positions

    def forward(
        self,
        *stage_inputs: Tensor,
        micro_batch: MicroBatch,
        scale: float | None = None,
        final: bool = True,
    ) -> Tensor | tuple[Tensor, ...]:
        del final
        if self.wrong is not None:
            raise self.wrong
        if self.index == 0:
            if self.training:
                self.seen += 1
            tokens = micro_batch.inputs
            x = skip = self.embedding(tokens)
            places = torch.arange(tokens.shape[1]).expand(tokens.shape).contiguous()
            passed: Sequence[Tensor] = (skip, places)
        else:
            x, *passed = stage_inputs
        for layer in self.layers.values():
            x = layer(x)
        if self.index == 1:
            passed = (*passed, self.bias * 1.0)
        if self.index < self.count - 1:
            return (x, *passed)
        skip, places, bias = passed
        output = self.head(x + skip * bias + self.positions(places))
        if scale is None:
            return output
        loss = self.loss(output, micro_batch.targets, micro_batch.count)
        return (loss * 0.0 if micro_batch.count == 0 else loss) * scale

    def _wires(self, micro_batch: MicroBatch, *, bias: bool) -> tuple[Tensor, ...]:
        """Empty boundary tensors on the meta device; `bias` says whether the bias is among them."""
        rows, length = micro_batch.inputs.shape
        kind = self.dtype

        def trained(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=kind, device="meta").requires_grad_()

        places = torch.empty((rows, length), dtype=torch.int64, device="meta")
        common = (trained(rows, length, WIDTH), trained(rows, length, WIDTH), places)
        return (*common, trained(1, 1, WIDTH)) if bias else common

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def incoming(self, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        return self._wires(micro_batch, bias=self.index > 1) if self.index else ()

    def outgoing(self, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        return self._wires(micro_batch, bias=self.index >= 1)
