"""`bigtrain doctor`: what this machine has, what it lacks and how to get it, and how fast it is.

Each part is looked at by itself: what goes wrong in one is a line in it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bigtrain.devices import accelerator, device_count, device_name, free_bytes
from bigtrain.files.parse import parse_json
from bigtrain.job.command_parser import CommandParser
from bigtrain.machine.busy import describe_others
from bigtrain.machine.rate_cache import (
    RATES,
    cached_rates,
    faster_precision,
    measured_rates,
)
from bigtrain.machine.rates import cpu_name, usable_cores
from bigtrain.machine.versions import installed_version
from bigtrain.memory.allocator import tcmalloc
from bigtrain.memory.cap import device_capacity_bytes
from bigtrain.memory.disk import MEMORY_FILE_SYSTEMS, file_system, free_disk_bytes, scratch_folder
from bigtrain.memory.host_memory import free_host_bytes
from bigtrain.units import format_bytes, format_flops

PROBE_TIMEOUT_S = 120.0
_NO_TCMALLOC = (
    "the C library's. apt install libtcmalloc-minimal4: ranks that bigtrain starts on a CPU then "
    "take up to half as much beside their tensors"
)
"""Seconds that DeepSpeed, or all strategies together, may take to answer."""
_LIBRARIES = {
    "torch": "pip install torch",
    "torchvision": "pip install torchvision",
    "deepspeed": 'pip install "deepspeed>=0.19.8,<0.19.9"',
    "fairscale": 'pip install "fairscale>=0.4.9,<0.4.14"',
    "torchao": "pip install torchao",
}
_LAUNCHERS = ("torchrun", "deepspeed", "srun", "mpiexec")
_COMPILERS = {
    "g++": "apt-get install g++ (or your system's package)",
    "ninja": "pip install ninja",
}

# Runs in a process of its own, whose noise and crashes cost nothing. The first line puts the folder
# of this package where the current one would be, in which anything may lie. Each answer is a
# line of JSON; whatever else is printed goes to standard error.
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


def main(arguments: list[str]) -> int:
    """Look at the machine and say what was found; returns the exit status.

    0; 1 where the ranks cannot talk at all (no gloo), or no strategy can run.
    """
    parser = CommandParser(
        prog="bigtrain doctor",
        description="Show what this machine has, what it lacks, and how fast it is.",
    )
    parser.add_argument(
        "--json", dest="as_json", action="store_true", help="one JSON document on standard output"
    )
    measuring = parser.add_mutually_exclusive_group()
    measuring.add_argument("--no-rates", action="store_true", help="leave the rates out")
    measuring.add_argument(
        "--again", action="store_true", help="measure the rates, also where they are kept"
    )
    measuring.add_argument(  # of `bigtrain.compare.checklist`, to which it goes
        "--check", action="store_true", help="run what bigtrain promises, each held to a rule"
    )
    options = parser.parse_args(arguments)
    report = examine_machine()
    if not options.no_rates:
        report["rates"] = _rates(again=options.again)
    if options.as_json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _show(report)
    return 0 if report["backends"]["gloo"] and report["strategies"]["run"] else 1


def examine_machine() -> dict[str, Any]:
    """Everything but the rates, as JSON values."""
    with ThreadPoolExecutor() as pool:  # both wait for processes, most of the time
        operators = pool.submit(_operators)
        strategies = pool.submit(_strategies)
        return {
            "versions": _versions(),
            "devices": _devices(),
            "backends": _backends(),
            "launchers": {name: shutil.which(name) for name in _LAUNCHERS},
            "compilers": {name: shutil.which(name) for name in _COMPILERS},
            "deepspeed_operators": operators.result(),
            "strategies": strategies.result(),
            "rates": None,
        }


def _versions() -> dict[str, dict[str, str | None]]:
    versions: dict[str, dict[str, str | None]] = {
        "python": {"version": platform.python_version(), "fix": None}
    }
    for name, fix in _LIBRARIES.items():
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
        "allocator": tcmalloc(),
        "scratch": _scratch(),
    }


def _gpu(number: int) -> dict[str, Any]:
    gpu: dict[str, Any] = {"name": None, "total_bytes": None, "free_bytes": None, "problem": None}
    try:
        place = torch.device(str(accelerator()), number)
        gpu["name"] = device_name(number)
        gpu["total_bytes"] = device_capacity_bytes(place)
        gpu["free_bytes"] = free_bytes(place)
    except RuntimeError as error:  # another process may have the GPU for itself
        gpu["problem"] = str(error).splitlines()[0]
    return gpu


def _scratch() -> dict[str, Any]:
    scratch: dict[str, Any] = {"folder": None, "file_system": None, "free_bytes": None}
    try:
        scratch["folder"] = folder = scratch_folder()
        scratch["free_bytes"] = free_disk_bytes(folder)
    except OSError as error:
        return {**scratch, "problem": f"{error}: set TMPDIR=FOLDER to one that takes files"}
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
    """DeepSpeed's operators in C++: which could be compiled here, and which are already."""
    if installed_version("deepspeed") is None:
        return {"operators": {}, "problem": f"deepspeed is missing: {_LIBRARIES['deepspeed']}"}
    lines, problem = _ask(_OPERATORS)
    operators = {
        name: {"compatible": compatible, "built": built} for name, compatible, built in lines
    }
    return {"operators": operators, "problem": problem}


