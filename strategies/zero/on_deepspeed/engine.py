"""Stages 1 to 3 on DeepSpeed, from its own configuration file where one is given.

DeepSpeed's engine does the backward passes and the steps of a client optimizer (any of torch's
that treats each element by itself), so that none of its C++ operators has to be compiled. What
it holds beside the least possible was measured and taken out where that changes no number:

* its copy of the fp32 parameters that the optimizer updates, beside the fp32 parameters
  (4P/N bytes): the parameters themselves are updated;
* the gradients of a rank's shard in one buffer, and flattened into another for the step (4P/N):
  they are reduced into the one that the step uses;
* a gradient that is larger than the bucket, kept whole until the backward pass ends: it goes as
  soon as it is reduced, and it is reduced at once;
* norms by way of fp64 copies of whole gradients: worked out in place (`bigtrain/tensors/norms.py`);
* the flat copy of the model, beside the model, while it is built (4P).

What remains above 4P + 12P/N bytes in fp32 for stages 1 and 2 (a single micro-batch; stage 1
reduces in the backward pass, too, and holds as little) and 16P/N for stage 3: nothing that
stays, but a bucket of P/512 numbers (two for stage 1), and under stage 3 the parameters of the
module that computes. In bf16, stages 1 and 2 keep their gradient shard in fp32, as the step wants
it: 2P + 16P/N, that is 2P/N above the least. Accumulating, stage 1 keeps whole gradients between
the micro-batches (4P, in bf16 2P) and stage 3 an fp32 shard of them in bf16 as well (2P/N more).

Parameters that the loss never reaches are left out beforehand. Where a step brings no gradient of
another, DeepSpeed's flat shard has zeros there, and the optimizer would step on those: weight decay
and momentum would go on. Such a step is refused, but for plain SGD, which zeros do not move. In
bf16, frozen parameters are
kept in bf16 alone, and are saved as rounded.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from bigtrain.core.runner import Runner
from bigtrain.core.strategy import Assembly, ModelFacts, Plan, Strategy
from bigtrain.core.traits import SPARSE, Oddity, Traits
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.costs.traffic import Traffic
from bigtrain.errors import ConfigError
from bigtrain.strategies.deepspeed_adapter import DEEPSPEED, require_deepspeed, stage_3_linear
from bigtrain.strategies.zero import Zero
from bigtrain.strategies.zero.advice import advise
from bigtrain.strategies.zero.on_deepspeed.build import build_engine, check_file
from bigtrain.strategies.zero.on_deepspeed.config import (
    bucket_elements,
    deepspeed_settings,
    unused_line,
    zero_stage_of,
)
from bigtrain.strategies.zero.on_deepspeed.in_pipeline import share_engine, shared_forecast
from bigtrain.strategies.zero.on_deepspeed.memory import forecast_deepspeed
from bigtrain.strategies.zero.on_deepspeed.offload import check_offload, offload_advice
from bigtrain.strategies.zero.on_deepspeed.runner import DeepSpeedRunner
from bigtrain.strategies.zero.on_deepspeed.traffic import deepspeed_traffic, shared_traffic
from bigtrain.strategies.zero.on_deepspeed.update import DeepSpeedUpdate
from bigtrain.tracing.routes import Routes

DEEPSPEED_ALTERNATIVES = {0: "ddp", 1: "zero1_torch", 2: "fsdp_zero2", 3: "fsdp"}
"""The preset on torch's own parts that does the same stage."""

_CANNOT_HOLD: frozenset[Oddity] = SPARSE | {
    "accumulate_hooks",
    "complex",
    "not_fp32",
    "graph_in_loss",
}
_STAGE_3_CANNOT: frozenset[Oddity] = frozenset(
    {"writes", "empty", "frozen_complex", "graph_in_forward"}
)
"""What is written into a parameter between its uses is gone with its gathered values, and these are
not there for a second backward pass."""


