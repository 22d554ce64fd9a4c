"""Measure the memory of every kind of sharding for a 49-million-parameter GPT, against a floor.

    python benchmarks/zero_memory.py --output benchmarks/results/zero_memory.json
    python benchmarks/zero_memory.py --rows ddp,oss --ranks 2 --precisions fp32 --steps 5

Every row is a separate run of the `bigtrain` command on random tokens: micro-batches of 4
samples of 128 tokens, one to a step and rank, fused AdamW. The peaks are the highest of its
ranks, as memory.json has them: `peak` of all tensors, `process` of the process's resident memory
above what it was before the model was built. `step` is the median of the steps after the tracked
ones. A row that fails has the reason, and the others continue.

The floor is the accounting of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, section 3) plus
the activations. States, in bytes for each trained number, on N ranks:

    fp32            4 parameter + 4 gradient + 8 optimizer state
    bf16            2 parameter + 2 gradient + 12 optimizer state, the fp32 parameter included

of which N divides, by strategy,

    ddp             nothing
    stage 1         the optimizer state
    stage 2         the gradient and the optimizer state
    stage 3         everything; for `hybrid`, N is the ranks of one sharding group

Activations: the peak of (activations + temporary + the batch) over the forward and the
backward pass of one micro-batch in one process, as `make_profile` records them on fake tensors;
parameter gradients are not counted there, as they are states. In bf16 that process has bf16
parameters, so that no copies of them, as autocast makes, are counted as activations. The floor is
the sum of both: it assumes that all states are allocated at that moment, and nothing else ever: no
bucket, no gathered layer, no copy. A peak is below it if the gradients, which the backward pass
allocates, do not exist yet when the activations do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import run_command, surroundings

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.setup import open_setup
from bigtrain.job.load import load_job
from bigtrain.job.presets import preset_names
from bigtrain.prediction.profile_model import make_profile

STAGES = {
    **{"ddp": 0, "zero1_torch": 1, "fsdp_zero2": 2, "fsdp": 3, "hybrid": 3},
    **{"oss": 1, "sharded_ddp": 2, "zero1": 1, "zero2": 2, "zero3": 3},
}
"""The presets, in the order of the table, and what each divides."""
ONLY_ON = {"hybrid": 4}
"""Ranks without which a preset says nothing new."""
GROUP = {"hybrid": 2}
"""Ranks that share one set of states, where it is not all of them."""
NOTES = {
    "hybrid": "2 groups of 2 ranks",
    "oss": "whole parameters to ranks",
    "sharded_ddp": "whole parameters to ranks",
}
AUTOCAST = {"ddp", "oss", "sharded_ddp"}
"""Presets whose parameters are fp32 in bf16 runs, too, and converted at each use."""
MICRO = 4
TRACKED = 3
JOB = [
    # The loss with whole logits, as when the published figures were taken.
    "model.chunked_loss=false",
    *("model.name=gpt", "model.args.num_layers=6", "model.args.width=768"),
    *("model.args.num_heads=12", "model.args.vocab_size=8192", "model.args.sequence_length=128"),
    *("data.name=synthetic", "data.args.kind=language", "data.args.vocabulary=8192"),
    *("optim.name=adamw", "optim.implementation=fused", "optim.warmup_steps=0"),
    *(f"train.micro_batch_size={MICRO}", f"memory.track_steps={TRACKED}"),
]


@dataclass(frozen=True)
class Row:
    """One run."""

    preset: str
    ranks: int
    precision: str

    @property
    def name(self) -> str:
        """The name by which a row is selected and stored."""
        return f"{self.preset}-{self.precision}-{self.ranks}"

    def words(self) -> list[str]:
        """The keys of the job."""
        size = MICRO * self.ranks
        return [*JOB, f"train.global_batch_size={size}", f"train.precision={self.precision}"]

    @property
    def note(self) -> str:
        """A remark on the row."""
        notes = [NOTES[self.preset]] if self.preset in NOTES else []
        if self.precision == "bf16" and self.preset in AUTOCAST:
            notes.append("fp32 parameters, autocast")
        return "; ".join(notes)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Return the selected rows of existing presets, DDP first in each part of the table."""
    presets = set(preset_names("strategies"))
    chosen = options.rows.split(",") if options.rows else None
    for precision in options.precisions.split(","):
        for ranks in map(int, options.ranks.split(",")):
            for preset in STAGES:
                row = Row(preset, ranks, precision)
                wanted = chosen is None or preset in chosen or row.name in chosen
                if wanted and preset in presets and ONLY_ON.get(preset, ranks) == ranks:
                    yield row


