"""`bigtrain verify`: each strategy against one process with the whole global batch."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from bigtrain.arguments import SideOptions, verify_arguments
from bigtrain.config import Job
from bigtrain.contenders import Contender, find_contenders
from bigtrain.errors import BigtrainError, ConfigError
from bigtrain.processes import Ended, run_bigtrain
from bigtrain.strategy import Plan
from bigtrain.verify.differences import Differences, Tolerance, compare

_SGD = (
    *("optim.name=sgd", "optim.momentum=0.9", "optim.lr=0.01", "optim.warmup_steps=0"),
    *("optim.schedule=constant", "optim.implementation=auto", "optim.state=fp32"),
    *("optim.master_weights=true", "optim.stochastic_rounding=null"),
    *("optim.release_gradients=false", "optim.base_batch_size=null"),
)
_QUIET = (
    *("train.eval_every=0", "checkpoint.at_end=false", "checkpoint.every=0"),
    *("memory.track_steps=0", "memory.predict=false", "checkpoint.resume=null"),
)
Verdict = Literal["pass", "differs", "refused", "failed"]


@dataclass(frozen=True)
class Checked:
    """One strategy's row."""

    strategy: str
    num_ranks: int
    verdict: Verdict
    reason: str | None = None
    differences: Differences | None = None

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
    contenders = find_contenders(options, words)
    able = [c for c in contenders if c.plan is not None and c.job is not None]
    if not able:
        first = contenders[0]
        raise ConfigError(f"none of these strategies can run. {first.label}: {first.refusal}")
    speaks = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    rows: list[Checked] = []
    job = able[0].job
    if job is None:
        raise ValueError("a strategy that can run has a job")
    tolerance = Tolerance.of(job.train.precision)
    stopped = False
    with tempfile.TemporaryDirectory(prefix="bigtrain-verify-") as name:
        bench = _Bench(options, words, Path(name), tolerance)
        try:
            for number, contender in enumerate(contenders, start=1):
                rows.append(bench.check(contender))
                speaks.print(f"{number}/{len(contenders)} {_line(rows[-1])}")
        except KeyboardInterrupt:
            stopped = True
            speaks.print(f"stopped: {len(rows)} of {len(contenders)} strategies are done")
    _show(options, job, rows, tolerance)
    return 130 if stopped else _status(options, rows)


class _Bench:
    """Runs and compares; keeps the references, of which one is made for each way to cut a batch.

    Without BatchNorm there is one: the whole global batch at once. With it what a sample gives
    depends on its micro-batch, so the reference's are those of the strategy.
    """

    def __init__(
        self, options: SideOptions, words: Sequence[str], folder: Path, tolerance: Tolerance
    ) -> None:
        self._options = options
        self._words = words
        self._folder = folder
        self._tolerance = tolerance
        self._references: dict[tuple[int, int], Path] = {}

    def check(self, contender: Contender) -> Checked:
        """Run one strategy and hold it against the reference."""
        label, ranks = contender.label, contender.num_ranks
        if contender.plan is None:
            return Checked(label, ranks, "refused", contender.refusal)
        reference = self._reference(contender.plan)
        folder = self._folder / label
        ended = self._record(folder, contender.strategy, ranks, ())
        if ended.reason is not None:
            verdict: Verdict = "refused" if ended.status == 2 else "failed"
            return Checked(label, ranks, verdict, ended.reason)
        found = compare(reference, folder)
        losses_only = self._options.optimizer == "job"
        passed = found.passed(self._tolerance, losses_only=losses_only)
        _forget(folder)
        return Checked(label, ranks, "pass" if passed else "differs", None, found)

    def _reference(self, plan: Plan) -> Path:
        whole = plan.batch.global_size
        found = self._made(whole, whole)
        if json.loads((found / "record.json").read_text("utf-8"))["has_batchnorm"]:
            return self._made(whole, plan.batch.micro_size)
        return found

    def _made(self, whole: int, micro: int) -> Path:
        key = (whole, micro)
        if key not in self._references:
            folder = self._folder / f"reference-{whole}-{micro}"
            batch = (
                f"train.global_batch_size={whole}",
                f"train.micro_batch_size={micro}",
                "train.accumulation_steps=null",
            )
            ended = self._record(folder, "single", 1, (*batch, "mesh.pp=null", "mesh.dp=-1"))
            if ended.status == 2:
                raise ConfigError(str(ended.reason))
            if ended.reason is not None:
                raise BigtrainError(f"the reference, one process, failed: {ended.reason}")
            _refuse_chance(folder)
            self._references[key] = folder
        return self._references[key]

    def _record(self, folder: Path, strategy: str, ranks: int, more: Sequence[str]) -> Ended:
        folder.mkdir()
        line = ["record", "-n", str(ranks), "--record", str(folder), "--strategy", strategy]
        if self._options.job is not None:
            line += ["--config", self._options.job]
        line += [*self._options.overrides, *self._words, *more]
        return run_bigtrain(line, folder / "output.log", self._options.time_limit)