class DeepSpeed(Zero):
    """DeepSpeed's engine around the model; it owns the step."""

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`: its stage 3 has a linear layer of its own."""
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
            # Stage 1 has, where a step is one micro-batch, only a shard of the gradients, too.
            sharded_states=max(2, self.stage),
            own_offload=True,
        )

    def check_model(self, facts: ModelFacts, plan: Plan) -> None:
        """Refuse a stage that trains nothing: DeepSpeed shards the states of none."""
        for stage in facts.untrained[:1] if plan.shares_engine else ():
            raise ConfigError(
                f"strategy.replicate: stage {stage} of the pipeline has no parameter to train, "
                "and DeepSpeed makes no ZeRO of nothing. Use --strategy 1f1b_zero1 (zero on "
                "torch), or strategy.cut.at with a trained layer in each stage."
            )

    def meet_routes(self, routes: Routes, plan: Plan) -> tuple[Strategy, str | None]:
        """Refuse ways that differ between ranks, or steps that surely go without a parameter.

        Its buckets would meet those of other ranks, and its flat shards have zeros. Where all ranks
        go the same way, and a step has several micro-batches, each step is looked at in the run.
        """
        if not routes.differ and plan.batch.accumulation_steps > 1:
            return self, None
        raise ConfigError(
            f"not every pass uses {routes.names} ({routes.cause or 'the model changes its way'}): "
            "DeepSpeed's ranks would reduce gradients of different parameters together, or go on "
            "with the momentum and decay of what a step does not use. "
            f"Use --strategy {DEEPSPEED_ALTERNATIVES[self.stage]}."
        )

    def replaced_functions(self) -> AbstractContextManager[object]:
        """Stage 3 has a linear layer of its own, which saves other tensors than torch's."""
        return stage_3_linear() if self.traits.replaces_products else nullcontext()

    def warning(self) -> str | None:
        """See `Strategy.warning`: another DeepSpeed, and what of a file has no use."""
        lines = (DEEPSPEED.warning(), unused_line(self.config))
        return "; ".join(line for line in lines if line is not None) or None

    def check(self, plan: Plan) -> None:
        """Refuse what DeepSpeed cannot do, and a file that contradicts the job."""
        if plan.shares_engine:
            self._check_in_pipeline(plan)
            return
        stage = zero_stage_of(self)
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
                f"(mesh.pp={plan.pp} mesh.tp={plan.tp}) gives each rank a part of one. "
                "Set strategy.replicate.engine=torch, or mesh.pp=1 mesh.tp=1."
            )
        if self.shard_ranks is not None:
            raise ConfigError(
                f"strategy.replicate.shard_ranks={self.shard_ranks} is for engine=torch, and "
                "engine is deepspeed. Leave it out, or set strategy.replicate.engine=torch."
            )
        config = deepspeed_settings(self, plan, elements=1)
        check_offload(config, plan, stage, instead)
        require_deepspeed(
            plan.device_type, "strategy.replicate.engine=deepspeed", f"use --strategy {instead}"
        )
        if self.config is not None:
            check_file(self.config, config)

    def _check_in_pipeline(self, plan: Plan) -> None:
        """Refuse what DeepSpeed's pipelines cannot do; the cut has checked what is its own."""
        if self.config is not None:
            raise ConfigError(
                f"strategy.replicate.config={self.config}: a DeepSpeed file says what a whole "
                "model needs, and strategy.cut cuts it. Leave it out, or strategy.cut."
            )
        if self.stage > 1:
            raise ConfigError(
                f"strategy.replicate.stage={self.stage}: in DeepSpeed's pipelines whole gradients "
                "are added up over the micro-batches, so that stages 2 and 3 would shard nothing, "
                "and it refuses them. Set strategy.cut.engine=torch "
                "strategy.replicate.engine=torch, or strategy.replicate.stage=1."
            )
        if plan.precision == "fp64":
            raise ConfigError(
                "train.precision=fp64: ZeRO on DeepSpeed updates in fp32. Set "
                "strategy.cut.engine=torch strategy.replicate.engine=torch, or "
                "train.precision=fp32."
            )

    def advise(self, forecast: Forecast, profile: Profile, plan: Plan) -> str | None:
        """Say where sharding, or DeepSpeed's offload, cannot help."""
        after = self.estimate(forecast, profile, plan)
        staged = self.model_copy(update={"stage": zero_stage_of(self)})
        return advise(staged, forecast, after, profile, plan) or offload_advice(plan)

    def estimate(self, forecast: Forecast, profile: Profile, plan: Plan) -> Forecast:
        """Shards, DeepSpeed's buffers, and what passes; see `deepspeed_forecast`."""
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
        """Let the runner build the model under DeepSpeed, when everything else has its shape."""
        if assembly.plan.shares_engine:
            share_engine(self, assembly)
            return
        stage = zero_stage_of(self)
        trained = sum(p.numel() for p in assembly.model.parameters() if p.requires_grad)
        config = deepspeed_settings(self, assembly.plan, trained)

        def runner(final: Assembly) -> Runner:
            built = build_engine(final, config, stage, self.config)
            update = DeepSpeedUpdate(built, final.context, final.model, stage)
            final.update = update
            return DeepSpeedRunner(final, update)

        assembly.runner = runner
