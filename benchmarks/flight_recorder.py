"""Measure the cost of the flight recorder for a step of the default job, in one process.

    python benchmarks/flight_recorder.py --output benchmarks/results/flight_recorder.json

Steps with and without the recorder alternate in one process, so a machine that slows down slows
both; the ratio is the median over the pairs. On a busy machine its quartiles are far apart.
Therefore the events of a step are counted, too, and the seconds of an event's hooks are measured
separately: `share` is their product divided by the median step. Both kinds of steps include the
cost of torch's own record of exchanges, which is on in torch by default.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from harness import keep

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.engine import Engine
from bigtrain.engine.setup import open_setup
from bigtrain.job.load import load_job
from bigtrain.models.blocks import find_blocks
from bigtrain.ranks.context import RunContext
from bigtrain.recorder.blocks import BlockMark, mark_blocks, unmark_blocks
from bigtrain.recorder.ring import FlightRecorder


class Silent(FlightRecorder):
    """A recorder that records nothing."""

    def note(self, what: str = "") -> None:
        """Record nothing."""


def measure(steps: int) -> dict[str, Any]:
    """Measure steps with and without the recorder, in alternation."""
    job = load_job("default", "single", ["memory.track_steps=0", f"train.steps={2 * steps + 20}"])
    parts = open_setup(job, make_plan(job, 1, "cpu"))
    context = RunContext.alone()
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    events = 0
    with parts.engine(context) as engine:
        batches = iter(parts.training_steps(context, 0))
        for pair in range(steps + 3):
            for way in ("with", "without") if pair % 2 else ("without", "with"):
                recorder = switch(engine, context, on=way == "with")
                batch = next(batches)
                before, began = recorder._written, time.perf_counter()
                engine.step(batch)
                if pair >= 3:
                    seconds[way].append(time.perf_counter() - began)
                    events = max(events, recorder._written - before)
    ratios = [a / b for a, b in zip(seconds["with"], seconds["without"], strict=True)]
    step, event = statistics.median(seconds["without"]), seconds_of_an_event()
    return {
        "steps": steps,
        "step_seconds": step,
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
        "events_of_a_step": events,
        "event_seconds": event,
        "share": events * event / step,
    }


def switch(engine: Engine, context: RunContext, *, on: bool) -> FlightRecorder:
    """Give the engine's meter and blocks a recorder, or none."""
    unmark_blocks(engine.model)
    recorder = engine.meter.recorder = context.recorder if on else Silent()
    if on:
        mark_blocks(find_blocks(engine.model), recorder)
    return recorder


def seconds_of_an_event(rounds: int = 2000) -> float:
    """Return the seconds of a block's hooks divided by its two events; the fastest of five."""
    mark, module = BlockMark(FlightRecorder(), "block"), torch.nn.Identity()
    x = torch.zeros(1, requires_grad=True)

    def passes() -> float:
        outputs = [x * 1 for _ in range(rounds)]
        began = time.perf_counter()
        for output in outputs:
            mark.begin(module, ())
            mark.end(module, (), output)
            mark.backward(None)
        return (time.perf_counter() - began) / rounds

    return min(passes() for _ in range(5)) / 2


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure(options.steps)
    print(json.dumps(figures, indent=1))
    keep(options.output, figures)


if __name__ == "__main__":
    main()
