"""bigtrain: name a strategy, and the same model trains to the same numbers in less memory.

A training loop of one's own needs five lines:

    import bigtrain
    engine = bigtrain.prepare(Net, F.cross_entropy, AdamW, strategy="ddp")
    for batch in batches:  # (inputs, targets) of this rank
        print(engine.step(batch).loss)
    engine.close()

Names are imported when they are first used, so `import bigtrain` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bigtrain.adapt import adapting
    from bigtrain.arguments import train_arguments
    from bigtrain.blueprint import Blueprint, describe
    from bigtrain.build import device_type_of, make_plan
    from bigtrain.checkpoint import Checkpoint, find_checkpoint, newest_checkpoint
    from bigtrain.chunked_loss import ChunkedCrossEntropy
    from bigtrain.config import Job
    from bigtrain.data import Data, MicroBatch, StepLoader, prepare_data
    from bigtrain.distributed import RunContext, connect
    from bigtrain.door import connect_job, prepare
    from bigtrain.engine import Engine, StepResult
    from bigtrain.environment import Placement, detect
    from bigtrain.errors import (
        BigtrainError,
        CheckpointError,
        ConfigError,
        NonFiniteError,
        OutOfMemoryError,
    )
    from bigtrain.failures import run_guarded
    from bigtrain.launch import launcher_hint
    from bigtrain.loading import changed_job, load_job
    from bigtrain.parts import Parts, check_job, open_parts
    from bigtrain.planner.auto import read_job
    from bigtrain.report.lines import closing_lines, console, dry_run_lines, opening_lines
    from bigtrain.report.memory_report import MemoryReport
    from bigtrain.report.run_log import RunLog, run_folder
    from bigtrain.restart import Restart
    from bigtrain.strategy import Plan, Strategy
    from bigtrain.tasks import CrossEntropy, Loss, MeanLoss, Task

__version__ = "0.1.0"

_HOMES = {
    "BigtrainError": "errors",
    "Blueprint": "blueprint",
    "Checkpoint": "checkpoint",
    "CheckpointError": "errors",
    "ChunkedCrossEntropy": "chunked_loss",
    "ConfigError": "errors",
    "CrossEntropy": "tasks",
    "Data": "data",
    "Engine": "engine",
    "Job": "config",
    "Loss": "tasks",
    "MeanLoss": "tasks",
    "MemoryReport": "report.memory_report",
    "MicroBatch": "data",
    "NonFiniteError": "errors",
    "OutOfMemoryError": "errors",
    "Parts": "parts",
    "Placement": "environment",
    "Plan": "strategy",
    "Restart": "restart",
    "RunContext": "distributed",
    "RunLog": "report.run_log",
    "StepLoader": "data",
    "StepResult": "engine",
    "Strategy": "strategy",
    "Task": "tasks",
    "adapting": "adapt",
    "changed_job": "loading",
    "check_job": "parts",
    "closing_lines": "report.lines",
    "connect": "distributed",
    "connect_job": "door",
    "console": "report.lines",
    "describe": "blueprint",
    "detect": "environment",
    "device_type_of": "build",
    "dry_run_lines": "report.lines",
    "find_checkpoint": "checkpoint",
    "launcher_hint": "launch",
    "load_job": "loading",
    "make_plan": "build",
    "newest_checkpoint": "checkpoint",
    "open_parts": "parts",
    "opening_lines": "report.lines",
    "prepare": "door",
    "prepare_data": "data",
    "read_job": "planner.auto",
    "run_folder": "report.run_log",
    "run_guarded": "failures",
    "train_arguments": "arguments",
}

__all__ = [
    "BigtrainError",
    "Blueprint",
    "Checkpoint",
    "CheckpointError",
    "ChunkedCrossEntropy",
    "ConfigError",
    "CrossEntropy",
    "Data",
    "Engine",
    "Job",
    "Loss",
    "MeanLoss",
    "MemoryReport",
    "MicroBatch",
    "NonFiniteError",
    "OutOfMemoryError",
    "Parts",
    "Placement",
    "Plan",
    "Restart",
    "RunContext",
    "RunLog",
    "StepLoader",
    "StepResult",
    "Strategy",
    "Task",
    "adapting",
    "changed_job",
    "check_job",
    "closing_lines",
    "connect",
    "connect_job",
    "console",
    "describe",
    "detect",
    "device_type_of",
    "dry_run_lines",
    "find_checkpoint",
    "launcher_hint",
    "load_job",
    "make_plan",
    "newest_checkpoint",
    "open_parts",
    "opening_lines",
    "prepare",
    "prepare_data",
    "read_job",
    "run_folder",
    "run_guarded",
    "train_arguments",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bigtrain' has no attribute {name!r}")
    return getattr(importlib.import_module(f"bigtrain.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
