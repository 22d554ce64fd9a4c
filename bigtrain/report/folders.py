"""Numbered folders for the results of runs."""

from __future__ import annotations

from pathlib import Path

from bigtrain.errors import ConfigError


def results_folder(requested: str | None, name: str) -> Path:
    """Make a folder for results and return its path.

    Args:
        requested: the folder to make, which must be empty if it exists; None makes the next free
            folder `runs/NAME-NUMBER`.
        name: the beginning of the name of a numbered folder.

    Raises:
        ConfigError: the folder cannot be made or is not empty.
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
    """Return the numbers of the existing files and folders in `base` named PREFIX and a number."""
    names = (path.name for path in base.iterdir())  # a glob would interpret [ and * in the prefix
    ends = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
    return [int(end) for end in ends if end.isdigit()]


def next_folder(base: Path, prefix: str) -> Path:
    """Make the folder PREFIX and the next free number in `base`, and return its path."""
    number = max(folder_numbers(base, prefix), default=0) + 1
    while True:  # another run may take the number in between
        try:
            (base / f"{prefix}{number}").mkdir()
        except FileExistsError:
            number += 1
            continue
        return base / f"{prefix}{number}"
