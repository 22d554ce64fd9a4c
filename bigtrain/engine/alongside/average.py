"""The interface of an average of weights; and the refusal to copy a model that is divided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from bigtrain.core.strategy import Plan
from bigtrain.errors import BigtrainError
from bigtrain.tensors.shards import SavedTensor, StateTensor

AVERAGE_SUFFIX = ".moving_average"
"""The end of the names of averaged weights in a checkpoint."""


class WeightAverage(Protocol):
    """An average of an engine's weights, which each step updates and each checkpoint contains."""

    @property
    def nbytes(self) -> int:
        """Bytes of the average on this rank."""

    def update(self) -> None:
        """Update the average after a step of the engine."""

    def check_step(self) -> None:
        """Refuse a step of the engine while the average does not allow one.

        Raises:
            BigtrainError: the average does not allow a step.
        """

    def state(self) -> dict[str, StateTensor]:
        """Return the part of the average on this rank, under the names of a checkpoint."""

    def load(self, saved: Mapping[str, SavedTensor]) -> None:
        """Load the part of the average on this rank.

        Args:
            saved: the tensors of a checkpoint, by name; it may have no average.
        """


def holds_whole_model(plan: Plan) -> bool:
    """Whether each rank has all parameters, whole or in slices, between two steps."""
    return plan.pp == 1 and (plan.dp == 1 or plan.replicate.sharded_states < 3)


@contextmanager
def refuse_copies(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Refuse deep copies of a model in a `with` block, if this rank has only a part of the model.

    `torch.optim.swa_utils.AveragedModel`, for example, makes a deep copy.

    Args:
        model: an engine's model, after the strategy was applied.
        plan: the plan of the engine.
    """
    # With such an attribute of the instance, the engine in use refuses copies itself.
    if holds_whole_model(plan) or "__deepcopy__" in vars(model):
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
