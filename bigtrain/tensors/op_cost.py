"""The cost of a torch operation: FLOPs, sizes of its product, bytes; and the tensors it mutates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from bigtrain.versions.torch_versions import flop_formula

REPEAT_COUNT: ContextVar[int] = ContextVar("REPEAT_COUNT", default=1)
"""How many iterations of a real run the current iteration represents: see `loop_starts`."""


def loop_starts(tensor: Tensor, number: int, step: int) -> Iterator[int]:
    """Yield the first row of each iteration of a loop; without values, of at most three iterations.

    On fake and meta tensors all iterations but the first and the last are equal. Only one of them
    runs, and `REPEAT_COUNT` is then the number of iterations that it represents.

    Args:
        tensor: the tensor that the loop works on.
        number: rows in total.
        step: rows per iteration.
    """
    starts = range(0, number, step)
    if len(starts) <= 3 or not (isinstance(tensor, FakeTensor) or tensor.is_meta):
        yield from starts
        return
    yield starts[0]
    token = REPEAT_COUNT.set(REPEAT_COUNT.get() * (len(starts) - 2))
    try:
        yield starts[1]
    finally:
        REPEAT_COUNT.reset(token)
    yield starts[-1]


def mutated_tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation changes in place."""
    mutated = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            mutated += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return mutated


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the FLOPs of a matrix product, convolution or attention; 0 for anything else."""
    formula = flop_formula(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


class ProductSize(NamedTuple):
    """The sizes of a batched matrix product, (m x k) times (k x n); zeros for anything else."""

    m: int = 0
    n: int = 0
    k: int = 0
    batch: int = 0


def product_size(func: Any, args: Any, result: Any) -> ProductSize:
    """Return the sizes of a product; zeros if the operation is not a known product.

    Attention counts as its product with the values, one per head, because kernels parallelise over
    rows of the queries. A convolution is the product of its windows and the kernel (implicit GEMM).
    Its backward pass is two products of the same sizes, and counts as one product.
    """
    name = func._overloadpacket.__name__
    shapes = [tuple(a.shape) for a in args if isinstance(a, Tensor)]
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        left, right = shapes[-2:]
        return ProductSize(left[-2], right[-1], left[-1], math.prod(left[:-2]))
    if name in ("convolution", "_convolution", "convolution_backward"):
        is_back = name == "convolution_backward"
        first, weight = shapes[is_back], shapes[is_back + 1]
        output = shapes[0] if is_back else tuple(result.shape)
        groups = max(1, first[1] // max(1, weight[1]))
        windows = output[0] * math.prod(output[2:])
        return ProductSize(windows, weight[0] // groups, math.prod(weight[1:]), groups)
    if "scaled_dot_product" in name and len(shapes) > 2:
        query, _, value = shapes[-3:] if "backward" not in name else shapes[1:4]
        return ProductSize(query[-2], value[-1], value[-2], math.prod(query[:-2]))
    return ProductSize()


def bytes_touched(inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Return the bytes that an operation reads and writes; 0 for a view."""
    input_storages = {t.untyped_storage()._cdata for t in inputs}
    new_outputs = [t for t in outputs if t.untyped_storage()._cdata not in input_storages]
    if not new_outputs and outputs:
        in_place = {id(t) for t in inputs} & {id(t) for t in outputs}
        if not in_place:
            return 0
        new_outputs = outputs
    return sum(t.numel() * t.element_size() for t in (*inputs, *new_outputs))
