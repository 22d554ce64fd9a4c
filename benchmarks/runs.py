"""Runs of the `bigtrain` command for benchmarks, and what they ran on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import tempfile
from typing import Any


def run_command(command: list[str], limit_s: float, threads: int = 1) -> str | None:
    """Run a command with all it starts; return one line where it fails, None where it does not."""
    # Freed blocks go back to the system, so that resident memory tells.
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    environ["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environ)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"not done after {limit_s:.0f} s"
        finally:
            _end(process)
        said.seek(0)
        lines = [line.strip() for line in said if line.strip()]
    if status == 0:
        return None
    errors = [line for line in lines if "rror" in line] or lines or ["it said nothing"]
    return f"exit status {status}: {errors[-1]}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run that is not done: asked to, it ends its ranks; killed, it could not."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def surroundings(threads: int = 1) -> dict[str, Any]:
    """The hardware and the versions that the figures belong to."""
    versions = {}
    for name in ("torch", "deepspeed", "fairscale"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    hardware = f"{os.cpu_count()} cores, {platform.machine()}, {memory:.0f} GiB, no GPU"
    return {
        "hardware": f"{hardware}; {threads} thread{'s' * (threads > 1)} a rank",
        "python": platform.python_version(),
        "versions": versions,
    }
