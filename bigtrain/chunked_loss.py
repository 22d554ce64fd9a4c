"""Cross entropy over a large vocabulary in chunks of rows, together with the output projection.

The logits of a language model are often the largest tensor of a step: rows times vocabulary, and
then once more for their gradient. Here a chunk of rows at a time goes through the projection, the
softmax and the gradients of all three, in one buffer that the next chunk takes over. Nothing is
computed twice: the gradients are made in the forward pass, and the backward pass scales them.

The model's code is not touched. Its head, a linear layer whose output the model returns as it is,
gets a forward of its own, which returns the loss instead of logits while targets are given. So it
is computed inside of the head's call, where a technique has gathered the head's parameters.

Source: Hsu et al. 2024, Liger Kernel (arXiv 2410.10989), section 3.2, FusedLinearCrossEntropy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, once_differentiable

from bigtrain.errors import ConfigError, nearest
from bigtrain.tasks import CrossEntropy, Loss, check_targets, main_output
from bigtrain.units import MIB

CHUNK_SIZE = 32 * MIB
"""Bytes of a chunk's logits where nothing else is asked for."""

_LOW = (torch.bfloat16, torch.float16)
_PASSES_ON = ("AliasBackward0", "CloneBackward0", "ToCopyBackward0", "ViewBackward0")


@dataclass(frozen=True, kw_only=True)
class ChunkedCrossEntropy(CrossEntropy):
    """Cross entropy over the last dim, whose logits never exist as a whole in training.

    The same loss and gradients as `CrossEntropy`, but for the order of additions. Where no targets
    are `given` it is that loss of plain logits.
    """

    head: str
    """The linear layer whose output the model returns as its logits, by its name in the model."""
    chunk_size: int = CHUNK_SIZE
    """Bytes of a chunk's logits in float32 (float64 where the model is)."""

    def __call__(self, output: Any, target: Tensor, count: float | None = None) -> Tensor:
        """The sum over the valid targets.

        Raises:
            ConfigError: targets were given, and the output is not what the head made of them.
        """
        now = _now.given
        if now is not None and now.loss is self:
            now.check(main_output(output))
        return super().__call__(output, target, count)

    def _sum(self, logits: Tensor, target: Tensor) -> Tensor:
        now = _now.given
        # An auxiliary head has plain logits, which have a dim for the classes.
        if now is not None and now.loss is self and not logits.dim():
            return logits
        return super()._sum(logits, target)


class Given:
    """The targets of one forward pass, and what the head made of them."""

    def __init__(self, loss: ChunkedCrossEntropy, targets: Tensor) -> None:
        self.loss, self.targets = loss, targets
        self._result: Tensor | None = None

    def take(self, head: nn.Linear, hidden: Tensor) -> Tensor:
        """The summed loss of what goes into the head.

        Raises:
            ConfigError: the head was called before in this pass, or the targets do not fit.
        """
        if self._result is not None:
            raise ConfigError(
                f"model.head={self.loss.head} is called more than once in a forward pass, and a "
                "chunked loss can stand for one call only. Set model.chunked_loss=false."
            )
        rows = hidden.shape[:-1]
        check_targets((*rows, head.out_features), tuple(rows), self.targets)
        self._result = chunked_cross_entropy(
            hidden,
            head.weight,
            head.bias,
            self.targets.to(hidden.device),
            ignore_index=self.loss.ignore_index,
            label_smoothing=self.loss.label_smoothing,
            chunk_size=self.loss.chunk_size,
        )
        return self._result

    def check(self, output: Tensor) -> None:
        """Refuse an output that is not what the head gave.

        Raises:
            ConfigError: with what to set.
        """
        name = self.loss.head
        if self._result is None:
            what = f"model.head={name} was not called in the forward pass"
        elif output.dim() or not _passed_on(output, self._result):
            what = f"the model's output is not what model.head={name} returns, as it is"
        else:
            return
        raise ConfigError(
            f"model.chunked_loss: {what}: got a tensor of shape {tuple(output.shape)}, needed the "
            "head's own. Set model.chunked_loss=false, or model.head to the linear layer that "
            "makes the logits."
        )


