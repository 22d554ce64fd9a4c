"""A data set for a loop of one's own: each rank's rows of each global batch, and the position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from bigtrain.data.loader import Collate, MicroBatch, Step, StepLoader, validation_batches
from bigtrain.data.sampler import GlobalOrder
from bigtrain.errors import ConfigError
from bigtrain.own_loop.evaluation import as_pair


class LoopLoader:
    """The steps of an epoch, for `engine.step`; iterating anew goes on where training is.

    The order depends on the seed and the epoch alone, and the position is counted in samples of
    the global order. So a run that goes on from a checkpoint, under another strategy or on another
    number of ranks, goes on with the next sample.

    Args:
        dataset: `dataset[i]` is (input, target).
        order: the global order.
        position: how many samples of it are done.
        read: makes the steps of this rank from a position.
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
        """Passes over the data set that are done: the number of the one that comes, from 0."""
        return self._position() // self._order.samples_per_epoch

    def __len__(self) -> int:
        """Steps of a whole epoch."""
        return self._order.steps_per_epoch

    def __iter__(self) -> Iterator[Step]:
        """What is left of the epoch."""
        for step in self._read(self._position()):
            yield step
            if step.last_in_epoch:
                return


class EvaluationLoader:
    """The rows of a data set in order, each once over all ranks, for `engine.evaluate`.

    Args:
        read: makes this rank's micro-batches, as many on every rank.
        batches: how many.
    """

    def __init__(self, read: Callable[[], Iterator[MicroBatch]], batches: int) -> None:
        self._read, self._batches = read, batches

    def __len__(self) -> int:
        """Batches on each rank."""
        return self._batches

    def __iter__(self) -> Iterator[MicroBatch]:
        """From the first row on."""
        return self._read()


class _Pairs:
    """A collate function whose result is checked to be (inputs, targets)."""

    def __init__(self, collate: Collate | None) -> None:
        self._collate = collate or default_collate

    def __call__(self, samples: Any) -> tuple[Any, Any]:
        return as_pair(self._collate(samples), "loader")


def check_dataset(dataset: Any) -> None:
    """Refuse what has no length and no places.

    Raises:
        ConfigError: with what to use in its place.
    """
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            "loader: got a DataLoader, and a data set is needed: engine.loader(loader.dataset, "
            "collate_fn=...). A DataLoader of your own needs "
            "sampler=DistributedSampler(dataset, num_replicas=engine.context.dp_size, "
            "rank=engine.context.dp_rank), and goes to engine.step batch by batch."
        )
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        raise ConfigError(
            f"loader: a {type(dataset).__name__} has no dataset[i] and len(dataset), by which rows "
            "are dealt out and a run goes on where it was. Give a map-style data set; or read the "
            "stream by a DataLoader of your own that skips the rows of other ranks "
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
    """The loader of a data set: of steps, or of micro-batches to evaluate.

    Args:
        dataset: map-style.
        order: see `LoopLoader`.
        position: see `LoopLoader`.
        training: False for evaluation.
        collate_fn: makes (inputs, targets) of a list of samples; None stacks them.
        layout: of `StepLoader`.
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
