"""What a loop of the user's own calls of an engine besides `step`, `save` and `load`."""

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
    """Validation, outputs, data and states of a loop; an engine has what they need."""

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
        """Say what the memory was made of where it runs out inside."""
        raise NotImplementedError

    def _follow_loss(self, batch: Any) -> None:
        """Let the loss divide by what the first batch shows, unless that is known. Collective."""
        raise NotImplementedError

    def evaluate(self, batches: Iterable[Any], metrics: Metrics | None = None) -> dict[str, float]:
        """Measure the task, and metrics, over batches. Collective; the same on every rank.

        Args:
            batches: (inputs, targets) of this rank's rows, as `step` takes them; ranks that hold
                parts of one model give the same. Of any sizes, and of another number on each rank.
            metrics: by name a function of (outputs, targets): its mean over the rows of a batch,
                averaged here by rows over the batches of all ranks; or (sum, count), which are
                added up each before they are divided. Left out, those of `prepare`.

        Returns:
            The loss as the mean over the valid targets of all batches, and the metrics.

        Raises:
            ConfigError: a batch is no (inputs, targets), a metric gives no number.
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
                    # A pipeline has its output on one rank.
                    if prediction is not None and not batch.padding:
                        sums.add(self.task, self.loss, batch, prediction)
        servers = self.plan.replicate.num_servers  # they wait for as long as workers validate
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
        """A data set, dealt out to the ranks: for `step`, or for `evaluate`.

        Args:
            dataset: map-style; `dataset[i]` is (input, target).
            training: True: an epoch's global batches, each iteration from where training is
                (`samples_seen`, which is saved and loaded). False: all rows once, from the first.
            shuffle: by the job's seed and the epoch.
            drop_last: leave out what does not fill a global batch at the end of an epoch.
            collate_fn: makes (inputs, targets) of a list of samples; None stacks them.
            workers: processes that read ahead.
            pin_memory: put batches in page-locked memory, where there is a CUDA device.

        Raises:
            ConfigError: it is no map-style data set, or no key says how large a batch is.
        """
        check_dataset(dataset)
        batch, place = self.plan.batch, self.plan.data_rank(self.context.dp_rank)
        train = self.job.train
        if train.micro_batch_size is None and train.global_batch_size is None:
            raise ConfigError(
                "loader: no key says how large a batch is. Use prepare(..., "
                "train__global_batch_size=64): its rows over all ranks."
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
            dp_rank=place,
            dp_size=batch.dp_size,
            micro_batch_size=batch.micro_size,
            workers=workers,
            pin_memory=pin_memory,
        )

    def predict(self, inputs: Any) -> Any:
        """The model's outputs for this rank's rows: no gradients, evaluation mode. Collective.

        Every rank that gives rows gets the outputs of its rows, on its device; the ranks of a
        pipeline, or of slices of one model, give the same rows and all get the same outputs. A
        parameter server gets None. Ranks may give other numbers of rows, but all of them call.

        Args:
            inputs: as in the (inputs, targets) of `step`.
        """
        if not tree_tensors(inputs):
            raise ConfigError(
                "predict: the inputs hold no tensor. Give what the model is called on."
            )
        batch = MicroBatch(inputs, None, 0, count_rows(inputs, None))
        with evaluating(self.runner.module), self._explaining():
            self.meter.phase("evaluate")
            found = self.runner.predict(batch)
            return share_outputs(None if found is None else found[0], self.context)

    def attach(self, **objects: Any) -> None:
        """Save and load these with the run, by their names: schedulers, counters, samplers.

        Args:
            objects: each with `state_dict()` and `load_state_dict(state)`, in the same state on
                every rank; plain values and small tensors in it.

        Raises:
            ConfigError: one has no such methods.
        """
        self._loop_states.attach(objects)

    def newest(self, folder: str | Path) -> Path | None:
        """The newest checkpoint below a folder that `save` was given; None where there is none.

        Collective, and the same on every rank: rank 0 looks.

        Raises:
            ConfigError: `folder` is no path.
            CheckpointError: it may not be looked into; on all ranks.
        """
        return newest_of_all(as_folder(folder, "newest"), self.context)
