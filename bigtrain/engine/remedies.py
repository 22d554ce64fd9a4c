"""Remedies: changes of a job that does not fit, each with the predicted peak.

Each change is forecast as a run of it would be, so only the order is a rule of thumb: the changes
that cost the least time are tried first.
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
    """A change of a job, as words for the command line."""

    words: tuple[str, ...]
    peak_bytes: int
    """The predicted peak with it, on the rank that needs the most."""

    def __str__(self) -> str:
        """The words and the predicted peak."""
        return f"{shlex.join(self.words)}  (predicted peak {format_bytes(self.peak_bytes)})"


@dataclass(frozen=True)
class ForecastInputs:
    """A job with its plan and workload, from which other forecasts are made."""

    job: Job
    resolved: ResolvedPlan
    workload: Workload
    """The workload, with an example."""

    def peak(self, words: Sequence[str]) -> Peak | None:
        """The predicted peak after some changes; None if they cannot be run or forecast."""
        try:
            job = override_job(self.job, words)
            current_plan = self.resolved.plan
            plan = make_plan(job, current_plan.world_size, current_plan.device_type)
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
    """The search for changes that fit; another thread may read it while it runs."""

    remedies: list[Remedy] = field(default_factory=list)
    forecasts: int = 0
    """Number of changes that could be forecast."""
    begun: bool = False
    complete: bool = False
    """Whether every kind of change was tried, or `MAX_REMEDIES` were found."""

    def run(self, subject: ForecastInputs, limit: int, deadline_s: float) -> None:
        """Search for up to `MAX_REMEDIES` changes after which the predicted peak fits.

        Args:
            subject: the job that does not fit.
            limit: bytes that a rank may take.
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
                if last is None:  # the smallest does not fit, so no larger one does
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
        """The change with its predicted peak; None if it does not fit or cannot be forecast."""
        peak = subject.peak(words)
        self.forecasts += peak is not None
        if peak is None or peak.bytes > usable:
            return None
        return Remedy(tuple(words), peak.bytes)


class _EachLess(list[Sequence[str]]):
    """Changes in the order of falling memory."""


def smaller_batch(job: Job, plan: Plan, micro_size: int) -> list[str]:
    """The words for smaller micro-batches of the same global batch.

    Args:
        job: the job as the user wrote it: the message names those of the three batch keys that it
            has.
        plan: the plan of the job.
        micro_size: rows of a micro-batch.
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
    """Half the micro-batch, a quarter, and so on, while the global batch stays the same."""
    size = plan.batch.micro_size
    while size % 2 == 0:
        size //= 2
        yield smaller_batch(job, plan, size)


def _technique_remedies(plan: Plan, role: Role, most: int) -> list[Sequence[str]]:
    """The remedies of all techniques of a role, including a user's technique in the plan."""
    asked = techniques_of(role)
    current = plan.techniques.get(role)
    if current is not None and not any(isinstance(current, type(known)) for known in asked):
        asked.append(current)
    return [words for technique in asked for words in technique.remedies(plan, most)]


def _kinds_of_change(
    subject: ForecastInputs, usable: int
) -> Iterator[Callable[[], Iterable[Sequence[str]]]]:
    """Kinds of change, cheapest first; the first change of a kind that fits is taken."""
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
