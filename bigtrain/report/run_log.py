"""The log of a run: its folder, a line or a bar on the console, JSON files.

    runs/NAME/config.yaml        the resolved job, which can be run again
              plan.yaml          mesh, techniques, batch, the predicted peak and step
              metrics.jsonl      one JSON object for each step
              validation.jsonl   one JSON object for each validation
              data.json          documents, samples, and documents that were left out
              memory.json        the peak of every rank, by part, and the seconds of a step
              timeline.json      memory over the last tracked step; missing if no step was tracked
              checkpoints/

Only rank 0 writes. On other ranks the methods do nothing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from bigtrain.assembly.make_plan import describe_plan
from bigtrain.checkpoint.folders import has_own_lock, sole_writer
from bigtrain.core.strategy import Plan
from bigtrain.costs.traffic import StepVolume
from bigtrain.engine.engine import StepResult
from bigtrain.errors import ConfigError
from bigtrain.files.parse import parse_json
from bigtrain.files.regular import is_there, read_text
from bigtrain.job.import_path import first_line
from bigtrain.job.schema import Job
from bigtrain.machine.residuals import record_residuals, step_uncertainty
from bigtrain.memory.timeline import Peak
from bigtrain.prediction.memory_report import MemoryReport, StepForecast, engine_of
from bigtrain.ranks.context import RunContext
from bigtrain.ranks.preemption import Highest
from bigtrain.report.banner import MemoryLimit
from bigtrain.report.folders import folder_numbers, next_folder
from bigtrain.report.metric_writers import MetricWriter, figures_of, open_writers
from bigtrain.report.progress import StepBar, StepLine
from bigtrain.report.tables import NO_SECONDS, memory_notes, memory_table
from bigtrain.units import format_seconds


def run_folder(job: Job, context: RunContext) -> Path:
    """Choose and make the run's folder on rank 0, and return its path on every rank. Collective.

    If `log.name` is set, the folder has this name. Otherwise it is the next free
    `MODEL-STRATEGY-NUMBER`; with `checkpoint.resume=auto` it is the existing folder of this form
    with the highest number.

    Raises:
        ConfigError: the folder cannot be written, or contains another run that would be lost.
    """
    chosen: Path | str = ""
    if context.is_main:
        try:
            chosen = _choose(job)
        except OSError as error:
            chosen = f"log.dir={job.log.dir} cannot be written: {error}. Set log.dir=FOLDER."
        except ConfigError as error:
            chosen = str(error)
    chosen = context.broadcast_object(chosen)
    if isinstance(chosen, str):
        raise ConfigError(chosen)
    return chosen


def _choose(job: Job) -> Path:
    base = Path(job.log.dir)
    base.mkdir(parents=True, exist_ok=True)
    if job.log.name is None:
        return _numbered(base, job)
    folder = base / job.log.name
    folder.mkdir(exist_ok=True)
    if job.checkpoint.resume is None and (folder / "metrics.jsonl").exists():
        raise ConfigError(
            f"log.name={job.log.name}: {folder} already has a run. "
            "Use --resume auto to continue it, or another log.name."
        )
    if job.checkpoint.resume not in (None, "auto") and (folder / "metrics.jsonl").exists():
        checkpoint = Path(os.path.realpath(str(job.checkpoint.resume)))
        if Path(os.path.realpath(folder)) not in (checkpoint, *checkpoint.parents):
            raise ConfigError(
                f"log.name={job.log.name}: {folder} already has a run, and checkpoint.resume="
                f"{job.checkpoint.resume} is no checkpoint of it. Use another log.name."
            )
    return folder


def _numbered(base: Path, job: Job) -> Path:
    # The last part of a path, of `OWNER/NAME` or of `package.module:Class`.
    model = Path(job.model.name.rpartition(":")[2]).expanduser().resolve().name
    # `auto` may choose another strategy for another number of ranks, so the name stays "auto".
    strategy = job.strategy.name.partition(":")[0]
    prefix = f"{model}-{strategy}-"
    numbers = folder_numbers(base, prefix)
    if job.checkpoint.resume == "auto" and numbers:
        return base / f"{prefix}{max(numbers)}"
    return next_folder(base, prefix)


class RunLog:
    """The log of one run, as a context manager.

    Args:
        folder: the run's folder.
        job: the job of the run.
        plan: the plan of the run.
        context: this rank's context.
        console: prints the lines, or shows a progress bar if it is a terminal.
        total_steps: the number of steps of the whole run.
        first_step: the number of steps before the resume; 0 for a new run.
        predicted: the predicted peak, for plan.yaml.
        predicted_step: the predicted seconds of a step, for plan.yaml and the first new line of
            metrics.jsonl.
        predicted_volume: the predicted bytes that the rank exchanges in a step, for the same line
            of metrics.jsonl.

    Raises:
        ConfigError: wandb cannot begin a run.
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        job: Job,
        plan: Plan,
        context: RunContext,
        console: Console,
        *,
        total_steps: int,
        first_step: int = 0,
        predicted: Peak | None = None,
        predicted_step: StepForecast | None = None,
        predicted_volume: StepVolume | None = None,
    ) -> None:
        self.folder = folder
        self._job = job
        self._plan = plan
        self._main = context.is_main
        self._console = console
        self._total = total_steps
        self._lines = StepLine(total_steps, MemoryLimit.of(job, context.device).bytes)
        self._num_ranks = context.world_size
        self._files: dict[str, FileIO] = {}
        self._waiting: dict[str, bytes] = {}
        self._warned = False
        self._bar: StepBar | None = None
        self._writers: list[MetricWriter] = []
        self._stepped = False
        self._predicted_volume = predicted_volume
        self._predicted_seconds = predicted_step.seconds if predicted_step else None
        self._predicted = predicted
        self._locks = ExitStack()
        if not self._main:
            return
        self._write_plan(job, plan, predicted)
        self._drop_steps_after(first_step)
        self._writers = self._open_writers(first_step)
        if console.is_terminal and not console.is_dumb_terminal:
            self._bar = StepBar(console, total_steps, first_step)
            self._bar.start()

    def _open_writers(self, first_step: int) -> list[MetricWriter]:
        return open_writers(
            self._job.log, self.folder, first_step, lambda: _resolved(self._job, self._plan)
        )

    def _write_plan(self, job: Job, plan: Plan, predicted: Peak | None) -> None:
        resolved = _resolved(job, plan)
        described = describe_plan(plan)
        if predicted is not None:
            described["predicted"] = {
                "peak_bytes": predicted.bytes,
                "phase": predicted.phase,
                "breakdown": predicted.breakdown.by_kind(),
            }
        if self._predicted_seconds is not None:
            described.setdefault("predicted", {})["step_seconds"] = self._predicted_seconds
        _write_yaml(self.folder / "config.yaml", resolved)
        _write_yaml(self.folder / "plan.yaml", described)

    def _drop_steps_after(self, step: int) -> None:
        """Remove the lines of the steps after this one: the resumed run repeats those steps."""
        for name in ("metrics.jsonl", "validation.jsonl"):
            path = self.folder / name
            text = ""
            if step and is_there(path):
                text = read_text(path, "Use another log.name.", most=1 << 40, errors="replace")
            lines = [line for line in text.splitlines() if _step_of(line) <= step]
            draft = path.with_name(f".{name}")
            draft.write_text("".join(f"{line}\n" for line in lines), "utf-8")
            draft.replace(path)

    def step(
        self,
        result: StepResult,
        figures: Mapping[str, float] | None = None,
        highest: Highest | None = None,
    ) -> None:
        """Log one optimizer step.

        Args:
            result: the result of the step.
            figures: further figures of the strategy's runner, by name.
            highest: the highest peak of all ranks in bytes, and its rank. It may be from an earlier
                step. So this rank's own peak is logged if it is higher, or if `highest` is None.
        """
        first, self._stepped = not self._stepped, True
        if not self._main:
            return
        values = {k: v for k, v in asdict(result).items() if k != "top1" or v is not None}
        peak, rank = result.peak_memory_bytes, 0
        alike = self._num_ranks == 1 or (highest is not None and highest.is_equal)
        if peak is not None and highest is not None and highest.figure > peak:
            peak, rank = int(highest.figure), highest.rank
        values["peak_memory_bytes"] = peak
        if peak is not None and self._num_ranks > 1:
            values["peak_rank"] = rank
        values |= figures or {}
        scalars = dict(values)
        if first and self._predicted_seconds is not None:
            values["predicted_step_seconds"] = self._predicted_seconds
        if first and self._predicted_volume is not None:
            values["predicted_sent_bytes"] = self._predicted_volume.sent_bytes
            values["predicted_received_bytes"] = self._predicted_volume.received_bytes
        self._append("metrics.jsonl", values)
        self._write_figures("train", scalars, result.step)
        text, left = self._lines.text(result, peak, None if alike else rank)
        if self._bar is not None:
            self._bar.show(result.step, text, left)
        elif result.step % self._job.log.every == 0 or result.step in (1, self._total):
            self.print_line(f"step {result.step}/{self._total}  {text}  {left}".rstrip())

    def validation(self, step: int, measured: dict[str, float]) -> None:
        """Log one validation.

        Args:
            step: the number of the optimizer step after which the model was validated.
            measured: the metrics by name.
        """
        if not self._main:
            return
        self._append("validation.jsonl", {"step": step, **measured})
        self._write_figures("validation", measured, step)
        figures = "  ".join(f"{name} {value:.4f}" for name, value in measured.items())
        self.print_line(f"validation at step {step}: {figures}")

    def sync(self) -> None:
        """Flush the files of metrics to the disk. Call this before a checkpoint is written."""
        for file in self._files.values():
            with suppress(OSError):
                os.fsync(file.fileno())

    def memory(self, report: MemoryReport | None) -> None:
        """Print the memory table, write memory.json and timeline.json, and record the errors.

        The errors of the predictions are stored in the cache of residuals, for later predictions.

        Args:
            report: the memory of all ranks; None prints and writes nothing.
        """
        if not self._main or report is None:
            return
        if not self._stepped:
            self.print_line("no steps remained: there is no memory to report")
            return
        self._leave("memory.json", json.dumps(report.as_json(), indent=1) + "\n")
        course = report.course()
        if course is not None:
            self._leave("timeline.json", json.dumps(course) + "\n")
        self._stop_bar()
        self._console.print(memory_table(report))
        for line in memory_notes(report):
            if not line.startswith(NO_SECONDS):  # printed before the first step
                self.print_line(line)
        engine = engine_of(self._plan)
        if engine is None:
            return
        if report.step.seconds is not None:
            self.print_line(f"step: {step_uncertainty(engine, report.step.basis, report.device)}")
        if self._plan.compiles_blocks:  # predictions are for blocks that are not compiled
            return
        step = report.step_residual(engine)
        steps = [step] if step is not None else []
        record_residuals([*report.residuals(engine, self._plan.precision), *steps])

    def print_line(self, text: str) -> None:
        """Print a line on rank 0."""
        if self._main:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _append(self, name: str, values: dict[str, Any]) -> None:
        line = json.dumps(_finite(values)) + "\n"
        self._waiting[name] = self._waiting.get(name, b"") + line.encode()
        try:
            self._write_waiting(name)
        except OSError as error:
            if not self._warned:  # a full disk fails every line
                self.print_line(
                    f"warning: {self.folder / name} cannot be written: {error}. The run continues "
                    "and keeps its lines in memory until there is room."
                )
            self._warned = True

    def _write_waiting(self, name: str) -> None:
        """Write the lines of a file that have not been written yet.

        Raises:
            OSError: they cannot be written.
        """
        self._restore()
        if name not in self._files:
            self._files[name] = self._opened(name)
        while self._waiting.get(name):
            written = self._files[name].write(self._waiting[name]) or 0
            self._waiting[name] = self._waiting[name][written:]

    def _opened(self, name: str) -> FileIO:
        # The file is also opened for reading, because its lines can then be read after someone
        # has removed its name.
        return (self.folder / name).open("a+b", buffering=0)

    def _restore(self) -> None:
        """Make the folder and its files again if someone has removed or replaced them.

        Raises:
            OSError: the folder or a file cannot be written.
            ConfigError: another run has begun in this folder.
        """
        gone = not os.path.isdir(self.folder)
        if gone:
            self.folder.mkdir(parents=True)
            lines = sum(_contents(file).count(b"\n") for file in self._files.values())
            trackers = {"tensorboard": self._job.log.tensorboard, "wandb": self._job.log.wandb}
            lost = "".join(f" and its folder {name}" for name, used in trackers.items() if used)
            self.print_line(
                f"warning: {self.folder} was removed during the run. It was made again with its "
                f"{lines} lines so far; its checkpoints{lost} are lost."
            )
            self._keep_plan()
            self._close_writers()
            self._writers = self._open_writers(0)
        for name, file in list(self._files.items()):
            path = self.folder / name
            fault = _fault_of(file, path)
            if fault is None:
                continue
            if fault == "removed":
                draft = path.with_name(f".{name}")
                draft.write_bytes(_contents(file))
                draft.replace(path)
                fault = "removed, and was written again with its lines so far,"
            if not gone:
                self.print_line(f"warning: {path} was {fault} during the run.")
                self._keep_plan()
            self._files[name] = self._opened(name)
            file.close()

    def _keep_plan(self) -> None:
        """Make the lock and the files of the job and the plan again if they are missing.

        Raises:
            OSError: a file cannot be written.
            ConfigError: another run has begun in this folder.
        """
        checkpoints = self.folder / "checkpoints"
        if not has_own_lock(checkpoints):
            self._locks.enter_context(sole_writer(checkpoints))
        if not is_there(self.folder / "plan.yaml"):
            self._write_plan(self._job, self._plan, self._predicted)

    def _leave(self, name: str, text: str) -> None:
        """Write a file at the end of the run; a failure is only a warning."""
        try:
            self._restore()
            (self.folder / name).write_text(text, "utf-8")
        except OSError as error:
            self.print_line(f"warning: {self.folder / name} was not written: {error}")

    def _write_figures(self, group: str, values: Mapping[str, Any], step: int) -> None:
        figures = figures_of(values) if self._writers else {}
        for writer in list(self._writers):
            self._guarded(writer, partial(writer.write, group, figures, step))

    def _guarded(self, writer: MetricWriter, call: Callable[[], None]) -> None:
        """Call a writer. If it fails, warn and remove it, so that the run continues."""
        try:
            call()
        except Exception as error:  # a full disk, a lost service: whatever a tracker raises
            self._writers.remove(writer)
            self.print_line(
                f"warning: {type(writer).__name__} failed and gets no more figures: "
                f"{type(error).__name__}: {first_line(error)}. The run continues; metrics.jsonl "
                "has all of them."
            )

    def _close_writers(self) -> None:
        for writer in list(self._writers):
            self._guarded(writer, writer.close)

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_bar()
        try:
            self._restore()
        except (OSError, ConfigError) as error:
            self.print_line(f"warning: {error}")
        for name in self._waiting:
            with suppress(OSError):
                self._write_waiting(name)
            if self._waiting[name]:
                lost = self._waiting[name].count(b"\n")
                self.print_line(f"warning: {self.folder / name} lacks its last {lost} lines")
        for file in self._files.values():
            file.close()
        self._locks.close()
        self._close_writers()


