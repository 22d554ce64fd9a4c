"""Limit the memory of one rank, and recognise errors that mean that memory ran out.

On a GPU the caching allocator enforces the limit. On a CPU `StorageTracker` enforces it to the byte
while tensors are tracked. Afterwards the kernel enforces it by RLIMIT_DATA, which counts a
process's private writable memory, and not files on disk. RLIMIT_DATA is set to the limit on
tensors, plus the memory that the process already holds for other purposes, plus `ROOM_BYTES`. Only
the soft limit is set, so that the process can lift it to report the error.
"""

from __future__ import annotations

import errno
import math
import os
import re
import sys
from dataclasses import dataclass

import torch

from bigtrain.devices import capacity_bytes, free_bytes, is_accelerator, limit_memory
from bigtrain.errors import ConfigError
from bigtrain.memory.allocator import release_free_memory, return_large_blocks
from bigtrain.memory.host_memory import free_host_bytes, proc_status_bytes
from bigtrain.units import KIB, MIB, format_bytes, parse_bytes

_WORDS = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "bad allocation",
    "out of memory",
    "status_alloc_failed",  # cuBLAS and cuDNN
    "can't start new thread",  # the system has no memory for the thread's stack
)
# oneDNN gives no reason for these errors; under a limit the usual reason is a lack of memory.
_WORDS_UNDER_A_CAP = ("could not create a primitive", "could not execute a primitive")
_ASKED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|B|KiB|MiB|GiB|TiB)", re.IGNORECASE)


class MemoryCap:
    """Limits the memory of this process's tensors on its device.

    On a GPU the limit applies from construction. On a CPU the tracker has to enforce
    `tensor_limit` until `limit_process` is called.

    Args:
        limit: bytes, per rank; None sets no limit.
        device: this rank's device.

    Raises:
        ConfigError: the GPU has less memory than `limit`, or the device is a CPU and the system is
            not Linux.
    """

    def __init__(self, limit: int | None, device: torch.device) -> None:
        self.limit = limit
        self._device = device
        self._on_host = device.type == "cpu"
        if limit is None:
            return
        if not self._on_host:
            _cap_gpu(limit, device)
        elif sys.platform == "linux":
            _start_kernels()
            return_large_blocks(_CAPPED_BLOCK_BYTES)
        else:
            raise ConfigError(
                f"memory.cap={limit} needs Linux on a CPU, and this is {sys.platform}. "
                "Leave memory.cap out."
            )

    @property
    def tensor_limit(self) -> int | None:
        """Bytes that tracked tensors may take on a CPU; None on a GPU or if there is no limit."""
        return self.limit if self._on_host else None

    def limit_process(self, tensor_bytes: int) -> None:
        """Let the kernel enforce the limit on a CPU; do nothing on a GPU or without a limit.

        Memory that the process holds for other things than tensors does not count.

        Args:
            tensor_bytes: the bytes of this rank's tensors at the time of the call.
        """
        if self.limit is None or not self._on_host:
            return
        release_free_memory()  # an allocator's free memory is no part of the base
        base = (proc_status_bytes("VmData") or 0) - tensor_bytes
        _set_soft(base + ROOM_BYTES + self.limit)

    def lift(self) -> None:
        """Remove the limit."""
        if self.limit is None:
            return
        if self._on_host:
            _set_soft(None)
        else:
            limit_memory(self._device, 1.0)


def _cap_gpu(limit: int, device: torch.device) -> None:
    capacity = device_capacity_bytes(device) or limit
    if limit > capacity:
        raise ConfigError(
            f"memory.cap={format_bytes(limit)} is more than the {format_bytes(capacity)} of "
            f"{device}. "
            f"Use memory.cap={capacity} or less, or leave it out."
        )
    limit_memory(device, limit / capacity)


def _start_kernels() -> None:
    """Run some operations, so that torch's kernels allocate their threads and buffers.

    This memory then counts as memory of the process that holds no tensor.
    """
    rows = torch.ones(512, 512, requires_grad=True)
    weight = torch.ones(2048, 512, requires_grad=True)
    (rows @ weight.t()).exp().sum().backward()  # type: ignore[no-untyped-call]


