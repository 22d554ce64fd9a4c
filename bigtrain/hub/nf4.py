"""Weights of frozen linear layers in 4 bits: NF4 with double quantisation, as in torchao.

QLoRA (Dettmers et al. 2023, arXiv 2305.14314): each block of 64 elements has one scale, and an
element is one of 16 values times the scale. The scales are quantised to 8 bits, with one factor for
a block of scales and one mean for all scales. The table of values, the codes and the scales are
those of the library torchao.

A weight is one flat tensor of bytes, not torchao's NF4Tensor. So all code that moves tensors
(shards of any number of ranks, broadcasts, checkpoints) moves these bytes, too, and no code casts
them to another precision. The bytes of a weight of `n` elements:

    64      the table, 16 values in fp32
    4       the mean of the scales, in fp32
    4 each  the factors of the blocks of scales, in fp32
    n / 64  the scales, in int8
    n / 2   the codes, two in a byte, the first of them in the upper half
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigtrain.hub.libraries import import_library
from bigtrain.tensors.compound_ops import CompoundOp
from bigtrain.tensors.op_cost import loop_starts

CARRIER = "weight_nf4"
"""The name of the parameter with the bytes, which replaces `weight` in a layer."""
BLOCK = 64
"""Number of elements that share a scale."""
SCALE_BLOCK = 256
"""Largest number of scales that share a factor."""
PIECE = 1 << 22
"""Number of elements that are dequantised at a time."""
_MOST, _LEAST = 1 << 18, 1 << 10
"""Limits of how many elements are quantised at a time; within them, an eighth of the weight."""
_TABLE = 16
_FP32 = torch.float32.itemsize
_ZERO_CODES = 0x77
"""Two codes of the value 0."""
_CELLS = 1 << 12
"""Number of equal cells of [-1, 1]; the code of most elements is looked up by their cell."""
_MARGIN = 1e-6
"""A distance far above the rounding errors of fp32 at elements and at the edges of cells."""
_UNCLEAR = 255
"""Marks a cell whose elements have different codes; torchao's comparison finds these codes."""


