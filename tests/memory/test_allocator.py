"""Processes without a GPU use tcmalloc or tbbmalloc, unless the user decides otherwise."""

import ctypes.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bigtrain.memory import allocator
from bigtrain.memory.allocator import (
    allocator_environ,
    find_allocator,
    return_large_blocks,
    start_with_allocator,
)
from bigtrain.memory.host_memory import proc_status_bytes
from bigtrain.ranks import launch
from bigtrain.units import MIB


@pytest.fixture
def installed(monkeypatch):
    """A machine without a GPU on which tcmalloc is installed; the user has set no variable."""
    known = {"tcmalloc_minimal": "libtcmalloc_minimal.so.4"}
    monkeypatch.setattr(allocator.ctypes.util, "find_library", known.get)
    monkeypatch.setattr(allocator, "_GPU_DRIVERS", ())
    for name in [n for n in os.environ if n.startswith("MALLOC_") or n == "LD_PRELOAD"]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    return known


def test_started_ranks_get_it_and_the_starting_process_is_as_before(installed, tmp_path):
    before = dict(os.environ)
    environ = launch._RestartingRun([], tmp_path, launch._Signals(), 0, 2)._environ(2, 0)
    assert environ["LD_PRELOAD"] == installed["tcmalloc_minimal"]
    assert int(environ["TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD"]) > 2**60
    assert dict(os.environ) == before


def test_nothing_is_set_where_none_is_installed(installed, monkeypatch, tmp_path):
    installed.clear()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert allocator_environ({}) == {}
    installed["tcmalloc"] = "libtcmalloc.so.4"
    assert allocator_environ({})["LD_PRELOAD"] == "libtcmalloc.so.4"


def test_tcmalloc_of_the_environment_is_found_before_tbbmalloc(installed, monkeypatch, tmp_path):
    installed.clear()
    for folder, fits in ((tmp_path / "env", True), (tmp_path / "my env", False)):
        monkeypatch.setattr(sys, "prefix", str(folder))
        (folder / "lib").mkdir(parents=True)
        (folder / "lib" / "libtcmalloc.so.4").touch()
        assert find_allocator() == (str(folder / "lib" / "libtcmalloc.so.4") if fits else None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    for name in ("libtbbmalloc.so.2", "libtbbmalloc_proxy.so.2"):
        (tmp_path / "env" / "lib" / name).touch()
    assert find_allocator().endswith("libtcmalloc.so.4")


def test_tbbmalloc_of_the_environment_is_found(installed, monkeypatch, tmp_path):
    installed.clear()
    for folder, fits in ((tmp_path / "env", True), (tmp_path / "my env", False)):
        monkeypatch.setattr(sys, "prefix", str(folder))
        (folder / "lib").mkdir(parents=True)
        for name in ("libtbbmalloc.so.2", "libtbbmalloc_proxy.so.2"):
            assert find_allocator() is None
            (folder / "lib" / name).touch()
        found = find_allocator()
        assert (found is not None) == fits
        if fits:
            first, second = found.split(":")
            assert first.endswith("env/lib/libtbbmalloc.so.2")
            assert second.endswith("env/lib/libtbbmalloc_proxy.so.2")


@pytest.mark.usefixtures("installed")
def test_a_machine_with_a_gpu_keeps_its_allocator(monkeypatch, tmp_path):
    monkeypatch.setattr(allocator, "_GPU_DRIVERS", (str(tmp_path / "driver"),))
    assert allocator_environ({})
    (tmp_path / "driver").touch()
    assert allocator_environ({}) == {}


@pytest.mark.usefixtures("installed")
def test_a_process_that_may_be_another_program_is_not_replaced(monkeypatch):
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("replaced"))
    assert "torch" in sys.modules  # as in a script that calls bigtrain
    start_with_allocator()


@pytest.mark.parametrize("own", [None, ""], ids=["no choice", "the user's choice"])
@pytest.mark.parametrize("by_module", [False, True], ids=["by path", "by module"])
def test_the_training_script_starts_itself_anew(tmp_path, own, by_module):
    folder = tmp_path / "sitecustomize"
    folder.mkdir()
    seen = tmp_path / "seen"
    (folder / "sitecustomize.py").write_text(
        "import os, pathlib\n"
        f"with open({str(seen)!r}, 'a') as file:\n"
        "    maps = pathlib.Path('/proc/self/maps').read_text()\n"
        "    print(os.getpid(), 'malloc_proxy' in maps or 'tcmalloc' in maps, file=file)\n"
    )
    environ = {n: v for n, v in os.environ.items() if n != "LD_PRELOAD"}
    environ |= {"PYTHONPATH": str(folder)} | ({} if own is None else {"LD_PRELOAD": own})
    script = Path(allocator.__file__).parents[1] / "train.py"
    words = ["-m", "bigtrain.train"] if by_module else [str(script)]
    done = subprocess.run(
        [sys.executable, "-X", "utf8", *words, "digits", "--dry-run"],
        env=environ,
        cwd=script.parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "predicted peak" in done.stdout
    starts = [line.split() for line in seen.read_text().splitlines()]
    starts = [start for start in starts if start[0] == starts[0][0]]  # without children
    assert [start[1] for start in starts] == (["False", "True"] if own is None else ["False"])


@pytest.mark.parametrize(
    "environ",
    [
        {"MALLOC_ARENA_MAX": "1"},
        {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
        {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"},
        {"LD_PRELOAD": ""},
    ],
)
@pytest.mark.usefixtures("installed")
def test_what_the_user_set_stays(environ):
    assert allocator_environ(environ) == {}
    assert allocator_environ({"GLIBC_TUNABLES": "glibc.cpu.x86_ibt=off"})


@pytest.mark.usefixtures("installed")  # the test process itself uses glibc
def test_freed_blocks_go_back():
    return_large_blocks(64 * 1024)
    before = proc_status_bytes("VmData")
    # Never written, so no physical memory is used
    blocks = [torch.empty(256 * MIB, dtype=torch.uint8) for _ in range(8)]
    assert proc_status_bytes("VmData") >= before + 1024 * MIB  # some blocks may reuse free memory
    del blocks
    assert proc_status_bytes("VmData") <= before + 8 * MIB


ROUNDS = """
import resource, sys
import torch
from bigtrain.memory.allocator import release_free_memory
from bigtrain.memory.host_memory import proc_status_bytes

def round_of_blocks():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.zeros(12 << 20, dtype=torch.uint8) for _ in range(40)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

base = proc_status_bytes("RssAnon")
faults = [round_of_blocks() for _ in range(4)]
kept = proc_status_bytes("RssAnon") - base
release_free_memory()
print(faults[-1], kept, proc_status_bytes("RssAnon") - base)
"""


def test_tcmalloc_keeps_free_memory_for_the_next_step_until_it_is_told_to_release_it():
    library = ctypes.util.find_library("tcmalloc_minimal")
    if library is None:
        words = "tcmalloc is missing. Run: apt-get install libtcmalloc-minimal4"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(words)
    environ = {**os.environ, "LD_PRELOAD": library}
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    faults, kept, left = map(int, done.stdout.split())
    pages = 40 * (12 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert faults < pages / 2  # it returns some blocks, a few at a time
    assert kept > 400 * MIB
    assert left < 40 * MIB
