"""Print the pages of `bigtrain doctor`: the report on a machine, and the table of its checks."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bigtrain.doctor.probes import COMPILERS
from bigtrain.doctor.rules import CheckedRun, CheckVerdict
from bigtrain.machine.busy import describe_others
from bigtrain.machine.rate_cache import RATES, faster_precision
from bigtrain.units import format_bytes, format_flops

Lines = list[tuple[str, str]]
_NO_ALLOCATOR = (
    "the C library's. pip install 'bigtrain[cpu]' (or apt install libtcmalloc-minimal4): then "
    "processes without a GPU take as little as half the memory"
)


def show_machine(report: Mapping[str, Any]) -> None:
    """Print the report of `probes.examine_machine`, with its rates unless they are None."""
    console = _console(150)
    paragraphs = {
        "versions": _version_lines(report["versions"]),
        "machine": _device_lines(report["devices"]),
        "process groups": _backend_lines(report["backends"], len(report["devices"]["gpus"])),
        "launchers": [(n, path or "not found") for n, path in report["launchers"].items()],
        "compilers": [
            (name, path or f"not found: {COMPILERS[name]}")
            for name, path in report["compilers"].items()
        ],
        "DeepSpeed's operators (optional)": _operator_lines(report["deepspeed_operators"]),
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
    free = f"{_size(memory['free_bytes'])} free for this process"
    lines.append(("host memory", f"{_size(memory['total_bytes'])}, {free}"))
    if sys.platform == "linux":
        lines.append(("allocator", devices["allocator"] or _NO_ALLOCATOR))
    folder = f"{scratch['folder'] or 'none'} ({scratch['file_system'] or 'unknown file system'})"
    text = f"{folder}, {_size(scratch['free_bytes'])} free"
    problem = f"; {scratch['problem']}" if scratch["problem"] else ""
    return [*lines, ("scratch", text + problem)]


def _backend_lines(backends: Mapping[str, bool], gpus: int) -> Lines:
    words = {True: "in this build of torch", False: "not in this build of torch"}
    idle = {"nccl": ", unused without a GPU"} if backends["nccl"] and not gpus else {}
    return [(name, words[has] + idle.get(name, "")) for name, has in backends.items()]


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
        text = f"too many for {_count(gpus, 'GPU')}, but not for device=cpu: {_listed(too_wide)}"
        lines.append(("more ranks", text))
    return lines + _problem(report["problem"])


def _rate_lines(rates: Mapping[str, Any]) -> Lines:
    flops = ", ".join(f"{name} {format_flops(value)}" for name, value in rates["flops"].items())
    lines = [
        ("matrix products", f"{flops} ({rates['device']})" if flops else "unknown"),
        *[("advice", text) for text in faster_precision(rates["flops"])],
        ("memory copy", _speed(rates["copy_bytes"])),
        ("disk write", _speed(rates["disk_write_bytes"])),
        ("disk read", _speed(rates["disk_read_bytes"])),
    ]
    if rates["device"] == "cuda":
        lines.append(("host to GPU", _speed(rates["to_device_bytes"])))
    first = {"latency": rates["link_latency"], "bytes": rates["link_bytes"]}
    for kind, figures in {"all_reduce": first, **rates["link_kinds"]}.items():
        latency = figures["latency"]
        small = "unknown" if latency is None else f"{latency * 1e6:.0f} microseconds for a small"
        ranks = f"{kind.replace('_', '-')}, {rates['link_ranks']} ranks"
        lines.append((ranks, f"{small}, {_speed(figures['bytes'])} for a large message"))
    lines += [(f"problem: {part}", text) for part, text in rates["problems"].items()]
    busy = describe_others(rates["others_cores"])
    if busy:
        lines.append(("too low", f"measured {busy}: they are measured again at the next use"))
    if rates["cache"] is None:
        return [*lines, ("not cached", f"in {RATES.path}: they are measured again at the next use")]
    when = "measured before" if rates["from_cache"] else "measured now"
    return [*lines, ("cached in", f"{rates['cache']} ({when}; --again measures them again)")]


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


def show_checks(runs: Sequence[CheckedRun], output: str) -> None:
    """Print the table of checks, and the path of the file with their figures.

    Args:
        runs: the results of the checks.
        output: the path of the file.
    """
    table = Table(title=verdicts_line(runs), title_justify="left")
    for name in ("check", "promise", "", "figures, or the fault"):
        table.add_column(name, overflow="fold")
    for run in runs:
        table.add_row(run.name, run.promise, run.verdict, run.explanation)
    console = _console(160)
    console.print(table)
    console.print(f"all figures: {output}", soft_wrap=True)


def verdicts_line(runs: Sequence[CheckedRun]) -> str:
    """Return how many checks passed, failed and were skipped, as text; zeros are left out."""
    counts = Counter(run.verdict for run in runs)
    kinds: tuple[CheckVerdict, ...] = ("passed", "failed", "skipped")
    return ", ".join(f"{counts[kind]} {kind}" for kind in kinds if counts[kind]) or "nothing ran"


def _console(width: int) -> Console:
    """Return a console, which has the given width if standard output is no terminal."""
    return Console(
        width=None if sys.stdout.isatty() else width, markup=False, highlight=False, emoji=False
    )
