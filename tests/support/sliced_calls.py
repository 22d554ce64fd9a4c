"""Call torch's functions on slices and on whole tensors; compare results, gradients and gathers."""

from __future__ import annotations

import itertools
import random
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from support.sliced import drawn_slices, is_equal_on_all
from torch import Tensor

from bigtrain.slicing.exchange import SliceGroup
from bigtrain.slicing.install import RULES
from bigtrain.slicing.sliced_tensor import SlicedTensor, is_sliced, leaves_of, whole_of
from bigtrain.slicing.slices import Slices

assert RULES
X = (4, 6, 8)
"""The default shape: no two dims are equal."""
Shapes = tuple[tuple[int, ...], ...]


@dataclass
class Result:
    """The differences of one call with some of its tensors sliced."""

    call: str
    slices: dict[int, Slices]
    """The slices by the number of the tensor."""
    wrong: list[str] = field(default_factory=list)
    gathers: dict[str, int] = field(default_factory=dict)


def inputs_of(name: str, shapes: Shapes) -> list[Tensor]:
    """The input tensors, in float64, the same on all ranks."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]


def single_slices(shapes: Shapes, size: int) -> list[dict[int, Slices]]:
    """Each tensor sliced on each of its dims, in one section."""
    return [
        {number: Slices.even(dim, length)}
        for number, shape in enumerate(shapes)
        for dim, length in enumerate(shape)
        if length >= size
    ]


def mixed_slices(name: str, shapes: Shapes, size: int, count: int) -> list[dict[int, Slices]]:
    """`count` cases with several tensors sliced at once, in random sections and units."""
    draw = random.Random(name)
    dims = [[None, *(d for d, n in enumerate(shape) if n >= size)] for shape in shapes]
    choices = [choice for choice in itertools.product(*dims) if any(d is not None for d in choice)]
    draw.shuffle(choices)
    return [
        {
            number: drawn_slices(draw, dim, shapes[number][dim], size)
            for number, dim in enumerate(choice)
            if dim is not None
        }
        for choice in choices[:count]
    ]


def compare_call(
    name: str,
    function: Callable[..., Any],
    shapes: Shapes,
    slices: Mapping[int, Slices],
    group: SliceGroup,
) -> Result:
    """Call a function on whole tensors and with some of them sliced; return the differences."""
    result = Result(name, dict(slices))
    wanted, gradients = _run_call(name, function, shapes, {}, group)
    group.gathers.clear()
    try:
        results, own_gradients = _run_call(name, function, shapes, slices, group)
    except Exception:  # noqa: BLE001 - a report of what failed is wanted
        result.wrong.append(traceback.format_exc()[-1500:])
        return result
    result.gathers = dict(group.gathers)
    if len(wanted) != len(results):
        result.wrong.append(f"{len(results)} results and not {len(wanted)}")
    for number, (expected, actual) in enumerate(zip(wanted, results, strict=False)):
        if not _is_near(expected, actual):
            result.wrong.append(f"result {number}")
    for number, (expected, actual) in enumerate(zip(gradients, own_gradients, strict=True)):
        if number in slices:
            expected = slices[number].local(expected, group.rank, group.size)
        elif not is_equal_on_all(actual, group):
            result.wrong.append(f"gradient {number} differs between ranks")
        if not _is_near(expected, actual):
            result.wrong.append(f"gradient {number}")
    return result


def _run_call(
    name: str,
    function: Callable[..., Any],
    shapes: Shapes,
    slices: Mapping[int, Slices],
    group: SliceGroup,
) -> tuple[list[Tensor], list[Tensor]]:
    """Run a call; return its results and gradients, gathered to whole tensors."""
    leaves, call_tensors = [], []
    for number, whole in enumerate(inputs_of(name, shapes)):
        tensor_slices = slices.get(number)
        leaf = (
            whole
            if tensor_slices is None
            else tensor_slices.local(whole, group.rank, group.size).clone()
        )
        leaves.append(leaf.requires_grad_())
        call_tensors.append(
            leaf if tensor_slices is None else SlicedTensor.of(leaf, tensor_slices, group)
        )
    torch.manual_seed(1)
    output = function(*call_tensors)
    assert all(leaf.local.shape[leaf.slices.dim] for leaf in leaves_of(output) if is_sliced(leaf))
    results = [leaf for leaf in leaves_of(whole_of(output)) if isinstance(leaf, Tensor)]
    torch.manual_seed(2)
    loss = torch.zeros((), dtype=torch.float64)
    for result in results:
        values = result.abs() if result.is_complex() else result.double()
        loss = loss + (values * torch.randn(values.shape, dtype=torch.float64)).sum()
    if loss.requires_grad:
        loss.backward()
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return [result.detach() for result in results], grads


def _is_near(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if not left.dtype.is_floating_point and not left.is_complex():
        return torch.equal(left, right)
    if not left.numel():
        return True
    return bool((left - right).abs().max() <= 1e-10 * (1 + left.abs().max()))
