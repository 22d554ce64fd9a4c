"""Stage 1 on PyTorch's own parts: DDP averages the gradients, each rank updates its share.

The shares are equal stretches of the parameters laid end to end, updated in place and broadcast
in place (see `bigtrain.pieces`), so there is no second copy of anything: 8P + 8P/N bytes in fp32,
4P + 12P/N in bf16, where the one fp32 copy of a parameter lies with the rank that updates it.
torch's ZeroRedundancyOptimizer gives whole parameters to ranks and is never better balanced.
"""

from __future__ import annotations

from bigtrain.forecast import Forecast, Profile
from bigtrain.pieces import PiecewiseUpdate, Replicas
from bigtrain.precision import low_precision_names
from bigtrain.replicas import Sync, wrap
from bigtrain.strategies.zero.options import ZeroEngine, ZeroOptions
from bigtrain.strategy import Assembly, Plan
from bigtrain.units import MIB


class ShardedOptimizer(ZeroEngine):
    """Optimizer state and fp32 copies sharded; parameters and gradients on every rank."""

    bf16_parameters = True

    def estimate(
        self, options: ZeroOptions, forecast: Forecast, profile: Profile, plan: Plan
    ) -> Forecast:
        """A rank's share of the optimizer state, and DDP's buckets for the gradients."""
        return forecast

    def apply(self, options: ZeroOptions, assembly: Assembly) -> None:
        """Cut the update into pieces, then let DDP average the gradients."""
        context = assembly.context
        trained = {n: p for n, p in assembly.model.named_parameters() if p.requires_grad}
        low = low_precision_names(assembly.model) if assembly.plan.bf16_parameters else []
        # Before the wrapper exists: the pieces take the fp32 values, and DDP sees bf16 ones.
        assembly.update = PiecewiseUpdate(
            trained,
            assembly.make_optimizer,
            replicas=Replicas(context.dp_rank, context.dp_size, context.dp_group),
            home=assembly.home,
            low=[name for name in low if name in trained],
        )
        if assembly.plan.dp == 1:
            return
        wrapped = wrap(assembly.module, context, bucket_size=options.bucket_size or 25 * MIB)
        assembly.module = wrapped
        assembly.sync = Sync(wrapped)
        assembly.keep_gradients = assembly.plan.batch.accumulation_steps > 1
