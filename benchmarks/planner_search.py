"""Measure how long the planner searches, and how much memory it takes, on three models.

    python benchmarks/planner_search.py --output benchmarks/results/planner_search.json

Each case runs in its own process on one thread: GPTs of 1.3 billion parameters on 64 devices, of
175 billion (96 layers of 12,288) on 1,024 devices, and of a trillion (128 layers of 25,600) on
4,096, on nodes of 8 x H100 with 80 GB, in bf16, with sequences of 2,048 tokens. `search` is the
search alone, `all` includes the description of the model, `memory` is the highest resident memory
of the process. No GPU is used. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import keep

from bigtrain.job.load import load_job
from bigtrain.machine.cluster import load_cluster
from bigtrain.planner.ask import Question, ask, rank_limits
from bigtrain.planner.show import plan_figures

CASES: dict[str, dict[str, Any]] = {
    "gpt-1.3b on 64": {
        "devices": 64,
        "batch": 512,
        "args": {"num_layers": 24, "width": 2048, "num_heads": 16},
    },
    "gpt-175b on 1024": {
        "devices": 1024,
        "batch": 1536,
        "args": {"num_layers": 96, "width": 12288, "num_heads": 96},
    },
    "gpt-1t on 4096": {
        "devices": 4096,
        "batch": 4096,
        "args": {"num_layers": 128, "width": 25600, "num_heads": 160},
    },
}


def main() -> None:
    """Run all cases, or one case in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.case is not None:
        json.dump(measured(options.case), sys.stdout)
        return
    rows = []
    for name in CASES:
        command = [sys.executable, __file__, "--case", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append({"case": name, **json.loads(done.stdout)})
        print(line(rows[-1]), flush=True)
    keep(options.output, {"rows": rows})


def line(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    best = row["best"]
    return (
        f"{row['case']}: search {row['search_seconds']:.1f} s, all {row['all_seconds']:.1f} s, "
        f"{row['memory_bytes'] / 2**30:.2f} GiB; {row['candidates']} plans, {row['judged']} "
        f"forecast; best {best['label']} pp {best['pp']} x dp {best['dp']} x tp {best['tp']}, "
        f"micro-batch {best['rows']} x {best['micro_batches']}: "
        f"{best['peak_bytes'] / 2**30:.1f} GiB, {best['step_seconds']:.1f} s, "
        f"MFU {100 * best['mfu']:.0f} %"
    )


def question_of(case: dict[str, Any]) -> Question:
    """Return the planner's question of a case.

    Args:
        case: `devices`, `batch` and the model's `args`; `cluster` (left out, `h100-node`) and
            `precision` (left out, bf16).
    """
    shape = {"vocab_size": 51200, "sequence_length": 2048, **case["args"]}
    words = [
        "model.name=gpt",
        f"model.args={json.dumps(shape)}",
        "data.name=synthetic",
        "data.args={kind: language, vocabulary: 51200}",
        f"train.precision={case.get('precision', 'bf16')}",
        f"train.global_batch_size={case['batch']}",
    ]
    cluster = load_cluster(case.get("cluster", "h100-node"))
    return Question(
        job=load_job(None, "single", words),
        cluster=cluster,
        devices=case["devices"],
        memory=rank_limits(cluster, memory=None, cap=None)[0],
        global_batch_size=case["batch"],
        margins={"torch": 0.0, "deepspeed": 0.0},
    )


def measured(name: str) -> dict[str, Any]:
    """Plan one case in this process."""
    began = time.perf_counter()
    planned = ask(question_of(CASES[name]))
    ended = time.perf_counter()
    best = planned.result.best[0]
    return {
        "search_seconds": planned.result.seconds,
        "all_seconds": ended - began,
        "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "num_parameters": planned.num_parameters,
        "candidates": planned.result.candidates,
        "judged": planned.result.evaluated,
        "best": {
            "label": best.candidate.label,
            "pp": best.candidate.pp,
            "dp": best.candidate.dp,
            "tp": best.candidate.tp,
            "rows": best.candidate.rows,
            "micro_batches": best.candidate.micro_batches,
            **plan_figures(planned, best),
        },
    }


if __name__ == "__main__":
    main()
