"""Writers of a run's metrics in addition to its JSON lines: TensorBoard and Weights & Biases.

A writer gets the figures of each step and each validation on rank 0. To support another tracker,
add a class with `write` and `close`, and a key in the `log` section.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from bigtrain.errors import ConfigError, UnreadableError
from bigtrain.files.parse import parse_json
from bigtrain.files.regular import is_there, read_text
from bigtrain.job.import_path import first_line
from bigtrain.job.schema import LogConfig

WANDB_RUN = "wandb.json"
"""The file in the run's folder with the run's id at Weights & Biases. A resume reads it."""


class MetricWriter(Protocol):
    """Writes the figures of a run to a tracker."""

    def write(self, group: str, figures: Mapping[str, float], step: int) -> None:
        """Write the figures of a step or a validation.

        Args:
            group: `train` or `validation`.
            figures: numbers by name; they may be infinite or nan.
            step: the number of the optimizer step, from 1.
        """

    def close(self) -> None:
        """Write figures that are still in memory, and release the writer's resources."""


class TensorBoardWriter:
    """Writes TensorBoard files into `tensorboard` in the run's folder.

    Args:
        folder: the run's folder.
        first_step: the number of steps before the resume; 0 for a new run. Figures of later steps
            that the folder already has are removed, because the run repeats these steps.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = first_step + 1 if first_step else None
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)

    def write(self, group: str, figures: Mapping[str, float], step: int) -> None:
        """See `MetricWriter.write`."""
        for name, value in figures.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        """See `MetricWriter.close`."""
        self._writer.close()


class WandbWriter:
    """Sends figures to a project of Weights & Biases.

    wandb writes its files into `wandb` in the run's folder. Its environment variables
    (WANDB_MODE=offline, WANDB_ENTITY, WANDB_API_KEY, ...) have their usual meaning. A run that
    resumes in its folder continues the same run at Weights & Biases. Steps that are repeated after
    a resume appear twice. The step is logged as a figure `step`, because wandb's own counter cannot
    decrease.

    Args:
        folder: the run's folder; its name is the run's name.
        first_step: the number of steps before the resume; 0 for a new run.
        project: the project's name.
        settings: the resolved job, shown as the run's configuration.

    Raises:
        ConfigError: wandb cannot begin a run.
    """

    def __init__(
        self, folder: Path, first_step: int, project: str, settings: Mapping[str, Any]
    ) -> None:
        import wandb

        path = folder / WANDB_RUN
        run_id = _run_id(path) if first_step else None
        try:
            self._run: Any = wandb.init(
                project=project,
                name=folder.name,
                dir=str(folder),
                config=dict(settings),
                id=run_id,
                resume="allow" if run_id else None,
            )
        except Exception as error:  # for example no account, no network, no access to the project
            raise ConfigError(
                f"log.wandb={project}: wandb cannot begin a run: {first_line(error)}. Run "
                "`wandb login`, or set WANDB_MODE=offline to keep the figures on this machine."
            ) from None
        path.write_text(json.dumps({"id": self._run.id, "project": project}) + "\n", "utf-8")
        self._run.define_metric("step")
        for group in ("train", "validation"):
            self._run.define_metric(f"{group}/*", step_metric="step")

    def write(self, group: str, figures: Mapping[str, float], step: int) -> None:
        """See `MetricWriter.write`."""
        self._run.log({"step": step, **{f"{group}/{name}": v for name, v in figures.items()}})

    def close(self) -> None:
        """See `MetricWriter.close`."""
        self._run.finish()


def check_writers(log: LogConfig) -> None:
    """Check that the packages which a job's writers need are installed, without importing them.

    Raises:
        ConfigError: a package is not installed; the message contains the command to install it.
    """
    packages = {"tensorboard": log.tensorboard, "wandb": log.wandb is not None}
    for package, is_used in packages.items():
        if is_used and find_spec(package) is None:
            key = f"log.wandb={log.wandb}" if package == "wandb" else "log.tensorboard=true"
            raise ConfigError(
                f"{key} needs the package {package}, which is not installed. "
                f'Run: pip install "bigtrain[{package}]"'
            )


def open_writers(
    log: LogConfig, folder: Path, first_step: int, settings: Callable[[], Mapping[str, Any]]
) -> list[MetricWriter]:
    """Open the writers that a job's `log` section names; an empty list if it names none.

    Args:
        log: the job's `log` section.
        folder: the run's folder.
        first_step: the number of steps before the resume; 0 for a new run.
        settings: returns the resolved job; called only if a writer needs it.

    Raises:
        ConfigError: wandb cannot begin a run.
    """
    writers: list[MetricWriter] = []
    if log.tensorboard:
        writers.append(TensorBoardWriter(folder, first_step))
    if log.wandb is not None:
        writers.append(WandbWriter(folder, first_step, log.wandb, settings()))
    return writers


def figures_of(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the items of a dict whose values are numbers, without `step`."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name != "step"
    }


def _run_id(path: Path) -> str | None:
    """Return the run's id from its file `WANDB_RUN`; None if the file is missing or damaged."""
    if not is_there(path):
        return None
    try:
        run_id = parse_json(read_text(path, "Remove it."), str(path))["id"]
    except (UnreadableError, OSError, KeyError, TypeError):
        return None
    return run_id if isinstance(run_id, str) else None