def _strategies() -> dict[str, Any]:
    """Which presets can run here, from how many ranks on, and what the others lack."""
    lines, problem = _ask(_STRATEGIES)
    return {
        "run": {name: ranks for name, ranks, _ in lines if ranks is not None},
        "refused": {name: reason for name, ranks, reason in lines if ranks is None},
        "problem": problem,
    }


def _ask(code: str) -> tuple[list[list[Any]], str | None]:
    """Run a probe: its answers, and what went wrong after the last of them."""
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
    return _answers(
        completed.stdout
    ), f"{cause}: {error_lines[-1] if error_lines else 'it said nothing'}"


def _answers(text: bytes) -> list[list[Any]]:
    whole = text[: text.rfind(b"\n") + 1]  # the last line may have been cut off
    return [parse_json(line, "a probe") for line in whole.splitlines()]


def _rates(*, again: bool) -> dict[str, Any]:
    """The rates as JSON values, with where they are kept."""
    cached = None if again else cached_rates()
    if cached is None:
        sys.stderr.write("measuring rates: some ten seconds, best on an idle machine\n")
    rates = cached or measured_rates(again=again)
    is_cached = cached_rates() == rates
    return {
        **asdict(rates),
        "from_cache": cached is not None,
        "cache": str(RATES.path) if is_cached else None,
    }


def _show(report: Mapping[str, Any]) -> None:
    console = Console(
        width=None if sys.stdout.isatty() else 150, markup=False, highlight=False, emoji=False
    )
    paragraphs = {
        "versions": _version_lines(report["versions"]),
        "machine": _device_lines(report["devices"]),
        "process groups": _backend_lines(report["backends"], len(report["devices"]["gpus"])),
        "launchers": [(n, path or "not found") for n, path in report["launchers"].items()],
        "compilers": [
            (name, path or f"not found: {_COMPILERS[name]}")
            for name, path in report["compilers"].items()
        ],
        "DeepSpeed's operators (bigtrain runs without them)": _operator_lines(
            report["deepspeed_operators"]
        ),
        "strategies": _strategy_lines(report["strategies"], len(report["devices"]["gpus"])),
    }
    if report["rates"] is not None:
        paragraphs["rates"] = _rate_lines(report["rates"])
    for title, lines in paragraphs.items():
        console.print(title, style="bold")
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        for name, text in lines:
            table.add_row(f"  {name}", text)
        console.print(table)


Lines = list[tuple[str, str]]


def _version_lines(versions: Mapping[str, Any]) -> Lines:
    lines = [
        (name, entry["version"] or f"missing: {entry['fix']}") for name, entry in versions.items()
    ]
    built = next(
        (
            f"built for {name} {versions['torch'][key]}"
            for key, name in (("cuda", "CUDA"), ("hip", "ROCm"), ("xpu", "XPU"))
            if versions["torch"][key]
        ),
        "built for the CPU alone",
    )
    return [(n, f"{text} ({built})" if n == "torch" else text) for n, text in lines]


