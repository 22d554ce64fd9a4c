"""How fast this machine is: computing, copying, its disk, the way to a GPU, between two ranks.

Measured in a few seconds, and kept in $XDG_CACHE_HOME/bigtrain/rates.json (left out: ~/.cache) for
the hardware, the version of torch and the number of ranks that they were measured with.
"""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from bigtrain.devices import accelerator, device_count, empty_cache, is_accelerator, synchronize
from bigtrain.files.parse import read_json
from bigtrain.files.regular import is_regular, read_text
from bigtrain.memory.disk import free_disk_bytes, scratch_folder
from bigtrain.memory.host_memory import free_host_bytes
from bigtrain.units import MIB, format_bytes

LINK_TIMEOUT_S = 60.0
"""Seconds for each of the ranks, after which those that have not answered are given up: on a few
cores many take turns."""
_DISK_BYTES = 64 * MIB
_Found = TypeVar("_Found")
PRODUCT_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class MeasuredRates:
    """What one process reaches on this machine, and what its ranks reach together.

    On a machine with GPUs, computing and copying are those of the first GPU; otherwise of the CPU
    with a thread for each core: ranks that share the cores share these rates.
    None stands for what could not be measured; `problems` says why.
    """

    device: str
    """'cuda' or 'cpu': what `flops` and `copy_bytes` are of."""
    flops: dict[str, float]
    """Floating-point operations per second in a large matrix product, by precision: fp32, bf16."""
    copy_bytes: float | None
    """Bytes per second that are copied within the device's memory: read once and written once."""
    disk_write_bytes: float | None
    """Bytes per second that are written to the scratch folder, until the disk has them."""
    disk_read_bytes: float | None
    """Bytes per second that are read from there, not from the system's cache of files where that
    can be emptied."""
    to_device_bytes: float | None
    """Bytes per second from pinned host memory to the GPU; None without one."""
    link_ranks: int
    """Between how many ranks of this machine the next two were measured."""
    link_latency: float | None
    """Seconds of an all-reduce of one number."""
    link_bytes: float | None
    """Bytes per second that each rank sends in a large all-reduce; of n ranks each sends
    2 (n-1)/n of its size."""
    link_kinds: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Exchanges by kind: `latency`, seconds of a small one, `bytes` per second that the busiest
    rank sends in a large one, as `collective_cost.sent_bytes` counts them, `curve`, pairs of the
    bytes of a whole exchange and its seconds, `after_work`, the same of ranks that have computed
    since the last one, and `issue`; see `cluster.LinkSpec`."""
    others_cores: float | None = None
    """Cores that other programs took meanwhile; None where nobody knows."""
    problems: dict[str, str] = field(default_factory=dict)
    """What could not be measured, by part (compute, memory, disk, device, link), and why."""


def cpu_name() -> str:
    """The processor's name, or its architecture where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, name = line.partition(":")
            if key.strip() == "model name":
                return name.strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def link_ranks(ranks: int | None = None) -> int:
    """Between how many ranks the link is measured: the GPUs, or on a CPU so many, at least two."""
    return device_count() if device_count() > 1 else max(2, ranks or 2)


