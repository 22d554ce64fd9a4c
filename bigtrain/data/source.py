"""The interface of data sources, and code that sources share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from pydantic import Field
from torch import Tensor, nn
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

    Two attributes are optional. `deterministic = True` means that reading a sample draws no random
    numbers. Such a data set may also have `__getitems__(indices) -> list`, which reads many samples
    in one call.
    """

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return one sample, (input, target)."""
        ...


@dataclass(frozen=True)
class Data:
    """The data sets and the task of a run."""

    train: Samples
    """The samples for training."""
    validation: Samples | None
    """The samples for validation; None if the run does not validate."""
    task: Task = field(default_factory=UntoldTask)
    """The loss and the validation figures. If it is left out or None, the loss is the only figure.
    The loss is then `loss`, the job's `model.loss`, or one that is inferred from targets and
    outputs."""
    baseline: Mapping[str, float] = field(default_factory=dict)
    """Validation figures of a model that learned nothing, by the task's names."""
    description: str = ""
    """One line for the log."""
    collate: Callable[[Sequence[Any]], Any] | None = None
    """Makes (inputs, targets) of a list of samples; None for torch's default."""
    loss: Loss | Callable[[Any, Any], Tensor] | None = None
    """A mean loss of (output, targets) that replaces the task's loss."""
    counts: Mapping[str, Any] = field(default_factory=dict)
    """Figures of the data for the run's `data.json`, such as the samples that were left out."""
    digest: str = ""
    """A hash of the contents, which must be equal on all ranks; empty if it is not known."""
    for_model: Callable[[nn.Module], Data] | None = None
    """A function that takes the model, and returns the data with the inputs that this model needs.
    The model's parameters need no values yet. The function raises ConfigError if the data do not
    fit the model. None if the inputs do not depend on the model."""

    def __post_init__(self) -> None:
        if vars(self)["task"] is None:  # untyped callers pass None
            object.__setattr__(self, "task", UntoldTask())


class Source(Protocol):
    """A data source with its arguments; only `open` reads samples."""

    def check(self) -> None:
        """Refuse a missing path, package or file, without reading the data."""
        ...

    def prepare(self) -> None:
        """Download or build files that all processes of a node share; may be called again."""
        ...

    def open(self, *, seed: int, sequence_length: int | None) -> Data:
        """Return the data sets and the task.

        Args:
            seed: `train.seed`.
            sequence_length: the model's tokens per sample; None if the model has no such length.
        """
        ...


class TensorSamples(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are the rows of two tensors in memory, each (rows, ...)."""

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
    """The samples of a data set at some indices; `deterministic` is that of the data set."""

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
    """Return the folder of a source, after a check that it exists.

    Args:
        path: `data.path`; None if it is not set.
        needs: the expected contents and the fix, for the message.

    Raises:
        ConfigError: the path is not set, or is not a folder.
    """
    if path is None:
        raise ConfigError(f"data.path is not set: {needs}")
    if not os.path.isdir(path):
        state = "is not a folder" if is_there(path) else "does not exist"
        raise ConfigError(f"data.path: {path} {state}: {needs}")
    return path
