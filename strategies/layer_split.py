"""The model cut into stages that work one after the other: naive model parallelism.

Memory: each device or rank holds its own stages' parameters, gradients and optimizer state, and
the activations of one micro-batch.
Communication: the tensors that cross a cut, forward and backward, for each micro-batch.
Constraints: a module that runs on shapes alone; of p stages one works at a time. A pipeline
(`gpipe`, `1f1b`) keeps the others busy.
Example: torchrun --nproc-per-node 2 bigtrain/train.py --strategy layer_split

Source: Krizhevsky et al. 2012 laid layers over two GPUs; Huang et al. 2019 (arXiv 1811.06965),
figure 2b, shows what is idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field

from bigtrain.core.strategy import Assembly, CutStrategy, Plan
from bigtrain.core.traits import CutTraits
from bigtrain.core.workload import Workload
from bigtrain.costs.forecast import Forecast
from bigtrain.costs.rank_replay import join_stages
from bigtrain.cutting.choose import NOMINAL_RATES, CutRequest, choose_cut
from bigtrain.cutting.layout import Layout, numerics_for
from bigtrain.cutting.traced_model import TracedModel
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Bytes, Role
from bigtrain.optim.update import bytes_per_parameter_byte
from bigtrain.pipeline.local_chain import StageChain
from bigtrain.pipeline.runner import PipelineRunner
from bigtrain.schedules.orders import schedule_orders
from bigtrain.schedules.transfers import transfers


class LayerSplit(CutStrategy):
    """Stages on the pp axis, or, with `devices`, on several devices of each process."""

    name: ClassVar[str] = "layer_split"
    role: ClassVar[Role] = "cut"
    summary: ClassVar[str] = "stages of layers on ranks or devices, one at work at a time"

    devices: int | None = Field(None, ge=2)
    """Devices of this process that the stages are laid on; left out, the ranks of the pp axis."""
    at: tuple[str, ...] = ()
    """Modules before which the cuts stand; left out, the stages are balanced."""
    memory: Bytes | None = Field(None, gt=0)
    """What the states and activations of a rank or device may take when stages are chosen."""

    @property
    def traits(self) -> CutTraits:
        """See `Strategy.traits`."""
        on_ranks = self.devices is None
        return CutTraits(owns_step=on_ranks, spans_ranks=on_ranks)

    def replay_rank(
        self,
        forecasts: Mapping[int, Forecast],
        plan: Plan,
        pp_rank: int,
        halves: Mapping[int, Forecast],
    ) -> Forecast:
        """See `CutStrategy.replay_rank`: one micro-batch after the other."""
        given = ("naive", plan.pp, 1, plan.batch.accumulation_steps)
        orders, ways = schedule_orders(*given)[pp_rank], transfers(*given)[pp_rank]
        return join_stages(orders, forecasts, halves, ways, plan.averaging_bucket)

    def stages(self, plan: Plan) -> int:
        """How many."""
        return self.devices or plan.pp

    def check(self, plan: Plan) -> None:
        """Refuse what has nothing to be laid on."""
        if self.devices is None and plan.pp < 2:
            raise ConfigError(
                f"strategy.cut: layer_split needs at least 2 ranks on the pp axis, and "
                f"mesh.pp={plan.pp}. Start more ranks and use mesh.pp=2, or, in one process, "
                "strategy.cut.devices=2."
            )
        found = torch.cuda.device_count() if plan.device_type == "cuda" else None
        if self.devices is not None and found is not None and found < self.devices:
            raise ConfigError(
                f"strategy.cut.devices={self.devices}, and there are {found} GPUs. "
                f"Use strategy.cut.devices={found}."
            )
        if self.at and len(self.at) != self.stages(plan) - 1:
            raise ConfigError(
                f"strategy.cut.at names {len(self.at)} places, and {self.stages(plan)} stages "
                f"have {self.stages(plan) - 1} cuts. Name that many, or leave it out."
            )

    def lay_out(self, workload: Workload, plan: Plan) -> Layout:
        """See `CutStrategy.lay_out`."""
        stages = self.stages(plan)
        ranks = tuple(range(stages))
        wanted = CutRequest(
            stages=stages,
            at=self.at,
            memory=self.memory,
            state_factor=bytes_per_parameter_byte(workload.make_optimizer),
            rates=NOMINAL_RATES[plan.device_type],
        )
        kinds = numerics_for(plan.precision, bf16_parameters=plan.bf16_parameters)
        rehearsal = TracedModel(
            workload.model, workload.loss, torch.device(plan.device_type), kinds
        )
        on = "pp rank" if self.traits.spans_ranks else "device"
        return Layout(choose_cut(rehearsal, workload.micro_batch, wanted), ranks, on)

    def apply(self, assembly: Assembly) -> None:
        """Chain the stages on this process's devices, or let the naive schedule own the step."""
        layout = assembly.layout
        if layout is None:
            return
        if self.devices is not None:
            stages = assembly.make_stages(range(self.devices))
            assembly.roots = [assembly.model]
            assembly.module = StageChain(stages, _devices(assembly, self.devices), assembly.model)
            return
        stages = assembly.make_stages(layout.stages_of(assembly.context.pp_rank))
        ties = layout.chosen.cut.ties

        def runner(finished: Assembly) -> PipelineRunner:
            return PipelineRunner(finished, stages, "naive", ties=ties)

        assembly.runner = runner


def _devices(assembly: Assembly, count: int) -> list[torch.device]:
    """The devices of this process: on GPUs those after the other local ranks'."""
    here = assembly.context.device
    if here.type != "cuda":
        return [here] * count
    first = assembly.context.local_rank * count
    return [torch.device("cuda", first + number) for number in range(count)]