def measure(row: Row, steps: int, limit_s: float) -> dict[str, Any]:
    """Run one row.

    Returns:
        Bytes and seconds; or only `note`, the reason why it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = ["train", "-n", str(row.ranks)]
        command += ["--strategy", row.preset, *row.words(), f"train.steps={steps}"]
        command += ["train.eval_every=0", f"log.dir={folder}", "log.name=run"]
        command += ["checkpoint.at_end=false"]
        failed = run_command(command, limit_s)
        if failed:
            return {"note": failed}
        run = Path(folder) / "run"
        memory = json.loads((run / "memory.json").read_text())
        lines = (run / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["step_seconds"] for line in lines[TRACKED:]]
    worst = max(memory["ranks"], key=lambda rank: rank["peak_bytes"])
    predicted = [rank["predicted_peak_bytes"] for rank in memory["ranks"]]
    process = [rank["process_peak_bytes"] for rank in memory["ranks"]]
    return {
        "peak_bytes": worst["peak_bytes"],
        "process_peak_bytes": max((p for p in process if p is not None), default=None),
        "predicted_peak_bytes": max((p for p in predicted if p is not None), default=None),
        "phase": worst["phase"],
        "breakdown": worst["breakdown"],
        "step_seconds": statistics.median(seconds) if seconds else None,
        "note": row.note,
    }


def activation_bytes(precision: str) -> tuple[int, int]:
    """Return the activation bytes of one micro-batch for the floor, and the trained elements."""
    # With bf16 parameters in bf16; a profile does not depend on the strategy otherwise.
    row = Row("zero1_torch", 2, precision)
    job = load_job("default", row.preset, row.words())
    plan = make_plan(job, row.ranks, "cpu")
    parts = open_setup(job, plan)
    profile = make_profile(parts.workload, parts.resolved)
    if profile.untraceable is not None:
        raise SystemExit(f"the model does not run on fake tensors: {profile.untraceable}")
    passed = profile.passes["first"].only(
        "forward", "backward", drop=("gradients", "optimizer", "buffers")
    )
    return passed.peak().bytes + profile.batch_bytes, profile.trained_elements


def state_bytes(row: Row, elements: int) -> int:
    """Return a rank's bytes of parameters, gradients and optimizer state, by the ZeRO paper."""
    parts = (4, 4, 8) if row.precision == "fp32" else (2, 2, 12)
    shared_from = 3 - STAGES[row.preset]  # stage 1 divides the last part, stage 3 all of them
    ranks = GROUP.get(row.preset, row.ranks)
    bytes_each = sum(part / (ranks if n >= shared_from else 1) for n, part in enumerate(parts))
    return round(bytes_each * elements)


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return the rows as a Markdown table, sizes in MiB."""
    heads = ["strategy", "precision", "ranks", "peak", "process", "predicted", "floor"]
    heads += ["peak/floor", "step", "note"]
    lines = ["| " + " | ".join(heads) + " |", "| --- | --- |" + " ---: |" * 7 + " --- |"]
    keys = ("peak_bytes", "process_peak_bytes", "predicted_peak_bytes", "floor_bytes")
    for row in rows.values():
        cells = [row["strategy"], row["precision"], str(row["ranks"])]
        cells += [f"{row[key] / 2**20:.0f}" if row.get(key) else "-" for key in keys]
        peak, seconds = row.get("peak_bytes"), row.get("step_seconds")
        cells.append(f"{peak / row['floor_bytes']:.2f}" if peak else "-")
        cells += [f"{seconds:.2f} s" if seconds else "-", row["note"]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", help="presets, or rows such as oss-bf16-2, separated by commas")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one row")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows_done: dict[str, dict[str, Any]] = {}
    floors: dict[str, tuple[int, int]] = {}
    for row in rows(options):
        if row.precision not in floors:
            floors[row.precision] = activation_bytes(row.precision)
        activations, elements = floors[row.precision]
        rows_done[row.name] = {
            **{"strategy": row.preset, "precision": row.precision, "ranks": row.ranks},
            "floor_bytes": state_bytes(row, elements) + activations,
            "floor_activation_bytes": activations,
            "parameters": elements,
            **measure(row, options.steps, options.limit),
        }
        print(row.name, rows_done[row.name], file=sys.stderr, flush=True)
        if options.output:  # after each row: a long benchmark may be stopped
            options.output.parent.mkdir(parents=True, exist_ok=True)
            result = {**surroundings(), "steps": options.steps, "rows": rows_done}
            options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows_done))


if __name__ == "__main__":
    main()
