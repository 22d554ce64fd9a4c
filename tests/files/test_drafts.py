"""Cache files are complete or absent, rebuilt if damaged, and drafts of dead processes are
removed.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from bigtrain.errors import UnreadableError
from bigtrain.files import drafts
from bigtrain.files.drafts import read_cache, remove_left_drafts, write_cache


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "_SAID", set())
    for name in ("RANK", "SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "[" * 100_000, '{"a": 1, "a": 2}', "\0\0", '{"a": "\\ud800"}']
)
def test_a_damaged_cache_is_said_once_and_made_anew(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rates.json"
    path.write_text(text)
    assert read_cache(path) == read_cache(path) == {}
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert errors.startswith(f"bigtrain: {path} is damaged (")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(drafts, "_SAID", set())
    assert read_cache(path) == {}
    assert capsys.readouterr().err == ""
    write_cache(path, {"b": 1})
    assert read_cache(path) == {"b": 1}
    assert [one.name for one in tmp_path.iterdir()] == ["rates.json"]


def test_there_is_no_cache_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert read_cache(tmp_path / "deep" / "rates.json") == {}
    write_cache(tmp_path / "deep" / "rates.json", {"a": [1]}, indent=1)
    assert json.loads((tmp_path / "deep" / "rates.json").read_text()) == {"a": [1]}
    assert capsys.readouterr().err == ""


def test_what_the_system_does_not_give_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "rates.json").mkdir()
    with pytest.raises(UnreadableError, match="it is a folder, and a file is needed"):
        read_cache(tmp_path / "rates.json")


@pytest.mark.parametrize("where", ["write", "replace"])
def test_a_cache_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    path = tmp_path / "rates.json"
    write_cache(path, {"a": 1})

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    if where == "replace":
        monkeypatch.setattr(os, "replace", refuse)
        with pytest.raises(OSError, match="Read-only"):
            write_cache(path, {"a": 2})
    else:
        with pytest.raises(TypeError):
            write_cache(path, {"a": object()})
        with suppress(ZeroDivisionError), drafts.replacing_file(path) as file:
            file.write(b"half")
            raise ZeroDivisionError
    assert [one.name for one in tmp_path.iterdir()] == ["rates.json"]
    assert read_cache(path) == {"a": 1}


def test_drafts_of_the_dead_are_removed_and_those_of_the_living_stay(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom bigtrain.files.drafts import replacing_file\n"
        "with replacing_file(Path(sys.argv[1])) as file:\n    file.write(b'half')\n"
        "    print('begun', flush=True)\n    input()\n"
    )
    path = tmp_path / "rates.json"
    begun = []
    for _ in range(2):
        writer = subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"begun\n"
        begun.append(writer)
    assert len(list(tmp_path.iterdir())) == 2
    begun[0].kill()
    begun[0].communicate()
    remove_left_drafts(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    begun[1].communicate(b"\n")
    assert [writer.name for writer in tmp_path.iterdir()] == ["rates.json"]
    assert path.read_bytes() == b"half"


def test_drafts_of_earlier_versions_go_after_a_day(tmp_path: Path) -> None:
    names = ("rates-abcdef_1", "blocks-12345678", f".text-{'0' * 24}.bin.abcdefgh")
    kept_files = ("rates.json", "rates-of-mine", ".text-notes", "text-0.bin")
    for name in (*names, *kept_files):
        (tmp_path / name).write_text("x")
    remove_left_drafts(tmp_path)
    assert len(list(tmp_path.iterdir())) == len(names) + len(kept_files)
    for name in (*names, *kept_files):
        os.utime(tmp_path / name, (time.time() - 90_000,) * 2)
    remove_left_drafts(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept_files)
