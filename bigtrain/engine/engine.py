"""The engine: a model under a strategy, with one `step` for each global batch.

A training loop needs nothing else of bigtrain. The command `bigtrain train` uses it as well.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from traceback import clear_frames
from typing import Any

from torch import Tensor, nn

from bigtrain.activations.policy import remove_policies
from bigtrain.assembly.build import build_runner, check_mesh
from bigtrain.core.gradient_hooks import unpredicted_hooks
from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.runner import Runner
from bigtrain.core.workload import Workload
from bigtrain.data import MicroBatch, Step
from bigtrain.data.batch_dims import BatchDims, find_batch_dims
from bigtrain.engine.alongside.average import WeightAverage, refuse_copies
from bigtrain.engine.first_batch import FirstBatch
from bigtrain.engine.first_steps import FirstSteps
from bigtrain.engine.out_of_memory import (
    OutOfMemoryContext,
    explain_out_of_memory,
    predict_out_of_memory,
)
from bigtrain.engine.run_forecast import RunForecaster, RunPrediction
from bigtrain.engine.saved_state import SavedState
from bigtrain.engine.seeds import kernels_as_asked, seed_everything, stream_of
from bigtrain.engine.workloads import resolve_on_ranks, resolved_workload
from bigtrain.errors import NonFiniteError
from bigtrain.job.schema import Job
from bigtrain.losses.accuracy import TrainingAccuracy
from bigtrain.losses.global_mean import GlobalMeanLoss
from bigtrain.losses.loss import Loss, as_loss
from bigtrain.losses.tasks import CustomTask, Task
from bigtrain.memory.cap import MemoryCap, available_bytes, is_out_of_memory
from bigtrain.memory.meter import MemoryMeter
from bigtrain.models.blueprint import Blueprint, as_blueprint
from bigtrain.optim.loop_optimizer import LoopOptimizer
from bigtrain.optim.whole import MakeOptimizer, WholeOptimizer, whole_optimizer
from bigtrain.own_loop.evaluation import Metrics, check_metrics
from bigtrain.own_loop.learning_rate import LearningRate, RateArgument
from bigtrain.own_loop.outputs import refuse_calls
from bigtrain.own_loop.rank_rows import cut_rows, padded
from bigtrain.own_loop.states import LoopStates, RemovedCheckpoints
from bigtrain.prediction.memory_report import MemoryReport, RankMemory, StepForecast
from bigtrain.ranks.context import RunContext
from bigtrain.ranks.step_numbers import OwnNumbers, StepNumbers
from bigtrain.timing.run_seconds import StepWatch


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step.

    The results of all ranks are equal, except for times, exchanged bytes and the peak.
    """

    step: int
    """The number of steps taken, including this one."""
    loss: float
    """The mean loss over the valid targets of the global batch."""
    grad_norm: float
    """The global norm of the gradient before clipping."""
    lr: float
    """The learning rate of the first parameter group in this step."""
    samples: int
    """The rows of the global batch."""
    samples_per_second: float
    """The rows of the global batch per second."""
    tokens_per_second: float | None
    """The targets of the global batch per second, if a sample has several (text); else None."""
    step_seconds: float
    """The seconds of this step on this rank."""
    peak_memory_bytes: int | None
    """The peak of this rank's tensors so far, in bytes; None if it is not measured."""
    sent_bytes: int | None = None
    """Bytes that this rank sent in this step; None if they cannot be counted."""
    received_bytes: int | None = None
    """Bytes that this rank received in this step; None if they cannot be counted."""
    top1: float | None = None
    """The share of correct predictions in the global batch; None without `log.accuracy`."""


@dataclass(frozen=True)
class _BegunStep:
    """A step whose numbers are being exchanged."""

    batch: Step | tuple[Any, Any]
    micro_batches: list[MicroBatch]
    """The micro-batches of this rank, without totals and without the padding of `padded`."""
    samples: int | None
    """The rows of the global batch; None if the exchange will give them."""
    at: float
    """The time at which the exchange began, in seconds of `time.perf_counter`."""


