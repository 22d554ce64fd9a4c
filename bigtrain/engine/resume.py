"""Resume a run, save checkpoints so that a full disk does not end it, and stop it at a signal."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from bigtrain.checkpoint.folders import (
    best_checkpoint,
    checkpoints_of,
    find_checkpoint,
    newest_checkpoint,
)
from bigtrain.checkpoint.manifest import Manifest
from bigtrain.checkpoint.read import Checkpoint
from bigtrain.core.strategy import Plan
from bigtrain.data import Step
from bigtrain.engine.engine import Engine, StepResult
from bigtrain.errors import (
    CheckpointError,
    DamagedCheckpointError,
    LostRankError,
    UnfitCheckpointError,
)
from bigtrain.job.schema import Job
from bigtrain.ranks.exit_status import is_stop
from bigtrain.ranks.preemption import Highest, PreemptionNotice
from bigtrain.ranks.restart import Restart, RunNote, left_behind, resume_words

_SAID_OF_DAMAGE = 3
"""The number of damaged checkpoints that are reported one by one; further ones are counted."""


def resume(job: Job, engine: Engine, folder: Path) -> list[str]:
    """Load the checkpoint that `checkpoint.resume` of the job names. Collective.

    With "auto" it is the newest undamaged checkpoint in the folder of the run. Nothing is loaded
    if the job names no checkpoint, or if the folder has none.

    Args:
        job: the job of the run.
        engine: the engine that loads the state.
        folder: the folder of the run.

    Returns:
        Lines to print.

    Raises:
        CheckpointError: the named checkpoint is damaged; with "auto", all checkpoints are damaged.
        UnfitCheckpointError: the checkpoint is of another model.
    """
    if job.checkpoint.resume is None:
        return []
    if job.checkpoint.resume != "auto":
        path: Path = engine.context.broadcast_object(find_checkpoint(job.checkpoint.resume))
        _load(engine, path)
        return [_from(path, engine), *_begun_anew(path, engine)]
    # All ranks use the list of rank 0, so that they load the same checkpoint.
    checkpoints: list[Path] = engine.context.broadcast_object(
        checkpoints_of(folder / "checkpoints")
    )
    damaged: list[str] = []
    for path in checkpoints:
        try:
            _load(engine, path)
        except DamagedCheckpointError as error:
            damaged.append(str(error.damage))
            continue
        lines = [f"warning: {damage} Goes back to {path.name}." for damage in _shortened(damaged)]
        return [*lines, _from(path, engine), *_begun_anew(path, engine)]
    if damaged:
        raise CheckpointError(
            f"no checkpoint of {folder / 'checkpoints'} is whole. {' '.join(_shortened(damaged))} "
            "Leave --resume out to start from the beginning."
        )
    return []


def _load(engine: Engine, path: Path) -> None:
    """Load a checkpoint.

    Raises:
        UnfitCheckpointError: the checkpoint is undamaged, and of another model.
        CheckpointError: the checkpoint is damaged.
    """
    try:
        engine.load(path)
    except (DamagedCheckpointError, LostRankError):
        raise
    except CheckpointError as error:
        if isinstance(error.__context__, DamagedCheckpointError):
            raise
        raise UnfitCheckpointError(str(error)) from None


def _shortened(damaged: list[str]) -> list[str]:
    """Return the first few of some sentences, and one that counts the others."""
    if len(damaged) <= _SAID_OF_DAMAGE + 1:
        return damaged
    more = len(damaged) - _SAID_OF_DAMAGE
    return [*damaged[:_SAID_OF_DAMAGE], f"{more:,} older checkpoints are damaged, too."]


def _from(path: Path, engine: Engine) -> str:
    return f"continues after step {engine.steps_done} from {path}"


def _begun_anew(path: Path, engine: Engine) -> list[str]:
    """Return a line if the checkpoint lacks the optimizer's state, as a converted one does."""
    optimizer = engine.runner.optimizer
    keeps_none = isinstance(optimizer, torch.optim.SGD) and not optimizer.defaults["momentum"]
    has_state = any(name.startswith("optimizer") for name in Manifest.open(path).tensor_files)
    if keeps_none or has_state:
        return []
    return [f"{path.name} has no optimizer state: that of {type(optimizer).__name__} starts empty"]


