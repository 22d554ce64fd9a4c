"""What is written down of one run of a model: calls, values, who makes and who uses them.

A *call* is one call of one module; a *value* is one tensor object; a *tick* is one operation or
the beginning or end of one call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

END_OF_PASS = 1 << 60


@dataclass
class ModuleCall:
    """One call of a module."""

    name: str
    number: int
    """The how manieth call of this module, from 0."""
    parent: int
    """The call within which it happens; -1 for the model's own."""
    begin: int
    end: int = END_OF_PASS
    outputs: list[int] = field(default_factory=list)
    """Values in what it returns, in the order of `map_tensors`."""
    argument_values: list[int] = field(default_factory=list)
    """Values in its arguments."""
    result: Any = None


@dataclass
class TracedValue:
    """One tensor object."""

    tensor: Tensor
    root: str
    """'input', 'parameter', 'buffer', 'constant' (a real tensor that the code has at hand), or ''
    for what is computed."""
    name: str
    born: int
    frame: int
    """The call within which it was made."""
    uses: list[int] = field(default_factory=list)
    changed: int = -1
    """The last tick at which it was changed in place."""
    known: bool = False
    """Computed from the inputs and constants alone, without parameters or random numbers."""
    sources: tuple[int, ...] = ()


@dataclass(frozen=True)
class InPlaceWrite:
    """A change of a storage in place."""

    tick: int
    frame: int
    sources: tuple[int, ...]
    """Values that it is changed by, itself among them."""
    random: bool


@dataclass(frozen=True)
class UncuttableRange:
    """A stretch of a forward pass that must be within one stage."""

    first: int
    last: int
    """Ticks: no cut c may be with first <= c < last."""
    why: str


@dataclass(frozen=True)
class OpCost:
    """One operation's work, forward only."""

    tick: int
    flops: int
    nbytes: int
    """Read and written."""


@dataclass
class ForwardTrace:
    """All that was seen."""

    calls: list[ModuleCall]
    values: list[TracedValue]
    events: list[tuple[int, int, tuple[int, ...]]]
    """In order: (frame, call, ()) at the beginning of a call, (frame, -1, values) where a
    function of torch has returned tensors to a frame's own code."""
    costs: list[OpCost]
    saved: dict[int, tuple[int, list[int]]]
    """By storage: bytes, and the ticks at which autograd kept it for the backward pass."""
    output: Any
    writes: dict[int, list[InPlaceWrite]] = field(default_factory=dict)
    """By storage."""
    whole: list[UncuttableRange] = field(default_factory=list)
    sealed: dict[int, str] = field(default_factory=dict)
    """Calls that no cut may go through, and why."""
    enclosed: dict[int, str] = field(default_factory=dict)
    """Calls before which, too, none may stand."""
    random: set[int] = field(default_factory=set)
    """Frames in which random numbers are drawn."""
    backward: list[tuple[int, int]] = field(default_factory=list)
    """Tick and frame of each backward pass within the forward pass."""
