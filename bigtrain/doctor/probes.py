"""Examine the parts of a machine separately, so that a failure in one is a line of the report."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bigtrain.devices import accelerator, device_count, device_name, free_bytes
from bigtrain.files.parse import parse_json
from bigtrain.machine.rate_cache import RATES, cached_rates, measured_rates
from bigtrain.machine.rates import cpu_name, usable_cores
from bigtrain.machine.versions import installed_version
from bigtrain.memory.allocator import find_allocator
from bigtrain.memory.cap import device_capacity_bytes
from bigtrain.memory.disk import MEMORY_FILE_SYSTEMS, file_system, free_disk_bytes, scratch_folder
from bigtrain.memory.host_memory import free_host_bytes

PROBE_TIMEOUT_S = 120.0
"""The seconds after which a probe is ended: that of DeepSpeed, or that of all strategies."""
LIBRARIES = {
    "torch": "pip install torch",
    "torchvision": "pip install torchvision",
    "deepspeed": 'pip install "deepspeed>=0.19.8,<0.19.9"',
    "fairscale": 'pip install "fairscale>=0.4.9,<0.4.14"',
    "torchao": "pip install torchao",
}
"""By library, the command that installs it."""
LAUNCHERS = ("torchrun", "deepspeed", "srun", "mpiexec")
COMPILERS = {
    "g++": "apt-get install g++ (or your system's package)",
    "ninja": "pip install ninja",
}
"""By program that compiles DeepSpeed's operators, the command that installs it."""

# A probe runs in a separate process, whose output and crashes do no harm. Its first line replaces
# the current folder on sys.path, whose modules might hide others, by the folder of this package.
# Each answer is a line of JSON. Everything else that is printed is sent to standard error.
_PROBE = """\
import sys; sys.path[0:1] = [{folder!r}]
import json, os
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
def answer(*values):
    print(json.dumps(values), file=answers, flush=True)
"""
_OPERATORS = """
from torch.utils.cpp_extension import get_default_build_root
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder.all_ops import ALL_OPS
from pathlib import Path
root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
for name, builder in sorted(ALL_OPS.items()):
    if name == "deepspeed_not_implemented":
        continue
    try:
        fits = bool(builder.is_compatible())
    except Exception:
        fits = False
    made = any(root.glob(f"{name}/{name}.so")) or any(root.glob(f"*/{name}/{name}.so"))
    answer(name, fits, bool(installed_ops.get(name)) or made)
"""
_STRATEGIES = """
from bigtrain.compare.list_strategies import refusals
for name, ranks, reason in refusals():
    answer(name, ranks, reason)
"""


def examine_machine() -> dict[str, Any]:
    """Return the report on this machine as JSON values; its `rates` are None."""
    with ThreadPoolExecutor() as pool:  # both calls mostly wait for processes
        operators = pool.submit(_operators)
        strategies = pool.submit(_strategies)
        return {
            "versions": _versions(),
            "devices": _devices(),
            "backends": _backends(),
            "launchers": {name: shutil.which(name) for name in LAUNCHERS},
            "compilers": {name: shutil.which(name) for name in COMPILERS},
            "deepspeed_operators": operators.result(),
            "strategies": strategies.result(),
            "rates": None,
        }


def _versions() -> dict[str, dict[str, str | None]]:
    versions: dict[str, dict[str, str | None]] = {
        "python": {"version": platform.python_version(), "fix": None}
    }
    for name, fix in LIBRARIES.items():
        version = installed_version(name)
        versions[name] = {"version": version, "fix": None if version else fix}
    for key in ("cuda", "hip", "xpu"):
        versions["torch"][key] = getattr(torch.version, key, None)
    return versions


def _devices() -> dict[str, Any]:
    return {
        "cpu": {"name": cpu_name(), "cores": os.cpu_count(), "usable_cores": usable_cores()},
        "threads": torch.get_num_threads(),
        "gpus": [_gpu(number) for number in range(device_count())],
        "memory": {
            "total_bytes": device_capacity_bytes(torch.device("cpu")),
            "free_bytes": free_host_bytes(),
        },
        "allocator": find_allocator(),
        "scratch": _scratch(),
    }


