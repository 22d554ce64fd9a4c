"""Try a loss's formula on made-up outputs: the losses of two halves must sum to that of the whole.

The formula follows from the functions that the loss calls (`losses.loss_formula`). For some losses
these do not show that the formula is wrong, such as a loss that pairs the first half of the rows
with the second half, or that selects the rows with the highest losses. A trial refuses such losses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bigtrain.data.loader import MicroBatch
from bigtrain.losses.global_mean import GlobalMeanLoss, loss_scope
from bigtrain.losses.loss import MeanLoss
from bigtrain.losses.loss_formula import LossFormula, NoFormulaError
from bigtrain.tensors.tree import map_tensors, tree_tensors

_ROWS = 4
"""The number of rows of a trial."""
_MOST_NUMBERS = 2**24
"""The most elements of the outputs of `_ROWS` rows for which a trial is made."""
_SAME = 1e-4
"""The largest relative difference that rounding in fp32 explains."""

_FormulaOf = Callable[[tuple[MicroBatch, MicroBatch], tuple[Any, Any]], LossFormula]


def try_formula(
    loss: MeanLoss,
    find: _FormulaOf,
    batches: tuple[MicroBatch, MicroBatch],
    outputs: tuple[Any, Any],
) -> None:
    """Compare the loss of a few rows with the sum of the losses of two halves of these rows.

    The outputs of the model are made up. Nothing is compared if the loss does not run on them, if
    it draws random numbers, or if it changes tensors that it stores. Neither is anything compared
    if no dim of the outputs has one entry for each row.

    Args:
        loss: the user's loss. A module is copied, so that its state does not change.
        find: (two batches, their outputs with values) -> the formula of the loss for the first. The
            second batch and output have each row of the first twice.
        batches: two batches on the CPU; the second has each row of the first twice.
        outputs: the outputs for both batches, without values.

    Raises:
        NoFormulaError: the loss differs from the sum.
    """
    dims = _row_dims(batches, outputs)
    if dims is None:
        return
    batch, output = batches[0], outputs[0]
    while batch.rows < _ROWS:
        batch = twice(batch)
    batch = batch.first_rows(_ROWS, loss.count)
    if sum(t.numel() for t in tree_tensors(output)) // batches[0].rows * _ROWS > _MOST_NUMBERS:
        return
    made_up = _made_up(output, dims)
    fn = copy.deepcopy(loss.fn) if isinstance(loss.fn, nn.Module) else loss.fn
    difference: tuple[float, float] | None = None
    with suppress(Exception), torch.no_grad(), _KeepsItsTensors():
        whole_losses = [_value(fn, made_up, batch, seed) for seed in (1, 2)]
        if whole_losses[0] == whole_losses[1]:
            difference = (
                whole_losses[0],
                _added_up(replace(loss, fn=fn), find, batch, made_up, dims),
            )
    if difference is None:
        return
    far = abs(difference[0] - difference[1])
    if far > _SAME * max(abs(difference[0]), abs(difference[1]), 1e-6):
        raise NoFormulaError(
            f"of random outputs it is {difference[0]:.6g} for {_ROWS} rows at once, and "
            f"{difference[1]:.6g} for two halves of them"
        )


def _value(fn: Callable[[Any, Any], Tensor], output: Any, batch: MicroBatch, seed: int) -> float:
    torch.manual_seed(seed)
    return float(fn(_copied(output), _copied(batch.targets)))


def _added_up(
    loss: MeanLoss, find: _FormulaOf, batch: MicroBatch, output: Any, dims: list[int | None]
) -> float:
    """Return the sum of the formula's losses of the first and the second half of the rows."""
    half = _ROWS // 2
    parts = [batch.part(start, start + half) for start in (0, half)]
    outputs = [_along_rows(output, dims, partial(_narrowed, start, half)) for start in (0, half)]
    of_part = {id(part.targets): out for part, out in zip(parts, outputs, strict=True)}

    def find_part(part: MicroBatch) -> LossFormula:
        out = of_part[id(part.targets)]
        return find((part, twice(part)), (out, _along_rows(out, dims, _both)))

    tried = GlobalMeanLoss(loss.fn, loss.name, find_part(parts[0]), parts[0], find_part)
    counted = [replace(part, count=tried.count(part.targets)) for part in parts]
    total = 0.0
    for part, out in zip(tried.with_totals(counted), outputs, strict=True):
        with loss_scope(tried, part):
            total += float(tried(_copied(out), _copied(part.targets), part.count))
    return total / _ROWS


