"""What products do with slices: columns, rows, heads, channels and the vocabulary.

By the letters of a product (as einsum has them): where the sliced letter stays in the result, the
result is sliced; where it is summed over, each rank has a part of the sum, and all add theirs up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bigtrain.slicing.columns import column_linear, forget_input
from bigtrain.slicing.exchange import (
    SliceGroup,
    summed,
    to_all,
)
from bigtrain.slicing.sequence import total
from bigtrain.slicing.sliced_tensor import (
    SlicedTensor,
    as_operand,
    held,
    is_sliced,
    rule,
    rule_with_function,
)
from bigtrain.slicing.slices import Section, Slices

T = torch.Tensor


def product(
    letters: Sequence[str],
    result: str,
    operands: Sequence[Any],
    compute: Callable[..., Tensor],
    main: int | None = None,
    add_up: Callable[[Tensor, SliceGroup], Any] = summed,
) -> Any:
    """A product by its letters, on slices.

    Args:
        letters: for each operand one of each dim.
        result: those of the result; others are summed over.
        operands: at least one of them sliced.
        compute: the product of plain tensors.
        main: the operand by whose slices it is computed; left out, the first that is sliced.
        add_up: what makes the whole of parts of a sum.
    """
    sliced = [n for n, operand in enumerate(operands) if is_sliced(operand)]
    if not sliced:
        return compute(*operands)
    chosen = operands[sliced[0] if main is None else main]
    letter = letters[sliced[0] if main is None else main][chosen.slices.dim]
    group = chosen.group
    forget_input(group)
    own = [
        as_operand(
            operand,
            chosen.slices.at(names.index(letter))
            if letter in names and operand.shape[names.index(letter)] > 1
            else None,
            group,
        )
        for names, operand in zip(letters, operands, strict=True)
    ]
    local = compute(*own)
    if letter not in result:
        return add_up(local, group)
    return SlicedTensor.of(local, chosen.slices.at(result.index(letter)), group)


def _names(count: int) -> str:
    return "abcdefgh"[:count]


@rule(F.linear)
def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    return _gathered_once(linear(x, weight, bias), weight)


def _gathered_once(result: Any, weight: Any) -> Any:
    """The result of a product, whole where that is wanted of its weight."""
    wanted = is_sliced(weight) and weight.gathers and is_sliced(result)
    return result.whole() if wanted else result


def linear(x: Any, weight: Any, bias: Any, sequence_dim: int | None = None) -> Any:
    """A linear layer, where its input or its weight is sliced.

    Args:
        x: (..., width).
        weight: (columns, width).
        bias: (columns,), or None.
        sequence_dim: of `x`; None leaves that to the group.
    """
    if is_sliced(weight) and weight.slices.dim == 0:
        fused = _is_like(bias, weight)
        local = _columns(x, weight, held(bias) if fused and bias is not None else None)
        result = SlicedTensor.of(local, weight.slices.at(local.dim() - 1), weight.group)
        return result if fused else _with_bias(result, bias)
    names = _names(x.dim() - 1)
    result = product(
        (f"{names}x", "yx"),
        f"{names}y",
        (x, weight),
        F.linear,
        1 if is_sliced(weight) else None,
        _adds_up(x, sequence_dim),
    )
    return _with_bias(result, bias)


def _adds_up(x: Any, sequence_dim: int | None = None) -> Callable[[Tensor, SliceGroup], Any]:
    """What makes the whole of the parts that a linear layer of this input gives."""
    rows = x.rows if is_sliced(x) else ()
    return lambda partial, group: total(partial, group, sequence_dim, rows)


def _is_like(bias: Any, weight: SlicedTensor) -> bool:
    """Whether a bias is dealt out as the columns are, or there is none."""
    if not is_sliced(bias):
        return bias is None
    return bool(bias.slices.same(weight.slices, weight.group.size))


def _columns(x: Any, weight: SlicedTensor, bias: Tensor | None) -> Tensor:
    """What a linear layer gives in the columns of this rank."""
    group = weight.group
    if is_sliced(x) and x.slices.dim == x.dim() - 1:  # gathered, with a gradient that is partial
        return F.linear(as_operand(x, None, group), held(weight), bias)
    return column_linear(x, held(weight), bias, group)


def _with_bias(result: Any, bias: Any, dim: int = -1) -> Any:
    """Add a bias along a dim: once, after what is partial was added up."""
    if bias is None:
        return result
    shape = [1] * result.dim()
    shape[dim] = -1
    return result + (bias if dim == -1 else bias.reshape(shape))


@rule_with_function(torch.matmul, T.matmul, T.__matmul__, T.__rmatmul__)
def _matmul(func: Any, a: Any, b: Any) -> Any:
    if func is T.__rmatmul__:
        a, b = b, a
    if a.dim() < 2 or b.dim() < 2:
        return NotImplemented
    if b.dim() == 2:
        return _times(a, b)
    batch = max(a.dim(), b.dim()) - 2
    names = _names(batch)
    # A batch dim of one element is broadcast: it has no letter of the other's.
    first = _batch_names(a, names) + "xy"
    second = _batch_names(b, names) + "yz"
    return product((first, second), f"{names}xz", (a, b), torch.matmul)


def _times(x: Any, matrix: Any) -> Any:
    """A product with a matrix (width, columns), as a linear layer is."""
    if is_sliced(matrix) and matrix.slices.dim == 1:
        columns = SlicedTensor.of(held(matrix).t(), matrix.slices.at(0), matrix.group)
        return matrix.like(_columns(x, columns, None), x.dim() - 1)
    names = _names(x.dim() - 1)
    main = 1 if is_sliced(matrix) else None
    return product((f"{names}x", "xy"), f"{names}y", (x, matrix), torch.matmul, main, _adds_up(x))


def _batch_names(tensor: Tensor, names: str) -> str:
    count = tensor.dim() - 2
    own = names[len(names) - count :] if count else ""
    sizes = tensor.shape[:count]
    return "".join(n.upper() if size == 1 else n for n, size in zip(own, sizes, strict=True))


@rule(torch.bmm, T.bmm)
def _bmm(a: Any, b: Any) -> Any:
    return product(("axy", "ayz"), "axz", (a, b), torch.bmm)


@rule(torch.mm, T.mm)
def _mm(a: Any, b: Any) -> Any:
    return _times(a, b)


@rule(torch.addmm, T.addmm)
def _addmm(added: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    result = torch.mm(a, b)
    result = result if alpha == 1 else result * alpha
    return _gathered_once(result + (added if beta == 1 else added * beta), b)


@rule(torch.baddbmm, T.baddbmm)
def _baddbmm(added: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    result = torch.bmm(a, b)
    result = result if alpha == 1 else result * alpha
    return result if beta == 0 else result + (added if beta == 1 else added * beta)


@rule(torch.einsum)
def _einsum(equation: str, *operands: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    equation = equation.replace(" ", "")
    if "..." in equation:
        return NotImplemented
    inputs, arrow, result = equation.partition("->")
    letters = inputs.split(",")
    if not arrow or any(len(set(names)) != len(names) for names in letters):
        return NotImplemented
    return product(letters, result, operands, lambda *own: torch.einsum(equation, *own))


@rule_with_function(F.conv1d, F.conv2d, F.conv3d)
def _conv(
    func: Any,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    if x.dim() < weight.dim():
        return func(x.unsqueeze(0), weight, bias, stride, padding, dilation, groups).squeeze(0)
    options = (stride, padding, dilation)
    if groups > 1:
        return _gathered_once(_grouped(func, x, weight, bias, options, groups), weight)
    spatial = "hwd"[: weight.dim() - 2]
    kernel = spatial.upper()
    if is_sliced(x) and x.slices.dim > 1 or (is_sliced(weight) and weight.slices.dim > 1):
        return NotImplemented
    result = (
        product(
            (f"bx{spatial}", f"yx{kernel}"),
            f"by{spatial}",
            (x, weight),
            lambda own, kernels: func(own, kernels, None, *options),
            1 if is_sliced(weight) else None,
        )
        if is_sliced(x) or is_sliced(weight)
        else func(x, weight, None, *options)
    )
    return _gathered_once(_with_bias(result, bias, 1), weight)


def _grouped(func: Any, x: Any, weight: Any, bias: Any, options: Any, groups: int) -> Any:
    """By groups of channels: those of a rank go together."""
    if is_sliced(x) and x.slices.dim == 0:
        own = to_all(weight, x.group) if not is_sliced(weight) else weight
        if is_sliced(own):
            return NotImplemented
        return _with_bias(x.like(func(held(x), own, None, *options, groups)), bias, 1)
    main = weight if is_sliced(weight) else x
    if not is_sliced(main) or main.slices.dim != (0 if main is weight else 1):
        return NotImplemented
    group, inner, outer = main.group, x.shape[1] // groups, weight.shape[0] // groups
    by_group = scaled(main.slices, outer if main is weight else inner, 1)
    if by_group is None or not by_group.length(group.size - 1, group.size):
        return NotImplemented
    inputs, outputs = scaled(by_group, 1, inner), scaled(by_group, 1, outer)
    if inputs is None or outputs is None:
        return NotImplemented
    own_x = as_operand(x, inputs.at(1), group)
    own_weight = as_operand(weight, outputs.at(0), group)
    own_groups = by_group.length(group.rank, group.size)
    local = func(own_x, own_weight, None, *options, own_groups)
    return _with_bias(SlicedTensor.of(local, outputs.at(1), group), bias, 1)


def scaled(slices: Slices, divide: int, times: int) -> Slices | None:
    """The same dealing of elements that are so many times as large or small."""
    sections = []
    for length, unit in slices.sections:
        if length % divide or (unit % divide and length // unit % divide):
            return None
        larger = max(1, unit // divide) if unit % divide == 0 else 1
        sections.append(Section(length // divide * times, larger * times))
    return Slices(slices.dim, tuple(sections))


@rule_with_function(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def _conv_transpose(
    func: Any, x: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if x.dim() < weight.dim():
        return func(x.unsqueeze(0), weight, bias, *args, **kwargs).squeeze(0)
    groups = kwargs.get("groups", args[3] if len(args) > 3 else 1)
    if groups != 1 or (is_sliced(x) and x.slices.dim > 1):
        return NotImplemented
    spatial = "hwd"[: weight.dim() - 2]
    if is_sliced(weight) and weight.slices.dim > 1:
        return NotImplemented
    result = (
        product(
            (f"bx{spatial}", f"xy{spatial.upper()}"),
            f"by{spatial}",
            (x, weight),
            lambda own, kernels: func(own, kernels, None, *args, **kwargs),
            1 if is_sliced(weight) else None,
        )
        if is_sliced(x) or is_sliced(weight)
        else func(x, weight, None, *args, **kwargs)
    )
    return _gathered_once(_with_bias(result, bias, 1), weight)


@rule(F.embedding)
def _embedding(
    indices: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,  # noqa: FBT001, FBT002 - torch's own
    sparse: bool = False,  # noqa: FBT001, FBT002
) -> Any:
    del norm_type
    if not is_sliced(weight) or is_sliced(indices) or max_norm or scale_grad_by_freq or sparse:
        return NotImplemented
    group, slices = weight.group, weight.slices
    if slices.dim == 1:
        local = F.embedding(indices, held(weight), padding_idx)
        result = SlicedTensor.of(local, slices.at(local.dim() - 1), group)
        return _gathered_once(result, weight)
    if len(slices.sections) > 1:
        return NotImplemented
    ((begin, length),) = slices.parts(group.rank, group.size)
    if padding_idx is not None:
        padding_idx = padding_idx % slices.total - begin
        padding_idx = padding_idx if 0 <= padding_idx < length else None
    elsewhere = (indices < begin) | (indices >= begin + length)
    rows = F.embedding((indices - begin).masked_fill(elsewhere, 0), held(weight), padding_idx)
    return total(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), group)
