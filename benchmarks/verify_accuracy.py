"""Measure the difference of each preset from one process, for the tolerances of `bigtrain verify`.

    python benchmarks/verify_accuracy.py [--output benchmarks/results/verify_accuracy.json]
    python benchmarks/verify_accuracy.py --jobs default --precisions fp32 --strategies zero1,fsdp

Each preset of `bigtrain strategies` that is a complete run takes 3 steps of SGD on 2 ranks: on the
default job, on a model of torchvision with BatchNorm, and on a model of timm, if that is installed.
The figures are the largest relative differences that `bigtrain verify` found. Rows of the file that
are not measured again stay in it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness import keep

_PICTURES = ("data.name=synthetic", "train.global_batch_size=8")
JOBS: dict[str, tuple[str, ...]] = {
    "default": (),
    "resnet18": (
        *("model.name=resnet18", "model.args.num_classes=10", "data.name=synthetic"),
        "data.args={kind: classification, input_shape: [3, 64, 64]}",
        *("train.global_batch_size=16", "train.micro_batch_size=4"),
    ),
    "timm vit": (
        *("model.name=timm.models.vision_transformer:VisionTransformer", *_PICTURES),
        "model.args={img_size: 32, patch_size: 8, embed_dim: 64, depth: 4, num_heads: 4, "
        "num_classes: 10}",
        "data.args={kind: classification, input_shape: [3, 32, 32]}",
    ),
}
PRECISIONS = ("fp32", "bf16", "fp64")
FIGURES = ("loss", "norm", "gradient", "update")


def measure(job: str, precision: str, strategies: str) -> list[dict[str, Any]]:
    """Return the rows of `bigtrain verify`, with the reasons of refusals and failures."""
    words = ["-n", "2", "--strategies", strategies, "--json", *JOBS[job]]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bigtrain", "verify", *words]
        command += [f"train.precision={precision}", "--output", f"{folder}/verify"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not done.stdout:
            raise RuntimeError(done.stderr)
        rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    for row in rows:
        row["differences"] = row["differences"] and {k: row["differences"][k] for k in FIGURES}
        print(job, precision, row["strategy"], row["verdict"], row["differences"] or row["reason"])
    return rows


def largest(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the largest figure of each kind for each job and precision."""
    by_job: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["differences"] is not None:
            kind = f"{row['job']}, {row['precision']}"
            most = by_job.setdefault(kind, dict.fromkeys(FIGURES, 0.0))
            for key in FIGURES:
                most[key] = max(most[key], row["differences"][key] or 0.0)
    return by_job


def _of_others(output: Path | None, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of an existing file without those that were measured again."""
    if output is None or not output.exists():
        return []
    kind = ("job", "precision", "strategy")
    anew = {tuple(row[key] for key in kind) for row in rows}
    before: list[dict[str, Any]] = json.loads(output.read_text("utf-8"))["rows"]
    return [row for row in before if tuple(row[key] for key in kind) not in anew]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--strategies", default="all")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    jobs = [j for j in options.jobs.split(",") if j != "timm vit" or find_spec("timm") is not None]
    rows = [
        {"job": job, **row}
        for job in jobs
        for precision in options.precisions.split(",")
        for row in measure(job, precision, options.strategies)
    ]
    rows = [*_of_others(options.output, rows), *rows]
    document = {"largest": largest(rows), "rows": rows}
    print(json.dumps(document["largest"], indent=1))
    keep(options.output, document)


if __name__ == "__main__":
    main()
