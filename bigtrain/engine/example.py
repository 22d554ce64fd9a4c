"""The example of a caller, and the micro-batches that a run has in its place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from bigtrain.core.strategy import Plan
from bigtrain.cutting.layout import Layout
from bigtrain.data.batch_dims import count_rows, find_batch_dims
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Job
from bigtrain.losses.loss import Loss


def says_rows(job: Job) -> bool:
    """Whether a key says how many rows a micro-batch has."""
    return job.train.micro_batch_size is not None or job.train.global_batch_size is not None


def example_batch(example: tuple[Any, Any], loss: Loss, job: Job, plan: Plan) -> MicroBatch:
    """The example, of as many rows as a micro-batch of the job: repeated or left out.

    Raises:
        ConfigError: it is not clear which dim of a tensor goes along the rows.
    """
    inputs, targets = example
    needed = plan.batch.micro_size
    rows = count_rows(inputs, targets, needed if says_rows(job) else None)
    dims = find_batch_dims(inputs, targets, rows, explicit=job.data.batch_dims)
    batch = MicroBatch(inputs, targets, 0, rows, dims=dims)
    if says_rows(job) and rows != needed:
        repeated = torch.arange(needed) % rows
        batch = batch.map_rows(lambda t, dim: t.index_select(dim, repeated.to(t.device)))
        batch = replace(batch, rows=needed)
    return replace(batch, count=loss.count(batch.targets))


def is_resized(
    example: MicroBatch | None, first: MicroBatch, job: Job, layout: Layout | None
) -> bool:
    """Whether the first micro-batch is of other rows than the example, and no key says any.

    Raises:
        ConfigError: the model was cut for those of the example.
    """
    if example is None or says_rows(job) or example.rows == first.rows:
        return False
    if layout is not None:
        raise ConfigError(
            f"step: micro-batches of {first.rows} rows, and the model was cut for the "
            f"{example.rows} of prepare(example=...). Give an example of {first.rows} rows."
        )
    return True
