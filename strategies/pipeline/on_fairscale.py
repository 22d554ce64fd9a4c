"""GPipe on fairscale's Pipe: the stages on several devices of one process.

Memory: a process has all states of the model, and each device those of its stage. The activations
of all micro-batches of a step are alive at once. With `checkpoint` only boundary tensors and the
activations of one stage are alive.
Communication: copies between the devices of the process, and DDP's all-reduce between replicas.
Constraints: the schedule gpipe; replicas by `single` or, on the CPU, `ddp`.

Source: fairscale 0.4.13, nn/pipe; Kim et al. 2020, torchgpipe (arXiv 2004.09910).
"""

from __future__ import annotations

from dataclasses import replace

from bigtrain.core.strategy import Assembly, Plan
from bigtrain.core.traits import CutTraits
from bigtrain.costs.forecast import Forecast, Passes, Profile
from bigtrain.costs.rank_replay import RankActions
from bigtrain.devices import is_accelerator
from bigtrain.errors import ConfigError
from bigtrain.memory.timeline import Span, Timeline
from bigtrain.schedules.orders import Action, ActionKind
from bigtrain.strategies.fairscale_adapter import FAIRSCALE, require_fairscale
from bigtrain.strategies.pipeline import (
    Pipeline,
    local_devices,
    refuse_missing_devices,
    refuse_wrong_places,
)


class FairscalePipe(Pipeline):
    """Runs the stages by fairscale's Pipe, which replaces the micro-batch loop."""

    @property
    def traits(self) -> CutTraits:
        """See `Strategy.traits`."""
        return replace(super().traits, is_distributed=False)

    def warning(self) -> str | None:
        """See `Strategy.warning`."""
        return FAIRSCALE.warning()

    def check(self, plan: Plan) -> None:
        """Refuse options that Pipe lacks."""
        if "schedule" in self.model_fields_set and self.schedule != "gpipe":
            raise ConfigError(
                f"strategy.cut.schedule={self.schedule}: fairscale's Pipe has gpipe only. "
                "Set strategy.cut.schedule=gpipe, or strategy.cut.engine=torch."
            )
        if self.devices is None:
            raise ConfigError(
                "strategy.cut.engine=fairscale puts the stages on several devices of one process, "
                "and strategy.cut.devices does not say on how many. Set strategy.cut.devices=2, "
                "or, for stages on ranks, strategy.cut.engine=torch."
            )
        if self.stages_per_rank is not None:
            raise ConfigError(
                f"strategy.cut.stages_per_rank={self.stages_per_rank} is for pipelines with "
                "stages on ranks, and strategy.cut.engine=fairscale puts one stage on each device "
                "of a process. Leave it out."
            )
        refuse_wrong_places(self, self.devices, f"strategy.cut.devices={self.devices}")
        refuse_missing_devices(self.devices, plan)
        self._check_replicas(plan)
        require_fairscale("strategy.cut.engine=fairscale", "set strategy.cut.engine=torch")

    def _check_replicas(self, plan: Plan) -> None:
        replicate = plan.techniques["replicate"].name
        if plan.dp > 1 and is_accelerator(plan.device_type):
            raise ConfigError(
                "strategy.cut.engine=fairscale puts a model's parameters on several GPUs of a "
                "process, "
                f"and mesh.dp={plan.dp} replicas can be averaged only if each is on one GPU. Use "
                "mesh.dp=1, or strategy.cut.engine=torch."
            )
        if plan.dp > 1 and self.checkpoint != "never":
            raise ConfigError(
                f"strategy.cut.checkpoint={self.checkpoint}: Pipe recomputes a stage inside of the "
                "backward pass, where DistributedDataParallel takes no second gradient of a "
                f"parameter, and mesh.dp={plan.dp}. Leave it out and set strategy.recompute=full, "
                "or use mesh.dp=1."
            )
        if plan.dp > 1 and replicate not in ("single", "ddp"):
            raise ConfigError(
                f"strategy.replicate={replicate} shards the states of a model that is on one "
                "device, and strategy.cut.engine=fairscale puts it on several. Set "
                "strategy.replicate=ddp, or strategy.cut.engine=torch."
            )

    def ranks(self, plan: Plan) -> tuple[int, ...]:  # noqa: ARG002
        """Return the number of the device of each stage: one stage is on each device."""
        return tuple(range(self.devices or 1))

    def in_flight(self, plan: Plan) -> tuple[int, ...]:
        """See `CutStrategy.in_flight`: all micro-batches of a step, on each stage."""
        return (plan.batch.accumulation_steps,) * (self.devices or 1)

    def predicts_by_stage(self, plan: Plan) -> bool:  # noqa: ARG002
        """See `CutStrategy.predicts_by_stage`: the stages of a cycle run side by side."""
        return True

    def estimate(self, forecast: Forecast, profile: Profile, plan: Plan) -> Forecast:  # noqa: ARG002
        """Add the sums of gradients, or with `checkpoint` the recomputation of each stage.

        One backward call runs all micro-batches. While tensors are tracked, autograd sums two
        gradients into a new tensor, so three are alive. A recomputed stage has a separate backward
        call, which adds gradients in place.
        """
        if self.checkpoint == "never":
            return forecast.with_passes(later=_with_sums(forecast.passes))
        recomputed = {f"{w}_split": _cut_at_highest(profile.passes[w]) for w in ("first", "later")}
        return forecast.with_passes(**recomputed)

    def actions(self, plan: Plan, pp_rank: int) -> RankActions:  # noqa: ARG002
        """Return the passes in the order of Pipe's clock cycles.

        All forward passes come first, then all backward passes in the reverse order. All stages of
        a cycle are recomputed before the backward pass of any of them.
        """
        num_micro_batches = plan.batch.accumulation_steps
        stages = self.devices or 1
        cycles = [
            [
                (stage, cycle - stage)
                for stage in range(stages)
                if 0 <= cycle - stage < num_micro_batches
            ]
            for cycle in range(num_micro_batches + stages - 1)
        ]
        actions = [
            Action(stage, "F", micro_batch) for cycle in cycles for stage, micro_batch in cycle
        ]
        kinds: tuple[ActionKind, ...] = ("B",) if self.checkpoint == "never" else ("I", "W")
        for cycle in reversed(cycles):
            for kind in kinds:
                actions += [
                    Action(stage, kind, micro_batch) for stage, micro_batch in reversed(cycle)
                ]
        return RankActions(actions)

    def apply(self, assembly: Assembly) -> None:
        """Put the stages into a Pipe, which a replicate technique then wraps."""
        if assembly.layout is None or self.devices is None:
            return
        from bigtrain.strategies.pipeline.fairscale_runner import FairscaleRunner, PipedStages

        stages = assembly.make_stages(range(self.devices))
        devices = local_devices(assembly, self.devices)
        chunks = assembly.plan.batch.accumulation_steps
        bf16 = assembly.plan.precision == "bf16"
        assembly.module = PipedStages(
            stages, devices, assembly.model, chunks, self.checkpoint, autocast=bf16
        )
        assembly.runner = FairscaleRunner
        super().apply(assembly)