class Engine(SavedState):
    """A model, its loss and its optimizer under a strategy.

    Args:
        model: a function that makes the module, a `Blueprint`, or a module that is already built.
            With a function, the module is described on the meta device, and each rank materialises
            the part that it needs. With a module, rank 0's weights are sent to all ranks.
        loss: a mean loss of (output, targets) such as `F.cross_entropy`, or a `bigtrain.Loss`.
        optimizer: called with the parameters that this rank updates; returns the optimizer.
        job: the job with strategy, batch, precision, clipping and tracking.
        context: the rank, mesh and device of this process; see `bigtrain.connect`.
        task: defines the figures of a validation; None to measure the loss only.
        example: one micro-batch, from which the memory is predicted before anything is built; None
            to predict it from the first step's batch.
        learning_rate: a number; a function from the step, counted from 0, to the rate; or a
            function that makes a scheduler from an optimizer, which is stepped after each step.
            None leaves the rate to `optimizer`.
        metrics: functions that `evaluate` measures in addition to the task's figures.
        resolved: the plan with every choice made; None to make it from the job.

    Raises:
        ConfigError: the strategy cannot train this model, loss or optimizer.
    """

    weight_average: WeightAverage | None = None
    """An average of the weights that is updated after each step; see `bigtrain.ema`."""

    def __init__(
        self,
        model: Callable[[], nn.Module] | nn.Module | Blueprint,
        loss: Loss | Callable[[Any, Any], Tensor],
        optimizer: MakeOptimizer,
        job: Job,
        context: RunContext,
        *,
        task: Task | None = None,
        example: MicroBatch | None = None,
        learning_rate: RateArgument | None = None,
        metrics: Metrics | None = None,
        resolved: ResolvedPlan | None = None,
    ) -> None:
        self.job, self.context = job, context
        self.blueprint = as_blueprint(model)
        self._model_class = type(self.blueprint.model).__qualname__
        self.notes: tuple[str, ...] = ()
        """Lines on choices in the plan; empty if `resolved` was given, whose lines the caller
        prints."""
        if resolved is None:
            workload, resolved = resolve_on_ranks(
                self.blueprint, as_loss(loss), optimizer, example, job, context
            )
            self.notes = resolved.notes
        else:
            check_mesh(resolved.plan, context)
            workload = resolved_workload(
                self.blueprint, as_loss(loss), optimizer, example, resolved, context
            )
        self.resolved, self._workload = resolved, workload
        self.plan, self.layout, self.loss = resolved.plan, resolved.layout, workload.loss
        self.task = task or CustomTask(self.loss)
        self.steps_done = self.samples_seen = 0
        self._closing = ExitStack()
        self.advice = [*self.notes]
        """Lines of advice, such as on techniques that cannot help; complete once the run is
        predicted."""
        if self.layout is not None and workload.example is not None and context.is_main:
            self.advice.append(self.layout.check(workload.model, workload.example, self.loss))
        self.advice += unpredicted_hooks(self.blueprint.model) if job.memory.predict else ()
        self._forecaster = RunForecaster(job, resolved, workload, context)
        self.prediction = RunPrediction()
        if workload.example is not None:
            self._take_prediction(self._forecaster.predict_all(workload))
        self._first_batch: FirstBatch | None = FirstBatch(workload.example, job, resolved, context)
        self.first_steps: FirstSteps | None = None
        if job.train.check_first_steps:  # before a technique changes the model
            self.first_steps = FirstSteps(
                job.train.check_first_steps,
                self.blueprint,
                self.loss,
                optimizer,
                self.plan,
                context,
            )
        seed_everything(context.seed, stream_of(context))
        self._closing.enter_context(kernels_as_asked(job.train, context.device))
        # Optimizers import this module. It is imported before memory is measured, so that the
        # measured memory does not contain it.
        importlib.import_module("torch._dynamo")
        self._open_meter()
        try:
            self.runner = self._build(workload)
            _ = self._extra_at_start
            self._closing.enter_context(refuse_copies(self.runner.module, self.plan))
            self._open_loop(learning_rate, metrics)
        except BaseException:
            self._closing.close()
            raise

    def _build(self, workload: Workload) -> Runner:
        """Build the runner; its resources are closed with the engine."""
        mover = self.plan.make_offloader(self.context.device)
        if mover is not None:
            self._closing.callback(mover.close)
        self._closing.callback(remove_policies, self.blueprint.model)
        with self._explaining(), self.context.timeout_for_new_groups():
            return build_runner(
                self.resolved, self.blueprint, workload, self.context, self.meter, mover
            )

    def _open_meter(self) -> None:
        """Begin to measure and to limit memory; add advice if the run is predicted not to fit."""
        job, context = self.job, self.context
        self.limit_bytes = available_bytes(job.memory.cap, context.device, context.local_world_size)
        """Bytes that this rank could allocate before anything was built; None if unknown."""
        inputs = self._forecaster.inputs
        if context.is_main and inputs is not None and job.memory.on_oom == "stop":
            self.advice += predict_out_of_memory(inputs, self.prediction.fullest, self.limit_bytes)
        self._watch = StepWatch(context)
        self._cap = MemoryCap(job.memory.cap, context.device)
        self._closing.callback(self._cap.lift)
        self.meter = MemoryMeter(context.device, job.memory.track_steps, self._cap)

    def _open_loop(self, learning_rate: RateArgument | None, metrics: Metrics | None) -> None:
        """Make the metrics, the optimizer and the learning rate for the user's loop."""
        self._metrics = check_metrics(metrics, self.task.figures)
        if self.context.pp_size > 1:
            self._closing.callback(refuse_calls(self.runner.module).remove)
        self._whole_optimizer.retire()
        self.optimizer = LoopOptimizer(
            lambda: self.runner.optimizer, self._whole_optimizer.settings
        )
        """The user's parameter groups, to read and to change; torch's schedulers accept it as an
        optimizer."""
        self._rate = LearningRate(learning_rate, self.optimizer)
        self._loop_states = LoopStates(self.optimizer, self._rate)
        self._removed = RemovedCheckpoints(self.job.checkpoint.keep)
        self._begun: _BegunStep | None = None
        self._is_training = False
        """Whether a step has set the model to training mode."""

    @property
    def _whole_optimizer(self) -> WholeOptimizer:
        return whole_optimizer(self._workload.make_optimizer, self._workload.model)

    @property
    def model(self) -> nn.Module:
        """The user's module, with the weights of this rank in it."""
        return self.runner.module

    def begin(
        self, batch: Step | tuple[Any, Any], signal: float = 0.0, peak: float = -1.0
    ) -> StepNumbers:
        """Begin the exchange of a step's numbers, as soon as its batch is read. Collective.

        `bigtrain train` calls this from its second step on, because it adds a signal and a peak. If
        nobody has called it for a batch, `step` begins the exchange itself.

        Args:
            batch: the batch that the next call of `step` gets.
            signal: the number of the signal to stop that this rank has received; 0 for none.
            peak: the peak of this rank's memory so far in bytes; below 0 if it is not measured.

        Returns:
            The numbers of all ranks. Reading them waits for the end of the exchange.

        Raises:
            ConfigError: see `step`.
        """
        self._begun = self._begin(batch, signal, peak)
        return self.runner.numbers

    def _begin(
        self, batch: Step | tuple[Any, Any], signal: float = 0.0, peak: float = -1.0
    ) -> _BegunStep:
        at, parts = time.perf_counter(), self._own_micro_batches(batch)
        samples = batch.samples if isinstance(batch, Step) else None
        divisors: list[float] = []
        if isinstance(self.loss, GlobalMeanLoss) and self._in_step:
            divisors = self.loss.own_totals(parts)[1:]
        if self._in_step or samples is None:
            shapes = {part.signature() for part in parts} if self.context.pp_size > 1 else "1"
            own = OwnNumbers(
                targets=sum(part.count for part in parts),
                rows=sum(part.rows for part in parts),
                micro_batches=len(parts),
                shapes=len(shapes),
                signal=signal,
                peak=peak,
                divisors=tuple(divisors),
            )
            self.runner.numbers.begin(own)
        return _BegunStep(batch, parts, samples, at)

    def step(self, batch: Step | tuple[Any, Any]) -> StepResult:
        """Train on one global batch. Collective.

        Args:
            batch: a step of a `StepLoader`; or this rank's (inputs, targets), which are cut along
                the batch dim into at most `train.accumulation_steps` micro-batches.

        Raises:
            ConfigError: the batch is no pair, has no row, or more rows than the job's keys allow.
            NonFiniteError: a loss or gradient is not finite, and `train.check_finite` is set; the
                optimizer has not stepped.
            OutOfMemoryError: the memory of a rank was not enough.
        """
        began = time.perf_counter()
        if self.weight_average is not None:
            self.weight_average.check_step()
        if self._first_batch is not None:
            self._follow_loss(batch)
        if self._begun is not None and self._begun.batch is batch:
            began = self._begun.at
        micro_batches, samples = self._micro_batches(batch)
        if self._first_batch is not None:
            self._predict_first(self._first_batch, micro_batches[0])
            began = time.perf_counter()
        self._watch.begin(tracked=self.meter.tracking)
        lr = self._set_learning_rate()
        checks = self.first_steps is not None and self.first_steps.active
        if self.first_steps is not None and checks:
            self.first_steps.begin(micro_batches, self.optimizer.changed_settings(below=False))
            began = time.perf_counter()
        self._enter_training_mode()
        accuracy: TrainingAccuracy | None = getattr(self.loss, "accuracy", None)
        if accuracy is not None:
            accuracy.begin()
        try:
            with self._explaining(), self.meter.step(self.steps_done + 1):
                loss = self.runner.forward_backward(micro_batches)
                grad_norm = self.runner.update(loss)
        except NonFiniteError as error:
            self.runner.forget_gradients()  # a next step would add its own to them
            raise error.in_step(self.steps_done + 1) from None
        top1 = None if accuracy is None else self._share(*accuracy.end())
        self.steps_done += 1
        self.samples_seen += samples
        self.optimizer.stepped()
        self._rate.after_step()
        if self.weight_average is not None:
            self.weight_average.update()
        if self.first_steps is not None and checks:
            self.first_steps.check(self.steps_done, loss.read(), grad_norm)
        seconds = time.perf_counter() - began
        volume, tokens = self._watch.end(seconds), micro_batches[0].tokens_per_sample
        return StepResult(
            step=self.steps_done,
            loss=loss.read(),
            grad_norm=grad_norm,
            lr=lr,
            samples=samples,
            samples_per_second=samples / seconds,
            tokens_per_second=samples * tokens / seconds if tokens > 1 else None,
            step_seconds=seconds,
            peak_memory_bytes=self.meter.peak_bytes(),
            sent_bytes=volume.sent_bytes if volume else None,
            received_bytes=volume.received_bytes if volume else None,
            top1=top1,
        )

    def _enter_training_mode(self) -> None:
        """Set the training mode before the first step, and after the model was evaluated.

        Not before every step: on a GPU the device waits while the host visits all modules. So a
        submodule that a script sets to evaluation mode between two steps stays in it, as in a loop
        that calls `train` once.
        """
        if not self._is_training or not self.runner.module.training:
            self.runner.module.train()
            self._is_training = True

    def _share(self, part: float, total: float) -> float:
        """Return the sum of `part` over all ranks, divided by the sum of `total`. Collective.

        Rows that several ranks compute count several times, in both sums.
        """
        rows = self.context.all_gather_rows([part, total])
        return math.fsum(row[0] for row in rows) / max(math.fsum(row[1] for row in rows), 1.0)

    def memory(self) -> MemoryReport | None:
        """Return the memory of all ranks and their seconds a step, measured and predicted.

        Collective.

        Returns:
            The report on rank 0; None on other ranks.
        """
        prediction = self.prediction
        ranks = self.context.gather_objects(
            RankMemory(
                rank=self.context.rank,
                measured=self.meter.measured(),
                predicted=prediction.peak,
                note=prediction.note,
                steps=self._watch.measured(),
                predicted_state=prediction.state,
                volume=self._watch.volume(),
                predicted_volume=prediction.volume,
            )
        )
        if ranks is None:
            return None
        return MemoryReport(
            strategy=self.plan.strategy.name,
            device=self.context.device.type,
            ranks=tuple(rank for rank in ranks if rank is not None),  # lost ranks give None
            step=prediction.step or StepForecast(None),
        )

    def follow_average(self, average: WeightAverage) -> None:
        """Update an average after each step, and include it in checkpoints and in the forecast."""
        self.weight_average = average
        self.prediction = self.prediction.plus_state(average.nbytes)

    def close(self) -> None:
        """Release hooks and files, and the process group if `prepare` made it for this engine."""
        self.runner.close()
        self._closing.close()

    def close_with(self, resource: AbstractContextManager[Any]) -> None:
        """Exit this context manager when the engine is closed."""
        self._closing.push(resource)

    def close_last(self, resource: AbstractContextManager[Any]) -> None:
        """Exit this context manager after everything else of the engine is closed."""
        rest = self._closing.pop_all()
        self._closing.push(resource)
        self._closing.push(rest)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: Any) -> None:
        self.runner.close()
        self._closing.__exit__(*error)

    @contextmanager
    def _explaining(self, where: str | None = None) -> Iterator[None]:
        """Turn an allocator's error in a `with` block into an explained `OutOfMemoryError`.

        Args:
            where: a description of the activity; None for a phase of a step.

        Raises:
            OutOfMemoryError: the allocator failed. The message has the memory by kind, and changes
                after which the job would fit.
        """
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._cap.lift()
            situation = self._situation(where)
            clear_frames(error.__traceback__)  # the frames keep tensors of the pass alive
            speaks = self.context.agreement.is_first("out of memory")
            patience_s = self.job.mesh.timeout if self.context.world_size > 1 else math.inf
            raise explain_out_of_memory(
                error, situation, speaks=speaks, patience_s=patience_s
            ) from None

    def _situation(self, where: str | None) -> OutOfMemoryContext:
        measured = self.meter.measured().peak
        in_step = self.meter.current in ("forward", "backward", "step")
        return OutOfMemoryContext(
            rank=self.context.rank,
            step=self.steps_done + in_step,
            phase=self.meter.current,
            micro_size=self.plan.batch.micro_size,
            peak=measured or self.prediction.peak,
            measured=measured is not None,
            limit_bytes=self.limit_bytes,
            capped=self.job.memory.cap is not None,
            activity=where,
            adapts=self.job.memory.on_oom == "adapt",
            inputs=self._forecaster.inputs,
        )

    def _follow_loss(self, batch: Step | tuple[Any, Any]) -> None:
        """Find the loss's divisors from the first batch if no example was given. Collective."""
        if self._first_batch is None:
            return
        skeleton = self._forecaster.skeleton
        model = self.runner.module if skeleton is None else skeleton.model
        self.loss = self.runner.loss = self._first_batch.follow_loss(
            self.loss, batch, model, self.runner.module
        )
        if isinstance(self.task, CustomTask):
            self.task = CustomTask(self.loss)

    def _predict_first(self, questions: FirstBatch, first: MicroBatch) -> None:
        """Predict the run from its first micro-batch if necessary; then discard `FirstBatch`."""
        if questions.needs_prediction(first):
            self._take_prediction(
                self._forecaster.predict_built(self._workload, self.runner.module, first, self.loss)
            )
            self._whole_optimizer.retire()
        self._first_batch = None

    def _take_prediction(self, prediction: RunPrediction) -> None:
        fullest = prediction.fullest or self.prediction.fullest
        if self.weight_average is not None:
            prediction = prediction.plus_state(self.weight_average.nbytes)
        self.prediction = replace(prediction, fullest=fullest)
        self.advice = [*self.advice, *prediction.advice]

    def _set_learning_rate(self) -> float:
        self._rate.before_step(self.steps_done)
        self.optimizer.hand_over()
        return float(self.optimizer.param_groups[0]["lr"])

    def _batch_dims(self, inputs: Any, targets: Any, rows: int) -> BatchDims:
        """Return the batch dim of each tensor; the example decides if the shapes alone do not."""
        example = self._workload.example
        before = (example.tensors(), example.rows) if example is not None else None
        explicit = self.job.data.batch_dims
        return find_batch_dims(inputs, targets, rows, explicit=explicit, example=before)

    def _micro_batches(self, batch: Step | tuple[Any, Any]) -> tuple[list[MicroBatch], int]:
        """Return the micro-batches to run and the rows of the global batch; see `begin`."""
        begun, self._begun = self._begun, None
        if begun is None or begun.batch is not batch:
            begun = self._begin(batch)
        numbers, parts, samples = self.runner.numbers, begun.micro_batches, begun.samples
        if samples is None:
            replicas = numbers.replicas()
            parts = padded(parts, round(max(n.micro_batches for n in replicas)))
            samples = round(sum(n.rows for n in replicas))
        if isinstance(self.loss, GlobalMeanLoss):
            # Asynchronous workers do not wait for each other, so each uses its own counts.
            parts = self.loss.with_totals(parts, numbers.divisors() if self._in_step else None)
        if self._in_step:
            numbers.belong_to(parts)
        return parts, samples

    def _own_micro_batches(self, batch: Step | tuple[Any, Any]) -> list[MicroBatch]:
        if not isinstance(batch, Step):
            return cut_rows(batch, self.loss, self.job, self.plan, self._batch_dims)
        count = self.loss.count  # which may have changed after the batch was read
        if not self.in_own_loop or self.steps_done:
            return batch.micro_batches
        return [replace(p, count=count(p.targets) if p.rows else 0) for p in batch.micro_batches]

    @property
    def _in_step(self) -> bool:
        """Whether the ranks wait for each other in a step, and so exchange its numbers."""
        return self.plan.replicate.notice_every == 1
