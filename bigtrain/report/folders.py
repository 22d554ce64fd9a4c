"""Numbered folders for the results of runs."""

from __future__ import annotations

from pathlib import Path

from bigtrain.errors import ConfigError


def results_folder(requested: str | None, name: str) -> Path:
    """Make a folder for results: the requested one, or the next free `runs/NAME-NUMBER`.

    Raises:
        ConfigError: it cannot be made, or is not empty.
    """
    try:
        if requested is None:
            base = Path("runs")
            base.mkdir(exist_ok=True)
            return next_folder(base, f"{name}-")
        folder = Path(requested)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"--output {requested} is not empty. Name another folder.")
        return folder
    except OSError as error:
        raise ConfigError(
            f"{requested or 'runs'} cannot be written: {error}. Set --output FOLDER."
        ) from None


def folder_numbers(base: Path, prefix: str) -> list[int]:
    """The numbers of the existing folders PREFIX-NUMBER."""
    names = (path.name for path in base.iterdir())  # a glob would read [ and * of a name
    ends = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
    return [int(end) for end in ends if end.isdigit()]


def next_folder(base: Path, prefix: str) -> Path:
    """Make the folder with the next free number."""
    number = max(folder_numbers(base, prefix), default=0) + 1
    while True:  # another run may take the number in between
        try:
            (base / f"{prefix}{number}").mkdir()
        except FileExistsError:
            number += 1
            continue
        return base / f"{prefix}{number}"
