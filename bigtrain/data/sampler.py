"""The order of the samples: one global sequence, and each rank's share of a step.

The sequence depends on the number of samples, on the seed, and on whether the samples are shuffled.
With `drop_last` it also depends on the global batch size. A position in the sequence is counted in
global samples. So a run that is resumed with other ranks, micro-batches or, without `drop_last`,
another batch size continues the sequence exactly. The sequence is never stored: each position is
computed, in memory that does not grow with the data set.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bigtrain.errors import ConfigError

_ROUNDS = 8


def derive_seed(*parts: int) -> int:
    """Return a 64-bit seed that depends on all the parts and nothing else."""
    text = ",".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _scramble(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread each 64-bit value over all its bits (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permute_indices(positions: npt.ArrayLike, size: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the values of a pseudo-random permutation of 0..size-1 at some positions.

    The permutation is a Feistel network over a table of about sqrt(size) x sqrt(size) cells: rounds
    alternately shift the row by a hash of the column and the column by a hash of the row, and each
    round can be inverted. The table may have a few cells more than `size`. A position that is
    mapped to one of them goes through the network again until it is below `size` (cycle walking).

    Args:
        positions: integers in 0..size-1.
        size: the number of elements that are permuted.
        seed: chooses the permutation.
    """
    rows = np.uint64(math.isqrt(max(size - 1, 0)) + 1)
    columns = np.uint64(-(-size // int(rows)))
    keys = [np.uint64(derive_seed(seed, number)) for number in range(_ROUNDS)]

    def walk(cells: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        row, column = cells // columns, cells % columns
        for number, key in enumerate(keys):
            if number % 2:
                column = (column + _scramble(row ^ key) % columns) % columns
            else:
                row = (row + _scramble(column ^ key) % rows) % rows
        return row * columns + column

    cells = walk(np.atleast_1d(np.asarray(positions, dtype=np.uint64)))
    while (outside := cells >= np.uint64(size)).any():
        cells[outside] = walk(cells[outside])
    return cells.astype(np.int64)


class GlobalBatch(NamedTuple):
    """The samples of one step over all ranks."""

    epoch: int
    """The epoch, counted from 0."""
    indices: list[int]
    """Indices of the samples in the data set."""


@dataclass(frozen=True)
class GlobalOrder:
    """The endless sequence of samples, epoch after epoch, cut into global batches.

    Every sample occurs once per epoch. No batch spans two epochs, so the last batch of an epoch may
    be smaller. With `drop_last`, samples that do not fill a batch are left out of that epoch.

    Raises:
        ConfigError: there are no samples, the batch size is below 1, or there are fewer samples
            than one batch under `drop_last`.
    """

    num_samples: int
    global_batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ConfigError(
                f"data.path: the training set has {self.num_samples} samples, at least 1 is "
                "needed. Point data.path to a data set."
            )
        if self.global_batch_size < 1:
            raise ConfigError(
                f"train.global_batch_size={self.global_batch_size}: at least 1 is needed. "
                "Set train.global_batch_size=1 or more."
            )
        if self.samples_per_epoch < 1:
            raise ConfigError(
                f"train.global_batch_size={self.global_batch_size} is more than the "
                f"{self.num_samples} samples of an epoch, and incomplete batches are dropped. "
                f"Set train.global_batch_size={self.num_samples} or less."
            )

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in an epoch, over all ranks."""
        left_out = self.num_samples % self.global_batch_size if self.drop_last else 0
        return self.num_samples - left_out

    @property
    def steps_per_epoch(self) -> int:
        """Number of global batches in an epoch, including a smaller last batch."""
        return -(-self.samples_per_epoch // self.global_batch_size)

    def batch_at(self, samples_seen: int) -> GlobalBatch:
        """Return the global batch after the first `samples_seen` global samples.

        The next position is `samples_seen + len(indices)`.
        """
        epoch, start = divmod(samples_seen, self.samples_per_epoch)
        stop = min(start + self.global_batch_size, self.samples_per_epoch)
        positions = range(start, stop)
        if not self.shuffle:
            return GlobalBatch(epoch, list(positions))
        places = permute_indices(positions, self.num_samples, derive_seed(self.seed, epoch))
        return GlobalBatch(epoch, [int(sample) for sample in places])


class MicroBatchPlan(NamedTuple):
    """The samples of one micro-batch of one rank; padding must not contribute to the loss."""

    indices: Sequence[int]
    padding: bool = False


def split_global_batch(
    indices: Sequence[int], dp_rank: int | None, dp_size: int, micro_batch_size: int
) -> list[MicroBatchPlan]:
    """Return one rank's micro-batches of a global batch.

    The ranks get contiguous, nearly equal parts of the rows, and a part is cut into micro-batches
    of at most `micro_batch_size` rows. Every rank gets the same number of micro-batches, because
    all ranks gather sharded parameters at every forward pass: a rank with fewer gets padding.
    Apart from padding, the micro-batches of all ranks are together exactly the global batch.

    A micro-batch of padding has the first `micro_batch_size` samples of the batch, so that compiled
    code gets no new shape, and so that the running statistics of BatchNorm, which every forward
    pass updates, do not count one sample many times.

    Args:
        indices: indices of the global batch's samples.
        dp_rank: this rank's index among the ranks with different samples; None for a rank that
            computes no loss, which gets one micro-batch of padding.
        dp_size: number of ranks with different samples.
        micro_batch_size: largest number of rows in a micro-batch.
    """
    padding = MicroBatchPlan(indices[:micro_batch_size], padding=True)
    if dp_rank is None:
        return [padding]
    total = len(indices)
    start, stop = dp_rank * total // dp_size, (dp_rank + 1) * total // dp_size
    plans = [
        MicroBatchPlan(indices[at : min(at + micro_batch_size, stop)])
        for at in range(start, stop, micro_batch_size)
    ]
    largest_part = -(-total // dp_size)
    missing = -(-largest_part // micro_batch_size) - len(plans)
    return plans + [padding] * missing
