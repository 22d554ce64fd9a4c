"""Compare the bytes that each strategy sends in a step: counted, predicted, and by the textbook.

    python benchmarks/traffic.py --output benchmarks/results/traffic.json --picture docs/traffic.svg
    python benchmarks/traffic.py --strategies ring ddp --ranks 2 4      # a few seconds
    python benchmarks/traffic.py --from benchmarks/results/traffic.json --picture docs/traffic.svg

Real ranks train a small GPT for a few steps; the bytes are counted at the process groups, and the
median step counts. The ranks of a run differ: those of a ring by a few elements, servers from
workers, the ends of a pipeline from its middle. So `ranks` has each, `busiest` the one that sends
most, and `mean` is compared with the textbook's formula (P: bytes of the gradients, N ranks; a
parameter server has n workers and k servers). Bytes do not depend on other programs, so several
runs go at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
from harness import keep
from matplotlib.figure import Figure

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.setup import open_setup
from bigtrain.job.load import load_job
from bigtrain.ranks.context import RunContext
from bigtrain.report.plot_style import COLOURS, plot_style

GPT = {"num_layers": 16, "width": 64, "num_heads": 4, "vocab_size": 512, "sequence_length": 64}
STEPS, LIMIT_S = 8, 600.0
"""In the first ones DeepSpeed's stage 3 also compares the order of modules between the ranks."""
TIED_BYTES = GPT["vocab_size"] * GPT["width"] * 4
"""Of the embedding, which is the head's weight as well."""
RANKS = (2, 4, 8)
PIPELINES = {
    "gpipe": ("gpipe",),
    "1f1b": ("1f1b",),
    "interleaved 1f1b": ("interleaved_1f1b",),
}
REPLICAS = {
    "ring": ("ring",),
    "sync_sgd": ("sync_sgd",),
    "ddp": ("ddp",),
    "parameter server, 1": ("parameter_server",),
    "parameter server, 2": ("parameter_server", "strategy.replicate.servers=2"),
    "zero1 (DeepSpeed)": ("zero1",),
    "zero2 (DeepSpeed)": ("zero2",),
    "zero3 (DeepSpeed)": ("zero3",),
    "zero1_torch": ("zero1_torch",),
    "fsdp_zero2": ("fsdp_zero2",),
    "fsdp": ("fsdp",),
}
ROWS = 2
"""Of each replica, in one micro-batch; a pipeline has so many micro-batches of one row a rank."""


@dataclass(frozen=True)
class Case:
    """One strategy on so many ranks."""

    label: str
    ranks: int

    @property
    def name(self) -> str:
        """The name in the table."""
        return f"{self.label} on {self.ranks}"

    @property
    def servers(self) -> int:
        """The number of ranks that are servers."""
        return int(self.label[-1]) if self.label.startswith("parameter server") else 0

    @property
    def is_pipeline(self) -> bool:
        """Whether its ranks have stages of the model."""
        return self.label in PIPELINES

    def words(self) -> tuple[str, list[str]]:
        """The strategy's name, and the keys of the job."""
        name, *more = {**PIPELINES, **REPLICAS}[self.label]
        words = ["model.name=gpt", f"model.args={json.dumps(GPT)}", "data.name=synthetic"]
        words += ["data.args={kind: language, vocabulary: 512}", "memory.track_steps=0"]
        replicas = max(1, self.ranks - self.servers)
        rows = 1 if self.is_pipeline else ROWS
        words += [f"train.micro_batch_size={rows}", f"train.global_batch_size={ROWS * replicas}"]
        if self.is_pipeline:
            words.append(f"mesh.pp={self.ranks}")
        return name, [*words, *more]

    @property
    def is_possible(self) -> bool:
        """Whether servers leave a worker."""
        return self.servers < self.ranks

    def textbook(self, gradients: int) -> float:
        """Return the bytes that the average rank sends, by the formula.

        All-reduce: 2 (N-1)/N P (Patarasu and Yuan 2009). ZeRO: stages 1 and 2 as much, stage 3
        half as much again (Rajbhandari et al. 2020, section 7). A parameter server: P from each
        of n workers, and P to each from the servers together (Li et al. 2014). A pipeline of S
        stages: over each of S-1 boundaries the activations of the batch, and as many bytes of
        their gradients (Huang et al. 2019); the two stages with the tied embedding send each
        other its gradient.
        """
        n = self.ranks
        if self.is_pipeline:
            boundary = ROWS * n * GPT["sequence_length"] * GPT["width"] * 4
            stages = 2 * n if self.label.startswith("interleaved") else n
            return (2 * (stages - 1) * boundary + 2 * TIED_BYTES) / n
        if self.servers:
            return 2 * (n - self.servers) * gradients / n
        third = self.label in ("zero3 (DeepSpeed)", "fsdp")
        return (3 if third else 2) * (n - 1) / n * gradients

    @property
    def unforeseen(self) -> int:
        """Return the bytes that a strategy cannot predict, as a profile does not contain them.

        DeepSpeed's stage 3 gathers a tied parameter for each of its uses, in both passes.
        """
        n = self.ranks
        return 2 * TIED_BYTES * (n - 1) // n if self.label == "zero3 (DeepSpeed)" else 0


def prepare(case: Case) -> int:
    """Return the bytes of the gradients of the whole model."""
    job, words = case.words()
    parts = open_setup(*_planned(job, words, case.ranks))
    return sum(p.numel() * 4 for p in parts.workload.model.parameters() if p.requires_grad)


def _planned(strategy: str, words: Sequence[str], ranks: int) -> tuple[Any, Any]:
    job = load_job(None, strategy, words)
    return job, make_plan(job, ranks, "cpu")


