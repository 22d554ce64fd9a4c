"""Which allocator hands memory out on Linux, so that a process is little more than its tensors.

glibc keeps a heap for each thread and gives little of it back: where gloo's threads make and free
tensors beside the main one, a process holds up to 2.5 times its tensors. tcmalloc shares what is
free among threads (`benchmarks/process_memory.py` has the figures). It must be there when a process
begins, so only processes that bigtrain starts are given it.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
from collections.abc import Mapping
from contextlib import suppress

# mallopt's numbers for what is set.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_REPORTS = "TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD"


def tcmalloc() -> str | None:
    """The name under which the system's linker knows tcmalloc; None where it is not installed."""
    if sys.platform != "linux":
        return None
    return ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")


def allocator_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables with which a process that is started now gets tcmalloc.

    None where it is not installed, and none where the user has said how memory is to be handed
    out: `LD_PRELOAD` (empty, too), `MALLOC_...`, or glibc.malloc in `GLIBC_TUNABLES`.

    Args:
        environ: of the process that starts the others, normally `os.environ`.
    """
    is_set = "LD_PRELOAD" in environ or any(name.startswith("MALLOC_") for name in environ)
    if is_set or "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return {}
    library = tcmalloc()
    # It would say on standard error that a tensor of a GiB is large.
    return {} if library is None else {"LD_PRELOAD": library, _REPORTS: str(1 << 62)}


def return_large_blocks(nbytes: int) -> None:
    """Have glibc give freed blocks of this size and more back at once; no effect elsewhere."""
    if sys.platform != "linux" or "malloc" in os.environ.get("LD_PRELOAD", ""):
        return
    with suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, nbytes)
        library.mallopt(_TRIM_THRESHOLD, nbytes)
        library.malloc_trim(0)


def release_free_memory() -> None:
    """Have the allocator give back what is free in it: what is resident then is in use."""
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    with suppress(AttributeError, OSError):
        library.MallocExtension_ReleaseFreeMemory()  # tcmalloc's
        return
    with suppress(AttributeError, OSError):
        library.malloc_trim(0)
