"""A data set for a custom loop: each rank's rows of each global batch, and the position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from bigtrain.data.loader import Collate, MicroBatch, Step, StepLoader, validation_batches
from bigtrain.data.sampler import GlobalOrder
from bigtrain.errors import ConfigError
from bigtrain.own_loop.evaluation import as_pair


class LoopLoader:
    """The steps of an epoch, for `engine.step`; each iteration begins at the position of training.

    The order depends on the seed and the epoch alone, and the position is counted in samples of
    the global order. So a run that resumes under another strategy, or on another number of ranks,
    continues with the next sample.

    Args:
        order: the global order.
        position: returns how many samples of it are done.
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
        """The number of the current epoch, from 0."""
        return self._position() // self._order.samples_per_epoch

    def __len__(self) -> int:
        """The number of steps in an epoch."""
        return self._order.steps_per_epoch

    def __iter__(self) -> Iterator[Step]:
        """The remaining steps of the epoch."""
        for step in self._read(self._position()):
            yield step
            if step.last_in_epoch:
                return


class EvaluationLoader:
    """The rows of a data set in order, each once over all ranks, for `engine.evaluate`.

    Args:
        read: makes the micro-batches of this rank, whose number is the same on every rank.
        batches: their number.
    """

    def __init__(self, read: Callable[[], Iterator[MicroBatch]], batches: int) -> None:
        self._read, self._batches = read, batches

    def __len__(self) -> int:
        """The number of batches on each rank."""
        return self._batches

    def __iter__(self) -> Iterator[MicroBatch]:
        """All batches, from the first row."""
        return self._read()


class _Pairs:
    """A collate function whose result must be (inputs, targets)."""

    def __init__(self, collate: Collate | None) -> None:
        self._collate = collate or default_collate

    def __call__(self, samples: Any) -> tuple[Any, Any]:
        return as_pair(self._collate(samples), "loader")


def check_dataset(dataset: Any) -> None:
    """Refuse a data set without `len` or without `dataset[i]`.

    Raises:
        ConfigError: with the code to use instead.
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
    """Make a loader of a data set: of training steps, or of micro-batches to evaluate.

    Args:
        dataset: map-style.
        order: see `LoopLoader`.
        position: see `LoopLoader`.
        training: False for evaluation.
        collate_fn: makes (inputs, targets) of a list of samples; None stacks them.
        layout: see `StepLoader`.
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
