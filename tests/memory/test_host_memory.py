"""Free disk space and memory: by the file system, the kernel, and the limits of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigtrain.memory.disk import (
    SpaceRequest,
    SpaceShortage,
    file_system,
    find_shortage,
    folder_problem,
    free_disk_bytes,
    scratch_folder,
)
from bigtrain.memory.host_memory import free_host_bytes


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemAvailable:   1000 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"
GROUPS = {
    "no limit": ({}, 1_024_000),
    "version 2": (
        {
            "proc/self/cgroup": "0::/job/step\n",
            f"{V2}/job/step/memory.max": "max\n",
            f"{V2}/job/step/memory.current": "100\n",
            f"{V2}/job/memory.max": "5000\n",
            f"{V2}/job/memory.current": "3000\n",
            f"{V2}/job/memory.stat": "anon 1\ninactive_file 400\n",
        },
        2400,
    ),
    "version 2, in a container": (
        {
            "proc/self/cgroup": "0::/\n",
            f"{V2}/memory.max": "5000\n",
            f"{V2}/memory.current": "6000\n",
        },
        0,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "5:cpu:/a\n4:memory:/b/c\n0::/\n",
            f"{V1}/b/c/memory.limit_in_bytes": "7000\n",
            f"{V1}/b/c/memory.usage_in_bytes": "3000\n",
            f"{V1}/b/c/memory.stat": "total_inactive_file 500\n",
            f"{V1}/memory.limit_in_bytes": "9223372036854771712\n",
            f"{V1}/memory.usage_in_bytes": "9000\n",
        },
        4500,
    ),
    "version 1, seen from within": (
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n",
            f"{V1}/memory.limit_in_bytes": "7000\n",
            f"{V1}/memory.usage_in_bytes": "3000\n",
        },
        4000,
    ),
}


@pytest.mark.parametrize("case", GROUPS)
def test_the_tightest_limit_counts(tmp_path, case):
    files, free = GROUPS[case]
    assert free_host_bytes(system(tmp_path, files)) == free


def test_a_system_that_does_not_tell_limits_nothing(tmp_path):
    assert free_host_bytes(tmp_path) is None


def test_ranks_that_share_a_place_are_added_up():
    needs = [
        SpaceRequest("a", "8", 60, 100),
        SpaceRequest("b", "8", 60, 100),
        SpaceRequest("a", "9", 60, 100),
    ]
    assert find_shortage(needs) is None
    assert find_shortage([*needs, SpaceRequest("a", "8", 50, 99)]) == SpaceShortage("a", 2, 110, 99)
    assert find_shortage([SpaceRequest("a", "8", 50, 100)] * 2) is None


def test_the_file_system_of_a_folder_is_the_nearest_mount(tmp_path):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        "2 1 0:5 / /fast rw shared:3 - tmpfs tmpfs rw\n"
        "3 2 8:2 / /fast/a\\040disk rw - xfs /dev/b rw\n"
    )
    assert file_system("/home", mounts) == "ext4"
    assert file_system("/fast/x", mounts) == "tmpfs"
    assert file_system("/faster", mounts) == "ext4"
    assert file_system("/fast/a disk", mounts) == "xfs"
    assert file_system("/home", tmp_path / "none") is None


def test_folders(tmp_path):
    assert folder_problem(str(tmp_path)) is None
    assert "does not exist" in str(folder_problem(str(tmp_path / "none")))
    assert folder_problem(scratch_folder()) is None
    assert free_disk_bytes(str(tmp_path)) > 0
