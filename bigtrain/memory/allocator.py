"""How the C library hands memory out on Linux, so that a process is little more than its tensors.

glibc keeps what is freed: each freed block raises the size from which a block is a mapping of its
own, up to 32 MiB, and between what is kept in the heap nothing large fits any more. With a fixed
threshold, large tensors come from the system and go back to it; so that this costs little, they
come in huge pages. Elsewhere nothing is changed, and neither where the user has set the allocator
up.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from bigtrain.units import MIB

LARGE_BLOCK_BYTES = MIB
"""From this size on a block is a mapping of its own."""
HEAP_TOP_BYTES = 16 * MIB
"""The most that is kept free at the end of the heap, which smaller blocks come and go in."""
HUGE_PAGE_BYTES = 2 * MIB
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_ASKS = "THP_MEM_ALLOC_ENABLE"
# mallopt's numbers for what is set.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def ask_for_huge_pages() -> None:
    """Have torch ask the system for huge pages; without effect where there were tensors before."""
    if is_user_set(os.environ) or _ASKS in os.environ:
        return
    os.environ[_ASKS] = "1"  # which torch looks at once, for a process's first tensor
    torch.empty(1)
    del os.environ[_ASKS]


def return_large_blocks(device: torch.device) -> bool:
    """Have freed tensors given back to the system from now on; returns whether that is so.

    Only on a CPU, with glibc, where tensors come in huge pages: page by page it would take a
    third of a step. Settings of the user's own (`MALLOC_...`, `GLIBC_TUNABLES`) stay.
    """
    ask_for_huge_pages()
    if device.type != "cpu" or is_user_set(os.environ) or not _has_huge_pages():
        return False
    return set_thresholds(LARGE_BLOCK_BYTES, HEAP_TOP_BYTES)


def is_user_set(environ: Mapping[str, str]) -> bool:
    """Whether the user has said how glibc is to hand memory out, or by what to replace it."""
    if any(name.startswith("MALLOC_") for name in environ):
        return True
    return "glibc.malloc" in environ.get("GLIBC_TUNABLES", "") or any(
        name in environ.get("LD_PRELOAD", "") for name in ("malloc", "mimalloc")
    )


def set_thresholds(large_block_bytes: int, heap_top_bytes: int) -> bool:
    """Set what is a mapping of its own and what stays free in the heap; False without glibc.

    All threads share one heap: what one has freed another finds.
    """
    if sys.platform != "linux":
        return False
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        settings = (
            (_MMAP_THRESHOLD, large_block_bytes),
            (_TRIM_THRESHOLD, heap_top_bytes),
            (_ARENA_MAX, 1),
        )
        return all(mallopt(name, value) == 1 for name, value in settings)
    return False


def return_free_pages() -> None:
    """Have what lies free in the heap given back, where the C library can do that."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _has_huge_pages() -> bool:
    """Whether the kernel gives tensors huge pages: always, or because torch asks for them."""
    try:
        mode = _HUGE_PAGES.read_text()
    except OSError:
        return False
    # Where torch asks, what is as large as a huge page begins at a page.
    asks = torch.empty(2 * HUGE_PAGE_BYTES, dtype=torch.uint8).data_ptr() % 4096 == 0
    return "[always]" in mode or ("[madvise]" in mode and asks)
