"""The runner of one replica: the plain loop, whose checkpoint has the state of every replica."""

from __future__ import annotations

from collections.abc import Mapping

from bigtrain.core.loop import LoopRunner
from bigtrain.core.state import replica_state, state_of_replica
from bigtrain.core.strategy import Assembly
from bigtrain.strategies.local_sgd.outer import Outer
from bigtrain.tensors.shards import SavedTensor, StateTensor


class Replica(LoopRunner):
    """The plain loop. Its gradients, and their norm, are those of this replica alone.

    Args:
        assembly: its `after_update` calls `outer.after_step`.
        outer: the agreement with the other replicas; its state is saved with this one's.
    """

    def __init__(self, assembly: Assembly, outer: Outer) -> None:
        super().__init__(assembly)
        self._outer = outer
        assembly.meter.label(outer.resident_tensors(), "optimizer")

    def state(self) -> dict[str, StateTensor]:
        """Return this replica's state, named by `replica_state`, and the outer state.

        The outer state is the same on all replicas. Where the parameters are too, right after an
        agreement, only the first replica saves them.
        """
        state = super().state()
        replica = self.context.dp_rank
        if replica > 0 and not self._outer.differs:
            for name, _ in self.module.named_parameters(remove_duplicate=False):
                state.pop(f"model.{name}", None)
        return replica_state(state, replica) | self._outer.state()

    def load_state(self, saved: Mapping[str, SavedTensor]) -> None:
        """Load this replica's state and the outer state; see `state_of_replica`."""
        super().load_state(state_of_replica(saved, self.context.dp_rank))
        self._outer.load_state(saved)
