"""Measure the memory of activations, gradients and optimizer state, and the cost of saving it.

    python benchmarks/activations.py --output benchmarks/results/activations.json
    python benchmarks/activations.py --models gpt --rows none,full --rounds 3

Every row is a separate run of the `bigtrain` command in one process, in fp32 unless the row says
otherwise: a GPT of 49 million parameters (6 blocks, 768 wide, vocabulary 8192) on micro-batches
of 4 samples of 512 tokens, and ResNet-50 on 8 images of 224 x 224. A round runs each row once, so
a machine that slows down slows all rows. `time` is the median over the rounds of (the median step
of the row / that of `none` in the same round).

Peaks: `tracked` is of all tensors, shown with the prediction made before the run; `process` is the
resident memory above that before the model was built; `saved` is what the blocks save for the
backward pass of one micro-batch.

The budgets equal the predicted peaks of rows with hand-picked policies, so that their times can be
compared, and one lies half-way between `full` and `every 2`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import run_command, surroundings

from bigtrain.assembly.block_prices import saved_bytes
from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.setup import open_setup
from bigtrain.job.load import load_job
from bigtrain.prediction.predict import forecast_rank

TRACKED, THREADS = 2, 2
RECOMPUTE, DISK = "strategy.recompute", "strategy.offload.activations=disk"
PLAIN, CHUNKED = "model.chunked_loss=false", "model.chunked_loss=true"
MODELS = {
    "gpt": [
        *("model.name=gpt", "model.args.num_layers=6", "model.args.width=768"),
        *("model.args.num_heads=12", "model.args.vocab_size=8192"),
        *("model.args.sequence_length=512", "data.name=synthetic", "data.args.kind=language"),
        *("data.args.vocabulary=8192", "train.micro_batch_size=4", "train.global_batch_size=4"),
    ],
    "resnet50": [
        *("model.name=resnet50", "data.name=synthetic", "data.args.kind=classification"),
        "data.args.input_shape=[3,224,224]",
        *("train.micro_batch_size=8", "train.global_batch_size=8"),
    ],
}
WAYS = {
    "none": [],
    "selective": [f"{RECOMPUTE}.mode=selective"],
    "every 2": [f"{RECOMPUTE}.every=2"],
    "full": [f"{RECOMPUTE}.mode=full"],
    "disk": [DISK],
    "full + disk": [f"{RECOMPUTE}.mode=full", DISK],
}
LEAN = {
    "chunked loss": [CHUNKED],
    "full + chunked loss": [CHUNKED, f"{RECOMPUTE}.mode=full"],
}
ON_LEAN = {
    "release": ["optim.release_gradients=true"],
    "adamw foreach": ["optim.implementation=foreach"],
    "adamw with bf16 state": ["optim.state=bf16"],
    "adafactor": ["optim.name=adafactor"],
    "adamw_8bit": ["optim.name=adamw_8bit"],
    "adamw_4bit": ["optim.name=adamw_4bit"],
    "bf16": ["train.precision=bf16"],
    "bf16 without master weights": [
        *("train.precision=bf16", "optim.master_weights=false", "optim.state=bf16"),
    ],
}
"""Rows of the GPT on top of `full + chunked loss`, where states and gradients decide."""


def rows(model: str) -> Iterator[tuple[str, list[str]]]:
    """Return the rows of a model, each with its command-line words."""
    common = [*MODELS[model], "optim.warmup_steps=0", "optim.clip_norm=null"]
    plain = [PLAIN] if model == "gpt" else []
    for name, words in WAYS.items():
        yield name, [*common, *plain, *words]
    peaks = {name: foretold([*common, *plain, *WAYS[name]])[0] for name in WAYS}
    budgets = {
        "budget of selective": peaks["selective"],
        "budget of every 2": peaks["every 2"],
        "budget between": (peaks["full"] + peaks["every 2"]) // 2,
    }
    for name, budget in budgets.items():
        yield name, [*common, *plain, f"{RECOMPUTE}.budget={budget}"]
    if model == "gpt":
        for name, words in LEAN.items():
            yield name, [*common, *words]
        for name, words in ON_LEAN.items():
            yield f"lean: {name}", [*common, *LEAN["full + chunked loss"], *words]


def foretold(words: list[str]) -> tuple[int, int, tuple[str, ...]]:
    """Return a row's predicted peak, the bytes that its blocks save, and notes on its budget."""
    if not any(word.startswith(("strategy.recompute", DISK)) for word in words):
        words = [*words, f"{RECOMPUTE}.budget=1TiB"]  # all blocks save everything
    job = load_job("default", "single", words)
    parts = open_setup(job, make_plan(job, 1, "cpu"))
    rank_forecast = forecast_rank(parts.resolved, parts.workload)
    if rank_forecast.forecast is None:
        raise SystemExit(f"the model cannot be forecast: {rank_forecast.note}")
    saved = sum(saved_bytes(rank_forecast.profiles[0], rank_forecast.forecast).values())
    return rank_forecast.forecast.peak().bytes, saved, parts.resolved.notes


