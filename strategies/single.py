"""One process without any wrapper: the reference that every parity test compares with.

Memory: parameters, gradients and optimizer state once, and the activations of a micro-batch.
Communication: none.
Constraints: exactly one rank.
Example: python bigtrain/train.py --strategy single
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from bigtrain.core.strategy import Plan, Strategy
from bigtrain.core.traits import Traits
from bigtrain.core.variants import Shape, Variant
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Role


class Single(Strategy):
    """The model on one device, unchanged."""

    name: ClassVar[str] = "single"
    role: ClassVar[Role] = "replicate"
    summary: ClassVar[str] = "one process, nothing shared: the reference"

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`."""
        return Traits(final_gradients=True)

    def variants(self, shape: Shape) -> Iterable[Variant]:
        """See `Strategy.variants`."""
        if shape.dp == 1:
            yield Variant(self.name, {"name": self.name})

    def check(self, plan: Plan) -> None:
        """Refuse more than one replica."""
        if plan.dp > 1:
            raise ConfigError(
                f"strategy single runs on 1 rank, and {plan.dp} were started. "
                "Use --strategy ddp, or start one rank."
            )
