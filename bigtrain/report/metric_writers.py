"""Where the numbers of a run go besides its own JSON lines: TensorBoard files, Weights & Biases.

A writer gets the figures of each step and each validation on rank 0. Another tracker needs one
class with `write` and `close`, and a key in the `log` section.
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
"""A file in the run's folder with the run's id at Weights & Biases, which a resume continues."""


class MetricWriter(Protocol):
    """Writes figures of a run."""

    def write(self, group: str, figures: Mapping[str, float], step: int) -> None:
        """Write the figures of a step.

        Args:
            group: `train` or `validation`.
            figures: numbers by name; they may be infinite or nan.
            step: the optimizer step, from 1.
        """

    def close(self) -> None:
        """Write what is still in memory."""


class TensorBoardWriter:
    """Writes TensorBoard files into `tensorboard` in the run's folder.

    Args:
        folder: the run's folder.
        first_step: steps that were done before a resume. Those that are done again appear once.
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
    """Sends figures to a project of Weights & Biases; its files are in `wandb` in the run's folder.

    The variables of wandb (WANDB_MODE=offline, WANDB_ENTITY, WANDB_API_KEY, ...) have their usual
    meaning. A run that is resumed in its folder continues the same run there. Steps that are done
    again appear twice: `step` is a figure of its own, because wandb's counter cannot go back.

    Args:
        folder: the run's folder; its name is the run's name.
        first_step: steps that were done before a resume.
        project: the project's name.
        settings: the resolved job, shown as the run's configuration.

    Raises:
        ConfigError: wandb refuses to begin a run.
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
        except Exception as error:  # no account, no network, a project that is not theirs
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
    """Refuse a job whose writers need a package that is not installed. Imports nothing.

    Raises:
        ConfigError: with the command that installs it.
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
    """Open the writers that a job asks for.

    Args:
        log: the job's `log` section.
        folder: the run's folder.
        first_step: steps that were done before a resume.
        settings: returns the resolved job.

    Raises:
        ConfigError: wandb refuses to begin a run.
    """
    writers: list[MetricWriter] = []
    if log.tensorboard:
        writers.append(TensorBoardWriter(folder, first_step))
    if log.wandb is not None:
        writers.append(WandbWriter(folder, first_step, log.wandb, settings()))
    return writers


def figures_of(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among some values, without the step's own number."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name != "step"
    }


def _run_id(path: Path) -> str | None:
    """The run that a folder belongs to; None if it has none, or the file is damaged."""
    if not is_there(path):
        return None
    try:
        run_id = parse_json(read_text(path, "Remove it."), str(path))["id"]
    except (UnreadableError, OSError, KeyError, TypeError):
        return None
    return run_id if isinstance(run_id, str) else None
