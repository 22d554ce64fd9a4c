"""ZeRO stages 1 to 3 on DeepSpeed, with the settings of a user's DeepSpeed file if one is given.

DeepSpeed's engine runs the backward passes and steps a client optimizer, which may be any
elementwise optimizer of torch. So none of DeepSpeed's C++ operators is compiled. DeepSpeed alone
needs more than the least possible memory. The following parts of the excess are removed here, which
changes no result (P parameters, N ranks):

* The fp32 copy that the optimizer updates, in addition to the fp32 parameters (4P/N bytes). Here
  the parameters themselves are updated.
* The copy of a shard's gradients that is flattened for the step (4P/N). Here gradients are reduced
  into the buffer that the step reads.
* A gradient larger than the bucket, which is whole until the backward pass ends. Here it is reduced
  at once and freed.
* fp64 copies of whole gradients for their norm. Here the norm is computed in place
  (`bigtrain/tensors/norms.py`).
* The flat copy of the model while the engine is built (4P).

With one micro-batch this leaves 4P + 12P/N bytes in fp32 for stages 1 and 2, and 16P/N for stage 3,
plus a bucket of P/512 elements (two for stage 1) and, under stage 3, the parameters of the module
that computes. In bf16, stages 1 and 2 have their gradient shard in fp32, because the step reads it
in fp32: 2P + 16P/N, which is 2P/N above the least. With accumulation, stage 1 has whole gradients
between the micro-batches (4P, in bf16 2P), and stage 3 in bf16 has an fp32 shard of the gradients
(2P/N more).

Parameters that the loss never reaches are left out of training. If another parameter has no
gradient in a step, DeepSpeed's flat shard has zeros in its place, and the optimizer would apply
weight decay and momentum. Such a step is refused, except for plain SGD, which does not change a
parameter for a gradient of zeros. In bf16, frozen parameters exist only in bf16 and are saved with
rounded values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from bigtrain.core.runner import Runner
from bigtrain.core.strategy import Assembly, ModelFacts, Plan, Strategy
from bigtrain.core.traits import SPARSE, Oddity, Traits
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.costs.traffic import Traffic
from bigtrain.errors import ConfigError
from bigtrain.job.deepspeed_json import json_section
from bigtrain.optim.partition import Slice
from bigtrain.strategies.deepspeed_adapter import DEEPSPEED, require_deepspeed, stage_3_linear
from bigtrain.strategies.zero import Zero
from bigtrain.strategies.zero.on_deepspeed.build import build_engine, check_file
from bigtrain.strategies.zero.on_deepspeed.config import (
    bucket_elements,
    deepspeed_settings,
    unused_line,
    zero_stage_of,
)
from bigtrain.strategies.zero.on_deepspeed.in_pipeline import share_engine, shared_forecast
from bigtrain.strategies.zero.on_deepspeed.layout import flat_slices
from bigtrain.strategies.zero.on_deepspeed.memory import forecast_deepspeed
from bigtrain.strategies.zero.on_deepspeed.runner import DeepSpeedRunner
from bigtrain.strategies.zero.on_deepspeed.traffic import deepspeed_traffic, shared_traffic
from bigtrain.strategies.zero.on_deepspeed.update import DeepSpeedUpdate
from bigtrain.tracing.routes import Routes

DEEPSPEED_ALTERNATIVES = {0: "ddp", 1: "zero1_torch", 2: "fsdp_zero2", 3: "fsdp"}
"""The preset with the same stage on the torch engine, by stage."""

_CANNOT_HOLD: frozenset[Oddity] = SPARSE | {
    "accumulate_hooks",
    "complex",
    "not_fp32",
    "graph_in_loss",
    "packed",
}
_STAGE_3_CANNOT: frozenset[Oddity] = frozenset(
    {"writes", "empty", "frozen_complex", "graph_in_forward"}
)
"""The properties of a model that only stage 3 does not support, because it frees gathered values.

Writes into a parameter between its uses are lost, and a second backward pass finds no values.
"""


OWN_SETTINGS = {
    "keep_gathered": (
        "DeepSpeed chooses by size: parameters of fewer elements than "
        "zero_optimization.stage3_param_persistence_threshold stay gathered (strategy.deepspeed=F)."
    ),
    "reduce": (
        "DeepSpeed reduces once a step in stage 1 (strategy.replicate.stage=1), and after every "
        "micro-batch in stages 2 and 3."
    ),
    "prefetch": (
        "DeepSpeed counts elements instead of blocks: set "
        "zero_optimization.stage3_prefetch_bucket_size in a file (strategy.deepspeed=F)."
    ),
}
"""For options that only torch's stages 2 and 3 have: what DeepSpeed has instead."""


