"""Compare predicted with tracked memory, on every rank of a few hundred configurations.

    python benchmarks/planner_accuracy.py --output benchmarks/results/planner_accuracy.json
    python benchmarks/planner_accuracy.py --rows 'gpt-fsdp*' --limit 5
    python benchmarks/planner_accuracy.py --output FILE --resume        # continues where it stopped
    python benchmarks/planner_accuracy.py --optimizers --output FILE
    /tmp/zoo/bin/python benchmarks/planner_accuracy.py --foreign --output FILE

A row is a model, a strategy, a recomputation policy, a precision and a micro-batch. Before anything
is built each rank predicts its peak from the job alone (`Engine.predicted`); then it trains a few
steps on random samples with every tensor tracked (`MemoryMeter.measured().peak`). The error is
predicted / tracked - 1, and that of a row is the error of the rank furthest from 0. (fairscale
distributes states unevenly, so its forecasts are those of the fullest rank.) `process` is the
process's resident memory above that before the model was built, and `process_base` that memory
before; their sum is the highest (VmHWM). The error of the process compares it with the base plus
the forecast.

Each strategy has a row with each model and each recomputation policy, in both precisions and both
sizes of micro-batch; their combinations rotate from row to row. A budget is half-way between the
predicted peaks of saving everything and of recomputing all blocks. If a strategy refuses a
configuration, the row has its message. `--foreign` instead has models drawn at random, each with
one of nine strategies in turn on two ranks (`foreign_models.py`). `--optimizers` has a small net
with each optimizer of torch, default, foreach and fused, on each engine
(`accuracy_optimizers.py`).

Ranks are forked from one process (`forked.py`), several rows at once. Memory does not depend on
other programs, with one exception: a thread of gloo releases the tensors of a collective only when
it gets the processor. Therefore a row with a rank that tracked more than the limit for torch is run
again alone, at most twice. `tracked_in_all` has the peaks of all runs; the lowest counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import accuracy_optimizers
import foreign_models
import forked
import torch
from accuracy_errors import AGAIN, again, is_late, summary, table
from harness import surroundings
from torch import Tensor, nn

from bigtrain.assembly.make_plan import make_plan
from bigtrain.cutting.layout import Layout
from bigtrain.data import MicroBatch
from bigtrain.engine.setup import RunSetup, open_setup
from bigtrain.job.load import load_job
from bigtrain.job.schema import Job
from bigtrain.losses.loss import Loss
from bigtrain.prediction.predict import predict
from bigtrain.ranks.context import RunContext

STEPS = 4
LIMIT_S = 1200.0
IMAGES = ["data.name=synthetic", "data.args.input_shape=[3,64,64]", "data.args.num_classes=10"]
MODELS: dict[str, list[str]] = {
    "gpt": [
        *("model.name=gpt", "model.args.num_layers=6", "model.args.width=256"),
        *("model.args.num_heads=4", "model.args.vocab_size=1024"),
        *("model.args.sequence_length=64", "data.name=synthetic"),
        *("data.args.kind=language", "data.args.vocabulary=1024"),
    ],
    "resnet50": ["model.name=resnet50", *IMAGES],
    "vit": ["model.name=planner_accuracy:vit", *IMAGES],
    "deeplabv3": ["model.name=deeplabv3_resnet50", *IMAGES, "data.args.kind=segmentation"],
    "blocks": accuracy_optimizers.MODEL,
    "residual_mlp": [
        *("model.name=planner_accuracy:ResidualMLP", "data.name=synthetic"),
        *("data.args.input_shape=[64,96]", "data.args.num_classes=10"),
    ],
}
SMALLEST = {"deeplabv3": 2}
"""BatchNorm on one pixel needs two samples: the micro-batch in place of 1."""
ONE = ("single",)
REPLICAS = (
    *("ddp", "zero1_torch", "fsdp_zero2", "fsdp", "zero1", "zero2", "zero3"),
    *("oss", "sharded_ddp"),
)
PIPELINES = (
    *("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev"),
    *("layer_split", "pipeline_deepspeed"),
)
DEVICES = ("layer_split_devices", "gpipe_fairscale")
BOTH = ("1f1b_ddp", "1f1b_zero1", "1f1b_zero2", "1f1b_fsdp")
ENGINES = {
    **dict.fromkeys(("zero1", "zero2", "zero3", "pipeline_deepspeed"), "deepspeed"),
    **dict.fromkeys(("oss", "sharded_ddp", "gpipe_fairscale"), "fairscale"),
}
"""All others are torch's."""
FOREIGN = (
    *("fsdp", "zero2", "ddp", "1f1b", "zero1_torch", "fsdp_zero2", "zero1", "zero3", "gpipe"),
)
"""Strategies that models drawn by a seed are run with."""
FOREIGN_STEPS = 3
KEEPS = ("all", "full", "every2", "budget")
WORDS = {
    "all": [],
    "full": ["strategy.recompute=full"],
    "every2": ["strategy.recompute.every=2"],
    "always": ["strategy.cut.checkpoint=always"],
    "except_last": ["strategy.cut.checkpoint=except_last"],
}
PRECISIONS = ("fp32", "bf16")
MICRO = (1, 4)


class ResidualMLP(nn.Module):
    """A user-defined model: residual blocks between two projections."""

    def __init__(self, num_classes: int = 10, width: int = 192, depth: int = 8) -> None:
        super().__init__()
        self.enter = nn.Linear(96, width)
        self.body = nn.ModuleList(_Residual(width) for _ in range(depth))
        self.leave = nn.Linear(width, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """(rows, places, 96) -> (rows, num_classes)."""
        x = self.enter(inputs)
        for block in self.body:
            x = block(x)
        classes: Tensor = self.leave(x.mean(dim=1))
        return classes


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + y


def vit(num_classes: int = 10) -> nn.Module:
    """Return torchvision's vision transformer, smaller than vit_b_16."""
    from torchvision.models import VisionTransformer

    model: nn.Module = VisionTransformer(
        image_size=64,
        patch_size=8,
        num_layers=6,
        num_heads=4,
        hidden_dim=192,
        mlp_dim=768,
        num_classes=num_classes,
    )
    return model


@dataclass(frozen=True)
class Row:
    """One configuration."""

    model: str
    strategy: str
    places: int
    """Ranks, or devices of one process."""
    keep: str
    precision: str
    micro: int
    accumulation: int
    steps: int = STEPS
    optimizer: str = ""
    """Of `accuracy_optimizers`; left out, the job's AdamW."""

    @property
    def name(self) -> str:
        """The name by which a row is selected and stored."""
        parts = (self.model, f"{self.strategy}.{self.places}", self.keep, self.precision)
        optimizer_words = [self.optimizer] if self.optimizer else []
        return "-".join((*parts, f"m{self.micro}x{self.accumulation}", *optimizer_words))

    @property
    def pp(self) -> int:
        """The number of ranks on the pp axis."""
        return 2 if self.strategy in BOTH else self.places if self.strategy in PIPELINES else 1

    @property
    def tp(self) -> int:
        """The number of ranks on the tp axis."""
        return self.places if self.strategy == "tensor" else 1

    @property
    def processes(self) -> int:
        """The number of ranks."""
        return 1 if self.strategy in DEVICES else self.places

    @property
    def engine(self) -> str:
        """The library that implements the strategy."""
        return ENGINES.get(self.strategy, "torch")

    def words(self) -> list[str]:
        """The keys of the job, without the recomputation policy."""
        size = self.micro * self.accumulation * self.processes // self.pp // self.tp
        model_words = MODELS.get(self.model) or foreign_models.words_of(
            foreign_models.chosen()[self.model]
        )
        words = [*model_words, f"train.global_batch_size={size}"]
        words += [f"train.micro_batch_size={self.micro}", f"train.precision={self.precision}"]
        words += [
            f"memory.track_steps={self.steps}",
            f"train.steps={self.steps}",
            "optim.name=adamw",
        ]
        if self.pp > 1:
            words.append(f"mesh.pp={self.pp}")
        if self.tp > 1:
            words.append(f"mesh.tp={self.tp}")
        if self.strategy in DEVICES:
            words.append(f"strategy.cut.devices={self.places}")
        return words


def rows() -> list[Row]:
    """Return the rows, the same each time."""
    places = [(s, 1) for s in ONE] + [(s, 2) for s in REPLICAS]
    places += [(s, p) for p in (2, 4) for s in (*PIPELINES, *DEVICES)] + [(s, 4) for s in BOTH]
    selection = []
    models = tuple(model for model in MODELS if model != "blocks")
    for number, (strategy, ranks) in enumerate(places):
        # The first five rows have a model each; the last two repeat two models with another
        # policy. Four stages have five rows only, as they use the same code as two.
        for offset in range(5 if _stages(strategy, ranks) == 4 else 7):
            model = models[(offset + (number if offset > 4 else 0)) % len(models)]
            keep = KEEPS[(offset + number) % len(KEEPS)]
            precision = PRECISIONS[(offset // 2 + number // 4) % 2]
            micro = MICRO[(offset + offset // 4 + number // 2) % 2]
            few = 1 + (offset + number) % 2
            accumulation = {1: few, 2: 4, 4: 8}[max(1, _stages(strategy, ranks))]
            micro = SMALLEST.get(model, micro) if micro == 1 else micro
            selection.append(Row(model, strategy, ranks, keep, precision, micro, accumulation))
        if ranks < 4:
            # One more row, of a model that no strategy refuses: blocks of the other models change
            # their inputs in place, so pipelines can recompute them only together.
            model = ("gpt", "residual_mlp", "vit")[number % 3]
            keep, precision = KEEPS[(number + 2) % len(KEEPS)], PRECISIONS[(number // 3) % 2]
            accumulation = {1: 2, 2: 4}[max(1, _stages(strategy, ranks))]
            micro = MICRO[(number // 2) % 2]
            selection.append(Row(model, strategy, ranks, keep, precision, micro, accumulation))
    for strategy in ("gpipe", "1f1b", "gpipe_fairscale"):
        for keep, model in (("always", "gpt"), ("except_last", "gpt"), ("except_last", "resnet50")):
            if (strategy, keep) != ("1f1b", "except_last") or model == "gpt":
                selection.append(Row(model, strategy, 2, keep, "fp32", 4, 4))
    return list({row.name: row for row in selection}.values())


def foreign_rows() -> list[Row]:
    """Return rows of all drawn models with the strategies in turn, and 1 or 2 micro-batches."""
    return [
        Row(
            model,
            strategy,
            2,
            "all",
            "fp32",
            2,
            2 if _stages(strategy, 2) == 2 else 1 + few,
            FOREIGN_STEPS,
        )
        for number, strategy in enumerate(FOREIGN)
        for few, model in (((number + at) % 2, m) for at, m in enumerate(foreign_models.chosen()))
    ]


def optimizer_rows() -> list[Row]:
    """Return rows of each optimizer with each engine, with one and several micro-batches."""
    rows_of_batch, steps = 4, accuracy_optimizers.STEPS
    return [
        Row("blocks", strategy, 2, "all", "fp32", rows_of_batch, micro_batches, steps, optimizer)
        for strategy, optimizer, micro_batches in accuracy_optimizers.combinations()
    ]


def _stages(strategy: str, ranks: int) -> int:
    if strategy in BOTH:
        return 2
    return ranks if strategy in (*PIPELINES, "gpipe_fairscale") else 1


class Unchecked(Layout):
    """A layout without the comparison with the whole model, which does not affect memory."""

    def check(self, model: nn.Module, micro_batch: MicroBatch, loss: Loss) -> str:  # noqa: ARG002
        return "cut: not compared with the whole model"


def unchecked(parts: RunSetup) -> RunSetup:
    """Return the parts of a run with a layout that is not compared."""
    layout = parts.resolved.layout and Unchecked(**vars(parts.resolved.layout))
    return replace(parts, resolved=replace(parts.resolved, layout=layout))


def prepare(row: Row) -> list[str]:
    """Return the words of the recomputation policy; a budget is computed once for all ranks."""
    if row.keep == "budget":
        return [f"strategy.recompute.budget={_budget(row)}"]
    return WORDS[row.keep]


def _opened(row: Row, words: Sequence[str]) -> tuple[Job, RunSetup]:
    job = load_job("default", row.strategy, [*row.words(), *words])
    setup = open_setup(job, make_plan(job, row.processes, "cpu"))
    if row.optimizer:
        make = accuracy_optimizers.OPTIMIZERS[row.optimizer]
        setup = replace(setup, workload=replace(setup.workload, make_optimizer=make))
    return job, setup


def _budget(row: Row) -> int:
    """Return bytes half-way between the peaks of saving everything and recomputing all blocks."""
    highest = []
    for words in ([], WORDS["full"]):
        _, parts = _opened(row, words)
        peaks = [predict(parts.resolved, parts.workload, rank).peak for rank in range(row.pp)]
        highest.append(max(peak.bytes if peak else 0 for peak in peaks))
    return sum(highest) // 2


def train(context: RunContext, words: Sequence[str], row: Row) -> dict[str, Any]:
    """Run one rank of a row: predict, train, and return the predicted and tracked peaks."""
    job, parts = _opened(row, words)
    with unchecked(parts).engine(context) as engine:
        for batch in parts.training_steps(context, 0):
            if engine.step(batch).step == row.steps:
                break
        measured, predicted = engine.meter.measured(), engine.prediction.peak
        note = engine.prediction.note
    tracked = measured.peak
    if predicted is None or tracked is None:
        raise RuntimeError(f"no prediction: {note}")
    return {
        "predicted_bytes": predicted.bytes,
        "tracked_bytes": tracked.bytes,
        "process_bytes": measured.process_peak_bytes,
        "process_base_bytes": measured.process_base_bytes,
        "predicted_phase": predicted.phase,
        "tracked_phase": tracked.phase,
        "error": round(predicted.bytes / tracked.bytes - 1, 5),
        "predicted_parts": vars(predicted.breakdown),
        "tracked_parts": vars(tracked.breakdown),
        "words": list(words),
    }


def _result(row: Row, outcome: forked.Outcome) -> dict[str, Any]:
    result = {**vars(row), "name": row.name, "engine": row.engine}
    if outcome.refused is not None:
        return {**result, "refused": outcome.refused}
    if outcome.failed is not None:
        return {**result, "failed": outcome.failed}
    ranks = list(outcome.values)
    error = max((rank["error"] for rank in ranks), key=abs)
    result["words"] = ranks[0]["words"]
    rank_figures = [{k: v for k, v in rank.items() if k != "words"} for rank in ranks]
    return {**result, "error": error, "ranks": rank_figures}


def _write(path: Path, results: dict[str, dict[str, Any]], order: Sequence[str]) -> None:
    ordered = {name: results[name] for name in order if name in results}
    document = {**surroundings(), "summary": summary(results), "rows": ordered}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(document, indent=1) + "\n")
    draft.replace(path)  # an interruption leaves the old file or the new one


def _run(chosen: Sequence[Row], ranks_at_once: int) -> Iterable[forked.Outcome]:
    tasks = [
        forked.Task(row.name, prepare, train, (row,), row.processes, row.pp, LIMIT_S, tp=row.tp)
        for row in chosen
    ]
    return forked.run_all(tasks, ranks_at_once)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", help="patterns of names, with commas: gpt-*,*-zbv.2-*")
    parser.add_argument("--limit", type=int, help="only the first N selected rows")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--resume", action="store_true", help="keep what the output has already")
    parser.add_argument("--foreign", action="store_true", help="models drawn by a seed")
    parser.add_argument("--optimizers", action="store_true", help="torch's, on each engine")
    parser.add_argument("--ranks-at-once", type=int, default=4)
    options = parser.parse_args()
    forked.load_everything()
    if options.foreign:
        foreign_models.load()
    patterns = options.rows.split(",") if options.rows else ["*"]
    rows_of_kind = (
        optimizer_rows if options.optimizers else foreign_rows if options.foreign else rows
    )
    every = {row.name: row for row in rows_of_kind()}
    chosen = [r for r in every.values() if any(fnmatchcase(r.name, p) for p in patterns)]
    results: dict[str, dict[str, Any]] = {}
    if options.resume and options.output and options.output.exists():
        before = json.loads(options.output.read_text())["rows"]
        results = {name: row for name, row in before.items() if "failed" not in row}
    chosen = chosen[: options.limit]
    for outcome in _run([row for row in chosen if row.name not in results], options.ranks_at_once):
        row = results[outcome.name] = _result(every[outcome.name], outcome)
        outcome_words = row.get("refused") or row.get("failed") or f"{100 * row['error']:+.2f} %"
        print(
            f"{len(results)}/{len(every)} {outcome.name}: {outcome_words}",
            file=sys.stderr,
            flush=True,
        )
        if options.output:
            _write(options.output, results, list(every))
    for _ in range(AGAIN):
        for outcome in _run([row for row in chosen if is_late(results[row.name])], 1):
            row = again(results[outcome.name], _result(every[outcome.name], outcome))
            results[outcome.name] = row
            outcome_words = f"again: {100 * row['error']:+.2f} %"
            print(f"{outcome.name} {outcome_words}", file=sys.stderr, flush=True)
            if options.output:
                _write(options.output, results, list(every))
    print(table(results))
    print(json.dumps(summary(results), indent=1))


if __name__ == "__main__":
    main()
