"""A real Slurm cluster of one node in a temporary folder, for a test session; and free ports."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGES = {
    "srun": "slurm-wlm",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "munged": "munge",
    "mpiexec.openmpi": "openmpi-bin",
    "mpiexec.hydra": "mpich",
}
_READY_S = 30.0
_OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def find(program: str) -> str:
    """Return the path of a program; if it is missing, fail in CI and skip the test elsewhere."""
    # Programs of the virtual environment count even if it is not activated.
    beside = f"{Path(sys.executable).parent}{os.pathsep}/usr/sbin{os.pathsep}/sbin"
    path = shutil.which(program) or shutil.which(program, path=beside)
    if path is None:
        words = f"{program} is missing. Run: apt-get install {PACKAGES.get(program, program)}"
        if os.environ.get("CI") == "true":
            pytest.fail(words)
        pytest.skip(words)
    return path


def free_port() -> int:
    """Return a TCP port of the local host that no process uses.

    The port is outside the range from which the kernel takes ports of outgoing connections. A
    port within it may be taken between this call and the start of the program that listens on it.
    """
    first_outgoing = int(_OUTGOING_PORTS.read_text().split()[0])
    while True:
        port = secrets.choice(range(first_outgoing // 2, first_outgoing))
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Start munged, slurmctld and slurmd, and yield the variables with which srun finds them."""
    programs = {name: find(name) for name in ("munged", "slurmctld", "slurmd", "srun")}
    if os.getuid() != 0:
        pytest.skip("slurmd starts tasks as root only. Run these tests as root, or in a container")
    folder.mkdir(mode=0o755, exist_ok=True)
    munge_socket = folder / "munge.socket"
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    configuration = folder / "slurm.conf"
    configuration.write_text(_configuration(folder, munge_socket))
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    environ = {**os.environ, "SLURM_CONF": str(configuration)}
    started: list[subprocess.Popen[bytes]] = []
    try:
        munge_files = {
            "socket": munge_socket,
            "key-file": key,
            "log-file": folder / "munged.log",
            "pid-file": folder / "munged.pid",
            "seed-file": folder / "munged.seed",
        }
        options = [f"--{name}={path}" for name, path in munge_files.items()]
        for command in (
            [programs["munged"], "--foreground", "--force", *options],
            [programs["slurmctld"], "-D"],
            [programs["slurmd"], "-D"],
        ):
            name = Path(command[0]).name
            log = (folder / f"{name}.out").open("wb")
            started.append(
                subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)
            )
            log.close()
            if name == "munged":
                _wait_for(munge_socket.exists, folder)
        _wait_for(lambda: _idle(environ), folder)
        yield {"SLURM_CONF": str(configuration)}
    finally:
        for process in reversed(started):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _configuration(folder: Path, munge_socket: Path) -> str:
    host = socket.gethostname().split(".")[0]
    user = "root"
    return f"""\
ClusterName=bigtrain
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
SlurmdPort={free_port()}
SlurmUser={user}
AuthType=auth/munge
AuthInfo=socket={munge_socket}
CredType=cred/munge
StateSaveLocation={folder / "state"}
SlurmdSpoolDir={folder / "spool"}
SlurmctldPidFile={folder / "slurmctld.pid"}
SlurmdPidFile={folder / "slurmd.pid"}
SlurmctldLogFile={folder / "slurmctld.log"}
SlurmdLogFile={folder / "slurmd.log"}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()}
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def _idle(environ: Mapping[str, str]) -> bool:
    try:
        answer = subprocess.run(
            ["sinfo", "-h", "-o", "%T"], env=dict(environ), capture_output=True, timeout=10
        )
    except subprocess.TimeoutExpired:
        return False
    return b"idle" in answer.stdout


def _wait_for(condition: object, folder: Path) -> None:
    assert callable(condition)
    end = time.monotonic() + _READY_S
    while not condition():
        if time.monotonic() > end:
            logs = "\n".join(
                f"--- {file.name}\n{file.read_text(errors='replace')[-2000:]}"
                for file in sorted(folder.glob("*.[lo][ou][gt]"))
            )
            raise TimeoutError(f"Slurm was not ready within {_READY_S:.0f} s\n{logs}")
        time.sleep(0.2)
