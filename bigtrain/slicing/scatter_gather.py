"""Between stages of a pipeline: each rank of the tp axis sends its part of what all of them have.

The rank with the same place in the next stage receives it, and there the parts are gathered: of
the link between stages, which may be one between nodes, each byte is asked for once. Gradients come
back in the same way. What lies in stretches of the sequence is sent and taken as it lies.

Source: Narayanan et al. 2021 (arXiv 2104.04473), section 4.1, "scatter/gather".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bigtrain.slicing.exchange import SliceGroup, all_gather
from bigtrain.slicing.sequence_parallel import stretches
from bigtrain.slicing.slices import Slices

MIN_DEALT_BYTES = 1024
"""What is smaller is sent whole by every rank: a packet holds it, and a gather is one more."""


@dataclass(frozen=True)
class Crossing:
    """How the ranks with slices of two stages hand on what goes from one stage to the other."""

    group: SliceGroup | None = None
    """Those of one of the stages; None where nothing is sliced."""
    is_between_ranks: bool = False

    @property
    def dealers(self) -> SliceGroup | None:
        """Who deals out what all have; None where it goes whole."""
        return self.group if self.is_between_ranks else None

    def in_stretches(self, whole: Tensor) -> tuple[Slices, SliceGroup] | None:
        """How a tensor lies that goes as each rank's stretch of the sequence; None of others.

        Those that a gradient comes back to, as activations: of a mask, or a table of positions,
        every layer wants all, and would gather it.

        Args:
            whole: on the meta device, as both stages know it.
        """
        if self.group is None or not (whole.requires_grad and whole.is_floating_point()):
            return None
        slices = stretches(whole, self.group)
        return None if slices is None else (slices, self.group)


def part_bytes(nbytes: int, ranks: int) -> int:
    """Of a tensor of so many bytes those that the first of the ranks sends, in whole bytes."""
    return nbytes if nbytes < MIN_DEALT_BYTES else -(-nbytes // ranks)


def sent_meta(whole: Tensor, group: SliceGroup | None) -> Tensor:
    """What a rank sends of a tensor, on the meta device as that is: its part, or all of it."""
    if group is None or not _is_dealt(whole):
        return whole
    length = _flat(whole).length(group.rank, group.size)
    part = torch.empty(length, dtype=whole.dtype, device=whole.device)
    return part.requires_grad_(whole.requires_grad)


def dealt(whole: Tensor, group: SliceGroup | None) -> Tensor:
    """What a rank sends of a contiguous tensor that all have: nothing of the rest stays."""
    if group is None or not _is_dealt(whole):
        return whole
    part: Tensor = _Dealt.apply(whole, group)
    return part


def undealt(part: Tensor, whole: Tensor, group: SliceGroup | None) -> Tensor:
    """The tensor of which each rank has received its part.

    Args:
        part: as `sent_meta` says.
        whole: shape and type of all of it, on the meta device.
        group: the ranks.
    """
    if group is None or not _is_dealt(whole):
        return part
    gathered: Tensor = _Undealt.apply(part, whole.shape, group)
    return gathered


def _is_dealt(whole: Tensor) -> bool:
    return whole.numel() * whole.element_size() >= MIN_DEALT_BYTES


def _flat(whole: Tensor) -> Slices:
    return Slices.even(0, whole.numel())


def _own_part(whole: Tensor, group: SliceGroup) -> Tensor:
    flat = whole.contiguous().view(-1)
    return _flat(flat).local(flat, group.rank, group.size).clone()


def _whole(part: Tensor, shape: torch.Size, group: SliceGroup) -> Tensor:
    """From all parts; as bytes, for not every backend gathers every type."""
    size = part.element_size()
    slices = Slices.even(0, shape.numel() * size, unit=size)
    found = all_gather(part.contiguous().view(torch.uint8), slices, group)
    return found.view(part.dtype).view(shape)


class _Dealt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: SliceGroup) -> Tensor:
        ctx.shape, ctx.group = whole.shape, group
        return _own_part(whole, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _whole(gradient, ctx.shape, ctx.group), None


class _Undealt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, shape: torch.Size, group: SliceGroup) -> Tensor:
        ctx.group = group
        return _whole(part, shape, group).detach()  # no view: it may be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _own_part(gradient, ctx.group), None, None
