"""Choose and tune the allocator on Linux, so that a process takes little more than its tensors.

glibc keeps freed memory in pieces that larger tensors do not fit into: on a CPU a process under
fsdp takes up to 2.5 times the bytes of its tensors. tcmalloc, and tbbmalloc of oneTBB, reuse large
blocks better (`benchmarks/process_memory.py` measures them). An allocator must be loaded when a
process starts. So ranks that bigtrain starts get it in their environment, and `bigtrain/train.py`
starts itself anew, whoever has started it. Processes with a GPU keep the C library's allocator.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

# The numbers by which mallopt identifies its parameters (malloc.h).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_CLEAN_ALL_BUFFERS = 0  # a command of tbbmalloc (scalable_allocator.h)
_REPORTS = "TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD"
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/nvhost-ctrl-gpu", "/dev/dxg")
"""Files of the drivers of NVIDIA's and AMD's GPUs, also on Jetson and in WSL."""


def find_allocator() -> str | None:
    """Return what LD_PRELOAD needs to load a better allocator; None if none is installed.

    That is tcmalloc of the system or of this Python environment (conda's package gperftools), or
    else tbbmalloc of this environment (the package tbb of pip and conda). tcmalloc is preferred:
    after a step under `fully_shard`, tbbmalloc returns most of its free memory to the system, which
    then has to provide it again in the next step.
    """
    if sys.platform != "linux":
        return None
    folder = Path(sys.prefix) / "lib"
    for name in ("tcmalloc_minimal", "tcmalloc"):
        if library := ctypes.util.find_library(name):
            return library
        file = folder / f"lib{name}.so.4"
        if file.is_file() and not {" ", ":"} & {*str(file)}:  # which separate names in LD_PRELOAD
            return str(file)
    # pip's build of the second library does not say where the first is.
    files = [folder / "libtbbmalloc.so.2", folder / "libtbbmalloc_proxy.so.2"]
    text = ":".join(map(str, files))
    fits = " " not in text and text.count(":") == 1
    return text if fits and all(file.is_file() for file in files) else None


def allocator_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that make a new process use a better allocator.

    The result is empty if none is installed, if the machine has a GPU, or if the user has chosen an
    allocator. The user chooses one by `LD_PRELOAD` (even if it is empty), by a variable
    `MALLOC_...`, or by glibc.malloc in `GLIBC_TUNABLES`.

    Args:
        environ: the environment of the process that starts the others, normally `os.environ`.
    """
    is_set = "LD_PRELOAD" in environ or any(name.startswith("MALLOC_") for name in environ)
    if is_set or "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return {}
    library = None if any(map(os.path.exists, _GPU_DRIVERS)) else find_allocator()
    # With the default threshold tcmalloc reports each allocation of a GiB on standard error.
    return {} if library is None else {"LD_PRELOAD": library, _REPORTS: str(1 << 62)}


def allocator_of_ranks(environ: Mapping[str, str]) -> str:
    """Return the LD_PRELOAD of ranks, as it is set already or as they get it when they start.

    Args:
        environ: the environment of a rank, or of the process that starts ranks.
    """
    return {**environ, **allocator_environ(environ)}.get("LD_PRELOAD", "")


def start_with_allocator() -> None:
    """Replace this process by one that runs the same command with a better allocator.

    Returns if there is none to change to (see `allocator_environ`), if torch is loaded already, so
    that this process may be another program, or under a debugger, which would lose the process.
    """
    variables = allocator_environ(os.environ)
    if variables and "torch" not in sys.modules and sys.gettrace() is None:
        words = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, words, {**os.environ, **variables})


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
        library.scalable_allocation_command(_CLEAN_ALL_BUFFERS, None)  # if tbbmalloc is loaded
        return
    with suppress(AttributeError, OSError):
        library.malloc_trim(0)
