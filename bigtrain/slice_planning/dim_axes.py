"""The structure of dims: products and sums of axes, found by views, splits and products.

A *dim* is a product of *axes*, the outermost first; a dim of length 1 has none. An axis is atomic
until a view makes it a product (heads x head width) or a split makes it a sum (queries + keys +
values). Operations unify dims that must be sliced in the same way: the axes of both dims become one
in a union-find, so that a view or split of one dim changes the other dim as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

MISFIT = "is viewed with shapes that do not fit each other"


class DimAxis:
    """A factor of a dim. Read axes through `expanded`, which resolves unified axes.

    Args:
        length: the number of elements; 2 or more.
        blocked: why the axis cannot be sliced; '' if no reason is known.
    """

    __slots__ = ("blocked", "factors", "length", "parts", "same")

    def __init__(self, length: int, blocked: str = "") -> None:
        self.length = length
        self.blocked = blocked
        self.same: DimAxis | None = None
        """The axis that it was unified with: the parent in the union-find."""
        self.factors: list[DimAxis] = []
        """The axis's factors if it is a product, the outermost first; otherwise empty."""
        self.parts: list[Dim] = []
        """The axis's parts, at least two, if it is a sum; otherwise empty."""

    def __repr__(self) -> str:
        inner = "x".join(map(repr, self.factors)) or "+".join(map(repr, self.parts))
        return f"<{self.length}{'!' if self.blocked else ''}{': ' + inner if inner else ''}>"


Dim = list[DimAxis]
Dims = tuple[Dim, ...]


def new_dim(length: int, blocked: str = "") -> Dim:
    """Return a dim with one atomic axis, or none if its length is 1."""
    return [DimAxis(length, blocked)] if length > 1 else []


def dim_length(dim: Dim) -> int:
    """Return the length of a dim."""
    return math.prod(axis.length for axis in dim)


def representative(axis: DimAxis) -> DimAxis:
    """Return the axis that represents all axes with which this axis is unified."""
    root = axis
    while root.same is not None:
        root = root.same
    while axis.same is not None:
        axis.same, axis = root, axis.same
    return root


def expanded(dim: Dim) -> Dim:
    """Return a dim as axes that are not products and represent themselves."""
    atoms: Dim = []
    for axis in dim:
        root = representative(axis)
        atoms += expanded(root.factors) if root.factors else [root]
    return atoms


def leaves(dim: Dim) -> Iterator[DimAxis]:
    """Yield the atomic axes of a dim, those of all parts of sums included."""
    for axis in expanded(dim):
        if axis.parts:
            for part in axis.parts:
                yield from leaves(part)
        else:
            yield axis


def block(dim: Dim, why: str) -> None:
    """Mark all axes of a dim as not sliceable, with the reason."""
    for axis in leaves(dim):
        axis.blocked = axis.blocked or why


