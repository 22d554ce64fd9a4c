"""DeepSpeed's own offload: what is refused, and where it is of no use."""

from __future__ import annotations

from typing import Any

from bigtrain.core.strategy import Plan
from bigtrain.errors import ConfigError
from bigtrain.job.deepspeed_json import json_section


def check_offload(config: dict[str, Any], plan: Plan, stage: int, instead: str) -> None:
    """Refuse a place that DeepSpeed cannot use for this stage, and the disk for any.

    Raises:
        ConfigError: with the key and the fix.
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
            # Its pieces are then not in memory between the steps, where norms, clipping and
            # checkpoints look for them; and its operator takes libaio and minutes of compiling.
            raise ConfigError(
                f"zero_optimization.{name}.device=nvme (strategy.offload on disk) is not supported "
                f"with engine=deepspeed. Use --strategy {instead} with "
                "strategy.offload.optimizer=disk, or cpu instead of disk."
            )


def offload_advice(plan: Plan) -> str | None:
    """Say where nothing is moved: on a machine without an accelerator the host is the device."""
    away = plan.offload_tiers
    if plan.device_type == "cpu" and "cpu" in (away.optimizer, away.parameters):
        key = "optimizer" if away.optimizer == "cpu" else "parameters"
        return (
            f"strategy.offload.{key}=cpu moves nothing: this run is on the CPU. DeepSpeed's "
            "buffers for it are added all the same. Leave strategy.offload out."
        )
    return None
