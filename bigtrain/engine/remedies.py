"""Remedies: changes of a job that does not fit, each with the predicted peak.

The peak of a changed job is predicted like that of any job. Only the order of the changes is a rule
of thumb: those that slow a run down the least are tried first.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from bigtrain.assembly.make_plan import make_plan
from bigtrain.assembly.resolve import resolve_plan
from bigtrain.core.registry import techniques_of
from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.strategy import Plan
from bigtrain.core.workload import Workload
from bigtrain.job.load import override_job
from bigtrain.job.schema import Job, Role
from bigtrain.machine.residuals import non_tensor_reserve
from bigtrain.memory.cap import Limit
from bigtrain.memory.timeline import Peak, highest_peak
from bigtrain.prediction.predict import forecast_rank
from bigtrain.units import format_bytes

MAX_REMEDIES = 3
"""The most remedies that a message names."""


@dataclass(frozen=True)
class Remedy:
    """A change of a job after which it is predicted to fit."""

    words: tuple[str, ...]
    """The change as words of the command line, such as `train.micro_batch_size=8`."""
    peak_bytes: int
    """The predicted peak of the changed job, on the rank that needs the most memory."""

    def __str__(self) -> str:
        """Return the words and the predicted peak as text."""
        return f"{shlex.join(self.words)}  (predicted peak {format_bytes(self.peak_bytes)})"


@dataclass(frozen=True)
class ForecastInputs:
    """A job with its plan and workload, from which forecasts of changed jobs are made."""

    job: Job
    resolved: ResolvedPlan
    workload: Workload
    """The workload, with an example."""

    def peak(self, words: Sequence[str]) -> Peak | None:
        """Return the predicted peak of the job after some changes.

        Args:
            words: the changes as words of the command line.

        Returns:
            The peak of the rank that needs the most memory. None if the changed job cannot be run
            or forecast.
        """
        try:
            job = override_job(self.job, words)
            current_plan = self.resolved.plan
            plan = make_plan(
                job,
                current_plan.world_size,
                current_plan.device_type,
                one_host=current_plan.one_host,
            )
            rows, count = plan.batch.micro_size, self.workload.loss.count
            example = self.workload.micro_batch.first_rows(rows, count)
            workload = replace(self.workload, example=example)
            resolved = resolve_plan(plan, workload)
            forecasts = [
                forecast_rank(resolved, workload, rank).forecast for rank in range(plan.pp)
            ]
        except Exception:  # user code of any kind runs here; a change that fails is no remedy
            return None
        peaks = [forecast.peak() for forecast in forecasts if forecast is not None]
        return highest_peak(peaks) if len(peaks) == plan.pp else None


@dataclass
class RemedySearch:
    """The search for changes that fit. Another thread may read the fields while it runs."""

    remedies: list[Remedy] = field(default_factory=list)
    """The changes that were found so far."""
    forecasts: int = 0
    """The number of changes that could be forecast."""
    begun: bool = False
    """Whether the search has begun."""
    complete: bool = False
    """Whether every kind of change was tried, or `MAX_REMEDIES` were found."""

    def run(self, subject: ForecastInputs, limit: int, deadline_s: float) -> None:
        """Search for up to `MAX_REMEDIES` changes after which the predicted peak fits.

        Args:
            subject: the job that does not fit.
            limit: bytes that a rank may allocate.
            deadline_s: seconds after which no further change is tried.
        """
        end = time.monotonic() + deadline_s
        self.begun = True
        reserve = non_tensor_reserve(subject.resolved.plan.device_type)
        usable = Limit(limit, non_tensor_bytes=reserve).for_tensors
        for changes in _kinds_of_change(subject, usable):
            candidates = changes()
            last: Remedy | None = None
            if isinstance(candidates, _EachLess) and len(candidates) > 1:
                if time.monotonic() > end:
                    return
                last = self._remedy_of(subject, candidates.pop(), usable)
                if last is None:  # the change that saves the most does not fit, so none does
                    continue
            for words in candidates:
                if time.monotonic() > end:
                    self.remedies += [last] if last is not None else []
                    return
                remedy = self._remedy_of(subject, words, usable)
                if remedy is not None:
                    last = remedy
                    break
            self.remedies += [last] if last is not None else []
            if len(self.remedies) == MAX_REMEDIES:
                break
        self.complete = True

    def _remedy_of(
        self, subject: ForecastInputs, words: Sequence[str], usable: int
    ) -> Remedy | None:
        """Return a change with its predicted peak; None if it does not fit or has no forecast."""
        peak = subject.peak(words)
        self.forecasts += peak is not None
        if peak is None or peak.bytes > usable:
            return None
        return Remedy(tuple(words), peak.bytes)


class _EachLess(list[Sequence[str]]):
    """Changes of which each needs less memory than the one before it in the list."""


def smaller_batch(job: Job, plan: Plan, micro_size: int) -> list[str]:
    """Return the words for smaller micro-batches of the same global batch.

    Args:
        job: the job as the user wrote it. The words depend on which batch keys it sets.
        plan: the plan of the job.
        micro_size: the rows of a micro-batch.
    """
    steps = -(-plan.batch.global_size // (micro_size * plan.batch.dp_size))
    words = []
    if job.train.micro_batch_size is not None or job.train.accumulation_steps is None:
        words.append(f"train.micro_batch_size={micro_size}")
    if job.train.accumulation_steps is not None:
        words.append(f"train.accumulation_steps={steps}")
    if job.train.global_batch_size is None and job.train.accumulation_steps is None:
        words.append(f"train.global_batch_size={plan.batch.global_size}")
    return words


def smaller_micro_batches(job: Job, plan: Plan) -> Iterator[Sequence[str]]:
    """Yield the words for half the micro-batch, a quarter, and so on, of the same global batch."""
    size = plan.batch.micro_size
    while size % 2 == 0:
        size //= 2
        yield smaller_batch(job, plan, size)


def _technique_remedies(plan: Plan, role: Role, most: int) -> list[Sequence[str]]:
    """Return the remedies of all techniques of a role, including a user's technique in the plan."""
    asked = techniques_of(role)
    current = plan.techniques.get(role)
    if current is not None and not any(isinstance(current, type(known)) for known in asked):
        asked.append(current)
    return [words for technique in asked for words in technique.remedies(plan, most)]


def _kinds_of_change(
    subject: ForecastInputs, usable: int
) -> Iterator[Callable[[], Iterable[Sequence[str]]]]:
    """Yield functions that return the changes of one kind; the cheapest kind is first.

    Of the changes of a kind, the first that fits is taken.
    """
    job, plan = subject.job, subject.resolved.plan
    yield lambda: _EachLess(smaller_micro_batches(job, plan))
    less, shared, away = (
        _technique_remedies(plan, role, usable) for role in ("recompute", "replicate", "offload")
    )
    may_recompute = less if "recompute" not in plan.techniques else []
    if may_recompute:
        yield lambda: iter(may_recompute)
    if shared:
        yield lambda: iter(shared)
    if "offload" not in plan.techniques:
        yield lambda: iter(away)
    smallest = list(smaller_micro_batches(job, plan))[-1:]
    combined = [word for words in (*smallest, *may_recompute[-1:]) for word in words]
    if combined:
        yield lambda: iter([combined, *([*combined, *words] for words in away[:1])])
    if shared:
        yield lambda: iter([[*shared[-1], *combined]])
