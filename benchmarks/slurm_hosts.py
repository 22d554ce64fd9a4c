"""Start a Slurm over the hosts of `benchmarks/hosts.py`: a controller on host0, daemons on all.

    python benchmarks/hosts.py --hosts 2 --slurm -- srun -N 2 --ntasks-per-node 1 \
        python bigtrain/train.py --strategy ddp

Keys, logs and state are in the folder of the hosts and are removed with it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bigtrain.errors import ConfigError

if TYPE_CHECKING:
    from hosts import World

PROGRAMS = {"munged": "munge", "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "srun": "slurm-wlm"}
READY_S = 30.0
"""Seconds that the hosts get to be known to the controller."""


def start_slurm(world: World) -> dict[str, str]:
    """Start Slurm; it ends with the other programs on the hosts.

    Returns:
        The variables with which `srun` finds it.

    Raises:
        ConfigError: a program is missing, or the hosts did not come within `READY_S` seconds.
    """
    programs = {name: _find(name) for name in PROGRAMS}
    folder = world.folder / "slurm"
    folder.mkdir(mode=0o755)
    world.folder.chmod(0o755)  # munge refuses a socket below a folder that others cannot enter
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    (folder / "slurm.conf").write_text(_configuration(folder, world.hosts))
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    environ = {"SLURM_CONF": str(folder / "slurm.conf")}
    places = {"socket": "socket", "key-file": "key", "log-file": "log", "pid-file": "pid"}
    places["seed-file"] = "seed"
    options = [f"--{option}={folder}/munge.{end}" for option, end in places.items()]
    _start(world, 0, [programs["munged"], "--foreground", "--force", *options], environ)
    _wait_for((folder / "munge.socket").exists, folder)
    _start(world, 0, [programs["slurmctld"], "-D"], environ)
    for host in range(world.hosts):
        _start(world, host, [programs["slurmd"], "-D"], environ)
    _wait_for(lambda: _idle(world, environ) == world.hosts, folder)
    return environ


def _find(name: str) -> str:
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if path is None:
        raise ConfigError(f"--slurm needs {name}. Run: apt-get install {PROGRAMS[name]}")
    return path


def _start(world: World, host: int, command: list[str], environ: Mapping[str, str]) -> None:
    with (world.folder / "slurm" / f"{Path(command[0]).name}-{host}.out").open("wb") as log:
        world.start(host, command, environ, log.fileno())


def _configuration(folder: Path, hosts: int) -> str:
    names = f"host[0-{hosts - 1}]"
    return f"""\
ClusterName=bigtrain
SlurmctldHost=host0
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=5
NodeName={names} CPUs={os.cpu_count()}
PartitionName=hosts Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def _idle(world: World, environ: Mapping[str, str]) -> int:
    """Return the number of hosts that are known and free."""
    with (world.folder / "slurm" / "sinfo").open("w+b") as output:
        asked = world.start(0, ["sinfo", "-h", "-N", "-o", "%T"], environ, output.fileno())
        try:
            asked.wait(10.0)
        except subprocess.TimeoutExpired:
            asked.kill()
            return 0
        output.seek(0)
        return output.read().split().count(b"idle")


def _wait_for(condition: Callable[[], bool], folder: Path) -> None:
    end = time.monotonic() + READY_S
    while not condition():
        if time.monotonic() > end:
            for log in sorted([*folder.glob("*.log"), *folder.glob("*.out")]):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}", file=sys.stderr)
            raise ConfigError(f"Slurm was not ready within {READY_S:.0f} s: see above")
        time.sleep(0.2)