def train(context: RunContext, gradients: int, case: Case) -> dict[str, Any]:
    """Run one rank for a few steps; return the bytes of all ranks, and those predicted."""
    strategy, words = case.words()
    parts = open_setup(*_planned(strategy, words, case.ranks))
    with parts.engine(context) as engine:
        for batch in parts.training_steps(context, 0):
            if engine.step(batch).step == STEPS:
                break
        report = engine.memory()
    if report is None:  # rank 0 has the bytes of all ranks
        return {}
    ranks = [
        {
            "rank": rank.rank,
            "sent": rank.volume and dict(rank.volume.sent),
            "predicted_sent": rank.predicted_volume and dict(rank.predicted_volume.sent),
            "sent_bytes": rank.volume and rank.volume.sent_bytes,
            "predicted_sent_bytes": rank.predicted_volume and rank.predicted_volume.sent_bytes,
            "received_bytes": rank.volume and rank.volume.received_bytes,
            "predicted_received_bytes": (
                rank.predicted_volume and rank.predicted_volume.received_bytes
            ),
        }
        for rank in report.ranks
    ]
    return {"gradient_bytes": gradients, "ranks": ranks}


def row_of(case: Case, outcome: forked.Outcome) -> dict[str, Any]:
    """Return the row of a case."""
    row: dict[str, Any] = {"strategy": case.label, "world_size": case.ranks}
    if outcome.refused is not None or outcome.failed is not None:
        return {**row, "refused": outcome.refused, "failed": outcome.failed}
    figures = outcome.values[0]
    sent = [rank["sent_bytes"] for rank in figures["ranks"]]
    told = [rank["predicted_sent_bytes"] for rank in figures["ranks"]]
    return {
        **row,
        **figures,
        "busiest": {"counted": max(sent), "predicted": max(told)},
        "mean": sum(sent) / len(sent),
        "textbook_mean": case.textbook(figures["gradient_bytes"]),
        "unforeseen": case.unforeseen,
        "equal": all(
            rank[way] == rank[f"predicted_{way}"] + case.unforeseen
            for rank in figures["ranks"]
            for way in ("sent_bytes", "received_bytes")
        ),
    }


def run_all(labels: Sequence[str], world_sizes: Sequence[int], at_once: int) -> Iterator[Any]:
    """Yield a row for each strategy and number of ranks, as they end."""
    every = (Case(label, n) for label in labels for n in world_sizes)
    cases = {case.name: case for case in every if case.is_possible}
    tasks = [
        forked.Task(
            name,
            prepare,
            train,
            (case,),
            case.ranks,
            case.ranks if case.is_pipeline else 1,
            LIMIT_S,
        )
        for name, case in cases.items()
    ]
    for outcome in forked.run_all(tasks, at_once):
        row = row_of(cases[outcome.name], outcome)
        print(line(row), flush=True)
        yield row


def line(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    name = f"{row['strategy']} on {row['world_size']}: "
    if "busiest" not in row:
        return name + (row["refused"] or f"failed: {row['failed']}")
    counted, told = row["busiest"]["counted"], row["busiest"]["predicted"]
    share, formula = (row[key] / row["gradient_bytes"] for key in ("mean", "textbook_mean"))
    text = f"{counted} bytes sent by the busiest rank, predicted {told}"
    text += f" and {row['unforeseen']} known to be missing" if row["unforeseen"] else ""
    text += f"; mean {share:.4f} P, textbook {formula:.4f} P"
    return name + text + (", equal on all ranks" if row["equal"] else ", NOT EQUAL")


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draw a bar for each run, the bytes of the busiest rank, with a mark for the prediction."""
    shown = [row for row in rows if "busiest" in row]
    labels = list(dict.fromkeys(row["strategy"] for row in shown))
    sizes = sorted({row["world_size"] for row in shown})
    height = 0.8 / len(sizes)
    with plot_style():
        figure = Figure(figsize=(7.4, 0.42 * len(labels) + 1.2), layout="constrained")
        axes = figure.add_subplot()
        for index, size in enumerate(sizes):
            rows_of_size = [row for row in shown if row["world_size"] == size]
            places = [labels.index(row["strategy"]) + (index - 1) * height for row in rows_of_size]
            counted = [row["busiest"]["counted"] / row["gradient_bytes"] for row in rows_of_size]
            told = [row["busiest"]["predicted"] / row["gradient_bytes"] for row in rows_of_size]
            colour = list(COLOURS.values())[index]
            axes.barh(places, counted, height, color=colour, label=f"{size} ranks, counted")
            axes.plot(told, places, "|", color="black", markersize=7, markeredgewidth=1.4)
        axes.plot([], [], "|", color="black", label="predicted")
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        axes.set_xlabel("bytes that the busiest rank sends in a step, over those of the gradients")
        axes.legend(frameon=False, fontsize=8, loc="lower right")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> int:
    """Count, print, write and draw; return 1 if a run failed or a prediction is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    known = [*REPLICAS, *PIPELINES]
    parser.add_argument("--strategies", nargs="+", choices=known, default=known)
    parser.add_argument("--ranks", nargs="+", type=int, choices=RANKS, default=list(RANKS))
    parser.add_argument("--at-once", type=int, default=8, help="ranks at a time")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--from", dest="kept", type=Path, help="draw an output again, run nothing")
    options = parser.parse_args()
    if options.kept is not None:
        rows = json.loads(options.kept.read_text("utf-8"))["rows"]
    else:
        forked.load_everything()
        rows = list(run_all(options.strategies, options.ranks, options.at_once))
        rows.sort(key=lambda row: (known.index(row["strategy"]), row["world_size"]))
        keep(options.output, {"model": GPT, "rows": rows})
    if options.picture is not None:
        draw(options.picture, rows)
    return 0 if all(row.get("equal", not row.get("failed")) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
