"""A limit on what one rank may take, and how to tell that memory ran out.

On a GPU the caching allocator keeps the limit. On a CPU the kernel does: RLIMIT_DATA counts what
a process has mapped for itself to write to (tensors, the heap, workspaces), and not files on
disk. Only the soft limit is set, so that it can be lifted again to explain what happened.
"""

from __future__ import annotations

import ctypes
import errno
import math
import re
import sys
from contextlib import suppress
from dataclasses import dataclass

import torch

from bigtrain.errors import ConfigError
from bigtrain.memory.host_memory import free_host_bytes
from bigtrain.memory.meter import device_capacity_bytes, proc_status_bytes
from bigtrain.units import MIB, format_bytes, parse_bytes

# mallopt's names for: from which size on a block is a mapping of its own; arenas.
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8
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
_ASKED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|B|KiB|MiB|GiB|TiB)", re.IGNORECASE)


class MemoryCap:
    """The most that this process may take on its device from now on.

    Args:
        limit: bytes; of a GPU, or on a CPU above what the process holds now. None limits nothing.
        device: of this rank.

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
            _warm_up()
            free = _return_freed()
            _set_soft((proc_status_bytes("VmData") or 0) - free + limit)
        else:
            raise ConfigError(
                f"memory.cap={limit} is kept by Linux on a CPU, and this is {sys.platform}. "
                "Leave memory.cap out."
            )

    def lift(self) -> None:
        """Take the limit away."""
        if self.limit is None:
            return
        if self._on_host:
            _set_soft(None)
        else:
            torch.cuda.set_per_process_memory_fraction(1.0, self._device)


def _cap_gpu(limit: int, device: torch.device) -> None:
    capacity = device_capacity_bytes(device) or limit
    if limit > capacity:
        raise ConfigError(
            f"memory.cap={format_bytes(limit)} is more than the {format_bytes(capacity)} of "
            f"{device}. "
            f"Use memory.cap={capacity} or less, or leave it out."
        )
    torch.cuda.set_per_process_memory_fraction(limit / capacity, device)


def _warm_up() -> None:
    """Have the threads of torch's kernels started: their stacks are not the run's memory."""
    ones = torch.ones(512, 512, requires_grad=True)
    (ones @ ones).exp().sum().backward()  # type: ignore[no-untyped-call]


class _Heap(ctypes.Structure):
    """The C library's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _return_freed() -> int:
    """Let the C library give freed tensors back at once, so that the limit is on what is held.

    Returns:
        Bytes that are mapped for the heap and not in use: the run will find them there.
    """
    with suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, 65536)
        library.mallopt(_ARENA_MAX, 2)
        library.malloc_trim(0)
        library.mallinfo2.restype = _Heap
        return int(library.mallinfo2().fordblks)
    return 0


def _set_soft(limit: int | None) -> None:
    # A module of one system only.
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = hard if limit is None else limit
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def available_bytes(limit: int | None, device: torch.device, local_ranks: int) -> int | None:
    """What one rank can take before it takes it, in bytes; None where unknown.

    Args:
        limit: the job's cap.
        device: of this rank.
        local_ranks: ranks that share the host's memory.
    """
    if limit is not None:
        return limit
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = free_host_bytes()
    return None if free is None else free // local_ranks


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out; libraries share no exception type for it."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _WORDS)


def requested_bytes(error: BaseException) -> int | None:
    """How much was asked for when memory ran out, where the error tells."""
    match = _ASKED.search(str(error))
    if match is None:
        return None
    unit = "" if match[2].lower() in ("bytes", "b") else match[2]
    return parse_bytes(match[1] + unit)


USABLE_FRACTION, NON_TENSOR_BYTES = 0.95, 8 * MIB
"""Of the room a predicted peak may fill this share, less these bytes: allocators round up, and
kernels, graphs and Python's objects need memory beside the tensors."""


@dataclass(frozen=True)
class Limit:
    """What a rank may take, and how much of that its tensors may be."""

    nbytes: int
    reserved: int | None = None
    """What a process takes of a device without any tensor; None where a cap is enforced."""

    @property
    def for_tensors(self) -> int:
        """The most bytes that a predicted peak may have."""
        if self.reserved is None:
            return int(self.nbytes * USABLE_FRACTION) - NON_TENSOR_BYTES
        return self.nbytes - self.reserved

    def memory_for(self, peak_bytes: int) -> int:
        """Bytes of a device, or of a cap, with which such a peak would fit."""
        if self.reserved is None:
            return math.ceil((peak_bytes + NON_TENSOR_BYTES) / USABLE_FRACTION) + 1
        return peak_bytes + self.reserved
