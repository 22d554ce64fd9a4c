"""bigtrain: name a strategy, and the same model trains to the same numbers in less memory.

A custom training loop needs five lines:

    import bigtrain
    engine = bigtrain.prepare(Net, F.cross_entropy, AdamW, strategy="ddp")
    for batch in batches:  # (inputs, targets) of this rank
        print(engine.step(batch).loss)
    engine.close()

Names are imported when they are first used, so `import bigtrain` does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bigtrain.checkpoint.folders import newest_checkpoint as newest_checkpoint
    from bigtrain.checkpoint.read import Checkpoint as Checkpoint
    from bigtrain.core.strategy import Plan as Plan
    from bigtrain.core.strategy import Strategy as Strategy
    from bigtrain.engine.alongside.ema import ema as ema
    from bigtrain.engine.alongside.frozen import frozen as frozen
    from bigtrain.engine.engine import Engine as Engine
    from bigtrain.engine.engine import StepResult as StepResult
    from bigtrain.engine.prepare import prepare as prepare
    from bigtrain.errors import BigtrainError as BigtrainError
    from bigtrain.errors import CheckpointError as CheckpointError
    from bigtrain.errors import ConfigError as ConfigError
    from bigtrain.errors import NonFiniteError as NonFiniteError
    from bigtrain.errors import OutOfMemoryError as OutOfMemoryError
    from bigtrain.job.load import load_job as load_job
    from bigtrain.job.schema import Job as Job
    from bigtrain.losses.chunked_cross_entropy import ChunkedCrossEntropy as ChunkedCrossEntropy
    from bigtrain.losses.loss import CrossEntropy as CrossEntropy
    from bigtrain.losses.loss import Loss as Loss
    from bigtrain.losses.loss import MeanLoss as MeanLoss
    from bigtrain.losses.tasks import Task as Task
    from bigtrain.prediction.memory_report import MemoryReport as MemoryReport
    from bigtrain.ranks.connect import connect as connect
    from bigtrain.ranks.context import RunContext as RunContext
    from bigtrain.ranks.launcher_env import detect_rank_info as detect_rank_info

__version__ = "0.1.0"

_MODULE_OF = {
    "BigtrainError": "errors",
    "Checkpoint": "checkpoint.read",
    "CheckpointError": "errors",
    "ChunkedCrossEntropy": "losses.chunked_cross_entropy",
    "ConfigError": "errors",
    "CrossEntropy": "losses.loss",
    "Engine": "engine.engine",
    "Job": "job.schema",
    "Loss": "losses.loss",
    "MeanLoss": "losses.loss",
    "MemoryReport": "prediction.memory_report",
    "NonFiniteError": "errors",
    "OutOfMemoryError": "errors",
    "Plan": "core.strategy",
    "RunContext": "ranks.context",
    "StepResult": "engine.engine",
    "Strategy": "core.strategy",
    "Task": "losses.tasks",
    "connect": "ranks.connect",
    "detect_rank_info": "ranks.launcher_env",
    "ema": "engine.alongside.ema",
    "frozen": "engine.alongside.frozen",
    "load_job": "job.load",
    "newest_checkpoint": "checkpoint.folders",
    "prepare": "engine.prepare",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'bigtrain' has no attribute {name!r}")
    return getattr(importlib.import_module(f"bigtrain.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
