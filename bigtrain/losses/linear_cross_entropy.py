"""A linear layer and cross entropy in one function, which computes a chunk of rows at a time.

The logits of a language model are often the largest tensor of a step: rows times vocabulary, and
again for their gradient. Here the projection, the softmax and the gradients of all three inputs
are computed for a chunk of rows at a time, in one buffer for all chunks. Nothing is computed twice:
the forward pass computes the gradients, and the backward pass scales them.

Source: Hsu et al. 2024, Liger Kernel (arXiv 2410.10989), section 3.2, FusedLinearCrossEntropy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from bigtrain.errors import ConfigError
from bigtrain.tensors.op_cost import loop_starts
from bigtrain.units import MIB

DEFAULT_CHUNK_BYTES = 32 * MIB
"""The default bytes of a chunk's logits on a CPU."""
ACCELERATOR_CHUNK_BYTES = 256 * MIB
"""The default bytes of a chunk's logits on an accelerator: with small chunks, reading and writing
the weight's gradient would take longer than the products."""

_LOW = (torch.bfloat16, torch.float16)


def chunk_rows(chunk_size: int, vocabulary: int, dtype: torch.dtype) -> int:
    """Return the number of rows of a chunk, at least 1.

    Args:
        chunk_size: bytes of a chunk's logits.
        vocabulary: the number of logits of a row.
        dtype: the dtype of the logits.
    """
    return max(1, chunk_size // (vocabulary * dtype.itemsize))


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk_size: int = DEFAULT_CHUNK_BYTES,
) -> Tensor:
    """Compute `F.cross_entropy(F.linear(hidden, weight, bias), target, reduction="sum")` in chunks.

    Under autocast the products have its dtype, and the softmax and the sums over chunks are in
    float32, as they are for bf16 parameters.

    Args:
        hidden: (..., width).
        weight: (vocabulary, width).
        bias: (vocabulary,), or None.
        target: (...), int64; each in [0, vocabulary), or `ignore_index`.
        ignore_index: targets of this value are left out.
        label_smoothing: in [0, 1], as in `F.cross_entropy`.
        chunk_size: bytes of a chunk's logits in the dtype of the softmax.

    Returns:
        The sum in nats: a scalar in float32, or in float64 for a float64 `weight`. It allows only
        one backward pass.
    """
    tensors = (hidden, weight, bias)
    options = (ignore_index, label_smoothing, chunk_size)
    if has_torch_function(tensors):
        keys = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        handle: Any = handle_torch_function  # typed for functions of tensors alone
        loss: Tensor = handle(
            chunked_cross_entropy, tensors, *tensors, target, **keys, chunk_size=chunk_size
        )
        return loss
    return loss_of_chunks(ChunkedPass, tensors, target, *options)


def loss_of_chunks(
    make_pass: Callable[..., ChunkedPass],
    tensors: tuple[Tensor, Tensor, Tensor | None],
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    chunk_size: int,
) -> Tensor:
    """Compute `chunked_cross_entropy` of plain tensors with a given kind of pass.

    Args:
        make_pass: `ChunkedPass`, or a function that makes an object of a subclass.
        tensors: hidden, weight and bias of `chunked_cross_entropy`.
        target: see `chunked_cross_entropy`.
        ignore_index: see `chunked_cross_entropy`.
        label_smoothing: see `chunked_cross_entropy`.
        chunk_size: see `chunked_cross_entropy`.
    """
    hidden, weight, bias = tensors
    needs_grad = torch.is_grad_enabled()
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device) and weight.dtype != torch.float64
    compute_dtype = torch.get_autocast_dtype(device) if autocast else weight.dtype
    with torch.no_grad(), torch.autocast(device, enabled=False):
        work = make_pass(
            hidden.detach(),
            weight.detach(),
            bias if bias is None else bias.detach(),
            compute_dtype,
            needs_gradients=tuple(
                needs_grad and tensor is not None and tensor.requires_grad
                for tensor in (hidden, weight, bias)
            ),
            chunk_size=chunk_size,
        )
        total = work.run(target.reshape(-1), ignore_index, label_smoothing)
    # There are two autograd nodes, so that a pipeline can run the backward pass for the inputs
    # before that for the weights. The backward pass runs the second node first, while the head is
    # still gathered.
    loss, parts = total, ((hidden,), (weight, bias))
    for of_node, gradients in zip(parts, (work.of_hidden, work.of_weights), strict=True):
        pairs = [(t, g) for t, g in zip(of_node, gradients, strict=True) if g is not None]
        if pairs:
            saved = tuple(gradient for _, gradient in pairs)
            value = total if loss is total else torch.zeros_like(total)
            precomputed: Tensor = _PrecomputedGradient.apply(value, saved, *[t for t, _ in pairs])
            loss = precomputed if loss is total else loss + precomputed
    return loss


