"""The distribution: built, installed without anything else, and run from another folder."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.nets import TinyLM, tokens
from support.parity import largest_difference, train
from support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]
SMALL = [
    *("model.args.num_layers=1", "model.args.width=16", "model.args.num_heads=2"),
    *("data.path=corpus.txt", "data.args.sequence_length=16", "data.args.validation_samples=4"),
    *("train.global_batch_size=4", "train.steps=2"),
]
# Importing one of these by mistake fails.
TRAP = "raise SystemExit('the file of the user was imported')\n"


def run(
    command: list[str], folder: Path, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command,
        cwd=folder,
        env={**variables, "OMP_NUM_THREADS": "1", **(environ or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git tracks or would add, with links kept, and without other files."""
    target = tmp_path_factory.mktemp("checkout")
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        if os.path.lexists(ROOT / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


@pytest.fixture(scope="module")
def built(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    done = run([*command, str(checkout)], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> set[str]:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which the installed package, and torch of this environment, can be
    imported.
    """
    target = tmp_path_factory.mktemp("installed")
    (path,) = built.glob("*.whl")
    options = ["--no-deps", "--no-index", "--no-compile", "--quiet", "--target", str(target)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options]
    done = run([*pip, str(path)], target)
    assert done.returncode == 0, done.stderr
    return {"PYTHONPATH": str(target)}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's folder: a text, and files whose names a careless import would find."""
    (tmp_path / "corpus.txt").write_text("how vexingly quick daft zebras jump. " * 100)
    for name in ("strategies", "configs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(TRAP)
    (tmp_path / "profile.py").write_text(TRAP)
    return tmp_path


def test_the_wheel_brings_one_name(wheel):
    assert {name.partition("/")[0] for name in wheel if ".dist-info/" not in name} == {"bigtrain"}


def test_the_wheel_has_every_module_and_preset_and_nothing_else(wheel):
    wanted = {"bigtrain/py.typed"}
    for folder, inside in (("bigtrain", ""), ("strategies", "bigtrain/"), ("configs", "bigtrain/")):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml") and "__pycache__" not in path.parts:
                wanted.add(inside + path.relative_to(ROOT).as_posix())
    assert {name for name in wheel if ".dist-info/" not in name} == wanted
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel)


def test_the_sdist_has_files_where_the_checkout_has_links(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = {m.name.partition("/")[2]: m for m in archive.getmembers()}
    for name in ("README.md", "LICENSE", "setup.py", "pyproject.toml", "bigtrain/py.typed"):
        assert members[name].isfile(), name
    assert members["bigtrain/strategies/ddp.py"].isfile()
    assert members["bigtrain/configs/jobs/default.yaml"].isfile()


def test_the_package_list_is_the_folders_that_are_there():
    calls = [n for n in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if _is_setup(n)]
    (listed,) = [
        ast.literal_eval(k.value) for c in calls for k in c.keywords if k.arg == "packages"
    ]
    packages = {"bigtrain"}
    for folder, first in (
        ("bigtrain", ()),
        ("strategies", ("bigtrain",)),
        ("configs", ("bigtrain",)),
    ):
        for path in (ROOT / folder).rglob("__init__.py"):
            packages.add(".".join((*first, *path.parent.relative_to(ROOT).parts)))
    assert sorted(listed) == listed
    assert set(listed) == packages


def _is_setup(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "setup"


def test_the_installed_command_runs_from_anywhere(installed, home):
    code = "import bigtrain; print(bigtrain.__file__)"
    assert run([sys.executable, "-c", code], home, installed).stdout.startswith(*installed.values())
    # A console script does not put the current folder on the path, so profile.py may exist there.
    script = str(Path(installed["PYTHONPATH"]) / "bin" / "bigtrain")
    done = run([sys.executable, script, "strategies"], home, installed)
    assert "\n  ddp " in done.stdout, done.stderr


def test_the_installed_engine_is_not_misled_by_folders_of_the_user(installed, home):
    (home / "profile.py").unlink()  # `python -m` puts the current folder first, also for torch
    code = "import bigtrain.strategies.ddp as d; print(d.__file__)"
    done = run([sys.executable, "-c", code], home, installed)
    assert done.stdout.startswith(installed["PYTHONPATH"]), done.stderr
    done = run([sys.executable, "-m", "bigtrain", "train", "--dry-run", *SMALL], home, installed)
    assert done.returncode == 0, done.stderr
    assert "predicted peak: " in done.stdout


def test_the_script_of_a_bare_checkout_runs_from_anywhere(checkout, home, tmp_path):
    copy = tmp_path / "bare"
    shutil.copytree(checkout / "bigtrain", copy / "bigtrain", symlinks=True)
    for name in ("strategies", "configs"):
        shutil.copytree(checkout / name, copy / name)
    text = (copy / "bigtrain" / "job" / "arguments.py").read_text()
    (copy / "bigtrain" / "job" / "arguments.py").write_text(
        text.replace("the memory it takes", "what COPY took")
    )
    (copy / "bigtrain" / "profile.py").write_text(TRAP)
    done = run([sys.executable, str(copy / "bigtrain" / "train.py"), "--help"], home)
    assert done.returncode == 0, done.stderr
    assert "what COPY took" in done.stdout
    done = run([sys.executable, str(copy / "bigtrain" / "train.py"), "--dry-run", *SMALL], home)
    assert done.returncode == 0, done.stderr
    assert "predicted peak: " in done.stdout


def test_the_example_of_the_contributing_page_runs(tmp_path, monkeypatch):
    """The strategy as printed: imported by its path, it equals one process."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for language, name in (("python", "mymodule.py"), ("yaml", "path.yaml")):
        block = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)[0]
        (tmp_path / name).write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    keys = {"train.precision": "fp64", "train.micro_batch_size": 2}
    (single,) = run_ranks(train, 1, TinyLM, tokens(22), "single", keys)
    strategy_file = str(tmp_path / "path.yaml")
    for record in run_ranks(train, 2, TinyLM, tokens(22), strategy_file, keys):
        assert largest_difference(single, record) < 1e-10
    for record in run_ranks(
        train, 4, TinyLM, tokens(22), f"1f1b+{strategy_file}", {**keys, "mesh.pp": 2}, pp=2
    ):
        assert largest_difference(single, record) < 1e-10


def test_what_surrounds_micro_batches_is_refused_in_a_pipeline() -> None:
    with pytest.raises(AssertionError, match="surrounds sets Assembly.sync.* set Assembly.average"):
        run_ranks(train, 4, TinyLM, tokens(22), "1f1b", SURROUNDS, pp=2)


SURROUNDS = {"mesh.pp": 2, "strategy.replicate": "support.odd_strategies:Surrounds"}


def test_no_benchmark_is_named_as_a_folder_that_git_ignores():
    """Files that a run leaves there would change the classification and order of imports."""
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text("utf-8").split()}
    assert "runs" in ignored
    assert not ignored & {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
