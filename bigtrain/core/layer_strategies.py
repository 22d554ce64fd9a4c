"""Techniques that decide something layer by layer: what each keeps, over which ranks it lies."""

from __future__ import annotations

from collections.abc import Mapping

from bigtrain.activations.policy import BlockPolicy
from bigtrain.core.strategy import Plan, Strategy
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
