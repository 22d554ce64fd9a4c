"""What is being learned: a loss that may be cut in pieces, and the figures of a validation.

A mean over a batch cannot be put together from the means of its parts when the parts differ in
their number of valid targets. So a loss here is a *sum* with a *count*: ranks, micro-batches
and accumulation add both, and whoever holds the global count divides once.
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
"""Weight of {"aux": ...} beside {"out": ...}, as segmentation models are usually trained."""
SINGLE_AUXILIARY_WEIGHT = 0.4
"""Weight of a lone `aux_logits` beside `logits` (Inception v3)."""
DOUBLE_AUXILIARY_WEIGHT = 0.3
"""Weight of each of `aux_logits1` and `aux_logits2` beside `logits` (GoogLeNet)."""


class Loss(Protocol):
    """A loss as a sum over the valid targets, with their number."""

    def __call__(self, output: Any, target: Any, count: float | None = None) -> Tensor:
        """The sum over the valid targets: a scalar, a zero in the graph where there are none.

        Args:
            output: what the model returned.
            target: what the data gave, on the same device.
            count: what `count(target)` was on the CPU, where that is known: asking again would
                wait for the device.
        """
        ...

    def count(self, target: Any) -> int | float:
        """The number of valid targets; it is asked on the CPU, before the targets move."""
        ...


def main_logits(output: Any) -> Tensor:
    """The logits of a model's output, without its auxiliary heads.

    Args:
        output: a tensor, a mapping with "out" or "logits", or a named tuple with `logits`.

    Raises:
        ConfigError: it is none of these.
    """
    return _heads(output)[0][0]


def _heads(output: Any) -> list[tuple[Tensor, float]]:
    """The main logits with weight 1, then the auxiliary ones with their customary weights."""
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
    """A 16-bit tensor in float32, any other as it is."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def logits_and_targets(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Logits as (targets, classes) in float32 or float64, and targets as (targets,)."""
    return at_least_float32(logits.reshape(-1, logits.shape[-1])), target.reshape(-1)


def check_targets(logits: Sequence[int], expected: Sequence[int], target: Tensor) -> None:
    """Refuse targets that do not belong to logits of a shape.

    Raises:
        ConfigError: their shape is not the expected one.
    """
    if tuple(target.shape) != tuple(expected):
        raise ConfigError(
            f"model.name: logits of shape {tuple(logits)} need targets of shape "
            f"{tuple(expected)}, the data gives {tuple(target.shape)}. "
            "Choose a model and a data.name that fit together."
        )


@dataclass(frozen=True)
class CrossEntropy:
    """Cross entropy in nats, summed over the targets that are not `ignore_index`.

    Takes logits (batch, classes), (batch, seq, classes) or, with `class_dim=1`, (batch, classes,
    height, width), and the outputs of torchvision's models with auxiliary heads. Computed in
    float32, or in float64 where the logits are.
    """

    ignore_index: int = -100
    class_dim: Literal[-1, 1] = -1
    label_smoothing: float = 0.0
    auxiliary_weight: float | None = None
    """Weight of every auxiliary head; None takes the customary one of the output's kind."""
    accuracy: TrainingAccuracy | None = field(default=None, compare=False, repr=False)
    """Is shown the main logits of a training step."""

    def __call__(self, output: Any, target: Tensor, count: float | None = None) -> Tensor:
        """The sum over the valid targets, auxiliary heads added with their weights."""
        (main, _), *auxiliary = _heads(output)
        total = self._sum(main, target)
        if self.accuracy is not None:
            self.accuracy.see(main.detach(), target, self.ignore_index, count)
        for logits, customary in auxiliary:
            weight = customary if self.auxiliary_weight is None else self.auxiliary_weight
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
        # Not flattened, as that would copy the logits; and summed here, as torch's own sum over
        # pixels is not deterministic on CUDA.
        upcast = at_least_float32(logits)
        return F.cross_entropy(upcast, target, **options, reduction="none").sum()

    def count(self, target: Tensor) -> int:
        """The number of targets that are not `ignore_index`."""
        return int(self.queue_count(target))

    def queue_count(self, target: Tensor) -> Tensor:
        """As `count`: 0-dim, on the device of the targets, which is not waited for."""
        return (target != self.ignore_index).sum()


@dataclass(frozen=True)
class MeanLoss:
    """A user's mean loss of (output, target), turned into a sum: the mean times a count.

    The count is what `fn` divides by. It is found in this order:

    1. `count_of` or `ignore_index`, where they are given.
    2. For `F.cross_entropy`, `nn.CrossEntropyLoss(...)` and a `functools.partial` of them: the
       targets that are not its `ignore_index`, weighted by its class weights.
    3. For any other loss of torch: the rows.
    4. For any other function: the rows, where the loss is called outside an engine. An engine
       traces the calls that `fn` makes and finds what each mean divides by, and refuses a loss
       where it finds nothing; see `losses.global_mean`.

    Counting valid targets on a device waits for the device; a loss without `ignore_index` does
    not.

    Raises:
        ConfigError: `fn` has another reduction than the mean.
    """

    fn: Callable[[Any, Any], Tensor]
    """A function, a module, or a module class that takes no arguments."""
    ignore_index: int | None = None
    """Targets of this value are not counted; None asks `fn`."""
    count_of: Callable[[Any], int | float | Tensor] | Literal["rows"] | None = None
    """What the mean of a micro-batch divides by, from its targets; "rows" counts rows, which is
    exact only for a mean over rows."""
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
        """Whether it is known what is divided by: `fn` or its maker says so, or torch made it."""
        inner = self.fn.func if isinstance(self.fn, functools.partial) else self.fn
        home = getattr(inner, "__module__", None) or type(inner).__module__
        if self._ignored is not None or self.count_of is not None:
            return True
        return home.startswith(("torch.", "torch._"))

    @property
    def name(self) -> str:
        """What `fn` is called."""
        return _name(self.fn)

    def __call__(self, output: Any, target: Any, count: float | None = None) -> Tensor:
        """The mean times the count; a zero in the graph of `output` where the count is 0."""
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
        """What `fn` divides by: valid targets, their class weights, or rows."""
        found = self.queue_count(target)
        return found.item() if isinstance(found, Tensor) else found

    def queue_count(self, target: Any) -> int | float | Tensor:
        """As `count`; where values decide, 0-dim on their device, which is not waited for."""
        if callable(self.count_of):
            found = self.count_of(target)
            return found if isinstance(found, Tensor) else float(found)
        first = next(_tensors(target), None)
        if first is None:  # a list of strings, say, from a user's own collate
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
    """What a loss was made with: a module's attribute, or a parameter's default."""
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
    """The tensors in nested mappings, tuples and lists, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _tensors(inner)


def count_targets(loss: Loss, targets: Sequence[Any]) -> list[int | float]:
    """What `loss.count` says of the targets of each micro-batch.

    Where they are on a device, that is waited for once: if the loss has `queue_count`, too, as
    those of bigtrain have.
    """
    queue = getattr(loss, "queue_count", None)
    if queue is None:
        return [loss.count(target) for target in targets]
    counts = [queue(target) for target in targets]
    queued = [count for count in counts if isinstance(count, Tensor)]
    read = iter(torch.stack(queued).tolist() if queued else ())
    return [next(read) if isinstance(count, Tensor) else count for count in counts]


def as_loss(loss: Loss | Callable[[Any, Any], Tensor]) -> Loss:
    """A loss with a count as it is; a mean loss adapted to sums."""
    if hasattr(loss, "count"):
        return cast(Loss, loss)
    return MeanLoss(loss)
