"""Continuing from a checkpoint, and saving in a way that a full disk does not end the run."""

from __future__ import annotations

from pathlib import Path

import torch

from bigtrain.checkpoint.folders import checkpoints_of, find_checkpoint, newest_checkpoint
from bigtrain.checkpoint.manifest import Manifest
from bigtrain.engine.engine import Engine
from bigtrain.errors import CheckpointError, DamagedCheckpointError
from bigtrain.job.schema import Job


def resume(job: Job, engine: Engine, folder: Path) -> list[str]:
    """Continue from the checkpoint that the job names, if it names one. Collective.

    `auto` goes back to the newest that is whole.

    Args:
        job: `checkpoint.resume` says where from.
        engine: takes the state over.
        folder: of the run.

    Returns:
        What is to be said of it.

    Raises:
        CheckpointError: the checkpoint is damaged, and so are all others, or it is another model's.
    """
    if job.checkpoint.resume is None:
        return []
    if job.checkpoint.resume != "auto":
        path: Path = engine.context.broadcast_object(find_checkpoint(job.checkpoint.resume))
        engine.load(path)
        return [_from(path, engine), *_begun_anew(path, engine)]
    # All ranks continue from the one that rank 0 has found.
    found: list[Path] = engine.context.broadcast_object(checkpoints_of(folder / "checkpoints"))
    damaged: list[str] = []
    for path in found:
        try:
            engine.load(path)
        except DamagedCheckpointError as error:
            damaged.append(str(error.damage))
            continue
        lines = [f"warning: {damage} Goes back to {path.name}." for damage in damaged]
        return [*lines, _from(path, engine), *_begun_anew(path, engine)]
    if damaged:
        raise CheckpointError(
            f"no checkpoint of {folder / 'checkpoints'} is whole. {' '.join(damaged)} "
            "Leave --resume out to begin anew."
        )
    return []


def _from(path: Path, engine: Engine) -> str:
    return f"continues after step {engine.steps_done} from {path}"


def _begun_anew(path: Path, engine: Engine) -> list[str]:
    """What is to be said where a checkpoint has weights alone: one that was converted, or SGD's."""
    optimizer = engine.runner.optimizer
    keeps_none = isinstance(optimizer, torch.optim.SGD) and not optimizer.defaults["momentum"]
    has_state = any(name.startswith("optimizer") for name in Manifest.open(path).tensor_files)
    if keeps_none or has_state:
        return []
    return [f"{path.name} has no optimizer state: {type(optimizer).__name__} begins its own anew"]


def save_or_explain(engine: Engine, folder: Path, *, last: bool) -> list[str]:
    """Save a checkpoint; what is to be said where that failed. Collective.

    Args:
        engine: of the run.
        folder: of the run.
        last: whether the run is over: what is not saved now is lost.

    Raises:
        CheckpointError: it failed, and nothing comes after it.
    """
    checkpoints = folder / "checkpoints"
    try:
        engine.save(checkpoints)
    except CheckpointError as error:
        newest = newest_checkpoint(checkpoints)
        there = f"the newest is still {newest.name}" if newest else "there is none yet"
        if last:
            raise CheckpointError(
                f"{error}. The run went to its end, but its last state is lost; {there}. Make "
                "room, and run again with --resume auto."
            ) from None
        return [f"warning: {error}. The run goes on; {there}."]
    return []
