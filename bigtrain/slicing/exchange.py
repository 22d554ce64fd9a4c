"""Exchanges where sliced tensors meet whole ones, forward and backward.

A tensor is *whole* (equal on all ranks of the group, and so is its gradient), *sliced* (`Slices`;
its gradient in the same slices) or *partial* (whole is the sum over the ranks). Shoeybi et al. 2019
(Megatron-LM, arXiv 1909.08053) call `to_all` f and `summed` g; Korthikanti et al. 2022 (arXiv
2205.05198) call `gathered_for_parts` g and `summed_in_parts` its conjugate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from bigtrain.slicing.slices import Slices
from bigtrain.versions.torch_versions import all_gather_single, reduce_scatter_single


@dataclass(frozen=True)
class SliceGroup:
    """The ranks of the tp axis, as one of them sees them."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None
    """None where nothing is sent: tensors are fake, and only shapes and memory matter."""


def to_all(whole: Tensor, group: SliceGroup) -> Tensor:
    """A whole tensor that each rank uses in its own way: gradients are added up."""
    result: Tensor = _ToAll.apply(whole, group)
    return result


def summed(partial: Tensor, group: SliceGroup) -> Tensor:
    """The whole of a partial tensor."""
    result: Tensor = _Summed.apply(partial, group)
    return result


def gathered(held: Tensor, slices: Slices, group: SliceGroup) -> Tensor:
    """The whole of a sliced tensor, which all ranks use alike."""
    result: Tensor = _Gathered.apply(held, slices, group)
    return result


def part_of(whole: Tensor, slices: Slices, group: SliceGroup) -> Tensor:
    """The slices of a whole tensor: nothing is sent but gradients, which are gathered."""
    result: Tensor = _PartOf.apply(whole, slices, group)
    return result


def gathered_for_parts(held: Tensor, slices: Slices, group: SliceGroup) -> Tensor:
    """The whole of a sliced tensor, which each rank uses in its own way: gradients are partial."""
    result: Tensor = _GatheredForParts.apply(held, slices, group)
    return result


def summed_in_parts(partial: Tensor, slices: Slices, group: SliceGroup) -> Tensor:
    """The slices of the sum of partial tensors."""
    result: Tensor = _SummedInParts.apply(partial, slices, group)
    return result


def all_reduce(tensor: Tensor, group: SliceGroup, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Reduce a tensor over the ranks; where it may be written in place, its own memory is used."""
    tensor = tensor.contiguous()
    if group.group is not None:
        dist.all_reduce(tensor, op, group=group.group)
    return tensor


def all_gather(held: Tensor, slices: Slices, group: SliceGroup) -> Tensor:
    """The whole of a sliced tensor, without autograd."""
    most = slices.length(0, group.size)
    sent = _padded(held, slices.dim, most)
    arrived = sent.new_empty((group.size, *sent.shape))
    if group.group is not None:
        all_gather_single(arrived.view(-1), sent.view(-1), group=group.group)
    lengths = [slices.length(rank, group.size) for rank in range(group.size)]
    if slices.dim == 0 and len(slices.sections) == 1 and min(lengths) == most:
        return arrived.flatten(0, 1)
    parts = [arrived[rank].narrow(slices.dim, 0, n) for rank, n in enumerate(lengths)]
    return slices.join(parts)


def reduce_scatter(partial: Tensor, slices: Slices, group: SliceGroup) -> Tensor:
    """The slices of the sum of partial tensors, without autograd."""
    most = slices.length(0, group.size)
    sent = torch.stack(
        [
            _padded(slices.local(partial, rank, group.size), slices.dim, most)
            for rank in range(group.size)
        ]
    )
    own = torch.empty_like(sent[0])
    if group.group is not None:
        reduce_scatter_single(own.view(-1), sent.view(-1), group=group.group)
    return own.narrow(slices.dim, 0, slices.length(group.rank, group.size))


def _padded(tensor: Tensor, dim: int, length: int) -> Tensor:
    """With the last ranks' tensors as long as the first one's, as collectives want them."""
    if tensor.size(dim) == length:
        return tensor.contiguous()
    padded = tensor.new_zeros([length if n == dim else s for n, s in enumerate(tensor.shape)])
    padded.narrow(dim, 0, tensor.size(dim)).copy_(tensor)
    return padded


class _ToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: SliceGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient.clone(), ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: SliceGroup) -> Tensor:  # noqa: ARG004
        return all_reduce(partial.clone(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return gradient, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, held: Tensor, slices: Slices, group: SliceGroup) -> Tensor:
        ctx.slices, ctx.group = slices, group
        return all_gather(held, slices, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.slices.local(gradient, ctx.group.rank, ctx.group.size), None, None


class _PartOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, slices: Slices, group: SliceGroup) -> Tensor:
        ctx.slices, ctx.group = slices, group
        return slices.local(whole, group.rank, group.size).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(gradient, ctx.slices, ctx.group), None, None


class _GatheredForParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, held: Tensor, slices: Slices, group: SliceGroup) -> Tensor:
        ctx.slices, ctx.group = slices, group
        return all_gather(held, slices, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(gradient, ctx.slices, ctx.group), None, None


class _SummedInParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, slices: Slices, group: SliceGroup) -> Tensor:
        ctx.slices, ctx.group = slices, group
        return reduce_scatter(partial, slices, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(gradient, ctx.slices, ctx.group), None, None
