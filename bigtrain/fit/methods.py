"""Ways of fine-tuning, and the planner's answer for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from bigtrain.errors import ConfigError
from bigtrain.fit.peaks import PhasePeaks, phase_peaks
from bigtrain.fit.subject import Subject
from bigtrain.hub.lora import QUANTIZE
from bigtrain.job.load import load_job
from bigtrain.machine.cluster import Cluster
from bigtrain.memory.cap import Limit
from bigtrain.planner.ask import (
    PlannedAnswer,
    Question,
    ask,
    check_question,
    open_evaluator,
)
from bigtrain.planner.evaluate import EvaluatedPlan, RejectedPlan

MOST_DEVICES = 64
"""Largest number of devices that is tried if a model does not fit."""


@dataclass(frozen=True)
class Method:
    """One way of fine-tuning."""

    name: str
    """The name in the JSON document: full, lora or qlora."""
    title: str
    """The name in the table."""
    words: tuple[str, ...] = ()
    """Keys of the job, as KEY=VALUE."""


def methods(rank: int) -> list[Method]:
    """Return the ways of fine-tuning that are compared: full, LoRA and QLoRA.

    Args:
        rank: the rank of the adapters.
    """
    lora, own = f"model.lora.rank={rank}", f"r {rank}"
    return [
        Method("full", "full"),
        Method("lora", f"LoRA {own}", (lora,)),
        Method("qlora", f"QLoRA {own}", (lora, QUANTIZE)),
    ]


@dataclass(frozen=True)
class Setting:
    """The parts of a question that do not depend on the model and the way of fine-tuning."""

    cluster: Cluster
    devices: int
    memory: Limit
    """The memory limit of each rank."""
    global_batch_size: int
    """Samples of a step, over all ranks."""
    rows: int | None
    """Rows of a micro-batch; None to search for the number."""
    margins: dict[str, float]
    """See `Question.margins`."""
    overrides: tuple[str, ...]
    """Keys of the job that the user sets, as KEY=VALUE."""
    every_plan: bool = False
    """Whether pipelines and tensor slices are searched even if a plan of replicas fits, which
    takes a minute."""


@dataclass(frozen=True)
class FittingChange:
    """A change that makes a method fit."""

    words: tuple[str, ...]
    """Options of `bigtrain fit`, or keys of the job as KEY=VALUE."""
    label: str
    """The label of the plan that fits."""
    peak_bytes: int
    """The predicted peak of a step on a device, without the engine's margin."""


@dataclass(frozen=True)
class FitAnswer:
    """The answer for one method."""

    method: Method
    planned: PlannedAnswer | None = None
    """The planner's answer; None if the question was refused."""
    shown: EvaluatedPlan | None = None
    """The fastest plan, if it fits in all phases; otherwise the plan with the least memory. None if
    there is no plan."""
    fits: bool = False
    """Whether `shown` fits in all phases."""
    phases: PhasePeaks | None = None
    """The peaks of `shown`."""
    refused: str | None = None
    """Why there is no answer; None if there is one."""
    remedies: tuple[FittingChange, ...] = field(default=())
    """Changes that make the method fit, if no plan fits in training."""

    @property
    def highest(self) -> tuple[str, int]:
        """The phase of `shown` with the highest peak on a device, and the bytes of this peak."""
        phases = self.phases.by_name if self.phases is not None else {}
        peaks = {name: peak.bytes for name, peak in phases.items() if peak is not None}
        if self.shown is not None:
            peaks["train"] = max(peaks.get("train", 0), self.shown.peak.bytes)
        return max(peaks.items(), key=lambda item: item[1], default=("train", 0))

    @property
    def missing_bytes(self) -> int:
        """Bytes of memory that a device lacks for the phases of `shown`; 0 if they fit."""
        if self.planned is None or self.shown is None:
            return 0
        question = self.planned.question
        needed = question.memory_for(self.highest[1], self.shown.candidate.engine)
        return max(0, needed - question.memory.nbytes)


def answer(subject: Subject, method: Method, setting: Setting) -> FitAnswer:
    """Return a method's fastest plan that fits, or the changes that would make the method fit."""
    try:
        question = method_question(subject, method, setting)
        check_question(question)
        opened = open_evaluator(question)
        planned = ask(question, opened)
        if not planned.result.best and question.tp == 1 and setting.devices > 1:
            setting = replace(setting, every_plan=True)
            question = method_question(subject, method, setting)
            planned = ask(question, opened)
        if planned.result.best:
            best = planned.result.best[0]
            found = FitAnswer(method, planned, best, True, phase_peaks(planned, best))
            if not found.missing_bytes:
                return found
        smallest = _smallest(planned)
        if smallest is None:
            reasons = dict.fromkeys(rejected.reason for rejected in planned.result.rejected)
            return FitAnswer(method, planned, refused=next(iter(reasons), "no plan can be made"))
        found = FitAnswer(method, planned, smallest, True, phase_peaks(planned, smallest))
        if planned.result.best:  # it trains; loading, saving and resuming may need more
            return replace(found, fits=not found.missing_bytes)
        remedies = tuple(_remedies(subject, method, setting, planned))
        return replace(found, fits=False, remedies=remedies)
    except ConfigError as error:
        return FitAnswer(method, refused=str(error))


