"""Compare exchanges of fully_shard by gloo and in shared memory, on ranks of one thread.

    python benchmarks/exchanges.py --output benchmarks/results/exchanges.json

The GPT of `overhead.py` is trained through `bigtrain.Engine`, with gloo's sockets, with shared
memory, and without any exchange (`none`), whose numbers are wrong: it shows the seconds that the
best exchange could save. Steps alternate in the same processes. `share_of_gloo` is the share of a
step that gloo takes: 1 - none / sockets. The losses of both exchanges must agree to 1e-6.

The memory of a process is measured in processes of their own: the peak of its anonymous pages
(RssAnon) plus its part of the shared ones (RssShmem divided by the ranks), above what it had before
the model was made; of all ranks the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import overhead
import torch
import torch.distributed as dist
from harness import keep
from plain_loops import ROWS, adamw
from torch import Tensor

import bigtrain
from bigtrain.data.loader import MicroBatch, Step
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.ranks.context import RunContext
from bigtrain.strategies.zero.on_torch import exchanges

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("fsdp", {}),
    "fsdp_zero2": ("fsdp_zero2", {}),
    "fsdp, 4 micro-batches": ("fsdp", {"train.micro_batch_size": 1}),
}
WAYS = ("sockets", "shared_memory", "none")


class _Engine:
    """A case with one way of exchanging."""

    def __init__(self, context: RunContext, case: str, way: str) -> None:
        strategy, more = CASES[case]
        size = more.get("train.micro_batch_size", ROWS)
        keys = {
            "train.global_batch_size": context.world_size * ROWS,
            "train.micro_batch_size": size,
            "optim.clip_norm": 1.0,
            "memory.track_steps": 0,
            "memory.predict": False,
            "strategy.replicate.exchange": "sockets" if way == "none" else way,
            **more,
        }
        self._size, self._samples = size, context.world_size * ROWS
        example = self._parts(*overhead.batch(0, 0, strategy))[0]
        job = job_from_keys(strategy, keys)
        self._engine = bigtrain.Engine(
            overhead.make, CrossEntropy(), adamw, job, context, example=example
        )
        self._changes: list[Any] = []
        if way == "none":
            self._changes = [
                patch.object(exchanges, "all_gather_single", _gather_nothing),
                patch.object(exchanges, "reduce_scatter_single", _reduce_nothing),
            ]

    def _parts(self, inputs: Tensor, targets: Tensor) -> list[MicroBatch]:
        pairs = zip(
            inputs.chunk(ROWS // self._size), targets.chunk(ROWS // self._size), strict=True
        )
        return [MicroBatch(x, y, y.numel(), len(x)) for x, y in pairs]

    def step(self, rank: int, number: int) -> float:
        """Train on one batch; return the loss."""
        step = Step(self._parts(*overhead.batch(rank, number, "fsdp")), self._samples, 0, False)
        for change in self._changes:
            change.start()
        try:
            return self._engine.step(step).loss
        finally:
            for change in self._changes:
                change.stop()


def _gather_nothing(output: Tensor, own: Tensor, group: Any, async_op: bool = False) -> None:
    """Fill the output with this rank's shard."""
    del async_op
    for number, part in enumerate(output.chunk(group.size())):
        if number != group.rank():
            part.copy_(own)


def _reduce_nothing(
    output: Tensor, whole: Tensor, op: Any, group: Any, async_op: bool = False
) -> None:
    """Take this rank's part."""
    del op, async_op
    output.copy_(whole.chunk(group.size())[group.rank()])


def seconds_of(context: RunContext, case: str, pairs: int) -> dict[str, Any]:
    """Return the median seconds of each way, and ratios of neighbouring steps."""
    engines = {way: _Engine(context, case, way) for way in WAYS}
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(pairs + overhead.WARMUP):
        order, losses = list(engines.items()), {}
        for way, engine in order if number % 2 else reversed(order):
            context.barrier()
            began = time.perf_counter()
            losses[way] = engine.step(context.rank, number)
            context.barrier()
            if number >= overhead.WARMUP:
                taken[way].append(time.perf_counter() - began)
        if abs(losses["sockets"] - losses["shared_memory"]) > 1e-6 * losses["sockets"]:
            raise RuntimeError(f"{case}: step {number} has the losses {losses}")
    ratios = {
        way: [a / b for a, b in zip(taken[way], taken["sockets"], strict=True)] for way in WAYS[1:]
    }
    shared, none = (statistics.median(ratios[way]) for way in WAYS[1:])
    return {
        "seconds": {way: statistics.median(taken[way]) for way in WAYS},
        "shared_memory_over_sockets": shared,
        "quartiles": statistics.quantiles(ratios["shared_memory"], n=4)[::2],
        "share_of_gloo": 1 - none,
    }


def memory_of(context: RunContext, case: str, way: str) -> int:
    """Return the peak of the process in bytes, of the rank that needs most."""
    with overhead.OwnPages() as pages:
        engine = _Engine(context, case, way)
        for number in range(overhead.MEASURED_STEPS):
            engine.step(context.rank, number)
    peak = torch.tensor(pages.peak_bytes)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)


def rank_main(case: str, way: str, pairs: int, output: Path) -> None:
    """Measure on one rank; without a way, all ways are compared in time."""
    with bigtrain.connect(bigtrain.detect_rank_info(os.environ), device="cpu") as context:
        torch.set_num_threads(1)
        found: Any = memory_of(context, case, way) if way else seconds_of(context, case, pairs)
        if context.is_main:
            output.write_text(json.dumps(found))


def start(ranks: int, case: str, way: str, pairs: int) -> Any:
    """Start the ranks; return what rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), __file__, "--rank", case, way or "-"]
        command += ["--pairs", str(pairs), "--output", str(output)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-4000:])
        return json.loads(output.read_text())


def main() -> None:
    """Measure all cases and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        case, way = options.rank
        rank_main(case, "" if way == "-" else way, options.pairs, options.output)
        return
    rows = []
    for case in CASES:
        row = {"case": case, **start(options.ranks, case, "", options.pairs)}
        row["process_bytes"] = {way: start(options.ranks, case, way, 0) for way in WAYS[:2]}
        rows.append(row)
        print(json.dumps(row), flush=True)
    keep(options.output, {"ranks": options.ranks, "model": overhead.MODEL, "rows": rows})


if __name__ == "__main__":
    main()
