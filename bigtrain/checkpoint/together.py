"""Operations of a run on a checkpoint that it saves or resumes from; many are collective."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bigtrain.checkpoint.folders import newest_checkpoint
from bigtrain.checkpoint.random_state import random_state
from bigtrain.checkpoint.read import Checkpoint
from bigtrain.errors import CheckpointError, DamagedCheckpointError
from bigtrain.ranks.context import RunContext


def open_together(path: Path, context: RunContext) -> Checkpoint:
    """Check a checkpoint for damage and open it on all ranks. Collective.

    Every piece is hashed once per node, by one of the node's ranks.

    Raises:
        CheckpointError: the checkpoint is damaged or has a newer format; raised on all ranks.
    """
    context.recorder.enter("load")
    checkpoint: Checkpoint | None = None
    problem: CheckpointError | None = None
    try:
        checkpoint = Checkpoint(path, verify=False)
        damage = checkpoint.find_damage((context.local_rank, context.local_world_size))
        problem = None if damage is None else DamagedCheckpointError(damage)
        if problem is None:
            len(checkpoint.tensors)  # read the headers now, so that all ranks learn of a fault
    except CheckpointError as error:
        problem = error
    context.barrier()  # without the usual timeout: hashing a large checkpoint takes longer
    words = None if problem is None else (str(problem), getattr(problem, "damage", None))
    fault = next(
        (fault_text for fault_text in context.all_gather_objects(words) if fault_text is not None),
        None,
    )
    if fault is not None or checkpoint is None:
        text, damage = fault or ("", None)
        raise CheckpointError(text) if damage is None else DamagedCheckpointError(damage)
    return checkpoint


def newest_of_all(folder: Path, context: RunContext) -> Path | None:
    """Return on all ranks the newest checkpoint that rank 0 sees in a folder. Collective.

    Raises:
        CheckpointError: the folder may not be read; raised on all ranks.
    """
    result: tuple[Path | None, str] = None, ""
    if context.is_main:
        try:
            result = newest_checkpoint(folder), ""
        except CheckpointError as error:
            result = None, str(error)
    newest, problem = context.broadcast_object(result)
    if problem:
        raise CheckpointError(problem)
    path: Path | None = newest
    return path


def check_optimizer_state(names: Iterable[str], optimizer: torch.optim.Optimizer) -> None:
    """Refuse the state of another kind of optimizer. A checkpoint without state fits every kind.

    Args:
        names: the names of the checkpoint's tensors.
        optimizer: the optimizer of the run.

    Raises:
        CheckpointError: the checkpoint has state that this kind of optimizer does not have.
    """
    saved_keys = {name.rpartition(".")[2] for name in names if name.startswith("optimizer.")}
    keys_by_optimizer = {"AdamW": {"step", "exp_avg", "exp_avg_sq"}, "SGD": {"momentum_buffer"}}
    keys_by_optimizer["Adafactor"] = {"step", "row_var", "col_var", "variance"}
    expected = getattr(optimizer, "state_keys", keys_by_optimizer.get(type(optimizer).__name__))
    if expected is not None and not saved_keys <= expected:
        raise CheckpointError(
            f"the checkpoint's optimizer keeps {', '.join(sorted(saved_keys))}, this one keeps "
            f"{', '.join(sorted(expected))}. Use the optim.name it was saved with."
        )


def config_texts(model: nn.Module) -> dict[str, str]:
    """Return the text of config.json, by name, for a model of transformers; otherwise nothing."""
    config = getattr(model, "config", None)
    write = getattr(config, "to_json_string", None)
    if not callable(write) or not hasattr(config, "architectures"):
        return {}
    before = config.architectures  # type: ignore[union-attr]
    config.architectures = [type(model).__name__]  # type: ignore[union-attr]
    try:
        return {"config.json": str(write())}
    finally:
        config.architectures = before  # type: ignore[union-attr]


def random_streams(context: RunContext) -> dict[str, Any]:
    """Return entries of state.json: on rank 0, the random states of all ranks. Collective."""
    states = context.gather_objects(random_state())
    head = {"world_size": context.world_size, "seed": context.seed}
    return {**head, "random": states, "streams": streams_of(context)}


def streams_of(context: RunContext) -> list[int]:
    """Return for each rank the first rank of its tp group, whose ranks share a random stream."""
    return [rank - rank % context.tp_size for rank in range(context.world_size)]