class DeepSpeed(Zero):
    """ZeRO by DeepSpeed's engine, which runs the backward passes and the optimizer's step."""

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`: stage 3 replaces torch's linear function."""
        return Traits(
            engine="deepspeed",
            owns_step=True,
            needs_group=True,
            materializes=True,
            replaces_products=self.stage == 3,
            bf16_parameters=True,
            optimizer_gets="copies",
            optimizer_sees="elements",
            cannot_hold=_CANNOT_HOLD | (_STAGE_3_CANNOT if self.stage == 3 else frozenset()),
            state_ranks=self.shard_ranks,
            # With one micro-batch a step, stage 1 also has only a shard of the gradients.
            sharded_states=max(2, self.stage),
            own_offload=True,
        )

    @property
    def effective_stage(self) -> int:
        """See `Zero.effective_stage`."""
        return zero_stage_of(self)

    def updated_slices(
        self,
        sizes: Mapping[str, int],
        ranks: int,
        *,
        groups: Sequence[Sequence[str]],
        may_split: bool,  # noqa: ARG002
    ) -> list[Slice]:
        """See `Strategy.updated_slices`: the flat buffer of each group has equal shares.

        With `round_robin_gradients` or `parameter_alignment` in a user's file, DeepSpeed puts the
        parameters in another order, or at other offsets. A share has the same size, up to padding.
        """
        return flat_slices([{n: sizes[n] for n in names} for names in groups], ranks)

    def check_model(self, facts: ModelFacts, plan: Plan) -> None:
        """Refuse a pipeline stage without trained parameters: DeepSpeed cannot build ZeRO there."""
        for stage in facts.untrained[:1] if plan.shares_engine else ():
            raise ConfigError(
                f"strategy.replicate: stage {stage} of the pipeline has no parameter to train, "
                "and DeepSpeed's ZeRO needs one. Use --strategy 1f1b_zero1 (zero on "
                "torch), or strategy.cut.at with a trained layer in each stage."
            )

    def meet_routes(self, routes: Routes, plan: Plan) -> tuple[Strategy, str | None]:
        """See `Strategy.meet_routes`: refuse passes that differ between the ranks of a step.

        DeepSpeed would reduce buckets with different parameters together. With one micro-batch in a
        step, passes that differ between steps are refused too: flat shards would have zeros for
        parameters that a step does not use. With several micro-batches the runner checks each step.
        """
        if not routes.differ and plan.batch.accumulation_steps > 1:
            return self, None
        raise ConfigError(
            f"not every pass uses {routes.names} ({routes.cause or 'it changes between steps'}): "
            "DeepSpeed's ranks would reduce gradients of different parameters together, or apply "
            "momentum and weight decay to parameters that a step does not use. "
            f"Use --strategy {DEEPSPEED_ALTERNATIVES[self.stage]}."
        )

    def replaced_functions(self) -> AbstractContextManager[object]:
        """See `Strategy.replaced_functions`: stage 3 replaces `linear`.

        DeepSpeed's function and torch's save different tensors for the backward pass.
        """
        return stage_3_linear() if self.traits.replaces_products else nullcontext()

    def warning(self) -> str | None:
        """See `Strategy.warning`: an untested version, or unused sections of a user's file."""
        lines = (DEEPSPEED.warning(), unused_line(self.config))
        return "; ".join(line for line in lines if line is not None) or None

    def check(self, plan: Plan) -> None:
        """Refuse plans that DeepSpeed does not support, and a file that contradicts the job."""
        self.refuse_unit_choices(OWN_SETTINGS)
        if plan.shares_engine:
            self._check_in_pipeline(plan)
            return
        stage = self.effective_stage
        instead = DEEPSPEED_ALTERNATIVES[stage]
        if stage == 0:
            raise ConfigError(
                f"{self.config}: zero_optimization.stage=0 shards nothing. Use --strategy ddp, "
                "or write 1, 2 or 3."
            )
        if plan.precision == "fp64":
            raise ConfigError(
                "train.precision=fp64: DeepSpeed updates in fp32. Use --strategy "
                f"{instead} (engine=torch), or train.precision=fp32."
            )
        if "cut" in plan.techniques or plan.pp * plan.tp > 1:
            raise ConfigError(
                "strategy.replicate.engine=deepspeed takes a whole model, and strategy.cut "
                f"(mesh.pp={plan.pp} mesh.tp={plan.tp}) gives each rank only a part. "
                "Set strategy.replicate.engine=torch, or mesh.pp=1 mesh.tp=1."
            )
        if self.shard_ranks is not None:
            raise ConfigError(
                f"strategy.replicate.shard_ranks={self.shard_ranks} is for engine=torch, and "
                "engine is deepspeed. Leave it out, or set strategy.replicate.engine=torch."
            )
        config = deepspeed_settings(self, plan, elements=1)
        _check_offload(config, plan, stage, instead)
        require_deepspeed(
            plan.device_type, "strategy.replicate.engine=deepspeed", f"use --strategy {instead}"
        )
        if self.config is not None:
            check_file(self.config, config)

    def _check_in_pipeline(self, plan: Plan) -> None:
        """Refuse plans that ZeRO in DeepSpeed's pipelines does not support."""
        if self.config is not None:
            raise ConfigError(
                f"strategy.replicate.config={self.config}: a DeepSpeed file is for a whole model, "
                "and strategy.cut cuts it. Leave strategy.replicate.config or strategy.cut out."
            )
        if self.stage > 1:
            raise ConfigError(
                f"strategy.replicate.stage={self.stage}: DeepSpeed's pipelines add up whole "
                "gradients over the micro-batches, so stages 2 and 3 would shard nothing, "
                "and DeepSpeed refuses them. Set strategy.cut.engine=torch "
                "strategy.replicate.engine=torch, or strategy.replicate.stage=1."
            )
        if plan.precision == "fp64":
            raise ConfigError(
                "train.precision=fp64: ZeRO on DeepSpeed updates in fp32. Set "
                "strategy.cut.engine=torch strategy.replicate.engine=torch, or "
                "train.precision=fp32."
            )

    def advise(self, forecast: Forecast, profile: Profile, plan: Plan) -> str | None:
        """Return one line if sharding or DeepSpeed's offload cannot save memory."""
        return super().advise(forecast, profile, plan) or _offload_advice(plan)

    def estimate(self, forecast: Forecast, profile: Profile, plan: Plan) -> Forecast:
        """Add shards, DeepSpeed's buffers and temporaries; see `forecast_deepspeed`."""
        if plan.shares_engine:
            return shared_forecast(self, forecast, profile, plan)
        config = deepspeed_settings(self, plan, profile.trained_elements)
        return forecast_deepspeed(config, forecast, profile, plan)

    def traffic(self, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
        """See `deepspeed_traffic`."""
        if plan.shares_engine:
            bucket = bucket_elements(self, plan, profile.trained_elements)
            return shared_traffic(bucket, profile, plan)
        config = deepspeed_settings(self, plan, profile.trained_elements)
        return deepspeed_traffic(config, profile, plan)

    def apply(self, assembly: Assembly) -> None:
        """Set a runner that builds DeepSpeed's engine when all techniques have been applied.

        In a DeepSpeed pipeline, let the pipeline's engine shard the optimizer's state.
        """
        if assembly.plan.shares_engine:
            share_engine(self, assembly)
            return
        stage = self.effective_stage
        trained = sum(p.numel() for p in assembly.model.parameters() if p.requires_grad)
        config = deepspeed_settings(self, assembly.plan, trained)

        def runner(final: Assembly) -> Runner:
            built = build_engine(final, config, stage, self.config)
            update = DeepSpeedUpdate(built, final.context, final.model, stage)
            final.update = update
            return DeepSpeedRunner(final, update)

        assembly.runner = runner


def _check_offload(config: dict[str, Any], plan: Plan, stage: int, instead: str) -> None:
    """Refuse offload of parameters below stage 3, and offload to disk in any stage.

    Raises:
        ConfigError: the plan or the configuration has one of these offloads.
    """
    away = plan.offload_tiers
    if away.parameters != "device" and stage < 3:
        raise ConfigError(
            f"strategy.offload.parameters={away.parameters}: stage {stage} of DeepSpeed keeps "
            "whole parameters on the device. Use --strategy zero3."
        )
    zero = json_section(config, "zero_optimization")
    for name in ("offload_optimizer", "offload_param"):
        if json_section(zero, name).get("device") == "nvme":
            # The pieces would be on disk between steps, and norms, clipping and checkpoints read
            # them in memory. DeepSpeed's operator for this offload also needs libaio, and minutes
            # of compilation.
            raise ConfigError(
                f"zero_optimization.{name}.device=nvme (strategy.offload on disk) is not supported "
                f"with engine=deepspeed. Use --strategy {instead} with "
                "strategy.offload.optimizer=disk, or cpu instead of disk."
            )


def _offload_advice(plan: Plan) -> str | None:
    """Return one line if offload moves nothing, because the device is the host; else None."""
    away = plan.offload_tiers
    if plan.device_type == "cpu" and "cpu" in (away.optimizer, away.parameters):
        key = "optimizer" if away.optimizer == "cpu" else "parameters"
        return (
            f"strategy.offload.{key}=cpu moves nothing: this run is on the CPU. DeepSpeed's "
            "buffers for it are added all the same. Leave strategy.offload out."
        )
    return None
