"""The colours and the matplotlib style of all pictures."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from matplotlib import rc_context

from bigtrain.memory.timeline import MemoryKind

# Okabe and Ito's palette, which colour-blind people can tell apart.
COLOURS: dict[MemoryKind, str] = {
    "parameters": "#0072B2",
    "frozen": "#F0E442",
    "gradients": "#56B4E9",
    "optimizer": "#009E73",
    "activations": "#E69F00",
    "buffers": "#CC79A7",
    "temporary": "#A0A0A0",
}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # write text as text, not as paths, so that it can be searched
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def plot_style() -> AbstractContextManager[None]:
    """Return a context manager that applies `STYLE` to figures drawn inside it."""
    return rc_context(STYLE)
