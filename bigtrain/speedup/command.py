"""`bigtrain speedup`: find out whether more ranks are faster, and from which batch or bandwidth."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bigtrain.assembly.make_plan import device_type_of, make_plan
from bigtrain.compare.contenders import named_strategies
from bigtrain.compare.subprocess_runs import QUIET, UNTRACKED, QuietRun
from bigtrain.devices import device_count
from bigtrain.engine.setup import check_job
from bigtrain.errors import BigtrainError, ConfigError
from bigtrain.job.arguments import SpeedupOptions, speedup_arguments
from bigtrain.job.load import load_job
from bigtrain.job.strategy_words import read_strategy, strategy_label
from bigtrain.machine.busy import BUSY_SHARE
from bigtrain.machine.cluster import Cluster, load_cluster
from bigtrain.machine.rates import usable_cores
from bigtrain.machine.versions import hardware_and_versions
from bigtrain.report.folders import results_folder
from bigtrain.speedup.forecast import FORECAST_RANKS, StepForecaster, candidates, counts
from bigtrain.speedup.inequality import (
    ComputeCost,
    SyncStep,
    Threshold,
    bandwidth_that_pays,
    batch_that_pays,
    ranks_that_pay,
)
from bigtrain.speedup.measure import StepTiming, TimingRequest
from bigtrain.speedup.show import SpeedupRow, speedup_table, threshold_lines


def main(arguments: list[str]) -> int:
    """Run `bigtrain speedup` and return the exit status.

    The status is 0 if at least one strategy ran on several ranks, 1 if none did, and 130 after
    Ctrl-C.

    Raises:
        ConfigError: an option is wrong, or see `Trial`.
    """
    options = speedup_arguments(arguments)
    if options.picture is not None and Path(options.picture).suffix not in (".svg", ".png"):
        raise ConfigError(f"--picture {options.picture}: name a file that ends in .svg or .png.")
    cluster = load_cluster(options.cluster) if options.cluster is not None else None
    trial = Trial(options, cluster)
    folder = results_folder(options.output, "speedup")
    trial.progress.print(f"up to {trial.most} ranks; results in {folder}")
    stopped = False
    try:
        trial.run(folder)
    except KeyboardInterrupt:
        stopped = True
        trial.progress.print("stopped: the figures so far are shown")
    document = trial.document(stopped=stopped)
    (folder / "speedup.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    if options.picture is not None:
        from bigtrain.speedup.picture import write_speedup

        write_speedup(Path(options.picture), document["title"], trial.rows)
    if options.as_json:
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    else:
        trial.show(document["title"], folder)
    if stopped:
        return 130
    return 0 if any(row.measured is not None and row.ranks > 1 for row in trial.rows) else 1


class Trial:
    """Measures and predicts all strategies on all numbers of ranks.

    Args:
        options: the options of the command line.
        cluster: the cluster for which steps are predicted; None for this machine.

    Raises:
        ConfigError: a strategy is unknown or cuts the model, or there are fewer than two ranks.
    """

    def __init__(self, options: SpeedupOptions, cluster: Cluster | None) -> None:
        self._options, self._cluster = options, cluster
        self.progress = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
        self.rows: list[SpeedupRow] = []
        self.solved: dict[str, dict[str, Threshold]] = {}
        self._cost: ComputeCost | None = None
        self._alone: float | None = None
        self._others = 0.0
        job = load_job(options.job, None, options.overrides)
        check_job(job)
        self.most = _most_ranks(options.num_ranks, device_type_of(job))
        self._threads = max(1, usable_cores() // self.most)
        names = named_strategies(options.strategies)
        self._names = {strategy_label(name): name for name in names}
        self._batch = _batch_words(options, names, self.most)
        self._words = [*options.overrides, *self._batch, *UNTRACKED]
        self._forecasters = {
            label: StepForecaster(
                load_job(options.job, name, [*self._words, *QUIET]), cluster, self.most
            )
            for label, name in self._names.items()
        }
        self._first = next(iter(self._forecasters.values()))
        self._model = job.model.name
        self.samples = len(self._first.setup.data.train)

    def run(self, folder: Path) -> None:
        """Measure one process, then every strategy, and solve the inequality for each strategy.

        Args:
            folder: an existing folder for the files of the runs.

        Raises:
            BigtrainError: the run of one process failed. If a run of a strategy fails, its row has
                the reason.
        """
        batch = self._first.setup.plan.batch
        other_rows = batch.micro_size // 2 or 2
        times = batch.accumulation_steps
        request = TimingRequest(steps=self._options.steps, other_rows=other_rows, messages=[])
        timing = self._measure(folder / "one", "single", 1, request)
        self._alone = timing.compute
        if timing.other_compute is not None:
            self._cost = ComputeCost.through(
                (batch.micro_size * times, timing.compute),
                (other_rows * times, timing.other_compute),
            )
        for label, name in self._names.items():
            for ranks in counts(self.most):
                row = self._row(folder, label, name, ranks)
                self.rows.append(row)
                self.progress.print(row.progress_line)
            if self._cluster is not None:
                self._predict(label)
            self._solve(label)

    def _row(self, folder: Path, label: str, name: str, ranks: int) -> SpeedupRow:
        forecaster = self._forecasters[label]
        try:
            predicted = forecaster.step(ranks)
            request = TimingRequest(
                steps=self._options.steps, other_rows=None, messages=forecaster.messages(ranks)
            )
            timing = self._measure(folder / f"{label}-{ranks}", name, ranks, request)
        except BigtrainError as error:
            return SpeedupRow(label, ranks, reason=str(error))
        measured = SyncStep(
            ranks=ranks,
            workers=predicted.workers,
            batch=predicted.batch,
            alone=self._alone or timing.compute,
            compute=timing.compute,
            exposed=timing.step - timing.compute,
            whole=timing.whole,
            latency=min(timing.latency or 0.0, timing.whole or 0.0),
        )
        return SpeedupRow(label, ranks, measured, predicted)

    def _predict(self, label: str) -> None:
        """Add rows for the numbers of ranks that are predicted and were not measured."""
        run = {row.ranks for row in self.rows if row.strategy == label}
        for ranks in FORECAST_RANKS:
            if ranks in run:
                continue
            try:
                row = SpeedupRow(label, ranks, None, self._forecasters[label].step(ranks))
            except ConfigError as error:
                self.rows.append(SpeedupRow(label, ranks, reason=str(error)))
                return
            self.rows.append(row)

    def _solve(self, label: str) -> None:
        """Solve a strategy's inequality for the most ranks measured and for the most predicted."""
        rows = [row for row in self.rows if row.strategy == label]
        forecaster = self._forecasters[label]
        measured = [row.measured for row in rows if row.measured is not None]
        if measured:
            last = measured[-1]
            self.solved[f"{label} here"] = {
                "batch": batch_that_pays(last, self._cost),
                "bandwidth": bandwidth_that_pays(last, 1.0),
            }
            if forecaster.is_local:
                step_of = _as_measured(forecaster, last)
                self.solved[f"{label} here"]["ranks"] = ranks_that_pay(
                    step_of, _rank_counts(last, self._cluster)
                )
        predicted = [row.predicted for row in rows if row.predicted and row.measured is None]
        if predicted:
            last = predicted[-1]
            self.solved[f"{label} on {last.ranks}"] = {
                "batch": batch_that_pays(last, ComputeCost(0.0, last.alone / last.batch)),
                "bandwidth": bandwidth_that_pays(last, 1.0),
                "ranks": ranks_that_pay(forecaster.step, _rank_counts(last, self._cluster)),
            }

    def _measure(self, folder: Path, name: str, ranks: int, request: TimingRequest) -> StepTiming:
        """Run `bigtrain/speedup/measure.py`, and return its figures.

        Raises:
            BigtrainError: the run failed. It is a `ConfigError` if the run was refused.
        """
        folder.mkdir()
        (folder / "request.json").write_text(json.dumps(asdict(request)) + "\n", "utf-8")
        run = QuietRun(
            command="pace",
            strategy=name,
            num_ranks=ranks,
            folder=folder,
            words=self._words,
            job=self._options.job,
        )
        environ = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(self._threads))}
        ended = run.run(self._options.time_limit, environ)
        if ended.reason is not None:
            kind = ConfigError if ended.status == 2 else BigtrainError
            raise kind(ended.reason)
        timing = StepTiming(**run.json("timing.json"))
        self._others = max(self._others, timing.others_cores or 0.0)
        return timing

    def document(self, *, stopped: bool) -> dict[str, Any]:
        """Return the content of speedup.json, as JSON values.

        Args:
            stopped: whether the user ended the measurement early.
        """
        batch = self._first.setup.plan.batch
        per_worker = batch.micro_size * batch.accumulation_steps
        alone = self._alone
        return {
            "title": f"{self._model}, {per_worker} samples a worker and step",
            "batch": per_worker,
            "samples": self.samples,
            "steps": self._options.steps,
            "cluster": "here" if self._cluster is None else self._cluster.name,
            "stopped": stopped,
            "surroundings": hardware_and_versions(),
            "others_cores": self._others,
            "alone_seconds": alone,
            "alone_epoch_seconds": None if alone is None else self.samples / per_worker * alone,
            "rows": [row.as_json(self.samples) for row in self.rows],
            "pays_from": {
                name: {key: asdict(threshold) for key, threshold in thresholds.items()}
                for name, thresholds in self.solved.items()
            },
        }

    def show(self, title: str, folder: Path) -> None:
        """Print the table of all rows, and for each strategy the values from which more ranks pay.

        For these values see `threshold_lines`. Reasons for missing figures, a warning if other
        programs used the cores, and the path of speedup.json are printed, too.

        Args:
            title: the title of the table.
            folder: the folder of speedup.json.
        """
        console = Console() if sys.stdout.isatty() else Console(width=150)
        console.print(speedup_table(self.rows, title, self.samples))
        named = "this machine" if self._cluster is None else self._cluster.name
        lines = [f"in brackets: predicted, by the figures of {named}"]
        if self._others > BUSY_SHARE * usable_cores():
            lines.append(
                f"other programs used up to {self._others:.1f} cores during the measurement: "
                "measure again when they have ended"
            )
        if self._alone is not None:
            batch = self._first.setup.plan.batch
            epoch = self.samples / (batch.micro_size * batch.accumulation_steps) * self._alone
            lines.append(f"one process: a step {self._alone:.4f} s, an epoch {epoch:.1f} s")
        lines += [f"{row.strategy} on {row.ranks}: {row.reason}" for row in self.rows if row.reason]
        for label in self._names:
            lines += threshold_lines(label, self.rows, self.solved, self._forecasters[label])
        lines.append(f"results: {folder / 'speedup.json'}")
        for line in lines:
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def _most_ranks(wanted: int | None, device: str) -> int:
    available = usable_cores() if device == "cpu" else device_count()
    most = wanted if wanted is not None else available
    if most < 2:
        noun = "core" if device == "cpu" else "device"
        reason = f"-n {wanted}" if wanted is not None else f"this machine has {available} {noun}"
        raise ConfigError(
            f"speedup: {reason}, and one rank does not synchronise: at least 2 are needed. Use -n 2"
        )
    return most


