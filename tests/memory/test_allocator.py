"""Ranks that bigtrain starts use tcmalloc if it is installed, unless the user decides otherwise."""

import os

import pytest
import torch

from bigtrain.memory import allocator
from bigtrain.memory.allocator import allocator_environ, return_large_blocks
from bigtrain.memory.host_memory import proc_status_bytes
from bigtrain.ranks import launch
from bigtrain.units import MIB


@pytest.fixture
def installed(monkeypatch):
    """A machine on which tcmalloc is installed, and a user who has set no variable."""
    known = {"tcmalloc_minimal": "libtcmalloc_minimal.so.4"}
    monkeypatch.setattr(allocator.ctypes.util, "find_library", known.get)
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


def test_nothing_is_set_where_it_is_not_installed(installed):
    installed.clear()
    assert allocator_environ({}) == {}
    installed["tcmalloc"] = "libtcmalloc.so.4"
    assert allocator_environ({})["LD_PRELOAD"] == "libtcmalloc.so.4"


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