class Saving:
    """Saves the state of a run after the steps for which the job asks it.

    Args:
        job: the job of the run, with the keys of `checkpoint`.
        engine: the engine of the run, after the run was resumed.
        folder: the folder of the run. If the run was resumed, the best validation so far is that of
            the best checkpoint in this folder.
        total_steps: the number of steps of the run.
    """

    def __init__(self, job: Job, engine: Engine, folder: Path, total_steps: int) -> None:
        self.folder = folder
        """The folder of the run."""
        self._engine, self._total_steps = engine, total_steps
        self._every, self._at_end = job.checkpoint.every, job.checkpoint.at_end
        self._eval_every = job.train.eval_every
        self._figure, best_figures = job.checkpoint.best, None
        if self._figure is not None and job.checkpoint.resume is not None:
            best_figures = engine.context.broadcast_object(_figures_of_best(folder / "checkpoints"))
        self._best: float | None = (best_figures or {}).get(self._figure)

    def validates(self, step: int) -> bool:
        """Whether `train.eval_every` requires a validation after this step, counted from 1."""
        return self._eval_every > 0 and step % self._eval_every == 0

    def is_due(self, step: int) -> bool:
        """Whether `checkpoint.every` requires a save after this step, counted from 1."""
        return self._every > 0 and step % self._every == 0

    def after_step(
        self, step: int, measured: Mapping[str, float] | None, before: Callable[[], None]
    ) -> list[str]:
        """Save the state if the job asks for a save, and return lines to print. Collective.

        Args:
            step: the number of steps done.
            measured: the figures of a validation after this step; None without a validation.
            before: called before the state is saved.

        Raises:
            CheckpointError: the save after the last step of the run failed.
        """
        last = step == self._total_steps
        lines = failed_save(self._engine, self.folder)
        best = measured if self._is_best(measured or {}) else None
        if best or (last and self._at_end) or self.is_due(step):
            before()
            lines += save_or_explain(self._engine, self.folder, last=last, best=best)
        return lines

    def _is_best(self, measured: Mapping[str, float]) -> bool:
        """Whether the figure of `checkpoint.best` is the best so far; if so, store it."""
        name = self._figure
        if name is None or not math.isfinite(measured.get(name, math.nan)):
            return False
        value, lower = measured[name], name.endswith(("loss", "bits_per_byte"))
        better = self._best is None or (value < self._best if lower else value > self._best)
        if better:
            self._best = value
        return better


def _figures_of_best(checkpoints: Path) -> dict[str, float] | None:
    path = best_checkpoint(checkpoints)
    try:
        return None if path is None else Checkpoint(path, verify=False).meta.get("validation")
    except CheckpointError:  # a damaged checkpoint is no standard: any new figure replaces it
        return None


def save_or_explain(
    engine: Engine, folder: Path, *, last: bool, best: Mapping[str, float] | None = None
) -> list[str]:
    """Save a checkpoint, and return lines to print if that failed. Collective.

    Args:
        engine: the engine of the run.
        folder: the folder of the run; the checkpoint is written to its folder `checkpoints`.
        last: whether this is the last step of the run, after which an unsaved state is lost.
        best: see `Engine.save`.

    Raises:
        CheckpointError: the save failed, and `last` is True.
    """
    checkpoints = folder / "checkpoints"
    try:
        _save(engine, folder, best=best, waits=last)
        lines = failed_save(engine, folder)  # the save before this one
    except CheckpointError as error:
        if last:
            raise CheckpointError(
                f"{error}. The run went to its end, but its last state is lost; "
                f"{_newest(checkpoints)}. Make room, and run again with --resume auto."
            ) from None
        return [f"warning: {error}. The run goes on; {_newest(checkpoints)}."]
    return lines


def _save(
    engine: Engine, folder: Path, *, best: Mapping[str, float] | None = None, waits: bool
) -> Path:
    """Save a checkpoint. If a rank is lost during the save, save again with the other ranks."""
    while True:
        try:
            path = engine.save(folder / "checkpoints", best=best)
            if waits:
                engine.saver.wait()
        except LostRankError:
            continue
        return path


def failed_save(engine: Engine, folder: Path) -> list[str]:
    """Return a line if an asynchronous save has failed after the last call; else an empty list."""
    error = engine.saver.failure()
    if error is None:
        return []
    return [f"warning: {error}. The run goes on; {_newest(folder / 'checkpoints')}."]


def _newest(checkpoints: Path) -> str:
    newest = newest_checkpoint(checkpoints)
    return f"the newest is still {newest.name}" if newest else "there is none yet"


