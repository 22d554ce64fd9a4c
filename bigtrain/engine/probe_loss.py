"""What a user's own mean loss divides by, found out before it is trained with.

A mean over a batch is put together from the means of its parts, each weighted by what is counted
in it. Where a loss does not say what it counts, it is called with invented outputs and with targets
of which some may be ignored: whatever is counted, the mean of two parts together has to follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.losses.loss import Loss, MeanLoss
from bigtrain.models.blueprint import kept_random_state
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.fake import fake_model, run_without_numbers
from bigtrain.tensors.tree import map_tensors, tree_tensors

USUAL_IGNORED = (-100, -1, 255, 0)
"""What targets to leave out are mostly marked with: torch's own, two of images, padding."""
_SHORT = 8
"""Numbers of each dim that outputs and targets share: a loss of few tells as much."""
_TOLERANCE = 1e-4
"""Relative; what is looked for is a tenth."""


def probe_loss(loss: Loss, model: nn.Module, example: MicroBatch) -> tuple[Loss, list[str]]:
    """Find what a mean loss counts, where it does not say so.

    Nothing of it is run on real outputs, no random state changes, and nothing is left in memory.

    Args:
        loss: any; only a `MeanLoss` of a function that does not say what it ignores is called.
        model: on any device; a copy without numbers tells the shape of the output.
        example: a micro-batch with its targets.

    Returns:
        The loss to train with, and a line where there is something to say.

    Raises:
        ConfigError: it adds up instead of averaging; or what it leaves out is not what it divides
            by.
    """
    if not isinstance(loss, MeanLoss) or loss.counts_surely:
        return loss, []
    named = f"model.loss: {loss.name}"
    with kept_random_state():
        try:
            with torch.no_grad():
                shapes = run_without_numbers(
                    lambda device: fake_model(model, device, double=False)(
                        example.fake(device).inputs
                    )
                )
            probe = _Probe(loss.fn, shapes, example)
        except Exception as error:  # noqa: BLE001 - user code of any kind runs here
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            return loss, [f"{named} could not be tried ({reason}): it is counted by rows"]
        return _judged(loss, probe, named)


def agree_on_loss(
    loss: Loss, model: nn.Module, example: MicroBatch | None, context: RunContext
) -> tuple[Loss, list[str]]:
    """What rank 0 finds, for all ranks: their batches may show different things. Collective.

    Returns:
        The loss, and what there is to say; the same loss where there is no example.

    Raises:
        ConfigError: on all ranks; see `probe_loss`.
    """
    if example is None or not isinstance(loss, MeanLoss) or loss.counts_surely:
        return loss, []
    said: tuple[int | None, list[str], str | None] | None = None
    if context.is_main:
        try:
            found, lines = probe_loss(loss, model, example)
            said = getattr(found, "ignore_index", None), lines, None
        except ConfigError as error:
            said = None, [], str(error)
    ignored, lines, refusal = context.broadcast_object(said)
    if refusal is not None:
        raise ConfigError(refusal)
    return (loss if ignored is None else replace(loss, ignore_index=ignored)), lines


def _judged(loss: MeanLoss, probe: _Probe, named: str) -> tuple[Loss, list[str]]:
    paste = "bigtrain.MeanLoss(fn, ignore_index=-100)"
    plain, marked = probe.means(None), {mark: probe.means(mark) for mark in probe.candidates}
    seen = next((means for means in (plain, *marked.values()) if means is not None), None)
    if seen is None:
        return loss, [f"{named} could not be tried: it is counted by rows"]
    if probe.is_random:
        return loss, [f"{named} draws random numbers: it is counted by rows, untried"]
    if probe.whole_only:
        return loss, [
            f"{named} is made by the model itself: it is counted by rows. If it leaves targets "
            f"out, use {paste}"
        ]
    whole, *parts = seen
    if _close(whole, sum(parts)) and not _close(parts[0], 0.0):
        raise ConfigError(
            f"{named} of a batch is the sum of those of its parts, and the mean is needed "
            "(bigtrain turns it into the mean over the global batch). Return loss.mean()."
        )
    by_rows = plain is not None and _follows(plain, (1, 1))
    for ignored, means in marked.items():
        if means is None or _follows(means, (1, 1)):
            continue
        if _follows(means, probe.counts(ignored)):
            return replace(loss, ignore_index=ignored), [
                f"{named} leaves out targets of {ignored}: what is left is counted, as by "
                f"bigtrain.MeanLoss({loss.name}, ignore_index={ignored})"
            ]
        if by_rows:  # it is this mark that makes the difference
            raise ConfigError(
                f"{named} leaves out targets of {ignored}, and divides by neither the rows nor "
                f"what is left. Use bigtrain.MeanLoss(fn, ignore_index={ignored}) with a mean over "
                "what is left, or a bigtrain.Loss with its own count."
            )
    if by_rows:
        return loss, []
    return loss, [
        f"{named} is no mean over rows (it compares them, or weighs its targets): each "
        "micro-batch's counts by its rows. Weights of classes are read from "
        "nn.CrossEntropyLoss(weight=...)"
    ]


def _follows(means: tuple[float, float, float], counts: tuple[float, float]) -> bool:
    """Whether the mean of the whole is that of its parts, weighted by these counts."""
    whole, first, second = means
    return _close(whole, (counts[0] * first + counts[1] * second) / sum(counts))


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= _TOLERANCE * max(abs(one), abs(other), 1e-6)


