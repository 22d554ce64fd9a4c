"""The folder of a run's checkpoints: which there are, which is the newest, which may go."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from bigtrain.checkpoint.manifest import MANIFEST, STATE
from bigtrain.errors import ConfigError

LATEST, BEST = "latest", "best"
"""Files with the name of a checkpoint beside them."""
_DRAFT, _ASIDE = ".step-", ".replaced-"


def checkpoints_of(folder: Path) -> list[Path]:
    """The checkpoints of a folder that were written to the end, the newest first.

    That is the one that `latest` points at, then those of the highest steps. One that was about to
    be replaced by another of its step when the process ended counts, too.
    """
    numbered = {number: path for number, path in _numbered(folder, "step-") if is_complete(path)}
    for number, path in _numbered(folder, _ASIDE):
        if number not in numbered and is_complete(path):
            numbered[number] = path
    found = [numbered[number] for number in sorted(numbered, reverse=True)]
    pointer = folder / LATEST
    if pointer.is_file():
        target = folder / pointer.read_text(encoding="utf-8", errors="replace").strip()
        found.sort(key=lambda path: path != target)
    return found


@contextlib.contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Keep other processes from saving into a folder, as long as this one lives at the most.

    Raises:
        ConfigError: another one does.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:  # whoever saves there will say it
        yield
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
            raise ConfigError(
                f"{folder}: {who} saves its checkpoints there. Use log.name=ANOTHER, or wait until "
                "it has ended."
            ) from None
        except OSError:  # a file system without locks
            yield
            return
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def is_complete(path: Path) -> bool:
    """Whether a checkpoint has been written to its end; it may have been damaged since."""
    return (path / MANIFEST).is_file() or (path / STATE).is_file()


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `latest` points at, or the highest number where that is missing."""
    return next(iter(checkpoints_of(folder)), None)


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `best` points at; None where there is none."""
    pointer = folder / BEST
    if not pointer.is_file():
        return None
    path = folder / pointer.read_text(encoding="utf-8", errors="replace").strip()
    return path if path.parent == folder and is_complete(path) else None


def find_checkpoint(path: str) -> Path:
    """A checkpoint from what a person would type: its folder, its run's, or the `checkpoints/`.

    Of the latter two the newest; `checkpoints/best` and `checkpoints/latest` are what they name.

    Raises:
        ConfigError: there is none.
    """
    candidate = Path(path)
    if candidate.is_file() and candidate.name in (LATEST, BEST):
        candidate = candidate.parent / candidate.read_text(errors="replace").strip()
    if is_complete(candidate):
        return candidate
    for folder in (candidate, candidate / "checkpoints"):
        newest = newest_checkpoint(folder) if folder.is_dir() else None
        if newest is not None:
            return newest
    theirs = ""
    if Path(path).exists():
        theirs = (
            " One of another library, or weights alone, becomes one by: bigtrain checkpoint "
            f"convert {path} TARGET"
        )
    raise ConfigError(
        f"checkpoint.resume: there is no checkpoint at {path!r}. "
        f"Give a folder that holds {STATE}, a run's folder, or auto.{theirs}"
    )


def draft_folder(folder: Path, step: int) -> Path:
    """A new folder in which the checkpoint of a step is written.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{_DRAFT}{step}.{os.getpid()}-{os.urandom(4).hex()}"
    draft.mkdir()
    return draft


def publish(draft: Path, step: int, keep: int, *, best: bool = False) -> Path:
    """Give a draft its name, point `latest` at it, and remove the oldest beyond `keep`.

    Args:
        draft: a whole checkpoint.
        step: optimizer steps done.
        keep: how many of those written last stay, this one among them: after a resume from an
            older step that need not be those of the highest numbers. The best stays in any case.
        best: whether `best` is to point at it, too.

    Returns:
        The checkpoint's folder.
    """
    folder = draft.parent
    final = folder / f"step-{step}"
    sync_folder(draft)
    if final.exists():  # the same step again, after a resume; gone only when the new one is there
        final.rename(folder / f"{_ASIDE}{step}.{os.getpid()}")
    draft.rename(final)
    sync_folder(folder)
    write_text(folder / LATEST, final.name)
    if best:
        write_text(folder / BEST, final.name)
    kept = best_checkpoint(folder)
    there = (path for _, path in _numbered(folder, "step-") if path != kept or path == final)
    written = sorted(there, key=lambda path: (path == final, path.stat().st_mtime_ns))
    for old in written[:-keep]:
        _remove(old)
    for prefix in (_DRAFT, _ASIDE):  # those of a process that was killed, too
        for left in folder.glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
    return final


def _remove(path: Path) -> None:
    """Remove a checkpoint; one that is half removed does not look like one."""
    with contextlib.suppress(OSError):
        for name in (MANIFEST, STATE):
            (path / name).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Replace a file's contents: whoever reads it finds the old ones or the new ones, whole."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _numbered(folder: Path, prefix: str) -> Iterator[tuple[int, Path]]:
    for path in folder.glob(f"{prefix}*"):
        number = path.name.removeprefix(prefix).partition(".")[0]
        if number.isdigit():
            yield int(number), path
