"""Choose and tune the allocator on Linux, so that a process takes little more than its tensors.

glibc keeps a heap for each thread and returns little of it to the system. If gloo's threads make
and free tensors as the main thread does, a process takes up to 2.5 times the bytes of its tensors.
tcmalloc shares free memory among threads (`benchmarks/process_memory.py` measures both). The
allocator must be loaded when a process starts, so only processes that bigtrain starts use tcmalloc.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
from collections.abc import Mapping
from contextlib import suppress

# The numbers by which mallopt identifies its parameters (malloc.h).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_REPORTS = "TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD"


def tcmalloc() -> str | None:
    """Return the name by which the system's linker finds tcmalloc; None if it is not installed."""
    if sys.platform != "linux":
        return None
    return ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")


def allocator_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that make a new process use tcmalloc.

    The result is empty if tcmalloc is not installed or if the user has chosen an allocator. The
    user chooses one by `LD_PRELOAD` (even if it is empty), by a variable `MALLOC_...`, or by
    glibc.malloc in `GLIBC_TUNABLES`.

    Args:
        environ: the environment of the process that starts the others, normally `os.environ`.
    """
    is_set = "LD_PRELOAD" in environ or any(name.startswith("MALLOC_") for name in environ)
    if is_set or "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return {}
    library = tcmalloc()
    # With the default threshold tcmalloc reports each allocation of a GiB on standard error.
    return {} if library is None else {"LD_PRELOAD": library, _REPORTS: str(1 << 62)}


def return_large_blocks(nbytes: int) -> None:
    """Make glibc return freed blocks of at least `nbytes` bytes to the system at once.

    Does nothing on other systems than Linux, or if `LD_PRELOAD` names another malloc.
    """
    if sys.platform != "linux" or "malloc" in os.environ.get("LD_PRELOAD", ""):
        return
    with suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, nbytes)
        library.mallopt(_TRIM_THRESHOLD, nbytes)
        library.malloc_trim(0)


def release_free_memory() -> None:
    """Make the allocator return its free memory to the system (on Linux; otherwise do nothing).

    Afterwards the resident memory of the process is nearly all in use.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    with suppress(AttributeError, OSError):
        library.MallocExtension_ReleaseFreeMemory()  # exists if tcmalloc is loaded
        return
    with suppress(AttributeError, OSError):
        library.malloc_trim(0)
