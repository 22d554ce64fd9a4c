"""The average of an engine's weights; and the refusal to copy a model that a rank has in part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from bigtrain.core.strategy import Plan
from bigtrain.errors import BigtrainError
from bigtrain.tensors.shards import SavedTensor, StateTensor

AVERAGE_SUFFIX = ".moving_average"
"""The end of the names under which a checkpoint has averaged weights."""


class WeightAverage(Protocol):
    """An average of the weights: it follows each step, and checkpoints hold it."""

    @property
    def nbytes(self) -> int:
        """Bytes on this rank."""

    def update(self) -> None:
        """Follow a step that was taken."""

    def check_step(self) -> None:
        """Refuse a step that cannot be taken now."""

    def state(self) -> dict[str, StateTensor]:
        """The part on this rank, under the names of a checkpoint."""

    def load(self, saved: Mapping[str, SavedTensor]) -> None:
        """Read the part on this rank from a checkpoint, which may have no average."""


def holds_whole_model(plan: Plan) -> bool:
    """Whether each rank has all parameters, whole or in slices, between two steps."""
    return plan.pp == 1 and (plan.dp == 1 or plan.replicate.sharded_states < 3)


@contextmanager
def refuse_copies(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Refuse a deep copy of a model of which this rank has a part, as AveragedModel makes one.

    Args:
        model: an engine's model, after the strategy was applied.
        plan: the plan of the engine.
    """
    if holds_whole_model(plan) or "__deepcopy__" in vars(model):  # an engine refuses it by itself
        yield
        return

    def refuse(_memo: Any) -> None:
        raise BigtrainError(
            f"under strategy {plan.strategy.name} a rank has a part of the model, and a copy of "
            "it (copy.deepcopy, AveragedModel) would be of that part. "
            "bigtrain.ema(engine, decay=0.999) keeps an average, whatever the strategy."
        )

    model.__deepcopy__ = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        vars(model).pop("__deepcopy__", None)
