"""scikit-learn's handwritten digits: a real task that needs no download."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from bigtrain.data.sampler import permute_indices
from bigtrain.data.source import Data, PositiveCount, TensorSamples
from bigtrain.errors import ConfigError
from bigtrain.losses.tasks import ClassificationTask

# The mean and deviation of all pixels, scaled to [0, 1]. They are rounded, because inputs need
# only be near mean 0 and deviation 1.
_MEAN, _DEVIATION = 0.305, 0.376
_SPLIT_SEED = 0


@dataclass(frozen=True, kw_only=True)
class DigitsSource:
    """`digits`: 1797 gray images of 8 x 8 pixels, as inputs (1, size, size), in ten classes."""

    path: Path | None = None
    size: PositiveCount = 32
    """Pixels on a side after resizing; LeNet takes 32."""

    def check(self) -> None:
        """Refuse if scikit-learn is missing."""
        if importlib.util.find_spec("sklearn") is None:
            raise ConfigError(
                "data.name=digits needs scikit-learn, which is not installed. "
                'Run: pip install "bigtrain[digits]"'
            )

    def prepare(self) -> None:
        """Do nothing: the images come with the package."""

    def open(self, *, seed: int, sequence_length: int | None) -> Data:
        """Return four fifths of the images for training, and the rest for validation.

        The split does not depend on the seed.
        """
        del seed, sequence_length
        self.check()
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        images = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8) / 16
        if self.size != 8:
            images = F.interpolate(images, size=(self.size, self.size), mode="bilinear")
        images = (images - _MEAN) / _DEVIATION
        targets = torch.from_numpy(labels).long()
        order = torch.from_numpy(permute_indices(range(len(targets)), len(targets), _SPLIT_SEED))
        cut = len(order) * 4 // 5
        train, rest = order[:cut], order[cut:]
        return Data(
            train=TensorSamples(images[train], targets[train]),
            validation=TensorSamples(images[rest], targets[rest]),
            task=ClassificationTask(10),
            baseline={"top1": float(targets[rest].bincount().max()) / len(rest)},
            description=f"digits: {len(train)} images of {self.size} x {self.size}, "
            f"{len(rest)} held out",
        )
