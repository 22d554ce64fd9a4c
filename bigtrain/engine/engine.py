"""The engine: a model under a strategy, one `step` for each global batch.

It is all of bigtrain that a training loop needs, the project's own `train.py` included.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from traceback import clear_frames
from typing import Any

from torch import Tensor, nn

from bigtrain.activations.policy import remove_policies
from bigtrain.assembly.build import build_runner, check_mesh
from bigtrain.assembly.host_room import ensure_host_room
from bigtrain.assembly.inspection import found_in_model, refuse_found
from bigtrain.assembly.make_plan import make_plan
from bigtrain.assembly.resolve import check_known, resolve_plan
from bigtrain.assembly.state_peaks import forecast_state_peaks
from bigtrain.checkpoint.folders import as_folder
from bigtrain.checkpoint.saver import Saver
from bigtrain.checkpoint.together import (
    check_optimizer_state,
    config_texts,
    newest_of_all,
    open_together,
    random_streams,
)
from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.runner import Runner
from bigtrain.core.state import extra_modules, extra_states
from bigtrain.core.strategy import Plan
from bigtrain.core.workload import Workload
from bigtrain.costs.traffic import StepVolume
from bigtrain.data import MicroBatch, Step
from bigtrain.data.batch_dims import BatchDims, count_rows, find_batch_dims
from bigtrain.engine.alongside.kept import BESIDE, Beside, refuse_copies
from bigtrain.engine.example import is_resized
from bigtrain.engine.first_steps import FirstSteps
from bigtrain.engine.follow_loss import agree_on_loss, with_own_totals
from bigtrain.engine.out_of_memory import (
    OutOfMemoryContext,
    explain_out_of_memory,
    predict_out_of_memory,
)
from bigtrain.engine.remedies import ForecastInputs
from bigtrain.engine.seeds import continue_streams, kernels_as_asked, seed_everything, stream_of
from bigtrain.engine.start_facts import start_facts
from bigtrain.errors import CheckpointError, DamagedCheckpointError, NonFiniteError
from bigtrain.job.schema import Job
from bigtrain.losses.accuracy import TrainingAccuracy
from bigtrain.losses.global_mean import GlobalMeanLoss, watch_owners
from bigtrain.losses.loss import Loss, as_loss
from bigtrain.losses.tasks import CustomTask, Task
from bigtrain.memory.added_bytes import StatePeaks
from bigtrain.memory.cap import MemoryCap, available_bytes, is_out_of_memory
from bigtrain.memory.meter import MemoryMeter
from bigtrain.memory.timeline import Breakdown, Peak
from bigtrain.models.blueprint import Blueprint, as_blueprint
from bigtrain.optim.loop_optimizer import LoopOptimizer
from bigtrain.optim.whole import MakeOptimizer, WholeOptimizer, whole_optimizer
from bigtrain.own_loop.calls import LoopCalls
from bigtrain.own_loop.evaluation import Metrics, as_pair, check_metrics
from bigtrain.own_loop.learning_rate import LearningRate, RateArgument
from bigtrain.own_loop.model_inputs import set_model_inputs
from bigtrain.own_loop.outputs import refuse_calls
from bigtrain.own_loop.rank_rows import cut_rows
from bigtrain.own_loop.states import SAVED_AS, LoopStates, RemovedCheckpoints
from bigtrain.prediction.fullest_rank import FullestRank
from bigtrain.prediction.memory_report import MemoryReport, RankMemory, StepForecast
from bigtrain.prediction.predict import predict
from bigtrain.ranks.context import RunContext
from bigtrain.slicing.equal_ranks import check_equal_ranks
from bigtrain.tensors.fake import meta_copy
from bigtrain.timing.run_seconds import StepWatch, forecast_step_seconds
from bigtrain.tracing.unreached import freeze_unreached


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; the same on every rank but for the times and the peak."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Mean over the valid targets of the global batch."""
    grad_norm: float
    """Global norm of the gradient before clipping."""
    lr: float
    samples: int
    """Rows of the global batch."""
    samples_per_second: float
    tokens_per_second: float | None
    """Targets a second where a sample has many (text); None otherwise."""
    step_seconds: float
    peak_memory_bytes: int | None
    """This rank's peak so far."""
    sent_bytes: int | None = None
    """What this rank sent in this step; None where it cannot be counted."""
    received_bytes: int | None = None
    top1: float | None = None
    """The share of the global batch that was right; with `log.accuracy` only."""


