"""Cross entropy in chunks for any model: the model's head returns the loss in place of logits.

The model's code is unchanged. Its head is a linear layer whose output the model returns unchanged.
The head gets another `forward`, which returns the loss of `chunked_cross_entropy` while targets are
set. So the loss is computed inside of the head's call, when its parameters are gathered.
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
"""The import of this module registers the rule for a sliced head."""
_PASSES_ON = ("AliasBackward0", "CloneBackward0", "ToCopyBackward0", "ViewBackward0")


@dataclass(frozen=True, kw_only=True)
class ChunkedCrossEntropy(CrossEntropy):
    """Cross entropy over the last dim, without all logits in memory at once in training.

    Loss and gradients are those of `CrossEntropy`, except for the order of additions. Unless
    `head_targets` has set targets, the loss is `CrossEntropy` of plain logits.
    """

    head: str
    """The name of the linear layer whose output the model returns as its logits."""
    chunk_size: int = DEFAULT_CHUNK_BYTES
    """Bytes of a chunk's logits in float32 (float64 for a float64 model)."""

    def rounds(self, targets: int, classes: int, dtype: torch.dtype = torch.float32) -> int:
        """Return the number of chunks in which a rank computes the loss.

        Args:
            targets: the number of targets of a micro-batch.
            classes: the number of classes whose logits the rank computes.
            dtype: the dtype of the softmax.
        """
        return -(-targets // chunk_rows(self.chunk_size, classes, dtype))

    def __call__(self, output: Any, target: Tensor, count: float | None = None) -> Tensor:
        """Return the sum over the valid targets.

        Raises:
            ConfigError: `head_targets` has set targets, and the output is not the loss that the
                head returned.
        """
        now = _thread_state.targets
        if now is not None and now.loss is self:
            now.check(main_logits(output))
        return super().__call__(output, target, count)

    def _sum(self, logits: Tensor, target: Tensor) -> Tensor:
        now = _thread_state.targets
        # The main head returns a scalar; an auxiliary head has plain logits with a class dim.
        if now is not None and now.loss is self and not logits.dim():
            return logits
        return super()._sum(logits, target)


class HeadTargets:
    """The targets of one forward pass, and the loss that the head has computed."""

    def __init__(self, loss: ChunkedCrossEntropy, targets: Tensor) -> None:
        self.loss, self.targets = loss, targets
        self._result: Tensor | None = None

    def compute(self, head: nn.Linear, hidden: Tensor) -> Tensor:
        """Return the summed loss of the head's input.

        Raises:
            ConfigError: the head was called before in this pass, or the targets do not fit.
        """
        if self._result is not None:
            raise ConfigError(
                f"model.head={self.loss.head} is called more than once in a forward pass, and a "
                "chunked loss can replace one call only. Set model.chunked_loss=false."
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
        """Whether an output is the unchanged result of the head."""
        result = self._result
        scalar = isinstance(output, Tensor) and not output.dim()
        if result is None or not scalar or output.dtype != result.dtype:
            return False
        return _passed_on(output, result)

    def check(self, output: Tensor) -> None:
        """Refuse an output that is not the unchanged result of the head.

        Raises:
            ConfigError: the head was not called, or the model changes its output.
        """
        name = self.loss.head
        if self._result is None:
            fault = f"model.head={name} was not called in the forward pass"
        elif self.is_result(output):
            return
        else:
            fault = f"the model does not return the output of model.head={name} unchanged"
        raise ConfigError(
            f"model.chunked_loss: {fault}: got a tensor of shape {tuple(output.shape)}, needed the "
            "output of the head. Set model.chunked_loss=false, or model.head to the linear layer "
            "that makes the logits."
        )


def _passed_on(output: Tensor, result: Tensor) -> bool:
    """Whether the output is the result, or a copy or view of it that hooks or wrappers made."""
    if output is result or output.grad_fn is None or result.grad_fn is None:
        return output is result or (output.grad_fn is None and result.grad_fn is None)
    pending: list[Any] = [output.grad_fn]
    while pending:
        node = pending.pop()
        if node is result.grad_fn:
            return True
        # Wrappers insert autograd functions, so that the wrappers are called in the backward pass.
        if isinstance(node, BackwardCFunction) or (node and node.name() in _PASSES_ON):
            pending += [following for following, _ in node.next_functions]
    return False


class _ThreadState(threading.local):
    targets: HeadTargets | None = None


_thread_state = _ThreadState()


@contextmanager
def head_targets(loss: Loss, targets: Any) -> Iterator[None]:
    """Let the head return the loss of these targets, in this thread, inside of a `with` block.

    The block contains a forward pass of training and the call of the loss on its output.

    Args:
        loss: the loss. Unless it is a `ChunkedCrossEntropy`, the head returns plain logits.
        targets: the targets of the micro-batch. Unless they are one tensor, the head returns plain
            logits.
    """
    # A head that was attached for a chunked loss must return plain logits for other losses.
    chunked = loss if isinstance(targets, Tensor) else None
    new = HeadTargets(chunked, targets) if isinstance(chunked, ChunkedCrossEntropy) else None
    with _set_targets(new):
        yield


@contextmanager
def restored_targets(before: HeadTargets | None) -> Iterator[None]:
    """Set the targets that `current_targets` returned, for a recomputed forward pass.

    Args:
        before: the result of `current_targets` in the first forward pass.
    """
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
            new._result = None  # breaks a cycle: the graph of the result may reference `new`


def current_targets() -> HeadTargets | None:
    """Return the targets that are set in this thread; None if there are none."""
    return _thread_state.targets


def is_head_loss(output: Any) -> bool:
    """Whether a module's output is the loss that the head has returned in place of logits."""
    return _thread_state.targets is not None and _thread_state.targets.is_result(output)


class _Forward:
    """The `forward` of a head: the loss while targets are set, logits otherwise.

    It is an object and not a closure, so that a copy of the model gets one for the copied head.
    """

    def __init__(self, module: nn.Linear, name: str) -> None:
        self._module, self._name = module, name

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear has it
        now = _thread_state.targets
        if now is None or now.loss.head != self._name:
            return type(self._module).forward(self._module, input)
        return now.compute(self._module, input)


def attach_head(loss: Loss, root: nn.Module) -> None:
    """Set the `forward` of a model's head, if the loss is chunked. A second call does no harm.

    Names, parameters and hooks do not change. The model may be wrapped before or after the call.

    Args:
        loss: the loss. Unless it is a `ChunkedCrossEntropy`, nothing is done.
        root: the user's model.

    Raises:
        ConfigError: the model has no such head.
    """
    if isinstance(loss, ChunkedCrossEntropy):
        head = check_head(loss.head, root)
        head.__dict__["forward"] = _Forward(head, loss.head)


def check_head(name: str, root: nn.Module) -> nn.Linear:
    """Return the module of this name if it is a plain linear layer.

    Args:
        name: the name of the module in `root`.
        root: the user's model.

    Raises:
        ConfigError: there is no such module, it is not an `nn.Linear`, or its `forward` is
            replaced.
    """
    modules = dict(root.named_modules(remove_duplicate=False))
    linear = [n for n, module in modules.items() if isinstance(module, nn.Linear)]
    fix = f"Use the name of a linear layer, such as {', '.join(linear[-3:])}."
    if not linear:
        fix = "The model has no linear layer: set model.chunked_loss=false."
    if name not in modules:
        raise ConfigError(
            f"model.head={name}: the model has no module {name!r}{did_you_mean(name, modules)} "
            f"{fix}"
        )
    candidate = modules[name]
    own_forward = candidate.__dict__.get("forward")
    is_plain = type(candidate).forward is nn.Linear.forward and (
        own_forward is None or isinstance(own_forward, _Forward)
    )
    if not isinstance(candidate, nn.Linear) or not is_plain:
        raise ConfigError(
            f"model.head={name} is a {type(candidate).__name__}, and a chunked loss needs an "
            f"nn.Linear whose forward is not replaced. {fix}"
        )
    return candidate
