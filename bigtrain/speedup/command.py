"""`bigtrain speedup`: whether more ranks pay, and what would make them."""

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
from bigtrain.speedup.measure import MeasuredPace, PaceRequest
from bigtrain.speedup.show import SpeedupRow, speedup_table, threshold_lines


def main(arguments: list[str]) -> int:
    """Measure, predict, solve, show; returns the exit status.

    0 where at least one strategy ran on several ranks, 1 where none did, 2 for the user's input,
    130 after Ctrl-C.
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
        trial.progress.print("stopped: what is measured is shown")
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
    """All strategies on all numbers of ranks.

    Args:
        options: of the command line.
        cluster: whose figures predict; None for this machine's.

    Raises:
        ConfigError: a strategy that is none or cuts the model, fewer than two ranks.
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
        """Measure one process, then every strategy; solve what was measured."""
        batch = self._first.setup.plan.batch
        other = batch.micro_size // 2 or 2
        times = batch.accumulation_steps
        pace = self._pace(folder / "one", "single", 1, PaceRequest(self._options.steps, other, []))
        self._alone = pace.compute
        if pace.other_compute is not None:
            self._cost = ComputeCost.through(
                (batch.micro_size * times, pace.compute), (other * times, pace.other_compute)
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
            request = PaceRequest(self._options.steps, None, forecaster.messages(ranks))
            pace = self._pace(folder / f"{label}-{ranks}", name, ranks, request)
        except BigtrainError as error:
            return SpeedupRow(label, ranks, reason=str(error))
        measured = SyncStep(
            ranks=ranks,
            workers=predicted.workers,
            batch=predicted.batch,
            alone=self._alone or pace.compute,
            compute=pace.compute,
            exposed=pace.step - pace.compute,
            whole=pace.whole,
            latency=min(pace.latency or 0.0, pace.whole or 0.0),
        )
        return SpeedupRow(label, ranks, measured, predicted)

    def _predict(self, label: str) -> None:
        """Rows of numbers of ranks that are not run."""
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
        """The inequality for the most ranks that were measured, and for a cluster's most."""
        own = [row for row in self.rows if row.strategy == label]
        forecaster = self._forecasters[label]
        measured = [row.measured for row in own if row.measured is not None]
        if measured:
            last = measured[-1]
            self.solved[f"{label} here"] = {
                "batch": batch_that_pays(last, self._cost),
                "bandwidth": bandwidth_that_pays(last, 1.0),
            }
            if forecaster.at_hand:
                found = ranks_that_pay(_as_measured(forecaster, last), _tried(last, self._cluster))
                self.solved[f"{label} here"]["ranks"] = found
        predicted = [row.predicted for row in own if row.predicted and row.measured is None]
        if predicted:
            last = predicted[-1]
            self.solved[f"{label} on {last.ranks}"] = {
                "batch": batch_that_pays(last, ComputeCost(0.0, last.alone / last.batch)),
                "bandwidth": bandwidth_that_pays(last, 1.0),
                "ranks": ranks_that_pay(forecaster.step, _tried(last, self._cluster)),
            }

    def _pace(self, folder: Path, name: str, ranks: int, request: PaceRequest) -> MeasuredPace:
        """One run of `bigtrain/speedup/measure.py`.

        Raises:
            BigtrainError: it failed; ConfigError where it was refused.
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
        pace = MeasuredPace(**run.json("pace.json"))
        self._others = max(self._others, pace.others_cores or 0.0)
        return pace

    def document(self, *, stopped: bool) -> dict[str, Any]:
        """The content of speedup.json."""
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
                name: {key: asdict(one) for key, one in found.items()}
                for name, found in self.solved.items()
            },
        }

    def show(self, title: str, folder: Path) -> None:
        """The table and what would make more ranks pay."""
        console = Console() if sys.stdout.isatty() else Console(width=150)
        console.print(speedup_table(self.rows, title, self.samples))
        named = "this machine" if self._cluster is None else self._cluster.name
        lines = [f"in brackets: predicted, by the figures of {named}"]
        if self._others > BUSY_SHARE * usable_cores():
            lines.append(
                f"other programs took up to {self._others:.1f} cores meanwhile: measure again "
                "when they are done"
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
    found = usable_cores() if device == "cpu" else device_count()
    most = wanted if wanted is not None else found
    if most < 2:
        what = "core" if device == "cpu" else "device"
        given = f"-n {wanted}" if wanted is not None else f"there is {found} {what} here"
        raise ConfigError(
            f"speedup: {given}, and one rank has nobody to synchronise with: at least 2 are "
            "needed. Use -n 2"
        )
    return most


def _batch_words(options: SpeedupOptions, names: Sequence[str], most: int) -> list[str]:
    """What each worker has: as the job would have it on the most ranks, under the first strategy.

    Raises:
        ConfigError: a strategy is none, or is refused.
    """
    found: list[str] = []
    for name in names:
        read_strategy(name, "--strategy")
        job = load_job(options.job, name, options.overrides)
        plan = make_plan(job, most, device_type_of(job))
        if plan.cut is not None:
            raise ConfigError(
                f"--strategy {name} cuts the model into stages, and here every rank computes "
                f"whole steps. Use --strategy ddp; bigtrain compare --strategy single,{name} "
                "has the seconds of both."
            )
        batch = plan.batch
        found = found or [
            "train.global_batch_size=null",
            f"train.micro_batch_size={batch.micro_size}",
            f"train.accumulation_steps={batch.accumulation_steps}",
        ]
    return found


def _as_measured(forecaster: StepForecaster, last: SyncStep) -> Callable[[int], SyncStep]:
    """Steps as they are forecast, corrected by what was measured of the most ranks."""
    known = forecaster.step(last.ranks).exposed
    scale = max(0.0, last.exposed) / known if known > 0 else 1.0

    def step_of(ranks: int) -> SyncStep:
        one = forecaster.step(ranks)
        compute = last.alone * last.crowding
        return replace(one, alone=last.alone, compute=compute, exposed=one.exposed * scale)

    return step_of


def _tried(step: SyncStep, cluster: Cluster | None) -> list[int]:
    """Numbers of ranks of which some compute, as many as there are links for."""
    most = candidates()[-1]
    if cluster is not None and cluster.between is None:
        most = cluster.node.devices
    servers = step.ranks - step.workers
    return [ranks for ranks in candidates() if servers < ranks <= most] or [step.ranks]
