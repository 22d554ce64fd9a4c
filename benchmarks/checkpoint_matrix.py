"""Continue the checkpoint of every strategy under every other one, on several numbers of ranks.

    python benchmarks/checkpoint_matrix.py [--output benchmarks/results/checkpoint_matrix.json]
    python benchmarks/checkpoint_matrix.py --from ddp,zero3 --to fsdp,1f1b --ranks 4,2

Under each strategy a small language model is trained on 4 ranks: three steps of AdamW, a
checkpoint, two more steps. Every other strategy then continues from that checkpoint, on 4, 2, 1 and
3 ranks, with the same two global batches. The losses of these steps are compared with those of the
uninterrupted run. For the same strategy on the same ranks, every byte of the final state is
compared, too.

Controls show that the comparison can see an error: a continuation with the optimizer's moments set
to zero, and one with the next global batch instead, must differ by far more than the tolerance.

The table has, for each continuing strategy and each number of ranks, the largest relative
difference over all checkpoints. `-`: the strategy does not run on so many ranks; the file has the
reason.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import forked
from harness import keep

from bigtrain.assembly.make_plan import make_plan
from bigtrain.checkpoint.manifest import Manifest
from bigtrain.engine.setup import open_setup
from bigtrain.job.load import job_from_keys
from bigtrain.ranks.context import RunContext

ONE = ("single", "single_offload_disk", "layer_split_devices")
REPLICAS = (
    *("ddp", "ddp_offload_disk", "zero1_torch", "fsdp", "fsdp_zero2", "hybrid"),
    *("zero1", "zero2", "zero3", "zero2_offload", "oss", "sharded_ddp", "fairscale_fsdp"),
)
PIPELINES = (
    *("layer_split", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"),
    "pipeline_deepspeed",
)
BOTH = ("1f1b_ddp", "1f1b_zero1", "1f1b_zero2", "1f1b_fsdp", "pipeline_deepspeed_zero1")
SLICES = ("tensor", "tensor_sequence")
SLICES_BESIDE = ("ddp+tensor", "fsdp+tensor_sequence", "zero1_torch+tensor", "1f1b+tensor")
STRATEGIES = (*ONE, *REPLICAS, *PIPELINES, *BOTH, *SLICES, *SLICES_BESIDE)
RANKS = (4, 2, 1, 3)
BEFORE, AFTER = 3, 2
"""Steps before the checkpoint, and after it."""
TOLERANCE = 2e-6
LIMIT_S = 3000.0
KEYS: dict[str, Any] = {
    "model.name": "gpt",
    "model.args": {"num_layers": 8, "width": 32, "num_heads": 2, "sequence_length": 16},
    "data.name": "synthetic",
    "data.args": {"kind": "language"},
    "optim.name": "adamw",
    "optim.lr": 1e-2,  # lost state shows in the next losses
    "optim.clip_norm": 1.0,
    "train.steps": 20,
    "train.global_batch_size": 12,
    "train.micro_batch_size": 1,
    "memory.predict": False,
    "memory.track_steps": 0,
}


def pp_of(strategy: str, ranks: int) -> int:
    """Return the number of ranks on the pp axis."""
    if strategy in PIPELINES:
        return ranks
    if strategy == "1f1b+tensor":
        return 2 if ranks == 4 else 1
    return (2 if ranks % 2 == 0 else ranks) if strategy in BOTH else 1


def tp_of(strategy: str, ranks: int) -> int:
    """Return the number of ranks on the tp axis."""
    if strategy in SLICES:
        return ranks
    return (2 if ranks % 2 == 0 else ranks) if strategy in SLICES_BESIDE else 1


def begin(context: RunContext, _: Any, strategy: str, folder: Path) -> list[float]:
    """Train, save, train on and save again; return the losses of the last steps."""
    job, parts = opened(context, strategy)
    losses = []
    with parts.engine(context) as engine:
        for batch in parts.training_steps(context, 0):
            result = engine.step(batch)
            if result.step > BEFORE:
                losses.append(result.loss)
            if result.step in (BEFORE, BEFORE + AFTER):
                engine.save(folder)
            if result.step == BEFORE + AFTER:
                break
    return losses


def go_on(
    context: RunContext, _: Any, strategy: str, sources: list[str], folder: Path
) -> dict[str, Any]:
    """Continue from each checkpoint; return the losses, or the refusal, by the checkpoint's name.

    Where it is the strategy's own on as many ranks, the state is saved beside it, to be compared.
    """
    losses_by_source: dict[str, Any] = {}
    for source in sources:
        job, parts = opened(context, strategy)
        losses = []
        with parts.engine(context) as engine:
            engine.load(folder / source / f"step-{BEFORE}")
            for batch in parts.training_steps(context, engine.samples_seen):
                result = engine.step(batch)
                losses.append(result.loss)
                if result.step == BEFORE + AFTER:
                    break
            if source == f"{strategy}.{context.world_size}":
                engine.save(folder / f"{source}.again")
        losses_by_source[source] = losses
    return losses_by_source


def go_wrong(context: RunContext, _: Any, folder: Path) -> dict[str, list[float]]:
    """Return the losses of wrong continuations under `single`, by the kind of error."""
    losses = {}
    for lost in ("nothing", "moments", "position"):
        _job, parts = opened(context, "single")
        with parts.engine(context) as engine:
            engine.load(folder / f"step-{BEFORE}")
            if lost == "moments":
                for state in engine.runner.optimizer.state.values():
                    for key in ("exp_avg", "exp_avg_sq"):
                        state[key].zero_()
            rows = KEYS["train.global_batch_size"] if lost == "position" else 0
            batches = iter(parts.training_steps(context, engine.samples_seen + rows))
            losses[lost] = [engine.step(next(batches)).loss for _ in range(AFTER)]
    return losses


def opened(context: RunContext, strategy: str) -> Any:
    """Return the job and the parts of its run."""
    keys = {**KEYS, "mesh.pp": context.pp_size}
    if strategy in (*SLICES, *SLICES_BESIDE):
        keys["mesh.tp"] = context.tp_size
    if strategy == "layer_split_devices":
        keys["strategy.cut.devices"] = 2
    job = job_from_keys(strategy, keys)
    return job, open_setup(job, make_plan(job, context.world_size, "cpu"))


def nothing(*_: Any) -> None:
    """Prepare nothing."""


def same_bytes(folder: Path, source: str) -> bool:
    """Whether the final state equals that of the uninterrupted run, byte for byte."""
    uninterrupted, again = (
        Manifest.open(folder / name / f"step-{BEFORE + AFTER}")
        for name in (source, f"{source}.again")
    )
    return all(
        uninterrupted.files[name] == again.files[name] for name in uninterrupted.tensor_files
    )


def ranks_of_source(strategy: str) -> int:
    """Return the number of ranks that save a strategy's checkpoint."""
    return 1 if strategy in ONE else max(RANKS)


def measure(sources: Iterable[str], targets: Iterable[str], ranks: Iterable[int]) -> dict[str, Any]:
    """Measure the matrix: the largest relative difference by target and ranks, then by source."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = {}
        for strategy in sources:
            count = ranks_of_source(strategy)
            args, pp = (strategy, folder / f"{strategy}.{count}"), pp_of(strategy, count)
            name, tp = f"{strategy}.{count}", tp_of(strategy, count)
            task = forked.Task(name, nothing, begin, args, count, pp, LIMIT_S, tp=tp)
            first[task.name] = task
        uninterrupted = {}
        for outcome in forked.run_all(first.values(), at_once=4):
            print("saved", outcome.name, outcome.refused or outcome.failed or "", flush=True)
            if outcome.values:
                uninterrupted[outcome.name] = outcome.values[0]
        checkpoint = (folder / next(iter(uninterrupted)),)
        wrong = forked.Task("control", nothing, go_wrong, checkpoint, 1, 1, LIMIT_S)
        control = controls(next(iter(forked.run_all([wrong], at_once=1))))
        print("lost state would show as", control, flush=True)
        tasks = [
            forked.Task(
                *(
                    f"{strategy}.{count}",
                    nothing,
                    go_on,
                    (strategy, list(uninterrupted), folder),
                    count,
                ),
                *(pp_of(strategy, count), LIMIT_S, strategy in REPLICAS, tp_of(strategy, count)),
            )
            for strategy in targets
            for count in ranks
            if count == 1 or strategy not in ONE
        ]
        cells = {}
        for outcome in forked.run_all(tasks, at_once=4):
            cell = cells[outcome.name] = compared(outcome, uninterrupted)
            if outcome.name in uninterrupted and "differences" in cell:
                cell["same_bytes"] = same_bytes(folder, outcome.name)
            print(outcome.name, said(cell), cell.get("same_bytes", ""), flush=True)
            shutil.rmtree(folder / f"{outcome.name}.again", ignore_errors=True)
    return {
        "steps": [BEFORE, AFTER],
        "sources": list(uninterrupted),
        "control": control,
        "cells": cells,
    }


def controls(outcome: forked.Outcome) -> dict[str, float]:
    """Return the largest relative difference of the losses of each wrong continuation."""
    if not outcome.values:
        raise RuntimeError(outcome.refused or outcome.failed)
    losses = outcome.values[0]
    return {lost: furthest(losses[lost], losses["nothing"]) for lost in ("moments", "position")}


def furthest(losses: list[float], wanted: list[float]) -> float:
    """Return the largest relative difference of two lists of losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))


def compared(outcome: forked.Outcome, uninterrupted: dict[str, list[float]]) -> dict[str, Any]:
    """Compare one target on one number of ranks with all sources."""
    if not outcome.values:
        return {"refused": outcome.refused} if outcome.refused else {"failed": outcome.failed}
    losses = outcome.values[0]
    return {
        "differences": {
            source: furthest(losses[source], uninterrupted[source]) for source in losses
        }
    }


def said(cell: dict[str, Any]) -> str:
    """Return the text of a cell of the table."""
    if "differences" in cell:
        return f"{max(cell['differences'].values()):.1e}"
    return "-" if "refused" in cell else f"FAILED {cell['failed']}"


def table(matrix: dict[str, Any]) -> list[str]:
    """Return the lines of the table, in Markdown."""
    ranks = sorted({int(name.rpartition(".")[2]) for name in matrix["cells"]}, reverse=True)
    lines = ["| continues under | " + " | ".join(f"{n} ranks" for n in ranks) + " | same bytes |"]
    lines.append("| --- |" + " --: |" * (len(ranks) + 1))
    for strategy in dict.fromkeys(name.rpartition(".")[0] for name in matrix["cells"]):
        cells = [matrix["cells"].get(f"{strategy}.{n}", {"refused": ""}) for n in ranks]
        same = next((c["same_bytes"] for c in cells if "same_bytes" in c), None)
        last = "-" if same is None else "yes" if same else "no"
        lines.append(f"| `{strategy}` | " + " | ".join([*map(said, cells), last]) + " |")
    return lines


def main() -> int:
    """Run the selected cells and print the table; return 1 if a cell failed or differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="sources", default=",".join(STRATEGIES))
    parser.add_argument("--to", dest="targets", default=",".join(STRATEGIES))
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    forked.load_everything()
    ranks = [int(n) for n in options.ranks.split(",")]
    matrix = measure(options.sources.split(","), options.targets.split(","), ranks)
    print("\n".join(table(matrix)))
    keep(options.output, matrix)
    cells = matrix["cells"].values()
    largest = [max(c["differences"].values()) for c in cells if "differences" in c]
    blind = [lost for lost, by in matrix["control"].items() if by < 100 * TOLERANCE]
    failed = sum("failed" in c for c in cells)
    above = sum(difference > TOLERANCE for difference in largest)
    differ = sum(c.get("same_bytes") is False for c in cells)
    print(
        json.dumps(
            {
                "cells": len(largest) * len(matrix["sources"]),
                "failed": failed,
                "above": above,
                "other_bytes": differ,
                "unseen": blind,
            }
        )
    )
    return 1 if failed or above or differ or blind else 0


if __name__ == "__main__":
    sys.exit(main())