def measure_rates(ranks: int) -> MeasuredRates:
    """The rates of this machine, measured now; see `rate_cache.measured_rates`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(usable_cores())  # launchers of several ranks allow each one thread
    try:
        return _measured(ranks)
    finally:
        torch.set_num_threads(threads)


def _measured(ranks: int) -> MeasuredRates:
    kind = accelerator()
    measured = torch.device(kind, 0) if kind else torch.device("cpu")
    problems: dict[str, str] = {}
    flops = _part(lambda: _flops(measured), "compute", problems) or {}
    copied = _part(lambda: _copy_bytes(measured), "memory", problems)
    disk = _part(_disk_bytes, "disk", problems) or (None, None)
    moved = None
    if kind:
        moved = _part(lambda: _to_device_bytes(measured), "device", problems)
        empty_cache()  # the ranks want the memory
    link = _part(lambda: _link(ranks), "link", problems) or {}
    return MeasuredRates(
        device=measured.type,
        flops=flops,
        copy_bytes=copied,
        disk_write_bytes=disk[0],
        disk_read_bytes=disk[1],
        to_device_bytes=moved,
        link_ranks=ranks,
        link_latency=link.get("latency"),
        link_bytes=link.get("bytes"),
        link_kinds=link.get("kinds", {}),
        problems=problems,
    )


def _part(measure: Callable[[], _Found], name: str, problems: dict[str, str]) -> _Found | None:
    """What a measurement gives; None, and a line among the problems, where it fails."""
    try:
        return measure()
    except (OSError, RuntimeError, ValueError, MemoryError) as error:
        first = (str(error).splitlines() or [""])[0]
        problems[name] = f"{type(error).__name__}: {first}" if first else type(error).__name__
        return None


def _seconds(
    work: Callable[[], object],
    place: torch.device,
    *,
    before: Callable[[], object] | None = None,
    warm: int = 2,
    limit_s: float = 0.3,
) -> float:
    """The median time of a piece of work, after a warm-up.

    Args:
        work: what is timed.
        place: on which it runs.
        before: called each time, and not timed.
        warm: how often the work is done first.
        limit_s: it is repeated for so long, and three times at least; where that would be ten
            times as long, once.
    """
    taken: list[float] = []
    spent = 0.0
    while len(taken) < warm + 20:
        if before is not None:
            before()
        began = time.perf_counter()
        work()
        synchronize(place)
        taken.append(time.perf_counter() - began)
        if len(taken) > warm:
            spent += taken[-1]
            if spent > 10 * limit_s or (spent > limit_s and len(taken) >= warm + 3):
                break
    return statistics.median(taken[warm:])


def _flops(place: torch.device) -> dict[str, float]:
    """Operations per second in products of square matrices, by precision."""
    sizes = (1024, 2048, 4096, 8192) if is_accelerator(place) else (256, 512, 1024, 2048)
    generator = torch.Generator(place).manual_seed(0)  # the caller's own random numbers stay
    best_flops: dict[str, float] = {}
    for name, kind in PRODUCT_TYPES.items():
        for size in sizes:  # larger ones are faster, up to where a single one takes long
            a, b = (
                torch.randn(size, size, device=place, generator=generator).to(kind)
                for _ in range(2)
            )
            out = torch.empty_like(a)
            seconds = _seconds(partial(torch.mm, a, b, out=out), place)
            best_flops[name] = max(best_flops.get(name, 0.0), 2 * size**3 / seconds)
            if seconds > 0.02:
                break
    return best_flops


def _copy_bytes(place: torch.device) -> float:
    size = (512 if is_accelerator(place) else 128) * MIB
    if place.type == "cpu":
        size = min(size, (free_host_bytes() or size * 8) // 8)
    source = torch.ones(size, dtype=torch.uint8, device=place)
    target = torch.empty_like(source)
    return size / _seconds(lambda: target.copy_(source), place)


def _to_device_bytes(place: torch.device) -> float:
    size = min(256 * MIB, (free_host_bytes() or 8 * 256 * MIB) // 8)
    source = torch.ones(size, dtype=torch.uint8).pin_memory()
    target = torch.empty(size, dtype=torch.uint8, device=place)
    return size / _seconds(lambda: target.copy_(source, non_blocking=True), place)


def _disk_bytes() -> tuple[float, float]:
    """Bytes per second to and from a file in the scratch folder."""
    folder = scratch_folder()
    free = free_disk_bytes(folder)
    if free < 4 * _DISK_BYTES:
        raise OSError(
            f"{folder} has {format_bytes(free)} free, and {format_bytes(4 * _DISK_BYTES)} are "
            "needed to measure. Set TMPDIR=FOLDER"
        )
    piece = os.urandom(_DISK_BYTES // 8)  # zeros would be compressed by some file systems
    target = bytearray(len(piece))
    cpu = torch.device("cpu")
    with tempfile.TemporaryFile(prefix="bigtrain-", dir=folder, buffering=0) as file:

        def write() -> None:
            file.seek(0)
            for _ in range(8):
                file.write(piece)
            os.fsync(file.fileno())

        def read() -> None:
            file.seek(0)
            while file.readinto(target):
                pass

        def forget() -> None:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        # Space is given to the file the first time; state that is moved overwrites its own.
        written = _seconds(write, cpu, warm=1, limit_s=1.0)
        taken = _seconds(read, cpu, before=forget, warm=0, limit_s=1.0)
    return _DISK_BYTES / written, _DISK_BYTES / taken


def _link(ranks: int) -> Mapping[str, Any]:
    """What `link_rates` finds."""
    kind = (accelerator() if device_count() > 1 else None) or "cpu"
    script, timeout = Path(__file__).parent / "link_rates.py", max(1, ranks) * LINK_TIMEOUT_S
    link_rates: dict[str, Any] = measured_by_ranks(script, ranks, [kind], timeout)
    return link_rates


def measured_by_ranks(script: Path, ranks: int, arguments: list[str], timeout: float) -> Any:
    """What ranks of this machine measure, in processes of their own: they can hang or crash there.

    Args:
        script: run with `--start RANKS ANSWER` and the arguments; writes JSON to the file ANSWER.
        ranks: that it starts.
        arguments: for the script.
        timeout: seconds.

    Raises:
        RuntimeError: they did not answer.
    """
    with tempfile.TemporaryDirectory(prefix="bigtrain-measure-") as folder:
        answer, said = Path(folder) / "answer.json", Path(folder) / "said"
        command = [sys.executable, str(script), "--start", str(ranks), str(answer), *arguments]
        with said.open("w") as log:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            try:
                status = child.wait(timeout)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"{ranks} ranks did not answer in {timeout:.0f} s") from None
            finally:
                _end(child)
        if status != 0 or not is_regular(answer):
            lines = [line for line in read_text(said, errors="replace").splitlines() if line]
            last = lines[-1].removeprefix("bigtrain: ") if lines else "they said nothing"
            raise RuntimeError(f"{ranks} ranks could not be measured: {last}")
        return read_json(answer)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End what starts the ranks; asked to, it ends them first."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
