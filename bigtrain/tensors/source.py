"""A tensor that may lie in shards: type and shape at once, values by a collective read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorSource:
    """A tensor of the training state that may lie in pieces on many ranks.

    Its type and shape are known without any exchange; the values come when they are asked for,
    so that a whole model is never in one place.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    """The whole tensor, on any device. Collective: all ranks call it, in the same order."""

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSource:
        """A tensor that every rank has whole."""
        return cls(tensor.dtype, tuple(tensor.shape), lambda: tensor)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize
