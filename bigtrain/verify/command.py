"""`bigtrain verify`: each strategy against one process with the whole global batch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from bigtrain.compare.contenders import (
    ComparedStrategy,
    count_strategies,
    find_strategies,
    without_strategy,
)
from bigtrain.compare.subprocess_runs import RunOutcome, run_bigtrain
from bigtrain.core.strategy import Plan
from bigtrain.errors import BigtrainError, ConfigError
from bigtrain.job.arguments import ComparisonOptions, verify_arguments
from bigtrain.job.load import ONE_PROCESS
from bigtrain.job.schema import Precision
from bigtrain.report.folders import results_folder
from bigtrain.verify.differences import GROWTH, Differences, Tolerance, compare_recordings
from bigtrain.verify.localise import first_difference
from bigtrain.verify.reference import WITH_BF16_PARAMETERS, WITH_MOVED_WEIGHTS

_SGD = (
    *("optim.name=sgd", "optim.momentum=0.9", "optim.lr=0.01", "optim.warmup_steps=0"),
    *("optim.schedule=constant", "optim.implementation=auto", "optim.state=fp32"),
    *("optim.master_weights=true", "optim.stochastic_rounding=null"),
    *("optim.release_gradients=false", "optim.base_batch_size=null"),
)
_QUIET = (
    *("train.eval_every=0", "checkpoint.at_end=false", "checkpoint.every=0"),
    *("memory.track_steps=0", "memory.predict=false", "checkpoint.resume=null"),
    "memory.on_oom=stop",
)
Verdict = Literal["pass", "differs", "refused", "failed"]


@dataclass(frozen=True)
class VerifiedStrategy:
    """One strategy's row."""

    strategy: str
    num_ranks: int
    verdict: Verdict
    precision: Precision
    reason: str | None = None
    differences: Differences | None = None
    first_difference: str | None = None
    """Where it leaves one process, of a run that differs."""
    moved: Differences | None = None
    """How far one process is from itself with moved weights; where it was asked for."""

    def as_json(self) -> dict[str, Any]:
        """The row for a machine."""
        return asdict(self)


def main(arguments: list[str]) -> int:
    """Record the reference and every strategy, and compare; returns the exit status.

    0 where every strategy that can run passed, 1 where one differs or failed (or one that was
    named cannot run), 2 for the user's input, 130 after Ctrl-C.
    """
    options = verify_arguments(arguments)
    words = [*(_SGD if options.optimizer == "sgd" else ()), *_QUIET, f"train.steps={options.steps}"]
    contenders = find_strategies(options, words)
    if all(c.plan is None for c in contenders):
        first = contenders[0]
        raise ConfigError(f"none of these strategies can run. {first.label}: {first.refusal}")
    folder = results_folder(options.output, "verify")
    progress = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    progress.print(f"{count_strategies(len(contenders))}; results in {folder}")
    rows: list[VerifiedStrategy] = []
    stopped = False
    bench = _Bench(options, words, folder)
    try:
        for number, contender in enumerate(contenders, start=1):
            rows.append(bench.check(contender))
            progress.print(f"{number}/{len(contenders)} {_line(rows[-1])}")
    except KeyboardInterrupt:
        stopped = True
        progress.print(f"stopped: {len(rows)} of {len(contenders)} strategies are done")
    finally:
        bench.close()
    _show(options, rows, folder)
    return 130 if stopped else _status(options, rows)


class _Bench:
    """Runs and compares; keeps the references, of which one is made for each way to cut a batch.

    It is the whole global batch at once. Where what is computed depends on the micro-batch its
    micro-batches are those of the strategy: with BatchNorm what a sample gives, and in bf16 sums
    over rows inside of kernels. In bf16 its layers see what the strategy's see.
    """

    def __init__(self, options: ComparisonOptions, words: Sequence[str], folder: Path) -> None:
        self._options = options
        self._words = words
        self._folder = folder
        self._references: dict[tuple[str, ...], Path] = {}
        self._micro_sizes: dict[Path, int] = {}
        self._from_itself: dict[Path, Differences] = {}

    def check(self, contender: ComparedStrategy) -> VerifiedStrategy:
        """Run one strategy and hold it against the reference."""
        label, ranks = contender.label, contender.num_ranks
        if contender.plan is None:
            return VerifiedStrategy(label, ranks, "refused", "fp32", contender.refusal)
        precision = contender.plan.precision
        reference = self._reference(contender.plan)
        folder = self._folder / label
        words = [*self._options.overrides, *self._words]
        ended = self._record(folder, contender.strategy, ranks, words)
        if ended.reason is not None:
            verdict: Verdict = "refused" if ended.status == 2 else "failed"
            return VerifiedStrategy(label, ranks, verdict, precision, ended.reason)
        differences = compare_recordings(reference, folder)
        _forget(folder)
        row = VerifiedStrategy(label, ranks, "pass", precision, None, differences)
        tolerance, losses_only = Tolerance.of(precision), self._options.optimizer == "job"
        if differences.passed(tolerance, losses_only=losses_only):
            return row
        moved = self._moved(contender.plan, reference)
        row = replace(row, moved=moved)
        if moved is not None and differences.passed(tolerance, moved, losses_only=losses_only):
            return row
        found = self._localise(contender.plan, contender, row)
        return replace(row, verdict="differs", first_difference=found)

    def _moved(self, plan: Plan, reference: Path) -> Differences | None:
        """How far one process is from itself with moved weights; in bf16 that is no measure."""
        if plan.precision == "bf16":
            return None
        if reference not in self._from_itself:
            folder = self._made(plan, self._micro_sizes[reference], WITH_MOVED_WEIGHTS)
            self._from_itself[reference] = compare_recordings(reference, folder)
            _forget(folder)
        return self._from_itself[reference]

    def _localise(self, plan: Plan, contender: ComparedStrategy, row: VerifiedStrategy) -> str:
        """Run both again and note what they compute: one process has the same micro-batches."""
        try:
            reference = self._made(plan, plan.batch.micro_size, traced=True)
        except (BigtrainError, ConfigError) as error:
            return f"not found: {error}"
        folder = self._folder / f"{row.strategy}-traced"
        words = [*self._options.overrides, *self._words]
        ended = self._record(folder, contender.strategy, row.num_ranks, words, traced=True)
        if ended.reason is not None:
            return f"not found: {ended.reason}"
        if row.differences is None:
            raise ValueError(f"{row.strategy} was not compared")
        tolerance = Tolerance.of(row.precision)
        found = first_difference(reference, folder, row.differences, tolerance, row.moved)
        _forget(folder)
        return found

    def close(self) -> None:
        """Remove the tensors, which are as large as the model, for each step."""
        for folder in self._folder.iterdir():
            _forget(folder)

    def _reference(self, plan: Plan) -> Path:
        if plan.precision == "bf16":
            return self._made(plan, plan.batch.micro_size)
        reference = self._made(plan, plan.batch.global_size)
        if json.loads((reference / "record.json").read_text("utf-8"))["has_batchnorm"]:
            return self._made(plan, plan.batch.micro_size)
        return reference

    def _made(self, plan: Plan, micro: int, *changes: str, traced: bool = False) -> Path:
        clip = "null" if plan.clip_norm is None else repr(plan.clip_norm)
        of_plan: tuple[str, ...] = (
            f"train.global_batch_size={plan.batch.global_size}",
            f"train.micro_batch_size={micro}",
            f"train.precision={plan.precision}",
            f"optim.clip_norm={clip}",
        )
        if plan.bf16_parameters and plan.master_weights:
            of_plan += (WITH_BF16_PARAMETERS,)
        of_plan += changes
        made = (*of_plan, "traced") if traced else of_plan
        if made not in self._references:
            folder = self._folder / f"reference-{len(self._references) + 1}"
            words = [*without_strategy(self._options.overrides), *self._words]
            words += [*ONE_PROCESS, *of_plan]
            ended = self._record(folder, "single", 1, words, traced=traced)
            if ended.status == 2:
                raise ConfigError(str(ended.reason))
            if ended.reason is not None:
                raise BigtrainError(f"the reference, one process, failed: {ended.reason}")
            _refuse_chance(folder)
            self._references[made] = folder
            self._micro_sizes[folder] = micro
        return self._references[made]

    def _record(
        self, folder: Path, strategy: str, ranks: int, words: Sequence[str], *, traced: bool = False
    ) -> RunOutcome:
        folder.mkdir()
        line = ["record", "-n", str(ranks), "--record", str(folder), "--strategy", strategy]
        if traced:
            line.append("--trace")
        if self._options.job is not None:
            line += ["--config", self._options.job]
        return run_bigtrain([*line, *words], folder / "output.log", self._options.time_limit)


def _forget(folder: Path) -> None:
    """Gradients are as large as the model, for each step."""
    for pattern in ("*.safetensors", "trace-*.json"):
        for path in folder.glob(pattern):
            path.unlink()


def _refuse_chance(folder: Path) -> None:
    random_pair = json.loads((folder / "record.json").read_text("utf-8"))["chance"]
    if random_pair is not None:
        raise ConfigError(
            f"the model draws random numbers that verify cannot turn off: two passes over one "
            f"batch gave the losses {random_pair[0]:.6g} and {random_pair[1]:.6g}. Dropout of "
            "torch's modules "
            "is off already; set the model's own to 0 with model.args."
        )


def _status(options: ComparisonOptions, rows: Sequence[VerifiedStrategy]) -> int:
    named = options.strategies != "all"
    bad = ("differs", "failed", "refused") if named else ("differs", "failed")
    passed = any(row.verdict == "pass" for row in rows)
    return 1 if not passed or any(row.verdict in bad for row in rows) else 0


def _line(row: VerifiedStrategy) -> str:
    if row.differences is None:
        return f"{row.strategy}: {row.verdict}: {row.reason}"
    return f"{row.strategy}: {row.verdict}, loss {row.differences.loss:.1e}"


def _show(options: ComparisonOptions, rows: Sequence[VerifiedStrategy], folder: Path) -> None:
    document = {
        "optimizer": options.optimizer,
        "steps": options.steps,
        "tolerances": {row.precision: asdict(Tolerance.of(row.precision)) for row in rows},
        "rows": [row.as_json() for row in rows],
    }
    text = json.dumps(document, indent=1) + "\n"
    (folder / "verify.json").write_text(text, "utf-8")
    if options.as_json:
        sys.stdout.write(text)
        return
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(_table(rows))
    for line in [*_notes(options, rows), f"results: {folder / 'verify.json'}"]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _table(rows: Sequence[VerifiedStrategy]) -> Table:
    table = Table(title="Largest relative differences from one process", title_justify="left")
    table.add_column("strategy", no_wrap=True)
    for heading in ("ranks", "precision", "loss", "norm", "gradients", "updates"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        differences = row.differences
        cells = ["", "", "", ""]
        if differences is not None:
            gradient = "-" if differences.gradient is None else f"{differences.gradient:.1e}"
            cells = [
                f"{differences.loss:.1e}",
                f"{differences.norm:.1e}",
                gradient,
                f"{differences.update:.1e}",
            ]
        table.add_row(row.strategy, str(row.num_ranks), row.precision, *cells, row.verdict)
    return table


def _notes(options: ComparisonOptions, rows: Sequence[VerifiedStrategy]) -> Iterator[str]:
    for row in rows:
        if row.reason is not None:
            yield f"{row.strategy}: {row.verdict}: {row.reason}"
        if row.first_difference is not None:
            yield f"{row.strategy}: first difference: {row.first_difference}"
        if row.moved is not None:
            grown = ", ".join(f"{step.gradient or 0.0:.1e}" for step in row.moved.steps)
            yield (
                f"{row.strategy}: one process whose weights begin a unit in the last place away is "
                f"{grown} from itself in the gradients of its steps: each is held to {GROWTH} "
                "times that"
            )
        if row.verdict == "differs" and row.differences is not None:
            if row.differences.missing:
                yield f"{row.strategy}: only one has: {', '.join(row.differences.missing[:3])}"
            for what, worst in (
                ("gradients", row.differences.worst_gradients),
                ("updates", row.differences.worst_updates),
            ):
                named = ", ".join(f"{name} {far:.1e}" for name, far in worst)
                yield f"{row.strategy}: {what} that differ most: {named}"
    own = options.optimizer == "job"
    optimizer = "the job's optimizer" if own else "SGD and momentum (--optimizer job: the job's)"
    yield f"{options.steps} steps with {optimizer}; dropout is off"
    for precision in sorted({row.precision for row in rows if row.differences is not None}):
        tolerance = Tolerance.of(precision)
        loss = tolerance.loss * (10 if own else 1)
        held = "losses and norms" if own else "all"
        yield (
            f"in {precision} rounding explains {loss:.0e} of a loss, {tolerance.norm:.0e} of a "
            f"norm and {tolerance.tensors:.0e} of a tensor's largest value; {held} must be below "
            "that"
        )
