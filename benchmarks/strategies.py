"""Measure the peak memory of the default job by strategy: table 1 of docs/internals/measured.md.

    python benchmarks/strategies.py [--output benchmarks/results/strategies.json]

Every row is a separate run of the `bigtrain` command; the figures are those of its memory.json and
metrics.jsonl, of the rank with the highest peak.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

STEPS = 12
ROWS: dict[str, tuple[int, list[str]]] = {
    "single": (1, ["--strategy", "single"]),
    "single, 4 micro-batches": (1, ["--strategy", "single", "train.micro_batch_size=8"]),
    "ddp, 2 ranks": (2, ["--strategy", "ddp"]),
    "ddp, 2 ranks, 4 micro-batches": (2, ["--strategy", "ddp", "train.micro_batch_size=4"]),
}


def measure(ranks: int, words: list[str]) -> dict[str, Any]:
    """Run the default job for a few steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bigtrain", "train", "-n", str(ranks), *words]
        command += [f"train.steps={STEPS}", f"log.dir={folder}", "log.name=run"]
        command += ["checkpoint.at_end=false"]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environ)
        run = Path(folder) / "run"
        memory = json.loads((run / "memory.json").read_text())
        lines = (run / "metrics.jsonl").read_text().splitlines()
        tracked = 3  # the first steps are tracked, and therefore slower
        seconds = [json.loads(line)["step_seconds"] for line in lines[tracked:]]
    worst = max(memory["ranks"], key=lambda rank: rank["peak_bytes"])
    return {
        "ranks": ranks,
        "step_seconds": statistics.median(seconds),
        **{key: worst[key] for key in ("peak_bytes", "predicted_peak_bytes")},
        "process_peak_bytes": worst["process_peak_bytes"],
        "phase": worst["phase"],
        "breakdown": worst["breakdown"],
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return the rows as a Markdown table, sizes in MiB."""
    parts = ["parameters", "gradients", "optimizer", "activations", "temporary"]
    lines = ["| strategy | peak | predicted | " + " | ".join(parts) + " | process | step |"]
    lines.append("| --- |" + " ---: |" * (len(parts) + 4))
    for name, row in rows.items():
        cells = [row["peak_bytes"], row["predicted_peak_bytes"]]
        cells += [row["breakdown"][part] for part in parts] + [row["process_peak_bytes"]]
        shown = " | ".join(f"{cell / 2**20:.1f}" for cell in cells)
        lines.append(f"| {name} | {shown} | {row['step_seconds']:.2f} s |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = {name: measure(*row) for name, row in ROWS.items()}
    print(table(rows))
    if options.output:
        hardware = f"{os.cpu_count()} cores, {platform.machine()}, no GPU; 1 thread a rank"
        result = {"hardware": hardware, "torch": torch.__version__, "rows": rows}
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
