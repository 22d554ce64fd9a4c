"""The model cut into stages, one or more on each rank; micro-batches pass through them.

Memory: parameters, gradients and optimizer state of the rank's stages, and the activations of the
micro-batches in flight there. Of m micro-batches on p stages these are all m with `gpipe`, at most
p - s on stage s with `1f1b`, and one with `naive`, where one stage computes at a time.
Communication: the tensors that cross a cut, forward and backward, for each micro-batch.
Constraints: the model has to run on tensors without values. With m micro-batches on p stages a rank
is idle for (p-1)/(m+p-1) of the time, or less with several stages on a rank. Schedules and replicas
depend on the engine.
Example: deepspeed --num_accelerators 2 bigtrain/train.py --strategy 1f1b

Source: Huang et al. 2019, GPipe (arXiv 1811.06965); Narayanan et al. 2021, Megatron-LM (arXiv
2104.04473), section 2.2; Qi et al. 2023, Zero Bubble (arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from bigtrain.core.strategy import Assembly, CutStrategy, Plan
from bigtrain.core.traits import SPARSE, CutTraits, StageRecompute
from bigtrain.core.variants import Shape, Variant
from bigtrain.core.workload import Workload
from bigtrain.costs.forecast import Profile
from bigtrain.costs.traffic import Traffic, TrafficKind
from bigtrain.cutting.choose import NOMINAL_RATES, CutRequest, choose_cut
from bigtrain.cutting.layout import Layout, numerics_for
from bigtrain.cutting.traced_model import TracedModel
from bigtrain.devices import device_count, is_accelerator, tracing_device
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Bytes, Role
from bigtrain.optim.update import bytes_per_parameter_byte
from bigtrain.pipeline.deferred_batch_norm import DeferredBatchNorm, has_running_statistics
from bigtrain.schedules.orders import (
    SINGLE_STAGE_SCHEDULES,
    SPLIT_BACKWARD_SCHEDULES,
    V_SHAPED_SCHEDULES,
)
from bigtrain.tensors.cuda_program import stands_for_cuda

BATCH_NORM = {
    "micro_batch": "BatchNorm: each micro-batch by its own statistics, and the running ones follow",
    "deferred": "BatchNorm: each micro-batch by its own statistics; the running ones follow the "
    "whole batch of a step",
}

_OFFERED = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved_1f1b": "interleaved_1f1b",
    "zbv_zero_bubble": "zbv",
    "interleaved_zero_bubble": "zero_bubble",
}
"""The schedules that the planner chooses from, with the words of their presets.