@dataclass(frozen=True)
class Nf4Layout:
    """The layout of the bytes of a weight."""

    shape: tuple[int, int]
    """Output and input features."""

    @cached_property
    def blocks(self) -> int:
        """Number of blocks of elements, each of which has one scale."""
        return math.prod(self.shape) // BLOCK

    @cached_property
    def scale_block(self) -> int:
        """Number of scales that share a factor: the largest divisor of `blocks` up to 256."""
        sizes = range(min(SCALE_BLOCK, self.blocks), 0, -1)
        return next(size for size in sizes if self.blocks % size == 0)

    @cached_property
    def factors(self) -> int:
        """Number of factors."""
        return self.blocks // self.scale_block

    @property
    def header_bytes(self) -> int:
        """Bytes of the table, the mean and the factors."""
        return _FP32 * (_TABLE + 1 + self.factors)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return self.header_bytes + self.blocks + self.blocks * BLOCK // 2

    def parts(self, carrier: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return views of the table, the mean, the factors, the scales and the codes.

        Args:
            carrier: the bytes of a weight.
        """
        header = carrier[: self.header_bytes]
        if header.storage_offset() % _FP32:  # a view into a buffer of several tensors
            header = header.clone()
        numbers = header.view(torch.float32)
        sizes = [self.blocks, self.blocks * BLOCK // 2]
        scales, codes = torch.split(carrier[self.header_bytes :], sizes)
        table, mean = numbers[:_TABLE], numbers[_TABLE : _TABLE + 1]
        factors = numbers[_TABLE + 1 :]
        return table, mean, factors, scales.view(torch.int8), codes.view(self.blocks, BLOCK // 2)


def is_packed(name: str, parameter: Tensor) -> bool:
    """Whether a parameter with this name has the bytes of a weight in 4 bits."""
    return name.rpartition(".")[2] == CARRIER and parameter.dtype == torch.uint8


def fits_blocks(shape: tuple[int, ...]) -> bool:
    """Whether a weight of this shape can be divided into blocks."""
    return len(shape) == 2 and math.prod(shape) > 0 and math.prod(shape) % BLOCK == 0


def quantized(read: Callable[[int, int], Tensor], layout: Nf4Layout, key: str) -> Tensor:
    """Return the bytes of a weight, with the values of `torchao.quantization.to_nf4` in fp32.

    In addition to the result, host memory holds at most half the size of the weight in fp32, and at
    most a few MiB.

    Args:
        read: returns the elements [begin, end) of the flat weight, in any dtype. They are quantised
            in fp32.
        layout: the layout of the weight.
        key: the job's key and value that need torchao, for messages.

    Raises:
        ConfigError: torchao is not installed.
    """
    theirs = _formats(key)
    carrier = torch.zeros(layout.nbytes, dtype=torch.uint8)
    table, mean, factors, scales, codes = layout.parts(carrier)
    with torch.no_grad():
        table.copy_(theirs.from_tensor(torch.ones(BLOCK), BLOCK, 1).nf4)
        cells = _cells(table)
        largest = torch.empty(layout.blocks)
        rows = min(_MOST, max(_LEAST, layout.blocks * BLOCK // 8)) // BLOCK
        for begin in range(0, layout.blocks, rows):
            end = min(begin + rows, layout.blocks)
            values = read(begin * BLOCK, end * BLOCK).float().view(-1, BLOCK)
            largest[begin:end] = values.abs().amax(dim=1)
            scaled = (values / largest[begin:end, None]).flatten()
            places = scaled.add(1).mul_(_CELLS / 2).nan_to_num_(0).int().clamp_(0, _CELLS - 1)
            nearest = cells.index_select(0, places)
            unclear = nearest == _UNCLEAR
            nearest[unclear] = theirs.quantize_tensor_nearest(scaled[unclear], table).byte()
            pairs = nearest.view(-1, BLOCK)
            codes[begin:end] = pairs[:, ::2] << 4 | pairs[:, 1::2]
        codes[largest == 0] = _ZERO_CODES  # 0 / 0 has no code
        sizes = (1, layout.scale_block)
        for part, value in zip(
            (scales, factors, mean), theirs.double_quantize_scalers(largest, *sizes), strict=True
        ):
            part.copy_(value)
    return carrier


@cache
def _formats(key: str) -> Any:
    """Return torchao's class of weights in 4 bits."""
    logger = logging.getLogger("torch.utils._pytree")
    level = logger.level
    logger.setLevel(logging.ERROR)  # hides warnings of deprecated calls in torchao
    try:
        return import_library("torchao.quantization", key).NF4Tensor
    finally:
        logger.setLevel(level)


def _cells(table: Tensor) -> Tensor:
    """Return for each of the `_CELLS` cells the code of its elements, uint8, or `_UNCLEAR`.

    To compare every element of a weight with the 16 values would take 20 times as long.

    Args:
        table: the values, in ascending order.
    """
    values = table.numpy()
    middles = (values[1:] + values[:-1]) / 2
    begins = np.arange(_CELLS) * (2 / _CELLS) - 1
    low = np.searchsorted(middles, begins - _MARGIN)
    high = np.searchsorted(middles, begins + 2 / _CELLS + _MARGIN)
    return torch.from_numpy(np.where(low == high, low, _UNCLEAR).astype(np.uint8))


def dequantized(carrier: Tensor, layout: Nf4Layout, dtype: torch.dtype) -> Tensor:
    """Return a weight as its layer uses it, [output features, input features].

    The values are those of torchao's get_original_weight in fp32, rounded to `dtype`. Memory holds
    at most 24 MiB in addition to the result.

    Args:
        carrier: the bytes of the weight.
        layout: the layout of the bytes.
        dtype: the dtype of the result.
    """
    if _DEQUANTIZE.runs_on(carrier) and not carrier.storage_offset() % _FP32:
        return _DEQUANTIZE(carrier, *layout.shape, dtype)
    return _dequantized(carrier, layout, dtype)


def _dequantized(carrier: Tensor, layout: Nf4Layout, dtype: torch.dtype) -> Tensor:
    table, mean, factors, scales, codes = layout.parts(carrier)
    # One row for each byte: the values of its two codes.
    pairs = torch.stack([table.repeat_interleave(_TABLE), table.repeat(_TABLE)], dim=1)
    wide = scales.view(-1, layout.scale_block) / factors[:, None] + mean
    wide = wide.view(layout.blocks, 1)
    rows = PIECE // BLOCK
    if layout.blocks <= rows:
        return _values(codes, wide, pairs).to(dtype).view(layout.shape)
    result = torch.empty(layout.blocks, BLOCK, dtype=dtype, device=carrier.device)
    for begin in loop_starts(codes, layout.blocks, rows):
        end = min(begin + rows, layout.blocks)
        result[begin:end] = _values(codes[begin:end], wide[begin:end], pairs)
    return result.view(layout.shape)


def _values(codes: Tensor, scales: Tensor, pairs: Tensor) -> Tensor:
    """Return the values of some blocks in fp32, one block in a row."""
    values = F.embedding(codes.to(torch.int32), pairs)
    return values.view(-1, BLOCK).mul_(scales)


_DEQUANTIZE = CompoundOp(
    "dequantize_nf4(Tensor carrier, int rows, int columns, ScalarType dtype) -> Tensor",
    lambda carrier, rows, columns, dtype: _dequantized(carrier, Nf4Layout((rows, columns)), dtype),
    lambda rows, columns, dtype: ((rows, columns), dtype),
)
"""Dequantization as one operation, for runs on fake tensors."""


class _Product(torch.autograd.Function):
    """The product with a weight that is dequantised in the forward and in the backward pass."""

    shows_its_leaves = True
    """See `tracing.unreached.graph_leaves`."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, carrier: Tensor, bias: Tensor | None, layout: Nf4Layout
    ) -> Tensor:
        ctx.save_for_backward(carrier)
        ctx.layout = layout
        return F.linear(inputs, dequantized(carrier, layout, inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ((carrier,), (gradient,)) = ctx.saved_tensors, gradients
        return gradient @ dequantized(carrier, ctx.layout, gradient.dtype), None, None, None


class Nf4Linear(nn.Module):
    """A frozen linear layer whose weight is in 4 bits.

    Only its input gets a gradient: neither the weight nor the bias is trained.
    """

    weight_nf4: Tensor
    """The bytes of the weight."""
    layout: Nf4Layout
    transposed: bool
    """Whether the layer had the transpose of `weight` (Conv1D of transformers)."""
    bias: nn.Parameter | None

    @staticmethod
    def convert(layer: nn.Module, *, transposed: bool, key: str) -> None:
        """Convert a layer in place, so that its hooks, its bias and its parents stay the same.

        Args:
            layer: a Linear, or a Conv1D of transformers, with a contiguous weight.
            transposed: whether the weight is stored as [input features, output features].
            key: see `quantized`.
        """
        weight = layer._parameters.pop("weight")
        if weight is None:
            raise ValueError("the layer has no weight")
        rows, columns = weight.shape[::-1] if transposed else weight.shape
        layout = Nf4Layout((rows, columns))
        # While a constructor is recorded, `is_meta` may not be read.
        if weight.device.type == "meta":
            carrier = torch.empty(layout.nbytes, dtype=torch.uint8, device=weight.device)
        else:
            flat = (weight.detach().t() if transposed else weight.detach()).flatten()
            carrier = quantized(lambda begin, end: flat[begin:end], layout, key)
        layer.__class__ = Nf4Linear
        layer.layout, layer.transposed = layout, transposed  # type: ignore[assignment]
        layer.register_parameter(CARRIER, nn.Parameter(carrier, requires_grad=False))

    def extra_repr(self) -> str:
        """See `nn.Module.extra_repr`."""
        rows, columns = self.layout.shape
        return f"in_features={columns}, out_features={rows}, bias={self.bias is not None}"

    @property
    def weight(self) -> Tensor:
        """The dequantised values in fp32, for code that reads the weight of a layer directly."""
        values = dequantized(self.weight_nf4, self.layout, torch.float32)
        return values.t() if self.transposed else values

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the layer's output, computed in the dtype of autocast, or else of the inputs."""
        kind, dtype = inputs.device.type, inputs.dtype
        if torch.is_autocast_enabled(kind) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        bias = None if self.bias is None else self.bias.to(dtype)
        product: Tensor = _Product.apply(inputs.to(dtype), self.weight_nf4, bias, self.layout)
        return product


@torch.no_grad()
def invent_weights(model: nn.Module, generator: torch.Generator) -> None:
    """Fill a model's weights in 4 bits with random values that keep its activations in range."""
    for module in model.modules():
        if not isinstance(module, Nf4Linear):
            continue
        carrier = module.weight_nf4
        table, mean, factors, scales, codes = module.layout.parts(carrier)
        table.copy_(torch.linspace(-1, 1, _TABLE))
        mean.fill_(module.layout.shape[1] ** -0.5)
        factors.fill_(1)
        scales.zero_()
        codes.random_(0, 256, generator=generator)


def parameter_elements(model: nn.Module) -> dict[str, int]:
    """Return the number of elements of each parameter; of a weight in 4 bits, not of its bytes."""
    elements = {name: parameter.numel() for name, parameter in model.named_parameters()}
    for path, module in model.named_modules():
        name = f"{path}.{CARRIER}".strip(".")
        if isinstance(module, Nf4Linear) and name in elements:
            elements[name] = math.prod(module.layout.shape)
    return elements
