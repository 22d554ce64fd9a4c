"""Losses that can be added over micro-batches and ranks.

The mean over a batch is not the mean of its parts' means if the parts differ in their number of
valid targets. So a loss here is a *sum* with a *count*. Both are added up over micro-batches and
ranks, and the sum is divided once by the global count.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from bigtrain.errors import ConfigError
from bigtrain.losses.accuracy import TrainingAccuracy

DICT_AUXILIARY_WEIGHT = 0.5
"""The weight of "aux" in a mapping whose "out" has weight 1, as in training segmentation models."""
SINGLE_AUXILIARY_WEIGHT = 0.4
"""The weight of a single `aux_logits` if `logits` has weight 1 (Inception v3)."""
DOUBLE_AUXILIARY_WEIGHT = 0.3
"""The weight of each of `aux_logits1` and `aux_logits2` if `logits` has weight 1 (GoogLeNet)."""


class Loss(Protocol):
    """A loss as a sum over the valid targets, with their number."""

    def __call__(self, output: Any, target: Any, count: float | None = None) -> Tensor:
        """Return the sum over the valid targets, a scalar.

        Without valid targets it is a zero that depends on the output in the autograd graph.

        Args:
            output: the output of the model.
            target: the target of the batch, on the same device.
            count: the result of `count(target)`, if it is known: computing it again would wait for
                the device.
        """
        ...

    def count(self, target: Any) -> int | float:
        """Return the number of valid targets; called on the CPU, before the targets are moved."""
        ...


def main_logits(output: Any) -> Tensor:
    """Return the logits of a model's output, without its auxiliary heads.

    Args:
        output: a tensor, a mapping with "out" or "logits", or a named tuple with `logits`.

    Raises:
        ConfigError: the output is none of these.
    """
    return _heads(output)[0][0]


def _heads(output: Any) -> list[tuple[Tensor, float]]:
    """Return the main logits with weight 1, then the auxiliary ones with their usual weights."""
    if isinstance(output, Tensor):
        return [(output, 1.0)]
    if isinstance(output, Mapping):
        key = "out" if "out" in output else "logits"
        named = {"main": output.get(key), "aux": output.get("aux")}
        weights = {"aux": DICT_AUXILIARY_WEIGHT}
    else:
        names = ("aux_logits", "aux_logits1", "aux_logits2")
        named = {"main": getattr(output, "logits", None)}
        named.update({name: getattr(output, name, None) for name in names})
        weights = dict.fromkeys(names, DOUBLE_AUXILIARY_WEIGHT)
        weights["aux_logits"] = SINGLE_AUXILIARY_WEIGHT
    if not isinstance(named["main"], Tensor):
        raise ConfigError(
            f"model.name: the loss got a {type(output).__name__}, and needs logits: a tensor, a "
            "dict with 'out' or 'logits', or a named tuple with logits. Return one of these, or "
            "set model.loss=package.module:function."
        )
    return [(tensor, weights.get(n, 1.0)) for n, tensor in named.items() if tensor is not None]


def at_least_float32(tensor: Tensor) -> Tensor:
    """Convert a 16-bit tensor to float32; return any other unchanged."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def logits_and_targets(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits as (targets, classes) in float32 or float64, and targets as (targets,).

    Args:
        logits: (..., classes).
        target: (...).
    """
    return at_least_float32(logits.reshape(-1, logits.shape[-1])), target.reshape(-1)


def check_targets(logits: Sequence[int], expected: Sequence[int], target: Tensor) -> None:
    """Refuse targets whose shape does not fit the logits.

    Args:
        logits: the shape of the logits.
        expected: the shape that the targets need.
        target: the targets.

    Raises:
        ConfigError: the shape of the targets is not the expected one.
    """
    if tuple(target.shape) != tuple(expected):
        raise ConfigError(
            f"model.name: logits of shape {tuple(logits)} need targets of shape "
            f"{tuple(expected)}, and the data have {tuple(target.shape)}. "
            "Choose a model and a data.name that fit together."
        )


@dataclass(frozen=True)
class CrossEntropy:
    """Cross entropy in nats, summed over the targets that are not `ignore_index`.

    It takes logits (batch, classes), (batch, seq, classes) or, with `class_dim=1`, (batch, classes,
    height, width), and the outputs of torchvision's models with auxiliary heads. It is computed in
    float32, or in float64 for float64 logits.
    """

    ignore_index: int = -100
    class_dim: Literal[-1, 1] = -1
    label_smoothing: float = 0.0
    auxiliary_weight: float | None = None
    """The weight of every auxiliary head; None for the usual weight of this kind of output."""
    accuracy: TrainingAccuracy | None = field(default=None, compare=False, repr=False)
    """Counts the correct targets of a training step, from the main logits; None to count none."""

    def __call__(self, output: Any, target: Tensor, count: float | None = None) -> Tensor:
        """Return the loss, summed over the valid targets: 0-dim.

        The losses of auxiliary heads are added with their weights.

        Args:
            output: the output of the model: logits, or a mapping or named tuple with them.
            target: the class of each position; its shape is that of the logits without `class_dim`.
            count: the number of valid targets, if it is known. With 0, `accuracy` counts nothing.

        Raises:
            ConfigError: the output has no logits, or the shape of the targets does not fit them.
        """
        (main, _), *auxiliary = _heads(output)
        total = self._sum(main, target)
        if self.accuracy is not None:
            self.accuracy.see(main.detach(), target, self.ignore_index, count)
        for logits, usual in auxiliary:
            weight = usual if self.auxiliary_weight is None else self.auxiliary_weight
            if weight:
                total = total + weight * self._sum(logits, target)
        return total

    def _sum(self, logits: Tensor, target: Tensor) -> Tensor:
        dim = self.class_dim % logits.dim()
        check_targets(logits.shape, (*logits.shape[:dim], *logits.shape[dim + 1 :]), target)
        options: dict[str, Any] = {
            "ignore_index": self.ignore_index,
            "label_smoothing": self.label_smoothing,
        }
        if dim == logits.dim() - 1:
            return F.cross_entropy(*logits_and_targets(logits, target), **options, reduction="sum")
        # The logits are not flattened, because that would copy them. The losses are summed here,
        # because torch's own sum over pixels is not deterministic on CUDA.
        upcast = at_least_float32(logits)
        return F.cross_entropy(upcast, target, **options, reduction="none").sum()

    def count(self, target: Tensor) -> int:
        """Return the number of targets that are not `ignore_index`."""
        return int(self.queue_count(target))

    def queue_count(self, target: Tensor) -> Tensor:
        """Return the count as a 0-dim tensor on the device of the targets, without waiting."""
        return (target != self.ignore_index).sum()


@dataclass(frozen=True)
class MeanLoss:
    """A user's mean loss of (output, target) as a sum: the mean times a count.

    The count is the number by which `fn` divides. It is the first of these that applies:

    1. The result of `count_of`, or the targets that are not `ignore_index`, if one is set.
    2. For a loss with an `ignore_index`, such as `F.cross_entropy`, `nn.CrossEntropyLoss(...)` or a
       `functools.partial` of them: the targets that are not its `ignore_index`, weighted by its
       class weights.
    3. For any other loss of torch: the rows.
    4. For any other function: the rows. But an engine traces the calls of `fn` and finds the
       divisor of each mean; it refuses a loss for which it finds none. See `losses.global_mean`.

    Counting valid targets on a device waits for the device; counting rows does not.

    Raises:
        ConfigError: `fn` has a reduction other than the mean.
    """

    fn: Callable[[Any, Any], Tensor]
    """A function, a module, or a module class that takes no arguments."""
    ignore_index: int | None = None
    """Targets of this value are not counted; None uses the setting of `fn`."""
    count_of: Callable[[Any], int | float | Tensor] | Literal["rows"] | None = None
    """A function of a micro-batch's targets that returns the divisor of its mean. "rows" counts the
    rows, which is exact only for a mean over rows."""
    _ignored: int | None = field(init=False, repr=False)
    _class_weights: Tensor | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.fn, type):  # model.loss=torch.nn:CrossEntropyLoss names the class
            object.__setattr__(self, "fn", self.fn())
        reduction = _setting(self.fn, "reduction")
        if isinstance(reduction, str) and reduction not in ("mean", "batchmean"):
            raise ConfigError(
                f"model.loss: {_name(self.fn)} has reduction={reduction!r}, and 'mean' is needed "
                "(bigtrain turns it into the mean over the global batch). Use reduction='mean'."
            )
        ignored = _setting(self.fn, "ignore_index")
        own_ignored = ignored if isinstance(ignored, int) else None
        if own_ignored is not None and self.ignore_index not in (None, own_ignored):
            raise ConfigError(
                f"model.loss: {_name(self.fn)} ignores {own_ignored}, and the targets to ignore "
                "are "
                f"{self.ignore_index}. Use functools.partial({_name(self.fn)}, "
                f"ignore_index={self.ignore_index})."
            )
        weights = _setting(self.fn, "weight") if own_ignored is not None else None
        object.__setattr__(
            self, "_ignored", self.ignore_index if own_ignored is None else own_ignored
        )
        object.__setattr__(self, "_class_weights", weights if _is_tensor(weights) else None)

    @property
    def counts_surely(self) -> bool:
        """Whether the divisor is known: a field or `fn` itself defines it, or `fn` is torch's."""
        inner = self.fn.func if isinstance(self.fn, functools.partial) else self.fn
        module = getattr(inner, "__module__", None) or type(inner).__module__
        if self._ignored is not None or self.count_of is not None:
            return True
        return module.startswith(("torch.", "torch._"))

    @property
    def name(self) -> str:
        """The name of `fn`."""
        return _name(self.fn)

    def __call__(self, output: Any, target: Any, count: float | None = None) -> Tensor:
        """Return the mean times the count, a scalar; if the count is 0, a zero.

        The zero depends on the output in the autograd graph.

        Args:
            output: the output of the model.
            target: the targets of the micro-batch.
            count: the result of `count(target)`; None to count.

        Raises:
            ConfigError: `fn` did not return one number.
        """
        count = self.count(target) if count is None else count
        if not count:
            empty = [tensor.reshape(-1)[:0].sum() for tensor in _tensors(output)]
            return at_least_float32(torch.stack(empty).sum())
        mean = self.fn(_map_tensors(output, at_least_float32), target)
        if not _is_tensor(mean) or mean.numel() != 1:
            got = tuple(mean.shape) if _is_tensor(mean) else type(mean).__name__
            raise ConfigError(
                f"model.loss: {_name(self.fn)} returned {got}, and the mean as one number is "
                "needed. Return loss.mean()."
            )
        return at_least_float32(mean.reshape(())) * count

    def count(self, target: Any) -> int | float:
        """Return the divisor of `fn`: valid targets, the sum of their class weights, or rows."""
        count = self.queue_count(target)
        return count.item() if isinstance(count, Tensor) else count

    def queue_count(self, target: Any) -> int | float | Tensor:
        """Return the count without waiting for a device.

        It is a 0-dim tensor on the device of the targets if it depends on their values.
        """
        if callable(self.count_of):
            count = self.count_of(target)
            return count if isinstance(count, Tensor) else float(count)
        first = next(_tensors(target), None)
        if first is None:  # no tensor, such as a list of strings from a user's collate function
            return len(target)
        if self.count_of is not None or self._ignored is None or first.is_floating_point():
            return len(first) if first.dim() else 1
        valid = first != self._ignored
        if self._class_weights is None:
            return valid.sum()
        weights = self._class_weights.to(first.device)
        each = weights[first.where(valid, 0)]
        return (each * valid).sum(dtype=torch.float64)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _name(fn: Any) -> str:
    inner = fn.func if isinstance(fn, functools.partial) else fn
    return str(getattr(inner, "__name__", type(inner).__name__))