Each of them needs the least time or the least memory for some jobs.
"""


class Pipeline(CutStrategy):
    """A model in stages, on the ranks of the pp axis or on the devices of a process.

    This class has the keys, and the code that all engines share. A subclass for each engine runs
    the stages; `registry.TECHNIQUES` lists the subclasses.
    """

    name: ClassVar[str] = "pipeline"
    role: ClassVar[Role] = "cut"
    summary: ClassVar[str] = "stages of layers on the ranks; micro-batches flow through them"

    schedule: Literal[
        "naive",
        "gpipe",
        "1f1b",
        "interleaved_1f1b",
        "looped_bfs",
        "interleaved_zero_bubble",
        "zbv_zero_bubble",
        "dualpipev",
    ] = "1f1b"
    """The order of a rank's forward and backward passes. `naive`: a micro-batch runs forward and
    backward through all stages, then the next."""
    engine: Literal["torch", "fairscale", "deepspeed"] = "torch"
    """The implementation: torch.distributed.pipelining, fairscale's Pipe, DeepSpeed's engine."""
    devices: int | None = Field(None, ge=2)
    """The number of devices of one process that have the stages.

    Only for schedule naive, and for engine fairscale, which requires it.
    """
    stages_per_rank: int | None = Field(None, ge=1)
    """The number of stages on each rank; by default 1 or 2, as the schedule needs."""
    at: tuple[str, ...] = ()
    """Modules at which the second and later stages begin; by default the stages are balanced."""
    checkpoint: StageRecompute = "never"
    """Micro-batches for which a stage saves only its inputs and recomputes the rest (GPipe)."""
    batch_norm: Literal["micro_batch", "deferred"] = "micro_batch"
    """Whether running statistics follow each micro-batch, or the whole batch at a step's end."""
    memory: Bytes | None = Field(None, gt=0)
    """The most bytes of states and activations on a rank, when the stages are chosen."""

    def per_rank(self) -> int:
        """Return the number of stages on each rank."""
        return self.stages_per_rank or (1 if self.schedule in SINGLE_STAGE_SCHEDULES else 2)

    @property
    def traits(self) -> CutTraits:
        """See `Strategy.traits`."""
        return CutTraits(
            engine=self.engine,
            owns_step=True,
            schedule=self.schedule,
            stages_per_rank=self.per_rank(),
            recompute=self.checkpoint,
            cannot_hold=SPARSE | {"writes", "graph_in_loss"},
        )

    def variants(self, shape: Shape) -> Iterable[Variant]:
        """See `Strategy.variants`: the schedules in `_OFFERED`, if the pp axis has several ranks.

        A schedule with several stages on a rank needs enough blocks. An interleaved one also needs
        at least as many micro-batches as pp ranks.
        """
        if shape.pp == 1:
            return
        most = (shape.num_blocks + 1) // shape.pp
        for schedule, word in _OFFERED.items():
            options = {"name": self.name, "schedule": schedule}
            if schedule in SINGLE_STAGE_SCHEDULES:
                yield Variant(word, options)
            elif schedule in V_SHAPED_SCHEDULES:
                if most >= 2:
                    yield Variant(word, options)
            elif shape.micro_batches >= shape.pp:
                # With whole backward passes a split schedule is interleaved_1f1b.
                splits = schedule in SPLIT_BACKWARD_SCHEDULES
                for count in (count for count in (2, 4) if count <= most):
                    label = f"{word}_{count}" if count > 2 else word
                    yield Variant(label, {**options, "stages_per_rank": count}, splits=splits)

    @property
    def place(self) -> str:
        """The key of the subclass: the engine, or `devices` for torch on devices of a process."""
        on_devices = (
            self.engine == "torch" and self.schedule == "naive" and self.devices is not None
        )
        return "devices" if on_devices else self.engine

    def micro_batches(self, pp: int) -> int:
        """See `CutStrategy.micro_batches`: 4 for each pp rank, or for each of `devices`.

        Schedule `naive` has 1, because it has no pipeline to fill.
        """
        return 1 if self.schedule == "naive" else 4 * (self.devices or pp)

    def ranks(self, plan: Plan) -> tuple[int, ...]:
        """Return the pp rank, or the number of the device, of each stage."""
        return tuple(range(plan.pp))

    def lay_out(self, workload: Workload, plan: Plan) -> Layout:
        """See `CutStrategy.lay_out`."""
        ranks = self.ranks(plan)
        request = CutRequest(
            stages=len(ranks),
            at=self.at,
            in_flight=self.in_flight(plan),
            devices=ranks,
            memory=self.memory,
            state_factor=bytes_per_parameter_byte(workload.make_optimizer),
            rates=NOMINAL_RATES[plan.device_type],
        )
        device = tracing_device(plan.device_type)
        numerics_of_run = numerics_for(
            plan.precision,
            bf16_parameters=plan.bf16_parameters,
            of_cuda=stands_for_cuda(plan.device_type, device),
        )
        traced_model = TracedModel(workload.model, workload.loss, device, numerics_of_run)
        return Layout(
            choose_cut(traced_model, workload.micro_batch, request),
            ranks,
            "pp rank" if self.traits.is_distributed else "device",
            BATCH_NORM[self.batch_norm] if self._changes_statistics(workload.model) else "",
        )

    def traffic(self, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
        """Return the messages of a stage: boundary tensors, and once a step tied gradients.

        The result is empty for a stage without either. If replicas have shards of the gradients of
        tied parameters, the shards are sent.
        """
        crossing, messages = profile.crossing, []
        tied = sum(gradient.received(*plan.gradient_shard) for gradient in crossing.tied)
        directions: tuple[tuple[TrafficKind, int], ...] = (
            ("send", crossing.sent),
            ("receive", crossing.received),
        )
        for kind, nbytes in directions:
            if nbytes:
                messages.append(Traffic(kind, nbytes, 1, "micro_batch", "schedule", 2, plan.tp))
            if tied:
                messages.append(Traffic(kind, tied, 1, "step", "schedule", 2, plan.tp))
        return tuple(messages)

    def _changes_statistics(self, model: nn.Module) -> bool:
        """Return whether BatchNorm statistics of the model differ from those of one process."""
        usual = self.schedule == "naive" and self.batch_norm == "micro_batch"
        return not usual and has_running_statistics(model)

    def apply(self, assembly: Assembly) -> None:
        """Let deferred BatchNorm statistics be updated at the end of each step.

        A subclass calls this method after it has made the stages.
        """
        if self.batch_norm == "deferred":
            assembly.before_update.append(DeferredBatchNorm(assembly.roots).commit)


def refuse_no_ranks(options: Pipeline, plan: Plan) -> None:
    """Refuse a mesh without a pp axis, and the key `devices`.

    Raises:
        ConfigError: the pp axis has one rank, or `devices` is set.
    """
    if options.devices is not None:
        raise ConfigError(
            f"strategy.cut.devices={options.devices} puts the stages on devices of one process, "
            f"which engine=fairscale does, and engine is {options.engine}. Leave it out, or set "
            "strategy.cut.engine=fairscale."
        )
    if plan.pp < 2:
        on_devices = ", in one process, strategy.cut.devices=2"
        instead = on_devices if options.schedule == "naive" else " --strategy single"
        raise ConfigError(
            f"strategy.cut: {options.schedule} needs at least 2 ranks on the pp axis, and "
            f"mesh.pp={plan.pp}. Start more ranks and use mesh.pp=2, or{instead}."
        )


def refuse_wrong_places(options: Pipeline, stages: int, where: str) -> None:
    """Refuse a key `at` that does not name one module for each cut.

    Args:
        options: the keys of the technique.
        stages: the number of stages, one more than the cuts.
        where: the key and value that set this number, for the message.

    Raises:
        ConfigError: `at` names another number of modules.
    """
    if options.at and len(options.at) != stages - 1:
        raise ConfigError(
            f"strategy.cut.at names {len(options.at)} places, and {where} has {stages - 1} cuts. "
            "Name that many, or leave strategy.cut.at out."
        )


def refuse_missing_devices(devices: int, plan: Plan) -> None:
    """Refuse more devices than the machine has.

    Raises:
        ConfigError: the machine has fewer GPUs than `devices`.
    """
    available = devices if plan.device_type == "cpu" else device_count()
    if available < devices:
        raise ConfigError(
            f"strategy.cut.devices={devices}, and there are {available} GPUs. "
            f"Use strategy.cut.devices={available}."
        )


def local_devices(assembly: Assembly, count: int) -> list[torch.device]:
    """Return `count` devices of this process, and let the meter measure their memory.

    Each rank has `count` GPUs of its own. Without GPUs the result has the same device `count`
    times.
    """
    device = assembly.context.device
    if not is_accelerator(device):
        return [device] * count
    first = assembly.context.local_rank * count
    devices = [torch.device(device.type, first + number) for number in range(count)]
    assembly.meter.add_devices(devices)
    return devices
