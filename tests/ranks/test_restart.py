"""A process that restarts by exec: which file descriptors stay open."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bigtrain.errors import ConfigError
from bigtrain.ranks.restart import RESTART_VARIABLE, Restart, RunNote

PROGRAM = """
import json, os, sys
from bigtrain.ranks.restart import RESTART_VARIABLE, Restart, restart_process

if RESTART_VARIABLE in os.environ:  # the second image
    def is_open(number):
        try:
            os.fstat(number)
        except OSError:
            return False
        return True

    numbers = json.loads(os.environ["OPENED"])
    found = {name: is_open(number) for name, number in numbers.items()}
    print(json.dumps({"pid": os.getpid(), "open": found, "argv": sys.argv[1:]}))
    raise SystemExit

opened = {}
for name in ("driver", "launcher", "word"):
    number = os.open(sys.argv[1], os.O_RDONLY)
    os.set_inheritable(number, True)
    opened[name] = number
os.dup2(opened["word"], 63)  # as a shell hands over <(...)
opened["word"] = 63
os.environ["PMI_FD"] = str(opened["launcher"])
os.environ["OPENED"] = json.dumps(opened)
print(os.getpid(), flush=True)
restart_process(Restart((), "why").text())
"""


def test_files_of_libraries_are_closed_and_those_of_the_launcher_are_not(tmp_path: Path) -> None:
    program, file = tmp_path / "program.py", tmp_path / "file"
    program.write_text(PROGRAM, "utf-8")
    file.write_text("", "utf-8")
    words = [sys.executable, str(program), str(file), "--config", "/dev/fd/63"]
    root = str(Path(__file__).parents[2])
    ran = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, check=True
    )
    first, second = ran.stdout.splitlines()
    report = json.loads(second)
    assert report["pid"] == int(first)
    assert report["open"] == {"driver": False, "launcher": True, "word": True}
    assert report["argv"] == [str(file), "--config", "/dev/fd/63"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "junk", "[]", "5", "{}", "[" * 50_000, '{"words": []}', '{"said": "x"}'),
        *('{"words": "x", "said": ""}', '{"words": [1], "said": ""}', '{"words": [], "said": 5}'),
        '{"words": ["\\ud800"], "said": ""}',
    ],
)
def test_a_variable_that_nobody_of_us_has_left_is_one_line(text: str) -> None:
    environ = {RESTART_VARIABLE: text}
    with pytest.raises(ConfigError, match=rf"^{RESTART_VARIABLE}=.* Run: unset") as caught:
        Restart.taken(environ)
    assert "\n" not in str(caught.value)


def test_what_an_earlier_life_has_left_is_taken() -> None:
    environ = {RESTART_VARIABLE: Restart(("train.steps=3",), "why").text()}
    assert Restart.taken(environ) == Restart(("train.steps=3",), "why")
    assert environ == {}
    assert Restart.taken(environ) is None
    for count, goes_on in (("0", False), ("2", True), ("9" * 5000, False), ("²", False)):
        restart = Restart.taken({"TORCHELASTIC_RESTART_COUNT": count})
        assert (restart is not None) == goes_on


@pytest.mark.parametrize("text", ["", "[]", "[" * 50_000, '{"words": 5}', '{"folder": "x"}', "\0"])
def test_a_note_that_is_none_is_no_note(tmp_path: Path, text: str) -> None:
    (tmp_path / "note.json").write_text(text)
    assert RunNote.find(tmp_path) is None
