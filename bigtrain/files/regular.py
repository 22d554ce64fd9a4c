"""Files and folders, opened so that nothing but a regular file is waited for.

A pipe without a writer would be waited for without end, and so would some devices. So each file is
opened without waiting and looked at before the first byte of it is read.
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
"""Bytes of a file that is read as a whole, where nothing else is said."""
MOST_LINES = 1 << 36
"""Bytes of one that grows with every step of a run, or with the model."""


def open_regular(path: str | os.PathLike[str], fix: str = "") -> FileIO:
    """Open a file to read its bytes, without a buffer.

    Args:
        path: of a regular file, or of a link to one.
        fix: what helps, as a sentence, for the message.

    Raises:
        UnreadableError: it is not there, is something else, or may not be read.
    """
    try:
        # Neither a pipe without a writer nor a terminal is waited for, or taken over.
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
    """All bytes of a file.

    Args:
        path: of the file.
        fix: what helps, as a sentence.
        most: a file with more bytes is refused.

    Raises:
        UnreadableError: it is longer, or see `open_regular`.
    """
    with open_regular(path, fix) as file:
        parts: list[bytes] = []
        left = most + 1  # by what is read: a file in /proc says that it has no bytes
        while left:
            try:
                part = file.read(min(left, 1 << 20))
            except OSError as error:
                raise unreadable(path, error, fix) from None
            if not part:
                return b"".join(parts)
            parts.append(part)
            left -= len(part)
    raise UnreadableError(path, f"it has more than {most:,} bytes, which are the most", fix)


def read_text(
    path: str | os.PathLike[str], fix: str = "", most: int = MOST_TEXT, errors: str = "strict"
) -> str:
    """All of a file as UTF-8.

    Args:
        path: of the file.
        fix: what helps, as a sentence.
        most: bytes; a file with more is refused.
        errors: what is done with other bytes than UTF-8's; see `bytes.decode`.

    Raises:
        UnreadableError: it is not UTF-8, or see `read_bytes`.
    """
    try:
        return read_bytes(path, fix, most).decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise UnreadableError(path, f"it is not UTF-8 text ({error.reason})", fix) from None


def is_there(path: str | os.PathLike[str]) -> bool:
    """Whether there is anything of this name, also where it may not be looked at."""
    try:
        os.stat(path)
    except ValueError:
        return False
    except OSError as error:
        return error.errno not in (*_ABSENT, errno.ENAMETOOLONG)
    return True


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Whether there is a file of this name that can be looked at."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def names_in(folder: str | os.PathLike[str], fix: str = "") -> list[str]:
    """The names in a folder, in their order; none where there is no folder.

    Raises:
        UnreadableError: it is something else, or may not be read.
    """
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise unreadable(folder, error, fix) from None


def read_pointer(path: str | os.PathLike[str]) -> str:
    """The first line of a small file that names another; empty where it cannot be read."""
    try:
        text = read_text(path, most=4096, errors="replace")
    except UnreadableError:
        return ""
    return (text.strip().splitlines() or [""])[0].replace("\0", "")


def check_name(text: str, asked: str) -> None:
    """Refuse a path that no file can have.

    Args:
        text: the path.
        asked: the key or option that it is given by.

    Raises:
        UnreadableError: with the key and what is wrong with it.
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
                fault = f"it has a name of {longest} bytes, and 255 are the most"
            elif len(os.fsencode(text)) > 4095:
                fault = f"it has {len(os.fsencode(text))} bytes, and 4095 are the most"
    if fault is not None:
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        raise UnreadableError(
            asked, fault, said=f"{asked}={shown!a} is no path: {fault}. Give another one."
        )


def unreadable(
    path: str | os.PathLike[str], error: OSError | ValueError, fix: str = ""
) -> UnreadableError:
    """What the system says of a path, as the one error."""
    if isinstance(error, OSError):
        reason = error.strerror or str(error) or type(error).__name__
        missing = error.errno in _ABSENT
        return UnreadableError(path, reason, fix, missing=missing, system=True)
    reason = "its name has a NUL character"
    if isinstance(error, UnicodeError):
        reason = "its name has half of a character (a lone surrogate)"
    return UnreadableError(path, reason, fix)


def _kind(mode: int) -> str:
    return next((said for test, said in _KINDS if test(mode)), "no file")
