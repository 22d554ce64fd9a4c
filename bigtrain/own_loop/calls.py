"""The methods of an engine for custom training loops, other than `step`, `save` and `load`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

from bigtrain.checkpoint.folders import as_folder
from bigtrain.checkpoint.together import newest_of_all
from bigtrain.core.runner import Runner
from bigtrain.core.strategy import Plan
from bigtrain.data import GlobalOrder, MicroBatch
from bigtrain.data.batch_dims import count_rows
from bigtrain.data.loader import Collate
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Job
from bigtrain.losses.loss import Loss
from bigtrain.losses.tasks import Task
from bigtrain.memory.meter import MemoryMeter
from bigtrain.own_loop.evaluation import (
    EvaluationSums,
    Metrics,
    check_metrics,
    evaluating,
    in_step,
)
from bigtrain.own_loop.loader import EvaluationLoader, LoopLoader, check_dataset, make_loader
from bigtrain.own_loop.outputs import share_outputs
from bigtrain.own_loop.states import LoopStates
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.tree import tree_tensors


class LoopCalls:
    """Validation, outputs, data and states of a custom loop. An engine defines the fields below."""

    job: Job
    context: RunContext
    plan: Plan
    loss: Loss
    task: Task
    runner: Runner
    meter: MemoryMeter
    steps_done: int
    samples_seen: int
    _metrics: Metrics
    _loop_states: LoopStates

    def _explaining(self, where: str | None = None) -> AbstractContextManager[None]:
        """Explain an out-of-memory error that is raised in a `with` block."""
        raise NotImplementedError

    def _follow_loss(self, batch: Any) -> None:
        """Find the loss's divisors from the first batch if no example was given. Collective."""
        raise NotImplementedError

    def evaluate(self, batches: Iterable[Any], metrics: Metrics | None = None) -> dict[str, float]:
        """Compute the loss and metrics over batches, in evaluation mode. Collective.

        Args:
            batches: (inputs, targets) of this rank's rows, as for `step`. Ranks that have parts of
                one model pass the same rows. The sizes of batches may differ, and the number of
                batches may differ between ranks.
            metrics: functions of (outputs, targets), by name. A function returns the mean over the
                rows of a batch; the means are averaged over the batches of all ranks, weighted by
                rows. Or it returns (sum, count); the sums and the counts are added up over all
                batches before the division. None for the metrics that were passed to `prepare`.

        Returns:
            The figures by name, equal on all ranks: the mean loss over the valid targets of all
            batches, the other figures of the task, and the metrics. A metric without rows is nan.

        Raises:
            ConfigError: a batch is not (inputs, targets), or a metric returns no number.
        """
        asked = self._metrics if metrics is None else check_metrics(metrics, self.task.figures)
        computes = self.plan.data_rank(self.context.dp_rank) is not None
        sums = EvaluationSums(asked)
        with evaluating(self.runner.module):
            self.meter.phase("evaluate")
            for batch in in_step(batches, self.context, computes=computes):
                if not self.steps_done:
                    self._follow_loss((batch.inputs, batch.targets))
                count = self.loss.count(batch.targets) if batch.rows else 0
                with self._explaining():
                    prediction = self.runner.predict(replace(batch, count=count))
                    # In a pipeline only the ranks of the last stage have a prediction.
                    if prediction is not None and not batch.padding:
                        sums.add(self.task, self.loss, batch, prediction)
        # Parameter servers wait while the workers validate, which may take long.
        servers = self.plan.replicate.num_servers
        with self.context.long_timeout() if servers else nullcontext():
            return sums.figures(self.task, self.context)

    @overload
    def loader(
        self,
        dataset: Any,
        *,
        training: Literal[True] = ...,
        shuffle: bool = ...,
        drop_last: bool = ...,
        collate_fn: Collate | None = ...,
        workers: int = ...,
        pin_memory: bool = ...,
    ) -> LoopLoader: ...

    @overload
    def loader(
        self,
        dataset: Any,
        *,
        training: Literal[False],
        shuffle: bool = ...,
        drop_last: bool = ...,
        collate_fn: Collate | None = ...,
        workers: int = ...,
        pin_memory: bool = ...,
    ) -> EvaluationLoader: ...

    def loader(
        self,
        dataset: Any,
        *,
        training: bool = True,
        shuffle: bool = True,
        drop_last: bool = False,
        collate_fn: Collate | None = None,
        workers: int = 0,
        pin_memory: bool = False,
    ) -> LoopLoader | EvaluationLoader:
        """Return a loader of this rank's rows of a data set, for `step` or for `evaluate`.

        Args:
            dataset: a map-style data set whose `dataset[i]` is (input, target).
            training: True for the global batches of an epoch. An iteration then begins at the
                position of training (`samples_seen`, which is saved and loaded). False for all rows
                once, in order.
            shuffle: whether to shuffle the rows of each epoch, by `train.seed` and the number of
                the epoch. Only for training.
            drop_last: whether to leave out the last rows of an epoch if they do not fill a global
                batch. Only for training.
            collate_fn: makes (inputs, targets) of a list of samples; None stacks the samples.
            workers: the number of processes that read ahead; 0 reads in this process.
            pin_memory: whether to put batches into page-locked memory, if there is a CUDA device.

        Raises:
            ConfigError: the data set is not map-style, or no key sets the batch size.
        """
        check_dataset(dataset)
        batch, data_rank = self.plan.batch, self.plan.data_rank(self.context.dp_rank)
        train = self.job.train
        if train.micro_batch_size is None and train.global_batch_size is None:
            raise ConfigError(
                "loader: no key sets the batch size. Use prepare(..., "
                "train__global_batch_size=64): the rows of a batch over all ranks."
            )
        size = batch.global_size if training else 1
        order = GlobalOrder(len(dataset), size, self.job.train.seed, shuffle, drop_last)
        return make_loader(
            dataset,
            order,
            lambda: self.samples_seen,
            training=training,
            collate_fn=collate_fn,
            count=lambda targets: self.loss.count(targets),
            dp_rank=data_rank,
            dp_size=batch.dp_size,
            micro_batch_size=batch.micro_size,
            workers=workers,
            pin_memory=pin_memory,
        )

    def predict(self, inputs: Any) -> Any:
        """Return the model's outputs for this rank's rows, in evaluation mode. Collective.

        The outputs are on the rank's device. The ranks of a pipeline, or of slices of one model,
        pass the same rows and get the same outputs. The number of rows may differ between other
        ranks.

        Args:
            inputs: the inputs for this rank's rows, in the form in which `step` takes them.

        Returns:
            The outputs; None on a parameter server.

        Raises:
            ConfigError: there is no tensor in `inputs`.
        """
        if not tree_tensors(inputs):
            raise ConfigError(
                "predict: the inputs hold no tensor. Give the inputs that the model is called with."
            )
        batch = MicroBatch(inputs, None, 0, count_rows(inputs, None))
        with evaluating(self.runner.module), self._explaining():
            self.meter.phase("evaluate")
            prediction = self.runner.predict(batch)
            return share_outputs(None if prediction is None else prediction[0], self.context)

    def attach(self, **objects: Any) -> None:
        """Include objects, such as schedulers, counters or samplers, in `save` and `load`.

        Args:
            objects: the objects, by name. Each has the methods `state_dict()` and
                `load_state_dict(state)`. A state contains plain values and small tensors, and is
                equal on all ranks.

        Raises:
            ConfigError: an object lacks one of these methods, or a name is taken.
        """
        self._loop_states.attach(objects)

    def newest(self, folder: str | Path) -> Path | None:
        """Return the newest checkpoint in a folder, as rank 0 finds it. Collective.

        Args:
            folder: a folder that was passed to `save`.

        Returns:
            The path of the checkpoint, equal on all ranks; None if there is none.

        Raises:
            ConfigError: `folder` is not a path.
            CheckpointError: rank 0 cannot read the folder. It is raised on all ranks.
        """
        return newest_of_all(as_folder(folder, "newest"), self.context)
