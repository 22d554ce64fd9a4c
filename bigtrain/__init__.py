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
    from bigtrain.assembly.make_plan import device_type_of as device_type_of
    from bigtrain.assembly.make_plan import make_plan as make_plan
    from bigtrain.core.strategy import Plan as Plan
    from bigtrain.core.strategy import Strategy as Strategy
    from bigtrain.data import Data as Data
    from bigtrain.data import MicroBatch as MicroBatch
    from bigtrain.data import StepLoader as StepLoader
    from bigtrain.data import prepare_data as prepare_data
    from bigtrain.engine.adapt import adapt_on_oom as adapt_on_oom
    from bigtrain.engine.checkpoint import Checkpoint as Checkpoint
    from bigtrain.engine.checkpoint import find_checkpoint as find_checkpoint
    from bigtrain.engine.checkpoint import newest_checkpoint as newest_checkpoint
    from bigtrain.engine.engine import Engine as Engine
    from bigtrain.engine.engine import StepResult as StepResult
    from bigtrain.engine.prepare import connect_job as connect_job
    from bigtrain.engine.prepare import prepare as prepare
    from bigtrain.engine.setup import RunSetup as RunSetup
    from bigtrain.engine.setup import check_job as check_job
    from bigtrain.engine.setup import open_setup as open_setup
    from bigtrain.errors import BigtrainError as BigtrainError
    from bigtrain.errors import CheckpointError as CheckpointError
    from bigtrain.errors import ConfigError as ConfigError
    from bigtrain.errors import NonFiniteError as NonFiniteError
    from bigtrain.errors import OutOfMemoryError as OutOfMemoryError
    from bigtrain.job.arguments import train_arguments as train_arguments
    from bigtrain.job.load import load_job as load_job
    from bigtrain.job.load import override_job as override_job
    from bigtrain.job.schema import Job as Job
    from bigtrain.losses.chunked_cross_entropy import ChunkedCrossEntropy as ChunkedCrossEntropy
    from bigtrain.losses.loss import CrossEntropy as CrossEntropy
    from bigtrain.losses.loss import Loss as Loss
    from bigtrain.losses.loss import MeanLoss as MeanLoss
    from bigtrain.losses.tasks import Task as Task
    from bigtrain.models.blueprint import Blueprint as Blueprint
    from bigtrain.models.blueprint import describe as describe
    from bigtrain.planner.auto import read_job as read_job
    from bigtrain.prediction.memory_report import MemoryReport as MemoryReport
    from bigtrain.ranks.connect import connect as connect
    from bigtrain.ranks.context import RunContext as RunContext
    from bigtrain.ranks.exit_status import run_guarded as run_guarded
    from bigtrain.ranks.launch import launcher_hint as launcher_hint
    from bigtrain.ranks.launcher_env import RankInfo as RankInfo
    from bigtrain.ranks.launcher_env import detect_rank_info as detect_rank_info
    from bigtrain.ranks.restart import Restart as Restart
    from bigtrain.report.lines import closing_lines as closing_lines
    from bigtrain.report.lines import console as console
    from bigtrain.report.lines import dry_run_lines as dry_run_lines
    from bigtrain.report.lines import opening_lines as opening_lines
    from bigtrain.report.run_log import RunLog as RunLog
    from bigtrain.report.run_log import run_folder as run_folder

__version__ = "0.1.0"

_MODULE_OF = {
    "BigtrainError": "errors",
    "Blueprint": "models.blueprint",
    "Checkpoint": "engine.checkpoint",
    "CheckpointError": "errors",
    "ChunkedCrossEntropy": "losses.chunked_cross_entropy",
    "ConfigError": "errors",
    "CrossEntropy": "losses.loss",
    "Data": "data",
    "Engine": "engine.engine",
    "Job": "job.schema",
    "Loss": "losses.loss",
    "MeanLoss": "losses.loss",
    "MemoryReport": "prediction.memory_report",
    "MicroBatch": "data",
    "NonFiniteError": "errors",
    "OutOfMemoryError": "errors",
    "Plan": "core.strategy",
    "RankInfo": "ranks.launcher_env",
    "Restart": "ranks.restart",
    "RunContext": "ranks.context",
    "RunLog": "report.run_log",
    "RunSetup": "engine.setup",
    "StepLoader": "data",
    "StepResult": "engine.engine",
    "Strategy": "core.strategy",
    "Task": "losses.tasks",
    "adapt_on_oom": "engine.adapt",
    "check_job": "engine.setup",
    "closing_lines": "report.lines",
    "connect": "ranks.connect",
    "connect_job": "engine.prepare",
    "console": "report.lines",
    "describe": "models.blueprint",
    "detect_rank_info": "ranks.launcher_env",
    "device_type_of": "assembly.make_plan",
    "dry_run_lines": "report.lines",
    "find_checkpoint": "engine.checkpoint",
    "launcher_hint": "ranks.launch",
    "load_job": "job.load",
    "make_plan": "assembly.make_plan",
    "newest_checkpoint": "engine.checkpoint",
    "open_setup": "engine.setup",
    "opening_lines": "report.lines",
    "override_job": "job.load",
    "prepare": "engine.prepare",
    "prepare_data": "data",
    "read_job": "planner.auto",
    "run_folder": "report.run_log",
    "run_guarded": "ranks.exit_status",
    "train_arguments": "job.arguments",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'bigtrain' has no attribute {name!r}")
    return getattr(importlib.import_module(f"bigtrain.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
