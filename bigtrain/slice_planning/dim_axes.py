"""Dims of tensors taken apart: what views, splits and products make of them.

A *dim* is a product of *axes*, the outermost first, and has none where its length is 1. An axis is
whole as long as nothing takes it apart; a view makes a product of it (heads x head width), a split
makes a sum (queries + keys + values). Operations say that two dims are the same thing: their axes
are unified, and what one of them is taken apart into, so is the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

MISFIT = "is viewed in ways that do not fit each other"


class DimAxis:
    """A factor of a dim. It is asked for by way of `expanded`: unified axes stand for each other.

    Args:
        length: how many places it has; 2 or more.
        blocked: why it cannot be sliced; '' where nothing is known against it.
    """

    __slots__ = ("blocked", "factors", "length", "parts", "same")

    def __init__(self, length: int, blocked: str = "") -> None:
        self.length = length
        self.blocked = blocked
        self.same: DimAxis | None = None
        """The axis that it has been unified with."""
        self.factors: list[DimAxis] = []
        """The product that it is, the outermost first; none where it is not taken apart so."""
        self.parts: list[Dim] = []
        """The sum that it is, in order; at least two parts, or none."""

    def __repr__(self) -> str:
        inner = "x".join(map(repr, self.factors)) or "+".join(map(repr, self.parts))
        return f"<{self.length}{'!' if self.blocked else ''}{': ' + inner if inner else ''}>"


Dim = list[DimAxis]
Dims = tuple[Dim, ...]


def new_dim(length: int, blocked: str = "") -> Dim:
    """A dim of which nothing is known yet."""
    return [DimAxis(length, blocked)] if length > 1 else []


def dim_length(dim: Dim) -> int:
    """The length of a dim."""
    return math.prod(axis.length for axis in dim)


def standing_for(axis: DimAxis) -> DimAxis:
    """The axis that stands for all that this one is unified with."""
    found = axis
    while found.same is not None:
        found = found.same
    while axis.same is not None:
        axis.same, axis = found, axis.same
    return found


def expanded(dim: Dim) -> Dim:
    """The same dim in axes that are no products and stand for themselves."""
    found: Dim = []
    for axis in dim:
        own = standing_for(axis)
        found += expanded(own.factors) if own.factors else [own]
    return found


def leaves(dim: Dim) -> Iterator[DimAxis]:
    """The axes at the bottom of a dim, those of all parts of sums."""
    for axis in expanded(dim):
        if axis.parts:
            for part in axis.parts:
                yield from leaves(part)
        else:
            yield axis


def block(dim: Dim, why: str) -> None:
    """Nothing in this dim can be sliced."""
    for axis in leaves(dim):
        axis.blocked = axis.blocked or why


def factored(axis: DimAxis, outer: int) -> tuple[Dim, Dim] | None:
    """Take an axis apart into a product of two, the outer of this length.

    Args:
        axis: as `expanded` gives it.
        outer: divides its length.

    Returns:
        None where it is a sum with parts that this cuts through.
    """
    inner = axis.length // outer
    if not axis.parts:
        first, second = new_dim(outer, axis.blocked), new_dim(inner, axis.blocked)
        axis.factors = [*first, *second]
        return first, second
    if any(dim_length(part) % inner for part in axis.parts):
        return None
    pieces = [taken(part, dim_length(part) // inner) for part in axis.parts]
    if any(piece is None for piece in pieces):
        return None
    outers, inners = zip(*(piece for piece in pieces if piece is not None), strict=True)
    for other in inners[1:]:
        unify(inners[0], other)
    total = DimAxis(outer)
    total.parts = list(outers)
    axis.parts, axis.factors = [], [total, *inners[0]]
    return [total], list(inners[0])


def taken(dim: Dim, length: int) -> tuple[Dim, Dim] | None:
    """The outer axes of a dim up to a length, and the rest; None where an axis lies across."""
    found: Dim = []
    rest = expanded(dim)
    while length > 1:
        if not rest:
            return None
        first = rest.pop(0)
        if length % first.length == 0:
            found.append(first)
            length //= first.length
            continue
        pieces = factored(first, length) if first.length % length == 0 else None
        if pieces is None:
            return None
        return found + pieces[0], pieces[1] + rest
    return found, rest


def taken_inner(dim: Dim, length: int) -> tuple[Dim, Dim] | None:
    """The outer axes, and the inner ones of this length together."""
    total = dim_length(dim)
    return taken(dim, total // length) if length and total % length == 0 else None


def unify(one: Dim, other: Dim) -> None:
    """Two dims of equal length are the same thing."""
    left, right = expanded(one), expanded(other)
    while left and right:
        first, second = standing_for(left[0]), standing_for(right[0])
        if first.factors or second.factors:
            left, right = expanded(left), expanded(right)
            continue
        if first.length == second.length:
            left, right = left[1:], right[1:]
            _unify_axes(first, second)
            continue
        longer, shorter = max(first.length, second.length), min(first.length, second.length)
        larger = first if first.length == longer else second
        if longer % shorter or factored(larger, shorter) is None:
            block(left, MISFIT)
            block(right, MISFIT)
            return


def _unify_axes(one: DimAxis, other: DimAxis) -> None:
    """Of equal length, and neither a product."""
    if one is other:
        return
    if one.parts and other.parts:
        cuts = sorted({*_bounds(one), *_bounds(other)})
        lengths = [b - a for a, b in zip([0, *cuts], cuts, strict=False)]
        pieces = [_refined(axis, lengths) for axis in (one, other)]
        if pieces[0] is None or pieces[1] is None:
            block([one, other], MISFIT)
            return
        for a, b in zip(*pieces, strict=True):
            unify(a, b)
        other.same = one
        return
    if one.parts:
        one, other = other, one
    if one.blocked:
        block([other], one.blocked)
    one.same = other


def _bounds(axis: DimAxis) -> list[int]:
    return list(accumulate(dim_length(part) for part in axis.parts))


def _refined(axis: DimAxis, lengths: Sequence[int]) -> list[Dim] | None:
    """Take an axis apart into a sum; the lengths refine those of the sum that it is already."""
    if not axis.parts:
        axis.parts = [new_dim(length, axis.blocked) for length in lengths]
        return axis.parts
    found: list[Dim] = []
    pending = list(lengths)
    for part in axis.parts:
        whole = dim_length(part)
        own: list[int] = []
        while sum(own) < whole:
            own.append(pending.pop(0))
        pieces = cut(part, own)
        if pieces is None:
            return None
        found += pieces
    axis.parts = found
    return found


def cut(dim: Dim, lengths: Sequence[int]) -> list[Dim] | None:
    """The parts of a dim of these lengths, one after the other.

    Returns:
        None where they cut through axes; those are then blocked.
    """
    if len(lengths) == 1:
        return [dim]
    outer = expanded(dim)
    divisor, inner, width = math.gcd(*lengths), list[DimAxis](), 1
    while outer and divisor % (width * outer[-1].length) == 0:
        inner.insert(0, outer.pop())
        width *= inner[0].length
    units = [length // width for length in lengths]
    if len(outer) == 1 and divisor % width == 0:
        cuts = sorted({*accumulate(units), *(_bounds(outer[0]))})
        fine = _refined(outer[0], [b - a for a, b in zip([0, *cuts], cuts, strict=False)])
        if fine is not None:
            return [[*part, *inner] for part in _grouped(fine, units)]
    block(outer, "is split where its parts do not begin")
    return None


def _grouped(parts: Sequence[Dim], lengths: Sequence[int]) -> list[Dim]:
    """Parts joined to sums of these lengths."""
    found, pending = [], list(parts)
    for length in lengths:
        own: list[Dim] = []
        while sum(map(dim_length, own)) < length:
            own.append(pending.pop(0))
        found.append(joined(own))
    return found


def joined(parts: Sequence[Dim]) -> Dim:
    """The sum of dims, one after the other, as one dim."""
    if len(parts) == 1:
        return parts[0]
    total = DimAxis(sum(map(dim_length, parts)))
    total.parts = list(parts)
    return [total]


def viewed(dims: Dims, shape: Sequence[int]) -> Dims:
    """Dims of the same elements in another shape; what does not fit is blocked."""
    rest = [axis for dim in dims for axis in dim]
    front: list[Dim] = []
    back: list[Dim] = []
    sizes: list[Any] = list(shape)
    while sizes:
        pieces = taken(rest, sizes[0])
        if pieces is None:
            break
        front.append(pieces[0])
        rest = pieces[1]
        sizes.pop(0)
    while sizes:
        pieces = taken_inner(rest, sizes[-1])
        if pieces is None:
            break
        back.insert(0, pieces[1])
        rest = pieces[0]
        sizes.pop()
    block(rest, MISFIT)
    return (*front, *(new_dim(size, MISFIT) for size in sizes), *back)
