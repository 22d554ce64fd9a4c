"""The messages of fully_shard: all-gathers of units, and reductions of their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from bigtrain.core.strategy import Plan
from bigtrain.costs.traffic import OverlapPhase, Traffic
from bigtrain.devices import is_accelerator
from bigtrain.memory.timeline import BlockTicks
from bigtrain.strategies.zero.unit_choices import Reduce

Every = Literal["micro_batch", "step"]


class UnitTraffic:
    """The messages and transfers of a rank's units for one micro-batch.

    Parameters are gathered in the precision of the computation. BatchNorms are gathered in fp32,
    but are counted in the precision of the computation. Gradients are reduced in the precision of
    the shards. Layers outside of blocks are gathered once, also in stage 3. The recomputation of a
    block gathers nothing more.

    Args:
        units: the units with their parameters.
        plan: mesh, precision, offload.
        ranks: the number of ranks that share one copy of the states.
        shared_memory: whether the ranks exchange in shared memory.
    """

    def __init__(
        self, units: Sequence[BlockTicks], plan: Plan, ranks: int, *, shared_memory: bool
    ) -> None:
        self.units, self._shared_memory = units, shared_memory
        self._plan, self._ranks = plan, ranks
        self._shard_width = 8 if plan.precision == "fp64" else 4
        self._used_width = 2 if plan.bf16_parameters else self._shard_width
        self._away = plan.offload_tiers.parameters == "cpu" and is_accelerator(plan.device_type)

    def gathered(self, units: Sequence[BlockTicks], overlaps: OverlapPhase) -> list[Traffic]:
        """Return the all-gathers of units, and the copies of shards that are on the host."""
        messages = []
        if self._away and units:
            nbytes = sum(self._padded(u, self._shard_width) for u in units) // self._ranks
            calls = sum(len(u.shapes) for u in units)
            messages.append(Traffic("from_host", nbytes, calls, "micro_batch", overlaps))
        if self._ranks > 1 and units:
            nbytes = sum(self._padded(unit, self._used_width) for unit in units)
            messages.append(self._exchange("all_gather", nbytes, len(units), overlaps))
            messages.append(_copied(nbytes // self._ranks, overlaps))
            messages.append(_copied(nbytes, "nothing"))
        return messages

    def reduced(self, choice: Reduce) -> list[Traffic]:
        """Return the reduce-scatters, the all-reduces between replicas, and copies to the host."""
        scattered: Every = "step" if choice == "step" else "micro_batch"
        averaged: Every = "micro_batch" if choice == "micro_batch" else "step"
        units = [unit for unit in self.units if any(unit.trained)]
        nbytes = sum(self._padded(unit, self._shard_width, trained=True) for unit in units)
        shard, messages = nbytes // self._ranks, []
        if self._ranks > 1 and units:
            calls = len(units)
            exchange = self._exchange("reduce_scatter", nbytes, calls, "backward")
            messages += [
                replace(message, every=scattered)
                for message in (exchange, _copied(nbytes, "nothing"))
            ]
        groups = self._plan.dp // self._ranks
        if groups > 1 and units:
            stride = self._ranks * self._plan.pp * self._plan.tp
            calls = len(units)
            messages.append(
                Traffic("all_reduce", shard, calls, averaged, "backward", groups, stride)
            )
        if self._away and units:
            calls = sum(sum(unit.trained) for unit in units)
            messages.append(Traffic("to_host", shard, calls, averaged, "backward"))
        return messages

    def _exchange(
        self,
        kind: Literal["all_gather", "reduce_scatter"],
        nbytes: int,
        calls: int,
        overlaps: OverlapPhase,
    ) -> Traffic:
        stride = self._plan.pp * self._plan.tp
        return Traffic(
            kind,
            nbytes,
            calls,
            every="micro_batch",
            overlaps=overlaps,
            ranks=self._ranks,
            stride=stride,
            in_hooks=True,
            shared_memory=self._shared_memory,
        )

    def _padded(self, unit: BlockTicks, width: int, *, trained: bool = False) -> int:
        """Return the bytes of a unit with padding: each rank has as many rows as the first.

        Args:
            unit: the unit.
            width: the bytes of an element that is not packed.
            trained: whether only trained parameters are counted.
        """
        widths = unit.widths(width, width)
        return self._ranks * sum(
            nbytes * (math.ceil(shape[0] / self._ranks) * math.prod(shape[1:]) if shape else 1)
            for shape, nbytes, wanted in zip(unit.shapes, widths, unit.trained, strict=True)
            if wanted or not trained
        )


def _copied(nbytes: int, overlaps: OverlapPhase) -> Traffic:
    """Return the copies into or out of the buffer of an exchange.

    fully_shard copies shards into the buffer of an all-gather in a stream of its own. It copies
    gathered parameters, and gradients, in the stream that computes: these overlap with nothing.
    """
    return Traffic("copy", nbytes, 0, "micro_batch", overlaps)
