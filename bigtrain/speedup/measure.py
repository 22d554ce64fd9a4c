"""Measure the seconds that ranks compute, exchange and wait in a step; each rank runs this file.

`bigtrain speedup` starts it once for each strategy and number of ranks:

    bigtrain pace -n N --record FOLDER [--strategy NAME] [KEY=VALUE ...]

    FOLDER/request.json    written by the command: a `TimingRequest`
           timing.json     written by rank 0: a `StepTiming`

The same processes measure, in this order: the plain loop of one process, which all workers run at
once and independently; the strategy's steps; the plain loop again; the strategy's messages without
computation.
"""

import os
import sys

# As in train.py: a file run by its path has its own folder on sys.path, not the package's.
if not __package__ and sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(__file__):
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import json
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bigtrain.assembly.make_plan import device_type_of, make_plan
from bigtrain.devices import grow_segments, set_current, synchronize
from bigtrain.engine.prepare import connect_job
from bigtrain.engine.setup import RunSetup, check_job, open_setup
from bigtrain.files.parse import read_json_object
from bigtrain.job.arguments import train_arguments
from bigtrain.job.load import load_job, override_job
from bigtrain.job.schema import Job
from bigtrain.machine.busy import CpuClock, others_cores
from bigtrain.machine.cluster import MeasuredOp
from bigtrain.machine.link_rates import make_exchange
from bigtrain.ranks.connect import pick_device
from bigtrain.ranks.context import RunContext
from bigtrain.ranks.exit_status import run_guarded
from bigtrain.ranks.launcher_env import detect_rank_info

WARM_STEPS = 2
"""The number of first steps that are not timed, as they allocate memory and DDP's buckets."""
REPLAYS = 7
"""The number of timed repetitions of a step's messages, after one that is not timed."""


@dataclass(frozen=True, kw_only=True)
class TimingRequest:
    """The figures to measure."""

    steps: int
    """The number of timed steps."""
    other_rows: int | None
    """The rows of a second micro-batch size for which computation is timed; None for no second
    size."""
    messages: list[tuple[MeasuredOp, int, int]]
    """The exchanges of one step among all ranks: the kind, the bytes of all exchanges of this kind,
    and their number."""


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """The measured seconds of a step."""

    compute: float
    """A step of the plain loop of one process with a worker's samples, while all workers run it.
    It is the mean over steps and workers, before and after the strategy's steps."""
    other_compute: float | None
    """A step of the plain loop with `TimingRequest.other_rows`; None if there is no second size."""
    step: float
    """The strategy's step on the slowest rank: the mean over steps. It is no median, as some
    techniques exchange only in some steps."""
    whole: float | None
    """All messages of a step without computation; None if there are no messages."""
    latency: float | None
    """The same number of messages, each with one element for each rank; None if there are none."""
    threads: int
    """The number of CPU threads of each rank."""
    others_cores: float | None
    """The number of cores of rank 0's node that other programs used meanwhile; None if unknown."""


def main(arguments: list[str]) -> int:
    """Measure as one rank, write the figures on rank 0, and return the exit status."""
    options = train_arguments(arguments, records=True)
    job = load_job(options.config, options.strategy, options.overrides)
    folder = Path(options.record)
    request = TimingRequest(**read_json_object(folder / "request.json"))
    placement = detect_rank_info(os.environ)
    plan = make_plan(job, placement.world_size, device_type_of(job), one_host=placement.one_node)
    check_job(job)
    grow_segments(os.environ)
    set_current(pick_device(job.device, placement, os.environ))
    parts = open_setup(job, plan)
    facts = parts.facts(one_node=placement.one_node)
    with connect_job(job, plan, placement, facts) as context:
        timing = measure_step(job, parts, context, request)
        if context.is_main:
            (folder / "timing.json").write_text(json.dumps(asdict(timing)) + "\n", "utf-8")
    return 0


def measure_step(
    job: Job, parts: RunSetup, context: RunContext, request: TimingRequest
) -> StepTiming:
    """Measure all figures of the request. Collective.

    Args:
        job: the job with the strategy.
        parts: the setup of the job.
        context: the context of this rank.
        request: the figures to measure.
    """
    clock = CpuClock()
    workers, micro = parts.plan.batch.dp_size, parts.plan.batch.micro_size
    compute = _alone(job, micro, context, workers, request.steps)
    other_compute = None
    if request.other_rows is not None:
        other_compute = _alone(job, request.other_rows, context, workers, request.steps)
    step = compute
    if context.world_size > 1:
        step = _together(parts, context, request.steps)
        # The plain loop is timed again, because the speed of the machine may have changed.
        compute = (compute + _alone(job, micro, context, workers, request.steps)) / 2
    replayed = _replayed(context, request.messages)
    empty = [(kind, 0, calls) for kind, _, calls in request.messages]
    latency = _replayed(context, empty)
    others = others_cores(context.all_gather_objects(clock.read()))
    return StepTiming(
        compute=compute,
        other_compute=other_compute,
        step=step,
        whole=replayed,
        latency=latency,
        threads=torch.get_num_threads(),
        others_cores=others,
    )


def _alone(job: Job, rows: int, context: RunContext, workers: int, steps: int) -> float:
    """Return the mean seconds of a step of the plain loop on the workers; servers wait."""
    words = ["strategy=single", "mesh.pp=null", "mesh.dp=-1", f"train.micro_batch_size={rows}"]
    single = override_job(job, words)
    seconds = 0.0
    with ExitStack() as closing:
        if context.rank < workers:
            parts = open_setup(single, make_plan(single, 1, context.device.type))
            alone = RunContext.alone(context.device, context.seed)
            engine = closing.enter_context(parts.engine(alone))
            batches = iter(parts.training_steps(alone, 0))
            for _ in range(WARM_STEPS):
                engine.step(next(batches))
        taken = []
        for _ in range(steps):
            context.barrier()  # all workers compute at once
            if context.rank < workers:
                taken.append(engine.step(next(batches)).step_seconds)
        if taken:
            seconds = statistics.fmean(taken)
    return sum(context.all_gather_numbers(seconds)) / workers


def _together(parts: RunSetup, context: RunContext, steps: int) -> float:
    """Return the mean seconds of the strategy's steps on the slowest rank."""
    taken: list[float] = []
    with parts.engine(context) as engine:
        for batch in parts.training_steps(context, 0):
            taken.append(engine.step(batch).step_seconds)
            if engine.steps_done == WARM_STEPS + steps:
                break
    return max(context.all_gather_numbers(statistics.fmean(taken[WARM_STEPS:])))


def _replayed(context: RunContext, messages: Sequence[tuple[MeasuredOp, int, int]]) -> float | None:
    """Return the median seconds of a step's messages on the slowest rank, without computation."""
    if not messages or context.world_size == 1:
        return None
    exchanges = []
    for kind, nbytes, calls in messages:
        share = max(1, round(nbytes / calls / 4 / context.world_size))
        exchanges.append((calls, make_exchange(context, kind, share * context.world_size)))
    taken = []
    for _ in range(1 + REPLAYS):
        context.barrier()
        began = time.perf_counter()
        for calls, exchange in exchanges:
            for _ in range(calls):
                exchange()
        synchronize(context.device)
        taken.append(max(context.all_gather_numbers(time.perf_counter() - began)))
    return statistics.median(taken[1:])


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(sys.argv[1:])))
