"""The lines that a run prints before its first step and after its last."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from bigtrain.engine.engine import Engine
from bigtrain.engine.out_of_memory import predict_save_beyond
from bigtrain.engine.setup import RunSetup
from bigtrain.report.banner import MemoryLimit, banner_lines, peak_line
from bigtrain.report.run_log import step_line


def make_console() -> Console:
    """Return a console for standard output. If it is not a terminal, it is 100 columns wide."""
    return Console() if sys.stdout.isatty() else Console(width=100)


def opening_lines(parts: RunSetup, engine: Engine, resumed: Sequence[str]) -> Iterator[str]:
    """Yield the lines before the first step: the parts of the run, and the predictions.

    Args:
        parts: the parts of the run.
        engine: the engine of the run.
        resumed: lines about the checkpoint from which the run resumes.
    """
    context = engine.context
    yield from banner_lines(parts, context.world_size, context.device.type)
    if not engine.blueprint.deferred:
        reason = engine.blueprint.reason
        yield f"the model was built whole on rank 0 and sent to the others: {reason}"
    if engine.layout is not None:
        yield from engine.layout.lines()
    yield from parts.resolved.notes
    limit = MemoryLimit.of(parts.job, context.device)
    yield peak_line(engine.prediction.fullest, engine.prediction.note, limit)
    save = None if engine.prediction.fullest is None else engine.prediction.fullest.save
    yield from predict_save_beyond(save, engine.limit_bytes, parts.job.checkpoint)
    if engine.prediction.step is not None:
        yield step_line(engine.prediction.step)
    yield from engine.advice
    yield from resumed


def closing_lines(parts: RunSetup, folder: Path) -> Iterator[str]:
    """Yield the lines after the last step: metrics of an untrained baseline, and the folder."""
    for name, value in parts.data.baseline.items():
        yield f"for comparison, without learning: {name} {value:.4f}"
    yield f"results: {folder}"
