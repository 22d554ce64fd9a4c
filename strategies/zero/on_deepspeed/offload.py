"""DeepSpeed's own offload: refusals and advice."""

from __future__ import annotations

from typing import Any

from bigtrain.core.strategy import Plan
from bigtrain.errors import ConfigError
from bigtrain.job.deepspeed_json import json_section


def check_offload(config: dict[str, Any], plan: Plan, stage: int, instead: str) -> None:
    """Refuse offload of parameters below stage 3, and offload to disk in any stage.

    Raises:
        ConfigError: the plan or the file asks for one of them.
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
            # The pieces would not be in memory between steps, where norms, clipping and
            # checkpoints read them; and its operator needs libaio and minutes of compilation.
            raise ConfigError(
                f"zero_optimization.{name}.device=nvme (strategy.offload on disk) is not supported "
                f"with engine=deepspeed. Use --strategy {instead} with "
                "strategy.offload.optimizer=disk, or cpu instead of disk."
            )


def offload_advice(plan: Plan) -> str | None:
    """Return one line if offload moves nothing, because the device is the host; else None."""
    away = plan.offload_tiers
    if plan.device_type == "cpu" and "cpu" in (away.optimizer, away.parameters):
        key = "optimizer" if away.optimizer == "cpu" else "parameters"
        return (
            f"strategy.offload.{key}=cpu moves nothing: this run is on the CPU. DeepSpeed's "
            "buffers for it are added all the same. Leave strategy.offload out."
        )
    return None
