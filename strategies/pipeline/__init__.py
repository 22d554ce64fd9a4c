"""The model cut into stages, one or more to a rank; micro-batches flow through them in turn.

Memory: parameters, gradients and optimizer state of the rank's own stages, and the activations
of the micro-batches in flight there: all m with `gpipe`, at most p - stage with `1f1b`.
Communication: the tensors that cross a cut, forward and backward, for each micro-batch.
Constraints: a module that runs on shapes alone; idle time (p-1)/(m+p-1) for m micro-batches on p
stages, less when a rank has several stages. Which schedules and replicas, the engine says.
Example: deepspeed --num_accelerators 2 bigtrain/train.py --strategy 1f1b

Source: Huang et al. 2019, GPipe (arXiv 1811.06965); Narayanan et al. 2021, Megatron-LM (arXiv
2104.04473), section 2.2; Qi et al. 2023, Zero Bubble (arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

import torch

from bigtrain.core.strategy import Assembly, Given, Plan, Strategy
from bigtrain.core.workload import Workload
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.cutting.choose import RATES, Wanted, choose_cut
from bigtrain.cutting.layout import Layout, numerics
from bigtrain.cutting.traced_model import Rehearsal
from bigtrain.job.import_path import load_object
from bigtrain.optim.update import state_factor
from bigtrain.pipeline.deferred_batch_norm import DeferredStatistics, has_running_statistics
from bigtrain.strategies.pipeline.options import PipelineEngine, PipelineOptions, Recompute

BATCH_NORM = {
    "micro_batch": "BatchNorm: each micro-batch by its own statistics, and the running ones follow",
    "deferred": "BatchNorm: each micro-batch by its own statistics; the running ones follow the "
    "whole batch of a step",
}
ENGINES = {
    "torch": "bigtrain.strategies.pipeline.on_torch:TorchPipeline",
    "fairscale": "bigtrain.strategies.pipeline.on_fairscale:FairscalePipe",
    "deepspeed": "bigtrain.strategies.pipeline.on_deepspeed:DeepSpeedPipeline",
}
"""What runs the stages; a module is imported when it is chosen."""


class Pipeline(PipelineOptions):
    """Stages on the pp axis of the mesh, or on the devices of a process: the engine says."""

    name: ClassVar[str] = "pipeline"
    summary: ClassVar[str] = "stages of layers on the ranks; micro-batches flow through them"

    @cached_property
    def _engine(self) -> PipelineEngine:
        engine: PipelineEngine = load_object(ENGINES[self.engine], "strategy.cut.engine")()
        return engine

    @property
    def owns_step(self) -> bool:
        """See `Strategy.owns_step`."""
        return self._engine.owns_step

    @property
    def optimizer_gets(self) -> Given:
        """See `Strategy.optimizer_gets`."""
        return self._engine.optimizer_gets

    @property
    def needs_group(self) -> bool:
        """See `Strategy.needs_group`."""
        return self._engine.needs_group

    @property
    def spans_ranks(self) -> bool:
        """See `CutStrategy.spans_ranks`."""
        return self._engine.spans_ranks

    def replays(self, plan: Plan) -> bool:
        """See `CutStrategy.replays`."""
        return self._engine.replays(self, plan)

    def joins(self, replicate: Strategy) -> bool:
        """See `CutStrategy.joins`."""
        return self._engine.joins(replicate)

    def held(self, plan: Plan) -> tuple[int, ...]:
        """See `CutStrategy.held`."""
        return self._engine.in_flight(self, plan)

    def micro_batches(self, pp: int) -> int:
        """See `CutStrategy.micro_batches`."""
        return 4 * (self.devices or pp)

    @property
    def recompute(self) -> Recompute:
        """See `CutStrategy.recompute`."""
        return self.checkpoint

    @property
    def splits_backward(self) -> bool:
        """See `CutStrategy.splits_backward`."""
        return self._engine.splits_backward(self)

    def replayed(
        self,
        forecasts: Mapping[int, Forecast],
        plan: Plan,
        pp_rank: int,
        halves: Mapping[int, Forecast],
    ) -> Forecast:
        """See `CutStrategy.replayed`."""
        return self._engine.replayed(self, forecasts, plan, pp_rank, halves)

    def estimate(self, forecast: Forecast, profile: Profile, plan: Plan) -> Forecast:
        """The whole model's micro-batches in flight, where it is not predicted by stages."""
        if self.replays(plan):
            return forecast
        return self._engine.estimate(self, forecast, profile, plan)

    def check(self, plan: Plan) -> None:
        """Refuse what the engine cannot do, before any process group exists."""
        self._engine.check(self, plan)

    def lay_out(self, workload: Workload, plan: Plan) -> Layout:
        """See `CutStrategy.lay_out`."""
        ranks = self._engine.ranks(self, plan)
        wanted = Wanted(
            stages=len(ranks),
            at=self.at,
            in_flight=self._engine.in_flight(self, plan),
            devices=ranks,
            memory=self.memory,
            state_factor=state_factor(workload.make_optimizer),
            rates=RATES[plan.device_type],
        )
        kinds = numerics(plan.precision, bf16_parameters=plan.bf16_parameters)
        rehearsal = Rehearsal(workload.model, workload.loss, torch.device(plan.device_type), kinds)
        return Layout(
            choose_cut(rehearsal, workload.micro_batch, wanted),
            ranks,
            "pp rank" if self.spans_ranks else "device",
            BATCH_NORM[self.batch_norm] if has_running_statistics(workload.model) else "",
        )

    def apply(self, assembly: Assembly) -> None:
        """Let the engine take the stages over."""
        self._engine.apply(self, assembly)
        if self.batch_norm == "deferred":
            assembly.before_update.append(DeferredStatistics(assembly.roots).commit)
