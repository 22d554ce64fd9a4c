"""Measure the rates of this machine: computation, copies, disk, host to GPU, and between ranks.

A measurement takes a few seconds. `rate_cache` stores the rates by the hardware, the version of
torch and the number of ranks.
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
"""The ranks must answer within this many seconds for each rank. The time grows with the number of
ranks, because many ranks may share few cores."""
_DISK_BYTES = 64 * MIB
_Figure = TypeVar("_Figure")
PRODUCT_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class MeasuredRates:
    """The rates that one process reaches on this machine, and the rates between its ranks.

    On a machine with GPUs, computation and copies are measured on the first GPU. Otherwise they are
    measured on the CPU with a thread for each core, so ranks on the same cores share these rates.
    A rate that could not be measured is None, or is missing from `flops` and `link_kinds`;
    `problems` contains the reason.
    """

    device: str
    """The type of the device of `flops` and `copy_bytes`: 'cuda', 'xpu' or 'cpu'."""
    flops: dict[str, float]
    """Floating-point operations per second in a large matrix product, by precision: fp32, bf16."""
    copy_bytes: float | None
    """Bytes per second copied within the device's memory; each is read once and written once."""
    disk_write_bytes: float | None
    """Bytes per second written to the scratch folder, including the flush to the disk."""
    disk_read_bytes: float | None
    """Bytes per second read from the scratch folder; without the system's page cache, if that can
    be dropped."""
    to_device_bytes: float | None
    """Bytes per second copied from pinned host memory to the GPU; None without a GPU."""
    link_ranks: int
    """The number of ranks of this machine between which links were measured."""
    link_latency: float | None
    """Seconds of an all-reduce of one number."""
    link_bytes: float | None
    """Bytes per second that each rank sends in a large all-reduce, where each of n ranks sends
    2 (n-1)/n of the tensor."""
    link_kinds: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Figures by kind of exchange. `latency`: seconds of a small exchange. `bytes`: bytes per
    second that the busiest rank sends in a large exchange, counted as by
    `collective_cost.sent_bytes`. `curve`: pairs of the bytes of a whole exchange and its seconds.
    `after_work`: such a curve for ranks that have computed after the last exchange. `issue`: see
    `cluster.LinkSpec`."""
    others_cores: float | None = None
    """Cores that other programs used during the measurement; None if unknown or on a GPU."""
    problems: dict[str, str] = field(default_factory=dict)
    """The reason why a part could not be measured, by part: compute, memory, disk, device, link."""


def cpu_name() -> str:
    """Return the processor's name, or its architecture if the system does not report the name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, name = line.partition(":")
            if key.strip() == "model name":
                return name.strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def link_ranks(ranks: int | None = None) -> int:
    """Return the number of ranks between which links are measured.

    Args:
        ranks: the number of ranks on a CPU; None and lower numbers mean two. With several GPUs the
            result is their number.
    """
    return device_count() if device_count() > 1 else max(2, ranks or 2)


