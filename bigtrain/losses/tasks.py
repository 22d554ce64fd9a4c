"""The tasks of data sets: the loss of each task, and the figures of its validation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bigtrain.errors import ConfigError
from bigtrain.losses.loss import (
    CrossEntropy,
    Loss,
    at_least_float32,
    logits_and_targets,
    main_logits,
)


class Task(ABC):
    """A kind of learning problem: its loss, and the figures that its validation reports.

    The sums of `measure` are added up over micro-batches and ranks. `summarize` computes the
    figures from the totals.
    """

    name: str
    """The name of the kind, such as "language"."""
    num_classes: int | None
    """The number of classes of a target; None if targets are not classes."""

    @abstractmethod
    def loss(self) -> Loss:
        """Return the loss to train with."""

    @abstractmethod
    def measure(self, output: Any, target: Any) -> dict[str, Tensor]:
        """Return sums over the valid targets of a micro-batch, by name.

        The sums are float64 tensors on the device of the output.
        """

    @abstractmethod
    def summarize(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the figures of a whole validation, by name; nan if there was no valid target.

        Args:
            sums: the results of `measure`, added up over the validation.
        """

    @property
    def figures(self) -> tuple[str, ...]:
        """The names of the figures that `summarize` returns."""
        return ("loss",)


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part) / float(whole) if float(whole) else math.nan


def _measure_loss(logits: Tensor, target: Tensor, ignore_index: int) -> dict[str, Tensor]:
    """Return the summed cross entropy in nats and the count, in float64 because terms are many."""
    each = F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="none")
    valid = target != ignore_index
    return {"loss": each.sum(dtype=torch.float64), "count": valid.sum(dtype=torch.float64)}


