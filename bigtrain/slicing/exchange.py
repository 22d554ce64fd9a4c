"""Collectives where sliced tensors meet whole tensors, forward and backward.

A tensor is *whole* (equal on all ranks of the group, and so is its gradient), *sliced* (`Slices`;
its gradient has the same slices) or *partial* (the whole is the sum over the ranks). A DTensor's
placements Replicate, Shard and Partial are the same three.

Shoeybi et al. 2019 (Megatron-LM, arXiv 1909.08053) call `copied_to_ranks` f and `summed` g;
Korthikanti et al. 2022 (arXiv 2205.05198) call `gathered_with_partial_grad` g and
`summed_and_scattered` its conjugate.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from bigtrain.slicing.saved_sums import SAVED_SUMS
from bigtrain.slicing.slices import Slices
from bigtrain.tensors.op_cost import REPEAT_COUNT
from bigtrain.versions.torch_versions import all_gather_single, reduce_scatter_single

ExchangeKind = Literal["all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True)
class TensorExchange:
    """One collective among the ranks of the tp axis."""

    kind: ExchangeKind
    nbytes: int
    """Bytes of the whole tensor, padding included."""


class ExchangeLog(list[TensorExchange]):
    """The exchanges since the list was last cleared; `all` has every exchange, with its tick.

    Args:
        clock: returns the current tick.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        super().__init__()
        self._clock = clock
        self.all: list[tuple[int, TensorExchange]] = []

    def extend(self, exchanges: Iterable[TensorExchange]) -> None:
        """Add exchanges at the current tick."""
        for exchange in exchanges:
            self.append(exchange)
            self.all.append((self._clock(), exchange))


def _unwatched(*exchanged: Tensor) -> AbstractContextManager[None]:
    del exchanged
    return nullcontext()


@dataclass
class Draws:
    """How random numbers are drawn for sliced tensors."""

    whole: bool = False
    """Whether every rank draws the numbers of the whole tensor, as one process does: for `verify`.
    Otherwise each rank draws for its part from a separate stream."""


