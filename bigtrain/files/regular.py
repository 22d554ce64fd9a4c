"""Open and read regular files only, without ever waiting for another kind of file.

To read a pipe without a writer, or some devices, would block forever. So each file is opened
without blocking, and its kind is checked before its first byte is read.
"""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO

from bigtrain.errors import UnreadableError

_ABSENT = (errno.ENOENT, errno.ENOTDIR)
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
MOST_TEXT = 64 << 20
"""The default limit in bytes for a file that is read as a whole."""
MOST_LINES = 1 << 36
"""The limit in bytes for a file that grows with every step of a run, or with the model."""


def open_regular(path: str | os.PathLike[str], fix: str = "") -> FileIO:
    """Open a regular file to read its bytes, without a buffer.

    Args:
        path: the path of a regular file, or of a link to a regular file.
        fix: advice for the message, as a sentence.

    Raises:
        UnreadableError: the file is missing, is not a regular file, or may not be read.
    """
    try:
        # Do not wait for a pipe without a writer, and do not take over a terminal.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError) as error:
        raise unreadable(path, error, fix) from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            reason = f"it is {_kind(mode)}, and a file is needed"
            raise UnreadableError(path, reason, fix, system=True)
        return FileIO(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: str | os.PathLike[str], fix: str = "", most: int = MOST_TEXT) -> bytes:
    """Return all bytes of a file.

    Args:
        path: the path of the file.
        fix: advice for the message, as a sentence.
        most: limit in bytes; a larger file is refused.

    Raises:
        UnreadableError: the file is larger than `most`; see also `open_regular`.
    """
    with open_regular(path, fix) as file:
        parts: list[bytes] = []
        left = most + 1  # count the bytes read: a file in /proc reports a size of zero
        while left:
            try:
                part = file.read(min(left, 1 << 20))
            except OSError as error:
                raise unreadable(path, error, fix) from None
            if not part:
                return b"".join(parts)
            parts.append(part)
            left -= len(part)
    raise UnreadableError(path, f"it has more than {most:,} bytes, the most allowed", fix)


def read_text(
    path: str | os.PathLike[str], fix: str = "", most: int = MOST_TEXT, errors: str = "strict"
) -> str:
    """Return the whole content of a file as text.

    Args:
        path: the path of the file.
        fix: advice for the message, as a sentence.
        most: limit in bytes; a larger file is refused.
        errors: the treatment of bytes that are not UTF-8; see `bytes.decode`.

    Raises:
        UnreadableError: the file is not UTF-8; see also `read_bytes`.
    """
    try:
        return read_bytes(path, fix, most).decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise UnreadableError(path, f"it is not UTF-8 text ({error.reason})", fix) from None


def is_there(path: str | os.PathLike[str]) -> bool:
    """Whether something exists at a path; also true if the system denies the access to it."""
    try:
        os.stat(path)
    except ValueError:
        return False
    except OSError as error:
        return error.errno not in (*_ABSENT, errno.ENAMETOOLONG)
    return True


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Whether a regular file of this name exists and can be inspected."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def names_in(folder: str | os.PathLike[str], fix: str = "") -> list[str]:
    """Return the sorted names in a folder; an empty list if the path does not exist.

    Args:
        folder: the path of the folder.
        fix: advice for the message, as a sentence.

    Raises:
        UnreadableError: the path is not a folder, or may not be read.
    """
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise unreadable(folder, error, fix) from None


def read_pointer(path: str | os.PathLike[str]) -> str:
    """Return the first line of a file of at most 4096 bytes, which names another file.

    Empty if the file cannot be read.
    """
    try:
        text = read_text(path, most=4096, errors="replace")
    except UnreadableError:
        return ""
    return (text.strip().splitlines() or [""])[0].replace("\0", "")


def check_name(text: str, asked: str) -> None:
    """Refuse a path that no file can have.

    Args:
        text: the path.
        asked: the job key or command option whose value is the path, for the message.

    Raises:
        UnreadableError: the path has a character that is not allowed, or is too long. The message
            names the key and the reason.
    """
    fault = None
    if "\0" in text:
        fault = "it has a NUL character"
    else:
        try:
            longest = max(map(len, os.fsencode(text).split(b"/")))
        except UnicodeEncodeError:
            fault = "it has half of a character (a lone surrogate)"
        else:
            if longest > 255:
                fault = f"it has a name of {longest} bytes, and at most 255 are allowed"
            elif len(os.fsencode(text)) > 4095:
                fault = f"it has {len(os.fsencode(text))} bytes, and at most 4095 are allowed"
    if fault is not None:
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        raise UnreadableError(
            asked, fault, said=f"{asked}={shown!a} is no path: {fault}. Give another one."
        )


def unreadable(
    path: str | os.PathLike[str], error: OSError | ValueError, fix: str = ""
) -> UnreadableError:
    """Return an error of the operating system as an `UnreadableError`.

    Args:
        path: the path of the file or folder.
        error: the error that the system, or Python, raised for the path.
        fix: advice for the message, as a sentence.
    """
    if isinstance(error, OSError):
        reason = error.strerror or str(error) or type(error).__name__
        missing = error.errno in _ABSENT
        return UnreadableError(path, reason, fix, missing=missing, system=True)
    reason = "its name has a NUL character"
    if isinstance(error, UnicodeError):
        reason = "its name has half of a character (a lone surrogate)"
    return UnreadableError(path, reason, fix)


def _kind(mode: int) -> str:
    return next((words for test, words in _KINDS if test(mode)), "no file")