def _batch_words(options: SpeedupOptions, names: Sequence[str], most: int) -> list[str]:
    """Return overrides of the job that fix the batch of a worker.

    The batch is that of a worker when the first strategy runs on the largest number of ranks.

    Raises:
        ConfigError: a strategy is unknown, is refused, or cuts the model.
    """
    words: list[str] = []
    for name in names:
        read_strategy(name, "--strategy")
        job = load_job(options.job, name, options.overrides)
        plan = make_plan(job, most, device_type_of(job))
        if plan.cut is not None:
            raise ConfigError(
                f"--strategy {name} cuts the model into stages, and speedup needs ranks that "
                f"compute whole steps. Use --strategy ddp; bigtrain compare --strategy "
                f"single,{name} has the seconds of both."
            )
        batch = plan.batch
        words = words or [
            "train.global_batch_size=null",
            f"train.micro_batch_size={batch.micro_size}",
            f"train.accumulation_steps={batch.accumulation_steps}",
        ]
    return words


def _as_measured(forecaster: StepForecaster, last: SyncStep) -> Callable[[int], SyncStep]:
    """Return a function that predicts the step of a number of ranks, scaled to a measured step.

    Args:
        forecaster: predicts steps.
        last: the step that was measured on the largest number of ranks.
    """
    known = forecaster.step(last.ranks).exposed
    scale = max(0.0, last.exposed) / known if known > 0 else 1.0

    def step_of(ranks: int) -> SyncStep:
        step = forecaster.step(ranks)
        compute = last.alone * last.slowdown
        return replace(step, alone=last.alone, compute=compute, exposed=step.exposed * scale)

    return step_of


def _rank_counts(step: SyncStep, cluster: Cluster | None) -> list[int]:
    """Return the numbers of ranks to try: those with a worker, and with links between the ranks."""
    most = candidates()[-1]
    if cluster is not None and cluster.between is None:
        most = cluster.node.devices
    servers = step.ranks - step.workers
    return [ranks for ranks in candidates() if servers < ranks <= most] or [step.ranks]