def measure_rates(ranks: int) -> MeasuredRates:
    """Measure the rates of this machine; `rate_cache.measured_rates` also caches them.

    Args:
        ranks: the number of ranks between which links are measured.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(usable_cores())  # a launcher may have set the number of threads to one
    try:
        return _measured(ranks)
    finally:
        torch.set_num_threads(threads)


def _measured(ranks: int) -> MeasuredRates:
    kind = accelerator()
    device = torch.device(kind, 0) if kind else torch.device("cpu")
    problems: dict[str, str] = {}
    flops = _part(lambda: _flops(device), "compute", problems) or {}
    copy_rate = _part(lambda: _copy_bytes(device), "memory", problems)
    disk_write, disk_read = _part(_disk_bytes, "disk", problems) or (None, None)
    to_device = None
    if kind:
        to_device = _part(lambda: _to_device_bytes(device), "device", problems)
        empty_cache()  # the ranks that measure links need the memory
    link = _part(lambda: _link(ranks), "link", problems) or {}
    return MeasuredRates(
        device=device.type,
        flops=flops,
        copy_bytes=copy_rate,
        disk_write_bytes=disk_write,
        disk_read_bytes=disk_read,
        to_device_bytes=to_device,
        link_ranks=ranks,
        link_latency=link.get("latency"),
        link_bytes=link.get("bytes"),
        link_kinds=link.get("kinds", {}),
        problems=problems,
    )


def _part(measure: Callable[[], _Figure], name: str, problems: dict[str, str]) -> _Figure | None:
    """Return the result of a measurement; if it fails, add the reason to the problems."""
    try:
        return measure()
    except (OSError, RuntimeError, ValueError, MemoryError) as error:
        first = (str(error).splitlines() or [""])[0]
        problems[name] = f"{type(error).__name__}: {first}" if first else type(error).__name__
        return None


def _seconds(
    work: Callable[[], object],
    device: torch.device,
    *,
    before: Callable[[], object] | None = None,
    warm: int = 2,
    limit_s: float = 0.3,
) -> float:
    """Return the median seconds of a function, after a warm-up.

    Args:
        work: the function that is timed.
        device: the device on which it runs.
        before: called before each repetition, and not timed.
        warm: the number of first repetitions that do not count.
        limit_s: the function is called for this many seconds, but at least three and at most 20
            times. The calls end earlier once they have taken ten times as long.
    """
    taken: list[float] = []
    spent = 0.0
    while len(taken) < warm + 20:
        if before is not None:
            before()
        began = time.perf_counter()
        work()
        synchronize(device)
        taken.append(time.perf_counter() - began)
        if len(taken) > warm:
            spent += taken[-1]
            if spent > 10 * limit_s or (spent > limit_s and len(taken) >= warm + 3):
                break
    return statistics.median(taken[warm:])


def _flops(device: torch.device) -> dict[str, float]:
    """Return the floating-point operations per second in products of matrices, by precision."""
    sizes = (1024, 2048, 4096, 8192) if is_accelerator(device) else (256, 512, 1024, 2048)
    generator = torch.Generator(device).manual_seed(0)  # does not advance the caller's generator
    best_flops: dict[str, float] = {}
    for name, kind in PRODUCT_TYPES.items():
        for size in sizes:  # larger products reach higher rates, but must not take too long
            a, b = (
                torch.randn(size, size, device=device, generator=generator).to(kind)
                for _ in range(2)
            )
            out = torch.empty_like(a)
            seconds = _seconds(partial(torch.mm, a, b, out=out), device)
            best_flops[name] = max(best_flops.get(name, 0.0), 2 * size**3 / seconds)
            if seconds > 0.02:
                break
    return best_flops


def _copy_bytes(device: torch.device) -> float:
    size = (512 if is_accelerator(device) else 128) * MIB
    if device.type == "cpu":
        size = min(size, (free_host_bytes() or size * 8) // 8)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return size / _seconds(lambda: target.copy_(source), device)


def _to_device_bytes(device: torch.device) -> float:
    size = min(256 * MIB, (free_host_bytes() or 8 * 256 * MIB) // 8)
    source = torch.ones(size, dtype=torch.uint8).pin_memory()
    target = torch.empty(size, dtype=torch.uint8, device=device)
    return size / _seconds(lambda: target.copy_(source, non_blocking=True), device)


def _disk_bytes() -> tuple[float, float]:
    """Return the bytes per second written to, and read from, a file in the scratch folder."""
    folder = scratch_folder()
    free = free_disk_bytes(folder)
    if free < 4 * _DISK_BYTES:
        raise OSError(
            f"{folder} has {format_bytes(free)} free, and the measurement needs "
            f"{format_bytes(4 * _DISK_BYTES)}. Set TMPDIR=FOLDER"
        )
    piece = os.urandom(_DISK_BYTES // 8)  # some file systems compress zeros
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

        # The first write, which allocates the file's blocks, does not count, because offloaded
        # state overwrites existing blocks.
        write_seconds = _seconds(write, cpu, warm=1, limit_s=1.0)
        read_seconds = _seconds(read, cpu, before=forget, warm=0, limit_s=1.0)
    return _DISK_BYTES / write_seconds, _DISK_BYTES / read_seconds


def _link(ranks: int) -> Mapping[str, Any]:
    """Measure the links between ranks; see the answer of `link_rates`."""
    kind = (accelerator() if device_count() > 1 else None) or "cpu"
    script, timeout = Path(__file__).parent / "link_rates.py", max(1, ranks) * LINK_TIMEOUT_S
    link_rates: dict[str, Any] = measured_by_ranks(script, ranks, [kind], timeout)
    return link_rates


def measured_by_ranks(script: Path, ranks: int, arguments: list[str], timeout: float) -> Any:
    """Start ranks on this machine that measure, and return their answer, parsed from JSON.

    The ranks run in separate processes, so that a hang or a crash does not affect this process.

    Args:
        script: a Python file that is run with `--start RANKS ANSWER` and the arguments. It writes
            JSON to the file ANSWER.
        ranks: the number of ranks that the script starts.
        arguments: further arguments for the script.
        timeout: the seconds in which the ranks must answer.

    Raises:
        RuntimeError: the ranks failed or did not answer in time.
    """
    with tempfile.TemporaryDirectory(prefix="bigtrain-measure-") as folder:
        answer, output = Path(folder) / "answer.json", Path(folder) / "output"
        command = [sys.executable, str(script), "--start", str(ranks), str(answer), *arguments]
        with output.open("w") as log:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            try:
                status = child.wait(timeout)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"{ranks} ranks did not answer in {timeout:.0f} s") from None
            finally:
                _end(child)
        if status != 0 or not is_regular(answer):
            lines = [line for line in read_text(output, errors="replace").splitlines() if line]
            last = lines[-1].removeprefix("bigtrain: ") if lines else "they printed nothing"
            raise RuntimeError(f"{ranks} ranks could not be measured: {last}")
        return read_json(answer)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the process that started the ranks; at SIGTERM the child first ends its ranks."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