def _with_sums(passes: Passes) -> Timeline:
    """Return the pass of a later micro-batch, with a new tensor for each sum of two gradients."""
    first, later = (sorted(passes[w].spans, key=lambda s: s.birth) for w in ("first", "later"))
    if [span.nbytes for span in first] != [span.nbytes for span in later]:
        return passes["later"]  # the gradients cannot be recognised
    sums = (
        Span(now.nbytes, "temporary", now.death - 1, now.death)
        for was, now in zip(first, later, strict=True)
        if was.kind == "gradients"
    )
    return Timeline((*later, *sums), passes["later"].phases)


def _cut_at_highest(timeline: Timeline) -> Timeline:
    """Return the pass with a second backward phase, which begins at the peak of the first."""
    return replace(timeline, phases=(*timeline.phases, (_highest(timeline), "backward")))


def _highest(timeline: Timeline) -> int:
    """Return the tick of the backward pass with the most bytes alive."""
    begin = timeline.phases[-1][0]
    changes: dict[int, int] = {}
    for span in timeline.spans:
        changes[span.birth] = changes.get(span.birth, 0) + span.nbytes
        changes[span.death] = changes.get(span.death, 0) - span.nbytes
    alive = most = 0
    highest = begin
    for tick in sorted(changes):
        alive += changes[tick]
        if tick >= begin and alive > most:
            highest, most = tick, alive
    return highest
