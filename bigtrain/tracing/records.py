"""The record of one run of a model: its calls and values, with their origins and uses.

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
    """The number of this call among the calls of the module, from 0."""
    parent: int
    """The index of the call that makes this call; -1 for the call of the model."""
    begin: int
    end: int = END_OF_PASS
    outputs: list[int] = field(default_factory=list)
    """The indices of the values in the result, in the order of `map_tensors`."""
    argument_values: list[int] = field(default_factory=list)
    """The indices of the values in the arguments."""
    result: Any = None


@dataclass
class TracedValue:
    """One tensor object."""

    tensor: Tensor
    root: str
    """'input', 'parameter', 'buffer', 'constant' (a real tensor that the code refers to), or '' for
    a computed value."""
    name: str
    born: int
    frame: int
    """The index of the call in which the tensor was made; -1 outside of all calls."""
    uses: list[int] = field(default_factory=list)
    changed: int = -1
    """The last tick at which the tensor was changed in place; -1 for none."""
    known: bool = False
    """Whether the tensor depends only on inputs and constants, not parameters or random numbers."""
    sources: tuple[int, ...] = ()


@dataclass(frozen=True)
class InPlaceWrite:
    """An in-place change of a storage."""

    tick: int
    frame: int
    sources: tuple[int, ...]
    """The values from which the new contents are computed, the changed value among them."""
    random: bool


@dataclass(frozen=True)
class UncuttableRange:
    """An interval of a forward pass that must be in one stage."""

    first: int
    last: int
    """`first` and `last` are ticks; a cut at tick c is not legal if first <= c < last."""
    why: str


@dataclass(frozen=True)
class OpCost:
    """The work of one operation of a forward pass."""

    tick: int
    flops: int
    nbytes: int
    """Bytes that it reads and writes."""


@dataclass
class ForwardTrace:
    """The trace of one forward pass."""

    calls: list[ModuleCall]
    values: list[TracedValue]
    events: list[tuple[int, int, tuple[int, ...]]]
    """The events in order. (frame, call, ()) is the beginning of a call. (frame, -1, values) means
    that a torch function has returned tensors to the code of a frame. The frame is the index of a
    call, or -1 outside of all calls."""
    costs: list[OpCost]
    saved: dict[int, tuple[int, list[int]]]
    """By storage, its bytes and the ticks at which autograd saved it for the backward pass."""
    output: Any
    writes: dict[int, list[InPlaceWrite]] = field(default_factory=dict)
    """By storage, its in-place writes."""
    whole: list[UncuttableRange] = field(default_factory=list)
    sealed: dict[int, str] = field(default_factory=dict)
    """The calls that no cut may go through, and the reasons."""
    enclosed: dict[int, str] = field(default_factory=dict)
    """The calls that no cut may go through and that no cut may precede, and the reasons."""
    random: set[int] = field(default_factory=set)
    """The frames in which random numbers are drawn."""
    backward: list[tuple[int, int]] = field(default_factory=list)
    """Tick and frame of each computation of gradients inside the forward pass."""
