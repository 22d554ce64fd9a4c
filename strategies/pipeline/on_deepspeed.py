"""One stage on each rank under DeepSpeed's pipeline engine (PipelineModule), in 1F1B order.

Memory: that of `1f1b` on torch; with ZeRO stage 1 the optimizer state is sharded over the replicas.
Communication: the tensors that cross a cut; the replicas' gradients once in a step, after all
micro-batches.
Constraints: one stage on a rank; fp64 only without ZeRO. DeepSpeed refuses ZeRO stages 2 and 3 in a
pipeline: they shard gradients in each micro-batch, while its pipeline sums whole gradients and
reduces them at the end of a step.

Source: DeepSpeed, runtime/pipe; Narayanan et al. 2019, PipeDream (arXiv 1806.03377).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigtrain.core.runner import Runner
from bigtrain.core.strategy import Assembly, Plan
from bigtrain.core.traits import CutTraits, Oddity
from bigtrain.costs.rank_replay import RankActions
from bigtrain.errors import ConfigError
from bigtrain.schedules.orders import Action
from bigtrain.strategies.deepspeed_adapter import DEEPSPEED, require_deepspeed
from bigtrain.strategies.pipeline import Pipeline, refuse_no_ranks, refuse_wrong_places


class DeepSpeedPipeline(Pipeline):
    """Runs the stage of this rank by DeepSpeed's engine, which replaces the micro-batch loop."""

    @property
    def traits(self) -> CutTraits:
        """See `Strategy.traits`: ZeRO on DeepSpeed runs in the same engine."""
        others: frozenset[Oddity] = frozenset({"gradient_hooks", "accumulate_hooks", "packed"})
        traits = super().traits
        return replace(
            traits,
            optimizer_gets="copies",
            shares_engine=True,
            cannot_hold=traits.cannot_hold | others,
        )

    def warning(self) -> str | None:
        """See `Strategy.warning`."""
        return DEEPSPEED.warning()

    def check(self, plan: Plan) -> None:
        """Refuse options that DeepSpeed's pipelines lack."""
        if "schedule" in self.model_fields_set and self.schedule != "1f1b":
            raise ConfigError(
                f"strategy.cut.schedule={self.schedule}: DeepSpeed's pipelines have 1f1b only. "
                "Set strategy.cut.schedule=1f1b, or strategy.cut.engine=torch."
            )
        if self.stages_per_rank not in (None, 1):
            raise ConfigError(
                f"strategy.cut.stages_per_rank={self.stages_per_rank}: DeepSpeed's pipelines "
                "have one stage on each rank. Leave it out, or set strategy.cut.engine=torch."
            )
        refuse_no_ranks(self, plan)
        refuse_wrong_places(self, plan.pp, f"mesh.pp={plan.pp}")
        self._check_replicas(plan)
        tiers = plan.offload_tiers
        if (tiers.optimizer, tiers.parameters) != ("device", "device"):
            raise ConfigError(
                "strategy.cut.engine=deepspeed keeps all its states on the device, and "
                f"strategy.offload asks for optimizer={tiers.optimizer} "
                f"parameters={tiers.parameters}. Leave strategy.offload out, or set "
                "strategy.cut.engine=torch."
            )
        require_deepspeed(
            plan.device_type, "strategy.cut.engine=deepspeed", "set strategy.cut.engine=torch"
        )

    def _check_replicas(self, plan: Plan) -> None:
        replicate = plan.techniques["replicate"]
        if replicate.name in ("single", "ddp"):
            return
        if not plan.shares_engine:
            raise ConfigError(
                f"strategy.cut.engine=deepspeed steps the optimizer itself, and "
                f"strategy.replicate={replicate.name} shards it in another way. Set "
                "strategy.replicate.name=zero strategy.replicate.stage=1 "
                "strategy.replicate.engine=deepspeed, or strategy.cut.engine=torch."
            )

    def in_flight(self, plan: Plan) -> tuple[int, ...]:  # noqa: ARG002
        """See `CutStrategy.in_flight`: one micro-batch for each stage from this one on."""
        steps = plan.batch.accumulation_steps
        return tuple(min(steps, plan.pp - rank) for rank in range(plan.pp))

    def actions(self, plan: Plan, pp_rank: int) -> RankActions:
        """Return the passes in the order of DeepSpeed's TrainSchedule.

        Rank s of p runs the forward pass of micro-batch i at tick 2i + s, and its backward pass at
        tick 2i + 2p - 1 - s. This is the order of 1F1B, also with fewer micro-batches than stages.
        """
        steps, stages = plan.batch.accumulation_steps, plan.pp
        ticks = [(2 * number + pp_rank, Action(pp_rank, "F", number)) for number in range(steps)]
        ticks += [
            (2 * number + 2 * stages - 1 - pp_rank, Action(pp_rank, "B", number))
            for number in range(steps)
        ]
        return RankActions([action for _, action in sorted(ticks)])

    def apply(self, assembly: Assembly) -> None:
        """Make the stage of this rank, and let DeepSpeed run and update it."""
        layout = assembly.layout
        if layout is None:
            return
        (stage,) = assembly.make_stages(layout.stages_of(assembly.context.pp_rank))
        stage.recompute = self.checkpoint
        ties = layout.chosen.cut.ties
        config = _settings(assembly.plan)

        def runner(finished: Assembly) -> Runner:
            from bigtrain.strategies.pipeline.deepspeed_runner import DeepSpeedPipelineRunner

            return DeepSpeedPipelineRunner(finished, stage, config, ties=ties)

        assembly.runner = runner
        super().apply(assembly)


def _settings(plan: Plan) -> dict[str, Any]:
    """Return DeepSpeed's configuration without clipping and bf16; the runner does both."""
    batch = plan.batch
    return {
        "train_batch_size": batch.micro_size * batch.accumulation_steps * plan.dp,
        "train_micro_batch_size_per_gpu": batch.micro_size,
        "gradient_accumulation_steps": batch.accumulation_steps,
        "gradient_clipping": 0.0,  # DeepSpeed's default clips at 1
        "steps_per_print": None,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 0},
    }
