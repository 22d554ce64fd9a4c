"""One process with several GPUs: the model is copied to each of them for every micro-batch.

This is torch's DataParallel, the predecessor of `ddp`: one Python thread runs each GPU, and the
first GPU computes the loss and the optimizer's step.

Memory: the first GPU alone has gradients and optimizer state; it also has the gathered outputs, and
the gradients of all GPUs while they are added up. Every other GPU has the parameters and its share
of the activations during a micro-batch. Changes of buffers (BatchNorm statistics) on other GPUs are
lost.
Communication: between the GPUs of a process, for each micro-batch: parameters and buffers to
every GPU, the gradients back, and inputs and outputs. No process group is used.
Constraints: CUDA with 2 GPUs or more, one rank, and at least one row of a micro-batch for each GPU;
no stages, no recomputation, no offload. Forecasts follow torch's code, and no run has checked them.
Example: python bigtrain/train.py --strategy data_parallel

Source: Li et al. 2020, PyTorch Distributed (arXiv 2006.15704), section 2.2, compares it with DDP.
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
    summary: ClassVar[str] = "one process; the model is copied to its GPUs in each pass"

    devices: int | None = Field(None, ge=2)
    """The number of GPUs that the process uses; by default all of them."""

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
        """The number of GPUs that the process uses."""
        return self.devices or device_count()

    def variants(self, shape: Shape) -> Iterable[Variant]:  # noqa: ARG002
        """Return no variant: `ddp` with a rank for each GPU needs less memory and sends less."""
        return ()

    def check(self, plan: Plan) -> None:
        """Refuse fewer than two GPUs in one process, and techniques that change modules."""
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
        visible = device_count()
        if visible < self.count or visible < 2:
            fix = ", or strategy.replicate.devices=2." if visible > 1 else "."
            raise ConfigError(
                f"strategy data_parallel needs {self.devices or 2} GPUs in this process, and torch "
                f"sees {visible}. Use --strategy single{fix}"
            )
        rows = plan.batch.micro_size
        idle = self.count - len(rows_of_devices(rows, self.count))
        if idle:
            raise ConfigError(
                f"strategy data_parallel divides the {rows} rows of a micro-batch among "
                f"{self.count} GPUs, and {idle} of them would get none. "
                f"Use train.micro_batch_size={-(-rows // self.count) * self.count}."
            )
        for role in ("cut", "recompute", "offload"):
            if role in plan.techniques:
                raise ConfigError(
                    f"strategy data_parallel copies the modules to each GPU, and strategy.{role} "
                    f"would change those of the first only. Leave strategy.{role} out, or use "
                    "--strategy ddp."
                )

    def advise(self, forecast: Forecast, profile: Profile, plan: Plan) -> str:  # noqa: ARG002
        """Return a line with the additional memory that the first GPU needs."""
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
        """Add copies of the parameters, and the gradients of all copies at the end of a pass.

        The bytes are those of all GPUs together. The gathered outputs are not included, because a
        profile does not have their size.
        """
        copies = (self.count - 1) * (profile.parameter_bytes + profile.buffer_bytes)
        return forecast.with_passes(
            **{
                name: _with_replicas(timeline, copies, self.count * profile.gradient_bytes)
                for name, timeline in forecast.passes.items()
            }
        )

    def traffic(self, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:  # noqa: ARG002
        """Return the copies of parameters and buffers to all GPUs, and of gradients to the first.

        The copies of inputs and outputs are not counted.
        """
        copied = profile.parameter_bytes + profile.buffer_bytes
        copies = Traffic("broadcast", copied, 1, "micro_batch", "nothing", self.count)
        sums = Traffic("reduce", profile.gradient_bytes, 1, "micro_batch", "nothing", self.count)
        return replace(copies, in_process=True), replace(sums, in_process=True)

    def apply(self, assembly: Assembly) -> None:
        """Wrap the module in DataParallel, and let the meter measure the memory of all GPUs."""
        kind = assembly.context.device.type
        devices = [torch.device(kind, number) for number in range(self.count)]
        assembly.meter.add_devices(devices)
        assembly.module = nn.DataParallel(assembly.module, device_ids=devices)


def rows_of_devices(rows: int, devices: int) -> list[int]:
    """Return the number of rows that each device gets under DataParallel; the last may get fewer.

    Args:
        rows: the number of rows of the micro-batch.
        devices: the number of devices. Devices without rows are not in the result.
    """
    share = -(-rows // devices)
    return [min(share, rows - begin) for begin in range(0, rows, share)]


def _with_replicas(timeline: Timeline, copies: int, gradients: int) -> Timeline:
    """Add bytes of copies for the whole pass, and bytes of all copies' gradients at its end."""
    begin = timeline.phases[0][0]
    end = max((span.death for span in timeline.spans), default=begin + 1)
    more = (
        Span(copies, "parameters", begin, end),
        Span(gradients, "gradients", max(begin, end - 1), end),
    )
    return Timeline((*timeline.spans, *more), timeline.phases)