def _device_lines(devices: Mapping[str, Any]) -> Lines:
    cpu, memory, scratch = devices["cpu"], devices["memory"], devices["scratch"]
    threads = f"torch uses {_count(devices['threads'], 'thread')}"
    cores = f"{cpu['usable_cores']} of {_count(cpu['cores'] or 0, 'core')} usable"
    lines = [("CPU", f"{cpu['name']}, {cores}, {threads}")]
    for number, gpu in enumerate(devices["gpus"]):
        sizes = f"{_size(gpu['total_bytes'])}, {_size(gpu['free_bytes'])} free"
        lines.append((f"GPU {number}", gpu["problem"] or f"{gpu['name']}, {sizes}"))
    if not devices["gpus"]:
        lines.append(("GPU", "torch sees none"))
    room = f"{_size(memory['free_bytes'])} free for this process"
    lines.append(("host memory", f"{_size(memory['total_bytes'])}, {room}"))
    if sys.platform == "linux":
        lines.append(("allocator", devices["allocator"] or _NO_TCMALLOC))
    where = f"{scratch['folder'] or 'none'} ({scratch['file_system'] or 'unknown file system'})"
    text = f"{where}, {_size(scratch['free_bytes'])} free"
    problem = f"; {scratch['problem']}" if scratch["problem"] else ""
    return [*lines, ("scratch", text + problem)]


def _backend_lines(backends: Mapping[str, bool], gpus: int) -> Lines:
    words = {True: "in this build of torch", False: "not in this build of torch"}
    idle = {"nccl": ", of no use without a GPU"} if backends["nccl"] and not gpus else {}
    return [(name, words[there] + idle.get(name, "")) for name, there in backends.items()]


def _operator_lines(report: Mapping[str, Any]) -> Lines:
    operators = report["operators"]
    built = [name for name, entry in operators.items() if entry["built"]]
    buildable = [n for n, entry in operators.items() if entry["compatible"] and not entry["built"]]
    lacking = [n for n, e in operators.items() if not e["compatible"] and not e["built"]]
    lines = []
    if operators:
        lines = [
            ("built", _listed(built)),
            ("can be built", _listed(buildable)),
            ("cannot be built", _listed(lacking)),
        ]
    return lines + _problem(report["problem"])


def _strategy_lines(report: Mapping[str, Any], gpus: int) -> Lines:
    run, refused = report["run"], report["refused"]
    lines = [("can run", f"{len(run)} of {len(run) + len(refused)} (see: bigtrain strategies)")]
    lines += [(name, reason) for name, reason in refused.items()]
    too_wide = [name for name, ranks in run.items() if gpus and ranks > gpus]
    if too_wide:
        text = f"not on {_count(gpus, 'GPU')}, but with device=cpu: {_listed(too_wide)}"
        lines.append(("more ranks", text))
    return lines + _problem(report["problem"])


def _rate_lines(rates: Mapping[str, Any]) -> Lines:
    flops = ", ".join(f"{name} {format_flops(value)}" for name, value in rates["flops"].items())
    lines = [
        ("matrix products", f"{flops} ({rates['device']})" if flops else "unknown"),
        *[("what else there is", text) for text in faster_precision(rates["flops"])],
        ("memory copy", _speed(rates["copy_bytes"])),
        ("disk write", _speed(rates["disk_write_bytes"])),
        ("disk read", _speed(rates["disk_read_bytes"])),
    ]
    if rates["device"] == "cuda":
        lines.append(("host to GPU", _speed(rates["to_device_bytes"])))
    first = {"latency": rates["link_latency"], "bytes": rates["link_bytes"]}
    for kind, figures in {"all_reduce": first, **rates["link_kinds"]}.items():
        latency = figures["latency"]
        small = "unknown" if latency is None else f"{latency * 1e6:.0f} microseconds, small"
        ranks = f"{kind.replace('_', '-')}, {rates['link_ranks']} ranks"
        lines.append((ranks, f"{small}; {_speed(figures['bytes'])}, large"))
    lines += [(f"problem: {part}", text) for part, text in rates["problems"].items()]
    busy = describe_others(rates["others_cores"])
    if busy:
        lines.append(("too low", f"measured {busy}: taken again the next time they are needed"))
    if rates["cache"] is None:
        return [*lines, ("not kept", f"in {RATES.path}: measured anew the next time")]
    since = "measured before" if rates["from_cache"] else "measured now"
    return [*lines, ("kept in", f"{rates['cache']} ({since}; --again measures anew)")]


def _problem(text: str | None) -> Lines:
    return [("problem", text)] if text else []


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _size(size: int | None) -> str:
    return "unknown" if size is None else format_bytes(size)


def _speed(rate: float | None) -> str:
    return "unknown" if rate is None else f"{format_bytes(rate)}/s"