def _forget(folder: Path) -> None:
    """Gradients are as large as the model, for each step."""
    for path in folder.glob("*.safetensors"):
        path.unlink()


def _refuse_chance(folder: Path) -> None:
    drawn = json.loads((folder / "record.json").read_text("utf-8"))["chance"]
    if drawn is not None:
        raise ConfigError(
            f"the model draws random numbers that verify cannot turn off: two passes over one "
            f"batch gave the losses {drawn[0]:.6g} and {drawn[1]:.6g}. Dropout of torch's modules "
            "is off already; set the model's own to 0 with model.args."
        )


def _status(options: SideOptions, rows: Sequence[Checked]) -> int:
    named = options.strategies != "all"
    bad = ("differs", "failed", "refused") if named else ("differs", "failed")
    passed = any(row.verdict == "pass" for row in rows)
    return 1 if not passed or any(row.verdict in bad for row in rows) else 0


def _line(row: Checked) -> str:
    if row.differences is None:
        return f"{row.strategy}: {row.verdict}: {row.reason}"
    return f"{row.strategy}: {row.verdict}, loss {row.differences.loss:.1e}"


def _show(options: SideOptions, job: Job, rows: Sequence[Checked], tolerance: Tolerance) -> None:
    if options.as_json:
        document = {
            "model": job.model.name,
            "precision": job.train.precision,
            "optimizer": options.optimizer,
            "steps": options.steps,
            "tolerance": asdict(tolerance),
            "rows": [row.as_json() for row in rows],
        }
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
        return
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(_table(job, rows))
    for line in _notes(options, job, rows, tolerance):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _table(job: Job, rows: Sequence[Checked]) -> Table:
    table = Table(
        title=f"{job.model.name} in {job.train.precision}: largest relative differences from one "
        "process",
        title_justify="left",
    )
    table.add_column("strategy", no_wrap=True)
    for heading in ("ranks", "loss", "norm", "gradients", "weights"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        found = row.differences
        cells = ["", "", "", ""]
        if found is not None:
            gradient = "-" if found.gradient is None else f"{found.gradient:.1e}"
            cells = [f"{found.loss:.1e}", f"{found.norm:.1e}", gradient, f"{found.weight:.1e}"]
        table.add_row(row.strategy, str(row.num_ranks), *cells, row.verdict)
    return table


def _notes(
    options: SideOptions, job: Job, rows: Sequence[Checked], tolerance: Tolerance
) -> Iterator[str]:
    for row in rows:
        if row.reason is not None:
            yield f"{row.strategy}: {row.verdict}: {row.reason}"
        if row.verdict == "differs" and row.differences is not None:
            if row.differences.missing:
                yield f"{row.strategy}: only one has: {', '.join(row.differences.missing[:3])}"
            worst = ", ".join(f"{name} {far:.1e}" for name, far in row.differences.worst)
            yield f"{row.strategy}: gradients that differ most: {worst}"
    held = "losses and norms" if options.optimizer == "job" else "all"
    loss = tolerance.loss * (10 if options.optimizer == "job" else 1)
    yield (
        f"{options.steps} steps with {_optimizer(options, job)}; dropout is off. In "
        f"{job.train.precision} rounding explains {loss:.0e} of the loss and "
        f"{tolerance.tensors:.0e} of a tensor's largest value; {held} must be below that."
    )


def _optimizer(options: SideOptions, job: Job) -> str:
    if options.optimizer == "sgd":
        return "SGD and momentum (--optimizer job: the job's own)"
    return job.optim.name
