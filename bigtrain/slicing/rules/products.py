"""Rules of products: columns, rows, heads, channels and the vocabulary.

A product is described by letters, one per dim, as in einsum. If the letter of the sliced dim is in
the result, the result is sliced. Otherwise each rank has a partial sum, and these are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bigtrain.slicing.column_parallel import column_linear, forget_input
from bigtrain.slicing.exchange import (
    SliceGroup,
    summed,
)
from bigtrain.slicing.sequence_parallel import sum_partials
from bigtrain.slicing.sliced_tensor import (
    SlicedTensor,
    as_operand,
    is_sliced,
    local_of,
    rule,
    rule_with_function,
    shares_memory,
)
from bigtrain.slicing.slices import Slices, SliceSection

_T = torch.Tensor


def product(
    letters: Sequence[str],
    result: str,
    operands: Sequence[Any],
    compute: Callable[..., Tensor],
    main: int | None = None,
    add_up: Callable[[Tensor, SliceGroup], Any] = summed,
) -> Any:
    """Compute a product, described by its letters, on slices.

    Args:
        letters: for each operand, one letter per dim.
        result: letters of the result; all other letters are summed over.
        operands: the operands of the product, whole or sliced.
        compute: computes the product of plain tensors.
        main: the index of the operand whose slices the others follow; None for the first sliced
            operand.
        add_up: sums partial results over the ranks.

    Returns:
        A sliced tensor if the letter of the sliced dim is in `result`; else what `add_up` returns.
        Without sliced operands, the plain product.
    """
    sliced = [n for n, operand in enumerate(operands) if is_sliced(operand)]
    if not sliced:
        return compute(*operands)
    chosen = operands[sliced[0] if main is None else main]
    letter = letters[sliced[0] if main is None else main][chosen.slices.dim]
    group = chosen.group
    forget_input(group)
    local_operands = [
        as_operand(
            operand,
            chosen.slices.at(names.index(letter))
            if letter in names and operand.shape[names.index(letter)] > 1
            else None,
            group,
        )
        for names, operand in zip(letters, operands, strict=True)
    ]
    local = compute(*local_operands)
    if letter not in result:
        # The sum is done in place, and in inference mode `_is_view` does not recognize a view.
        is_own = not any(shares_memory(local, operand) for operand in local_operands)
        return add_up(local if is_own else local.clone(), group)
    return SlicedTensor.of(local, chosen.slices.at(result.index(letter)), group)


def _names(count: int) -> str:
    return "abcdefgh"[:count]


@rule(F.linear)
def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    return _gathered_once(linear(x, weight, bias), weight)


def _gathered_once(result: Any, weight: Any) -> Any:
    """Gather the result of a product if its weight is marked `gathers`."""
    wanted = is_sliced(weight) and weight.gathers and is_sliced(result)
    return result.whole() if wanted else result


def linear(x: Any, weight: Any, bias: Any, sequence_dim: int | None = None) -> Any:
    """Compute a linear layer whose input or weight is sliced.

    Args:
        x: (..., width).
        weight: (columns, width).
        bias: (columns,), or None.
        sequence_dim: the sequence dim of `x`; None for that of the group.
    """
    if is_sliced(weight) and weight.slices.dim == 0:
        fused = _is_like(bias, weight)
        local = _columns(x, weight, local_of(bias) if fused and bias is not None else None)
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
    """Return the function that sums the partial results of a linear layer on this input."""
    rows = x.rows if is_sliced(x) else ()
    return lambda partial, group: sum_partials(partial, group, sequence_dim, rows)


def _is_like(bias: Any, weight: SlicedTensor) -> bool:
    """Whether a bias has the slices of the weight; also true without a bias."""
    if not is_sliced(bias):
        return bias is None
    return bool(bias.slices.same(weight.slices, weight.group.size))


def _columns(x: Any, weight: SlicedTensor, bias: Tensor | None) -> Tensor:
    """Return the output of a linear layer in this rank's columns."""
    group = weight.group
    # `column_linear` takes neither a vector nor an input that is sliced along its width.
    if x.dim() == 1 or (is_sliced(x) and x.slices.dim == x.dim() - 1):
        return F.linear(as_operand(x, None, group), local_of(weight), bias)
    return column_linear(x, local_of(weight), bias, group)


def _with_bias(result: Any, bias: Any, dim: int = -1) -> Any:
    """Add a bias along a dim. The result must be summed before, so that the bias counts once."""
    if bias is None:
        return result
    bias = bias.to(result.dtype)  # autocast may have chosen that dtype
    shape = [1] * result.dim()
    shape[dim] = -1
    return result + (bias if dim == -1 else bias.reshape(shape))


