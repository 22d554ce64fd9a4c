"""The example that a caller gives, and the first batch of a run.

The predicted memory and the divisors of the loss follow from the example. Without an example, they
follow from the first batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.strategy import Plan
from bigtrain.cutting.layout import Layout
from bigtrain.data import Step
from bigtrain.data.batch_dims import BatchDims, count_rows, find_batch_dims
from bigtrain.data.loader import MicroBatch
from bigtrain.engine.run_loss.follow_loss import agree_on_loss
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Job
from bigtrain.losses.global_mean import watch_owners
from bigtrain.losses.loss import Loss
from bigtrain.own_loop.evaluation import as_pair
from bigtrain.ranks.context import RunContext


def says_rows(job: Job) -> bool:
    """Whether a key sets the number of rows of a micro-batch."""
    return job.train.micro_batch_size is not None or job.train.global_batch_size is not None


def example_batch(example: tuple[Any, Any], loss: Loss, job: Job, plan: Plan) -> MicroBatch:
    """Return the example as a micro-batch of the job.

    If a key of the job sets the number of rows, rows are repeated or left out to match it.

    Args:
        example: (inputs, targets).
        loss: the loss that counts the targets.
        job: the job; its `data.batch_dims` names the batch dims.
        plan: the plan of the job.

    Raises:
        ConfigError: the batch dim of a tensor is not clear.
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


class FirstBatch:
    """Reads from the first batch of a run the facts that the run's example does not show.

    Without an example these facts are the divisors of the loss, and the number of rows of a
    micro-batch, on which the predicted memory depends. With an example, only the number of rows may
    differ. The engine discards the object in the first step.

    Args:
        example: the example of the run; None if the user gave none.
        job: the job, whose keys may set the number of rows of a micro-batch.
        resolved: the plan that is run.
        context: this rank's context; all ranks must find the same divisors.
    """

    def __init__(
        self, example: MicroBatch | None, job: Job, resolved: ResolvedPlan, context: RunContext
    ) -> None:
        self._example, self._job = example, job
        self._plan, self._layout = resolved.plan, resolved.layout
        self._context = context

    def follow_loss(
        self, loss: Loss, batch: Step | tuple[Any, Any], model: nn.Module, module: nn.Module
    ) -> Loss:
        """Return the loss with the divisors that follow from the first batch. Collective.

        The loss is unchanged if an example was given.

        Args:
            loss: the loss as the user gave it.
            batch: the first batch of the run.
            model: the model as the user wrote it; a copy without values if it can be copied.
            module: the runner's module. Its submodules that compute parts of the loss get hooks.

        Raises:
            ConfigError: see `follow_loss.follow_loss`; on all ranks.
        """
        if self._example is not None:
            return loss
        if isinstance(batch, Step):
            inputs, targets = batch.micro_batches[0].inputs, batch.micro_batches[0].targets
        else:
            inputs, targets = as_pair(batch, "step")
        rows = count_rows(inputs, targets)
        dims: BatchDims = find_batch_dims(
            inputs, targets, rows, explicit=self._job.data.batch_dims, example=None
        )
        example = MicroBatch(inputs, targets, 0, rows, dims=dims)
        followed = agree_on_loss(loss, model, example, self._plan.batch.num_parts, self._context)
        watch_owners(followed, module)
        return followed

    def needs_prediction(self, first: MicroBatch) -> bool:
        """Whether memory has to be predicted from the first micro-batch.

        This is so without an example, or if the example has another number of rows; see
        `is_resized`.

        Raises:
            ConfigError: the model was cut for the rows of the example.
        """
        return self._example is None or is_resized(self._example, first, self._job, self._layout)


def is_resized(
    example: MicroBatch | None, first: MicroBatch, job: Job, layout: Layout | None
) -> bool:
    """Whether the first micro-batch has another number of rows than the example.

    False without an example, or if a key of the job sets the number of rows.

    Args:
        example: the example of the run; None if none was given.
        first: the first micro-batch of the run.
        job: the job of the run.
        layout: the stages of the model; None if it is not cut.

    Raises:
        ConfigError: the numbers differ, and the model was cut for the rows of the example.
    """
    if example is None or says_rows(job) or example.rows == first.rows:
        return False
    if layout is not None:
        raise ConfigError(
            f"step: micro-batches of {first.rows} rows, and the model was cut for the "
            f"{example.rows} of prepare(example=...). Give an example of {first.rows} rows."
        )
    return True