def measure(words: list[str], steps: int, limit_s: float) -> dict[str, Any]:
    """Run one row once; return bytes and seconds, or only `note`, the reason for its failure."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["train", "--strategy", "single", *words]
        command += [f"train.steps={steps}", f"memory.track_steps={TRACKED}", f"log.dir={folder}"]
        command += ["log.name=run", "train.eval_every=0", "checkpoint.at_end=false"]
        failed = run_command(command, limit_s, THREADS)
        if failed:
            return {"note": failed}
        run = Path(folder) / "run"
        (rank,) = json.loads((run / "memory.json").read_text())["ranks"]
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = ("peak_bytes", "predicted_peak_bytes", "process_peak_bytes", "phase", "breakdown")
    return {
        **{key: rank[key] for key in keys},
        "step_seconds": statistics.median(line["step_seconds"] for line in lines[TRACKED:]),
        "losses": [line["loss"] for line in lines],
    }


def table(figures: dict[str, Any]) -> str:
    """Return the rows as a Markdown table, sizes in MiB."""
    lines = ["| model | row | tracked | predicted | process | saved | time | most of the peak |"]
    lines += ["| --- | --- |" + " ---: |" * 5 + " --- |"]
    for model, named in figures.items():
        for name, row in named.items():
            sizes = [row.get(f"{key}_bytes") for key in ("peak", "predicted_peak", "process_peak")]
            cells = [
                f"{size / 2**20:.0f}" if size else "-" for size in (*sizes, row["saved_bytes"])
            ]
            cells.append(f"{row['time']:.2f}" if row.get("time") else "-")
            parts = row.get("breakdown", {})
            most = sorted(parts, key=lambda kind: -parts[kind])[:2]
            cells.append(row.get("note") or ", ".join(f"{k} {parts[k] >> 20}" for k in most))
            lines.append(f"| {model} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="gpt,resnet50")
    parser.add_argument("--rows", help="names separated by commas without spaces (default: all)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help=f"of which {TRACKED} are tracked")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one run")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    chosen = options.rows.split(",") if options.rows else None
    figures: dict[str, dict[str, Any]] = {}
    words: dict[tuple[str, str], list[str]] = {}
    for model in options.models.split(","):
        figures[model] = {}
        for name, row_words in rows(model):
            if chosen is None or name in chosen:
                words[model, name] = row_words
                _, saved, notes = foretold(row_words)
                figures[model][name] = {"saved_bytes": saved, "said": list(notes), "rounds": []}
    for number in range(options.rounds):
        for (model, name), row_words in words.items():
            once = measure(row_words, options.steps, options.limit)
            row = figures[model][name]
            row["rounds"].append(once.pop("step_seconds", None))
            row.update(once)
            base = figures[model].get("none", {}).get("rounds", [])
            pairs = [(a, b) for a, b in zip(row["rounds"], base, strict=False) if a and b]
            row["time"] = statistics.median(a / b for a, b in pairs) if pairs else None
            print(f"round {number + 1} {model} {name}: {row['rounds'][-1]} s", file=sys.stderr)
        if options.output:
            document = {**surroundings(THREADS), "steps": options.steps, "models": figures}
            options.output.write_text(json.dumps(document, indent=1) + "\n")
    print(table(figures))


if __name__ == "__main__":
    main()
