"""The folder of a run's checkpoints: listing, finding the newest, publishing and removing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bigtrain.checkpoint.manifest import MANIFEST, STATE, Manifest
from bigtrain.errors import CheckpointError, ConfigError, UnreadableError
from bigtrain.files.regular import check_name, is_regular, is_there, names_in, read_pointer

LATEST, BEST = "latest", "best"
"""Names of small files next to the checkpoints; each contains the name of a checkpoint's folder."""
_LOCK = ".lock"
_DRAFT, _ASIDE = ".step-", ".replaced-"


def checkpoints_of(folder: Path) -> list[Path]:
    """Return the completely written checkpoints of a folder, the newest first.

    The first is the checkpoint that `latest` points at; the others follow by descending step. If a
    process ended while it replaced a checkpoint by another of the same step, the old checkpoint is
    included. Files are not checked for damage.

    Raises:
        CheckpointError: the folder exists, but may not be read.
    """
    numbered = {number: path for number, path in _numbered(folder, "step-") if is_complete(path)}
    for number, path in _numbered(folder, _ASIDE):
        if number not in numbered and is_complete(path):
            numbered[number] = path
    checkpoints = [numbered[number] for number in sorted(numbered, reverse=True)]
    latest = folder / read_pointer(folder / LATEST)
    checkpoints.sort(key=lambda path: path != latest)
    return checkpoints


@contextlib.contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Lock a folder so that no other process saves into it. The lock ends with the process.

    Raises:
        ConfigError: another process holds the lock.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:  # the save itself will report the error
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
        os.pwrite(descriptor, _own_words().encode(), 0)
        yield
    finally:
        os.close(descriptor)


def has_own_lock(folder: Path) -> bool:
    """Whether the lock of `sole_writer` names this process; not if the folder was removed."""
    return read_pointer(folder / _LOCK) == _own_words()


def _own_words() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def is_complete(path: Path) -> bool:
    """Whether a checkpoint was written completely. Its files are not checked for damage.

    A checkpoint that may not be read counts as complete, so that reading it reports the error.
    """
    return is_there(path / MANIFEST) or is_there(path / STATE)


def newest_checkpoint(folder: str | Path) -> Path | None:
    """Return the newest checkpoint in a folder; None if it has no complete checkpoint.

    It is the checkpoint that `latest` points at, else the checkpoint of the highest step.

    Args:
        folder: the folder that holds the folders `step-N`.

    Raises:
        ConfigError: `folder` is not a path.
        CheckpointError: the folder exists, but may not be read.
    """
    return next(iter(checkpoints_of(as_folder(folder, "newest_checkpoint"))), None)


def as_folder(path: Any, where: str) -> Path:
    """Return a folder that was given as a path or as text.

    Args:
        path: the value.
        where: the name of the function or key that was given the value, for the message.

    Raises:
        ConfigError: the value is neither, or no folder can have that name.
    """
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        shown = "an empty name" if path == "" else f"a {type(path).__name__}"
        raise ConfigError(
            f'{where}: got {shown}, and the path of a folder is needed, as "checkpoints".'
        )
    check_name(os.fspath(path), where)
    return Path(path)


def best_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that `best` points at; None if it points at no complete checkpoint."""
    name = read_pointer(folder / BEST)
    path = folder / name
    return path if name and path.parent == folder and is_complete(path) else None


def find_checkpoint(path: str) -> Path:
    """Find a checkpoint by its own folder, its run's folder, or the `checkpoints/` folder.

    Of a folder with several checkpoints, the newest is returned. The files `checkpoints/best` and
    `checkpoints/latest` stand for the checkpoints that they name.

    Raises:
        ConfigError: there is no checkpoint, or no file can have that name.
        CheckpointError: the folder exists, but may not be read.
    """
    check_name(path, "checkpoint.resume")
    candidate = Path(path)
    if is_regular(candidate) and candidate.name in (LATEST, BEST):
        candidate = candidate.parent / read_pointer(candidate)
    if is_complete(candidate):
        return candidate
    for folder in (candidate, candidate / "checkpoints"):
        newest = newest_checkpoint(folder)
        if newest is not None:
            return newest
    theirs = ""
    if is_there(path):
        theirs = (
            " Convert one of another library, or weights alone, with: bigtrain checkpoint "
            f"convert {path} TARGET"
        )
    raise ConfigError(
        f"checkpoint.resume: there is no checkpoint at {path!r}. "
        f"Give a folder that holds {STATE}, a run's folder, or auto.{theirs}"
    )


def draft_folder(folder: Path, step: int) -> Path:
    """Make a new folder in which the checkpoint of a step is written.

    Raises:
        OSError: the folder cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{_DRAFT}{step}.{os.getpid()}-{os.urandom(4).hex()}"
    draft.mkdir()
    return draft


