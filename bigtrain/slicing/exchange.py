"""Exchanges where sliced tensors meet whole ones, forward and backward.

A tensor is *whole* (equal on all ranks of the group, and so is its gradient), *sliced* (`Slices`;
its gradient in the same slices) or *partial* (whole is the sum over the ranks). Shoeybi et al. 2019
(Megatron-LM, arXiv 1909.08053) call `to_all` f and `summed` g; Korthikanti et al. 2022 (arXiv
2205.05198) call `gathered_for_parts` g and `summed_in_parts` its conjugate.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from bigtrain.activations.recompute import keeps_products
from bigtrain.slicing.slices import Slices
from bigtrain.torch_versions import all_gather_single, reduce_scatter_single

ExchangeKind = Literal["all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True)
class Exchange:
    """One collective among the ranks of the tp axis."""

    kind: ExchangeKind
    nbytes: int
    """Of the whole tensor, padding included."""


def _unwatched(*exchanged: Tensor) -> AbstractContextManager[None]:
    del exchanged
    return nullcontext()


@dataclass(frozen=True)
class SliceGroup:
    """The ranks of the tp axis, as one of them sees them."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None
    """None where nothing is sent: tensors are fake, and only shapes and memory matter."""
    exchanges: list[Exchange] | None = field(default=None, compare=False, repr=False)
    """What was exchanged, in order, where someone wants to know: of a run on fake tensors."""
    gathers: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    """How often a function was given whole tensors for want of a rule, by its name."""
    sequence_dim: int | None = None
    """The dim of (batch, sequence, width) along which what is between products is sliced."""
    inputs: list[Any] = field(default_factory=list, compare=False, repr=False)
    """The input of the latest products of a sequence, gathered: at most one."""

    exchanging: Callable[..., AbstractContextManager[None]] = field(
        default=_unwatched, compare=False, repr=False
    )
    """Entered around an exchange, told of the tensors that views are given of."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SliceGroup:
        """The same: copies of a module talk to the same ranks."""
        del memo
        return self

    def note(self, kind: ExchangeKind, tensor: Tensor) -> None:
        """Note an exchange of a whole tensor of so many bytes."""
        if self.exchanges is not None:
            nbytes = tensor.numel() * tensor.element_size()
            self.exchanges.append(Exchange(kind, nbytes))

    def note_gather(self, name: str) -> None:
        """Note a function that has no rule."""
        self.gathers[name] = self.gathers.get(name, 0) + 1


def to_all(whole: Tensor, group: SliceGroup) -> Tensor:
    """A whole tensor that each rank uses in its own way: gradients are added up.

    Once for all uses of one tensor: the gradients of queries, keys and values go together.
    """
    if not (whole.requires_grad and torch.is_grad_enabled()):
        return whole
    version, known = getattr(whole, _KNOWN, (None, None))
    if isinstance(known, weakref.ref):
        known = known()
    if isinstance(known, Tensor) and version == (whole._version, id(whole.grad_fn)):
        return known
    result: Tensor = _ToAll.apply(whole, group)
    # A leaf is held by the graph behind the result: strong references would go round in a circle.
    kept = weakref.ref(result) if whole.grad_fn is None else result
    setattr(whole, _KNOWN, ((whole._version, id(whole.grad_fn)), kept))
    return result


_KNOWN = "_bigtrain_to_all"


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
    if not (whole.requires_grad and torch.is_grad_enabled()):
        return slices.local(whole, group.rank, group.size)
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
    group.note("all_reduce", tensor)
    if group.group is not None:
        with group.exchanging(tensor):
            dist.all_reduce(tensor.view(-1), op, group=group.group)
    return tensor


def all_gather(held: Tensor, slices: Slices, group: SliceGroup) -> Tensor:
    """The whole of a sliced tensor, without autograd."""
    most = slices.length(0, group.size)
    sent = _padded(held, slices.dim, most)
    arrived = sent.new_empty((group.size, *sent.shape))
    group.note("all_gather", arrived)
    if group.group is not None:
        with group.exchanging(arrived, sent):
            all_gather_single(arrived.view(-1), sent.view(-1), group=group.group)
    lengths = [slices.length(rank, group.size) for rank in range(group.size)]
    is_in_order = len(slices.sections) == 1 and math.prod(sent.shape[: slices.dim]) == 1
    if is_in_order and min(lengths) == most:
        return arrived.view(
            [n if d != slices.dim else slices.total for d, n in enumerate(held.shape)]
        )
    parts = [arrived[rank].narrow(slices.dim, 0, n) for rank, n in enumerate(lengths)]
    return slices.join(parts)


def reduce_scatter(partial: Tensor, slices: Slices, group: SliceGroup) -> Tensor:
    """The slices of the sum of partial tensors, without autograd."""
    most = slices.length(0, group.size)
    shape = [most if dim == slices.dim else n for dim, n in enumerate(partial.shape)]
    is_in_order = len(slices.sections) == 1 and math.prod(shape[: slices.dim]) == 1
    if is_in_order and slices.total == most * group.size:
        sent = partial.contiguous()
    else:
        sent = torch.stack(
            [
                _padded(slices.local(partial, rank, group.size), slices.dim, most)
                for rank in range(group.size)
            ]
        )
    own = sent.new_empty(shape)
    group.note("reduce_scatter", sent)
    if group.group is not None:
        with group.exchanging(own, sent):
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
        return whole.detach()  # no view: a base would hold what holds this

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient.clone(), ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: SliceGroup) -> Tensor:
        if partial._is_view() or not partial.is_contiguous() or keeps_products():
            return all_reduce(partial.clone(), group)
        ctx.mark_dirty(partial)  # a product's result, which nobody else wants
        return all_reduce(partial, group)

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
        part = slices.local(whole, group.rank, group.size)
        return part.clone() if len(slices.sections) == 1 else part

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
