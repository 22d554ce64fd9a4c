"""Only regular files are read, and no read blocks."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from bigtrain.errors import ConfigError, UnreadableError
from bigtrain.files import regular


def odd(folder: Path, kind: str) -> Path:
    """Make something that is not a regular file, as `folder/odd`."""
    path = folder / "odd"
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "a loop":
        path.symlink_to("odd")
    return path


KINDS = {
    "a folder": "it is a folder, and a file is needed",
    "a pipe": "it is a pipe, and a file is needed",
    "a socket": "No such device or address",
    "a device": "it is a device, and a file is needed",
    "a loop": "Too many levels of symbolic links",
    "nothing": "No such file or directory",
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = odd(tmp_path, kind)
    for read in (regular.open_regular, regular.read_bytes, regular.read_text):
        with pytest.raises(UnreadableError) as caught:
            read(path, "Give another one.")
        assert str(caught.value) == f"{path} cannot be read: {KINDS[kind]}. Give another one."
        assert caught.value.missing == (kind == "nothing")
        assert caught.value.system
        assert isinstance(caught.value, ConfigError)
        assert caught.value.exit_status == 2
    assert regular.read_pointer(path) == ""
    assert not regular.is_regular(path)


def test_a_reading_error_names_the_file(tmp_path: Path) -> None:
    link = tmp_path / "memory"
    link.symlink_to("/proc/self/mem")  # reading its first byte fails with EIO
    with pytest.raises(UnreadableError, match=r"memory cannot be read: Input/output error"):
        regular.read_bytes(link)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a\0b", "its name has a NUL character"),
        ("a\ud800", "its name has half of a character"),
        ("a" * 300, "File name too long"),
        ("a/" * 3000, "File name too long"),
    ],
)
def test_names_that_no_file_has(name: str, reason: str) -> None:
    with pytest.raises(UnreadableError) as caught:
        regular.open_regular(name)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert not regular.is_there(name)
    assert not regular.is_regular(name)
    with pytest.raises(UnreadableError, match="key=.* is no path: it has .*Give another one"):
        regular.check_name(name, "key")
    str(caught.value).encode()


def test_names_that_files_have(tmp_path: Path) -> None:
    for name in ("a" * 255, "ü" * 127, "a b", os.fsdecode(b"\xff\xfe"), "a\nb"):
        regular.check_name(name, "key")
        (tmp_path / name).write_text("x")
        assert regular.read_text(tmp_path / name) == "x"
    assert regular.names_in(tmp_path) == sorted(os.listdir(tmp_path))
    assert regular.names_in(tmp_path / "nothing") == []
    with pytest.raises(UnreadableError, match="Not a directory"):
        regular.names_in(tmp_path / "a b")


def test_a_file_with_more_bytes_than_may_be_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10)
    assert regular.read_bytes(path, most=10) == b"x" * 10
    with pytest.raises(UnreadableError, match="it has more than 9 bytes, the most allowed"):
        regular.read_bytes(path, most=9)
    os.truncate(path, 1 << 40)  # a sparse file: at most one byte beyond the limit is read
    with pytest.raises(UnreadableError, match="it has more than 67,108,864 bytes"):
        regular.read_bytes(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UnreadableError, match="it is not UTF-8 text"):
        regular.read_text(path)


def test_what_may_not_be_looked_at_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(code: int) -> None:
        def stat(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "stat", stat)

    for code in (errno.EACCES, errno.EIO, errno.ELOOP, errno.ESTALE):
        refuse(code)
        assert regular.is_there("x")
    for code in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
        refuse(code)
        assert not regular.is_there("x")


def test_a_pointer_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    for text, expected in ((b"step-4\n", "step-4"), (b"\n a\nb", "a"), (b"\0", ""), (b"", "")):
        path.write_bytes(text)
        assert regular.read_pointer(path) == expected
    path.write_bytes(b"a" * 5000)
    assert regular.read_pointer(path) == ""