@rule_with_function(torch.matmul, _T.matmul, _T.__matmul__, _T.__rmatmul__)
def _matmul(func: Any, a: Any, b: Any) -> Any:
    if func is _T.__rmatmul__:
        a, b = b, a
    if a.dim() < 2 and b.dim() < 2:
        return product("xx", "", (a, b), torch.dot)
    if a.dim() < 2:
        return torch.matmul(a.unsqueeze(0), b).squeeze(-2)
    if b.dim() < 2:
        return torch.matmul(a, b.unsqueeze(1)).squeeze(-1)
    if b.dim() == 2:
        return _times(a, b)
    batch = max(a.dim(), b.dim()) - 2
    names = _names(batch)
    # A batch dim of length 1 is broadcast: it gets another letter than the other operand's.
    first = _batch_names(a, names) + "xy"
    second = _batch_names(b, names) + "yz"
    return product((first, second), f"{names}xz", (a, b), torch.matmul)


def _times(x: Any, matrix: Any) -> Any:
    """Return the product with a matrix (width, columns), computed as a linear layer."""
    if is_sliced(matrix) and matrix.slices.dim == 1:
        columns = SlicedTensor.of(local_of(matrix).t(), matrix.slices.at(0), matrix.group)
        return matrix.like(_columns(x, columns, None), x.dim() - 1)
    names = _names(x.dim() - 1)
    main = 1 if is_sliced(matrix) else None
    return product((f"{names}x", "xy"), f"{names}y", (x, matrix), torch.matmul, main, _adds_up(x))


def _batch_names(tensor: Tensor, names: str) -> str:
    count = tensor.dim() - 2
    letters = names[len(names) - count :] if count else ""
    sizes = tensor.shape[:count]
    return "".join(n.upper() if size == 1 else n for n, size in zip(letters, sizes, strict=True))


_VECTORS = {
    "dot": ("x", "x", ""),
    "vdot": ("x", "x", ""),
    "mv": ("xy", "y", "x"),
    "outer": ("x", "y", "xy"),
}


@rule_with_function(*(getattr(home, name) for home in (torch, _T) for name in _VECTORS))
def _vectors(func: Any, a: Any, b: Any) -> Any:
    first, second, result = _VECTORS[func.__name__]
    return product((first, second), result, (a, b), func)


@rule(F.bilinear)
def _bilinear(a: Any, b: Any, weight: Any, bias: Any = None) -> Any:
    names = _names(a.dim() - 1)
    letters = (f"{names}x", f"{names}y", "zxy")
    main = 2 if is_sliced(weight) else None
    return _with_bias(product(letters, f"{names}z", (a, b, weight), F.bilinear, main), bias)


@rule(torch.bmm, _T.bmm)
def _bmm(a: Any, b: Any) -> Any:
    return product(("axy", "ayz"), "axz", (a, b), torch.bmm)


@rule(torch.mm, _T.mm)
def _mm(a: Any, b: Any) -> Any:
    return _times(a, b)


