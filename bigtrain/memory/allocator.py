"""The memory allocator on Linux, so that a process takes little more than its tensors.

glibc keeps a heap for each thread and returns little of it: if gloo's threads make and free tensors
as the main thread does, a process takes up to 2.5 times its tensors. tcmalloc shares free memory
among threads (`benchmarks/process_memory.py` has the figures). It must be loaded when a process
starts, so only processes that bigtrain starts use it.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
from collections.abc import Mapping
from contextlib import suppress

# mallopt's numbers of its parameters.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_REPORTS = "TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD"


def tcmalloc() -> str | None:
    """The name by which the system's linker finds tcmalloc; None if it is not installed."""
    if sys.platform != "linux":
        return None
    return ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")


def allocator_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that make a new process use tcmalloc.

    There are none if it is not installed, or if the user has chosen an allocator: by `LD_PRELOAD`
    (even an empty one), `MALLOC_...`, or glibc.malloc in `GLIBC_TUNABLES`.

    Args:
        environ: the environment of the process that starts the others, normally `os.environ`.
    """
    is_set = "LD_PRELOAD" in environ or any(name.startswith("MALLOC_") for name in environ)
    if is_set or "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return {}
    library = tcmalloc()
    # Otherwise it warns on standard error of allocations of a GiB.
    return {} if library is None else {"LD_PRELOAD": library, _REPORTS: str(1 << 62)}


def return_large_blocks(nbytes: int) -> None:
    """Make glibc return freed blocks of at least this size at once; elsewhere do nothing."""
    if sys.platform != "linux" or "malloc" in os.environ.get("LD_PRELOAD", ""):
        return
    with suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, nbytes)
        library.mallopt(_TRIM_THRESHOLD, nbytes)
        library.malloc_trim(0)


def release_free_memory() -> None:
    """Make the allocator return its free memory, so that all resident memory is in use."""
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    with suppress(AttributeError, OSError):
        library.MallocExtension_ReleaseFreeMemory()  # tcmalloc's
        return
    with suppress(AttributeError, OSError):
        library.malloc_trim(0)
