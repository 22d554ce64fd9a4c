"""DeepSpeed's own offload: what it needs, and where it is of no use."""

from __future__ import annotations

import importlib
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

from bigtrain.errors import ConfigError
from bigtrain.strategy import Plan


def check_offload(plan: Plan, stage: int, instead: str) -> None:
    """Refuse a place that DeepSpeed cannot use for this stage or on this machine.

    Raises:
        ConfigError: with the key and the fix.
    """
    away = plan.offloaded
    if away.parameters != "device" and stage < 3:
        raise ConfigError(
            f"strategy.offload.parameters={away.parameters}: stage {stage} of DeepSpeed keeps "
            "whole parameters on the device. Use --strategy zero3."
        )
    if "disk" not in (away.optimizer, away.parameters):
        return
    if stage < 3:
        raise ConfigError(
            f"strategy.offload.optimizer=disk: DeepSpeed's offload to disk is for stage 3, and the "
            f"stage is {stage}. Use --strategy zero3, or --strategy {instead}."
        )
    if away.path is None:
        raise ConfigError(
            "strategy.offload: DeepSpeed's offload to disk wants a folder. "
            "Set strategy.offload.path to one on a fast disk."
        )
    if not _async_io().is_compatible(verbose=False):
        raise ConfigError(
            "strategy.offload: DeepSpeed's offload to disk is built on libaio, which is not there. "
            f"Run `apt install libaio-dev`, or use --strategy {instead} with "
            "strategy.offload.optimizer=disk."
        )


def _async_io() -> Any:
    """DeepSpeed's builder of its operator for the disk; what it prints is of no use."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        return importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder()


def announce_build(plan: Plan, rank: int) -> None:
    """Say that the operator for the disk is compiled before the first step."""
    away = plan.offloaded
    if rank == 0 and "disk" in (away.optimizer, away.parameters):
        sys.stderr.write(
            "DeepSpeed compiles its async_io operator at the first use on a machine: this takes "
            "five to twenty minutes, once.\n"
        )


def offload_advice(plan: Plan) -> str | None:
    """Say where nothing is moved: on a machine without an accelerator the host is the device."""
    away = plan.offloaded
    if plan.device_type == "cpu" and "cpu" in (away.optimizer, away.parameters):
        key = "optimizer" if away.optimizer == "cpu" else "parameters"
        return (
            f"strategy.offload.{key}=cpu moves nothing: this run is on the CPU. DeepSpeed's "
            "buffers for it are added all the same. Leave strategy.offload out."
        )
    return None
