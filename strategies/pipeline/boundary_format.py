"""What crosses a cut, in the form that another library's pipeline takes.

Such a library gives a gradient to all that is floating point and to nothing else. The wires that
are trained come first, as floating point; the others ride along behind them as the bits that they
are, of a kind that the library leaves alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

FLOATS = {8: torch.float64, 4: torch.float32, 2: torch.float16}
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""By size of an element."""


class BoundaryFormat:
    """Packs the wires of one cut, and unpacks them on its other side.

    Args:
        metas: the wires on the meta device: shape, type, whether gradients come back.
        untrained: as what the wires without gradients travel.
    """

    def __init__(
        self, metas: Sequence[Tensor], untrained: Literal["float", "integer"] = "float"
    ) -> None:
        self._metas, self._untrained = metas, untrained
        # Stable: the trained ones in their order, then the others.
        self._places = sorted(range(len(metas)), key=lambda n: not metas[n].requires_grad)

    def pack(self, wires: Sequence[Tensor]) -> list[Tensor]:
        """The wires of the stage before the cut as they travel."""
        return [self._packed(wires[place], self._metas[place]) for place in self._places]

    def unpack(self, sent: Sequence[Tensor]) -> list[Tensor]:
        """The wires for the stage behind the cut."""
        tensors = {
            place: self._unpacked(tensor, self._metas[place])
            for place, tensor in zip(self._places, sent, strict=True)
        }
        return [tensors[place] for place in range(len(tensors))]

    def _packed(self, wire: Tensor, meta: Tensor) -> Tensor:
        if not meta.requires_grad:
            wire = wire.detach()
        if wire.is_complex():
            wire = torch.view_as_real(wire)
        if meta.requires_grad:
            return wire
        size = wire.element_size()
        if self._untrained == "integer":
            return wire.contiguous().view(INTEGERS[size])
        if wire.is_floating_point() and size > 1:
            return wire
        # A byte fits into a half, every one of the 256.
        small = wire.contiguous().view(torch.uint8).half() if size == 1 else wire.contiguous()
        return small.view(FLOATS[small.element_size()])

    def _unpacked(self, sent: Tensor, meta: Tensor) -> Tensor:
        dtype = meta.dtype.to_real() if meta.dtype.is_complex else meta.dtype
        if not meta.requires_grad:
            sent = sent.detach()
            if self._untrained == "float" and dtype.itemsize == 1:
                sent = sent.to(torch.uint8)
            sent = sent.view(dtype)
        return torch.view_as_complex(sent) if meta.dtype.is_complex else sent