def _passed_on(output: Tensor, result: Tensor) -> bool:
    """Whether one is the other, or what hooks and wrappers that change nothing made of it."""
    if output is result or output.grad_fn is None or result.grad_fn is None:
        return output is result or (output.grad_fn is None and result.grad_fn is None)
    ahead: list[Any] = [output.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is result.grad_fn:
            return True
        # Wrappers hang functions of their own into the graph, to see when a backward pass comes by.
        if isinstance(node, BackwardCFunction) or (node and node.name() in _PASSES_ON):
            ahead += [following for following, _ in node.next_functions]
    return False


class _Now(threading.local):
    given: Given | None = None


_now = _Now()


@contextmanager
def given(loss: Loss, targets: Any) -> Iterator[None]:
    """Let the head return the loss of these targets, in this thread, inside of a `with` block.

    Around a forward pass of training and the call of the loss on its output. Nothing happens for
    any other loss than a `ChunkedCrossEntropy`.
    """
    # What another loss is given is nobody's: a head of before must make plain logits for it.
    chunked = loss if isinstance(targets, Tensor) else None
    new = Given(chunked, targets) if isinstance(chunked, ChunkedCrossEntropy) else None
    with _giving(new):
        yield


@contextmanager
def given_again(before: Given | None) -> Iterator[None]:
    """As when `before` was `now_given`: for a forward pass that is computed again."""
    with _giving(Given(before.loss, before.targets) if before is not None else None):
        yield


@contextmanager
def _giving(new: Given | None) -> Iterator[None]:
    before, _now.given = _now.given, new
    try:
        yield
    finally:
        _now.given = before


def now_given() -> Given | None:
    """What is given in this thread now."""
    return _now.given


class _Forward:
    """A head's forward: the loss while targets are given, logits otherwise.

    An object and no closure, so that a copy of the model has one with the copy's own module.
    """

    def __init__(self, module: nn.Linear) -> None:
        self._module = module

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear has it
        now = _now.given
        if now is None:
            return type(self._module).forward(self._module, input)
        return now.take(self._module, input)


def attach(loss: Loss, root: nn.Module) -> None:
    """Give the head of a model its own forward, where the loss is chunked; again is no harm.

    Names, parameters and hooks stay as they are. Before wrappers, or after: they keep modules.

    Args:
        loss: any; nothing happens but for a `ChunkedCrossEntropy`.
        root: the model as the user wrote it.

    Raises:
        ConfigError: it has no such head.
    """
    if isinstance(loss, ChunkedCrossEntropy):
        head = check_head(loss.head, root)
        head.__dict__["forward"] = _Forward(head)


def check_head(name: str, root: nn.Module) -> nn.Linear:
    """The linear layer of this name.

    Raises:
        ConfigError: there is none, or it is no plain linear layer.
    """
    modules = dict(root.named_modules(remove_duplicate=False))
    linear = [n for n, module in modules.items() if isinstance(module, nn.Linear)]
    some = ", ".join([*linear[-3:]]) or "there is none: set model.chunked_loss=false"
    if name not in modules:
        raise ConfigError(
            f"model.head={name}: the model has no module {name!r}{nearest(name, modules)} "
            f"Use the name of a linear layer, such as {some}."
        )
    found = modules[name]
    if not isinstance(found, nn.Linear) or type(found).forward is not nn.Linear.forward:
        raise ConfigError(
            f"model.head={name} is a {type(found).__name__}, and a chunked loss needs an nn.Linear "
            f"with its own forward. Use the name of a linear layer, such as {some}."
        )
    return found


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
    chunk_size: int = CHUNK_SIZE,
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
    wanted = torch.is_grad_enabled()
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device) and weight.dtype != torch.float64
    low = torch.get_autocast_dtype(device) if autocast else weight.dtype
    with torch.no_grad(), torch.autocast(device, enabled=False):
        work = _Work(
            hidden.detach(),
            weight.detach(),
            bias if bias is None else bias.detach(),
            low,
            wanted=tuple(
                wanted and tensor is not None and tensor.requires_grad
                for tensor in (hidden, weight, bias)
            ),
            chunk_size=chunk_size,
        )
        total = work.run(target.reshape(-1), ignore_index, label_smoothing)
    # Two nodes, so that a pipeline can go back to the inputs first and to the weights later. The
    # second comes first in the backward pass, while the head's parameters are there.
    loss, parts = total, ((hidden,), (weight, bias))
    for tensors, gradients in zip(parts, (work.of_hidden, work.of_weights), strict=True):
        pairs = [(t, g) for t, g in zip(tensors, gradients, strict=True) if g is not None]
        if pairs:
            kept = tuple(gradient for _, gradient in pairs)
            value = total if loss is total else torch.zeros_like(total)
            known: Tensor = _Known.apply(value, kept, *[t for t, _ in pairs])
            loss = known if loss is total else loss + known
    return loss


class _Known(torch.autograd.Function):
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


