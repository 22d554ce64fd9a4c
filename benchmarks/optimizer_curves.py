"""Compare loss curves of bf16 parameters without an fp32 copy with fp32, for both roundings.

    python benchmarks/optimizer_curves.py [--steps 300] [--output benchmarks/results/...json]

The default job (a small GPT on the Python library's source) runs four times with the same seed,
data and rates: all in fp32; bf16 with fp32 parameters (autocast); bf16 parameters and bf16 moments
with stochastic rounding; and the same with rounding to nearest. The script writes the losses as
JSON and, next to it, a picture of the smoothed curves as SVG.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import run_command, surroundings

ROOT = Path(__file__).resolve().parents[1]
LOW = ("train.precision=bf16", "optim.master_weights=false", "optim.state=bf16")
RUNS = {
    "fp32": (),
    "bf16, fp32 parameters": ("train.precision=bf16",),
    "bf16 parameters, stochastic": LOW,
    "bf16 parameters, nearest": (*LOW, "optim.stochastic_rounding=false"),
}
COLORS = ("#222222", "#2a7fff", "#2ca02c", "#d62728")
WIDTH, HEIGHT, EDGE = 720, 420, 56
WINDOW = 20
"""Steps over which a curve is averaged."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for each run")
    default = ROOT / "benchmarks" / "results" / "optimizer_curves.json"
    parser.add_argument("--output", type=Path, default=default)
    options = parser.parse_args()
    losses: dict[str, list[float]] = {}
    for name, keys in RUNS.items():
        losses[name] = run(keys, options.steps, options.batch, options.limit)
        print(name, [round(value, 3) for value in at_steps(losses[name]).values()], flush=True)
    document: dict[str, Any] = {
        **surroundings(),
        "job": f"configs/jobs/default.yaml, {options.steps} steps of {options.batch} samples",
        "mean_loss_of_the_last_steps": WINDOW,
        "table": {name: at_steps(curve) for name, curve in losses.items()},
        "losses": {name: [round(v, 5) for v in curve] for name, curve in losses.items()},
    }
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    options.output.with_suffix(".svg").write_text(picture(losses))
    return 0


def run(keys: tuple[str, ...], steps: int, batch: int, limit_s: float) -> list[float]:
    """Return the training loss of each step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *("train", "--strategy", "single"),
            *(f"train.steps={steps}", f"train.global_batch_size={batch}", "train.eval_every=0"),
            *(f"log.dir={folder}", "log.name=run", "checkpoint.at_end=false"),
            *("memory.track_steps=0", "memory.predict=false", *keys),
        ]
        fault = run_command(command, limit_s)
        if fault is not None:
            raise SystemExit(f"{keys}: {fault}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return [float(json.loads(line)["loss"]) for line in lines]


def smooth(curve: list[float]) -> list[float]:
    """Return means over the last `WINDOW` steps."""
    parts = [curve[max(0, n + 1 - WINDOW) : n + 1] for n in range(len(curve))]
    return [sum(part) / len(part) for part in parts]


def at_steps(curve: list[float]) -> dict[int, float]:
    """Return the smoothed loss at five steps."""
    means = smooth(curve)
    steps = [round(len(curve) * n / 5) for n in range(1, 6)]
    return {step: round(means[step - 1], 4) for step in steps}


def picture(losses: dict[str, list[float]]) -> str:
    """Draw the smoothed curves as SVG."""
    curves = {name: smooth(curve) for name, curve in losses.items()}
    steps = max(map(len, curves.values()))
    high = max(curve[min(len(curve) - 1, WINDOW)] for curve in curves.values())
    low = min(min(curve) for curve in curves.values())

    def x(step: float) -> float:
        return EDGE + (WIDTH - 2 * EDGE) * step / steps

    def y(loss: float) -> float:
        return EDGE + (HEIGHT - 2 * EDGE) * (high - min(loss, high)) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for n in range(5):
        loss, step = low + (high - low) * n / 4, steps * n / 4
        parts.append(
            f'<line x1="{EDGE}" x2="{WIDTH - EDGE}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" '
            f'stroke="#ddd"/><text x="8" y="{y(loss) + 4:.1f}">{loss:.2f}</text>'
            f'<text x="{x(step):.1f}" y="{HEIGHT - EDGE + 20}">{step:.0f}</text>'
        )
    for number, (name, curve) in enumerate(curves.items()):
        points = " ".join(f"{x(n + 1):.1f},{y(loss):.1f}" for n, loss in enumerate(curve))
        top = EDGE + 18 * number
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{COLORS[number]}" '
            f'stroke-width="1.5"/><text x="{WIDTH - EDGE - 190}" y="{top}" '
            f'fill="{COLORS[number]}">{name}</text>'
        )
    title = f"mean loss of {WINDOW} steps, by step"
    parts.append(f'<text x="{EDGE}" y="24" font-size="14">{title}</text></svg>')
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