def _set_soft(limit: int | None) -> None:
    # The module exists on Unix only.
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = hard if limit is None else limit
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def device_capacity_bytes(device: torch.device) -> int | None:
    """Bytes of memory of a GPU, or of the host if the device is a CPU; None if unknown."""
    if is_accelerator(device):
        return capacity_bytes(device)
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    return pages * size


def _is_capped() -> bool:
    """Whether the kernel limits this process's writable memory."""
    if sys.platform != "linux":
        return False
    import resource

    return resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY


def available_bytes(limit: int | None, device: torch.device, local_ranks: int) -> int | None:
    """Return the bytes that one rank can take: its limit, or the free memory of its device.

    On a CPU the ranks of a host share the free memory equally. The free memory is that at the call,
    so the function has to be called before the rank has allocated memory.

    Args:
        limit: the job's `memory.cap` in bytes, or None.
        device: this rank's device.
        local_ranks: the number of ranks that share the host's memory.

    Returns:
        Bytes per rank; None if the free memory is unknown.
    """
    if limit is not None:
        return limit
    if is_accelerator(device):
        return free_bytes(device)
    free = free_host_bytes()
    return None if free is None else free // local_ranks


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out.

    Libraries share no exception type for this, so the text of a RuntimeError is searched as well.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error).lower()
    words = (*_WORDS, *_WORDS_UNDER_A_CAP) if _is_capped() else _WORDS
    return isinstance(error, RuntimeError) and any(word in text for word in words)


def requested_bytes(error: BaseException) -> int | None:
    """Return the bytes of the allocation that failed; None if the error's text has no size."""
    match = _ASKED.search(str(error))
    if match is None:
        return None
    unit = "" if match[2].lower() in ("bytes", "b") else match[2]
    return parse_bytes(match[1] + unit)


ROOM_BYTES = 24 * MIB
"""Bytes by which RLIMIT_DATA exceeds the limit on tensors and the process's other memory. They
are for scratch space of kernels and of exchanges, and for the rounding of blocks."""
_CAPPED_BLOCK_BYTES = 64 * KIB
"""Under a cap, freed blocks of at least this size are returned to the system at once, because
RLIMIT_DATA counts unused memory in the heap."""
USABLE_FRACTION, NON_TENSOR_BYTES = 0.95, 8 * MIB
"""A predicted peak may take this share of the limit, less these bytes. Allocators round up, and
kernels, graphs and Python's objects need memory in addition to tensors."""
ACCELERATOR_BYTES = 256 * MIB
"""Bytes that a predicted peak has to leave free on an accelerator on which nothing was measured.
The allocator's limit includes all memory that it reserves. cuBLAS has a workspace of 32 MiB for
each of two threads on Hopper, cuBLASLt may have the same, and the allocator reserves memory in
pieces of 2 and 20 MiB."""


@dataclass(frozen=True)
class Limit:
    """The memory that a rank may take, and the part of it that its tensors may take."""

    nbytes: int
    """The bytes of the device's memory that the rank may take, or of its cap."""
    reserved: int | None = None
    """Bytes of a device that a process takes even without tensors; None if a cap is enforced."""
    non_tensor_bytes: int = NON_TENSOR_BYTES
    """Bytes of a cap that are not for tensors (see `residuals.non_tensor_reserve`); used only if
    `reserved` is None."""

    @property
    def for_tensors(self) -> int:
        """The largest predicted peak of tensors that fits, in bytes."""
        if self.reserved is None:
            return int(self.nbytes * USABLE_FRACTION) - self.non_tensor_bytes
        return self.nbytes - self.reserved

    def memory_for(self, peak_bytes: int) -> int:
        """Return the bytes of a device, or of a cap, that a predicted peak of tensors needs."""
        if self.reserved is None:
            return math.ceil((peak_bytes + self.non_tensor_bytes) / USABLE_FRACTION) + 1
        return peak_bytes + self.reserved
