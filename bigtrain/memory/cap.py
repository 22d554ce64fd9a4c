"""A limit on the memory of one rank, and how to recognise that memory ran out.

On a GPU the caching allocator enforces the limit. On a CPU `StorageTracker` enforces it to the byte
while tensors are tracked, and afterwards the kernel does: RLIMIT_DATA counts a process's private
writable memory, and not files on disk. It is set to the limit on tensors, plus the memory that the
process was seen to hold for other purposes, plus `ROOM_BYTES`. Only the soft limit is set, so that
it can be lifted to explain what happened.
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
from bigtrain.memory.allocator import return_large_blocks
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
    "can't start new thread",  # a thread's stack is memory, too
)
# oneDNN gives no reason; in a limited process it is out of memory.
_WORDS_UNDER_A_CAP = ("could not create a primitive", "could not execute a primitive")
_ASKED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|B|KiB|MiB|GiB|TiB)", re.IGNORECASE)


class MemoryCap:
    """Limits the memory of this process's tensors on its device, from its construction.

    Args:
        limit: bytes, per rank. None limits nothing.
        device: this rank's device.

    Raises:
        ConfigError: the GPU has less, or this system cannot limit a process.
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
        """Bytes that tensors on a CPU may take while they are tracked; None: no limit."""
        return self.limit if self._on_host else None

    def limit_process(self, tensor_bytes: int) -> None:
        """Let the kernel enforce the limit on a CPU, on top of memory that is no tensor now.

        Args:
            tensor_bytes: the bytes of this rank's tensors now.
        """
        if self.limit is None or not self._on_host:
            return
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
    """Make torch's kernels allocate their threads and buffers, which are no tensors of the run."""
    rows = torch.ones(512, 512, requires_grad=True)
    weight = torch.ones(2048, 512, requires_grad=True)
    (rows @ weight.t()).exp().sum().backward()  # type: ignore[no-untyped-call]


def _set_soft(limit: int | None) -> None:
    # It exists on Unix only.
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = hard if limit is None else limit
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def device_capacity_bytes(device: torch.device) -> int | None:
    """The memory of a device: of a GPU, or of the host for a CPU. None if unknown."""
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
    """The bytes that one rank can take, before it has taken any; None if unknown.

    Args:
        limit: the job's cap.
        device: this rank's device.
        local_ranks: ranks that share the host's memory.
    """
    if limit is not None:
        return limit
    if is_accelerator(device):
        return free_bytes(device)
    free = free_host_bytes()
    return None if free is None else free // local_ranks


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out; libraries share no exception type for it."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error).lower()
    words = (*_WORDS, *_WORDS_UNDER_A_CAP) if _is_capped() else _WORDS
    return isinstance(error, RuntimeError) and any(word in text for word in words)


def requested_bytes(error: BaseException) -> int | None:
    """The bytes of the request that failed; None if the error does not tell."""
    match = _ASKED.search(str(error))
    if match is None:
        return None
    unit = "" if match[2].lower() in ("bytes", "b") else match[2]
    return parse_bytes(match[1] + unit)


ROOM_BYTES = 24 * MIB
"""The kernel's limit in addition to the tensors and the process's base: for scratch space of
kernels and of exchanges, and blocks that are rounded up."""
_CAPPED_BLOCK_BYTES = 64 * KIB
"""Under a cap, freed blocks of at least this size are returned to the system: unused memory in the
heap would count."""
USABLE_FRACTION, NON_TENSOR_BYTES = 0.95, 8 * MIB
"""A predicted peak may take this share of the limit, less these bytes: allocators round up, and
kernels, graphs and Python's objects need memory besides tensors."""
ACCELERATOR_BYTES = 256 * MIB
"""The bytes that a predicted peak leaves free on an accelerator on which nothing was measured. The
allocator's limit includes all that it reserves: cuBLAS has 32 MiB for each of two threads on
Hopper, cuBLASLt may have the same, and the allocator reserves memory in pieces of 2 and 20 MiB."""


@dataclass(frozen=True)
class Limit:
    """The memory that a rank may take, and the part of it that its tensors may take."""

    nbytes: int
    reserved: int | None = None
    """Bytes that a process takes of a device without any tensor; None if a cap is enforced."""
    non_tensor_bytes: int = NON_TENSOR_BYTES
    """Under a cap: bytes reserved for other than tensors; see `residuals.non_tensor_reserve`."""

    @property
    def for_tensors(self) -> int:
        """The largest predicted peak that fits, in bytes."""
        if self.reserved is None:
            return int(self.nbytes * USABLE_FRACTION) - self.non_tensor_bytes
        return self.nbytes - self.reserved

    def memory_for(self, peak_bytes: int) -> int:
        """The bytes of a device, or of a cap, that such a peak needs."""
        if self.reserved is None:
            return math.ceil((peak_bytes + self.non_tensor_bytes) / USABLE_FRACTION) + 1
        return peak_bytes + self.reserved
