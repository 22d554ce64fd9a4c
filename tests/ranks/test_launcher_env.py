"""The placement of a rank from the launcher's variables, and contradictory ones."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bigtrain.errors import ConfigError
from bigtrain.ranks.launcher_env import SINGLE_RANK, detect_rank_info, first_host, launch_key

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "x",
}
DEEPSPEED = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
BY_HAND = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}


@pytest.mark.parametrize(
    ("environ", "launcher", "numbers"),
    [
        ({}, "python", (0, 0, 1, 1)),
        (TORCHRUN, "torchrun", (3, 1, 4, 2)),
        (DEEPSPEED, "deepspeed", (1, 1, 2, 2)),
        (BY_HAND, "env", (1, 1, 2, 2)),
        ({**BY_HAND, "BIGTRAIN_LAUNCH": "/tmp/x/0"}, "bigtrain", (1, 1, 2, 2)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "env", (0, 0, 1, 1)),
        (OPENMPI, "openmpi", (1, 0, 2, 1)),
        (MPICH, "mpich", (1, 1, 2, 2)),
        (SRUN, "srun", (2, 0, 5, 2)),
        # The last node of "2(x2),1" has one task.
        ({**SRUN, "SLURM_PROCID": "4", "SLURM_NODEID": "2"}, "srun", (4, 0, 5, 1)),
        # The numbers of the step count, not those of the job around it.
        ({**SRUN, "SLURM_NTASKS": "64"}, "srun", (2, 0, 5, 2)),
        # srun --mpi=pmi2 sets PMI_RANK as well.
        ({**SRUN, "PMI_RANK": "2", "PMI_SIZE": "5"}, "srun", (2, 0, 5, 2)),
        # A shell inside an allocation: the batch script, and salloc's interactive step.
        (BATCH, "python", (0, 0, 1, 1)),
        ({**BATCH, "SLURM_STEP_ID": "4294967290"}, "python", (0, 0, 1, 1)),
        ({**BATCH, "SLURM_STEP_ID": "4294967291"}, "python", (0, 0, 1, 1)),
        # With a launcher inside another one, the inner one counts.
        ({**SRUN, **TORCHRUN}, "torchrun", (3, 1, 4, 2)),
        ({**SRUN, **OPENMPI}, "openmpi", (1, 0, 2, 1)),
        ({**SRUN, **MPICH}, "mpich", (1, 1, 2, 2)),
        ({**MPICH, **DEEPSPEED}, "deepspeed", (1, 1, 2, 2)),
    ],
)
def test_detect(environ: dict[str, str], launcher: str, numbers: tuple[int, int, int, int]) -> None:
    info = detect_rank_info(environ)
    assert info.launcher == launcher
    found_numbers = (info.rank, info.local_rank, info.world_size, info.local_world_size)
    assert found_numbers == numbers
    assert info.one_node is (numbers[2] == numbers[3])


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (without(TORCHRUN, "RANK"), r"RANK is not set, .* Run: export RANK=NUMBER"),
        (without(TORCHRUN, "WORLD_SIZE"), r"^WORLD_SIZE is not set"),
        (without(TORCHRUN, "LOCAL_RANK"), r"^LOCAL_RANK is not set"),
        (without(BY_HAND, "LOCAL_WORLD_SIZE"), r"export LOCAL_WORLD_SIZE=NUMBER"),
        ({**BY_HAND, "RANK": "two"}, r"RANK='two' is not a whole number"),
        ({**BY_HAND, "RANK": "-1"}, r"RANK='-1' is not a whole number"),
        (
            {**BY_HAND, "RANK": "2"},
            r"RANK=2 is out of range for WORLD_SIZE=2.*unset RANK LOCAL_RANK WORLD_SIZE",
        ),
        ({**BY_HAND, "LOCAL_RANK": "2"}, r"LOCAL_RANK=2 is out of range for LOCAL_WORLD_SIZE=2"),
        (
            {**BY_HAND, "LOCAL_WORLD_SIZE": "3"},
            r"LOCAL_WORLD_SIZE=3 is out of range for WORLD_SIZE=2",
        ),
        (without(OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE"), r"OMPI_COMM_WORLD_LOCAL_SIZE is not set"),
        (without(OPENMPI, "OMPI_COMM_WORLD_SIZE"), r"OMPI_COMM_WORLD_SIZE is not set"),
        (without(MPICH, "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), r"MPI_LOCALRANKID is not set"),
        (without(MPICH, "PMI_RANK"), r"PMI_RANK is not set"),
        (without(SRUN, "SLURM_LOCALID"), r"SLURM_LOCALID is not set"),
        ({**SRUN, "SLURM_NODEID": "3"}, r"2\(x2\),1 contradicts SLURM_NODEID=3"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "6"}, r"contradicts .*SLURM_STEP_NUM_TASKS=6"),
        (
            {**SRUN, "RANK": "0", "WORLD_SIZE": "1"},
            r"WORLD_SIZE=1 contradicts SLURM_STEP_NUM_TASKS=5: .*unset RANK LOCAL_RANK WORLD_SIZE",
        ),
        (
            {**OPENMPI, "RANK": "0", "WORLD_SIZE": "1"},
            r"WORLD_SIZE=1 contradicts OMPI_COMM_WORLD_SIZE=2",
        ),
        ({**MPICH, "RANK": "0", "WORLD_SIZE": "1"}, r"WORLD_SIZE=1 contradicts PMI_SIZE=2"),
        ({**BY_HAND, "WORLD_SIZE": "9" * 5000}, r"^WORLD_SIZE='9+\.\.\. is not a whole number"),
        ({**BY_HAND, "RANK": "²"}, r"^RANK='.*' is not a whole number from 0 to 10000000\."),
        ({**BY_HAND, "RANK": "٣"}, r"^RANK='.*' is not a whole number"),
        ({**BY_HAND, "RANK": "\x1b[31m"}, r"^RANK='\\x1b\[31m' is not a whole number"),
        ({**BY_HAND, "WORLD_SIZE": "99999999"}, r"^WORLD_SIZE='99999999' is not a whole number"),
        *(
            ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": text}, r"contradicts SLURM_NODEID=")
            for text in (
                "99999999(x9999999999)",
                "9" * 5000,
                "2(x",
                "(x2)",
                "",
                "2,,1",
                "2;3",
                "5(x0)",
            )
        ),
    ],
)
def test_detect_refuses(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        detect_rank_info(environ)


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("gpu07", "gpu07"),
        ("gpu[07-09,12],login", "gpu07"),
        ("gpu[3,5]", "gpu3"),
        ("login,gpu[07-09]", "login"),
        ("rack[2-3]node[11-12]-ib", "rack2node11-ib"),
    ],
)
def test_first_host(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


def test_a_launch_has_one_key_and_another_launch_another() -> None:
    key = launch_key({})
    assert key == launch_key({"HOME": "/elsewhere"})
    assert key != launch_key({"SLURM_JOB_ID": "7"})
    code = "import os; from bigtrain.ranks.launcher_env import launch_key; print(launch_key({}))"
    keys = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    # Two children of one parent are two ranks of one launch.
    assert keys[0].stdout == keys[1].stdout
    assert keys[0].stdout.strip() != key


def test_single_is_what_an_empty_environment_gives() -> None:
    assert detect_rank_info({}) == SINGLE_RANK


@pytest.mark.parametrize("module", ["launcher_env", "launch", "exit_status"])
def test_no_torch_is_imported(module: str) -> None:
    code = f"import sys, bigtrain.ranks.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ)).returncode == 0
