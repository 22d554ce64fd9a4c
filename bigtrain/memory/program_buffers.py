"""Buffers of compiled programs: they are made past all dispatch modes, so who watches is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_MAKERS = ("_empty_strided_cpu", "_empty_strided_cuda", "_empty_strided_xpu")
"""What inductor's programs make their buffers with; they look these up when they are loaded."""
_watching: list[Callable[[Tensor], None]] = []


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
