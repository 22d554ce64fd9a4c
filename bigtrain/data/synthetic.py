"""Random samples of a given shape, for benchmarks: nothing to download, nothing to learn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from bigtrain.data.sampler import derive_seed
from bigtrain.data.source import Data, NonNegativeCount, PositiveCount, SampleFraction
from bigtrain.errors import ConfigError
from bigtrain.losses.tasks import ClassificationTask, LanguageTask, SegmentationTask, Task

SyntheticTask = Literal["classification", "segmentation", "language"]


class RandomSamples(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are generated when they are read, from the seed and their index alone."""

    deterministic = True

    def __init__(self, source: SyntheticSource, num_samples: int, seed: int, length: int) -> None:
        self.source, self.num_samples, self.seed, self.length = source, num_samples, seed, length

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        source = self.source
        generator = torch.Generator().manual_seed(derive_seed(self.seed, index % len(self)))
        if source.kind == "language":
            tokens = torch.randint(source.vocabulary, (self.length + 1,), generator=generator)
            inputs, targets = tokens[:-1], tokens[1:].clone()
        else:
            inputs = torch.randn(source.input_shape, generator=generator)
            shape = source.input_shape[1:] if source.kind == "segmentation" else ()
            targets = torch.randint(source.num_classes, shape, generator=generator)
        if source.ignore_fraction:
            ignored = torch.rand(targets.shape, generator=generator) < source.ignore_fraction
            targets = targets.masked_fill(ignored, source.ignore_index)
        return inputs, targets


@dataclass(frozen=True, kw_only=True)
class SyntheticSource:
    """`synthetic`: images with a class, images with a class per pixel, or tokens."""

    path: Path | None = None
    kind: SyntheticTask = "classification"
    input_shape: tuple[PositiveCount, ...] = (3, 32, 32)
    """The shape of one input: (channels, height, width), or any shape for classification."""
    num_classes: PositiveCount = 10
    vocabulary: PositiveCount = 256
    """Number of different tokens, for the kind `language`."""
    length: PositiveCount | None = None
    """Tokens per sample, for `language`; by default the model's sequence length, or 128."""
    samples: PositiveCount = 1024
    validation_samples: NonNegativeCount = 0
    """Number of samples for validation; 0 for no validation."""
    ignore_fraction: SampleFraction = 0.0
    """Fraction of the targets that the loss ignores."""

    @property
    def ignore_index(self) -> int:
        """The value of an ignored target."""
        return 255 if self.kind == "segmentation" else -100

    def check(self) -> None:
        """Refuse, for segmentation, a shape without pixels, or more than 255 classes."""
        if self.kind != "segmentation":
            return
        if len(self.input_shape) < 2:
            raise ConfigError(
                f"data.args.input_shape={list(self.input_shape)}: segmentation needs channels "
                "and pixels. Set data.args.input_shape=[3,64,64]."
            )
        if self.num_classes > self.ignore_index:
            raise ConfigError(
                f"data.args.num_classes={self.num_classes}: class {self.ignore_index} marks the "
                f"pixels to ignore. Set data.args.num_classes={self.ignore_index} or less."
            )

    def prepare(self) -> None:
        """Do nothing: samples are generated, and there are no files to prepare."""

    def open(self, *, seed: int, sequence_length: int | None) -> Data:
        """Return samples that depend on the seed."""
        self.check()
        length = self.length or sequence_length or 128
        task: Task
        shape: tuple[int, ...]
        if self.kind == "language":
            task, shape = LanguageTask(self.vocabulary), (length,)
        elif self.kind == "segmentation":
            task, shape = SegmentationTask(self.num_classes), self.input_shape
        else:
            task, shape = ClassificationTask(self.num_classes), self.input_shape
        held_out = self.validation_samples
        return Data(
            train=RandomSamples(self, self.samples, derive_seed(seed, 0), length),
            validation=RandomSamples(self, held_out, derive_seed(seed, 1), length)
            if held_out
            else None,
            task=task,
            description=f"synthetic {self.kind}: {self.samples} samples of "
            f"{' x '.join(str(side) for side in shape)}",
        )
