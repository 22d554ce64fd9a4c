"""A sampler that splits the remaining samples of an epoch among the current number of ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from bigtrain.hvd.session import rank, size


class ElasticSampler(Sampler[int]):
    """A `DistributedSampler` that skips the samples of the epoch that are recorded as processed.

    Give it to a `TorchState`, call `record_batch` after each batch, and call `set_epoch` at the
    *end* of an epoch. If the number of remaining samples does not divide by the ranks, the first of
    them are repeated.

    Args:
        dataset: a dataset of constant length.
        shuffle: whether to draw a new order for each epoch.
        seed: the seed of the order; the same on every rank.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch with all of its samples."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002 - Horovod's
        """Record that every rank has processed a batch.

        Args:
            batch_idx: not used.
            batch_size: the samples of the batch on each rank.
        """
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and the number of its samples that all ranks have processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state that `state_dict` returned, with the current number of ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Split the remaining samples of the epoch among the ranks."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        order = list(self.remaining_indices)
        while order and len(order) < self.total_size:
            order += order[: self.total_size - len(order)]
        return iter(order[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
