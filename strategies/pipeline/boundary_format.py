"""Boundary tensors in the form in which another library's pipeline sends tensors.

Such a library gives a gradient to every floating-point tensor and to no other tensor. So tensors
that need a gradient come first, as floating point. The other tensors follow with their bits
unchanged, in a dtype that the library sends without a change.
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
        metas: the tensors on the meta device, with shape, dtype and `requires_grad`.
        untrained: the kind of dtype in which tensors without a gradient are sent.
    """

    def __init__(
        self, metas: Sequence[Tensor], untrained: Literal["float", "integer"] = "float"
    ) -> None:
        self._metas, self._untrained = metas, untrained
        # The sort is stable: tensors with a gradient come first, each kind in its order.
        self._order = sorted(range(len(metas)), key=lambda n: not metas[n].requires_grad)

    def pack(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs of the stage before the cut in the form and order of sending."""
        return [self._packed(outputs[n], self._metas[n]) for n in self._order]

    def unpack(self, sent: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs of the stage after the cut, from the tensors that `pack` returned."""
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
        # fp16 represents each of the 256 values of a byte exactly.
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