class _PrecomputedGradient(torch.autograd.Function):
    """Returns a value whose gradients are given; the backward pass scales them."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        del tensors
        ctx.save_for_backward(*gradients)
        ctx.used = False
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.used:
            raise ConfigError(
                "model.chunked_loss: a second backward pass through one loss; the first has used "
                "its gradients. Compute the loss again, or set model.chunked_loss=false."
            )
        ctx.used = True
        # Scaled in place, because nothing else references these gradients.
        return None, None, *(gradient.mul_(scale) for gradient in ctx.saved_tensors)


class ChunkedPass:
    """One pass over all chunks, which also computes the gradients of the summed loss.

    A subclass for a sliced vocabulary overrides `row_losses` and `finish`.

    Args:
        hidden: (..., width).
        weight: (vocabulary, width).
        bias: (vocabulary,), or None.
        compute_dtype: the dtype of the products.
        needs_gradients: whether the gradient of hidden, of weight and of bias is needed.
        chunk_size: bytes of a chunk's logits in the dtype of the softmax.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        compute_dtype: torch.dtype,
        *,
        needs_gradients: Sequence[bool],
        chunk_size: int,
    ) -> None:
        self._hidden = hidden.reshape(-1, hidden.shape[-1])
        self._weight, self._bias = weight.to(compute_dtype), bias
        self._shape = hidden.shape
        self._types = (weight.dtype, compute_dtype if bias is None else bias.dtype)
        self._low, self._chunk_size = compute_dtype, chunk_size
        self._full = torch.float32 if compute_dtype in _LOW else compute_dtype
        self.makes_gradients = any(needs_gradients)
        # bf16 products are summed over chunks in float32, because there may be very many chunks.
        zeros = partial(torch.zeros, dtype=self._full, device=hidden.device)
        self._to_hidden = torch.empty_like(self._hidden) if needs_gradients[0] else None
        self._to_weight = zeros(weight.shape) if needs_gradients[1] else None
        self._to_bias = zeros(weight.shape[:1]) if needs_gradients[2] else None
        self.widest = len(weight)
        """The largest number of logits of a row on any rank; it gives all ranks equal chunks."""
        self.of_hidden: tuple[Tensor | None] = (None,)
        self.of_weights: tuple[Tensor | None, Tensor | None] = (None, None)

    def run(self, target: Tensor, ignore_index: int, smoothing: float) -> Tensor:
        """Return the summed loss, and set the gradients.

        Args:
            target: (rows,), int64.
            ignore_index: targets of this value are left out.
            smoothing: the label smoothing.
        """
        number, vocabulary = len(self._hidden), len(self._weight)
        rows = max(1, min(number, chunk_rows(self._chunk_size, self.widest, self._full)))
        logits_buffer = self._hidden.new_empty((rows, vocabulary), dtype=self._full)
        products = (
            logits_buffer
            if self._low == self._full
            else logits_buffer.new_empty(logits_buffer.shape, dtype=self._low)
        )
        losses = logits_buffer.new_empty(number)
        for start in loop_starts(self._hidden, number, rows):
            part = slice(start, min(number, start + rows))
            logits, product = logits_buffer[: part.stop - start], products[: part.stop - start]
            hidden = self._hidden[part].to(self._low)
            self._project(hidden, product, logits)
            valid = target[part] != ignore_index
            losses[part] = self.row_losses(logits, target[part], valid, smoothing)
            if self.makes_gradients:
                self._back(part, hidden, logits, product)
        self.finish()
        return losses.sum()

    def _project(self, hidden: Tensor, product: Tensor, logits: Tensor) -> None:
        """Compute the logits of a chunk into its buffer."""
        if self._bias is None:
            torch.mm(hidden, self._weight.t(), out=product)
        else:
            torch.addmm(self._bias.to(self._low), hidden, self._weight.t(), out=product)
        if product is not logits and product.dtype != logits.dtype:
            logits.copy_(product)

    def row_losses(self, logits: Tensor, target: Tensor, valid: Tensor, smoothing: float) -> Tensor:
        """Return the losses of a chunk's rows, and replace the logits by their gradient.

        Args:
            logits: (rows, vocabulary). If no gradient is needed, their values afterwards have no
                meaning.
            target: (rows,).
            valid: (rows,): whether the target is not ignored.
            smoothing: the label smoothing.

        Returns:
            (rows,), with 0 for ignored targets.
        """
        vocabulary = logits.shape[1]
        places = torch.where(valid, target, 0)[:, None]
        logits.sub_(logits.amax(1, keepdim=True))
        loss = logits.gather(1, places).mul_(smoothing - 1.0)
        if smoothing:
            loss.sub_(logits.sum(1, keepdim=True), alpha=smoothing / vocabulary)
        sums = logits.exp_().sum(1, keepdim=True)
        loss.add_(sums.log())
        if self.makes_gradients:
            logits.mul_(valid[:, None] / sums)
            counts = valid[:, None].to(logits.dtype)
            if smoothing:
                logits.sub_(counts, alpha=smoothing / vocabulary)
            logits.scatter_add_(1, places, counts.mul_(smoothing - 1.0))
        return torch.where(valid, loss[:, 0], 0.0)

    def _back(self, part: slice, hidden: Tensor, gradient: Tensor, low_gradient: Tensor) -> None:
        """Compute the gradient of a chunk's hidden states; add those of weight and bias.

        Args:
            part: the rows of the chunk.
            hidden: (rows, width), in the dtype of the products.
            gradient: the gradient of the chunk's logits, (rows, vocabulary).
            low_gradient: a buffer for `gradient` in the dtype of the products.
        """
        if self._to_bias is not None:
            self._to_bias.add_(gradient.sum(0))
        if low_gradient.dtype != gradient.dtype:
            low_gradient.copy_(gradient)
        if self._to_hidden is not None:
            if self._to_hidden.dtype == self._low:
                torch.mm(low_gradient, self._weight, out=self._to_hidden[part])
            else:
                self._to_hidden[part] = torch.mm(low_gradient, self._weight)
        if self._to_weight is None:
            return
        if self._low == self._full:
            self._to_weight.addmm_(low_gradient.t(), hidden)
            return
        # A bf16 product is added to a float32 sum, for some words of the vocabulary at a time.
        step = chunk_rows(self._chunk_size, hidden.shape[1], self._low)
        for start in loop_starts(self._to_weight, len(self._to_weight), step):
            words = slice(start, start + step)
            self._to_weight[words].add_(low_gradient[:, words].t() @ hidden)

    def finish(self) -> None:
        """Convert the gradients and set `of_hidden` and `of_weights`."""
        if self._to_hidden is not None:
            self.of_hidden = (self._to_hidden.view(self._shape),)
        sums = zip((self._to_weight, self._to_bias), self._types, strict=True)
        weight, bias = (None if tensor is None else tensor.to(dtype) for tensor, dtype in sums)
        self.of_weights = (weight, bias)
        self._to_hidden = self._to_weight = self._to_bias = None
