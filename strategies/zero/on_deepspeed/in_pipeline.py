"""ZeRO stage 1 inside DeepSpeed's pipelines, where the pipeline's engine updates the parameters.

Whole gradients are added up over a step's micro-batches, and reduced into the shards at the end of
the step. bf16 is autocast on fp32 parameters. DeepSpeed itself flattens the model, which needs
memory for two copies of the model while the engine is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch

from bigtrain.core.strategy import Assembly, Plan
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.memory.timeline import Span, Timeline
from bigtrain.models.parameters import names_of
from bigtrain.optim.whole import drop_empty_groups
from bigtrain.strategies.deepspeed_adapter import step_pipeline
from bigtrain.strategies.zero import Zero
from bigtrain.strategies.zero.on_deepspeed.build import BuiltEngine, flat_optimizer
from bigtrain.strategies.zero.on_deepspeed.config import bucket_elements, deepspeed_settings
from bigtrain.strategies.zero.on_deepspeed.layout import flat_share
from bigtrain.strategies.zero.on_deepspeed.update import DeepSpeedUpdate
from bigtrain.tensors.norms import local_norm
from bigtrain.tensors.shards import SavedTensor


def share_engine(options: Zero, assembly_of_cut: Assembly) -> None:
    """Set `Assembly.shard`, with which the pipeline's engine shards the optimizer's state."""

    def shard(assembly: Assembly, start: Callable[..., Any]) -> PipelineZeroUpdate:
        model = assembly.model
        assembly.materialize(names_of(model))
        whole_optimizer = flat_optimizer(assembly)
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        optimizer = whole_optimizer.put_on({name: [parameter] for name, parameter in named.items()})
        drop_empty_groups(optimizer)
        optimizer.state.clear()
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        config = deepspeed_settings(options, assembly.plan, trained)
        more = {
            # In a pipeline DeepSpeed reduces after the last micro-batch: nothing can overlap.
            "zero_optimization": config["zero_optimization"] | {"overlap_comm": False},
            "gradient_clipping": config["gradient_clipping"],
        }
        meter = assembly.meter
        built = BuiltEngine(start(optimizer, more), tracking=lambda: meter.tracking)
        built.dtypes = {name: p.dtype for name, p in model.named_parameters()}
        built.begin_state = (
            whole_optimizer.begin_state if whole_optimizer.begins_with_state else None
        )
        built.optimizer = optimizer
        return PipelineZeroUpdate(built, assembly.context, model, 1)

    assembly_of_cut.shard = shard


class PipelineZeroUpdate(DeepSpeedUpdate):
    """The optimizer of one pipeline stage, with its state sharded over the replicas."""

    def step(self) -> None:
        """See `Update.step`."""
        step_pipeline(self.engine)
        self.shards.clear()

    def clip(self, elsewhere: Collection[str]) -> float:
        """Let the next step clip by the gradient norm over all stages; return the norm. Collective.

        Args:
            elsewhere: names of tied parameters whose gradients another stage counts.
        """
        own_square = self._own_square()
        for name in elsewhere:
            flat_slice = self.shards.slices.get(id(self.parameters[name]))
            gradient = None if flat_slice is None else self.shards.gradient(flat_slice.piece)
            if flat_slice is not None and gradient is not None:
                own_square -= float(local_norm([flat_slice.of(gradient)])) ** 2
        own_square = max(0.0, own_square)
        norm = math.sqrt(math.fsum(self._context.all_gather_numbers(own_square)))
        device = self.shards.pieces[0].device
        self.shards.set_norm(torch.tensor(norm, dtype=torch.float32, device=device))
        return norm

    def load_master(self, name: str, saved: SavedTensor) -> None:
        """See `Update.load_master`. Nothing is loaded: the fp32 parameters have no copies."""


def shared_forecast(options: Zero, forecast: Forecast, profile: Profile, plan: Plan) -> Forecast:
    """Return the forecast of one pipeline stage under stage 1 of ZeRO.

    The stage has a share of the optimizer's state, and whole gradients until they are reduced into
    shards.
    """
    share = flat_share(profile.trained_elements, plan.dp)
    state = round(profile.state_slots * 4 * share) + min(profile.state_scalars, 4)
    bucket = 4 * bucket_elements(options, plan, profile.trained_elements)
    begin = forecast.step.phases[0][0]
    reducing = Timeline(
        (Span(4 * share + bucket, "buffers", begin, begin + 1),), ((begin, "step"),)
    )
    return replace(forecast, states=replace(forecast.states, optimizer=state), step=reducing)
