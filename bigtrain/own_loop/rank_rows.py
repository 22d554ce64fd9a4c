"""A rank's rows of a global batch, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bigtrain.core.strategy import Plan
from bigtrain.data.batch_dims import BatchDims, count_rows
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Job
from bigtrain.losses.loss import Loss, count_targets
from bigtrain.own_loop.evaluation import as_pair
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.tree import tree_tensors

FindDims = Callable[[Any, Any, int], BatchDims]
"""(inputs, targets, rows) -> the batch dim of each of their tensors."""


def cut_rows(
    batch: Any, loss: Loss, job: Job, plan: Plan, context: RunContext, find_dims: FindDims
) -> tuple[list[MicroBatch], int]:
    """Micro-batches of a batch, as many on every replica, and the rows of the global batch.

    A replica with fewer rows than others (the last batch of an epoch) gets padding, which counts
    nothing: sharded parameters are gathered by all ranks in every pass. Collective.

    Args:
        batch: (inputs, targets) of this rank.
        loss: counts targets.
        job: says how many rows there may be.
        plan: made from it.
        context: of this rank.
        find_dims: along which dims tensors are cut.

    Raises:
        ConfigError: it is no such pair, it has no row, or more than the job's keys say.
    """
    inputs, targets = as_pair(batch, "step")
    if not tree_tensors(inputs):
        raise ConfigError("step: the inputs hold no tensor. Give (inputs, targets).")
    train, steps = job.train, plan.batch.accumulation_steps
    said = train.micro_batch_size is not None or train.global_batch_size is not None
    size = plan.batch.micro_size if said else None
    rows = count_rows(inputs, targets, size * steps if size else None)
    if not rows:
        raise ConfigError(
            "step: the batch of this rank has no row. Give every rank at least one; engine.loader "
            "deals the rows out so that it is right."
        )
    size = size or -(-rows // steps)
    if rows > size * steps:  # gradients and the predicted peak were arranged for so many
        raise ConfigError(_too_many(rows, size, steps, job, plan))
    whole = MicroBatch(inputs, targets, 0, rows, dims=find_dims(inputs, targets, rows))
    pieces = [whole.part(start, min(rows, start + size)) for start in range(0, rows, size)]
    counts = count_targets(loss, [piece.targets for piece in pieces])
    micro_batches = [replace(p, count=n) for p, n in zip(pieces, counts, strict=True)]
    sharing = plan.batch.dp_size  # what servers are given counts nothing
    told = context.all_gather_rows([float(rows), float(len(pieces))], "dp")[-sharing:]
    missing = int(max(number for _, number in told)) - len(micro_batches)
    micro_batches += [replace(micro_batches[0], count=0, rows=0)] * max(0, missing)
    return micro_batches, round(sum(own for own, _ in told))


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
