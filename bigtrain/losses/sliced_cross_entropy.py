"""Cross entropy in chunks if the head or its input is sliced over the tp axis.

With a sliced head, each rank computes all chunks with its slice of the vocabulary. For each target
the ranks all-reduce three numbers, or four with label smoothing. The gradient of the head's input
is a partial sum on each rank; the sums are added up over the ranks once, at the end.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bigtrain.losses.linear_cross_entropy import (
    DEFAULT_CHUNK_BYTES,
    ChunkedPass,
    chunked_cross_entropy,
    loss_of_chunks,
)
from bigtrain.slicing.exchange import (
    SliceGroup,
    all_gather,
    all_reduce,
    copied_to_ranks,
    reduce_scatter,
    scattered,
    summed,
)
from bigtrain.slicing.sliced_tensor import SlicedTensor, is_sliced, local_of, rule
from bigtrain.slicing.slices import Slices


@rule(chunked_cross_entropy)
def _chunked_cross_entropy(
    hidden: Any,
    weight: Any,
    bias: Any,
    target: Any,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk_size: int = DEFAULT_CHUNK_BYTES,
) -> Any:
    options = (ignore_index, label_smoothing, chunk_size)
    if is_sliced(target):
        return NotImplemented
    if is_sliced(hidden) and hidden.slices.dim == hidden.dim() - 1:
        hidden = hidden.whole()
    if not is_sliced(weight):
        if not is_sliced(hidden) or is_sliced(bias):
            return NotImplemented
        return _by_targets(hidden, weight, bias, target, options)
    slices, group = weight.slices, weight.group
    if slices.dim or len(slices.sections) > 1:
        return NotImplemented
    if is_sliced(bias):
        if not bias.slices.same(slices, group.size):
            return NotImplemented
        bias = local_of(bias)
    elif bias is not None:
        bias = scattered(bias, slices, group)
    hidden_slices = hidden.slices if is_sliced(hidden) else None
    make = partial(_VocabularyPass, slices=slices, group=group, hidden_slices=hidden_slices)
    local = local_of(hidden) if is_sliced(hidden) else hidden
    return loss_of_chunks(make, (local, local_of(weight), bias), target, *options)


def _by_targets(
    hidden: SlicedTensor, weight: Tensor, bias: Tensor | None, target: Tensor, options: Any
) -> Tensor:
    """Return the loss with a whole head: the sum of the ranks' losses for their input slices."""
    group = hidden.group
    own_targets = hidden.slices.local(target, group.rank, group.size)
    head = (copied_to_ranks(weight, group), None if bias is None else copied_to_ranks(bias, group))
    return summed(
        loss_of_chunks(ChunkedPass, (local_of(hidden), *head), own_targets, *options), group
    )


class _VocabularyPass(ChunkedPass):
    """A pass with one rank's slice of the vocabulary.

    Args:
        hidden: this rank's slice of the head's input, or the whole input.
        weight: (words of this rank, width).
        args: see `ChunkedPass`.
        slices: the slices of the vocabulary.
        group: the ranks of the tp axis.
        hidden_slices: how the head's input is sliced; None if it is whole.
        options: see `ChunkedPass`.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        *args: Any,
        slices: Slices,
        group: SliceGroup,
        hidden_slices: Slices | None,
        **options: Any,
    ) -> None:
        self._group, self._hidden_slices, self._total = group, hidden_slices, slices.total
        ((self._begin, self._length),) = slices.parts(group.rank, group.size)
        whole_hidden = hidden if hidden_slices is None else all_gather(hidden, hidden_slices, group)
        super().__init__(whole_hidden, weight, *args, **options)
        self.widest = slices.length(0, group.size)

    def row_losses(self, logits: Tensor, target: Tensor, valid: Tensor, smoothing: float) -> Tensor:
        """See `ChunkedPass.row_losses`; the ranks all-reduce their figures of each row."""
        places = target - self._begin
        here = valid & (places >= 0) & (places < self._length)
        places, here = torch.where(here, places, 0)[:, None], here[:, None]
        logits.sub_(all_reduce(logits.amax(1, keepdim=True), self._group, dist.ReduceOp.MAX))
        figures = [torch.where(here, logits.gather(1, places), 0.0)]
        if smoothing:
            figures.append(logits.sum(1, keepdim=True))
        figures.append(logits.exp_().sum(1, keepdim=True))
        of_target, *of_all, sums = all_reduce(torch.cat(figures, 1), self._group).tensor_split(
            len(figures), 1
        )
        loss = of_target * (smoothing - 1.0)
        if smoothing:
            loss.sub_(of_all[0], alpha=smoothing / self._total)
        loss.add_(sums.log())
        if self.makes_gradients:
            logits.mul_(valid[:, None] / sums)
            if smoothing:
                logits.sub_(valid[:, None].to(logits.dtype), alpha=smoothing / self._total)
            logits.scatter_add_(1, places, here.to(logits.dtype).mul_(smoothing - 1.0))
        return torch.where(valid, loss[:, 0], 0.0)

    def finish(self) -> None:
        """See `ChunkedPass.finish`; add up the ranks' partial gradients of the head's input."""
        super().finish()
        (partial_sum,) = self.of_hidden
        if partial_sum is None:
            return
        if self._hidden_slices is None:
            self.of_hidden = (all_reduce(partial_sum, self._group),)
        else:
            self.of_hidden = (reduce_scatter(partial_sum, self._hidden_slices, self._group),)
