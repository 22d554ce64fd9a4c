"""The rank of this process, read from the variables that launchers set.

Every launcher sets the same four numbers under different names. Only this module reads them; the
rest of bigtrain uses a `RankInfo`. This module does not import torch, because the command line uses
it before it is known whether torch is needed.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bigtrain.errors import ConfigError, plain_text
from bigtrain.files.environment import MOST_COUNT, count_in

Launcher = Literal["torchrun", "deepspeed", "srun", "openmpi", "mpich", "bigtrain", "env", "python"]

_FIRST_RESERVED_STEP = 0xFFFFFFF0
"""The first of Slurm's step numbers for the batch script, the interactive shell and Slurm's own
processes. Steps of srun have lower numbers."""

VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""The variables that say which accelerators a process sees, for CUDA, ROCm and XPU."""
LAUNCH_VARIABLE = "BIGTRAIN_LAUNCH"
"""The variable that `bigtrain train -n N` sets for its ranks: FOLDER/START.

FOLDER is the folder of the launch, START the number of the start, from 0.
"""

_LAUNCH_VARIABLES = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
    "PMIX_NAMESPACE",
    "TORCHELASTIC_RUN_ID",
    "MASTER_PORT",
    LAUNCH_VARIABLE,
)
_LAUNCHER_PROCESSES = ("slurmstepd", "hydra_pmi", "mpiexec", "mpirun", "orterun", "orted", "prte")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """The numbers of this process among the ranks of one run, and the launcher."""

    rank: int
    """Number of this process among all ranks, from 0."""
    local_rank: int
    """Number of this process among the ranks of its node, from 0."""
    world_size: int
    """Ranks of the run."""
    local_world_size: int
    """Ranks on this node."""
    launcher: Launcher
    """The program that started the ranks. 'bigtrain' means `bigtrain train -n N`, 'env' means
    variables that were set by hand, and 'python' means no launcher."""

    @property
    def one_node(self) -> bool:
        """Whether all ranks are on this node."""
        return self.world_size == self.local_world_size


SINGLE_RANK = RankInfo(rank=0, local_rank=0, world_size=1, local_world_size=1, launcher="python")


def detect_rank_info(environ: Mapping[str, str]) -> RankInfo:
    """Return the rank of this process, read from the variables of its launcher.

    RANK and WORLD_SIZE take precedence over the variables of MPI, and these over the variables of
    Slurm: if one launcher started another, the inner launcher set its variables last.

    Args:
        environ: the environment of the process, normally `os.environ`.

    Raises:
        ConfigError: a variable is missing, not a number, out of range, or contradicts another.
    """
    if any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _from_torch_variables(environ)
    if "OMPI_COMM_WORLD_SIZE" in environ or "OMPI_COMM_WORLD_RANK" in environ:
        names = ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")
        return _read(environ, [f"OMPI_COMM_WORLD_{name}" for name in names], "openmpi")
    # srun --mpi=pmi2 sets PMI_RANK as well; only Hydra adds the local numbers.
    in_step = in_slurm_step(environ)
    if "MPI_LOCALRANKID" in environ or (_has_pmi(environ) and not in_step):
        names = ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS")
        return _read(environ, list(names), "mpich")
    if in_step:
        return _from_slurm(environ)
    return SINGLE_RANK


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process; false in a bare sbatch script or salloc shell."""
    step = count_in(environ.get("SLURM_STEP_ID", ""), _FIRST_RESERVED_STEP - 1)
    return step is not None and "SLURM_PROCID" in environ


def first_host(node_list: str) -> str:
    """Return the first host of a Slurm node list: "gpu[07-09,12],login" gives "gpu07"."""
    end = re.search(r",(?![^\[]*\])", node_list)
    head = node_list[: end.start()] if end else node_list
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", head)


def launch_key(environ: Mapping[str, str]) -> str:
    """Return a name that all ranks of one launch on one node share, and that no other launch has.

    Job numbers are not enough: a reinstalled Slurm counts from 1 again, and Hydra has no job
    numbers. So the name also depends on the process that started the ranks, and on its start time,
    because process numbers are reused.

    Args:
        environ: the environment of the process.
    """
    parts = [environ.get(name, "") for name in _LAUNCH_VARIABLES]
    parts += [str(os.getuid()), _read_text("/proc/sys/kernel/random/boot_id"), *_starter()]
    return hashlib.sha256(os.fsencode("\n".join(parts))).hexdigest()[:20]


def _has_pmi(environ: Mapping[str, str]) -> bool:
    return "PMI_RANK" in environ or "PMI_SIZE" in environ


def _from_torch_variables(environ: Mapping[str, str]) -> RankInfo:
    launcher: Launcher = "env"
    if "TORCHELASTIC_RUN_ID" in environ:
        launcher = "torchrun"
    elif LAUNCH_VARIABLE in environ:
        launcher = "bigtrain"
    elif "LOCAL_SIZE" in environ:
        launcher = "deepspeed"
    if environ.get("WORLD_SIZE") == "1" and environ.get("RANK", "0") == "0":
        placement = RankInfo(
            rank=0, local_rank=0, world_size=1, local_world_size=1, launcher=launcher
        )
    else:
        local_size = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environ else "LOCAL_SIZE"
        if local_size not in environ:
            local_size = "LOCAL_WORLD_SIZE"
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", local_size]
        placement = _read(environ, names, launcher)
    if launcher == "env":
        _refuse_smaller_world(environ, placement)
    return placement


def _refuse_smaller_world(environ: Mapping[str, str], placement: RankInfo) -> None:
    """Refuse a WORLD_SIZE of the shell that is less than the ranks of srun or mpiexec."""
    outer = "OMPI_COMM_WORLD_SIZE"
    if in_slurm_step(environ):
        outer = "SLURM_STEP_NUM_TASKS"
    elif "MPI_LOCALRANKID" in environ:
        outer = "PMI_SIZE"
    if outer in environ and _number(environ, outer) > placement.world_size:
        raise ConfigError(
            f"WORLD_SIZE={placement.world_size} contradicts {outer}={environ[outer]}: the shell "
            "carries variables of another launch. Run: unset RANK LOCAL_RANK WORLD_SIZE"
        )


def _from_slurm(environ: Mapping[str, str]) -> RankInfo:
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    world_size = _number(environ, size)
    layout = "SLURM_STEP_TASKS_PER_NODE"
    nodes = _tasks_by_node(environ.get(layout, str(world_size)))
    node = _number(environ, "SLURM_NODEID") if sum(times for _, times in nodes) > 1 else 0
    if sum(count * times for count, times in nodes) != world_size or not nodes:
        local_size = None
    else:
        local_size = _tasks_of(node, nodes)
    if local_size is None:
        raise ConfigError(
            f"{layout}={plain_text(environ.get(layout), 80)} contradicts SLURM_NODEID={node}, "
            f"{size}={world_size}: the variables are of different steps. Start the ranks with srun "
            "directly."
        )
    return _read(
        {**environ, layout: str(local_size)},
        ["SLURM_PROCID", "SLURM_LOCALID", size, layout],
        "srun",
    )


def _tasks_by_node(text: str) -> list[tuple[int, int]]:
    """Parse Slurm's "2(x3),1" into pairs (tasks, consecutive nodes); empty if it is malformed."""
    if not re.fullmatch(r"\d{1,9}(\(x\d{1,9}\))?(,\d{1,9}(\(x\d{1,9}\))?)*", text):
        return []
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [(int(count), int(times or 1)) for count, times in groups]