def _setting(fn: Any, name: str) -> Any:
    """Return a setting of a loss: an attribute of a module, or a function's default argument."""
    if isinstance(fn, nn.Module):
        return getattr(fn, name, None)
    try:
        parameter = inspect.signature(fn).parameters.get(name)
    except (TypeError, ValueError):  # a built-in without a signature
        return None
    return None if parameter is None else parameter.default


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, value)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested mappings, tuples and lists, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _tensors(inner)


def count_targets(loss: Loss, targets: Sequence[Any]) -> list[int | float]:
    """Return `loss.count` of the targets of each micro-batch.

    If the loss has a method `queue_count`, as bigtrain's own losses have, this waits for a device
    only once.
    """
    queue = getattr(loss, "queue_count", None)
    if queue is None:
        return [loss.count(target) for target in targets]
    counts = [queue(target) for target in targets]
    queued = [count for count in counts if isinstance(count, Tensor)]
    read = iter(torch.stack(queued).tolist() if queued else ())
    return [next(read) if isinstance(count, Tensor) else count for count in counts]


def as_loss(loss: Loss | Callable[[Any, Any], Tensor]) -> Loss:
    """Return a loss that has a `count` unchanged, and any other loss as a `MeanLoss`.

    Raises:
        ConfigError: the loss has a reduction other than the mean.
    """
    if hasattr(loss, "count"):
        return cast(Loss, loss)
    return MeanLoss(loss)
