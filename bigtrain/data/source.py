"""What a source of data hands over, and the pieces that sources share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset

from bigtrain.errors import ConfigError
from bigtrain.files.regular import is_there
from bigtrain.losses.loss import Loss
from bigtrain.losses.tasks import Task, UntoldTask

PositiveCount = Annotated[int, Field(ge=1)]
"""An argument that is at least 1."""
NonNegativeCount = Annotated[int, Field(ge=0)]
"""An argument that is at least 0."""
PositiveFactor = Annotated[float, Field(gt=0)]
"""An argument above 0."""
SampleFraction = Annotated[float, Field(ge=0, lt=1)]
"""An argument in [0, 1)."""


class Samples(Protocol):
    """A map-style data set: `samples[i]` is (input, target).

    Two things are optional: `deterministic = True` says that reading draws no random numbers,
    and then `__getitems__(indices) -> list` reads many at once.
    """

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """One sample, (input, target)."""
        ...


@dataclass(frozen=True)
class Data:
    """What a run is trained and validated on."""

    train: Samples
    validation: Samples | None
    task: Task = field(default_factory=UntoldTask)
    """What is learned, and how it is measured. Left out, or None, the loss alone is: `loss`, the
    job's `model.loss`, or what targets and outputs tell (see `engine.run_loss.infer_loss`)."""
    baseline: Mapping[str, float] = field(default_factory=dict)
    """Figures that a model which learned nothing would reach, under the task's names."""
    description: str = ""
    """One line for the log."""
    collate: Callable[[Sequence[Any]], Any] | None = None
    """Makes (inputs, targets) of a list of samples; None is torch's own way of stacking."""
    loss: Loss | Callable[[Any, Any], Tensor] | None = None
    """A mean loss of (output, targets) to train with, in the place of the task's own."""

    def __post_init__(self) -> None:
        if vars(self)["task"] is None:  # whatever the types say
            object.__setattr__(self, "task", UntoldTask())


class Source(Protocol):
    """A data source with its arguments, before anything large is read."""

    def check(self) -> None:
        """Refuse cheaply what cannot work: a missing path, package or file."""
        ...

    def prepare(self) -> None:
        """Download or build what all processes of a node share; may be repeated."""
        ...

    def open(self, *, seed: int, sequence_length: int | None) -> Data:
        """The data sets."""
        ...


class TensorSamples(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are rows of two tensors in memory."""

    deterministic = True

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs = inputs
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        rows = torch.as_tensor(indices)
        return list(zip(self.inputs[rows], self.targets[rows], strict=True))


class SampleSubset(Dataset[Any]):
    """Some samples of a data set, by index; as deterministic as that data set."""

    def __init__(self, samples: Samples, indices: Sequence[int]) -> None:
        self.samples = samples
        self.indices = indices
        self.deterministic = bool(getattr(samples, "deterministic", False))

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.samples[self.indices[index]]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        inner = [self.indices[index] for index in indices]
        many = getattr(self.samples, "__getitems__", None)
        return list(many(inner)) if many is not None else [self.samples[index] for index in inner]


def existing_folder(path: Path | None, needs: str) -> Path:
    """The folder of a source.

    Args:
        path: `data.path`.
        needs: what is expected in it, and what else to set, for the message.

    Raises:
        ConfigError: not given, or not a folder.
    """
    if path is None:
        raise ConfigError(f"data.path is not set: {needs}")
    if not os.path.isdir(path):
        state = "is not a folder" if is_there(path) else "does not exist"
        raise ConfigError(f"data.path: {path} {state}: {needs}")
    return path