class _Work:
    """One pass over all chunks; the gradients of the summed loss are made on the way.

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
        low: torch.dtype,
        *,
        wanted: Sequence[bool],
        chunk_size: int,
    ) -> None:
        self._hidden = hidden.reshape(-1, hidden.shape[-1])
        self._weight, self._bias = weight.to(low), bias
        self._shape = hidden.shape
        self._types = (weight.dtype, low if bias is None else bias.dtype)
        self._low, self._chunk_size = low, chunk_size
        self._full = torch.float32 if low in _LOW else low
        self._any = any(wanted)
        # Sums over chunks of bf16 products are in float32: there may be very many chunks.
        zeros = partial(torch.zeros, dtype=self._full, device=hidden.device)
        self._to_hidden = torch.empty_like(self._hidden) if wanted[0] else None
        self._to_weight = zeros(weight.shape) if wanted[1] else None
        self._to_bias = zeros(weight.shape[:1]) if wanted[2] else None
        self.of_hidden: tuple[Tensor | None] = (None,)
        self.of_weights: tuple[Tensor | None, Tensor | None] = (None, None)

    def run(self, target: Tensor, ignore_index: int, smoothing: float) -> Tensor:
        """The summed loss of these targets, (rows,)."""
        number, vocabulary = len(self._hidden), len(self._weight)
        rows = max(1, min(number, chunk_rows(self._chunk_size, vocabulary, self._full)))
        room = self._hidden.new_empty((rows, vocabulary), dtype=self._full)
        products = room if self._low == self._full else room.new_empty(room.shape, dtype=self._low)
        losses = room.new_empty(number)
        for start in range(0, number, rows):
            part = slice(start, min(number, start + rows))
            logits, product = room[: part.stop - start], products[: part.stop - start]
            hidden = self._hidden[part].to(self._low)
            self._project(hidden, product, logits)
            valid = target[part] != ignore_index
            losses[part] = self._soften(logits, target[part], valid, smoothing)
            if self._any:
                self._back(part, hidden, logits, product)
        self._finish()
        return losses.sum()

    def _project(self, hidden: Tensor, product: Tensor, logits: Tensor) -> None:
        """Logits of a chunk into its room."""
        if self._bias is None:
            torch.mm(hidden, self._weight.t(), out=product)
        else:
            torch.addmm(self._bias.to(self._low), hidden, self._weight.t(), out=product)
        if product is not logits and product.dtype != logits.dtype:
            logits.copy_(product)

    def _soften(self, logits: Tensor, target: Tensor, valid: Tensor, smoothing: float) -> Tensor:
        """The losses of a chunk's rows, (rows,); the logits become the gradient of their sum."""
        vocabulary = logits.shape[1]
        places = torch.where(valid, target, 0)[:, None]
        logits.sub_(logits.amax(1, keepdim=True))
        loss = logits.gather(1, places).mul_(smoothing - 1.0)
        if smoothing:
            loss.sub_(logits.sum(1, keepdim=True), alpha=smoothing / vocabulary)
        sums = logits.exp_().sum(1, keepdim=True)
        loss.add_(sums.log())
        if self._any:
            logits.mul_(valid[:, None] / sums)
            counts = valid[:, None].to(logits.dtype)
            if smoothing:
                logits.sub_(counts, alpha=smoothing / vocabulary)
            logits.scatter_add_(1, places, counts.mul_(smoothing - 1.0))
        return torch.where(valid, loss[:, 0], 0.0)

    def _back(self, part: slice, hidden: Tensor, gradient: Tensor, low: Tensor) -> None:
        """Add a chunk's share to the gradients.

        Args:
            part: its rows.
            hidden: (rows, width), in the type of the products.
            gradient: of its logits, (rows, vocabulary).
            low: room for the same in the type of the products.
        """
        if self._to_bias is not None:
            self._to_bias.add_(gradient.sum(0))
        if low.dtype != gradient.dtype:
            low.copy_(gradient)
        if self._to_hidden is not None:
            if self._to_hidden.dtype == self._low:
                torch.mm(low, self._weight, out=self._to_hidden[part])
            else:
                self._to_hidden[part] = torch.mm(low, self._weight)
        if self._to_weight is None:
            return
        if self._low == self._full:
            self._to_weight.addmm_(low.t(), hidden)
            return
        # A product in bf16 is added to a sum in float32, a stretch of the vocabulary at a time.
        step = chunk_rows(self._chunk_size, hidden.shape[1], self._low)
        for start in range(0, len(self._to_weight), step):
            stretch = slice(start, start + step)
            self._to_weight[stretch].add_(low[:, stretch].t() @ hidden)

    def _finish(self) -> None:
        if self._to_hidden is not None:
            self.of_hidden = (self._to_hidden.view(self._shape),)
        found = zip((self._to_weight, self._to_bias), self._types, strict=True)
        weight, bias = (None if tensor is None else tensor.to(dtype) for tensor, dtype in found)
        self.of_weights = (weight, bias)
        self._to_hidden = self._to_weight = self._to_bias = None