def _contents(file: FileIO) -> bytes:
    """Return all bytes of an open file, even if its name was removed."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0)


def _fault_of(file: FileIO, path: Path) -> str | None:
    """Return words for how an open file was removed, replaced or truncated; None if it was not."""
    state = os.fstat(file.fileno())
    try:
        if not os.path.samestat(state, os.stat(path)):
            return "replaced, and further lines are written to the new one,"
    except FileNotFoundError:
        return "removed"
    if state.st_size < file.tell():
        return f"truncated to {state.st_size} bytes, and later lines are lost,"
    return None


def _step_of(line: str) -> float:
    """Return the step of a JSON line; infinity if the line is damaged, as a crash may cut it."""
    try:
        return int(parse_json(line, "a line")["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Replace nan and infinity, which JSON does not have, by None."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


def _resolved(job: Job, plan: Plan) -> dict[str, Any]:
    """Return the job with the batch of the plan, as values that YAML and JSON have."""
    resolved: dict[str, Any] = job.model_dump(mode="json")
    # Two of the three batch keys determine the third, so the file fits any number of ranks.
    resolved["train"]["global_batch_size"] = plan.batch.global_size
    resolved["train"]["micro_batch_size"] = plan.batch.micro_size
    resolved["train"]["accumulation_steps"] = None
    return resolved


def _write_yaml(path: Path, values: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(values, sort_keys=False), "utf-8")


def step_line(step: StepForecast) -> str:
    """Return a line with the predicted seconds of a step, or the reason why there are none."""
    if step.seconds is None:
        return f"predicted step: none ({step.source})"
    return f"predicted step: {format_seconds(step.seconds)}, {step.source}"
