"""Measure the memory that optimizer state on disk saves, and its cost, for one and two processes.

    python benchmarks/offload.py [--repeats 3] [--output benchmarks/results/offload.json]

Every run is a separate run of the `bigtrain` command: a GPT of 50 million parameters (7 blocks, 768
wide) on the text of the Python library, 4 samples of 128 tokens a step and rank, fused AdamW, fp32.
Runs without and with offload alternate, so a machine that slows down slows both. Peaks are those of
the rank with the highest: `peak` of all tensors, `process` of the process's resident memory above
that before the model was built. The reduction is a share of the bytes of the optimizer's state (8
for each trained number, on every rank). `step` is the median of the steps after the tracked ones,
of the fastest repeat.
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

STEPS, TRACKED = 9, 3
# The loss with whole logits, as when the published figures were taken.
MODEL = ["model.name=gpt", "model.args.num_layers=7", "model.args.width=768"]
MODEL += ["model.chunked_loss=false"]
MODEL += ["model.args.num_heads=12", "model.args.sequence_length=128"]
DISK = "strategy.offload.optimizer=disk"
PAIRS: dict[str, tuple[int, list[str]]] = {
    "single": (1, ["--strategy", "single"]),
    "ddp, 2 ranks": (2, ["--strategy", "ddp"]),
}


def measure(ranks: int, words: list[str], scratch: str) -> dict[str, Any]:
    """Train for a few steps; return the figures of the rank with the highest peak."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bigtrain", "train", "-n", str(ranks), *words, *MODEL]
        command += ["train.micro_batch_size=4", "train.global_batch_size=null"]
        command += ["data.args.validation_fraction=0"]
        command += [f"train.steps={STEPS}", f"memory.track_steps={TRACKED}", "train.eval_every=0"]
        command += [f"log.dir={folder}", "log.name=run", "checkpoint.at_end=false"]
        if DISK in words:
            command.append(f"strategy.offload.path={scratch}")
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environ)
        run = Path(folder) / "run"
        memory = json.loads((run / "memory.json").read_text())
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    worst = max(memory["ranks"], key=lambda rank: rank["peak_bytes"])
    return {
        "losses": [line["loss"] for line in lines],
        "step_seconds": statistics.median(line["step_seconds"] for line in lines[TRACKED:]),
        **{k: worst[k] for k in ("peak_bytes", "predicted_peak_bytes", "phase", "breakdown")},
        "process_peak_bytes": max(rank["process_peak_bytes"] for rank in memory["ranks"]),
    }


def pair(ranks: int, words: list[str], repeats: int, scratch: str) -> dict[str, Any]:
    """Measure one strategy without and with its state on disk."""
    runs: dict[str, list[dict[str, Any]]] = {"device": [], "disk": []}
    for _ in range(repeats):
        runs["device"].append(measure(ranks, words, scratch))
        runs["disk"].append(measure(ranks, [*words, DISK], scratch))
    best = {
        k: min(repeated_runs, key=lambda run: run["step_seconds"])
        for k, repeated_runs in runs.items()
    }
    # AdamW's two numbers for each parameter; its step counts (4 bytes a tensor) are not moved.
    state = best["device"]["breakdown"]["parameters"] * 2
    device, disk = best["device"], best["disk"]
    fall = {k: device[k] - disk[k] for k in ("peak_bytes", "process_peak_bytes")}
    return {
        "ranks": ranks,
        "state_bytes": state,
        "same_losses": device.pop("losses") == disk.pop("losses"),
        "device": device,
        "disk": disk,
        "peak_fall": fall["peak_bytes"] / state,
        "process_fall": fall["process_peak_bytes"] / state,
        "step_ratio": disk["step_seconds"] / device["step_seconds"],
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return the rows as a Markdown table, sizes in MiB."""
    head = ["strategy", "state", "peak", "on disk", "process", "on disk", "fall", "step", "on disk"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for name, row in rows.items():
        sizes = [row["state_bytes"]]
        for key in ("peak_bytes", "process_peak_bytes"):
            sizes += [row["device"][key], row["disk"][key]]
        cells = [name, *(f"{size / 2**20:.0f}" for size in sizes), f"{row['process_fall']:.0%}"]
        cells += [f"{row[where]['step_seconds']:.2f} s" for where in ("device", "disk")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a folder on a disk")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rows = {name: pair(*row, options.repeats, options.path) for name, row in PAIRS.items()}
    print(table(rows))
    if options.output:
        hardware = f"{os.cpu_count()} cores, {platform.machine()}, no GPU; 1 thread a rank"
        result = {
            "hardware": f"{hardware}; the state's file stays in the page cache",
            "load_before": load,
            "repeats": options.repeats,
            "torch": torch.__version__,
            "rows": rows,
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
