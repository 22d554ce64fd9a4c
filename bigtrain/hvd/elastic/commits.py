"""The file of the last commit, from which a restarted rank resumes."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import io
import os
import shutil
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bigtrain.errors import CheckpointError, ConfigError, UnreadableError
from bigtrain.files.regular import open_regular
from bigtrain.ranks.launcher_env import launch_key

FOLDER_VARIABLE = "BIGTRAIN_ELASTIC"
"""The environment variable that names a folder for commits, from which a later launch can resume,
too."""
_PIECE = 1 << 20


def _hash_of(path: Path) -> str:
    content = hashlib.blake2b(digest_size=16)
    with open_regular(path) as file:
        while piece := file.read(_PIECE):
            content.update(piece)
    return content.hexdigest()


class CommitFile:
    """The file of the newest commit, which the first rank of each node writes.

    The name of the file contains the number of the commit and a hash of the content.

    Args:
        folder: the folder of the file, which is created if it is missing.
        writes: whether this rank writes the file.
    """

    def __init__(self, folder: Path, *, writes: bool) -> None:
        self.folder = folder
        self._writes = writes
        self._checked: set[str] = set()

    @classmethod
    def of_launch(cls, environ: Mapping[str, str], *, writes: bool) -> CommitFile | None:
        """Return the file that the ranks find after a restart; None if no launcher restarts them.

        torchrun sets a variable to the number of restarts that it allows. Its port may change with
        each restart, so the name of the folder does not depend on the port.

        Args:
            environ: the environment variables.
            writes: whether this rank writes the file. Then the folder is removed when the process
                ends without an error, unless the user has named it.
        """
        named = environ.get(FOLDER_VARIABLE)
        if named:
            return cls(Path(named), writes=writes)
        restarts = environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
        if not restarts.isdecimal() or int(restarts) == 0:
            return None
        key = launch_key({k: v for k, v in environ.items() if k != "MASTER_PORT"})
        file = cls(Path("runs").resolve() / f"elastic-{key}", writes=writes)
        if writes:
            atexit.register(file.forget)
        return file

    def write(self, number: int, states: dict[str, Any], objects: dict[str, Any]) -> None:
        """Replace the last commit by a new one, or warn if it cannot be written.

        On a rank that does not write, only the objects are checked.

        Args:
            number: the number of the commit, counted from 1.
            states: the state dicts of models, optimizers and samplers, by name.
            objects: plain values, such as numbers and strings, by name.

        Raises:
            ConfigError: an object could not be read back without running its code.
        """
        for name, value in objects.items():
            self._check(name, value)
        if not self._writes:
            return
        draft = self.folder / "commit.draft"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            before = self._commits().values()
            with draft.open("wb") as file:
                torch.save({"states": states, "objects": objects}, file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.folder / f"commit-{number}-{_hash_of(draft)}.pt")
            for path in before:
                path.unlink(missing_ok=True)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a full disk
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            warnings.warn(
                f"hvd.elastic: commit {number} was not written to {self.folder}: {error}. A "
                "restart continues from the one before.",
                stacklevel=2,
            )

    def _check(self, name: str, value: Any) -> None:
        kind = f"{name} {type(value).__qualname__}"
        if kind in self._checked and isinstance(value, (bool, int, float, str)):
            return
        self._checked.add(kind)
        box = io.BytesIO()
        try:
            torch.save(value, box)
            box.seek(0)
            torch.load(box, weights_only=True)
        except Exception as error:
            raise ConfigError(
                f"hvd.elastic: state.{name} of type {type(value).__name__} cannot be stored in a "
                "file, which can hold only numbers, texts, lists, dicts and tensors. Use one of "
                "these, or give the object a state_dict and load_state_dict."
            ) from error

    def number(self) -> int:
        """Return the number of the newest commit; 0 if there is none."""
        return max(self._commits(), default=0)

    def _commits(self) -> dict[int, Path]:
        paths = {}
        for path in self.folder.glob("commit-*.pt"):
            number = path.name.split("-")[1]
            if number.isdecimal() and int(number) > 0:
                paths[int(number)] = path
        return paths

    def read(self) -> dict[str, Any]:
        """Read the newest commit, which has to exist.

        Returns:
            The arguments `states` and `objects` of `write`, under these names.

        Raises:
            CheckpointError: the file is damaged, or cannot be read.
        """
        path = self._commits()[self.number()]
        try:
            if path.stem.rpartition("-")[2] != _hash_of(path):
                raise CheckpointError("it is not what was written")
            with open_regular(path) as file:
                commit: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
        except UnreadableError as error:
            raise CheckpointError(f"hvd.elastic: {error} Remove it to begin anew.") from error
        except (CheckpointError, OSError) as error:
            raise CheckpointError(
                f"hvd.elastic: {path} cannot be resumed from: {error}. Remove it to begin anew."
            ) from error
        return commit

    def forget(self) -> None:
        """Remove the folder, unless an exception is ending the process."""
        if getattr(sys, "last_value", None) is None:
            shutil.rmtree(self.folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.folder.parent.rmdir()  # fails if other files are in it, which is right