@dataclass(frozen=True)
class LanguageTask(Task):
    """Next-token prediction: logits (batch, seq, vocabulary), targets (batch, seq)."""

    num_classes: int
    byte_level: bool = False
    """Whether a token is a byte, so that the loss is also reported in bits per byte."""
    ignore_index: int = -100
    label_smoothing: float = 0.0
    name: str = field(default="language", init=False)

    def loss(self) -> CrossEntropy:
        """Return cross entropy over the last dim."""
        return CrossEntropy(self.ignore_index, -1, self.label_smoothing)

    def measure(self, output: Any, target: Tensor) -> dict[str, Tensor]:
        """Return the sums `loss`, in nats without label smoothing, and `count`."""
        return _measure_loss(*logits_and_targets(main_logits(output), target), self.ignore_index)

    def summarize(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return `loss` in nats per target, and `bits_per_byte` if tokens are bytes."""
        loss = _ratio(sums["loss"], sums["count"])
        bits = {"bits_per_byte": loss / math.log(2)} if self.byte_level else {}
        return {"loss": loss, **bits}

    @property
    def figures(self) -> tuple[str, ...]:
        """See `Task.figures`."""
        return ("loss", "bits_per_byte") if self.byte_level else ("loss",)


@dataclass(frozen=True)
class ClassificationTask(Task):
    """One class for each row: logits (batch, classes), targets (batch,)."""

    num_classes: int
    ignore_index: int = -100
    label_smoothing: float = 0.0
    name: str = field(default="classification", init=False)

    def loss(self) -> CrossEntropy:
        """Return cross entropy over the classes, auxiliary heads included."""
        return CrossEntropy(self.ignore_index, -1, self.label_smoothing)

    def measure(self, output: Any, target: Tensor) -> dict[str, Tensor]:
        """Return the sums `loss`, in nats without label smoothing, `count`, `top1` and `top5`.

        `top1` and `top5` count correct targets. There is no `top5` with fewer than 5 classes.
        """
        logits, flat = logits_and_targets(main_logits(output), target)
        hits = logits.topk(min(5, logits.shape[-1])).indices == flat[:, None]
        sums = _measure_loss(logits, flat, self.ignore_index)
        sums["top1"] = hits[:, 0].sum(dtype=torch.float64)
        if self.num_classes >= 5:
            sums["top5"] = hits.sum(dtype=torch.float64)
        return sums

    def summarize(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return `loss` in nats per target, and `top1` and `top5` as shares between 0 and 1."""
        return {name: _ratio(sums[name], sums["count"]) for name in self.figures}

    @property
    def figures(self) -> tuple[str, ...]:
        """See `Task.figures`."""
        return ("loss", "top1", "top5") if self.num_classes >= 5 else ("loss", "top1")


@dataclass(frozen=True)
class SegmentationTask(Task):
    """One class for each pixel.

    Logits are (batch, classes, height, width), targets (batch, height, width).
    """

    num_classes: int
    ignore_index: int = 255
    label_smoothing: float = 0.0
    name: str = field(default="segmentation", init=False)

    def loss(self) -> CrossEntropy:
        """Return cross entropy over dim 1, auxiliary head included."""
        return CrossEntropy(self.ignore_index, 1, self.label_smoothing)

    def measure(self, output: Any, target: Tensor) -> dict[str, Tensor]:
        """Return the sums `loss`, in nats without label smoothing, `count` and `confusion`.

        `confusion` counts pixels: (true class, predicted class).
        """
        logits = at_least_float32(main_logits(output))
        sums = _measure_loss(logits, target, self.ignore_index)
        # A model may have more classes than the data.
        size = max(self.num_classes, logits.shape[1])
        # Selecting the valid pixels would wait for the device, and so would `torch.bincount`. So
        # ignored pixels are counted in an extra cell.
        cells = target.long() * size + logits.argmax(1)
        cells = cells.where(target != self.ignore_index, size * size).reshape(-1)
        counts = cells.new_zeros(size * size + 1).index_add_(0, cells, torch.ones_like(cells))
        sums["confusion"] = counts[:-1].reshape(size, size).to(torch.float64)
        return sums

    def summarize(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return `loss` in nats per pixel, `pixel_accuracy` and `mean_iou`.

        The accuracy and the IoU (intersection over union) are between 0 and 1. The mean leaves out
        classes that are neither in the targets nor predicted.
        """
        confusion = sums["confusion"]
        hits = confusion.diagonal()
        union = confusion.sum(0) + confusion.sum(1) - hits
        present = union > 0
        iou = float((hits[present] / union[present]).mean()) if bool(present.any()) else math.nan
        return {
            "loss": _ratio(sums["loss"], sums["count"]),
            "pixel_accuracy": _ratio(hits.sum(), confusion.sum()),
            "mean_iou": iou,
        }

    @property
    def figures(self) -> tuple[str, ...]:
        """See `Task.figures`."""
        return ("loss", "pixel_accuracy", "mean_iou")


@dataclass(frozen=True)
class CustomTask(Task):
    """A task with a user's loss.

    The mean loss is the only figure, as the meaning of the output is unknown.

    Example:
        CustomTask(MeanLoss(torch.nn.functional.mse_loss))
    """

    criterion: Loss
    num_classes: int | None = None
    name: str = field(default="custom", init=False)

    def loss(self) -> Loss:
        """Return the user's loss."""
        return self.criterion

    def measure(self, output: Any, target: Any) -> dict[str, Tensor]:
        """Return the sums `loss` and `count`."""
        count = self.criterion.count(target)
        loss = self.criterion(output, target, count).detach().to(torch.float64)
        return {"loss": loss, "count": loss.new_tensor(count)}

    def summarize(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return `loss`, the mean over the valid targets."""
        return {"loss": _ratio(sums["loss"], sums["count"])}


class UntoldTask(CustomTask):
    """The task of data without a task; a run infers its loss, see `engine.run_loss.infer_loss`."""

    def __init__(self) -> None:
        super().__init__(_Unsettled())


class _Unsettled:
    """A placeholder for a loss that is not set yet."""

    def __call__(self, output: Any, target: Any, count: float | None = None) -> Tensor:
        del output, target, count
        raise ConfigError(
            "data.name: these data name no task. Give Data(..., task=...) or Data(..., loss=...)."
        )

    def count(self, target: Any) -> int:
        del target
        return 1