def _gpu(number: int) -> dict[str, Any]:
    gpu: dict[str, Any] = {"name": None, "total_bytes": None, "free_bytes": None, "problem": None}
    try:
        device = torch.device(str(accelerator()), number)
        gpu["name"] = device_name(number)
        gpu["total_bytes"] = device_capacity_bytes(device)
        gpu["free_bytes"] = free_bytes(device)
    except RuntimeError as error:  # another process may use the GPU exclusively
        gpu["problem"] = str(error).splitlines()[0]
    return gpu


def _scratch() -> dict[str, Any]:
    scratch: dict[str, Any] = {"folder": None, "file_system": None, "free_bytes": None}
    try:
        scratch["folder"] = folder = scratch_folder()
        scratch["free_bytes"] = free_disk_bytes(folder)
    except OSError as error:
        return {**scratch, "problem": f"{error}: set TMPDIR=FOLDER to a folder that can be written"}
    scratch["file_system"] = kind = file_system(folder)
    scratch["problem"] = None
    if kind in MEMORY_FILE_SYSTEMS:
        scratch["problem"] = f"{kind} keeps files in memory: set TMPDIR=FOLDER to one on a disk"
    return scratch


def _backends() -> dict[str, bool]:
    if not torch.distributed.is_available():
        return dict.fromkeys(("gloo", "nccl", "mpi"), False)
    return {
        "gloo": torch.distributed.is_gloo_available(),
        "nccl": torch.distributed.is_nccl_available(),
        "mpi": torch.distributed.is_mpi_available(),
    }


def _operators() -> dict[str, Any]:
    """Return for each C++ operator of DeepSpeed whether it can be compiled here, or was already."""
    if installed_version("deepspeed") is None:
        return {"operators": {}, "problem": f"deepspeed is missing: {LIBRARIES['deepspeed']}"}
    lines, problem = _ask(_OPERATORS)
    operators = {
        name: {"compatible": compatible, "built": built} for name, compatible, built in lines
    }
    return {"operators": operators, "problem": problem}


def _strategies() -> dict[str, Any]:
    """Return the presets that can run here, with their fewest ranks, and why others cannot."""
    lines, problem = _ask(_STRATEGIES)
    return {
        "run": {name: ranks for name, ranks, _ in lines if ranks is not None},
        "refused": {name: reason for name, ranks, reason in lines if ranks is None},
        "problem": problem,
    }


def _ask(code: str) -> tuple[list[list[Any]], str | None]:
    """Run a probe; return its answers, and the problem that ended it, or None."""
    preamble = _PROBE.format(folder=str(Path(__file__).resolve().parents[2]))
    try:
        completed = subprocess.run(
            [sys.executable, "-c", preamble + code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        return _answers(error.stdout or b""), f"no further answer after {PROBE_TIMEOUT_S:.0f} s"
    if completed.returncode == 0:
        return _answers(completed.stdout), None
    error_lines = completed.stderr.decode("utf-8", "replace").strip().splitlines()
    cause = f"ended by signal {-completed.returncode}" if completed.returncode < 0 else "failed"
    reason = error_lines[-1] if error_lines else "it printed nothing"
    return _answers(completed.stdout), f"{cause}: {reason}"


def _answers(text: bytes) -> list[list[Any]]:
    complete = text[: text.rfind(b"\n") + 1]  # the last line may be incomplete
    return [parse_json(line, "a probe") for line in complete.splitlines()]


def examine_rates(*, again: bool) -> dict[str, Any]:
    """Return the rates of this machine as JSON values; they are measured unless they are cached.

    The values include whether the rates come from the cache, and the path of the cache file. The
    path is None if the rates are not in the file.

    Args:
        again: whether to measure the rates even if they are cached.
    """
    cached = None if again else cached_rates()
    if cached is None:
        sys.stderr.write(
            "measuring rates, which takes ten seconds to a minute; other programs should be idle\n"
        )
    rates = cached or measured_rates(again=again)
    is_cached = cached_rates() == rates
    return {
        **asdict(rates),
        "from_cache": cached is not None,
        "cache": str(RATES.path) if is_cached else None,
    }
