"""Compare the ring of sends and receives with gloo's own all-reduce and with DDP, in seconds.

    python benchmarks/ring.py --output benchmarks/results/ring.json
    python benchmarks/ring.py --ranks 2 --pairs 3      # a few seconds

In one run, on the same ranks, alternate: an average of a number of bytes by
`strategies.ring.RingReduce` and by `all_reduce` with a division; and a step of a small GPT under
`ring` and under `ddp`. A ratio is the median of the ratios of neighbours; below 1 the ring is
faster. The figures are times: use an idle machine, with no more ranks than cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import forked
import torch
import torch.distributed as dist
from harness import keep

from bigtrain.assembly.make_plan import make_plan
from bigtrain.data.loader import Step
from bigtrain.engine.engine import Engine
from bigtrain.engine.setup import open_setup
from bigtrain.job.load import load_job
from bigtrain.ranks.context import RunContext
from bigtrain.strategies.ring import RingReduce
from bigtrain.units import KIB, MIB

SIZES = (64 * KIB, MIB, 8 * MIB, 25 * MIB)
"""Bytes that are averaged; the last is a bucket of both strategies."""
GPT = {"num_layers": 6, "width": 384, "num_heads": 6, "vocab_size": 1024, "sequence_length": 128}
WARM, LIMIT_S = 3, 900.0


def compare(
    ways: Sequence[Callable[[], object]], pairs: int, context: RunContext
) -> dict[str, float]:
    """Return the seconds of two functions and their median ratio, on the slowest rank."""
    taken: tuple[list[float], list[float]] = ([], [])
    for round_number in range(WARM + pairs):
        for way, seconds in zip(ways, taken, strict=True):
            context.barrier()
            begin = time.perf_counter()
            way()
            elapsed = time.perf_counter() - begin
            slowest = max(context.all_gather_numbers(elapsed))
            if round_number >= WARM:
                seconds.append(slowest)
    ratios = [
        first_seconds / second_seconds for first_seconds, second_seconds in zip(*taken, strict=True)
    ]
    return {
        "ring_seconds": statistics.median(taken[0]),
        "other_seconds": statistics.median(taken[1]),
        "ratio": statistics.median(ratios),
        "lowest_ratio": min(ratios),
        "highest_ratio": max(ratios),
    }


def _by_gloo(tensor: torch.Tensor, context: RunContext) -> None:
    dist.all_reduce(tensor, group=context.dp_group)
    tensor.div_(context.dp_size)


def _step(engine: Engine, batches: Iterator[Step]) -> None:
    engine.step(next(batches))


def averages(context: RunContext, pairs: int) -> list[dict[str, Any]]:
    """Compare the ring with gloo's all-reduce, for each size."""
    rows = []
    for nbytes in SIZES:
        tensor = torch.ones(nbytes // 4)
        ring = RingReduce(context, context.dp_group, len(tensor), tensor.dtype)
        ways = (partial(ring, tensor), partial(_by_gloo, tensor, context))
        rows.append({"bytes": nbytes, **compare(ways, pairs, context)})
    return rows


def steps(context: RunContext, pairs: int) -> dict[str, Any]:
    """Compare a step under `ring` with one under `ddp`."""
    with ExitStack() as stack:
        ways = []
        for name in ("ring", "ddp"):
            words = ["model.name=gpt", f"model.args={json.dumps(GPT)}", "data.name=synthetic"]
            words += ["data.args={kind: language, vocabulary: 1024}", "memory.track_steps=0"]
            words += ["train.micro_batch_size=2", f"train.global_batch_size={2 * context.dp_size}"]
            job = load_job(None, name, [*words, "memory.predict=false"])
            parts = open_setup(job, make_plan(job, context.world_size, "cpu"))
            engine = stack.enter_context(parts.engine(context))
            ways.append(partial(_step, engine, iter(parts.training_steps(context, 0))))
        return compare(ways, pairs, context)


def measure(context: RunContext, _: None, pairs: int) -> dict[str, Any]:
    """Measure everything on one rank."""
    return {"averages": averages(context, 4 * pairs), "step": steps(context, pairs)}


def prepare(_: int) -> None:
    """Prepare nothing."""


def main() -> int:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument(
        "--pairs", type=int, default=15, help="of steps; of averages 4 times as many"
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    forked.load_everything()
    rows = []
    for ranks in options.ranks:
        task = forked.Task("ring", prepare, measure, (options.pairs,), ranks, 1, LIMIT_S)
        for outcome in forked.run_all([task], ranks):
            if outcome.failed or outcome.refused:
                print(outcome.failed or outcome.refused, file=sys.stderr)
                return 1
            figures = outcome.values[0]
            for average in figures["averages"]:
                ring_ms, gloo_ms = average["ring_seconds"] * 1e3, average["other_seconds"] * 1e3
                print(
                    f"{ranks} ranks, {average['bytes'] / KIB:.0f} KiB: ring {ring_ms:.2f} ms, "
                    f"gloo {gloo_ms:.2f} ms, ratio {average['ratio']:.2f}"
                )
            average = figures["step"]
            print(
                f"{ranks} ranks, a step: ring {average['ring_seconds'] * 1e3:.1f} ms, ddp "
                f"{average['other_seconds'] * 1e3:.1f} ms, ratio {average['ratio']:.3f}"
            )
            rows.append({"ranks": ranks, **figures})
    keep(options.output, {"model": GPT, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
