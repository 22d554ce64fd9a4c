"""Measure what ranks compute, exchange and wait for in a step; each rank is this file.

Started by `bigtrain speedup`, once for each strategy and number of ranks:

    bigtrain pace -n N --record FOLDER [--strategy NAME] [KEY=VALUE ...]

    FOLDER/request.json    from the command: a `PaceRequest`
           pace.json       from rank 0: a `MeasuredPace`

The same processes do all of it, one after the other: the plain loop on each worker by itself, all
of them at once; the strategy's steps; the plain loop again; the strategy's messages with nothing
else going on.
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
from bigtrain.machine.cluster import CommOp
from bigtrain.machine.link_rates import exchange
from bigtrain.ranks.connect import pick_device
from bigtrain.ranks.context import RunContext
from bigtrain.ranks.exit_status import run_guarded
from bigtrain.ranks.launcher_env import detect_rank_info

WARM_STEPS = 2
"""Steps that are not timed: the first ones find no memory to use again, and DDP builds buckets."""
REPLAYS = 7
"""How often the messages of a step are sent by themselves, after one time that is not counted."""


@dataclass(frozen=True)
class PaceRequest:
    """What is to be measured."""

    steps: int
    other_rows: int | None
    """A second size of the micro-batch, of which computing is timed, too."""
    messages: list[tuple[CommOp, int, int]]
    """Of one step among all ranks: kind, bytes of all of them together, how many."""


@dataclass(frozen=True)
class MeasuredPace:
    """Seconds of a step, by `PaceRequest`."""

    compute: float
    """Of the plain loop on one process with a worker's samples, each worker by itself and all of
    them at once: the mean of all steps and workers, before the strategy's steps and after."""
    other_compute: float | None
    """The same with `other_rows`."""
    step: float
    """Of the strategy: the mean of all steps, of the slowest rank. It is no median, as some
    techniques exchange in some steps only."""
    whole: float | None
    """Of the messages; None without any."""
    latency: float | None
    """Of as many messages of one number a rank; None without any."""
    threads: int
    """Of each rank."""
    others_cores: float | None
    """Cores of rank 0's node that other programs took meanwhile; None: nobody knows."""


def main(arguments: list[str]) -> int:
    """Measure; rank 0 writes; returns the exit status."""
    options = train_arguments(arguments, records=True)
    job = load_job(options.config, options.strategy, options.overrides)
    folder = Path(options.record)
    request = PaceRequest(**read_json_object(folder / "request.json"))
    placement = detect_rank_info(os.environ)
    plan = make_plan(job, placement.world_size, device_type_of(job))
    check_job(job)
    grow_segments(os.environ)
    set_current(pick_device(job.device, placement, os.environ))
    parts = open_setup(job, plan)
    facts = parts.facts(one_node=placement.one_node)
    with connect_job(job, plan, placement, facts) as context:
        pace = measure_pace(job, parts, context, request)
        if context.is_main:
            (folder / "pace.json").write_text(json.dumps(asdict(pace)) + "\n", "utf-8")
    return 0


def measure_pace(
    job: Job, parts: RunSetup, context: RunContext, request: PaceRequest
) -> MeasuredPace:
    """All of it; collective."""
    clock = CpuClock()
    workers, micro = parts.plan.batch.dp_size, parts.plan.batch.micro_size
    compute = _alone(job, micro, context, workers, request.steps)
    other = None
    if request.other_rows is not None:
        other = _alone(job, request.other_rows, context, workers, request.steps)
    step = compute
    if context.world_size > 1:
        step = _together(parts, context, request.steps)
        # Once more, after the strategy: what the machine gives may have changed in between.
        compute = (compute + _alone(job, micro, context, workers, request.steps)) / 2
    whole = _replayed(context, request.messages)
    empty = [(kind, 0, calls) for kind, _, calls in request.messages]
    latency = _replayed(context, empty)
    others = others_cores(context.all_gather_objects(clock.read()))
    return MeasuredPace(compute, other, step, whole, latency, torch.get_num_threads(), others)


def _alone(job: Job, rows: int, context: RunContext, workers: int, steps: int) -> float:
    """Every worker on its own; ranks that serve wait, as they do while others compute."""
    words = ["strategy=single", "mesh.pp=null", "mesh.dp=-1", f"train.micro_batch_size={rows}"]
    single = override_job(job, words)
    seconds = 0.0
    with ExitStack() as closing:
        if context.rank < workers:
            parts = open_setup(single, make_plan(single, 1, context.device.type))
            own = RunContext.alone(context.device, context.seed)
            engine = closing.enter_context(parts.engine(own))
            batches = iter(parts.training_steps(own, 0))
            for _ in range(WARM_STEPS):
                engine.step(next(batches))
        taken = []
        for _ in range(steps):
            context.barrier()  # no rank computes by itself while others are done
            if context.rank < workers:
                taken.append(engine.step(next(batches)).step_seconds)
        if taken:
            seconds = statistics.fmean(taken)
    return sum(context.all_gather_numbers(seconds)) / workers


def _together(parts: RunSetup, context: RunContext, steps: int) -> float:
    """The strategy's steps."""
    taken: list[float] = []
    with parts.engine(context) as engine:
        for batch in parts.training_steps(context, 0):
            taken.append(engine.step(batch).step_seconds)
            if engine.steps_done == WARM_STEPS + steps:
                break
    return max(context.all_gather_numbers(statistics.fmean(taken[WARM_STEPS:])))


def _replayed(context: RunContext, messages: Sequence[tuple[CommOp, int, int]]) -> float | None:
    """The messages of a step, one after the other, of the slowest rank."""
    if not messages or context.world_size == 1:
        return None
    sizes = []
    for kind, nbytes, calls in messages:
        share = max(1, round(nbytes / calls / 4 / context.world_size))
        whole = torch.zeros(share * context.world_size, device=context.device)
        sizes.append((kind, calls, whole, torch.zeros(share, device=context.device)))
    taken = []
    for _ in range(1 + REPLAYS):
        context.barrier()
        began = time.perf_counter()
        for kind, calls, whole, part in sizes:
            for _ in range(calls):
                exchange(context, kind, whole, part)
        synchronize(context.device)
        taken.append(max(context.all_gather_numbers(time.perf_counter() - began)))
    return statistics.median(taken[1:])


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(sys.argv[1:])))
