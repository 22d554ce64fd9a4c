r"""Measure bigtrain's step time and memory beside hand-written loops, on two ranks of one thread.

    python benchmarks/overhead.py [--strategies ddp,fsdp] [--pairs 10] \
        [--output benchmarks/results/overhead.json]

For each strategy the same GPT, batches, optimizer and clipping run in the loop of `plain_loops.py`
and through `bigtrain.Engine`. The two alternate, step by step, in the same two processes, so a
machine that slows down slows both; the figures are quantiles over the pairs of (bigtrain / plain).
Memory is measured in separate processes for each loop, above what a process has before the model is
made: the peak of its anonymous pages and of its part of the shared ones (RssAnon, and RssShmem
divided by the ranks, sampled every 5 ms). Of the two ranks the larger peak counts; a figure is the
median of `--memory-runs`. `plain` and `bigtrain` use the C library's allocator; `started` is
bigtrain with the allocator that its commands use. `closed_meter` compares a run that tracked its
memory for two steps with one that tracked none, after those steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import keep
from plain_loops import LOOPS, MICRO_BATCHES, ROWS, adamw
from torch import nn

import bigtrain
from bigtrain.data.loader import MicroBatch, Step
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.memory.allocator import allocator_environ
from bigtrain.models import make_model
from bigtrain.models.blueprint import as_blueprint
from bigtrain.ranks.context import RunContext

MODEL = {
    **{"num_layers": 8, "width": 768, "num_heads": 12, "vocab_size": 256},
    **{"sequence_length": 128, "tie_embeddings": False},
}
WARMUP = 2
"""Steps of each loop that are not measured."""
MEASURED_STEPS = 3
"""Steps of a run that measures memory."""
ONE_BATCH = {"tensor": "mesh.tp", "gpipe": "mesh.pp", "1f1b": "mesh.pp"}
"""Strategies whose two ranks train on one batch, and the axis on which the ranks are."""


def make() -> nn.Module:
    """Return the model, with random weights."""
    return make_model("gpt", MODEL)


def make_alike() -> nn.Module:
    """Return the model with the weights that bigtrain gives it, equal on all ranks."""
    return as_blueprint(make).materialize("cpu", seed=0)


class Ours:
    """The same loop through bigtrain."""

    def __init__(self, context: RunContext, strategy: str, track_steps: int = 0) -> None:
        self.micro_batches = MICRO_BATCHES if ONE_BATCH.get(strategy) == "mesh.pp" else 1
        keys: dict[str, Any] = {
            "train.global_batch_size": 2 * ROWS,
            "train.micro_batch_size": rows_of(strategy) // self.micro_batches,
            "optim.clip_norm": 1.0,
            "memory.track_steps": track_steps,
            "memory.predict": False,
        }
        if strategy in ONE_BATCH:
            keys[ONE_BATCH[strategy]] = 2
        job = job_from_keys(strategy, keys)
        example = self._micro_batches(*batch(0, 0, strategy))[0]
        self.engine = bigtrain.Engine(make, CrossEntropy(), adamw, job, context, example=example)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        micro_batches = self._micro_batches(inputs, targets)
        return self.engine.step(Step(micro_batches, 2 * ROWS, 0, False)).loss

    def _micro_batches(self, inputs: torch.Tensor, targets: torch.Tensor) -> list[MicroBatch]:
        parts = inputs.chunk(self.micro_batches), targets.chunk(self.micro_batches)
        return [MicroBatch(x, y, y.numel(), len(x)) for x, y in zip(*parts, strict=True)]


def rows_of(strategy: str) -> int:
    """Return the rows of a batch that a rank is given."""
    return 2 * ROWS if strategy in ONE_BATCH else ROWS


def batch(rank: int, step: int, strategy: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets of a rank."""
    seed = 1000 * step + (0 if strategy in ONE_BATCH else rank)
    generator = torch.Generator().manual_seed(seed)
    shape = (rows_of(strategy), int(MODEL["sequence_length"]) + 1)
    tokens = torch.randint(int(MODEL["vocab_size"]), shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def measure_speed(context: RunContext, strategy: str, pairs: int) -> dict[str, Any]:
    """Compare with the hand-written loop."""
    loops = {
        "plain": LOOPS[strategy](make_alike),
        "bigtrain": Ours(context, strategy),
    }
    return alternate(context, strategy, pairs, loops)


def measure_meter(context: RunContext, strategy: str, pairs: int) -> dict[str, Any]:
    """Compare a run whose meter tracked two steps and is closed with one that never tracked."""
    loops = {"unmetered": Ours(context, strategy), "closed": Ours(context, strategy, 2)}
    return alternate(context, strategy, pairs, loops)


def alternate(
    context: RunContext, strategy: str, pairs: int, loops: dict[str, Any]
) -> dict[str, Any]:
    """Alternate two loops, step by step; return the ratios of the second's time to the first's.

    Raises:
        RuntimeError: the losses of the loops differ.
    """
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for step in range(pairs + WARMUP):
        order, losses = list(loops.items()), []
        for name, loop in order if step % 2 else reversed(order):
            data = batch(context.rank, step, strategy)
            context.barrier()
            began = time.perf_counter()
            losses.append(loop.step(*data))
            context.barrier()
            if step >= WARMUP:
                seconds[name].append(time.perf_counter() - began)
        if abs(losses[0] - losses[1]) > 1e-3 * losses[0]:
            raise RuntimeError(f"{strategy}: step {step} has the losses {losses}")
    ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
    medians = {f"{name}_step_seconds": statistics.median(seconds[name]) for name in loops}
    return {
        "pairs": pairs,
        **medians,
        "step_time_ratio": statistics.median(ratios),
        "step_time_ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
    }


class OwnPages:
    """The peak of a process's memory while the context is open, in bytes above its entry.

    It is RssAnon plus this rank's part of RssShmem, which all ranks share.
    """

    def __enter__(self) -> OwnPages:
        self._before = self.peak_bytes = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.peak_bytes -= self._before

    def _sample(self) -> None:
        while not self._done.wait(0.005):
            self.peak_bytes = max(self.peak_bytes, self._now())

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        pages = {line.split()[0]: 1024 * int(line.split()[1]) for line in lines if "Rss" in line}
        return pages["RssAnon:"] + pages["RssShmem:"] // dist.get_world_size()


def measure_memory(context: RunContext, strategy: str, which: str) -> dict[str, Any]:
    """Return the peak of the process with one of the loops, of the rank that needs more."""
    with OwnPages() as pages:
        loop: Any = Ours(context, strategy) if which == "bigtrain" else LOOPS[strategy](make)
        for step in range(MEASURED_STEPS):
            loop.step(*batch(context.rank, step, strategy))
    peak = torch.tensor(pages.peak_bytes)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return {"peak_bytes": int(peak)}


def rank_main(strategy: str, measurement: str, pairs: int, output: Path) -> None:
    """Measure on one rank."""
    rank_info, axis = bigtrain.detect_rank_info(os.environ), ONE_BATCH.get(strategy)
    pp, tp = (2 if axis == name else 1 for name in ("mesh.pp", "mesh.tp"))
    with bigtrain.connect(rank_info, device="cpu", pp=pp, tp=tp) as context:
        torch.set_num_threads(1)
        if measurement == "speed":
            figures = measure_speed(context, strategy, pairs)
        elif measurement == "meter":
            figures = measure_meter(context, strategy, pairs)
        else:
            which = "plain" if measurement == "plain" else "bigtrain"
            figures = measure_memory(context, strategy, which)
        if context.is_main:
            output.write_text(json.dumps(figures))


def start(
    strategy: str, measurement: str, pairs: int, environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Start two ranks; return their figures.

    Args:
        strategy: the strategy of both loops.
        measurement: see `rank_main`.
        pairs: the pairs of steps.
        environ: variables that are added to the environment.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", __file__, "--rank", measurement]
        command += ["--strategies", strategy, "--pairs", str(pairs), "--output", str(output)]
        with (Path(folder) / "log").open("w+") as log:
            variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
            done = subprocess.run(command, env=variables, stdout=log, stderr=log)
            if done.returncode:
                log.seek(0)
                raise SystemExit(log.read()[-4000:])
        figures: dict[str, Any] = json.loads(output.read_text())
        return figures


def median_peaks(strategy: str, runs: int) -> dict[str, int]:
    """Return the median peak of the process in bytes: `plain`, `bigtrain` and `started`.

    Args:
        strategy: the strategy of both loops.
        runs: the runs of each; they alternate.
    """
    peaks: dict[str, list[int]] = {}
    for _ in range(runs):
        for name in ("plain", "bigtrain", "started"):
            environ = allocator_environ(os.environ) if name == "started" else {}
            found = start(strategy, name, 0, environ)["peak_bytes"]
            peaks.setdefault(name, []).append(found)
    return {name: round(statistics.median(found)) for name, found in peaks.items()}


def main() -> None:
    """Measure all strategies and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategies", default=",".join(LOOPS))
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--memory-runs", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.strategies, options.rank, options.pairs, options.output)
        return
    rows = []
    for strategy in options.strategies.split(","):
        speed = start(strategy, "speed", options.pairs)
        peaks = median_peaks(strategy, options.memory_runs)
        ratios = {name: peak / peaks["plain"] for name, peak in peaks.items() if name != "plain"}
        rows.append({"strategy": strategy, **speed, "peaks": peaks, "memory_ratios": ratios})
        print(
            f"{strategy:12} {speed['plain_step_seconds']:.2f} s by hand, time "
            f"{speed['step_time_ratio']:.3f} ({speed['step_time_ratio_quartiles'][0]:.3f} to "
            f"{speed['step_time_ratio_quartiles'][1]:.3f}), process "
            f"{ratios['bigtrain']:.3f} of {peaks['plain'] / 2**20:.0f} MiB, "
            f"{ratios['started']:.3f} as bigtrain's commands start it",
            flush=True,
        )
    meter = start("ddp", "meter", options.pairs)
    print(f"ddp after tracking two steps, beside one without: {meter['step_time_ratio']:.3f}")
    figures = {"model": MODEL, "rows_per_rank": ROWS, "memory_runs": options.memory_runs}
    figures |= {"rows": rows, "closed_meter": meter}
    keep(options.output, figures)


if __name__ == "__main__":
    main()
