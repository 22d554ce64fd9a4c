"""Stages on several devices of one process, one computing at a time: naive model parallelism.

The plain loop calls a chain of the stages like a whole model. So replicas of every kind are
possible on a CPU. With stages on several GPUs there is one replica.

Source: Krizhevsky et al. 2012, who put layers on two GPUs; Huang et al. 2019 (arXiv 1811.06965),
figure 2b, which shows the idle time.
"""

from __future__ import annotations

from dataclasses import replace

from bigtrain.core.strategy import Assembly, Plan
from bigtrain.core.traits import CutTraits
from bigtrain.devices import is_accelerator
from bigtrain.errors import ConfigError
from bigtrain.pipeline.local_chain import StageChain
from bigtrain.strategies.pipeline import (
    Pipeline,
    local_devices,
    refuse_missing_devices,
    refuse_wrong_places,
)


class DevicePipeline(Pipeline):
    """Stages chained on the devices of each process; the plain loop runs the micro-batches."""

    @property
    def traits(self) -> CutTraits:
        """See `Strategy.traits`."""
        return replace(super().traits, owns_step=False, is_distributed=False)

    def check(self, plan: Plan) -> None:
        """Refuse options of stages on ranks, replicas on GPUs, and more GPUs than there are."""
        for key, neutral in (("stages_per_rank", None), ("checkpoint", "never")):
            value = getattr(self, key)
            if value != neutral:
                raise ConfigError(
                    f"strategy.cut.{key}={value} is for pipelines with stages on ranks, and "
                    f"strategy.cut.devices={self.devices} puts them on devices of one process. "
                    "Leave it out, or leave strategy.cut.devices out."
                )
        if plan.dp > 1 and is_accelerator(plan.device_type):
            raise ConfigError(
                f"strategy.cut.devices={self.devices} puts a model's parameters on several GPUs "
                f"of a process, and mesh.dp={plan.dp} replicas can be averaged only if each is on "
                "one GPU. Use mesh.dp=1, or leave strategy.cut.devices out for stages on ranks."
            )
        if self.devices is not None:
            refuse_missing_devices(self.devices, plan)
            where = f"strategy.cut.devices={self.devices}"
            refuse_wrong_places(self, self.devices, where)

    def ranks(self, plan: Plan) -> tuple[int, ...]:  # noqa: ARG002
        """Return the number of the device of each stage: one stage is on each device."""
        return tuple(range(self.devices or 1))

    def apply(self, assembly: Assembly) -> None:
        """Chain the stages on the devices of this process."""
        if assembly.layout is None or self.devices is None:
            return
        stages = assembly.make_stages(range(self.devices))
        assembly.roots = [assembly.model]
        assembly.module = StageChain(stages, local_devices(assembly, self.devices), assembly.model)
        super().apply(assembly)
