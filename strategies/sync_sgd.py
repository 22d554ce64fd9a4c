"""Replicas as in MPI programs: after the backward pass one all-reduce of every gradient.

This is the baseline for all other kinds of replicas: nothing overlaps with the backward pass, and
gradients are not put into buckets. Rank 0's weights are broadcast once, before the first step.

Memory: the same as in one process. Each gradient is averaged in place.
Communication: one all-reduce of each gradient in a step, whatever the number of micro-batches. Each
rank sends and receives 2 (n-1)/n of the gradients' bytes (ring). Rank 0's buffers are broadcast.
Constraints: none. `mesh.backend=mpi` works if torch is built with MPI.
Example: mpiexec -n 2 python bigtrain/train.py --strategy sync_sgd

Source: Chen et al. 2016, Revisiting Distributed Synchronous SGD (arXiv 1604.00981), section 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch.distributed as dist

from bigtrain.core.replicas import GradientAverager
from bigtrain.core.strategy import Assembly, Plan, Strategy
from bigtrain.core.traits import SPARSE, Need, Traits
from bigtrain.core.variants import Shape, Variant
from bigtrain.costs.forecast import Profile
from bigtrain.costs.traffic import Traffic, gradient_average_traffic
from bigtrain.job.schema import Role

_ONE_BY_ONE = 1
"""The size of a bucket, one byte: every gradient is larger, so each is averaged by itself."""


class SyncSGD(Strategy):
    """One all-reduce of each gradient, one after the other."""

    name: ClassVar[str] = "sync_sgd"
    role: ClassVar[Role] = "replicate"
    summary: ClassVar[str] = "replicas; each gradient averaged by itself after the backward pass"

    @property
    def need(self) -> Need:
        """See `Strategy.need`: `ddp` does the same in less time."""
        return "learning"

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`."""
        return Traits(averaging_bucket=_ONE_BY_ONE, cannot_hold=SPARSE)

    def variants(self, shape: Shape) -> Iterable[Variant]:  # noqa: ARG002
        """Return no variant: `ddp` sends the same in fewer messages, during the backward pass."""
        return ()

    def traffic(self, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
        """Return one all-reduce for each gradient, after all passes of a step."""
        if plan.dp == 1:
            return ()
        stride = plan.pp * plan.tp
        return gradient_average_traffic(
            profile, plan.dp, stride, bucket=_ONE_BY_ONE, overlaps=False
        )

    def apply(self, assembly: Assembly) -> None:
        """Broadcast rank 0's weights and buffers; average after all micro-batches of a step."""
        if assembly.plan.dp == 1:
            return
        context = assembly.context
        tensors = [t for root in assembly.roots for t in (*root.parameters(), *root.buffers())]
        for tensor in {id(t): t.detach() for t in tensors}.values():  # a shared tensor is sent once
            dist.broadcast(tensor, group=context.dp_group, group_src=0)
        buffers = [buffer for root in assembly.roots for buffer in root.buffers()]
        assembly.average = GradientAverager(context, _ONE_BY_ONE, buffers)
