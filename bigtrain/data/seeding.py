"""Random augmentation that depends on (seed, epoch, sample) and on nothing else.

Which rank or loading process reads a sample changes with the mesh; what the model sees must
not. So each sample is read with torch's CPU generator, Python's and numpy's set from these three
numbers, and they are put back afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from bigtrain.data.sampler import derive_seed
from bigtrain.data.source import Samples

SampleKey = tuple[int, int]
"""Epoch and index of a sample."""


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generators that a transform may draw from, for the length of a `with` block."""
    python, others = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would also reset the accelerator's generators, and
        # with them every dropout mask of a run that reads in the training process.
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(others)


class SeededSamples(Dataset[Any]):
    """A data set read by (epoch, index), each sample under its own seed.

    A data set that says `deterministic = True` draws no random numbers; it is read without
    seeding, and through its `__getitems__` if it has one.
    """

    def __init__(self, samples: Samples, seed: int) -> None:
        self.samples = samples
        self.seed = seed

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: SampleKey) -> Any:
        epoch, index = key
        if getattr(self.samples, "deterministic", False):
            return self.samples[index]
        with _seeded(derive_seed(self.seed, epoch, index)):
            return self.samples[index]

    def __getitems__(self, keys: Sequence[SampleKey]) -> list[Any]:
        many = getattr(self.samples, "__getitems__", None)
        if many is not None and getattr(self.samples, "deterministic", False):
            return list(many([index for _, index in keys]))
        return [self[key] for key in keys]
