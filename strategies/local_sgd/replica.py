"""One replica: the plain loop, with its own optimizer, that agrees with the others now and then."""

from __future__ import annotations

from collections.abc import Mapping

from bigtrain.core.loop import LoopRunner
from bigtrain.core.strategy import Assembly
from bigtrain.strategies.local_sgd.outer import Outer, OuterSettings
from bigtrain.tensors.shards import SavedTensor, StateTensor


class Replica(LoopRunner):
    """The plain loop; gradients stay with it, and their norm is its own."""

    def __init__(self, assembly: Assembly, settings: OuterSettings) -> None:
        super().__init__(assembly)
        self._outer = Outer(assembly.trained(), assembly.context, settings)
        assembly.meter.label(self._outer.resident_tensors(), "optimizer")
        self._prefix = f"replicas.{assembly.context.dp_rank}."

    def apply_step(self) -> None:
        """See `StepRunner.apply_step`; then what is due with the other replicas."""
        super().apply_step()
        self._outer.after_step()

    def state(self) -> dict[str, StateTensor]:
        """See `Runner.state`: the first replica's, what the others have of their own, the outer.

        What they have as the first one is left out: parameters right after an agreement.
        """
        own, outer = super().state(), self._outer.state()
        if self.context.dp_rank == 0:
            return own | outer
        every = self.module.named_parameters(remove_duplicate=False)
        alike = {f"model.{name}" for name, _ in every}
        kept = own if self._outer.differs else {n: t for n, t in own.items() if n not in alike}
        return {self._prefix + name: tensor for name, tensor in kept.items()} | outer

    def load_state(self, saved: Mapping[str, SavedTensor]) -> None:
        """See `Runner.load_state`; who is not in the checkpoint begins as the first replica."""
        mine = {
            name.removeprefix(self._prefix): tensor
            for name, tensor in saved.items()
            if name.startswith(self._prefix)
        }
        super().load_state({**saved, **mine})
        self._outer.load_state(saved)
