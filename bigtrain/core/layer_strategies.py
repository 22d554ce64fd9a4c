"""Techniques that decide something layer by layer: what each keeps, over which ranks it lies."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

from bigtrain.activations.policy import BlockPolicy
from bigtrain.core.strategy import Assembly, Plan, Strategy
from bigtrain.core.workload import Workload
from bigtrain.slicing.state import ModelSlices


class RecomputeStrategy(Strategy):
    """A technique that lets blocks keep less."""

    def limit(self, plan: Plan) -> int | None:  # noqa: ARG002
        """The most bytes that a rank may hold, where the choice of each block is to follow that."""
        return None

    def with_policies(self, blocks: Mapping[str, BlockPolicy]) -> RecomputeStrategy:
        """The same technique with a choice for each block, and no limit."""
        raise NotImplementedError


class SliceStrategy(Strategy):
    """A technique that lays each layer over the ranks of the tp axis."""

    replaces_layers: ClassVar[bool] = False
    """Its engine's layers stand in for the model's own, whose code sees what one rank has; else
    that code sees whole tensors."""

    def replace_layers(self, assembly: Assembly, closing: ExitStack) -> dict[str, Any]:
        """Put the engine's layers into a model that holds this rank's slices. Collective.

        Args:
            assembly: its model has values.
            closing: takes what is to be undone at the end.

        Returns:
            What the engine is to be told of it.
        """
        raise NotImplementedError

    def most_ranks(self, workload: Workload) -> int:
        """Over how many ranks something of the model can be sliced; 1: over none.

        Args:
            workload: with an example.
        """
        raise NotImplementedError

    def lay_slices(self, workload: Workload, plan: Plan) -> ModelSlices:
        """Choose how parameters lie. Needs no process group, and is the same on all ranks.

        Args:
            workload: with an example.
            plan: mesh, batch, precision.

        Raises:
            ConfigError: nothing of the model can be sliced so.
        """
        raise NotImplementedError
