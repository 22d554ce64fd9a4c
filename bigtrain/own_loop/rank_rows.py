"""Cut a rank's rows of a global batch into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from bigtrain.core.strategy import Plan
from bigtrain.data.batch_dims import BatchDims, count_rows
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Job
from bigtrain.losses.loss import Loss, count_targets
from bigtrain.own_loop.evaluation import as_pair
from bigtrain.tensors.tree import tree_tensors

FindDims = Callable[[Any, Any, int], BatchDims]
"""(inputs, targets, rows) -> the batch dim of each tensor of the inputs and targets."""


def cut_rows(batch: Any, loss: Loss, job: Job, plan: Plan, find_dims: FindDims) -> list[MicroBatch]:
    """Cut a batch of this rank into micro-batches.

    Args:
        batch: the (inputs, targets) of this rank.
        loss: the loss, which counts the valid targets.
        job: the job, whose keys limit the number of rows.
        plan: the plan of the job.
        find_dims: returns the dim along which each tensor is cut.

    Raises:
        ConfigError: the batch is no pair, has no row, or more rows than the job's keys allow.
    """
    inputs, targets = as_pair(batch, "step")
    if not tree_tensors(inputs):
        raise ConfigError("step: the inputs hold no tensor. Give (inputs, targets).")
    train, steps = job.train, plan.batch.accumulation_steps
    is_set = train.micro_batch_size is not None or train.global_batch_size is not None
    size = plan.batch.micro_size if is_set else None
    rows = count_rows(inputs, targets, size * steps if size else None)
    if not rows:
        raise ConfigError(
            "step: the batch of this rank has no row. Give every rank at least one; engine.loader "
            "gives each rank its rows."
        )
    size = size or -(-rows // steps)
    if rows > size * steps:  # more rows than the plan and the predicted peak are made for
        raise ConfigError(_too_many(rows, size, steps, job, plan))
    all_rows = MicroBatch(inputs, targets, 0, rows, dims=find_dims(inputs, targets, rows))
    parts = [all_rows.part(start, min(rows, start + size)) for start in range(0, rows, size)]
    counts = count_targets(loss, [part.targets for part in parts])
    return [replace(part, count=n) for part, n in zip(parts, counts, strict=True)]


def padded(micro_batches: Sequence[MicroBatch], most: int) -> list[MicroBatch]:
    """Return a batch's micro-batches, followed by padding without valid targets.

    A replica may have fewer rows than others, as in the last batch of an epoch. But all ranks have
    to run equally many passes, because in each pass they gather sharded parameters together.

    Args:
        micro_batches: the micro-batches of this rank, at least one.
        most: the number of micro-batches to return: the largest number that a replica has.
    """
    padding = replace(micro_batches[0], count=0, rows=0)
    return [*micro_batches, *[padding] * (most - len(micro_batches))]


def _too_many(rows: int, size: int, steps: int, job: Job, plan: Plan) -> str:
    train, ranks = job.train, plan.batch.dp_size
    if train.micro_batch_size is not None:
        return (
            f"step: {rows} rows are more than train.micro_batch_size * accumulation_steps = "
            f"{size} * {steps} = {size * steps}. "
            f"Use train.accumulation_steps={-(-rows // size)}."
        )
    return (
        f"step: {rows} rows on this rank are more than its {size * steps} of "
        f"train.global_batch_size={train.global_batch_size}, which {ranks} "
        f"{'replica shares' if ranks == 1 else 'replicas share'}. Give batches of {size * steps} "
        f"rows, or prepare(..., train__global_batch_size={rows * ranks})."
    )
