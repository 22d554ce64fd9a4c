"""Measure how long two ranks wait for each other after computations of different lengths.

    python benchmarks/waiting.py --output benchmarks/results/waiting.json

Each rank multiplies matrices for some time and then takes part in an exchange of 128 KiB, many
times. `exchange_seconds` is the mean of the exchanges, without the slowest twelfth, on rank 0. The
law of `bigtrain.machine.collective_cost` is fitted to all rows of a kind: the exchange alone, plus
`factor` times the square root of the seconds of work. `error` is the error of that fit, as a share.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from harness import keep

import bigtrain
from bigtrain.machine.cluster import MeasuredOp
from bigtrain.machine.link_rates import make_exchange
from bigtrain.ranks.context import RunContext

KINDS: tuple[MeasuredOp, ...] = ("all_gather", "reduce_scatter", "all_reduce", "send")
MILLISECONDS = (0, 1, 2, 5, 10, 20, 50, 100, 250)
NUMBERS, SIDE = 32768, 1024
TOTAL_S, ROUNDS = 4.0, (12, 200)
"""The seconds of a row, and the least and the most rounds in them."""


def row_of(context: RunContext, kind: MeasuredOp, milliseconds: int, rate: float) -> dict[str, Any]:
    """Measure one row. Collective.

    Args:
        context: the context of the ranks.
        kind: the kind of exchange.
        milliseconds: the wanted length of a computation.
        rate: the rows of a product that a rank multiplies in a second.
    """
    exchange = make_exchange(context, kind, NUMBERS)
    left, right = torch.ones(int(milliseconds / 1e3 * rate), SIDE), torch.ones(SIDE, SIDE)
    least, most = ROUNDS
    rounds = max(least, min(most, int(TOTAL_S / max(1e-3, milliseconds / 1e3))))
    taken = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        left @ right
        began = time.perf_counter()
        exchange()
        taken.append((began - start, time.perf_counter() - began))
    exchanges = sorted(seconds for _, seconds in taken[2:])
    both_ways = 2 if kind == "send" else 1
    return {
        "kind": kind,
        "work_seconds": statistics.fmean(work for work, _ in taken[2:]),
        "exchange_seconds": statistics.fmean(exchanges[: -(rounds // 12)]) / both_ways,
        "rounds": rounds,
    }


def rank_main(output: Path) -> None:
    """Measure all rows on one rank."""
    with bigtrain.connect(bigtrain.detect_rank_info(os.environ), device="cpu") as context:
        torch.set_num_threads(1)
        left, right = torch.ones(512, SIDE), torch.ones(SIDE, SIDE)
        for _ in range(3):
            began = time.perf_counter()
            left @ right
            rate = 512 / (time.perf_counter() - began)
        rate = min(context.all_gather_numbers(rate))
        rows = [row_of(context, kind, ms, rate) for kind in KINDS for ms in MILLISECONDS]
        if context.is_main:
            output.write_text(json.dumps(rows))


def fitted(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Fit the law to the rows of a kind, with equal relative weights."""
    alone = rows[0]["exchange_seconds"]
    pairs = [(math.sqrt(row["work_seconds"]), row["exchange_seconds"]) for row in rows[1:]]
    weighted = [(root / seconds, (seconds - alone) / seconds) for root, seconds in pairs]
    factor = sum(x * y for x, y in weighted) / sum(x * x for x, _ in weighted)
    errors = [abs((alone + factor * root) / seconds - 1) for root, seconds in pairs]
    return {"factor": factor, "median_error": statistics.median(errors), "error": max(errors)}


def main() -> None:
    """Start two ranks, and print a line for each kind of exchange."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.rank)
        return
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", __file__, "--rank", str(output)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-4000:])
        rows = json.loads(output.read_text())
    laws = {kind: fitted([row for row in rows if row["kind"] == kind]) for kind in KINDS}
    for kind, law in laws.items():
        print(kind, json.dumps(law), flush=True)
    keep(options.output, {"ranks": 2, "bytes": 4 * NUMBERS, "rows": rows, "laws": laws})


if __name__ == "__main__":
    main()
