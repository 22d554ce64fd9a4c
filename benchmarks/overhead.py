"""Measure bigtrain's step time and peak memory against a hand-written DDP loop, on two ranks.

    python benchmarks/overhead.py [--steps 40] [--output benchmarks/results/overhead.json]

The same GPT, batch, optimizer and clipping run twice: as a careful plain PyTorch loop (fused AdamW,
gradients as bucket views), and through `bigtrain.Engine`. The two alternate, step by step, in the
same two processes, so a machine that slows down slows both; the figure is the median over the pairs
of (bigtrain / plain). Peaks are bytes of tracked tensors, measured for each loop in separate
processes. `closed_meter` compares a run that tracked its memory for two steps with one that tracked
none, after those steps.
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
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import bigtrain
from bigtrain.data.loader import MicroBatch, Step
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.memory.tracker import StorageTracker
from bigtrain.models import make_model
from bigtrain.ranks.context import RunContext

MODEL = {"num_layers": 4, "width": 256, "num_heads": 4, "vocab_size": 256, "sequence_length": 128}
ROWS = 8


def make() -> nn.Module:
    return make_model("gpt", MODEL)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


class Plain:
    """The hand-written loop."""

    def __init__(self, *, bucket_view: bool) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(make(), gradient_as_bucket_view=bucket_view)
        self.optimizer = adamw(self.model.parameters())

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        output = self.model(inputs)
        loss = cross_entropy(output.flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)  # the mean over the ranks, as one logs it
        del norm
        return total.item() / dist.get_world_size()


class Ours:
    """The same loop through bigtrain."""

    def __init__(self, context: RunContext, track_steps: int) -> None:
        keys = {
            "train.global_batch_size": ROWS * context.world_size,
            "optim.clip_norm": 1.0,
            "memory.track_steps": track_steps,
            "memory.predict": False,
        }
        self.engine = bigtrain.Engine(
            make, CrossEntropy(), adamw, job_from_keys("ddp", keys), context
        )

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        micro_batch = MicroBatch(inputs, targets, targets.numel(), len(inputs))
        return self.engine.step(Step([micro_batch], 2 * len(inputs), 0, False)).loss


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(256, (ROWS, MODEL["sequence_length"] + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def measure_speed(context: RunContext, steps: int) -> dict[str, Any]:
    """Compare with a hand-written loop."""
    loops = {"plain": Plain(bucket_view=True), "bigtrain": Ours(context, track_steps=0)}
    return alternate(context, steps, loops)


def measure_meter(context: RunContext, steps: int) -> dict[str, Any]:
    """Compare a run whose meter tracked two steps and is closed with one that never tracked."""
    loops = {"unmetered": Ours(context, track_steps=0), "closed": Ours(context, track_steps=2)}
    return alternate(context, steps, loops)


def alternate(context: RunContext, steps: int, loops: dict[str, Any]) -> dict[str, Any]:
    """Alternate two loops, step by step; return the ratio of the second's time to the first's."""
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for step in range(steps + 5):
        order = list(loops.items())
        for name, loop in order if step % 2 else reversed(order):
            data = batch(context.rank, step)
            context.barrier()
            began = time.perf_counter()
            loop.step(*data)
            context.barrier()
            if step >= 5:
                seconds[name].append(time.perf_counter() - began)
    ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
    medians = {f"{name}_step_seconds": statistics.median(seconds[name]) for name in loops}
    return {
        "steps": steps,
        **medians,
        "step_time_ratio": statistics.median(ratios),
        "step_time_ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
    }


def measure_peak(context: RunContext, which: str) -> dict[str, Any]:
    if which == "bigtrain":
        ours = Ours(context, track_steps=4)
        for step in range(4):
            ours.step(*batch(context.rank, step))
        return {"peak_bytes": ours.engine.meter.peak_bytes()}
    with StorageTracker() as tracker:
        plain = Plain(bucket_view=which == "plain-lean")
        for step in range(4):
            data = batch(context.rank, step)
            tracker.label(data, "activations")
            plain.step(*data)
            del data
    return {"peak_bytes": tracker.peak_bytes}


def rank_main(measurement: str, steps: int, output: Path) -> None:
    with bigtrain.connect(bigtrain.detect_rank_info(os.environ), device="cpu") as context:
        torch.set_num_threads(1)
        measures = {"speed": measure_speed, "meter": measure_meter}
        if measurement in measures:
            figures = measures[measurement](context, steps)
        else:
            figures = measure_peak(context, measurement)
        if context.is_main:
            output.write_text(json.dumps(figures))


def start(measurement: str, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", __file__, "--rank", measurement]
        command += ["--steps", str(steps), "--output", str(output)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        figures: dict[str, Any] = json.loads(output.read_text())
        return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.rank, options.steps, options.output)
        return
    speed = start("speed", options.steps)
    peaks = {w: start(w, 0)["peak_bytes"] for w in ("plain", "plain-lean", "bigtrain")}
    result = {
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}, no GPU; 2 ranks, 1 thread each",
        "torch": torch.__version__,
        "model": MODEL,
        "rows_per_rank": ROWS,
        **speed,
        "closed_meter": start("meter", options.steps),
        "peak_bytes": peaks,
        "memory_ratio": peaks["bigtrain"] / peaks["plain-lean"],
        "memory_ratio_to_default_ddp": peaks["bigtrain"] / peaks["plain"],
    }
    print(json.dumps(result, indent=1))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
