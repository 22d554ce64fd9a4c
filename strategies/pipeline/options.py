"""What a user may say about a pipeline, and what each engine of it provides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field

from bigtrain.core.strategy import Assembly, CutStrategy, Given, Plan, Strategy
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Bytes, Role
from bigtrain.schedules.orders import ONE_STAGE

Recompute = Literal["never", "except_last", "always"]


class PipelineOptions(CutStrategy):
    """The keys of `strategy.cut` where its name is `pipeline`."""

    role: ClassVar[Role] = "cut"

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
    engine: Literal["torch", "fairscale", "deepspeed"] = "torch"
    """Whose implementation: torch.distributed.pipelining, fairscale's Pipe, DeepSpeed's engine."""
    devices: int | None = Field(None, ge=2)
    """Devices of one process that the stages are laid on (fairscale only, which needs it)."""
    stages_per_rank: int | None = Field(None, ge=1)
    """Stages on each rank; left out, as the schedule needs: 1, or 2."""
    at: tuple[str, ...] = ()
    """Modules before which the cuts stand; left out, the stages are balanced."""
    checkpoint: Recompute = "never"
    """Which micro-batches keep only a stage's inputs and compute the rest again (GPipe)."""
    batch_norm: Literal["micro_batch", "deferred"] = "micro_batch"
    """Running statistics follow each micro-batch, or the whole batch of a step at its end."""
    memory: Bytes | None = Field(None, gt=0)
    """What the states and activations of a rank may take when the stages are chosen."""

    def per_rank(self) -> int:
        """Stages on each rank."""
        return self.stages_per_rank or (1 if self.schedule in ONE_STAGE else 2)


class PipelineEngine:
    """What runs the stages. Stateless; the neutral answers stand here."""

    owns_step: bool = True
    optimizer_gets: Given = "parameters"
    needs_group: bool = False
    spans_ranks: bool = True
    """Whether the stages are on the ranks of the pp axis, or all in each process."""

    def joins(self, replicate: Strategy) -> bool:  # noqa: ARG002
        """See `CutStrategy.joins`."""
        return False

    def splits_backward(self, options: PipelineOptions) -> bool:  # noqa: ARG002
        """See `CutStrategy.splits_backward`."""
        return False

    def check(self, options: PipelineOptions, plan: Plan) -> None:
        """Refuse, as `Strategy.check` does."""
        raise NotImplementedError

    def ranks(self, options: PipelineOptions, plan: Plan) -> tuple[int, ...]:  # noqa: ARG002
        """For each stage its pp rank, or its device."""
        return tuple(range(plan.pp))

    def in_flight(self, options: PipelineOptions, plan: Plan) -> tuple[int, ...]:
        """For each stage the most micro-batches that it holds activations of."""
        raise NotImplementedError

    def replays(self, options: PipelineOptions, plan: Plan) -> bool:  # noqa: ARG002
        """See `CutStrategy.replays`."""
        return True

    def estimate(
        self,
        options: PipelineOptions,  # noqa: ARG002
        forecast: Forecast,
        profile: Profile,  # noqa: ARG002
        plan: Plan,  # noqa: ARG002
    ) -> Forecast:
        """As `Strategy.estimate`, where the memory is not predicted by stages."""
        return forecast

    def replayed(
        self,
        options: PipelineOptions,
        forecasts: Mapping[int, Forecast],
        plan: Plan,
        pp_rank: int,
        halves: Mapping[int, Forecast],
    ) -> Forecast:
        """See `CutStrategy.replayed`."""
        raise NotImplementedError

    def apply(self, options: PipelineOptions, assembly: Assembly) -> None:
        """Change the assembly, as `Strategy.apply`."""
        raise NotImplementedError


def refuse_no_ranks(options: PipelineOptions, plan: Plan) -> None:
    """Refuse a mesh without a pp axis, and devices beside it.

    Raises:
        ConfigError: stages are wanted on ranks, and there is one.
    """
    if options.devices is not None:
        raise ConfigError(
            f"strategy.cut.devices={options.devices} lays the stages on devices of one process, "
            f"which engine=fairscale does, and engine is {options.engine}. Leave it out, or set "
            "strategy.cut.engine=fairscale."
        )
    if plan.pp < 2:
        raise ConfigError(
            f"strategy.cut: {options.schedule} needs at least 2 ranks on the pp axis, and "
            f"mesh.pp={plan.pp}. Start more ranks and use mesh.pp=2, or --strategy single."
        )


def refuse_wrong_places(options: PipelineOptions, stages: int, where: str) -> None:
    """Refuse more or fewer places than there are cuts.

    Args:
        options: the technique's keys.
        stages: how many there are.
        where: on what they are laid, for the message.

    Raises:
        ConfigError: `at` names another number.
    """
    if options.at and len(options.at) != stages - 1:
        raise ConfigError(
            f"strategy.cut.at names {len(options.at)} places, and {where} has {stages - 1} cuts. "
            "Name that many, or leave strategy.cut.at out."
        )


def cpu_or_local(assembly: Assembly, count: int) -> list[torch.device]:
    """The devices of this process: on GPUs those after the other local ranks'."""
    here = assembly.context.device
    if here.type != "cuda":
        return [here] * count
    first = assembly.context.local_rank * count
    return [torch.device("cuda", first + number) for number in range(count)]
