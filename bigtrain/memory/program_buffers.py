"""Report the memory that programs compiled by torch.compile use, which no dispatch mode sees.

In a run each buffer of a program is reported. In a forecast programs run on fake tensors and make
no buffers, so each fused kernel is reported instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_MAKERS = ("_empty_strided_cpu", "_empty_strided_cuda", "_empty_strided_xpu")
"""Functions with which inductor's programs make buffers; a program binds them when it is loaded."""
_watching: list[Callable[[Tensor], None]] = []
_watching_kernels: list[Callable[[list[Tensor]], None]] = []


def announce_buffers() -> None:
    """Make programs that are loaded after this call report each buffer."""
    makers = torch._C._dynamo.guards
    for name in _MAKERS:
        plain = getattr(makers, name, None)
        if plain is not None and not hasattr(plain, "announces"):
            setattr(makers, name, _announcing(plain))


@contextmanager
def buffers_announced(tell: Callable[[Tensor], None]) -> Iterator[None]:
    """In a `with` block call `tell` with each buffer that compiled programs of any thread make."""
    _watching.append(tell)
    try:
        yield
    finally:
        _watching.remove(tell)


def _announcing(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make(*args: Any) -> Tensor:
        buffer = plain(*args)
        for tell in _watching:
            tell(buffer)
        return buffer

    make.announces = True  # type: ignore[attr-defined]
    return make


@contextmanager
def kernels_announced(tell: Callable[[list[Tensor]], None]) -> Iterator[None]:
    """In a `with` block call `tell` with the fake tensors that each fused kernel accesses."""
    _watching_kernels.append(tell)
    try:
        yield
    finally:
        _watching_kernels.remove(tell)


def announce_kernel(touched: list[Tensor]) -> None:
    """Report a fused kernel that a program would run here if its tensors were not fake.

    Args:
        touched: the fake tensors that the kernel reads and writes.
    """
    for tell in _watching_kernels:
        tell(touched)
