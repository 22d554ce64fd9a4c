"""What the flight recorder costs a step of the default job, in one process.

    python benchmarks/flight_recorder.py --output benchmarks/results/flight_recorder.json

Steps with it and steps without it take turns in one process, so a machine that slows down slows
both: the ratio is the median over the pairs. On a machine that is not quiet its quartiles are
wide; so the events of a step are counted, too, and the seconds of an event's hooks measured by
themselves: `share` is their product over the median step. What torch's own record of exchanges
costs is in both kinds of steps; it is on in torch by default.
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
    """Hears everything and writes nothing."""

    def note(self, what: str = "") -> None:
        """Nothing."""


def measure(steps: int) -> dict[str, Any]:
    """Steps with and without, in turns."""
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
    """Let the engine's meter and blocks have the recorder, or none."""
    unmark_blocks(engine.model)
    recorder = engine.meter.recorder = context.recorder if on else Silent()
    if on:
        mark_blocks(find_blocks(engine.model), recorder)
    return recorder


def seconds_of_an_event(rounds: int = 2000) -> float:
    """A block's hooks, forward and backward, divided by its two events; the quickest of five."""
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
    """Measure, print, keep."""
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