def stopped_lines(engine: Engine, folder: Path, signal_name: str) -> list[str]:
    """Save a checkpoint after a signal to stop, and return lines to print. Collective.

    Args:
        engine: the engine of the run, between two steps.
        folder: the folder of the run.
        signal_name: the name of the signal.

    Raises:
        CheckpointError: the state could not be saved.
    """
    try:
        path = _save(engine, folder, waits=True)
    except CheckpointError as error:
        raise CheckpointError(
            f"{signal_name} stopped the run after step {engine.steps_done}, and its state is lost: "
            f"{error}; {_newest(folder / 'checkpoints')}. Make room, and run again with --resume "
            "auto."
        ) from None
    return [
        f"stopped by {signal_name} after step {engine.steps_done}, saved as {path}. Go on with the "
        f"same command and: {resume_words(folder)}"
    ]


class StopSignals:
    """The ranks' signals to stop a run, which they exchange between its steps.

    Signals travel with the numbers of the next step, which the ranks exchange anyway. The peaks of
    memory travel with the signals. There are two cases in which the ranks exchange signals and
    peaks at the end of a step: before a validation or a save, which may take long, and in the first
    steps, in which peaks grow and the log shows them.

    Args:
        notice: the signals of this rank.
        engine: the engine of the run, after the run was resumed.
        saving: the saves of the run.
    """

    def __init__(self, notice: PreemptionNotice, engine: Engine, saving: Saving) -> None:
        self._notice, self._engine, self._saving = notice, engine, saving
        self._settled = engine.steps_done + max(2, engine.job.memory.track_steps)
        self._last: StepResult | None = None

    @property
    def highest(self) -> Highest | None:
        """See `PreemptionNotice.highest`: the highest peak of all ranks in bytes."""
        return self._notice.highest

    def before_step(self, batch: Step) -> bool:
        """Begin a step's exchange; return whether to stop before the step. Collective.

        Args:
            batch: the batch of the step.
        """
        last, notice = self._last, self._notice
        if last is None or notice.every > 1:  # above 1 the ranks do not wait for each other
            return False
        numbers = self._engine.begin(batch, *notice.own(last.peak_memory_bytes))
        return notice.heard([(own.signal, own.peak) for own in numbers.everyone()])

    def after_step(self, result: StepResult, *, at_once: bool) -> bool:
        """Return whether the ranks already know that they stop after this step. Collective.

        Args:
            result: the result of the step.
            at_once: whether the ranks exchange their signals now. They always do in the first
                steps and before a save.
        """
        self._last = result
        early = result.step <= self._settled or self._saving.is_due(result.step)
        if at_once or early or self._notice.every > 1:
            return self._notice.agreed(result.peak_memory_bytes)
        return False

    def save(self, before: Callable[[], None], show: Callable[[str], None]) -> None:
        """Save a checkpoint after a signal, and show how to continue. Collective.

        Args:
            before: called before the state is saved.
            show: called with each line to print.

        Raises:
            CheckpointError: the state could not be saved.
        """
        before()
        for line in stopped_lines(self._engine, self._saving.folder, self._notice.signal_name):
            show(line)


class StopReport:
    """Reports the run's newest checkpoint if Ctrl-C or SIGTERM ends a `with` block before a save.

    Args:
        speaks: whether this rank prints the report.
    """

    folder: Path | None = None
    """The folder of the run; None until the run has a folder."""

    def __init__(self, *, speaks: bool) -> None:
        self._speaks = speaks

    def __enter__(self) -> StopReport:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None and is_stop(error) and self._speaks:
            sys.stderr.write(f"bigtrain: {left_behind(self.folder)}\n")


def run_note(
    job: Job, plan: Plan, folder: Path, restart: Restart | None, *, planned: bool
) -> RunNote:
    """Return the facts that `bigtrain train -n` needs to start the run's ranks again.

    Args:
        job: the job of the run.
        plan: the plan of the run.
        folder: the folder of the run.
        restart: the last restart, with its changes of the job; None before the first restart.
        planned: whether the planner chose the plan, and will choose again for another number of
            ranks.
    """
    return RunNote(
        folder=str(folder.resolve()),
        begun_at=job.checkpoint.resume,
        words=restart.words if restart else (),
        global_size=plan.batch.global_size,
        micro_size=plan.batch.micro_size,
        model_ranks=0 if planned else plan.pp * plan.tp,
        timeout=job.mesh.timeout,
    )
