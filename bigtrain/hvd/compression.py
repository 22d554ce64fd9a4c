"""Compression of tensors before an exchange."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from bigtrain.errors import ConfigError


class Compressor(Protocol):
    """Compresses tensors before an exchange and restores them after it.

    A script may define its own compressor.
    """

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to exchange, and the context for `decompress`."""

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Restore an exchanged tensor.

        Args:
            tensor: the result of the exchange.
            ctx: the context that `compress` returned.
        """


class NoneCompressor:
    """No compression."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor unchanged."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:  # noqa: ARG004
        """Return the tensor unchanged."""
        return tensor


class FP16Compressor:
    """Converts floating-point tensors to float16: half the bytes of fp32, with rounding."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor in float16 and its original dtype. Other dtypes are not converted."""
        return tensor.to(torch.float16) if tensor.is_floating_point() else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor in its original dtype."""
        return tensor.to(ctx)


class Compression:
    """The built-in compressors, such as `hvd.Compression.fp16`."""

    none: ClassVar[type[NoneCompressor]] = NoneCompressor
    fp16: ClassVar[type[FP16Compressor]] = FP16Compressor


def compressor_of(compression: Any) -> Compressor:
    """Check the argument `compression` of an exchange, and return it.

    Raises:
        ConfigError: the argument lacks `compress` or `decompress`.
    """
    if callable(getattr(compression, "compress", None)) and callable(
        getattr(compression, "decompress", None)
    ):
        compressor: Compressor = compression
        return compressor
    raise ConfigError(
        f"hvd: compression={compression!r} has no compress and decompress. Use "
        "compression=hvd.Compression.fp16, or hvd.Compression.none"
    )