def _row_dims(
    batches: tuple[MicroBatch, MicroBatch], outputs: tuple[Any, Any]
) -> list[int | None] | None:
    """Return the batch dim of each output, which is None for an output without rows.

    None instead of a list if a batch dim is not clear, or if no output has rows.
    """
    dims: list[int | None] = []
    for first_tensor, second_tensor in zip(
        *(tree_tensors(output) for output in outputs), strict=True
    ):
        grown = [
            d
            for d, (a, b) in enumerate(zip(first_tensor.shape, second_tensor.shape, strict=False))
            if a != b
        ]
        if not grown:
            dims.append(None)
        elif len(grown) == 1 and first_tensor.shape[grown[0]] == batches[0].rows:
            dims.append(grown[0])
        else:
            return None
    return dims if any(dim is not None for dim in dims) else None


def _made_up(output: Any, dims: list[int | None]) -> Any:
    generator, places = torch.Generator().manual_seed(0), iter(dims)

    def number(like: Tensor) -> Tensor:
        shape, dim = list(like.shape), next(places)
        if dim is not None:
            shape[dim] = _ROWS
        if not like.is_floating_point():
            return torch.zeros(shape, dtype=like.dtype)
        return torch.rand(shape, generator=generator).to(max(like.dtype, torch.float32, key=_bits))

    return map_tensors(output, number)


def _bits(dtype: torch.dtype) -> int:
    return torch.finfo(dtype).bits


def _along_rows(
    output: Any, dims: list[int | None], change: Callable[[Tensor, int], Tensor]
) -> Any:
    places = iter(dims)

    def changed(tensor: Tensor) -> Tensor:
        dim = next(places)
        return tensor if dim is None else change(tensor, dim)

    return map_tensors(output, changed)


def _narrowed(start: int, length: int, tensor: Tensor, dim: int) -> Tensor:
    return tensor.narrow(dim, start, length)


def twice(batch: MicroBatch) -> MicroBatch:
    """Return a batch with all rows of the given batch, followed by the same rows again."""
    return replace(batch.map_rows(_both), rows=2 * batch.rows)


def _both(tensor: Tensor, dim: int) -> Tensor:
    return torch.cat([tensor, tensor], dim)


def _copied(value: Any) -> Any:
    """Return a copy of all tensors in a value, because a loss may change its arguments."""
    return map_tensors(value, lambda tensor: tensor.detach().clone())


class _KeepsItsTensors(TorchDispatchMode):
    """Raises an error before a trial of a loss changes a tensor that was not made in the trial."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: set[int] = set()
        self._alive: list[Tensor] = []  # a freed storage could give its address to another

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        del types
        kwargs = kwargs or {}
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        writes = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
        for name in writes:
            for tensor in tree_tensors(named.get(name)):
                if tensor.untyped_storage()._cdata not in self._made:
                    raise RuntimeError("it changes a tensor that it stores between calls")
        result = func(*args, **kwargs)
        if not writes:
            inputs = {t.untyped_storage()._cdata for t in tree_tensors((args, kwargs))}
            for tensor in tree_tensors(result):
                if tensor.untyped_storage()._cdata not in inputs:
                    self._made.add(tensor.untyped_storage()._cdata)
                    self._alive.append(tensor)
        return result
