"""The lines before and after a run, and what a dry run prints."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from rich.console import Console

from bigtrain.assembly.make_plan import describe_plan
from bigtrain.assembly.state_peaks import forecast_state_peaks
from bigtrain.core.strategy import Plan
from bigtrain.engine.engine import Engine
from bigtrain.engine.out_of_memory import predict_out_of_memory, predict_save_beyond
from bigtrain.engine.remedies import ForecastInputs
from bigtrain.engine.setup import RunSetup
from bigtrain.job.schema import Job
from bigtrain.memory.timeline import Peak, highest_peak
from bigtrain.prediction.predict import predict
from bigtrain.report.run_log import predicted_line, state_line, step_line
from bigtrain.units import format_count


def make_console() -> Console:
    """Standard output; a file or a pipe is 100 columns wide."""
    return Console() if sys.stdout.isatty() else Console(width=100)


def opening_lines(parts: RunSetup, engine: Engine, resumed: Sequence[str]) -> Iterator[str]:
    """What will be trained, on what, in which batches, and the predicted peak."""
    context = engine.context
    yield f"{model_line(parts)}, {parts.job.train.precision}"
    if parts.data.description:
        yield parts.data.description
    where = f"{_ranks(context.world_size)} on {context.device.type}"
    yield f"strategy {parts.plan.strategy.name}: {where}"
    yield batch_line(parts)
    yield from schedule_lines(parts)
    if not engine.blueprint.deferred:
        yield f"the model was built whole and sent from rank 0: {engine.blueprint.reason}"
    if engine.layout is not None:
        yield from engine.layout.lines()
    yield from parts.resolved.notes
    yield predicted_line(engine.predicted_fullest, engine.prediction_note)
    save, limit = engine.predicted_state.save, engine.limit_bytes
    yield from predict_save_beyond(save, limit, parts.job.checkpoint)
    if engine.predicted_step is not None:
        yield step_line(engine.predicted_step)
    yield from engine.advice
    yield from resumed


def closing_lines(parts: RunSetup, folder: Path) -> Iterator[str]:
    """What a model that learned nothing would reach, and where the results are."""
    for name, value in parts.data.baseline.items():
        yield f"for comparison, without learning: {name} {value:.4f}"
    yield f"results: {folder}"


def model_line(parts: RunSetup) -> str:
    """The model and its size."""
    count, model = parts.parameters, parts.job.model
    start = "" if model.pretrained is None else f" from {model.pretrained}"
    return f"{model.name}: {format_count(count)} parameters{start}"


def batch_line(parts: RunSetup) -> str:
    """The batch equation with its numbers, and the length of the run."""
    batch = parts.plan.batch
    return (
        f"global batch {batch.global_size} = micro-batch {batch.micro_size} x accumulation "
        f"{batch.accumulation_steps} x dp {batch.dp_size}; {parts.total_steps} steps, "
        f"{parts.order.steps_per_epoch} to an epoch"
    )


def schedule_lines(parts: RunSetup) -> Iterator[str]:
    """The learning rates that a DeepSpeed file sets, where it has a scheduler."""
    if parts.schedule is None:
        return
    kind, steps = type(parts.schedule).__name__, parts.total_steps
    first, last = parts.learning_rate(0), parts.learning_rate(steps - 1)
    highest = max(parts.learning_rate(step) for step in range(steps))
    more, total = "", parts.schedule.total()
    if total is not None and total != steps:
        more = f"; it goes down over {total} steps, of which this run has {steps}"
    yield (
        f"learning rate: {kind} of {parts.job.strategy.deepspeed_file}, {first:g} in step 1, "
        f"{highest:g} at most, {last:g} in step {steps}{more}"
    )


def dry_run_lines(job: Job, plan: Plan, parts: RunSetup) -> Iterator[str]:
    """What is warned of, the resolved job, the plan, and the predicted peak of one rank."""
    yield from plan.warnings
    yield yaml.safe_dump(job.model_dump(mode="json", exclude_defaults=True), sort_keys=False)
    yield yaml.safe_dump(describe_plan(parts.plan), sort_keys=False)
    yield model_line(parts)
    yield batch_line(parts)
    yield from schedule_lines(parts)
    workload, layout = parts.workload, parts.resolved.layout
    if layout is not None:
        yield from layout.lines()
        yield layout.check(workload.model, workload.micro_batch, workload.loss)
    yield from parts.resolved.notes
    if parts.resolved.slices is not None:
        lines = dict(parts.resolved.slices.lines)
        yield yaml.safe_dump({"strategy": {"slice": {"slices": lines}}}, sort_keys=False)
    peaks: list[Peak] = []
    for pp_rank in range(plan.pp):
        prediction = predict(parts.resolved, workload, pp_rank)
        state = forecast_state_peaks(parts.resolved, workload, job.checkpoint, prediction, pp_rank)
        if plan.pp > 1:
            yield f"pp rank {pp_rank}:"
        yield predicted_line(prediction.peak, prediction.note)
        yield from prediction.advice
        if prediction.peak is not None:
            for kind, size in vars(prediction.peak.breakdown).items():
                yield f"  {kind:12} {size:>15,} bytes"
            peaks.append(prediction.peak)
        if state.save is not None and state.resume is not None:
            yield state_line(state.save, state.resume)
            yield from predict_save_beyond(state.save, job.memory.cap, job.checkpoint)
    if peaks and job.memory.cap is not None:
        subject = ForecastInputs(job, parts.resolved, workload)
        yield from predict_out_of_memory(subject, highest_peak(peaks), job.memory.cap)


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"