class Engine(LoopCalls):
    """A model, its loss and its optimizer under a strategy.

    Args:
        model: a function that makes the module (it is described on the meta device and
            materialised where it is needed), a Blueprint, or a module already built (rank 0's
            weights then go to all ranks).
        loss: a mean loss of (output, targets) such as `F.cross_entropy`, or a `bigtrain.Loss`.
        optimizer: called with the parameters that this rank updates; returns the optimizer.
        job: strategy, batch, precision, clipping, tracking.
        context: what this process is; see `bigtrain.connect`.
        task: measures validation; left out, the loss alone is.
        example: one micro-batch, from which the memory is predicted before anything is built;
            left out, it is predicted at the first step.
        learning_rate: a number; the rate of each step, counted from 0; or what makes a scheduler
            of an optimizer, which is stepped after each step. Left out, `optimizer`'s own.
        metrics: what `evaluate` measures besides the task.
        resolved: what will be run, with every choice made; left out, it is made from the job.
    """

    in_own_loop = False
    """Whether `prepare` made it, and no command; then the job's model and optimizer say nothing."""
    kept: Beside | None = None
    """What is kept beside the model, such as an average of its weights."""
    predicted: Peak | None = None
    prediction_note: str | None = None
    fullest: FullestRank | None = None
    """Which rank is predicted to need the most; on rank 0, where an example was given."""
    predicted_volume: StepVolume | None = None
    _host_bytes = 0
    predicted_state = StatePeaks()
    """Of a save and of a resume, on this rank."""
    predicted_step: StepForecast | None = None
    """What a step is expected to take; on rank 0."""

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
        plan = resolved.plan if resolved else _planned(job, context)
        check_mesh(plan, context)
        probed = None if resolved else example  # what is resolved was followed before
        self.blueprint = _described(model, probed)
        self._model_class = type(self.blueprint.model).__qualname__
        self.loss = agree_on_loss(
            as_loss(loss), self.blueprint.model, probed, plan.batch.num_parts, context
        )
        if probed is not None:
            example = with_own_totals(self.loss, probed)
        self.task = task or CustomTask(self.loss)
        self.steps_done = self.samples_seen = 0
        self._closing = ExitStack()
        make_optimizer = whole_optimizer(optimizer, self.blueprint.model)
        given = (self.blueprint.model, example, self.loss, make_optimizer)
        self._workload = workload = Workload(
            *given, self.blueprint.whole_bytes, notes=self.blueprint.notes
        )
        self.resolved = resolved or resolve_plan(plan, workload)
        if resolved is None:  # who has resolved it has compared it, too
            one_node = context.world_size == context.local_world_size
            facts = start_facts(job, workload, self.resolved, one_node=one_node)
            context.agreement.require(facts)
        self.plan, self.layout = self.resolved.plan, self.resolved.layout
        self.notes = () if resolved else self.resolved.notes
        """What there is to say of the choices made."""
        self.advice = [*self.notes]
        """Where a technique cannot help: known with the prediction."""
        if self.layout is not None and example is not None and context.is_main:
            self.advice.append(self.layout.check(workload.model, example, self.loss))
        self._skeleton: Workload | None = None
        """The workload with a copy of the model that holds no values, for later forecasts."""
        with suppress(Exception):  # a module that cannot be copied cannot be predicted either
            self._skeleton = replace(workload, model=meta_copy(workload.model))
        if example is not None:
            self._predict_all(workload)
        self.first_steps: FirstSteps | None = None
        if job.train.check_first_steps:  # before a technique changes the model
            self.first_steps = FirstSteps(
                job.train.check_first_steps, self.blueprint, self.loss, optimizer, plan, context
            )
        seed_everything(context.seed, stream_of(context))
        self._closing.enter_context(kernels_as_asked(job.train, context.device))
        importlib.import_module("torch._dynamo")  # by every optimizer: not the run's memory
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
        """Make what computes; what it needs at hand goes with the engine."""
        mover = self.plan.make_offloader(self.context.device)
        if mover is not None:
            self._closing.callback(mover.close)
        self._closing.callback(remove_policies, self.blueprint.model)
        with self._explaining():
            return build_runner(
                self.resolved, self.blueprint, workload, self.context, self.meter, mover
            )

    def _open_meter(self) -> None:
        """Begin to measure and to limit memory; say where it will not do."""
        job, context = self.job, self.context
        self.limit_bytes = available_bytes(job.memory.cap, context.device, context.local_world_size)
        """What this rank could take before it was built, in bytes."""
        if context.is_main and self._subject is not None and job.memory.on_oom == "stop":
            self.advice += predict_out_of_memory(self._subject, self.fullest, self.limit_bytes)
        self._cap, self._watch = MemoryCap(job.memory.cap, context.device), StepWatch(context)
        self._closing.callback(self._cap.lift)
        self.meter = MemoryMeter(context.device, job.memory.track_steps, self._cap)

    def _open_loop(self, learning_rate: RateArgument | None, metrics: Metrics | None) -> None:
        """Make what a loop of the user's own has beside the runner."""
        self._metrics = check_metrics(metrics, self.task.figures)
        if self.context.pp_size > 1:
            self._closing.callback(refuse_calls(self.runner.module).remove)
        self._whole_optimizer.retire()
        given = (lambda: self.runner.optimizer, self._whole_optimizer.settings)
        self.optimizer = LoopOptimizer(*given)
        """The user's parameter groups, to read and to set; torch's schedulers work on it."""
        self._rate = LearningRate(learning_rate, self.optimizer)
        self._loop_states = LoopStates(self.optimizer, self._rate)
        self._removed = RemovedCheckpoints(self.job.checkpoint.keep)

    @property
    def _whole_optimizer(self) -> WholeOptimizer:
        return whole_optimizer(self._workload.make_optimizer, self._workload.model)

    @property
    def model(self) -> nn.Module:
        """The module as the user wrote it, with this rank's weights in it."""
        return self.runner.module

    def step(self, batch: Step | tuple[Any, Any]) -> StepResult:
        """Train on one global batch.

        Args:
            batch: from a `StepLoader`; or this rank's own (inputs, targets), rows first, which
                is cut into the job's `train.accumulation_steps` micro-batches.

        Raises:
            ConfigError: more rows than the job's micro-batches hold.
            NonFiniteError: a loss or gradient is not finite, and that is checked; nothing stepped.
        """
        began = time.perf_counter()
        if self.kept is not None:
            self.kept.check_step()
        unseen = self.predicted is None and self.prediction_note is None
        if unseen:
            first = batch.micro_batches[0] if isinstance(batch, Step) else None
            self._probe_first(*((first.inputs, first.targets) if first else as_pair(batch, "step")))
        micro_batches, samples = self._micro_batches(batch)
        micro_batches = self._with_totals(micro_batches)
        if unseen or self._is_other(micro_batches[0]):
            self._predict_from(micro_batches[0])
            began = time.perf_counter()
        self._watch.begin(tracked=self.meter.tracking)
        lr = self._set_learning_rate()
        checks = self.first_steps is not None and self.first_steps.active
        if self.first_steps is not None and checks:
            self.first_steps.begin(micro_batches, self.optimizer.changed_settings(below=False))
            began = time.perf_counter()
        self.runner.module.train()
        accuracy: TrainingAccuracy | None = getattr(self.loss, "accuracy", None)
        if accuracy is not None:
            accuracy.begin()
        try:
            with self._explaining(), self.meter.step(self.steps_done + 1):
                loss = self.runner.forward_backward(micro_batches)
                grad_norm = self.runner.update(loss)
        except NonFiniteError as error:
            raise error.in_step(self.steps_done + 1) from None
        top1 = None if accuracy is None else self._share(*accuracy.end())
        self.steps_done += 1
        self.samples_seen += samples
        self.optimizer.stepped()
        self._rate.after_step()
        if self.kept is not None:
            self.kept.update()
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

    def _share(self, part: float, whole: float) -> float:
        """One sum over all ranks by another. Collective.

        Ranks that compute the same count it several times, in both sums.
        """
        rows = self.context.all_gather_rows([part, whole])
        return math.fsum(row[0] for row in rows) / max(math.fsum(row[1] for row in rows), 1.0)

    def memory(self) -> MemoryReport | None:
        """Memory of all ranks and a step's seconds, measured and predicted; None but on rank 0."""
        predicted, steps = (self.predicted, self.prediction_note), self._watch.measured()
        own = (self.meter.measured(), *predicted, steps, self.predicted_state)
        volumes = (self._watch.volume(), self.predicted_volume)
        mine = RankMemory(self.context.rank, *own, *volumes)
        ranks = self.context.gather_objects(mine)
        if ranks is None:
            return None
        run = (self.plan.strategy.name, self.context.device.type)
        there = tuple(rank for rank in ranks if rank is not None)  # none is lost but those spare
        return MemoryReport(*run, there, self.predicted_step or StepForecast(None))

    def keep_beside(self, kept: Beside) -> None:
        """Have something follow each step, and go with checkpoints and forecasts."""
        self.kept = kept
        self._foresee_beside()

    def _foresee_beside(self) -> None:
        """Add what is kept beside the model to the forecasts: it is there at every moment."""
        if self.kept is not None and self.predicted is not None:
            parts = self.predicted.breakdown.plus(Breakdown(optimizer=self.kept.nbytes))
            self.predicted = replace(self.predicted, breakdown=parts)

    @cached_property
    def saver(self) -> Saver:
        """Writes this run's checkpoints."""
        return self._closing.enter_context(Saver(self.context, self.job.checkpoint))

    def save(
        self,
        folder: str | Path,
        *,
        best: Mapping[str, float] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write a checkpoint below `folder`; return its path. Collective.

        With `checkpoint.asynchronous` it is there when `saver.wait` has returned.

        Args:
            folder: for this run's checkpoints; the newest `checkpoint.keep` stay.
            extra: plain values that `load` gives back, as `{"epoch": 3}`; those of rank 0.
            best: figures of a validation, where no state before had better ones: it stays.

        Raises:
            ConfigError: `folder` is no path, or something of the loop cannot be kept.
            CheckpointError: it could not be written (a full disk, a folder that is gone); the same
                on all ranks. What was there before stays, and the run can go on.
            UnequalRanksError: ranks of the tp axis do not hold the same whole tensors.
        """
        loop, folder = self._loop_states.state(extra), as_folder(folder, "save")
        self.saver.reserve(folder)
        with self._explaining("while a checkpoint was written"), self.meter.saving() as added:
            state = self.runner.state()
            if self.kept is not None:
                state |= self.kept.state()
            check_equal_ranks(state, self.context, self.steps_done)
            meta: dict[str, Any] = {
                "samples_seen": self.samples_seen,
                "validation": best,
                SAVED_AS: loop,
            }
            if self.in_own_loop:
                whole = self._whole_optimizer.kind_name
                meta |= {"model_class": self._model_class, "optimizer_class": whole}
            if self._extra_at_start:
                meta["extra_state"] = self._extra_states()
            meta["job"] = self.job.model_dump(mode="json")
            meta["mesh"] = {axis: getattr(self.plan, axis) for axis in ("pp", "dp", "tp")}
            with self.blueprint.given_back():
                texts = config_texts(self.runner.module)
            path = self.saver.save(
                folder,
                self.steps_done,
                state,
                {**meta, **random_streams(self.context)},
                texts,
                best=best is not None,
                added=added,
            )
        if self.in_own_loop and self.context.is_main:
            self._removed.tell(folder)
        return path

    def load(self, path: str | Path, *, weights_only: bool = False) -> dict[str, Any]:
        """Continue from a checkpoint: weights, optimizer, schedule, position, random states.

        Args:
            path: of a checkpoint, or the folder that `save` was given: its newest.
            weights_only: take over parameters and buffers alone, of a checkpoint that any optimizer
                wrote, to use a trained model or to begin another training with it. The optimizer's
                state begins anew; the position stays.

        Returns:
            What `save` was given as `extra`; empty with `weights_only`.

        Raises:
            ConfigError: `path` is no path.
            CheckpointError: there is none, it is damaged, or it is another model's; on all ranks.
        """
        path = as_folder(path, "load")
        path = newest_of_all(path, self.context) or path
        checkpoint = open_together(path, self.context)
        tensors = {n: t for n, t in checkpoint.tensors.items() if not n.endswith(BESIDE)}
        if weights_only:
            tensors = {n: t for n, t in tensors.items() if not n.startswith("optimizer.")}
        check_optimizer_state(tensors, self.runner.optimizer)
        with self._explaining("while a checkpoint was read"), self.meter.resuming():
            try:
                self.runner.load_state(tensors)
            except DamagedCheckpointError as error:
                if self.context.world_size == 1:
                    raise  # all of it is taken over anew from another one
                # The other ranks know nothing of it: to go on with another one, all have to.
                raise CheckpointError(str(error)) from None
        if self.kept is not None:
            self.kept.load(tensors if weights_only else checkpoint.tensors)
        self.runner.label_state()  # it was made outside of a step, and is there from now on
        extra = checkpoint.meta.get("extra_state", {})
        for name, module in extra_modules(self.runner.roots):
            if name in extra:
                module.set_extra_state(extra[name])
        if weights_only:
            return {}
        self.steps_done = self.context.recorder.step = int(checkpoint.meta["step"])
        self.samples_seen = int(checkpoint.meta["samples_seen"])
        extra_values, lines = self._loop_states.load(checkpoint.meta.get(SAVED_AS), self.steps_done)
        for line in lines if self.context.is_main else ():
            sys.stderr.write(f"bigtrain: {line}\n")
        continue_streams(checkpoint.meta, self.context, self.steps_done)
        return extra_values

    @cached_property
    def _extra_at_start(self) -> dict[str, Any]:
        """What states that are no tensors the model begins with."""
        return extra_states(self.runner.roots)

    def _extra_states(self) -> dict[str, Any] | None:
        """The states that are no tensors; on rank 0. Collective.

        The lowest rank's that is another than at the start: a stage's rank alone runs its modules.
        """
        ranks = self.context.gather_objects(extra_states(self.runner.roots))
        if ranks is None:
            return None
        merged = dict(self._extra_at_start)
        for name, start in self._extra_at_start.items():
            own = (rank[name] for rank in ranks if rank is not None and name in rank)
            merged[name] = next((state for state in own if state != start), start)
        return merged

    def close(self) -> None:
        """Let go of hooks, files and, where the engine made it, the process group."""
        self.runner.close()
        self._closing.close()

    def close_with(self, resource: AbstractContextManager[Any]) -> None:
        """Leave this context manager when the engine is closed."""
        self._closing.push(resource)

    def close_last(self, resource: AbstractContextManager[Any]) -> None:
        """Leave this context manager when all else of the engine is closed."""
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
        """Say what the memory was made of, and what would fit, where it runs out inside."""
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._cap.lift()
            situation = self._situation(where)
            clear_frames(error.__traceback__)  # they hold what was allocated last
            speaks = self.context.agreement.is_first("out of memory")
            patience_s = self.job.mesh.timeout if self.context.world_size > 1 else math.inf
            raise explain_out_of_memory(
                error, situation, speaks=speaks, patience_s=patience_s
            ) from None

    @property
    def _subject(self) -> ForecastInputs | None:
        """What is run, for forecasts of it with other words."""
        if self._skeleton is None or self._skeleton.example is None:
            return None
        return ForecastInputs(self.job, self.resolved, self._skeleton)

    def _situation(self, where: str | None) -> OutOfMemoryContext:
        measured = self.meter.measured().peak
        in_step = self.meter.current in ("forward", "backward", "step")
        return OutOfMemoryContext(
            rank=self.context.rank,
            step=self.steps_done + in_step,
            phase=self.meter.current,
            micro_size=self.plan.batch.micro_size,
            peak=measured or self.predicted,
            measured=measured is not None,
            limit_bytes=self.limit_bytes,
            capped=self.job.memory.cap is not None,
            activity=where,
            adapts=self.job.memory.on_oom == "adapt",
            inputs=self._subject,
        )

    def _is_other(self, first: MicroBatch) -> bool:
        """Whether the first micro-batch is not as the example was."""
        example = self._workload.example
        return not self.steps_done and is_resized(example, first, self.job, self.layout)

    def _probe_first(self, inputs: Any, targets: Any) -> None:
        """See what the loss divides by on the first batch, where there was no example."""
        rows = count_rows(inputs, targets)
        dims = self._batch_dims(inputs, targets, rows)
        batch, parts = MicroBatch(inputs, targets, 0, rows, dims=dims), self.plan.batch.num_parts
        model = self.runner.module if self._skeleton is None else self._skeleton.model
        followed = agree_on_loss(self.loss, model, batch, parts, self.context)
        watch_owners(followed, self.runner.module)
        self.loss = self.runner.loss = followed
        if isinstance(self.task, CustomTask):
            self.task = CustomTask(self.loss)

    def _predict_from(self, example: MicroBatch) -> None:
        if self._skeleton is None:
            workload = replace(self._workload, model=self.runner.module, example=example)
        else:
            workload = self._skeleton = replace(self._skeleton, example=example)
            refuse_found(self.plan, found_in_model(workload.model, workload.parameter_uses))
            check_known(self.plan, freeze_unreached(workload.model, example, self.loss))
        self._predict(workload)
        self._whole_optimizer.retire()

    def _predict(self, workload: Workload) -> None:
        if not self.job.memory.predict:
            self.prediction_note = "memory.predict is off"
            return
        place = (self.context.pp_rank, self.context.dp_rank, self.context.tp_rank)
        prediction = predict(self.resolved, workload, *place)
        given = (self.resolved, workload, self.job.checkpoint, prediction)
        self.predicted_state = forecast_state_peaks(*given, *place)
        self.predicted, self.prediction_note = prediction.own_peak, prediction.note
        self._host_bytes, self.predicted_volume = prediction.host_bytes, prediction.volume
        self._foresee_beside()
        if self.context.is_main and self._skeleton is not None:
            twin = replace(self._skeleton, example=workload.example)
            self.predicted_step = forecast_step_seconds(self.job, self.resolved, twin, self.context)
        self.advice = [*self.advice, *prediction.advice]

    def _predict_all(self, workload: Workload) -> None:
        """Predict every rank before anything is built. Collective."""
        self._predict(workload)
        save = self.predicted_state.save
        self.fullest = FullestRank.of_all(self.context, self.predicted, save)
        ensure_host_room(self.plan, self._host_bytes, self.context)

    def _set_learning_rate(self) -> float:
        self._rate.before_step(self.steps_done)
        self.optimizer.hand_over()
        return float(self.optimizer.param_groups[0]["lr"])

    def _with_totals(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches with what their loss divides by, added up over the global batch."""
        if not isinstance(self.loss, GlobalMeanLoss):
            return micro_batches

        replicate = self.plan.replicate
        if (
            replicate.num_servers and replicate.inexact_reason
        ):  # workers that do not wait for each other
            return self.loss.with_totals(micro_batches, lambda own: own)

        def add_up(own: Sequence[float]) -> list[float]:
            rows = self.context.all_gather_rows(own, "dp")
            return [math.fsum(column) for column in zip(*rows, strict=True)]

        return self.loss.with_totals(micro_batches, add_up)

    def _batch_dims(self, inputs: Any, targets: Any, rows: int) -> BatchDims:
        """Along which dims a batch is cut, by the example where its shapes alone do not tell."""
        example = self._workload.example
        before = (example.tensors(), example.rows) if example is not None else None
        explicit = self.job.data.batch_dims
        return find_batch_dims(inputs, targets, rows, explicit=explicit, example=before)

    def _micro_batches(self, batch: Step | tuple[Any, Any]) -> tuple[list[MicroBatch], int]:
        if isinstance(batch, Step):
            count = self.loss.count  # the loss may have been followed since it was read
            recount = self.in_own_loop and not self.steps_done
            parts = batch.micro_batches
            if recount:
                parts = [replace(p, count=count(p.targets) if p.rows else 0) for p in parts]
            return parts, batch.samples
        find = self._batch_dims
        return cut_rows(batch, self.loss, self.job, self.plan, self.context, find)


def _described(
    model: Callable[[], nn.Module] | nn.Module | Blueprint, example: MicroBatch | None
) -> Blueprint:
    """The model, which takes its inputs as the example has them."""
    blueprint = as_blueprint(model)
    if example is not None:
        set_model_inputs(blueprint, None, example.inputs)
    return blueprint


def _planned(job: Job, context: RunContext) -> Plan:
    return make_plan(job, context.world_size, context.device.type)
