"""Workspaces of CUDA kernels: memory that is allocated and freed inside one operation.

A bias's gradient is a sum over all rows, and torch 2.11's kernel on a GPU takes up to eight bytes
for each number it sums: often the peak of a backward pass. Attention's backward pass sums the
queries' gradients in fp32. These are the sizes that torch's and cuDNN's code requests from the
allocator, as observed on an H100 (docs/internals/gpu.md). The workspace of a cuDNN convolution
depends on the algorithm that cuDNN picks, and is not predicted.

Source: aten/src/ATen/native/cuda/Reduce.cuh of torch, for the shapes of blocks and grids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bigtrain.devices import device_count, processors
from bigtrain.tensors.compound_ops import compound_cost

_ATEN = torch.ops.aten
PROCESSORS = 132
"""Multiprocessors assumed without a GPU: those of an H100. Only wide sums depend on them."""
_RESIDENT_THREADS = 2048
"""Threads that a multiprocessor runs at once."""
_BLOCK_THREADS, _WARP = 512, 32
_LEAST_PER_THREAD, _MOST_PER_THREAD = 16, 256
"""The least and the most numbers that a thread sums if a sum is divided among blocks."""


def workspace_bytes(func: Any, args: Sequence[Any], result: Any) -> int:
    """Return the peak bytes inside an operation on CUDA, in addition to its inputs and outputs.

    Args:
        func: the operation.
        args: the operation's arguments, real or fake, on any device.
        result: its result.
    """
    rule = _RULES.get(func)
    return compound_workspace(func, args, result) if rule is None else rule(args, result)


def compound_workspace(func: Any, args: Sequence[Any], result: Any) -> int:
    """Return the peak bytes inside a compound operation; 0 for any other operation."""
    del result
    cost = compound_cost(func, args)
    return 0 if cost is None else cost.workspace


def workspaces_of(device_type: str) -> Callable[[Any, Sequence[Any], Any], int]:
    """Return the function of workspaces: CUDA's kernels have some, and compound operations."""
    return workspace_bytes if device_type == "cuda" else compound_workspace


@cache
def _multiprocessors() -> int:
    return (processors(0) if device_count() else None) or PROCESSORS


def column_sum_bytes(rows: int, columns: int, size: int, multiprocessors: int) -> int:
    """Return the bytes of partial sums and counters of a sum over contiguous rows.

    Args:
        rows: number of rows.
        columns: numbers in a row, and in the result.
        size: bytes of an accumulator.
        multiprocessors: the number of multiprocessors of the GPU.
    """
    vector = next(n for n in (4, 2, 1) if columns % n == 0)
    threads = _BLOCK_THREADS // vector
    wide, high = (min(_power_of_2(n), threads) for n in (max(1, columns // vector), rows))
    width = min(wide, _WARP)
    height = min(high, threads // width)
    width = min(wide, threads // height)
    if rows < min(height * 16, 256):
        return 0  # each thread sums a column alone
    each = math.ceil(rows / height)
    grid = math.ceil(columns // vector / width)
    target = multiprocessors * (_RESIDENT_THREADS // (width * height))
    if each < _MOST_PER_THREAD or grid > target:
        return 0
    blocks = min(math.ceil(target / grid), math.ceil(each / _LEAST_PER_THREAD))
    blocks = max(blocks, math.ceil(each / _MOST_PER_THREAD))
    return size * columns * blocks * width * vector + 4 * grid if blocks > 1 else 0


def _power_of_2(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def _sum(args: Sequence[Any], _result: Any) -> int:
    tensor, dims = args[0], args[1]
    if not dims or not tensor.is_contiguous() or not tensor.is_floating_point():
        return 0
    reduced = sorted(dim % tensor.dim() for dim in dims)
    if reduced != list(range(len(reduced))) or len(reduced) == tensor.dim():
        return 0  # not over rows
    rows = math.prod(tensor.shape[: len(reduced)])
    columns = tensor.numel() // max(1, rows)
    if not rows or not columns:
        return 0
    return column_sum_bytes(rows, columns, max(4, tensor.itemsize), _multiprocessors())


def _attention_backward(args: Sequence[Any], _result: Any) -> int:
    """Return the bytes of the queries' gradients in fp32, and of an fp32 number for each row.

    For fp32 queries torch's kernel copies the incoming gradient first, which takes as many bytes.
    """
    query: Tensor = args[1]
    batch, heads, length = query.shape[:3]
    statistics = 4 * batch * heads * length
    if query.dtype == torch.float32:
        return 4 * query.numel() + 2 * statistics
    return 4 * query.numel() + statistics + 256


def _copies(count: int) -> Callable[[Sequence[Any], Any], int]:
    """Return a rule for copies: of each of the first `count` arguments that is not contiguous."""

    def rule(args: Sequence[Any], _result: Any) -> int:
        return sum(t.numel() * t.itemsize for t in args[:count] if not t.is_contiguous())

    return rule


_RULES: dict[Any, Callable[[Sequence[Any], Any], int]] = {
    _ATEN.sum.dim_IntList: _sum,
    _ATEN._scaled_dot_product_cudnn_attention_backward.default: _attention_backward,
    _ATEN._scaled_dot_product_flash_attention_backward.default: _attention_backward,
    _ATEN._scaled_dot_product_efficient_attention_backward.default: _attention_backward,
    # A run on CUDA described by the CPU's tensors: see `cuda_program`.
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    _ATEN.native_layer_norm.default: _copies(1),
    _ATEN.native_layer_norm_backward.default: _copies(2),
}
