"""Results of kernels on fake tensors, where torch's fake implementations differ or fail.

torch's fake implementations allocate no workspace of oneDNN. In `_grouped_mm` they accept only
bf16, although only one of CUDA's kernels has this limit. They fail if values decide a shape. If
such a shape has an upper bound, the bound is used: a forecast describes the largest case.
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
"""CUDA's grouped products align the rows of their result to this many bytes."""

Arguments = Mapping[str, Any]
"""An operation's arguments by name; arguments with a default may be missing."""


def kernel_result(func: Any, args: Any, kwargs: Any, *, of_cuda: bool) -> Any:
    """Return a kernel's result if torch's fake implementation is wrong or missing; otherwise None.

    Call this function under the fake mode, in which `torch.empty` makes fake tensors.

    Args:
        func: the operation.
        args: the operation's arguments; if the first is not a fake tensor, the result is None.
        kwargs: the operation's keyword arguments.
        of_cuda: whether the kernels are CUDA's, on whatever device the fake tensors are.
    """
    rule = _RULES.get(func)
    if rule is None or not isinstance(args[0], FakeTensor):
        return None
    names = (argument.name for argument in func._schema.arguments)
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    return rule(arguments, of_cuda)


def corrected_result(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Return the result of torch's fake, corrected in a workspace or in gradients of biases."""
    if func is _LSTM and isinstance(args[0], FakeTensor):
        names = (argument.name for argument in func._schema.arguments)
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        shape, dtype = tuple(arguments["input"].shape), arguments["input"].dtype
        size = lstm_workspace_bytes(shape, arguments["hidden_size"], dtype)
        if arguments["train"] and size:
            return (*result[:3], result[3].new_empty(size))
    if func is _LSTM_BACKWARD and _storage(result[3]) == _storage(result[4]):
        # The kernel returns a separate gradient for each bias.
        return (*result[:4], torch.empty_like(result[4]), *result[5:])
    return result


HAS_CORRECTION = {_LSTM, _LSTM_BACKWARD}
"""The operations that `corrected_result` changes."""


def _grouped_mm(arguments: Arguments, of_cuda: bool) -> Tensor | None:
    """Return the result of a grouped product: each group of rows or columns has its own matrix."""
    rows, columns = arguments["self"], arguments["mat2"]
    dtype = arguments.get("out_dtype") or rows.dtype
    on_cpu = rows.device.type == "cpu" and not of_cuda
    if not on_cpu and rows.dtype == torch.bfloat16:
        return None
    groups: tuple[int, ...] = ()
    if rows.dim() == columns.dim() == 2:  # the dim that is summed over is in groups
        groups = (arguments["offs"].shape[0],)
    elif rows.dim() == columns.dim() == 3:
        groups = (rows.shape[0],)
    shape = (*groups, rows.shape[-2], columns.shape[-1])
    unit = 1 if on_cpu else max(1, _ALIGNED_BYTES // dtype.itemsize)
    width = -(-shape[-1] // unit) * unit
    stride = (shape[-2] * width, width, 1)[-len(shape) :]
    return torch.empty_strided(shape, stride, dtype=dtype, device=rows.device)


def _ctc(arguments: Arguments, of_cuda: bool) -> tuple[Tensor, Tensor]:
    """Return the loss of each row, and the probabilities of all alignments.

    There are as many probabilities as for the longest target. A padded matrix of targets bounds its
    length. Of concatenated targets only the mean length is known, unless the lengths are numbers.
    """
    del of_cuda
    log_probs, targets, lengths = (
        arguments["log_probs"],
        arguments["targets"],
        arguments["target_lengths"],
    )
    steps, rows = log_probs.shape[:2]
    if not isinstance(lengths, Tensor):
        longest = max(lengths, default=0)
    elif targets.dim() == 2:
        longest = targets.shape[1]
    else:
        longest = math.ceil(targets.shape[0] / max(1, rows))
    return log_probs.new_empty(rows), log_probs.new_empty(rows, steps, 2 * longest + 1)


def _masked_select(arguments: Arguments, of_cuda: bool) -> Tensor | None:
    """Return as many integers as a mask may select, as from padded targets; None for floats."""
    del of_cuda
    values, mask = arguments["self"], arguments["mask"]
    if values.is_floating_point() or values.is_complex():
        return None
    pairs: Any = torch.broadcast_tensors(values, mask)  # type: ignore[no-untyped-call]
    return torch.empty(pairs[0].numel(), dtype=values.dtype, device=values.device)


_RULES: dict[Any, Callable[[Arguments, bool], Any]] = {
    _ATEN._grouped_mm.default: _grouped_mm,
    _ATEN._ctc_loss.default: _ctc,
    _ATEN._ctc_loss.Tensor: _ctc,
    _ATEN.masked_select.default: _masked_select,
}

HAS_KERNEL_RULE = frozenset(_RULES)
"""The operations that `kernel_result` has a rule for."""


_LINE, _PAGE = 64, 4096
"""Bytes to which oneDNN aligns the rows of a workspace, and the parts of a workspace."""


def lstm_workspace_bytes(shape: tuple[int, ...], hidden: int, dtype: torch.dtype) -> int:
    """Return the bytes that one layer of oneDNN's LSTM saves for backward, in one direction.

    The saved parts are the gates and outputs of every step, the inputs and states between the
    steps, below and above the layer, and space for the gradients of all of these in fp32. Each part
    is aligned to a page. Observed with oneDNN 3.12; AVX2 and AVX-512 take the same bytes.

    Args:
        shape: the shape of the input: (steps, rows, width).
        hidden: the width of the state.
        dtype: the dtype of the input; 0 is returned for anything but fp32 and bf16.
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
    """Return the padded bytes of a row: whole cache lines, but not a multiple of 256 numbers.

    With such a multiple as stride, the rows would map to the same cache sets.
    """
    line = _LINE // size
    filled = -(-numbers // line) * line
    return size * (filled + line if filled % 256 == 0 else filled)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
