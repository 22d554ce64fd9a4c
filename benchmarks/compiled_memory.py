"""Compare peaks of runs with compiled blocks: forecast, tracked, and counted by torch's profiler.

    python benchmarks/compiled_memory.py [--output benchmarks/results/compiled_memory.json]

Each case is trained in this process for a few steps. `forecast` is made before the first step,
`tracked` is the peak of two steps, and `allocator` is the highest sum of allocations and frees on
the host that torch.profiler saw in one more step, above the bytes before it; it includes the
workspaces of kernels. `as_written` has the same figures of the run without train.compile. All
figures are bytes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import keep
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bigtrain.data.loader import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.models import make_model
from bigtrain.models.gpt import GPT, GPTConfig
from bigtrain.ranks.context import RunContext

ROWS = 4
IMAGES = 16
CASES = [
    (model, strategy, precision)
    for model in ("gpt", "gpt, dropout", "resnet18")
    for strategy in ("single", "single_checkpointing")
    for precision in ("fp32", "bf16")
]
LAID = [("resnet18", "single", "fp32", "channels_last")]


def make(name: str) -> nn.Module:
    if name == "resnet18":
        return make_model("resnet18", {"num_classes": 10})
    dropout = 0.1 if "dropout" in name else 0.0
    return GPT(GPTConfig(width=64, num_layers=3, sequence_length=64, dropout=dropout))


def batch_for(name: str) -> tuple[Tensor, Tensor]:
    if name == "resnet18":
        return torch.randn(IMAGES, 3, 64, 64), torch.arange(IMAGES) % 10
    tokens = torch.randint(0, 256, (ROWS, 65))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def engine_for(case: tuple[str, ...], compile_what: str) -> Engine:
    name, strategy, precision, *laid = case
    keys = {"train.precision": precision, "train.compile": compile_what}
    if laid:
        keys["train.memory_format"] = laid[0]
    inputs, targets = batch_for(name)
    fixed = {"train.global_batch_size": len(inputs), "memory.track_steps": 2}
    job = job_from_keys(strategy, {**fixed, **keys})
    example = MicroBatch(inputs, targets, 0, len(inputs))
    context = RunContext.alone(torch.device("cpu"))
    return Engine(make(name), CrossEntropy(), adamw, job, context, example=example)


def highest_allocated(trace: profile) -> int:
    """Return the highest running sum of allocations and frees, from zero on."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
    moves = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
    now = highest = 0
    for _, nbytes in sorted(moves, key=lambda move: move[0]):
        now += nbytes
        highest = max(highest, now)
    return highest


def measure(case: tuple[str, ...], compile_what: str) -> dict[str, int | None]:
    torch.manual_seed(0)
    batch = batch_for(case[0])
    with engine_for(case, compile_what) as engine:
        forecast = engine.prediction.peak
        for _ in range(3):
            engine.step(batch)
        tracked = engine.meter.measured().peak
        module = engine.runner.module
        slots = engine.runner.optimizer.state.values()
        allocated = [*module.parameters(), *module.buffers(), *batch]
        allocated += [tensor for state in slots for tensor in state.values()]
        allocated += [p.grad for p in module.parameters() if p.grad is not None]
        nbytes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in allocated}
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            engine.step(batch)
    return {
        "forecast": forecast.bytes if forecast else None,
        "tracked": tracked.bytes if tracked else None,
        "allocator": sum(nbytes.values()) + highest_allocated(trace),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for case in [*CASES, *LAID]:
        compiled = measure(case, "blocks")
        as_written = measure(case, "none")
        rows.append({"case": ", ".join(case), **compiled, "as_written": as_written})
        print(rows[-1], flush=True)
    keep(options.output, {"rows": rows})


if __name__ == "__main__":
    main()
