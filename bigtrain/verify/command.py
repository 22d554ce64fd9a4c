"""`bigtrain verify`: compare each strategy with one process that has the whole global batch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bigtrain.compare.contenders import ComparedStrategy, count_strategies, find_strategies
from bigtrain.compare.subprocess_runs import QUIET, UNTRACKED
from bigtrain.errors import ConfigError
from bigtrain.job.arguments import ComparisonOptions, verify_arguments
from bigtrain.report.folders import results_folder
from bigtrain.verify.bench import Bench, VerifiedStrategy
from bigtrain.verify.differences import GROWTH, Tolerance
from bigtrain.verify.fuzz import FuzzResult, fuzz
from bigtrain.verify.script import check_script

_SGD = (
    *("optim.name=sgd", "optim.momentum=0.9", "optim.lr=0.01", "optim.warmup_steps=0"),
    *("optim.schedule=constant", "optim.implementation=auto", "optim.state=fp32"),
    *("optim.master_weights=true", "optim.stochastic_rounding=null"),
    *("optim.release_gradients=false", "optim.base_batch_size=null", "optim.milestones=[]"),
    *("optim.warmup_factor=null", "optim.dampening=0", "optim.nesterov=false"),
)
_MEASURED = (*UNTRACKED, "train.check_first_steps=2")


def main(arguments: list[str]) -> int:
    """Run `bigtrain verify`: run the reference and every strategy, and compare them.

    Args:
        arguments: the command's arguments.

    Returns:
        The exit status: 0 if a strategy passed and none differed or failed, 130 after Ctrl-C,
        otherwise 1. A strategy that the user named and that cannot run counts as failed.

    Raises:
        ConfigError: the arguments or the job are wrong, or no strategy can run.
    """
    options = verify_arguments(arguments)
    if options.script is not None:
        return check_script(options)
    if options.fuzz:
        return _fuzz(options)
    words = [
        *(_SGD if options.optimizer == "sgd" else ()),
        *_MEASURED,
        f"train.steps={options.steps}",
    ]
    contenders = [_comparable(c) for c in find_strategies(options, [*words, *QUIET])]
    if all(c.plan is None for c in contenders):
        first = contenders[0]
        raise ConfigError(f"none of these strategies can run. {first.label}: {first.refusal}")
    folder = results_folder(options.output, "verify")
    progress = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    progress.print(f"{count_strategies(len(contenders))}; results in {folder}")
    rows: list[VerifiedStrategy] = []
    stopped = False
    bench = Bench(options, words, folder)
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


def _comparable(contender: ComparedStrategy) -> ComparedStrategy:
    """Return the strategy, marked as refused if its numbers differ from one process by design."""
    reason = contender.plan.replicate.inexact_reason if contender.plan is not None else None
    return contender if reason is None else replace(contender, plan=None, refusal=reason)


def _fuzz(options: ComparisonOptions) -> int:
    """Verify plans drawn at random; returns the exit status as `main` does."""
    words = [*(_SGD if options.optimizer == "sgd" else ()), *_MEASURED]
    folder = results_folder(options.output, "verify")
    progress = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    progress.print(f"{options.fuzz} plans drawn by seed {options.seed}; results in {folder}")
    results: list[FuzzResult] = []
    stopped = False
    try:
        for result in fuzz(options, words, folder):
            results.append(result)
            progress.print(f"{len(results)}/{options.fuzz} {_line(result.row)}")
            progress.print(f"    {result.plan.command(options)}")
    except KeyboardInterrupt:
        stopped = True
        progress.print(f"stopped: {len(results)} of {options.fuzz} plans are done")
    failures = [result for result in results if result.smallest is not None]
    document = {"seed": options.seed, "rows": [result.as_json(options) for result in results]}
    text = json.dumps(document, indent=1) + "\n"
    (folder / "verify.json").write_text(text, "utf-8")
    if options.as_json:
        sys.stdout.write(text)
    else:
        sys.stdout.write(f"{len(results) - len(failures)} of {len(results)} drawn plans pass\n")
        for result in failures:
            for line in _notes(options, [result.row]):
                sys.stdout.write(f"{line}\n")
            sys.stdout.write(f"the smallest plan that fails: {result.command(options)}\n")
    return 130 if stopped else int(bool(failures))


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
        if row.dropout_off is not None:
            yield (
                f"{row.strategy}: dropout is off, as its masks do not belong to samples: "
                f"{row.dropout_off}"
            )
        if row.first_difference is not None:
            yield f"{row.strategy}: first difference: {row.first_difference}"
        if row.moved is not None:
            grown = ", ".join(f"{step.gradient or 0.0:.1e}" for step in row.moved.steps)
            yield (
                f"{row.strategy}: a process whose initial weights differ by one unit in the last "
                f"place has gradients that differ by {grown} in these steps; the tolerance is "
                f"{GROWTH} times that"
            )
        if row.verdict == "differs" and row.differences is not None:
            if row.differences.missing:
                names = ", ".join(row.differences.missing[:3])
                yield f"{row.strategy}: in only one of the two runs: {names}"
            for kind, worst in (
                ("gradients", row.differences.worst_gradients),
                ("updates", row.differences.worst_updates),
            ):
                figures = ", ".join(f"{name} {difference:.1e}" for name, difference in worst)
                yield f"{row.strategy}: {kind} that differ most: {figures}"
    with_job = options.optimizer == "job"
    optimizer = "SGD and momentum (--optimizer job: the job's)"
    optimizer = "the job's optimizer" if with_job else optimizer
    yield f"{options.steps} steps with {optimizer}; dropout is the job's, with masks by sample"
    compared = [row for row in rows if row.differences is not None]
    if compared and all(row.plain_loop is None for row in compared):
        yield "the first 2 steps of each run were also compared with a plain torch loop"
    for reason in sorted({row.plain_loop for row in compared if row.plain_loop is not None}):
        yield f"not compared with a plain torch loop: {reason}"
    for precision in sorted({row.precision for row in rows if row.differences is not None}):
        tolerance = Tolerance.of(precision)
        loss = tolerance.loss * (10 if with_job else 1)
        checked = "losses and norms" if with_job else "all"
        yield (
            f"in {precision} rounding explains {loss:.0e} of a loss, {tolerance.norm:.0e} of a "
            f"norm and {tolerance.tensors:.0e} of a tensor's largest value; {checked} must be "
            "below that"
        )