class _Probe:
    """Calls a loss on two parts of a batch, and on both together.

    The outputs of the second part are larger, so that its mean is another one.

    Args:
        fn: the mean loss.
        shapes: an output of the model, without numbers.
        example: the micro-batch that it is of.
    """

    def __init__(self, fn: Callable[[Any, Any], Tensor], shapes: Any, example: MicroBatch) -> None:
        self._fn, self._rows = fn, max(1, example.rows)
        self._shapes, self._targets = shapes, example.targets
        targets = tree_tensors(example.targets)
        self._labels = next((t for t in targets if _is_integer(t)), None)
        leaves = tree_tensors(shapes)
        self.whole_only = not any(t.dim() and t.shape[0] % self._rows == 0 for t in leaves)
        """The output has no rows: it is the loss."""
        # Two rows where a row has a single target, so that one of them can be left out.
        single = self._labels is None or self._labels.numel() <= self._rows
        self._part = 2 if single else 1
        sizes = [{n for t in some for n in t.shape[1:]} for some in (leaves, targets)]
        self._long = {n for n in sizes[0] & sizes[1] if n > _SHORT}
        self.is_random = False

    @property
    def candidates(self) -> list[int]:
        """What targets to leave out may be marked with: the usual, and the ends of rows."""
        if self._labels is None:
            return []
        rows = self._labels.reshape(self._labels.shape[0], -1)
        return list(dict.fromkeys([*USUAL_IGNORED, *rows[:8, -1].tolist(), *rows[:8, 0].tolist()]))

    def means(self, ignored: int | None) -> tuple[float, float, float] | None:
        """The loss of both parts, of the first and of the second; None where it cannot be.

        Args:
            ignored: what half of the targets in the first part are; None changes none.
        """
        for long in (self._long, set()) if self._long else (set(),):
            for scale in (_any_number, _probability):
                with suppress(Exception):  # a user's code, on targets that it may not know
                    found = self._called(ignored, long, scale)
                    if all(map(math.isfinite, found)):
                        self._long = long
                        return found
        return None

    def counts(self, ignored: int) -> tuple[int, int]:
        """The targets of each part that are not this."""
        valid = tree_tensors(self._part_targets(ignored, self._long))
        labels = next(t for t in valid if _is_integer(t)) != ignored
        return int(labels[: self._part].sum()), int(labels[self._part :].sum())

    def _called(
        self, ignored: int | None, long: set[int], scale: Callable[[Tensor], Tensor]
    ) -> tuple[float, float, float]:
        generator = torch.Generator().manual_seed(0)
        rows = 2 * self._part

        def invented(leaf: Tensor) -> Tensor:
            if not leaf.dim() or leaf.shape[0] % self._rows:
                return torch.zeros(leaf.shape)
            shape = [leaf.shape[0] // self._rows * rows, *_shortened(leaf.shape[1:], long)]
            values = torch.rand(shape, generator=generator)
            values[len(values) // 2 :] += 1.0  # within [0, 1) and [1, 2)
            return scale(values)

        output = map_tensors(self._shapes, invented)
        target = self._part_targets(ignored, long)
        pairs = [
            (cut(output), cut(target))
            for cut in (_halves(slice(None)), _halves(slice(0, 1)), _halves(slice(1, 2)))
        ]
        with torch.no_grad():
            torch.default_generator.manual_seed(0)
            again = float(self._fn(*pairs[0]))
            torch.default_generator.manual_seed(1)
            whole, first, second = (float(self._fn(*pair)) for pair in pairs)
        self.is_random = self.is_random or again != whole
        return whole, first, second

    def _part_targets(self, ignored: int | None, long: set[int]) -> Any:
        rows = 2 * self._part

        def repeated(leaf: Tensor) -> Tensor:
            if not leaf.dim():
                return leaf
            leaf = leaf[tuple(slice(n) for n in (None, *_shortened(leaf.shape[1:], long)))]
            each = max(1, leaf.shape[0] // self._rows)
            index = torch.arange(rows * each) % leaf.shape[0]
            taken = leaf.detach().cpu()[index].clone()
            if ignored is not None and _is_integer(leaf):
                others = leaf[(leaf != ignored) & (leaf >= 0)]
                if others.numel():  # negative ones mark as well: two marks would hide each other
                    taken[(taken == ignored) | (taken < 0)] = others[0]
                flat = taken.view(2, -1)
                flat[0, : max(1, flat.shape[1] // 2)] = ignored
            return taken

        return map_tensors(self._targets, repeated)


def _halves(part: slice) -> Callable[[Any], Any]:
    def cut(leaf: Tensor) -> Tensor:
        if not leaf.dim():
            return leaf
        half = leaf.shape[0] // 2
        return leaf[(part.start or 0) * half : half * (2 if part.stop is None else part.stop)]

    return lambda value: map_tensors(value, cut)


def _shortened(shape: Sequence[int], long: set[int]) -> list[int]:
    return [_SHORT if size in long else size for size in shape]


def _any_number(values: Tensor) -> Tensor:
    """Within -1 and 1, and for the second part beyond."""
    return 4 * values * values - 2


def _probability(values: Tensor) -> Tensor:
    return 0.1 + 0.4 * values


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
