"""Boundary tensors in the form that another library's pipeline takes.

Such a library gives a gradient to every floating-point tensor and to no other. So tensors that need
a gradient come first, as floating point. The others follow with their bits unchanged, in a type
that the library passes on untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

FLOATS = {8: torch.float64, 4: torch.float32, 2: torch.float16}
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""The integer dtype of each element size in bytes."""


class BoundaryFormat:
    """Packs the tensors that cross one cut, and unpacks them on its other side.

    Args:
        metas: the tensors on the meta device: shape, type, whether they need a gradient.
        untrained: the kind of type in which tensors without a gradient are sent.
    """

    def __init__(
        self, metas: Sequence[Tensor], untrained: Literal["float", "integer"] = "float"
    ) -> None:
        self._metas, self._untrained = metas, untrained
        # Stable: those with a gradient in their order, then the others.
        self._order = sorted(range(len(metas)), key=lambda n: not metas[n].requires_grad)

    def pack(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs of the stage before the cut as they are sent."""
        return [self._packed(outputs[n], self._metas[n]) for n in self._order]

    def unpack(self, sent: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs of the stage after the cut."""
        tensors = {
            n: self._unpacked(tensor, self._metas[n])
            for n, tensor in zip(self._order, sent, strict=True)
        }
        return [tensors[n] for n in range(len(tensors))]

    def _packed(self, tensor: Tensor, meta: Tensor) -> Tensor:
        if not meta.requires_grad:
            tensor = tensor.detach()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if meta.requires_grad:
            return tensor
        size = tensor.element_size()
        if self._untrained == "integer":
            return tensor.contiguous().view(INTEGERS[size])
        if tensor.is_floating_point() and size > 1:
            return tensor
        # A byte fits into a half, every one of the 256.
        small = tensor.contiguous().view(torch.uint8).half() if size == 1 else tensor.contiguous()
        return small.view(FLOATS[small.element_size()])

    def _unpacked(self, sent: Tensor, meta: Tensor) -> Tensor:
        dtype = meta.dtype.to_real() if meta.dtype.is_complex else meta.dtype
        if not meta.requires_grad:
            sent = sent.detach()
            if self._untrained == "float" and dtype.itemsize == 1:
                sent = sent.to(torch.uint8)
            sent = sent.view(dtype)
        return torch.view_as_complex(sent) if meta.dtype.is_complex else sent
