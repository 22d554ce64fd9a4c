"""Linear layer and cross entropy in one, a chunk of rows at a time: no logits as a whole.

The logits of a language model are often the largest tensor of a step: rows times vocabulary, and
then once more for their gradient. Here a chunk of rows at a time goes through the projection, the
softmax and the gradients of all three, in one buffer that the next chunk takes over. Nothing is
computed twice: the gradients are made in the forward pass, and the backward pass scales them.

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
"""Bytes of a chunk's logits on a CPU, where nothing else is asked for."""
ACCELERATOR_CHUNK_BYTES = 256 * MIB
"""The same on an accelerator: in small chunks the weight's gradient would be read and written more
often than the products take."""

_LOW = (torch.bfloat16, torch.float16)


def chunk_rows(chunk_size: int, vocabulary: int, dtype: torch.dtype) -> int:
    """Rows whose logits are that many bytes, at least one."""
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
    """`F.cross_entropy(F.linear(hidden, weight, bias), target, reduction="sum")`, in chunks.

    Under autocast the products are in its type, and the softmax and the sums over chunks in
    float32, as they are for parameters in bf16.

    Args:
        hidden: (..., width).
        weight: (vocabulary, width).
        bias: (vocabulary,), or None.
        target: (...), int64; each in [0, vocabulary), or `ignore_index`.
        ignore_index: targets of this value count nothing.
        label_smoothing: in [0, 1], as in `F.cross_entropy`.
        chunk_size: bytes of a chunk's logits in the type of the softmax.

    Returns:
        The sum in nats: a scalar, float32 or, where `weight` is, float64. It can be gone back
        from once.
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
    """As `chunked_cross_entropy`, by the passes that `make_pass` makes, of plain tensors."""
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
    # Two nodes, so that a pipeline can go back to the inputs first and to the weights later. The
    # second comes first in the backward pass, while the head's parameters are there.
    loss, parts = total, ((hidden,), (weight, bias))
    for of_node, gradients in zip(parts, (work.of_hidden, work.of_weights), strict=True):
        pairs = [(t, g) for t, g in zip(of_node, gradients, strict=True) if g is not None]
        if pairs:
            gradients_kept = tuple(gradient for _, gradient in pairs)
            value = total if loss is total else torch.zeros_like(total)
            precomputed: Tensor = _PrecomputedGradient.apply(
                value, gradients_kept, *[t for t, _ in pairs]
            )
            loss = precomputed if loss is total else loss + precomputed
    return loss


class _PrecomputedGradient(torch.autograd.Function):
    """A value whose gradients are there already."""

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
                "model.chunked_loss: a second backward pass through one loss; its gradients were "
                "given away in the first. Compute the loss again, or set model.chunked_loss=false."
            )
        ctx.used = True
        # In place: they were made for this pass, and nobody else has them.
        return None, None, *(gradient.mul_(scale) for gradient in ctx.saved_tensors)


class ChunkedPass:
    """One pass over all chunks; the gradients of the summed loss are made on the way.

    `soften` and `finish` are what ranks with slices of the vocabulary do otherwise.

    Args:
        hidden: (..., width).
        weight: (vocabulary, width).
        bias: (vocabulary,).
        low: the type of the products.
        wanted: whether there shall be gradients of these three.
        chunk_size: bytes.
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
        # Sums over chunks of bf16 products are in float32: there may be very many chunks.
        zeros = partial(torch.zeros, dtype=self._full, device=hidden.device)
        self._to_hidden = torch.empty_like(self._hidden) if needs_gradients[0] else None
        self._to_weight = zeros(weight.shape) if needs_gradients[1] else None
        self._to_bias = zeros(weight.shape[:1]) if needs_gradients[2] else None
        self.widest = len(weight)
        """The most logits of a row on any rank: all do the same chunks."""
        self.of_hidden: tuple[Tensor | None] = (None,)
        self.of_weights: tuple[Tensor | None, Tensor | None] = (None, None)

    def run(self, target: Tensor, ignore_index: int, smoothing: float) -> Tensor:
        """The summed loss of these targets, (rows,)."""
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
            losses[part] = self.soften(logits, target[part], valid, smoothing)
            if self.makes_gradients:
                self._back(part, hidden, logits, product)
        self.finish()
        return losses.sum()

    def _project(self, hidden: Tensor, product: Tensor, logits: Tensor) -> None:
        """Logits of a chunk into its room."""
        if self._bias is None:
            torch.mm(hidden, self._weight.t(), out=product)
        else:
            torch.addmm(self._bias.to(self._low), hidden, self._weight.t(), out=product)
        if product is not logits and product.dtype != logits.dtype:
            logits.copy_(product)

    def soften(self, logits: Tensor, target: Tensor, valid: Tensor, smoothing: float) -> Tensor:
        """The losses of a chunk's rows, (rows,); the logits become the gradient of their sum."""
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
        """Add a chunk's share to the gradients.

        Args:
            part: its rows.
            hidden: (rows, width), in the type of the products.
            gradient: of its logits, (rows, vocabulary).
            low_gradient: room for the same in the type of the products.
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
        # A product in bf16 is added to a sum in float32, a stretch of the vocabulary at a time.
        step = chunk_rows(self._chunk_size, hidden.shape[1], self._low)
        for start in loop_starts(self._to_weight, len(self._to_weight), step):
            stretch = slice(start, start + step)
            self._to_weight[stretch].add_(low_gradient[:, stretch].t() @ hidden)

    def finish(self) -> None:
        """Put the gradients where they are taken from."""
        if self._to_hidden is not None:
            self.of_hidden = (self._to_hidden.view(self._shape),)
        sums = zip((self._to_weight, self._to_bias), self._types, strict=True)
        weight, bias = (None if tensor is None else tensor.to(dtype) for tensor, dtype in sums)
        self.of_weights = (weight, bias)
        self._to_hidden = self._to_weight = self._to_bias = None
