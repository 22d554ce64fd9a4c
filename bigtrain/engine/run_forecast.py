"""The forecast of a run on one rank: peak memory, saves, exchanges and the seconds of a step."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from torch import nn

from bigtrain.assembly.host_room import ensure_host_room
from bigtrain.assembly.inspection import found_in_model, refuse_found
from bigtrain.assembly.resolve import check_known
from bigtrain.assembly.state_peaks import forecast_state_peaks
from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.workload import Workload
from bigtrain.costs.traffic import StepVolume
from bigtrain.data.loader import MicroBatch
from bigtrain.engine.remedies import ForecastInputs
from bigtrain.job.schema import Job
from bigtrain.losses.loss import Loss
from bigtrain.memory.added_bytes import StatePeaks
from bigtrain.memory.timeline import Breakdown, Peak
from bigtrain.prediction.memory_report import FullestRank, StepForecast
from bigtrain.prediction.predict import predict
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.fake import meta_copy
from bigtrain.timing.run_seconds import forecast_step_seconds
from bigtrain.tracing.unreached import freeze_unreached


@dataclass(frozen=True)
class RunPrediction:
    """The prediction of a run on this rank. The fields have their defaults before a prediction."""

    peak: Peak | None = None
    """The predicted peak of this rank; None if there is none."""
    note: str | None = None
    """The reason why a prediction has no peak."""
    state: StatePeaks = StatePeaks()
    """The peaks of a save and of a resume."""
    volume: StepVolume | None = None
    """Bytes that this rank exchanges in a step."""
    host_bytes: int = 0
    """See `Prediction.host_bytes`."""
    step: StepForecast | None = None
    """The seconds of a step; None on other ranks than rank 0."""
    fullest: FullestRank | None = None
    """The rank with the highest predicted peak; None on other ranks than rank 0, and if no example
    was given."""
    advice: tuple[str, ...] = ()
    """See `Prediction.advice`."""

    def plus_state(self, nbytes: int) -> RunPrediction:
        """Return a copy with `nbytes` more bytes of state at the peak, such as averaged weights."""
        if self.peak is None:
            return self
        breakdown = self.peak.breakdown.plus(Breakdown(optimizer=nbytes))
        return replace(self, peak=replace(self.peak, breakdown=breakdown))


class RunForecaster:
    """Predicts a run before it is built, or from its first micro-batch.

    Args:
        job: the job with the keys of `memory` and `checkpoint`.
        resolved: the plan that is run.
        workload: the workload. Its model is copied without values, before any technique changes
            the model.
        context: the context of the rank that is predicted.
    """

    def __init__(
        self, job: Job, resolved: ResolvedPlan, workload: Workload, context: RunContext
    ) -> None:
        self._job, self._resolved, self._context = job, resolved, context
        self.skeleton: Workload | None = None
        """The workload with a copy of the model on the meta device; None if the model cannot be
        copied."""
        with suppress(Exception):  # a module that cannot be copied cannot be predicted either
            self.skeleton = replace(workload, model=meta_copy(workload.model))

    @property
    def inputs(self) -> ForecastInputs | None:
        """The inputs for forecasts of changed jobs.

        None if there is no example, or no copy of the model.
        """
        if self.skeleton is None or self.skeleton.example is None:
            return None
        return ForecastInputs(self._job, self._resolved, self.skeleton)

    def predict(self, workload: Workload) -> RunPrediction:
        """Predict the memory of this rank; on rank 0 also the seconds of a step.

        Args:
            workload: a workload with an example.

        Raises:
            ConfigError: a technique cannot work with a model of this size.
        """
        if not self._job.memory.predict:
            return RunPrediction(note="memory.predict is off")
        context = self._context
        prediction = predict(
            self._resolved, workload, context.pp_rank, context.dp_rank, context.tp_rank
        )
        state = forecast_state_peaks(
            self._resolved,
            workload,
            self._job.checkpoint,
            prediction,
            context.pp_rank,
            context.dp_rank,
            context.tp_rank,
        )
        step = None
        if context.is_main and self.skeleton is not None:
            without_values = replace(self.skeleton, example=workload.example)
            step = forecast_step_seconds(self._job, self._resolved, without_values, context)
        return RunPrediction(
            peak=prediction.own_peak,
            note=prediction.note,
            state=state,
            volume=prediction.volume,
            host_bytes=prediction.host_bytes,
            step=step,
            advice=tuple(prediction.advice),
        )

    def predict_all(self, workload: Workload) -> RunPrediction:
        """Predict every rank before anything is built. Collective.

        Args:
            workload: a workload with an example.

        Returns:
            The prediction of this rank, with the fullest rank on rank 0.

        Raises:
            ConfigError: see `predict`; or a host has too little memory for its ranks.
        """
        prediction = self.predict(workload)
        fullest = FullestRank.of_all(self._context, prediction.peak, prediction.state.save)
        ensure_host_room(self._resolved.plan, prediction.host_bytes, self._context)
        return replace(prediction, fullest=fullest)

    def predict_built(
        self, workload: Workload, module: nn.Module, example: MicroBatch, loss: Loss
    ) -> RunPrediction:
        """Predict a run that is built already, from its first micro-batch.

        Args:
            workload: the workload with which the run was built. It has no example, or one with
                another number of rows.
            module: the runner's module; used if the model could not be copied without values.
            example: the first micro-batch.
            loss: the loss with the divisors that follow from the first batch.

        Raises:
            ConfigError: a run of the model on the example shows that the strategy cannot train it.
        """
        if self.skeleton is None:
            return self.predict(replace(workload, model=module, example=example))
        self.skeleton = replace(self.skeleton, example=example)
        plan, model = self._resolved.plan, self.skeleton.model
        refuse_found(plan, found_in_model(model, self.skeleton.parameter_uses))
        check_known(plan, freeze_unreached(model, example, loss))
        return self.predict(self.skeleton)
