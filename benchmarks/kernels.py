"""Measure `train.compile=blocks` and `train.memory_format=channels_last`, in alternating runs.

    python benchmarks/kernels.py --output benchmarks/results/kernels.json

The default job, and ResNet-18 on images, run in one process: as written, and with the keys. A step
is the median of the steps in which memory is not tracked, without the first, which compiles; its
share is the median over the rounds of (the run / the run as written in the same round). The figures
are times: use an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from harness import keep, run_command

STEPS, LIMIT_S = 20, 400.0
JOBS = {
    "default job": [],
    "ResNet-18": [
        "model.name=resnet18",
        "data.name=synthetic",
        "data.args={input_shape: [3, 96, 96], num_classes: 10}",
        "train.global_batch_size=16",
    ],
}
KEYS = {
    "as written": [],
    "compile": ["train.compile=blocks"],
    "channels_last": ["train.memory_format=channels_last"],
}


def run(words: list[str], threads: int) -> dict[str, Any]:
    """Run once; return the median seconds of a step, and whether other programs were busy."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"train.steps={STEPS}", "train.eval_every=0", f"log.dir={folder}"]
        failed = run_command(
            ["train", "--strategy", "single", *fixed, "log.name=one", *words], LIMIT_S, threads
        )
        if failed is not None:
            return {"failed": failed}
        report = json.loads((Path(folder) / "one" / "memory.json").read_text("utf-8"))
    return {"seconds": report["step"]["measured_seconds"], "busy": report["step"]["busy"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for job, words in JOBS.items():
        keys = {k: v for k, v in KEYS.items() if job == "ResNet-18" or k != "channels_last"}
        rounds = [
            {name: run([*words, *key], options.threads) for name, key in keys.items()}
            for _ in range(options.rounds)
        ]
        for name in keys:
            runs = [runs_of_round[name] for runs_of_round in rounds]
            ratios = [
                runs_of_round[name]["seconds"] / runs_of_round["as written"]["seconds"]
                for runs_of_round in rounds
                if "failed" not in runs_of_round[name]
                and "failed" not in runs_of_round["as written"]
            ]
            share = statistics.median(ratios) if ratios else None
            rows.append({"job": job, "kernels": name, "share_of_written": share, "runs": runs})
            print(job, name, share, runs, flush=True)
    keep(options.output, {"steps": STEPS, "rows": rows}, options.threads)


if __name__ == "__main__":
    main()
