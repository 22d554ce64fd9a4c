"""The example of a caller, and the micro-batches that a run has in its place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bigtrain.core.strategy import Plan
from bigtrain.cutting.layout import Layout
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Job
from bigtrain.losses.loss import Loss
from bigtrain.tensors.tree import tree_tensors


def says_rows(job: Job) -> bool:
    """Whether a key says how many rows a micro-batch has."""
    return job.train.micro_batch_size is not None or job.train.global_batch_size is not None


def example_batch(example: tuple[Any, Any], loss: Loss, job: Job, plan: Plan) -> MicroBatch:
    """The example, of as many rows as a micro-batch of the job.

    Raises:
        ConfigError: it has others, and not every tensor begins with them.
    """
    inputs, targets = example
    rows = next((len(tensor) for tensor in tree_tensors(inputs) if tensor.dim()), 0)
    needed, batch = plan.batch.micro_size, MicroBatch(inputs, targets, 0, rows)
    if says_rows(job) and rows != needed:
        if not rows or any(not t.dim() or len(t) != rows for t in batch.tensors()):
            raise ConfigError(
                f"prepare(example=...) has {rows} rows, a micro-batch of the job has {needed}, and "
                "not every tensor of it begins with its rows. Give an example of "
                f"{needed} rows, or train__micro_batch_size={rows}."
            )
        repeated = torch.arange(needed) % rows
        batch = replace(batch.map(lambda tensor: tensor[repeated]), rows=needed)
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


def tokens_per_sample(micro_batch: MicroBatch) -> int:
    """How many targets a row has (text); 1 where it has one."""
    targets = micro_batch.targets
    if isinstance(targets, Tensor) and targets.dim() == 2 and not targets.is_floating_point():
        return targets.shape[1]
    return 1