def publish(draft: Path, step: int, keep: int, *, best: bool = False) -> Path:
    """Rename a draft to its final name, point `latest` at it, and remove the oldest checkpoints.

    Args:
        draft: the folder of a whole checkpoint.
        step: optimizer steps done.
        keep: the number of most recently written checkpoints to keep, including this one. After a
            resume from an older step, these are not always the checkpoints with the highest
            numbers. The best checkpoint is always kept. A checkpoint that lacks files does not
            count; it is kept as long as an older complete checkpoint is kept.
        best: whether to point `best` at the checkpoint, too.

    Returns:
        The checkpoint's folder.
    """
    folder = draft.parent
    final = folder / f"step-{step}"
    sync_folder(draft)
    # After a resume the same step is saved again. The old checkpoint is removed only after the new
    # checkpoint has its name.
    if final.exists():
        final.rename(folder / f"{_ASIDE}{step}.{os.getpid()}")
    draft.rename(final)
    sync_folder(folder)
    write_text(folder / LATEST, final.name)
    if best:
        write_text(folder / BEST, final.name)
    best_path = best_checkpoint(folder)
    published = (
        path for _, path in _numbered(folder, "step-") if path != best_path or path == final
    )
    written = sorted(published, key=lambda path: (path == final, path.stat().st_mtime_ns))
    for old in written[: _first_kept(written, keep)]:
        _remove(old)
    for prefix in (_DRAFT, _ASIDE):  # including those of processes that were killed
        for left in folder.glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
    return final


def _first_kept(written: Sequence[Path], keep: int) -> int:
    """Return the index of the first checkpoint to keep, so that `keep` of them look complete."""
    missing, index = keep - 1, len(written) - 1
    while missing and index:
        index -= 1
        missing -= _looks_whole(written[index])
    return index if not missing else 0


def _looks_whole(path: Path) -> bool:
    try:
        return Manifest.open(path).looks_whole
    except CheckpointError:
        return False


def _remove(path: Path) -> None:
    """Remove a checkpoint, first the files without which its folder is no checkpoint."""
    with contextlib.suppress(OSError):
        for name in (MANIFEST, STATE):
            (path / name).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def write_text(path: Path, text: str | bytes) -> None:
    """Replace a file's content atomically: a reader gets either all old or all new bytes."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("wb") as file:
        file.write(text.encode() if isinstance(text, str) else text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def sync_folder(folder: Path) -> None:
    """Flush a folder's directory entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _numbered(folder: Path, prefix: str) -> Iterator[tuple[int, Path]]:
    """Yield the number and the path of each entry whose name is the prefix and a number.

    Raises:
        CheckpointError: the folder exists, but may not be read.
    """
    try:
        names = names_in(folder)
    except UnreadableError as error:
        if error.missing:  # the path leads through a file
            return
        raise CheckpointError(
            f"{folder} cannot be searched for checkpoints: {error.reason}. Make it readable, or "
            "use another log.name."
        ) from None
    for name in names:
        number = name.removeprefix(prefix).partition(".")[0]
        if name.startswith(prefix) and number.isascii() and number.isdecimal():
            yield int(number), folder / name


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a name for a draft, which is renamed to `target` when the block ends without an error.

    Args:
        target: the file or folder to write. A folder has to be new or empty.

    Raises:
        CheckpointError: `target` could not be written. The draft is removed.
    """
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    _remove_draft(draft)  # of a process with the same number that was killed, as in a container
    try:
        yield draft
        draft.replace(target)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError
        raise CheckpointError(f"{target} could not be written: {error}") from None
    finally:
        _remove_draft(draft)


def _remove_draft(path: Path) -> None:
    """Remove a file or a folder; do nothing if there is none."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