def _tasks_of(node: int, pairs: list[tuple[int, int]]) -> int | None:
    """Return the number of tasks on a node, given pairs of `_tasks_by_node`; None if unknown."""
    for tasks, num_nodes in pairs:
        if node < num_nodes:
            return tasks
        node -= num_nodes
    return None


def _read(environ: Mapping[str, str], names: list[str], launcher: Launcher) -> RankInfo:
    """Read rank, local rank, size and local size, in this order, and check their ranges."""
    rank, local_rank, size, local_size = (_number(environ, name) for name in names)
    for name, value, limit_name, limit in (
        (names[0], rank, names[2], size),
        (names[1], local_rank, names[3], local_size),
        (names[3], local_size - 1, names[2], size),
    ):
        if not 0 <= value < limit:
            raise ConfigError(
                f"{name}={environ[name]} is out of range for {limit_name}={environ[limit_name]}. "
                f"Start the ranks with one launcher, or run: unset {' '.join(names)}"
            )
    return RankInfo(
        rank=rank,
        local_rank=local_rank,
        world_size=size,
        local_world_size=local_size,
        launcher=launcher,
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    if text is None:
        raise ConfigError(
            f"{name} is not set, but other variables of the launcher are. Run: export "
            f"{name}=NUMBER, or start the ranks with torchrun, deepspeed, srun or mpiexec."
        )
    number = count_in(text)
    if number is None:
        raise ConfigError(
            f"{name}={plain_text(ascii(text), 80)} is not a whole number from 0 to {MOST_COUNT}. "
            f"Run: export {name}=NUMBER"
        )
    return number


def _starter() -> tuple[str, str]:
    """Return the process number and start time of the process that started the ranks.

    That process is the nearest ancestor that is a launcher. If there is none, it is the parent. The
    parent alone is not enough: a wrapper script between launcher and rank gives each rank another
    parent.
    """
    parent = pid = os.getppid()
    while pid > 1:
        name, above, start = _process(pid)
        if name.startswith(_LAUNCHER_PROCESSES):
            return str(pid), start
        pid = above
    return str(parent), _process(parent)[2]


def process_start_time() -> float:
    """Return when this process started, in seconds since 1970; 0 if unknown."""
    ticks = _process(os.getpid())[2]
    if not ticks or not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def _process(pid: int) -> tuple[str, int, str]:
    """Return name, parent and start time (clock ticks since boot) of a process."""
    text = _read_text(f"/proc/{pid}/stat")
    # The name is in parentheses and may contain any character, even a parenthesis.
    name = text[text.find("(") + 1 : text.rfind(")")]
    fields = text[text.rfind(")") + 1 :].split()
    return (name, int(fields[1]), fields[19]) if len(fields) > 19 else (name, 0, "")


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def launcher_hint(placement: RankInfo, cpu_count: int, *, has_gpu: bool = False) -> str | None:
    """Return a hint about starting more ranks if one rank leaves cores unused, else None.

    Args:
        placement: the rank of this process.
        cpu_count: the number of cores that this process may use.
        has_gpu: whether ranks are counted by GPUs, so that cores do not matter.
    """
    if placement.world_size > 1 or cpu_count < 2 or has_gpu:
        return None
    if placement.launcher == "deepspeed":
        return (
            f"one rank on {cpu_count} cores: deepspeed starts one for each NUMA node of a CPU. "
            "For two: deepspeed --num_accelerators 2 bigtrain/train.py ..."
        )
    if placement.launcher == "python":
        return f"one rank on {cpu_count} cores. For two: bigtrain train -n 2 ..."
    return None
