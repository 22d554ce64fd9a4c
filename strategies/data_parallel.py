"""One process with several GPUs: the model is copied to each of them for every micro-batch.

torch's DataParallel, which taught many what replicas are, and which `ddp` has taken the place of:
one thread of Python serves each GPU, and the first one does all that is done once.

Memory: gradients and optimizer state on the first GPU alone, which also holds the gathered outputs
and every GPU's gradients while they are added up; on each other one the parameters and its share of
the activations, for the length of a micro-batch. Buffers that the others change (BatchNorm
statistics) are lost: those of the first GPU's rows are kept.
Communication: between the GPUs of a process, for each micro-batch: the parameters and buffers to
every GPU, the gradients back, and inputs and outputs. Nothing that a process group sees.
Constraints: CUDA with 2 GPUs or more, one rank, rows for each GPU; no stages, no recomputation, no
offload. It was not run where it was written, as there was no GPU: forecasts are of its code.
Example: python bigtrain/train.py --strategy data_parallel

Source: Li et al. 2020, PyTorch Distributed (arXiv 2006.15704), section 2.2, compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import nn

from bigtrain.core.strategy import Assembly, Plan, Strategy
from bigtrain.core.traits import SPARSE, Need, Traits
from bigtrain.core.variants import Shape, Variant
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.costs.traffic import Traffic
from bigtrain.devices import device_count, is_accelerator
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Role
from bigtrain.memory.timeline import Span, Timeline
from bigtrain.units import format_bytes


class DataParallel(Strategy):
    """torch's DataParallel over the GPUs of one process."""

    name: ClassVar[str] = "data_parallel"
    role: ClassVar[Role] = "replicate"
    summary: ClassVar[str] = "one process, its GPUs' copies of the model made anew in each pass"

    devices: int | None = Field(None, ge=2)
    """GPUs of the process; left out, all that there are."""

    @property
    def need(self) -> Need:
        """See `Strategy.need`: `ddp` does the same in less time and memory."""
        return "learning"

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`."""
        return Traits(final_gradients=True, cannot_hold=SPARSE, copies_modules=True)

    @property
    def count(self) -> int:
        """How many GPUs take part."""
        return self.devices or device_count()

    def variants(self, shape: Shape) -> Iterable[Variant]:  # noqa: ARG002
        """None: a rank for each GPU with `ddp` has more memory and less to send."""
        return ()

    def check(self, plan: Plan) -> None:
        """Refuse what has no several GPUs in one process, or changes the modules it copies."""
        if not is_accelerator(plan.device_type):
            raise ConfigError(
                "strategy data_parallel splits each micro-batch over several GPUs of one process: "
                f"it needs CUDA, and the device is {plan.device_type}. Use --strategy ddp and "
                "start several ranks, or --strategy single."
            )
        if plan.world_size > 1:
            raise ConfigError(
                f"strategy data_parallel is one process with several GPUs, and {plan.world_size} "
                "ranks were started. Use --strategy ddp, or start one rank."
            )
        found = device_count()
        if found < self.count or found < 2:
            raise ConfigError(
                f"strategy data_parallel needs {self.devices or 2} GPUs in this process, and torch "
                f"sees {found}. Use --strategy single" + (", or devices: 2." if found > 1 else ".")
            )
        rows = plan.batch.micro_size
        idle = self.count - len(rows_of_devices(rows, self.count))
        if idle:
            raise ConfigError(
                f"strategy data_parallel deals the {rows} rows of a micro-batch out to "
                f"{self.count} GPUs, and {idle} of them would get none. "
                f"Use train.micro_batch_size={-(-rows // self.count) * self.count}."
            )
        for role in ("cut", "recompute", "offload"):
            if role in plan.techniques:
                raise ConfigError(
                    f"strategy data_parallel copies the modules to each GPU, and what strategy."
                    f"{role} does with them stays on the first. Leave strategy.{role} out, or use "
                    "--strategy ddp."
                )

    def advise(self, forecast: Forecast, profile: Profile, plan: Plan) -> str:  # noqa: ARG002
        """What the first GPU has to hold beside the others."""
        more = profile.gradient_bytes + profile.optimizer_bytes
        lost = (
            "; buffers (BatchNorm statistics) follow the rows of the first GPU alone"
            if profile.buffer_bytes
            else ""
        )
        return (
            f"data_parallel: the first of {self.count} GPUs holds {format_bytes(more)} more than "
            f"each other (gradients, optimizer state), and all outputs{lost}. "
            "--strategy ddp has neither."
        )

    def estimate(self, forecast: Forecast, profile: Profile, plan: Plan) -> Forecast:  # noqa: ARG002
        """Of all GPUs together: copies of the parameters, and at the end all gradients at once.

        The gathered outputs are not in it: a profile does not say how large they are.
        """
        copies = (self.count - 1) * (profile.parameter_bytes + profile.buffer_bytes)
        return forecast.with_passes(
            **{
                way: _with_replicas(timeline, copies, self.count * profile.gradient_bytes)
                for way, timeline in forecast.passes.items()
            }
        )

    def traffic(self, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:  # noqa: ARG002
        """Parameters and buffers to all GPUs, gradients back; inputs and outputs are not stated."""
        copied = profile.parameter_bytes + profile.buffer_bytes
        there = Traffic("broadcast", copied, 1, "micro_batch", "nothing", self.count)
        back = Traffic("reduce", profile.gradient_bytes, 1, "micro_batch", "nothing", self.count)
        return replace(there, in_process=True), replace(back, in_process=True)

    def apply(self, assembly: Assembly) -> None:
        """Wrap the module; the process's devices are all measured."""
        kind = assembly.context.device.type
        found = [torch.device(kind, number) for number in range(self.count)]
        assembly.meter.add_devices(found)
        assembly.module = nn.DataParallel(assembly.module, device_ids=found)


def rows_of_devices(rows: int, devices: int) -> list[int]:
    """How DataParallel deals out the rows of a micro-batch: the last device may have fewer.

    Args:
        rows: of the micro-batch.
        devices: that there are; those that get none are left out.
    """
    share = -(-rows // devices)
    return [min(share, rows - begin) for begin in range(0, rows, share)]


def _with_replicas(timeline: Timeline, copies: int, gradients: int) -> Timeline:
    """With the copies from begin to end, and the replicas' gradients when they are added up."""
    begin = timeline.phases[0][0]
    end = max((span.death for span in timeline.spans), default=begin + 1)
    more = (
        Span(copies, "parameters", begin, end),
        Span(gradients, "gradients", max(begin, end - 1), end),
    )
    return Timeline((*timeline.spans, *more), timeline.phases)
