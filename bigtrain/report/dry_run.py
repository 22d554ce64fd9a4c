"""The output of a dry run: the job, the plan, and the predicted memory of each stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import yaml
from rich.console import Console

from bigtrain.assembly.make_plan import describe_plan
from bigtrain.assembly.state_peaks import forecast_state_peaks
from bigtrain.core.strategy import Plan
from bigtrain.engine.out_of_memory import predict_out_of_memory, predict_save_beyond
from bigtrain.engine.remedies import ForecastInputs
from bigtrain.engine.setup import RunSetup, open_setup
from bigtrain.job.schema import Job
from bigtrain.memory.added_bytes import StatePeak, StatePeaks
from bigtrain.memory.timeline import Peak
from bigtrain.prediction.memory_report import FullestRank
from bigtrain.prediction.predict import Prediction, predict
from bigtrain.report.banner import MemoryLimit, banner_lines, peak_line
from bigtrain.units import format_bytes


def show_dry_run(job: Job, plan: Plan, parts: RunSetup | None, console: Console) -> int:
    """Print the lines of a dry run, which trains nothing.

    Args:
        job: the job.
        plan: the job's plan.
        parts: the opened job; None if it has to be opened here.
        console: prints the lines.

    Returns:
        The exit status 0.
    """
    for line in dry_run_lines(job, plan, parts or open_setup(job, plan)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0


def dry_run_lines(job: Job, plan: Plan, parts: RunSetup) -> Iterator[str]:
    """Yield the lines: warnings, the job's keys, the plan, and the predicted peaks of the ranks."""
    yield from plan.warnings
    yield yaml.safe_dump(job.model_dump(mode="json", exclude_defaults=True), sort_keys=False)
    yield yaml.safe_dump(describe_plan(parts.plan), sort_keys=False)
    yield from banner_lines(parts, plan.world_size, plan.device_type)
    workload, layout = parts.workload, parts.resolved.layout
    if layout is not None:
        yield from layout.lines()
        yield layout.check(workload.model, workload.micro_batch, workload.loss)
    yield from parts.resolved.notes
    if parts.resolved.slices is not None:
        lines = dict(parts.resolved.slices.lines)
        yield yaml.safe_dump({"strategy": {"slice": {"slices": lines}}}, sort_keys=False)
    ranks = predict_ranks(parts)
    fullest = fullest_rank(parts, ranks)
    note = next((rank.prediction.note for rank in ranks if rank.prediction.note), None)
    # Not the memory of a device here: the run may be for another machine.
    limit = MemoryLimit(job.memory.cap, "memory.cap,")
    yield peak_line(fullest, note, limit)
    advice = (line for rank in ranks for line in rank.prediction.advice)
    yield from dict.fromkeys(advice)
    yield from _parts_of(ranks)
    for rank in ranks:
        yield from predict_save_beyond(rank.state.save, job.memory.cap, job.checkpoint)
    if job.memory.cap is not None:
        subject = ForecastInputs(job, parts.resolved, workload)
        yield from predict_out_of_memory(subject, fullest, job.memory.cap)


class PredictedRank:
    """The predictions for the first rank of a pipeline stage: a step, a save and a resume."""

    def __init__(self, pp_rank: int, prediction: Prediction, state: StatePeaks) -> None:
        self.pp_rank, self.prediction, self.state = pp_rank, prediction, state

    @classmethod
    def predicted(cls, parts: RunSetup, pp_rank: int) -> PredictedRank:
        """Predict a step, a save and a resume of the first rank with this pipeline rank."""
        prediction = predict(parts.resolved, parts.workload, pp_rank, 0)
        state = forecast_state_peaks(
            parts.resolved, parts.workload, parts.job.checkpoint, prediction, pp_rank
        )
        return cls(pp_rank, prediction, state)


def predict_ranks(parts: RunSetup) -> list[PredictedRank]:
    """Return the predictions for the first rank at each position of the pp axis, in order."""
    return [PredictedRank.predicted(parts, pp_rank) for pp_rank in range(parts.plan.pp)]


def fullest_rank(parts: RunSetup, ranks: list[PredictedRank]) -> FullestRank | None:
    """Return the rank with the highest predicted peak; None if a rank has no prediction.

    Not every rank is predicted. If memory differs among replicas or slices, it decreases from the
    first to the last, and parameter servers come before workers. So the first server, the first and
    the last worker or replica, and the first and the last slice are enough.

    Args:
        parts: the opened job.
        ranks: the result of `predict_ranks`.
    """
    plan = parts.plan
    replicas = dict.fromkeys((0, plan.replicate.num_servers, plan.dp - 1))
    slices = dict.fromkeys((0, plan.tp - 1))
    peaks: dict[int, Peak] = {}
    for replica, rank, tp_rank in product(replicas, ranks, slices):
        peak = rank.prediction.own_peak
        if replica or tp_rank:
            peak = predict(parts.resolved, parts.workload, rank.pp_rank, replica, tp_rank).own_peak
        if peak is None:
            return None
        peaks[(replica * plan.pp + rank.pp_rank) * plan.tp + tp_rank] = peak
    fullest = FullestRank.among(peaks)
    return None if fullest is None else replace(fullest, num_ranks=plan.world_size)


def _parts_of(ranks: list[PredictedRank]) -> Iterator[str]:
    """Yield the parts of each pipeline rank's peak, and the peaks of its save and its resume."""
    for rank in ranks:
        peak, state = rank.prediction.peak, rank.state
        if len(ranks) > 1:
            size = f" {format_bytes(peak.bytes)} in {peak.phase}" if peak is not None else ""
            yield f"pp rank {rank.pp_rank}:{size}"
        if peak is not None:
            for kind, nbytes in peak.breakdown.by_kind().items():
                yield f"  {kind:12} {nbytes:>15,} bytes"
        if state.save is not None and state.resume is not None:
            yield state_line(state.save, state.resume)


def state_line(save: StatePeak, resume: StatePeak) -> str:
    """Describe the predicted peaks of a save and of a resume in one line."""
    words = []
    for name, peak in (("save", save), ("resume", resume)):
        host = f" and {format_bytes(peak.host_bytes)} on the host" if peak.host_bytes else ""
        words.append(f"{format_bytes(peak.bytes)}{host} in a {name}")
    return f"predicted also: {', '.join(words)}"
