"""What kernels give of fake tensors where torch's own fakes give something else, or nothing.

torch's fakes know no workspace of oneDNN, ask `_grouped_mm` for bf16, as only one of CUDA's kernels
does, and give up where numbers decide a shape. Where such a shape has a bound it is taken for it: a
forecast is of the fullest case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_ATEN = torch.ops.aten
_LSTM = _ATEN.mkldnn_rnn_layer.default
_LSTM_BACKWARD = _ATEN.mkldnn_rnn_layer_backward.default
_ALIGNED_BYTES = 16
"""What CUDA's grouped products lay their rows at multiples of."""

Given = Mapping[str, Any]
"""A function's arguments by their names; those with a default may be missing."""


def own_result(func: Any, args: Any, kwargs: Any, *, of_cuda: bool) -> Any:
    """What a kernel gives, where that does not go by torch's own fakes; None where it does.

    Called where fake tensors are made by the functions that make real ones.

    Args:
        func: the operation.
        args: of it; the first is a fake tensor.
        kwargs: of it.
        of_cuda: whether the kernels are CUDA's, wherever the fakes are.
    """
    rule = _RULES.get(func)
    if rule is None or not isinstance(args[0], FakeTensor):
        return None
    names = (argument.name for argument in func._schema.arguments)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return rule(given, of_cuda)


def corrected(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """A result of torch's fakes with what the kernel holds beside it. See `own_result`."""
    if func is _LSTM and isinstance(args[0], FakeTensor):
        names = (argument.name for argument in func._schema.arguments)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        shape, dtype = tuple(given["input"].shape), given["input"].dtype
        size = lstm_workspace_bytes(shape, given["hidden_size"], dtype)
        if given["train"] and size:
            return (*result[:3], result[3].new_empty(size))
    if func is _LSTM_BACKWARD and _storage(result[3]) == _storage(result[4]):
        # The kernel gives each bias a gradient of its own.
        return (*result[:4], torch.empty_like(result[4]), *result[5:])
    return result


CORRECTED = {_LSTM, _LSTM_BACKWARD}
"""What `corrected` may change."""


def _grouped_product(given: Given, of_cuda: bool) -> Tensor | None:
    """Products of groups of rows, or of columns, with a matrix each."""
    rows, columns = given["self"], given["mat2"]
    dtype = given.get("out_dtype") or rows.dtype
    on_cpu = rows.device.type == "cpu" and not of_cuda
    if not on_cpu and rows.dtype == torch.bfloat16:
        return None
    groups: tuple[int, ...] = ()
    if rows.dim() == columns.dim() == 2:  # the dim that is summed over is in groups
        groups = (given["offs"].shape[0],)
    elif rows.dim() == columns.dim() == 3:
        groups = (rows.shape[0],)
    shape = (*groups, rows.shape[-2], columns.shape[-1])
    unit = 1 if on_cpu else max(1, _ALIGNED_BYTES // dtype.itemsize)
    width = -(-shape[-1] // unit) * unit
    stride = (shape[-2] * width, width, 1)[-len(shape) :]
    return torch.empty_strided(shape, stride, dtype=dtype, device=rows.device)


def _ctc(given: Given, of_cuda: bool) -> tuple[Tensor, Tensor]:
    """The loss of each row, and the probabilities of all alignments with the longest target.

    Targets in rows may be as long as these are. Of those that are laid end to end the mean length
    is known and no more, unless the lengths are numbers.
    """
    del of_cuda
    log_probs, targets, lengths = (
        given["log_probs"],
        given["targets"],
        given["target_lengths"],
    )
    steps, rows = log_probs.shape[:2]
    if not isinstance(lengths, Tensor):
        longest = max(lengths, default=0)
    elif targets.dim() == 2:
        longest = targets.shape[1]
    else:
        longest = math.ceil(targets.shape[0] / max(1, rows))
    return log_probs.new_empty(rows), log_probs.new_empty(rows, steps, 2 * longest + 1)


def _selected(given: Given, of_cuda: bool) -> Tensor | None:
    """What a mask leaves of integers, as of padded targets: all of them at the most."""
    del of_cuda
    values, mask = given["self"], given["mask"]
    if values.is_floating_point() or values.is_complex():
        return None
    pairs: Any = torch.broadcast_tensors(values, mask)  # type: ignore[no-untyped-call]
    return torch.empty(pairs[0].numel(), dtype=values.dtype, device=values.device)


_RULES: dict[Any, Callable[[Given, bool], Any]] = {
    _ATEN._grouped_mm.default: _grouped_product,
    _ATEN._ctc_loss.default: _ctc,
    _ATEN._ctc_loss.Tensor: _ctc,
    _ATEN.masked_select.default: _selected,
}

RULED = frozenset(_RULES)
"""What `own_result` may have a rule for."""


_LINE, _PAGE = 64, 4096
"""Bytes that rows of oneDNN's workspaces, and its parts, are multiples of."""


def lstm_workspace_bytes(shape: tuple[int, ...], hidden: int, dtype: torch.dtype) -> int:
    """What one layer of oneDNN's LSTM keeps for its backward pass, in one direction.

    Its gates and outputs of every step; its inputs and states between the steps, above and below
    the layer, and room for the gradients of all these, in fp32. Each part begins a page. Read off
    what oneDNN 3.12 asks for, and the same on AVX2 and AVX-512.

    Args:
        shape: of the input: steps, rows, width.
        hidden: the width of the state.
        dtype: of the input; nothing is known of others than fp32 and bf16.
    """
    if len(shape) != 3 or dtype not in (torch.float32, torch.bfloat16):
        return 0
    steps, rows, width = shape
    low, full = dtype.itemsize, torch.float32.itemsize
    widest, between = max(width, hidden), 2 * (steps + 1)
    parts = (
        steps * _row_bytes(4 * hidden, low),
        steps * _row_bytes(hidden, low),
        *(between * _row_bytes(widest, size) for size in (low, full, full)),
        *(between * hidden * size for size in (low, full)),
    )
    return sum(-(-rows * part // _PAGE) * _PAGE for part in parts)


def _row_bytes(numbers: int, size: int) -> int:
    """A row, filled up to a cache line; no multiple of 256 numbers, which would share lines."""
    line = _LINE // size
    filled = -(-numbers // line) * line
    return size * (filled + line if filled % 256 == 0 else filled)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
