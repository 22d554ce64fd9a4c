"""What compiled programs do past all dispatch modes, told to those who watch.

Their buffers, of a run; and of a forecast, where programs run without them, their kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_MAKERS = ("_empty_strided_cpu", "_empty_strided_cuda", "_empty_strided_xpu")
"""What inductor's programs make their buffers with; they look these up when they are loaded."""
_watching: list[Callable[[Tensor], None]] = []
_watching_kernels: list[Callable[[list[Tensor]], None]] = []


def announce_buffers() -> None:
    """Let programs that are loaded from now on tell of each buffer as they make it."""
    makers = torch._C._dynamo.guards
    for name in _MAKERS:
        plain = getattr(makers, name, None)
        if plain is not None and not hasattr(plain, "announces"):
            setattr(makers, name, _announcing(plain))


@contextmanager
def buffers_announced(tell: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `tell` with each buffer that a program makes inside, of any thread."""
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
    """Call `tell` with what each fused kernel reads and writes, of programs on fake tensors."""
    _watching_kernels.append(tell)
    try:
        yield
    finally:
        _watching_kernels.remove(tell)


def announce_kernel(touched: list[Tensor]) -> None:
    """Tell of a fused kernel that a program on fake tensors would now run."""
    for tell in _watching_kernels:
        tell(touched)
