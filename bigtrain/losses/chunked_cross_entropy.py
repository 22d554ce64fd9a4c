"""Cross entropy in chunks in any model: its head returns the loss in place of logits.

The model's code is not touched. Its head, a linear layer whose output the model returns as it is,
gets a forward of its own, which returns the loss of `linear_loss` while targets are given. So it
is computed inside of the head's call, where a technique has gathered the head's parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from bigtrain.errors import ConfigError, did_you_mean
from bigtrain.losses import sliced_cross_entropy
from bigtrain.losses.linear_cross_entropy import (
    DEFAULT_CHUNK_BYTES,
    chunk_rows,
    chunked_cross_entropy,
)
from bigtrain.losses.loss import CrossEntropy, Loss, check_targets, main_logits

_RULES = (sliced_cross_entropy,)
"""The module whose import says what is done with a head in slices."""
_PASSES_ON = ("AliasBackward0", "CloneBackward0", "ToCopyBackward0", "ViewBackward0")


@dataclass(frozen=True, kw_only=True)
class ChunkedCrossEntropy(CrossEntropy):
    """Cross entropy over the last dim, whose logits never exist as a whole in training.

    The same loss and gradients as `CrossEntropy`, but for the order of additions. Where no targets
    are given it is that loss of plain logits.
    """

    head: str
    """The linear layer whose output the model returns as its logits, by its name in the model."""
    chunk_size: int = DEFAULT_CHUNK_BYTES
    """Bytes of a chunk's logits in float32 (float64 where the model is)."""

    def rounds(self, targets: int, classes: int, dtype: torch.dtype = torch.float32) -> int:
        """How many chunks so many targets are, of a head with so many classes on a rank."""
        return -(-targets // chunk_rows(self.chunk_size, classes, dtype))

    def __call__(self, output: Any, target: Tensor, count: float | None = None) -> Tensor:
        """The sum over the valid targets.

        Raises:
            ConfigError: targets were given, and the output is not what the head made of them.
        """
        now = _thread_state.targets
        if now is not None and now.loss is self:
            now.check(main_logits(output))
        return super().__call__(output, target, count)

    def _sum(self, logits: Tensor, target: Tensor) -> Tensor:
        now = _thread_state.targets
        # An auxiliary head has plain logits, which have a dim for the classes.
        if now is not None and now.loss is self and not logits.dim():
            return logits
        return super()._sum(logits, target)


class HeadTargets:
    """The targets of one forward pass, and what the head made of them."""

    def __init__(self, loss: ChunkedCrossEntropy, targets: Tensor) -> None:
        self.loss, self.targets = loss, targets
        self._result: Tensor | None = None

    def compute(self, head: nn.Linear, hidden: Tensor) -> Tensor:
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

    def is_result(self, output: Any) -> bool:
        """Whether an output is what the head gave, as it is."""
        result = self._result
        scalar = isinstance(output, Tensor) and not output.dim()
        if result is None or not scalar or output.dtype != result.dtype:
            return False
        return _passed_on(output, result)

    def check(self, output: Tensor) -> None:
        """Refuse an output that is not what the head gave.

        Raises:
            ConfigError: with what to set.
        """
        name = self.loss.head
        if self._result is None:
            what = f"model.head={name} was not called in the forward pass"
        elif self.is_result(output):
            return
        else:
            what = f"the model's output is not what model.head={name} returns, as it is"
        raise ConfigError(
            f"model.chunked_loss: {what}: got a tensor of shape {tuple(output.shape)}, needed the "
            "head's own. Set model.chunked_loss=false, or model.head to the linear layer that "
            "makes the logits."
        )


def _passed_on(output: Tensor, result: Tensor) -> bool:
    """Whether one is the other, or what hooks and wrappers that change nothing made of it."""
    if output is result or output.grad_fn is None or result.grad_fn is None:
        return output is result or (output.grad_fn is None and result.grad_fn is None)
    pending: list[Any] = [output.grad_fn]
    while pending:
        node = pending.pop()
        if node is result.grad_fn:
            return True
        # Wrappers hang functions of their own into the graph, to see when a backward pass comes by.
        if isinstance(node, BackwardCFunction) or (node and node.name() in _PASSES_ON):
            pending += [following for following, _ in node.next_functions]
    return False


class _ThreadState(threading.local):
    targets: HeadTargets | None = None


_thread_state = _ThreadState()


@contextmanager
def head_targets(loss: Loss, targets: Any) -> Iterator[None]:
    """Let the head return the loss of these targets, in this thread, inside of a `with` block.

    Around a forward pass of training and the call of the loss on its output. Nothing happens for
    any other loss than a `ChunkedCrossEntropy`.
    """
    # What another loss is given is nobody's: a head of before must make plain logits for it.
    chunked = loss if isinstance(targets, Tensor) else None
    new = HeadTargets(chunked, targets) if isinstance(chunked, ChunkedCrossEntropy) else None
    with _set_targets(new):
        yield


@contextmanager
def restored_targets(before: HeadTargets | None) -> Iterator[None]:
    """As when `before` was `current_targets`: for a forward pass that is computed again."""
    with _set_targets(HeadTargets(before.loss, before.targets) if before is not None else None):
        yield


@contextmanager
def _set_targets(new: HeadTargets | None) -> Iterator[None]:
    before, _thread_state.targets = _thread_state.targets, new
    try:
        yield
    finally:
        _thread_state.targets = before
        if new is not None:
            new._result = None  # its graph may hold what holds this: a circle nobody sees


def current_targets() -> HeadTargets | None:
    """What is given in this thread now."""
    return _thread_state.targets


def is_head_loss(output: Any) -> bool:
    """Whether what a module returned is a loss, and whoever knows its shape expects logits."""
    return _thread_state.targets is not None and _thread_state.targets.is_result(output)


class _Forward:
    """A head's forward: the loss while targets are given, logits otherwise.

    An object and no closure, so that a copy of the model has one with the copy's own module.
    """

    def __init__(self, module: nn.Linear, name: str) -> None:
        self._module, self._name = module, name

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear has it
        now = _thread_state.targets
        if now is None or now.loss.head != self._name:
            return type(self._module).forward(self._module, input)
        return now.compute(self._module, input)


def attach_head(loss: Loss, root: nn.Module) -> None:
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
        head.__dict__["forward"] = _Forward(head, loss.head)


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
            f"model.head={name}: the model has no module {name!r}{did_you_mean(name, modules)} "
            f"Use the name of a linear layer, such as {some}."
        )
    candidate = modules[name]
    own_forward = candidate.__dict__.get("forward")
    is_plain = type(candidate).forward is nn.Linear.forward and (
        own_forward is None or isinstance(own_forward, _Forward)
    )
    if not isinstance(candidate, nn.Linear) or not is_plain:
        raise ConfigError(
            f"model.head={name} is a {type(candidate).__name__}, and a chunked loss needs an "
            "nn.Linear "
            f"with its own forward. Use the name of a linear layer, such as {some}."
        )
    return candidate
