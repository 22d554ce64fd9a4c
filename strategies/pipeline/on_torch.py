"""Stages on the ranks of the pp axis, on the schedules of torch.distributed.pipelining.

There is one stage on a rank, or several with the interleaved and the V-shaped schedules. Replicas
may average gradients as DDP does, or use ZeRO on torch at any of its stages.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from bigtrain.core.runner import Runner
from bigtrain.core.strategy import Assembly, Plan
from bigtrain.core.traits import SPARSE, CutTraits, Oddity
from bigtrain.costs.rank_replay import RankActions
from bigtrain.errors import ConfigError
from bigtrain.schedules.in_flight import in_flight_by_stage
from bigtrain.schedules.orders import (
    SPLIT_BACKWARD_SCHEDULES,
    check_schedule,
    rank_order,
    stage_ranks,
)
from bigtrain.schedules.transfers import backward_starts, transfers
from bigtrain.strategies.pipeline import Pipeline, refuse_no_ranks, refuse_wrong_places
from bigtrain.versions.torch_versions import SPLITS_BACKWARD, TORCH


class TorchPipeline(Pipeline):
    """Runs the stages of a rank by `PipelineRunner`, on a schedule of torch."""

    @cached_property
    def traits(self) -> CutTraits:
        """See `Strategy.traits`."""
        splits = self.schedule in SPLIT_BACKWARD_SCHEDULES
        # In whole backward passes autograd makes the gradients of a stage, which may be sparse.
        sparse = SPARSE if splits else frozenset[Oddity]({"sparse_shared"})
        others: frozenset[Oddity] = frozenset({"writes", "graph_in_loss"})
        return replace(super().traits, splits_backward=splits, cannot_hold=sparse | others)

    def check(self, plan: Plan) -> None:
        """Refuse a mesh without pp, wrong numbers of micro-batches, and a torch that is too old."""
        refuse_no_ranks(self, plan)
        per_rank = self.per_rank()
        if self.traits.splits_backward and not SPLITS_BACKWARD:
            raise ConfigError(
                f"strategy.cut: schedule={self.schedule} computes the gradients of weights "
                f"separately, and torch {TORCH[0]}.{TORCH[1]} counts some of them twice. Run: pip "
                "install 'torch>=2.13', or set strategy.cut.schedule=interleaved_1f1b."
            )
        check_schedule(self.schedule, plan.pp, per_rank, plan.batch.accumulation_steps)
        where = f"mesh.pp={plan.pp} with {per_rank} stages a rank"
        refuse_wrong_places(self, plan.pp * per_rank, where)

    def ranks(self, plan: Plan) -> tuple[int, ...]:
        """See `Pipeline.ranks`."""
        return stage_ranks(self.schedule, plan.pp, self.per_rank())

    def in_flight(self, plan: Plan) -> tuple[int, ...]:
        """See `CutStrategy.in_flight`."""
        steps = plan.batch.accumulation_steps
        return in_flight_by_stage(self.schedule, plan.pp, self.per_rank(), steps, splits=True)

    def actions(self, plan: Plan, pp_rank: int) -> RankActions:
        """See `CutStrategy.actions`."""
        pp, per_rank, steps = plan.pp, self.per_rank(), plan.batch.accumulation_steps
        return RankActions(
            rank_order(self.schedule, pp, per_rank, steps, pp_rank),
            transfers(self.schedule, pp, per_rank, steps, pp_rank),
            backward_starts(self.schedule, pp, per_rank, steps, pp_rank),
        )

    def apply(self, assembly: Assembly) -> None:
        """Make the stages of this rank, and let the schedule run the micro-batches."""
        layout = assembly.layout
        if layout is None:
            return
        stages = assembly.make_stages(layout.stages_of(assembly.context.pp_rank))
        for stage in stages:
            stage.recompute = self.checkpoint
        ties = layout.chosen.cut.ties

        def runner(finished: Assembly) -> Runner:
            from bigtrain.pipeline.runner import PipelineRunner

            return PipelineRunner(finished, stages, self.schedule, ties=ties)

        assembly.runner = runner
        super().apply(assembly)