@dataclass(frozen=True)
class SliceGroup:
    """The ranks of the tp axis, seen from one of them."""

    rank: int
    """This rank's index on the tp axis."""
    size: int
    group: dist.ProcessGroup | None = None
    """The process group; None on fake tensors, where nothing is sent."""
    exchanges: list[TensorExchange] | None = field(default=None, compare=False, repr=False)
    """The log of exchanges, in order; None where nobody reads it."""
    gathers: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    """How often each function without a rule was called with whole tensors, by its name."""
    sequence_dim: int | None = None
    """The dim of activations that is sharded between linear layers (sequence parallelism)."""
    gloo: bool = False
    """Whether fake tensors simulate a run over gloo, which copies the input of a reduce-scatter."""
    inputs: list[Any] = field(default_factory=list, compare=False, repr=False)
    """The gathered input that the latest linear layers share: a list of at most one entry."""

    draws: Draws = field(default_factory=Draws, compare=False, repr=False)
    exchanging: Callable[..., AbstractContextManager[None]] = field(
        default=_unwatched, compare=False, repr=False
    )
    """Returns the context that is entered during an exchange. The arguments are the tensors of
    which the collective gets views: a backend may hold these views, and so their storages, for some
    time after the exchange."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SliceGroup:
        """Return the group itself: copies of a module communicate with the same ranks."""
        del memo
        return self

    def note(self, kind: ExchangeKind, tensor: Tensor) -> None:
        """Log an exchange; `tensor` is the whole tensor."""
        if self.exchanges is not None:
            nbytes = tensor.numel() * tensor.element_size()
            # On fake tensors one iteration of a loop may represent many.
            self.exchanges.extend([TensorExchange(kind, nbytes)] * REPEAT_COUNT.get())

    def note_gather(self, name: str) -> None:
        """Count a call of a function without a slicing rule, which gets gathered tensors."""
        self.gathers[name] = self.gathers.get(name, 0) + 1


class UseCount:
    """How many functions use one copy of a whole tensor.

    Args:
        group: the ranks.
    """

    def __init__(self, group: SliceGroup) -> None:
        self.group, self.count = group, 0


def copied_to_ranks(whole: Tensor, group: SliceGroup) -> Tensor:
    """Return a whole tensor for use with this rank's slices: its gradient is summed over the ranks.

    All calls with the same tensor return the same copy, whose gradient is summed once: the
    projections to queries, keys and values cost one all-reduce.
    """
    return copied_with_uses(whole, group)[0]


def copied_with_uses(whole: Tensor, group: SliceGroup) -> tuple[Tensor, UseCount]:
    """Return `copied_to_ranks(whole, group)`, and the count of the copy's uses, including this."""
    if not (whole.requires_grad and torch.is_grad_enabled()):
        return whole, UseCount(group)
    # A parameter gets a copy per use. In a pipeline, a later micro-batch would otherwise share the
    # autograd node of an earlier one. The later backward pass would reach that node only after
    # fully_shard has reduced gradients.
    if isinstance(whole, torch.nn.Parameter):
        uses = UseCount(group)
        uses.count = 1
        return _CopiedToRanks.apply(whole, group), uses
    version, known, uses = getattr(whole, _KNOWN, (None, None, UseCount(group)))
    if isinstance(known, weakref.ref):
        known = known()
    if not (isinstance(known, Tensor) and version == whole._version and _is_of(known, whole)):
        known, uses = _CopiedToRanks.apply(whole, group), UseCount(group)
        # The graph behind the copy of a leaf refers to the leaf: a strong reference from the leaf
        # would close a cycle.
        cached = weakref.ref(known) if whole.grad_fn is None else known
        setattr(whole, _KNOWN, (whole._version, cached, uses))
    uses.count += 1
    return known, uses


_KNOWN = "_bigtrain_to_all"


def _is_of(result: Tensor, whole: Tensor) -> bool:
    """Whether an earlier copy still has the storage and the graph of the whole tensor."""
    if result.untyped_storage()._cdata != whole.untyped_storage()._cdata:
        return False  # setting `data` does not count the version up
    node: Any = result.grad_fn
    before = node.next_functions[0][0]
    return bool(
        getattr(before, "variable", None) is whole if whole.is_leaf else before is whole.grad_fn
    )


def summed(partial: Tensor, group: SliceGroup) -> Tensor:
    """Return the sum of a partial tensor over the ranks; the gradient passes through unchanged.

    A contiguous tensor that is not a view is changed in place.
    """
    result: Tensor = _Summed.apply(partial, group)
    return result


def gathered(local: Tensor, slices: Slices, group: SliceGroup) -> Tensor:
    """Gather a sliced tensor that all ranks use in the same way; its gradient is sliced."""
    result: Tensor = _Gathered.apply(local, slices, group)
    return result


def scattered(whole: Tensor, slices: Slices, group: SliceGroup) -> Tensor:
    """Return this rank's slices of a whole tensor; the gradient is gathered."""
    if not (whole.requires_grad and torch.is_grad_enabled()):
        return slices.local(whole, group.rank, group.size)
    result: Tensor = _Scattered.apply(whole, slices, group)
    return result


def gathered_with_partial_grad(local: Tensor, slices: Slices, group: SliceGroup) -> Tensor:
    """Gather a sliced tensor that each rank uses with its slices of other tensors.

    Each rank computes a partial gradient. A reduce-scatter returns this rank's slices of their sum.
    """
    result: Tensor = _GatheredWithPartialGrad.apply(local, slices, group)
    return result


def summed_and_scattered(partial: Tensor, slices: Slices, group: SliceGroup) -> Tensor:
    """Reduce-scatter a partial tensor to slices; the gradient is gathered."""
    result: Tensor = _SummedAndScattered.apply(partial, slices, group)
    return result