def factorize(axis: DimAxis, outer: int) -> tuple[Dim, Dim] | None:
    """Make an axis the product of an outer factor of this length and an inner factor.

    Args:
        axis: an axis from `expanded`.
        outer: the length of the outer factor, a divisor of the axis's length.

    Returns:
        Both factors; None if the axis is a sum with a part that is not divisible.
    """
    inner = axis.length // outer
    if not axis.parts:
        first, second = new_dim(outer, axis.blocked), new_dim(inner, axis.blocked)
        axis.factors = [*first, *second]
        return first, second
    if any(dim_length(part) % inner for part in axis.parts):
        return None
    pieces = [split_outer(part, dim_length(part) // inner) for part in axis.parts]
    if any(piece is None for piece in pieces):
        return None
    outers, inners = zip(*(piece for piece in pieces if piece is not None), strict=True)
    for inner_axes in inners[1:]:
        unify(inners[0], inner_axes)
    total = DimAxis(outer)
    total.parts = list(outers)
    axis.parts, axis.factors = [], [total, *inners[0]]
    return [total], list(inners[0])


def split_outer(dim: Dim, length: int) -> tuple[Dim, Dim] | None:
    """Split a dim into an outer part of this length and the inner rest; None if it cannot be."""
    outer: Dim = []
    rest = expanded(dim)
    while length > 1:
        if not rest:
            return None
        first = rest.pop(0)
        if length % first.length == 0:
            outer.append(first)
            length //= first.length
            continue
        pieces = factorize(first, length) if first.length % length == 0 else None
        if pieces is None:
            return None
        return outer + pieces[0], pieces[1] + rest
    return outer, rest


def split_inner(dim: Dim, length: int) -> tuple[Dim, Dim] | None:
    """Split a dim into the outer rest and an inner part of this length; None if it cannot be."""
    total = dim_length(dim)
    return split_outer(dim, total // length) if length and total % length == 0 else None


def unify(left_dim: Dim, right_dim: Dim) -> None:
    """Make two dims of equal length the same; both are blocked if their structures do not fit."""
    left, right = expanded(left_dim), expanded(right_dim)
    while left and right:
        first, second = representative(left[0]), representative(right[0])
        if first.factors or second.factors:
            left, right = expanded(left), expanded(right)
            continue
        if first.length == second.length:
            left, right = left[1:], right[1:]
            _unify_axes(first, second)
            continue
        longer, shorter = max(first.length, second.length), min(first.length, second.length)
        larger = first if first.length == longer else second
        if longer % shorter or factorize(larger, shorter) is None:
            block(left, MISFIT)
            block(right, MISFIT)
            return


def _unify_axes(first: DimAxis, second: DimAxis) -> None:
    """Unify two axes of equal length that are no products."""
    if first is second:
        return
    if first.parts and second.parts:
        cuts = sorted({*_bounds(first), *_bounds(second)})
        lengths = [b - a for a, b in zip([0, *cuts], cuts, strict=False)]
        pieces = [_refined(axis, lengths) for axis in (first, second)]
        if pieces[0] is None or pieces[1] is None:
            block([first, second], MISFIT)
            return
        for a, b in zip(*pieces, strict=True):
            unify(a, b)
        second.same = first
        return
    if first.parts:
        first, second = second, first
    if first.blocked:
        block([second], first.blocked)
    first.same = second


def _bounds(axis: DimAxis) -> list[int]:
    return list(accumulate(dim_length(part) for part in axis.parts))


def _refined(axis: DimAxis, lengths: Sequence[int]) -> list[Dim] | None:
    """Make an axis a sum of parts of these lengths, and return the parts.

    Args:
        axis: an atomic axis or a sum. Each part of a sum is cut into one or more new parts.
        lengths: the lengths of the new parts. The parts of a sum have to begin where new parts
            begin.

    Returns:
        None if a part cannot be cut at these lengths.
    """
    if not axis.parts:
        axis.parts = [new_dim(length, axis.blocked) for length in lengths]
        return axis.parts
    refined: list[Dim] = []
    pending = list(lengths)
    for part in axis.parts:
        total = dim_length(part)
        part_lengths: list[int] = []
        while sum(part_lengths) < total:
            part_lengths.append(pending.pop(0))
        pieces = cut(part, part_lengths)
        if pieces is None:
            return None
        refined += pieces
    axis.parts = refined
    return refined


def cut(dim: Dim, lengths: Sequence[int]) -> list[Dim] | None:
    """Split a dim into consecutive parts of these lengths.

    Returns:
        None if a cut is inside an axis; the axes are then blocked.
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
    """Join consecutive parts to sums of these lengths."""
    groups, pending = [], list(parts)
    for length in lengths:
        group: list[Dim] = []
        while sum(map(dim_length, group)) < length:
            group.append(pending.pop(0))
        groups.append(joined(group))
    return groups


def joined(parts: Sequence[Dim]) -> Dim:
    """Return the concatenation of dims as one dim."""
    if len(parts) == 1:
        return parts[0]
    total = DimAxis(sum(map(dim_length, parts)))
    total.parts = list(parts)
    return [total]


def viewed(dims: Dims, shape: Sequence[int]) -> Dims:
    """Return the dims after a reshape; axes that do not fit are blocked."""
    rest = [axis for dim in dims for axis in dim]
    front: list[Dim] = []
    back: list[Dim] = []
    sizes: list[Any] = list(shape)
    while sizes:
        pieces = split_outer(rest, sizes[0])
        if pieces is None:
            break
        front.append(pieces[0])
        rest = pieces[1]
        sizes.pop(0)
    while sizes:
        pieces = split_inner(rest, sizes[-1])
        if pieces is None:
            break
        back.insert(0, pieces[1])
        rest = pieces[0]
        sizes.pop()
    block(rest, MISFIT)
    return (*front, *(new_dim(size, MISFIT) for size in sizes), *back)
