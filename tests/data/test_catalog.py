"""Data sources by name or import path: listed ones, a user's functions and classes, refusals."""

import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bigtrain.data import SOURCES, Data, check_data, open_data, prepare_data
from bigtrain.data.source import TensorSamples
from bigtrain.errors import ConfigError
from bigtrain.losses.tasks import ClassificationTask


@pytest.fixture
def mine(monkeypatch):
    """A user's module with data sources."""
    module = types.ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", module)

    def numbers(path, *, seed, sequence_length, rows: int = 4, strange: "Unknown" = None):  # noqa: F821
        samples = TensorSamples(torch.full((rows, 1), float(seed)), torch.zeros(rows).long())
        return Data(samples, None, ClassificationTask(2), description=f"{path} {sequence_length}")

    def plain(rows: int):
        return numbers(None, seed=0, sequence_length=None, rows=rows)

    def anything(**options):
        return numbers(None, seed=len(options), sequence_length=None)

    @dataclass
    class Own:
        path: Path | None = None
        rows: int = 2

        def check(self):
            raise ConfigError(f"checked {self.rows}")

        def prepare(self):
            raise ConfigError(f"prepared {self.rows}")

        def open(self, *, seed, sequence_length):
            return numbers(self.path, seed=seed, sequence_length=sequence_length, rows=self.rows)

    def empty():
        return Data(TensorSamples(torch.ones(0), torch.ones(0)), None, ClassificationTask(2))

    module.numbers, module.plain, module.anything, module.Own = numbers, plain, anything, Own
    module.nothing, module.empty, module.constant = (lambda: 5), empty, 3
    return module


def test_importing_data_imports_no_source():
    script = (
        "import sys, bigtrain.data; "
        "print([m for m in ('torchvision', 'sklearn', 'PIL') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", SOURCES)
def test_every_listed_source_is_there(name):
    with pytest.raises(ConfigError, match=r"data\.args\.zzz: .* no such argument\. It takes: "):
        check_data(name, None, {"zzz": 1})


@pytest.mark.usefixtures("mine")
def test_a_users_function_gets_what_it_names():
    data = open_data("mine:numbers", "~/here", {"rows": "3"}, seed=7, sequence_length=5)
    assert (len(data.train), data.description) == (3, "~/here 5")
    assert data.train[2][0].item() == 7
    assert len(open_data("mine:plain", None, {"rows": 6}, seed=7).train) == 6
    assert open_data("mine:anything", None, {"a": 1}, seed=7).train[0][0].item() == 4
    check_data("mine:numbers", None, {"strange": object()})
    prepare_data("mine:numbers", None, {})


@pytest.mark.usefixtures("mine")
def test_a_users_class_is_a_source():
    data = open_data("mine:Own", "~", {"rows": 3}, seed=1)
    assert data.description == f"{Path.home()} None"
    with pytest.raises(ConfigError, match="checked 2"):
        check_data("mine:Own", None, {})
    with pytest.raises(ConfigError, match="prepared 5"):
        prepare_data("mine:Own", None, {"rows": 5})


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("txet", {}, r"data\.name: unknown source 'txet', did you mean 'text'\?.*Known: cifar10, "),
        ("zzzz", {}, r"unknown source 'zzzz'\. Known: .*your own as package\.module:function"),
        ("nowhere.at_all:x", {}, r"data\.name=nowhere\.at_all:x: no module named 'nowhere'"),
        (":x", {}, r"data\.name=':x' is not an import path"),
        ("mine:numberz", {}, r"mine has no 'numberz', did you mean 'numbers'\?"),
        ("mine:constant", {}, r"data\.name=mine:constant is a .*, which cannot be called"),
        ("mine:numbers", {"row": 1}, r"data\.args\.row: .*did you mean 'rows'\?.*It takes: seq"),
        ("mine:numbers", {"seed": 1}, r"data\.args\.seed: mine:numbers has no such argument"),
        ("mine:anything", {"seed": 1}, r"data\.args\.seed: mine:anything has no such argument"),
        ("mine:plain", {}, r"data\.args\.rows is missing: mine:plain needs it"),
        ("mine:plain", {"rows": "x"}, r"data\.args\.rows: needs a whole number .got 'x'"),
        ("mine:nothing", {}, r"mine:nothing returned a int, and a bigtrain\.data\.Data is needed"),
        ("mine:empty", {}, r"mine:empty has no samples in train .*, at least 1"),
        ("text", {"sequence_lenght": 5}, r"did you mean 'sequence_length'\?"),
        ("text", {"sequence_length": 0}, r"sequence_length: .*needs 1 or more \(got 0"),
        ("text", {"validation_fraction": 1.0}, r"validation_fraction: .*less than 1 \(got 1\.0\)"),
        ("voc", {"year": "2013"}, r"data\.args\.year: needs '2007'"),
        ("synthetic", {"kind": "sound"}, r"data\.args\.kind: needs 'classification'"),
    ],
)
def test_what_is_wrong_is_named_with_its_key(name, args, message):
    with pytest.raises(ConfigError, match=message):
        open_data(name, None, args, seed=0)