def method_question(
    subject: Subject, method: Method, setting: Setting, words: Sequence[str] = ()
) -> Question:
    """Return the question to the planner for one way of fine-tuning.

    Args:
        subject: the model.
        method: the way of fine-tuning.
        setting: the devices and the batch.
        words: further keys of the job, as KEY=VALUE.

    Raises:
        ConfigError: a key or its value is wrong.
    """
    lora = bool(method.words)
    own = [w for w in setting.overrides if lora or not w.startswith("model.lora.")]
    job = load_job(
        None,
        "single",
        [
            *subject.model_words,
            *subject.data_words,
            "train.precision=bf16",
            f"train.global_batch_size={setting.global_batch_size}",
            *method.words,
            *own,
            *words,
        ],
    )
    # Plans of replicas alone need no further runs of the model, and no search over cuts.
    only_replicas = not setting.every_plan
    return Question(
        job=job,
        cluster=setting.cluster,
        devices=setting.devices,
        memory=setting.memory,
        global_batch_size=setting.global_batch_size,
        pp=1 if only_replicas and job.mesh.pp is None else job.mesh.pp,
        dp=None if job.mesh.dp == -1 else job.mesh.dp,
        tp=1 if only_replicas and job.mesh.tp is None else job.mesh.tp,
        rows=setting.rows,
        only_best=True,
        margins=setting.margins,
    )


def _smallest(planned: PlannedAnswer) -> EvaluatedPlan | None:
    """Return the plan with the least memory, evaluated under a limit that it just meets."""
    found = planned.search.smallest()
    if not isinstance(found, RejectedPlan) or found.peak is None:
        return found if isinstance(found, EvaluatedPlan) else None
    margin = 1 + planned.question.margins.get(found.candidate.engine, 0.0)
    limit = math.ceil((found.peak.bytes + 1) * margin) + 1
    evaluator = planned.search.evaluator
    outcome = evaluator.evaluate(found.candidate, evaluator.plan_of(found.candidate), limit)
    return outcome if isinstance(outcome, EvaluatedPlan) else None


def _remedies(
    subject: Subject, method: Method, setting: Setting, planned: PlannedAnswer
) -> list[FittingChange]:
    """Return changes that make a method fit: fewer bytes per parameter, then more devices."""
    found = []
    # Parameters and gradients in bf16 are on the devices, whatever is offloaded.
    least = 4 * planned.num_parameters // setting.devices
    if not method.words and least <= setting.memory.for_tensors:
        low = ("optim.master_weights=false",)
        for words in (low, (*low, "optim.name=adamw_8bit")):
            remedy = _with_words(subject, method, setting, words)
            if remedy is not None:
                found.append(remedy)
                break
    more = _with_devices(setting, planned)
    return found if more is None else [*found, more]


def _with_words(
    subject: Subject, method: Method, setting: Setting, words: tuple[str, ...]
) -> FittingChange | None:
    """Return the change of these keys of the job; None if no plan fits with it."""
    try:
        planned = ask(method_question(subject, method, setting, words))
    except ConfigError:
        return None
    if not planned.result.best:
        return None
    best = planned.result.best[0]
    return FittingChange(words, best.label, best.peak.bytes)


def _with_devices(setting: Setting, planned: PlannedAnswer) -> FittingChange | None:
    """Double the devices until a plan with fully sharded states fits; None if none does."""
    evaluator, cluster = planned.search.evaluator, setting.cluster
    limit, devices = setting.memory.for_tensors, 2 * setting.devices
    while devices <= MOST_DEVICES:
        if devices > cluster.node.devices and cluster.between is None:
            return None
        batch = max(setting.global_batch_size, devices)
        space = replace(
            planned.search.space,
            devices=devices,
            global_batch_size=batch - batch % devices,
            rows=1,
            pp=1,
            dp=None,
            tp=1,
        )
        for candidate in space.candidates():
            with suppress(ConfigError):
                plan = evaluator.plan_of(candidate)
                if plan.replicate.sharded_states < 3 or plan.state_ranks < devices:
                    continue
                outcome = evaluator.evaluate(candidate, plan, 0)
                margin = 1 + setting.margins.get(candidate.engine, 0.0)
                if outcome.peak is not None and outcome.peak.bytes * margin < limit:
                    words = (f"--devices {devices}",)
                    return FittingChange(words, candidate.label, outcome.peak.bytes)
        devices *= 2
    return None
