"""Measure the cost of a checkpoint, compared with torch's DCP (`fsdp`) and DeepSpeed (`zero3`).

    python benchmarks/checkpoint_cost.py [--output benchmarks/results/checkpoint_cost.json]
    python benchmarks/checkpoint_cost.py --ranks 2 --strategies fsdp --width 256

A language model of 200 million parameters with AdamW's state (2.4 GB in fp32) is saved several
times, by each tool in turn in the same processes, and then resumed on another number of ranks.
The figures of a save: seconds until it is on the disk, seconds for which training waits, the growth
of a rank's resident memory, and bytes on the disk. bigtrain hashes everything that it writes and
reads; the other tools do not. DeepSpeed does not sync its files to the disk; the others do.
DeepSpeed's stage 3 is resumed on the same number of ranks, as it supports no other.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("LD_PRELOAD", "")  # glibc can return all free memory at once

import forked
import torch
import torch.distributed as dist
from harness import keep
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.engine import Engine
from bigtrain.engine.setup import open_setup
from bigtrain.job.load import job_from_keys
from bigtrain.memory.allocator import return_large_blocks
from bigtrain.memory.host_memory import proc_status_bytes
from bigtrain.ranks.context import RunContext

LIMIT_S = 1500.0
ROUNDS = 3


def opened(context: RunContext, strategy: str, width: int, *, asynchronous: bool) -> Any:
    """Prepare the model under a strategy; return the parts of the run."""
    keys: dict[str, Any] = {
        "model.name": "gpt",
        "model.args": {"num_layers": 13, "width": width, "num_heads": 8, "sequence_length": 32},
        "data.name": "text",
        "optim.name": "adamw",
        "train.steps": 4,
        "train.global_batch_size": context.world_size,
        "train.micro_batch_size": 1,
        "memory.predict": False,
        "memory.track_steps": 0,
        "checkpoint.asynchronous": asynchronous,
        "checkpoint.keep": 1,
    }
    job = job_from_keys(strategy, keys)
    return open_setup(job, make_plan(job, context.world_size, "cpu"))


class Meter:
    """Measures the seconds and the memory of a call that all ranks make."""

    def __init__(self, context: RunContext) -> None:
        self._context = context

    def __call__(
        self, begin: Callable[[], Any], end: Callable[[Any], Any] | None = None
    ) -> dict[str, float]:
        """Return the seconds of `begin`, those until `end` is done, and the growth of memory."""
        return_large_blocks(1 << 17)
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")
        base = proc_status_bytes("VmRSS") or 0
        began = time.perf_counter()
        value = begin()
        dist.barrier()
        blocked = time.perf_counter() - began
        if end is not None:
            end(value)
            dist.barrier()
        seconds = time.perf_counter() - began
        peak = (proc_status_bytes("VmHWM") or 0) - base
        grown = max(self._context.all_gather_numbers(peak))
        return {"seconds": seconds, "blocked_seconds": blocked, "peak_bytes": int(grown)}


def on_disk(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def save_all(
    context: RunContext, _: Any, strategy: str, width: int, folder: Path, rounds: int
) -> dict[str, Any]:
    """Save with each tool in turn; return the figures of each save."""
    parts, meter = opened(context, strategy, width, asynchronous=True), Meter(context)
    by_tool: dict[str, list[dict[str, float]]] = {}
    with parts.engine(context) as engine:
        batches = iter(parts.training_steps(context, 0))
        engine.step(next(batches))
        before_step = Meter(context)(lambda: engine.step(next(batches)))
        tools = ways_to_save(engine, strategy, folder)
        for number in range(rounds + 1):
            for name, (begin, end) in tools.items():
                tool_folder = folder / name.replace(" ", "-")
                if context.is_main:
                    shutil.rmtree(tool_folder, ignore_errors=True)
                dist.barrier()
                row = meter(begin, end)
                row["disk_bytes"] = on_disk(tool_folder)
                if number:  # the first save warms up
                    by_tool.setdefault(name, []).append(row)
    return {"step": before_step, "tools": by_tool}


def ways_to_save(
    engine: Engine, strategy: str, folder: Path
) -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any] | None]]:
    """Return, by tool, a function that starts a save and one that waits until it is on the disk."""

    def ours(*, asynchronous: bool) -> Callable[[], Any]:
        def save() -> Any:
            engine.saver._asynchronous = asynchronous
            name = "bigtrain-asynchronous" if asynchronous else "bigtrain"
            return engine.save(folder / name)

        return save

    def wait(_: Any) -> None:
        engine.saver.wait()

    tools: dict[str, Any] = {
        "bigtrain": (ours(asynchronous=False), None),
        "bigtrain asynchronous": (ours(asynchronous=True), wait),
    }
    if strategy == "fsdp":

        def states() -> dict[str, Any]:
            model, optimizer = get_state_dict(engine.model, engine.runner.optimizer)
            return {"model": model, "optimizer": optimizer}

        def at_once() -> Any:
            return dcp_save(states(), checkpoint_id=folder / "DCP")

        def in_background() -> Any:
            return dcp_async_save(states(), checkpoint_id=folder / "DCP-asynchronous")

        tools["DCP"] = (at_once, None)
        tools["DCP asynchronous"] = (in_background, lambda future: future.result())
    else:
        deepspeed_engine: Any = vars(engine.runner)["_engine"]
        tools["DeepSpeed"] = (
            lambda: deepspeed_engine.save_checkpoint(str(folder / "DeepSpeed")),
            None,
        )
    return tools


def load_all(
    context: RunContext, _: Any, strategy: str, width: int, folder: Path
) -> dict[str, Any]:
    """Resume from the checkpoint of each tool; return the figures."""
    parts, meter = opened(context, strategy, width, asynchronous=False), Meter(context)
    by_tool: dict[str, Any] = {}
    with parts.engine(context) as engine:
        engine.step(next(iter(parts.training_steps(context, 0))))
        source = next((folder / "bigtrain").glob("step-*"))
        by_tool["bigtrain"] = meter(lambda: engine.load(source))
        if strategy == "fsdp":

            def load() -> None:
                model, optimizer = get_state_dict(engine.model, engine.runner.optimizer)
                states: dict[str, Any] = {"model": model, "optimizer": optimizer}
                dcp_load(states, checkpoint_id=folder / "DCP")
                set_state_dict(
                    engine.model,
                    engine.runner.optimizer,
                    model_state_dict=states["model"],
                    optim_state_dict=states["optimizer"],
                )

            by_tool["DCP"] = meter(load)
        elif (folder / "DeepSpeed").exists():
            deepspeed_engine: Any = vars(engine.runner)["_engine"]

            def load_theirs() -> None:
                deepspeed_engine.load_checkpoint(str(folder / "DeepSpeed"))

            try:
                by_tool["DeepSpeed"] = meter(load_theirs)
            except Exception as error:  # noqa: BLE001 - what it says is the figure
                by_tool["DeepSpeed"] = {"refused": (str(error).splitlines() or [repr(error)])[0]}
    return by_tool


def nothing(*_: Any) -> None:
    """Prepare nothing."""


def run_on(call: Callable[..., Any], args: tuple[Any, ...], ranks: int) -> forked.Outcome:
    """Run a function on a number of ranks."""
    task = forked.Task(call.__name__, nothing, call, args, ranks, 1, LIMIT_S)
    return next(iter(forked.run_all([task], at_once=ranks)))


def median(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def main() -> int:
    """Measure, print the tables and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategies", default="fsdp,zero3")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--width", type=int, default=1152)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    forked.load_everything()
    rows: list[dict[str, Any]] = []
    failed = 0
    for strategy in options.strategies.split(","):
        for ranks in map(int, options.ranks.split(",")):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                args = (strategy, options.width, folder)
                more = (*args, options.rounds)
                task = forked.Task(
                    f"{strategy}.{ranks}", nothing, save_all, more, ranks, 1, LIMIT_S
                )
                saved = next(iter(forked.run_all([task], at_once=ranks)))
                others = [ranks] if strategy == "zero3" else []
                others.append(2 if ranks == 4 else 4)
                loads = {}
                for num_ranks in others:
                    task = forked.Task(
                        f"{strategy}.{num_ranks}", nothing, load_all, args, num_ranks, 1, LIMIT_S
                    )
                    loaded = next(iter(forked.run_all([task], at_once=num_ranks)))
                    loads[num_ranks] = (
                        loaded.values[0] if loaded.values else {"failed": loaded.failed}
                    )
            if not saved.values:
                failed += 1
                print(strategy, ranks, saved.refused or saved.failed)
                continue
            tools = {name: median(rounds) for name, rounds in saved.values[0]["tools"].items()}
            row = {"strategy": strategy, "ranks": ranks, "step": saved.values[0]["step"]}
            rows.append({**row, "saves": tools, "resumes": loads})
            show(rows[-1])
    keep(options.output, {"rows": rows, "rounds": options.rounds, "width": options.width})
    return 1 if failed else 0


def show(row: dict[str, Any]) -> None:
    """Print a row as lines of a table."""
    for name, figures in row["saves"].items():
        print(
            f"{row['strategy']} on {row['ranks']}: {name}: {figures['seconds']:.2f} s, waits "
            f"{figures['blocked_seconds']:.2f} s, +{figures['peak_bytes'] / 2**20:.0f} MiB, "
            f"{figures['disk_bytes'] / 2**20:.0f} MiB on disk",
            flush=True,
        )
    for ranks, resume_figures in row["resumes"].items():
        print(f"  resumed on {ranks}: {resume_figures}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
