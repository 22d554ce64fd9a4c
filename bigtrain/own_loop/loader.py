"""Loaders for a custom loop, which give each rank its rows of each global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from bigtrain.data.loader import Collate, MicroBatch, Step, StepLoader, validation_batches
from bigtrain.data.sampler import GlobalOrder
from bigtrain.errors import ConfigError
from bigtrain.own_loop.evaluation import as_pair


class LoopLoader:
    """Loads the steps of an epoch for `engine.step`, from the position of training on.

    The order of the samples depends only on the seed and the epoch, and the position is a number of
    samples in this order. So a run that resumes with another strategy, or on another number of
    ranks, continues with the next sample.

    Args:
        order: the global order of the samples.
        position: returns the number of samples of the order that are done.
        read: makes the loader of this rank's steps from a position on.
    """

    def __init__(
        self,
        order: GlobalOrder,
        position: Callable[[], int],
        read: Callable[[int], StepLoader],
    ) -> None:
        self._order, self._position, self._read = order, position, read

    @property
    def epoch(self) -> int:
        """The number of the current epoch, from 0."""
        return self._position() // self._order.samples_per_epoch

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch."""
        return self._order.steps_per_epoch

    def __iter__(self) -> Iterator[Step]:
        """Yield the remaining steps of the epoch."""
        for step in self._read(self._position()):
            yield step
            if step.last_in_epoch:
                return


class EvaluationLoader:
    """Loads the rows of a data set for `engine.evaluate`, in order, each row on one data rank.

    Args:
        read: makes the micro-batches of this rank, of which all ranks have the same number.
        batches: the number of these micro-batches.
    """

    def __init__(self, read: Callable[[], Iterator[MicroBatch]], batches: int) -> None:
        self._read, self._batches = read, batches

    def __len__(self) -> int:
        """Return the number of batches on each rank."""
        return self._batches

    def __iter__(self) -> Iterator[MicroBatch]:
        """Return an iterator over all batches of this rank."""
        return self._read()


class _Pairs:
    """A collate function that refuses results other than (inputs, targets)."""

    def __init__(self, collate: Collate | None) -> None:
        self._collate = collate or default_collate

    def __call__(self, samples: Any) -> tuple[Any, Any]:
        return as_pair(self._collate(samples), "loader")


def check_dataset(dataset: Any) -> None:
    """Refuse a data set that is not map-style.

    Raises:
        ConfigError: the data set lacks `len` or `dataset[i]`; the message has the code to use
            instead.
    """
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            "loader: got a DataLoader, and a data set is needed: engine.loader(loader.dataset, "
            "collate_fn=...). A custom DataLoader needs "
            "sampler=DistributedSampler(dataset, num_replicas=engine.context.dp_size, "
            "rank=engine.context.dp_rank), and goes to engine.step batch by batch."
        )
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        raise ConfigError(
            f"loader: a {type(dataset).__name__} has no dataset[i] and len(dataset), which are "
            "needed to divide rows among ranks and to resume. Give a map-style data set; or read "
            "the stream by a custom DataLoader that skips the rows of other ranks "
            "(engine.context.dp_rank of engine.context.dp_size)."
        )


def make_loader(
    dataset: Any,
    order: GlobalOrder,
    position: Callable[[], int],
    *,
    training: bool,
    collate_fn: Collate | None,
    **layout: Any,
) -> LoopLoader | EvaluationLoader:
    """Make a loader of the steps of training, or of the micro-batches of an evaluation.

    Args:
        dataset: a map-style data set.
        order: see `LoopLoader`.
        position: see `LoopLoader`.
        training: whether the loader is for training; False for evaluation.
        collate_fn: makes (inputs, targets) of a list of samples; None stacks the samples.
        layout: further arguments of `StepLoader`.
    """
    collate = _Pairs(collate_fn)
    if training:
        return LoopLoader(
            order,
            position,
            lambda seen: StepLoader(dataset, order, samples_seen=seen, collate=collate, **layout),
        )
    rows = -(-len(dataset) // layout["dp_size"])
    return EvaluationLoader(
        lambda: validation_batches(dataset, collate=collate, seed=order.seed, **layout),
        -(-rows // layout["micro_batch_size"]),
    )
