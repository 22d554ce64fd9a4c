"""Which names a library has, and in which versions: reported, or refused if one is missing."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest

from bigtrain.errors import ConfigError
from bigtrain.machine import libraries
from bigtrain.machine.libraries import ForeignLibrary, foreign_names

BASE = """
class Base:
    def __init__(self):
        self.inherited = 1
"""
INSIDE = """
from borrowed.base import Base
function = None
class Child(Base):
    table = {}
    @staticmethod
    def made(self):
        def later():
            self.nested = 1
        later()
    @property
    def seen(self):
        return self.only_read
"""
NAMES = {
    "borrowed.inside": True,
    "borrowed.inside.function": True,
    "borrowed.inside.Child.table": True,
    "borrowed.inside.Child.inherited": True,
    "borrowed.inside.Child.nested": True,
    "borrowed.other": False,
    "borrowed.inside.Absent": False,
    "borrowed.inside.Child.absent": False,
    "borrowed.inside.Child.inherited.deeper": False,
    "borrowed.inside.function.absent": False,
}


@pytest.fixture
def borrowed(tmp_path, monkeypatch) -> ForeignLibrary:
    """A library of two modules that is not imported yet."""
    package = tmp_path / "borrowed"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "base.py").write_text(BASE)
    (package / "inside.py").write_text(INSIDE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    libraries._missing.cache_clear()
    return ForeignLibrary("borrowed", "1.2.0", "1.4", ())


def test_a_name_is_there_if_code_of_its_class_names_it(borrowed):
    names = [foreign_names("read", "try", *path.rpartition(".")[::2])[0] for path in NAMES]
    library = replace(borrowed, names=tuple(names))
    assert library.missing_names() == [path for path, is_there in NAMES.items() if not is_there]


@pytest.mark.parametrize(
    ("version", "is_told"),
    [
        *(("1.2.0", False), ("1.2", False), ("1.3.99", False), ("1.3.0+cpu", False)),
        *(("1.1.9", True), ("1.4", True), ("1.4.0rc1", True), ("1.10", True), (None, False)),
    ],
)
def test_a_version_that_was_not_seen_is_told_in_a_line(borrowed, version, is_told, monkeypatch):
    monkeypatch.setattr(libraries, "installed_version", lambda _name: version)
    line = borrowed.warning()
    assert (line is not None) == is_told
    if line is not None:
        assert line.startswith(
            f"borrowed {version} is installed and was never tested with bigtrain:"
        )
        assert line.endswith('If it fails: `pip install "borrowed>=1.2.0,<1.4"`.')
        assert "\n" not in line


def test_a_missing_name_is_refused_with_the_version_and_the_way_out(borrowed, monkeypatch):
    monkeypatch.setattr(libraries, "installed_version", lambda _name: "1.5.1")
    present = foreign_names("read", "look", "borrowed.inside", "function Child")
    gone = foreign_names("replace", "do it faster", "borrowed.inside", "slow slower")
    replace(borrowed, names=tuple(present)).refuse_missing("key=value", "do without")
    words = (
        r"^key=value: borrowed 1\.5\.1 has no borrowed\.inside\.slow \(nor 1 more\), which is "
        r"needed \(replace: do it faster\)\. borrowed>=1\.2\.0,<1\.4 was tested\. "
        r"Run `pip install \"borrowed>=1\.2\.0,<1\.4\"`, or do without\.$"
    )
    with pytest.raises(ConfigError, match=words):
        replace(borrowed, names=(*present, *gone)).refuse_missing("key=value", "do without")