def all_reduce(tensor: Tensor, group: SliceGroup, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Reduce a tensor over the ranks, without autograd; in place if it is contiguous."""
    return start_all_reduce(tensor, group, op).wait()


def all_gather(local: Tensor, slices: Slices, group: SliceGroup) -> Tensor:
    """Gather a sliced tensor, without autograd."""
    return start_all_gather(local, slices, group).wait()


def reduce_scatter(partial: Tensor, slices: Slices, group: SliceGroup) -> Tensor:
    """Return this rank's slices of the sum of partial tensors, without autograd."""
    return start_reduce_scatter(partial, slices, group).wait()


class PendingExchange:
    """A collective that has been started.

    Args:
        kind: the kind of exchange, for the log.
        group: the ranks. Without a process group nothing is sent.
        sent: the input of the collective. It is referenced until `wait`, as in a real collective,
            so that fake tensors show the same memory.
        received: where the collective writes its result.
        launch: starts the collective and returns torch's handle.
        finish: makes the result from the received tensor.
    """

    def __init__(
        self,
        kind: ExchangeKind,
        group: SliceGroup,
        sent: Tensor,
        received: Tensor,
        launch: Callable[[], Any],
        finish: Callable[[Tensor], Tensor],
    ) -> None:
        # The larger of the two tensors is the whole one, in a gather as in a scatter.
        group.note(kind, max(sent, received, key=Tensor.numel))
        self._finish, self._sent, self._received = finish, [sent], [received]
        self._work: Any = None
        self._watch = ExitStack()
        """Exits the context of `SliceGroup.exchanging` when the collective has ended or failed."""
        if group.group is not None:
            with ExitStack() as watch:
                watch.enter_context(group.exchanging(sent, received))
                self._work = launch()
                self._watch = watch.pop_all()
        self.copies_sent = False
        """Whether fake tensors simulate a backend that copies its input at the end, like gloo."""

    def wait(self) -> Tensor:
        """Wait for the result, return it and drop all references to it. Can be called only once."""
        with self._watch:
            if self._work is not None:
                self._work.wait()
                self._work = None
        if self.copies_sent:
            torch.empty_like(self._sent[0])
        self._sent.clear()
        return self._finish(self._received.pop())


def start_all_reduce(
    tensor: Tensor, group: SliceGroup, op: Any = dist.ReduceOp.SUM
) -> PendingExchange:
    """Start an all-reduce of a tensor over the ranks, in place if the tensor is contiguous."""
    tensor = tensor.contiguous()

    def launch() -> Any:
        view = tensor.detach()  # see `SliceGroup.exchanging`
        return dist.all_reduce(view, op, group=group.group, async_op=True)

    return PendingExchange("all_reduce", group, tensor, tensor, launch, lambda reduced: reduced)


def start_all_gather(local: Tensor, slices: Slices, group: SliceGroup) -> PendingExchange:
    """Start an all-gather of a sliced tensor; the result is the whole tensor."""
    most = slices.length(0, group.size)
    sent = _padded(local, slices.dim, most).contiguous()
    received = sent.new_empty((group.size, *sent.shape))

    def launch() -> Any:
        return all_gather_single(received.view(-1), sent.view(-1), group=group.group, async_op=True)

    return PendingExchange(
        "all_gather", group, sent, received, launch, lambda parts: _joined(parts, slices, group)
    )


def start_reduce_scatter(partial: Tensor, slices: Slices, group: SliceGroup) -> PendingExchange:
    """Start a reduce-scatter of partial tensors; each rank receives its slices of the sum."""
    most = slices.length(0, group.size)
    shape = [most if dim == slices.dim else n for dim, n in enumerate(partial.shape)]
    if _is_rank_major(slices, shape, group):
        sent = partial.contiguous()
    else:
        parts = (slices.local(partial, rank, group.size) for rank in range(group.size))
        sent = torch.stack([_padded(part, slices.dim, most) for part in parts])
        sent = sent.contiguous()  # `stack` keeps the strides of channels_last parts
    received = sent.new_empty(shape)

    def launch() -> Any:
        return reduce_scatter_single(
            received.view(-1), sent.view(-1), group=group.group, async_op=True
        )

    length = slices.length(group.rank, group.size)
    pending = PendingExchange(
        "reduce_scatter",
        group,
        sent,
        received,
        launch,
        lambda padded: padded.narrow(slices.dim, 0, length),
    )
    pending.copies_sent = group.gloo
    return pending


def _is_rank_major(slices: Slices, shape: Sequence[int], group: SliceGroup) -> bool:
    """Whether the ranks' parts of this shape lie one after another in the whole's memory."""
    is_outermost = len(slices.sections) == 1 and math.prod(shape[: slices.dim]) == 1
    return is_outermost and slices.total == shape[slices.dim] * group.size


def _joined(received: Tensor, slices: Slices, group: SliceGroup) -> Tensor:
    """Join the ranks' parts, (ranks, ...) with padding, to one tensor."""
    shape = list(received.shape[1:])
    if _is_rank_major(slices, shape, group):
        shape[slices.dim] = slices.total
        return received.view(shape)
    lengths = [slices.length(rank, group.size) for rank in range(group.size)]
    return slices.join([received[rank].narrow(slices.dim, 0, n) for rank, n in enumerate(lengths)])


def _padded(tensor: Tensor, dim: int, length: int) -> Tensor:
    """Pad a rank's part to the length of the first rank's: collectives need equal lengths."""
    if tensor.size(dim) == length:
        return tensor
    padded = tensor.new_zeros([length if n == dim else s for n, s in enumerate(tensor.shape)])
    padded.narrow(dim, 0, tensor.size(dim)).copy_(tensor)
    return padded


class _CopiedToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: SliceGroup) -> Tensor:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return whole.detach()  # not a view: the base would refer back to the copy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        if gradient is None:  # the only layer that uses the copy has summed it: `_ColumnLinear`
            return None, None
        return all_reduce(gradient.clone(), ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: SliceGroup) -> Tensor:
        saved = SAVED_SUMS.get()
        if saved is not None:
            return saved.sum_of(partial, lambda: all_reduce(partial.clone(), group))
        if partial._is_view() or not partial.is_contiguous():
            return all_reduce(partial.clone(), group)
        ctx.mark_dirty(partial)  # the result of a product, which nothing else uses
        return all_reduce(partial, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return gradient, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, slices: Slices, group: SliceGroup) -> Tensor:
        ctx.slices, ctx.group = slices, group
        return all_gather(local, slices, group).detach()  # not a view: it may be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        return ctx.slices.local(dense, ctx.group.rank, ctx.group.size), None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, slices: Slices, group: SliceGroup) -> Tensor:
        ctx.slices, ctx.group = slices, group
        part = slices.local(whole, group.rank, group.size)
        return part.clone() if len(slices.sections) == 1 else part

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(gradient, ctx.slices, ctx.group), None, None


class _GatheredWithPartialGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, slices: Slices, group: SliceGroup) -> Tensor:
        ctx.slices, ctx.group = slices, group
        ctx.set_materialize_grads(False)
        return all_gather(local, slices, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None]:
        if gradient is None:  # as in _CopiedToRanks
            return None, None, None
        return reduce_scatter(gradient, ctx.slices, ctx.group), None, None


class _SummedAndScattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, slices: Slices, group: SliceGroup) -> Tensor:
        ctx.slices, ctx.group = slices, group
        saved = SAVED_SUMS.get()
        if saved is None:
            return reduce_scatter(partial, slices, group).detach()  # not a view: as in _Gathered
        return saved.sum_of(partial, lambda: reduce_scatter(partial, slices, group)).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(gradient, ctx.slices, ctx.group), None, None
