"""The model cut into stages, one or more to a rank; micro-batches flow through them in turn.

Memory: parameters, gradients and optimizer state of the rank's own stages, and the activations
of the micro-batches in flight there: all m with `gpipe`, at most p - stage with `1f1b`.
Communication: the tensors that cross a cut, forward and backward, for each micro-batch.
Constraints: a module that runs on shapes alone; idle time (p-1)/(m+p-1) for m micro-batches on p
stages, less when a rank has several stages.
Example: deepspeed --num_accelerators 2 bigtrain/train.py --strategy 1f1b

Source: Huang et al. 2019, GPipe (arXiv 1811.06965); Narayanan et al. 2021, Megatron-LM (arXiv
2104.04473), section 2.2; Qi et al. 2023, Zero Bubble (arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from bigtrain.config import Bytes, Role
from bigtrain.cutting.choose import RATES, Wanted, choose_cut
from bigtrain.cutting.rehearsal import Rehearsal
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.forecast import Forecast
from bigtrain.layout import Layout, numerics
from bigtrain.pipelines import PipelineRunner
from bigtrain.replayed import joined
from bigtrain.schedules import ONE_STAGE, SPLIT, check_schedule, in_flight, order, stage_ranks
from bigtrain.strategy import Assembly, CutStrategy, Plan
from bigtrain.tasks import Loss
from bigtrain.update import MakeOptimizer, state_factor


class Pipeline(CutStrategy):
    """Stages on the pp axis of the mesh, under a schedule of torch.distributed.pipelining."""

    name: ClassVar[str] = "pipeline"
    role: ClassVar[Role] = "cut"
    summary: ClassVar[str] = "stages of layers on the ranks; micro-batches flow through them"

    schedule: Literal[
        "gpipe",
        "1f1b",
        "interleaved_1f1b",
        "looped_bfs",
        "interleaved_zero_bubble",
        "zbv_zero_bubble",
        "dualpipev",
    ] = "1f1b"
    """In which order a rank takes the forward and backward passes of its micro-batches."""
    stages_per_rank: int | None = Field(None, ge=1)
    """Stages on each rank; left out, as the schedule needs: 1, or 2."""
    at: tuple[str, ...] = ()
    """Modules before which the cuts stand; left out, the stages are balanced."""
    checkpoint: Literal["never", "except_last", "always"] = "never"
    """Which micro-batches keep only a stage's inputs and compute the rest again (GPipe)."""
    batch_norm: Literal["micro_batch", "deferred"] = "micro_batch"
    """Running statistics follow each micro-batch, or the whole batch of a step at its end."""
    memory: Bytes | None = Field(None, gt=0)
    """What the states and activations of a rank may take when the stages are chosen."""

    @property
    def owns_step(self) -> bool:
        """See `Strategy.owns_step`."""
        return True

    @property
    def spans_ranks(self) -> bool:
        """See `CutStrategy.spans_ranks`."""
        return True

    def micro_batches(self, pp: int) -> int:
        """See `CutStrategy.micro_batches`."""
        return 4 * pp

    @property
    def recompute(self) -> Literal["never", "except_last", "always"]:
        """See `CutStrategy.recompute`."""
        return self.checkpoint

    @property
    def splits_backward(self) -> bool:
        """See `CutStrategy.splits_backward`."""
        return self.schedule in SPLIT

    def replayed(
        self,
        forecasts: Mapping[int, Forecast],
        plan: Plan,
        pp_rank: int,
        halves: Mapping[int, Forecast],
    ) -> Forecast:
        """See `CutStrategy.replayed`: the actions of this rank, in the schedule's order."""
        steps = plan.batch.accumulation_steps
        actions = order(self.schedule, plan.pp, self.per_rank(), steps)[pp_rank]
        return joined(actions, forecasts, halves)

    def per_rank(self) -> int:
        """Stages on each rank."""
        return self.stages_per_rank or (1 if self.schedule in ONE_STAGE else 2)

    def check(self, plan: Plan) -> None:
        """Refuse a mesh without a pp axis, and micro-batches that the schedule cannot use."""
        if plan.pp < 2:
            raise ConfigError(
                f"strategy.cut: {self.schedule} needs at least 2 ranks on the pp axis, and "
                f"mesh.pp={plan.pp}. Start more ranks and use mesh.pp=2, or --strategy single."
            )
        check_schedule(self.schedule, plan.pp, self.per_rank(), plan.batch.accumulation_steps)
        if self.at and len(self.at) != plan.pp * self.per_rank() - 1:
            raise ConfigError(
                f"strategy.cut.at names {len(self.at)} places, and mesh.pp={plan.pp} with "
                f"{self.per_rank()} stages a rank has {plan.pp * self.per_rank() - 1} cuts. "
                "Name that many, or leave strategy.cut.at out."
            )

    def lay_out(
        self,
        model: nn.Module,
        micro_batch: MicroBatch,
        loss: Loss,
        make_optimizer: MakeOptimizer,
        plan: Plan,
    ) -> Layout:
        """See `CutStrategy.lay_out`."""
        ranks = stage_ranks(self.schedule, plan.pp, self.per_rank())
        orders = order(self.schedule, plan.pp, self.per_rank(), plan.batch.accumulation_steps)
        held = {stage: n for actions in orders for stage, n in in_flight(actions).items()}
        wanted = Wanted(
            stages=len(ranks),
            at=self.at,
            in_flight=tuple(held[stage] for stage in range(len(ranks))),
            devices=ranks,
            memory=self.memory,
            state_factor=state_factor(make_optimizer),
            rates=RATES[plan.device_type],
        )
        kinds = numerics(plan.precision, bf16_parameters=plan.bf16_parameters)
        rehearsal = Rehearsal(model, loss, torch.device(plan.device_type), kinds)
        return Layout(choose_cut(rehearsal, micro_batch, wanted), ranks)

    def apply(self, assembly: Assembly) -> None:
        """Make this rank's stages, and let the schedule own the step."""
        layout = assembly.layout
        if layout is None:
            return
        stages = assembly.make_stages(layout.stages_of(assembly.context.pp_rank))
        for stage in stages:
            stage.recompute = self.checkpoint
        ties = layout.chosen.cut.ties

        def runner(finished: Assembly) -> PipelineRunner:
            return PipelineRunner(finished, stages, self.schedule, ties=ties)

        assembly.runner = runner
