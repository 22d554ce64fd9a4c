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

    Two attributes are optional: `deterministic = True` means that reading draws no random numbers;
    then `__getitems__(indices) -> list` may read many samples in one call.
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
    validation: Samples | None
    task: Task = field(default_factory=UntoldTask)
    """The loss and the validation figures. Left out, or None, there are no figures but the loss:
    `loss`, the job's `model.loss`, or one chosen from targets and outputs."""
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
    """A hash of the contents, if it is known: it must be equal on all ranks."""
    for_model: Callable[[nn.Module], Data] | None = None
    """Returns the data with the inputs that a model needs, called with the described model; it
    raises ConfigError if they do not fit. None if inputs do not depend on the model."""

    def __post_init__(self) -> None:
        if vars(self)["task"] is None:  # untyped callers pass None
            object.__setattr__(self, "task", UntoldTask())


class Source(Protocol):
    """A data source with its arguments, before anything large is read."""

    def check(self) -> None:
        """Refuse a missing path, package or file, without reading the data."""
        ...

    def prepare(self) -> None:
        """Download or build files that all processes of a node share; may be called again."""
        ...

    def open(self, *, seed: int, sequence_length: int | None) -> Data:
        """Return the data sets."""
        ...


class TensorSamples(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are the rows of two tensors in memory."""

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
    """Return the folder of a source.

    Args:
        path: `data.path`.
        needs: the expected contents and the fix, for the message.

    Raises:
        ConfigError: not given, or not a folder.
    """
    if path is None:
        raise ConfigError(f"data.path is not set: {needs}")
    if not os.path.isdir(path):
        state = "is not a folder" if is_there(path) else "does not exist"
        raise ConfigError(f"data.path: {path} {state}: {needs}")
    return path
