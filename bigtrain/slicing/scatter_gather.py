"""Boundary tensors between pipeline stages with tensor parallelism: scatter, send, gather.

All tp ranks of a stage have the same output. Each sends its part, 1/tp, to the same tp rank of the
next stage, and the ranks of that stage gather the parts. So each byte crosses the link between the
stages, which may be a link between two nodes, only once. Gradients return the same way. With
sequence parallelism each rank sends its sequence shard, and nothing is gathered.

Source: Narayanan et al. 2021 (arXiv 2104.04473), section 4.1, "scatter/gather".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bigtrain.slicing.exchange import SliceGroup, all_gather
from bigtrain.slicing.sequence_parallel import sequence_slices
from bigtrain.slicing.slices import Slices

MIN_SCATTERED_BYTES = 1024
"""Every rank sends smaller tensors whole: they fit into a packet, and a gather would cost more."""


@dataclass(frozen=True)
class Crossing:
    """How tensors cross from one pipeline stage to the next under tensor parallelism."""

    group: SliceGroup | None = None
    """The tp ranks of one of the two stages; None without tensor parallelism."""
    is_between_ranks: bool = False
    """Whether the two stages are on different ranks."""

    @property
    def scatter_group(self) -> SliceGroup | None:
        """The tp ranks that scatter a tensor that they all have; None if it is sent whole."""
        return self.group if self.is_between_ranks else None

    def sequence_shard(self, whole: Tensor) -> tuple[Slices, SliceGroup] | None:
        """Return the slices and ranks of a tensor that is sent as sequence shards, or else None.

        Only tensors with a gradient, which are activations, are sent as shards. Every layer needs a
        mask or a table of positions whole, and would have to gather it.

        Args:
            whole: a meta tensor with the shape that both stages know.
        """
        if self.group is None or not (whole.requires_grad and whole.is_floating_point()):
            return None
        slices = sequence_slices(whole, self.group)
        return None if slices is None else (slices, self.group)


def scattered_bytes(nbytes: int, ranks: int) -> int:
    """Return the bytes that the first of `ranks` tp ranks sends of a tensor of `nbytes` bytes."""
    return nbytes if nbytes < MIN_SCATTERED_BYTES else -(-nbytes // ranks)


def sent_meta(whole: Tensor, group: SliceGroup | None) -> Tensor:
    """Return a meta tensor of the shape that a rank sends: its part of a tensor, or all of it."""
    if group is None or not _is_scattered(whole):
        return whole
    length = _flat(whole).length(group.rank, group.size)
    part = torch.empty(length, dtype=whole.dtype, device=whole.device)
    return part.requires_grad_(whole.requires_grad)


def scatter_boundary(whole: Tensor, group: SliceGroup | None) -> Tensor:
    """Return a copy of this rank's part of a tensor that all ranks have; a small tensor itself."""
    if group is None or not _is_scattered(whole):
        return whole
    part: Tensor = _ScatterBoundary.apply(whole, group)
    return part


def gather_boundary(part: Tensor, whole: Tensor, group: SliceGroup | None) -> Tensor:
    """Gather the tensor of which each rank has received its part.

    Args:
        part: a tensor of the shape of `sent_meta`; the result itself if it was sent whole.
        whole: shape and dtype of the whole tensor, on the meta device.
        group: the ranks.
    """
    if group is None or not _is_scattered(whole):
        return part
    gathered: Tensor = _GatherBoundary.apply(part, whole.shape, group)
    return gathered


def _is_scattered(whole: Tensor) -> bool:
    return whole.numel() * whole.element_size() >= MIN_SCATTERED_BYTES


def _flat(whole: Tensor) -> Slices:
    return Slices.even(0, whole.numel())


def _local_part(whole: Tensor, group: SliceGroup) -> Tensor:
    flat = whole.contiguous().view(-1)
    return _flat(flat).local(flat, group.rank, group.size).clone()


def _whole(part: Tensor, shape: torch.Size, group: SliceGroup) -> Tensor:
    """Gather all parts as bytes, because not every backend gathers every dtype."""
    size = part.element_size()
    slices = Slices.even(0, shape.numel() * size, unit=size)
    gathered = all_gather(part.contiguous().view(torch.uint8), slices, group)
    return gathered.view(part.dtype).view(shape)


class _ScatterBoundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: SliceGroup) -> Tensor:
        ctx.shape, ctx.group = whole.shape, group
        return _local_part(whole, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _whole(gradient, ctx.shape, ctx.group), None


class _GatherBoundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, shape: torch.Size, group: SliceGroup) -> Tensor:
        ctx.group = group
        return _whole(part, shape, group).detach()  # not a view: it may be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _local_part(gradient, ctx.group), None, None