@rule(torch.addmm, _T.addmm)
def _addmm(added: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    return _gathered_once(_with_added(torch.mm(a, b), added, beta, alpha), b)


def _with_added(result: Any, added: Any, beta: float, alpha: float) -> Any:
    result = result if alpha == 1 else result * alpha
    if beta == 0:
        return result
    added = added.to(result.dtype)  # autocast may have chosen that dtype
    return result + (added if beta == 1 else added * beta)


@rule(torch.baddbmm, _T.baddbmm)
def _baddbmm(added: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    return _with_added(torch.bmm(a, b), added, beta, alpha)


@rule(torch.einsum)
def _einsum(equation: Any, *operands: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    if not isinstance(equation, str):
        return NotImplemented
    letters, result = _spelled(equation.replace(" ", ""), operands)
    sliced = [n[t.slices.dim] for n, t in zip(letters, operands, strict=True) if is_sliced(t)]
    if any(names.count(letter) > 1 for names in letters for letter in sliced):
        return NotImplemented  # a diagonal
    return product(
        letters, result, operands, lambda *local_operands: torch.einsum(equation, *local_operands)
    )


def _spelled(equation: str, operands: Sequence[Tensor]) -> tuple[list[str], str]:
    """Return the letters of each operand and of the result, with dots replaced by letters."""
    inputs, arrow, result = equation.partition("->")
    letters = inputs.split(",")
    if not arrow:
        once = sorted(n for n in set(inputs) if n.isalpha() and inputs.count(n) == 1)
        result = ("..." if "..." in inputs else "") + "".join(once)
    spare = [chr(n) for n in (*range(65, 91), *range(97, 123)) if chr(n) not in equation]
    spelled = []
    widest = ""
    for names, operand in zip(letters, operands, strict=True):
        count = operand.dim() - len(names) + 3 if "..." in names else 0
        dots = "".join(reversed(spare[:count]))
        widest = max(widest, dots, key=len)
        spelled.append(names.replace("...", dots))
    return spelled, result.replace("...", widest)


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
    def compute(local_input: Tensor, kernels: Tensor, own_groups: int = groups) -> Any:
        return func(local_input, kernels, None, stride, padding, dilation, own_groups)

    return _convolution(compute, x, weight, bias, groups, is_transposed=False)


@rule_with_function(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def _conv_transpose(
    func: Any,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    def compute(local_input: Tensor, kernels: Tensor, own_groups: int = groups) -> Any:
        return func(
            local_input, kernels, None, stride, padding, output_padding, own_groups, dilation
        )

    return _convolution(compute, x, weight, bias, groups, is_transposed=True)


def _convolution(
    compute: Callable[..., Any], x: Any, weight: Any, bias: Any, groups: int, *, is_transposed: bool
) -> Any:
    """Compute a convolution or transposed convolution on slices.

    A convolution sums over dim 1 of its weight, a transposed convolution over dim 0.

    Args:
        compute: (input, weight, number of groups, by default `groups`) -> the convolution of plain
            tensors without a bias.
        x: (batch, channels, ...), or without the batch.
        weight: (out channels, in channels of a group, ...); of a transposed convolution, (in
            channels, out channels of a group, ...).
        bias: (out channels,), or None.
        groups: the number of groups of channels.
        is_transposed: whether it is a transposed convolution.
    """
    if x.dim() < weight.dim():
        batch = _convolution(
            compute, x.unsqueeze(0), weight, bias, groups, is_transposed=is_transposed
        )
        return batch if batch is NotImplemented else batch.squeeze(0)
    if any(is_sliced(t) and t.slices.dim > 1 for t in (x, weight)):
        return NotImplemented
    if groups > 1:
        result = _grouped(compute, x, weight, groups, is_transposed=is_transposed)
    else:
        spatial = "hwd"[: weight.dim() - 2]
        channels = "xy" if is_transposed else "yx"
        letters = (f"bx{spatial}", f"{channels}{spatial.upper()}")
        main = 1 if is_sliced(weight) else None
        result = product(letters, f"by{spatial}", (x, weight), compute, main)
    if result is NotImplemented:
        return result
    return _gathered_once(_with_bias(result, bias, 1), weight)


def _grouped(
    compute: Callable[..., Any], x: Any, weight: Any, groups: int, *, is_transposed: bool
) -> Any:
    """Compute a convolution with groups: a rank has whole groups, or a part of each group.

    The arguments are those of `_convolution`; `groups` is more than one.
    """
    if not is_sliced(x) and not is_sliced(weight):
        return compute(x, weight, groups)
    group = (weight if is_sliced(weight) else x).group
    if is_sliced(x) and x.slices.dim == 0:
        return x.like(compute(local_of(x), as_operand(weight, None, group), groups))
    if is_sliced(weight) and weight.slices.dim == 1:  # the same part of each group
        each = Slices(1, weight.slices.sections * groups)
        if is_transposed:
            local = compute(as_operand(x, None, group), local_of(weight), groups)
            return SlicedTensor.of(local, each, group)
        return summed(compute(as_operand(x, each, group), local_of(weight), groups), group)
    if is_sliced(weight) and weight.slices.sections == weight.slices.sections[:1] * groups:
        if is_transposed:  # the same part of each group, here too
            part = as_operand(x, weight.slices.at(1), group)
            return summed(compute(part, local_of(weight), groups), group)
        local = compute(as_operand(x, None, group), local_of(weight), groups)
        return SlicedTensor.of(local, weight.slices.at(1), group)
    main, dim = (weight, 0) if is_sliced(weight) else (x, 1)
    inner, rows = x.shape[1] // groups, weight.shape[0] // groups
    outer = weight.shape[1] if is_transposed else rows
    by_group = scaled(main.slices, main.shape[dim] // groups, 1)
    if by_group is None or not by_group.length(group.size - 1, group.size):
        return NotImplemented
    inputs, kernels, outputs = (scaled(by_group, 1, n) for n in (inner, rows, outer))
    if inputs is None or kernels is None or outputs is None:
        return NotImplemented
    operands = as_operand(x, inputs.at(1), group), as_operand(weight, kernels.at(0), group)
    local = compute(*operands, by_group.length(group.rank, group.size))
    return SlicedTensor.of(local, outputs.at(1), group)


def scaled(slices: Slices, divide: int, times: int) -> Slices | None:
    """Return slices of a dim after every `divide` elements are replaced by `times` elements.

    Returns:
        None if a section's length is not divisible by `divide`, or if neither its unit nor its
        number of units is.
    """
    sections = []
    for length, unit in slices.sections:
        if length % divide or (unit % divide and length // unit % divide):
            return None
        larger = max(1, unit // divide) if unit % divide == 0 else 1
        sections.append(SliceSection(length // divide * times, larger * times))
    return Slices(slices.dim, tuple(sections))


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
        local = F.embedding(indices, local_of(weight), padding_idx)
        result = SlicedTensor.of(local, slices.at(local.dim() - 1), group)
        return _gathered_once(result, weight)
    local_index = torch.zeros_like(indices)
    elsewhere = torch.ones_like(indices, dtype=torch.bool)
    before, own_padding = 0, None
    for begin, length in slices.parts(group.rank, group.size):
        within = (indices >= begin) & (indices < begin + length)
        local_index = torch.where(within, indices - begin + before, local_index)
        elsewhere &= ~within
        if padding_idx is not None and 0 <= padding_idx % slices.total - begin < length:
            own_padding = padding_idx % slices.total - begin + before
        before += length
    rows = F.embedding(local_index, local_of(weight), own_padding)
    return sum_partials(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), group)
