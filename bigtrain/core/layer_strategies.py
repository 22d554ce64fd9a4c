"""Techniques with a choice for each layer: which activations it saves, or how it is sliced."""

from __future__ import annotations

from collections.abc import Mapping

from bigtrain.activations.policy import BlockPolicy
from bigtrain.core.strategy import Plan, Strategy
from bigtrain.core.workload import Workload
from bigtrain.slicing.state import ModelSlices


class RecomputeStrategy(Strategy):
    """A technique by which blocks save less for the backward pass."""

    def limit(self, plan: Plan) -> int | None:  # noqa: ARG002
        """The budget of a rank in bytes, by which block policies are chosen; None without one."""
        return None

    def with_policies(self, blocks: Mapping[str, BlockPolicy]) -> RecomputeStrategy:
        """Return the same technique with a policy for each block, and no budget."""
        raise NotImplementedError


class SliceStrategy(Strategy):
    """A technique that slices layers over the ranks of the tp axis."""

    def most_ranks(self, workload: Workload) -> int:
        """The largest tp size; 1 if nothing can be sliced.

        Args:
            workload: a workload with an example.
        """
        raise NotImplementedError

    def lay_slices(self, workload: Workload, plan: Plan) -> ModelSlices:
        """Choose the slices of parameters. Needs no process group; the same result on all ranks.

        Args:
            workload: a workload with an example.
            plan: the plan of the run; its mesh, batch and precision are read.

        Raises:
            ConfigError: no layer of the model can be sliced over so many ranks.
        """
        raise NotImplementedError
