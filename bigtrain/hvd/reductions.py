"""Reductions of tensors over the ranks: sums, averages, minima, maxima and products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from bigtrain.errors import ConfigError
from bigtrain.hvd.channel import (
    ChannelWork,
    Handle,
    Members,
    Request,
    RequestRow,
    Several,
    is_on_host,
)
from bigtrain.hvd.compression import Compression, compressor_of
from bigtrain.hvd.gathers import allgather_async, grouped_allgather
from bigtrain.hvd.process_sets import ProcessSet, global_process_set, set_of

Average: Literal["average"] = "average"
Sum: Literal["sum"] = "sum"
Adasum: Literal["adasum"] = "adasum"
"""This operation is refused; it is defined for scripts that offer it as an option."""
Min: Literal["min"] = "min"
Max: Literal["max"] = "max"
Product: Literal["product"] = "product"
ReduceOp = Literal["average", "sum", "adasum", "min", "max", "product"]

_TORCH_OPS: dict[str, Any] = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}
_ALL = global_process_set


def checked_op(op: Any, average: bool | None = None, *, where: str = "allreduce") -> ReduceOp:
    """Return the operation of `op`, or of its older form `average`.

    Args:
        op: the operation; None for `average`.
        average: False for the sum; True or None for the average.
        where: the name of the public function, for messages.

    Raises:
        ConfigError: both are given, or the operation is not supported.
    """
    if op is not None and average is not None:
        raise ConfigError(
            f"hvd.{where}: average={average} and op={op!r} are given, and both select the "
            f"reduction. Leave out average={average}."
        )
    if op is None:
        op = Sum if average is False else Average
    if op == Adasum:
        raise ConfigError("hvd: Adasum is not supported. Use op=hvd.Average or op=hvd.Sum.")
    if op not in _TORCH_OPS:
        raise ConfigError(
            f"hvd.{where}: op={op!r} is not known. Use op=hvd.Average, Sum, Min, Max or Product."
        )
    operation: ReduceOp = op
    return operation


def _refuse_dtype(dtype: torch.dtype, op: ReduceOp, factor: float, where: str) -> None:
    """Refuse reductions that would truncate integers, or that are not defined for a dtype."""
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    if is_whole and (op == Average or factor != 1.0):
        operation = "an average" if op == Average else "a factor"
        raise ConfigError(
            f"hvd.{where}: {operation} of {dtype} would be truncated. Give op=hvd.Sum, or "
            "tensor.float()."
        )
    if (dtype is torch.bool and op == Sum) or (dtype.is_complex and op not in (Average, Sum)):
        raise ConfigError(
            f"hvd.{where}: op={op} of {dtype} is not defined. Convert the tensor first, to "
            f"{'torch.int64' if dtype is torch.bool else 'its real and imaginary parts'}."
        )


class Reduction(ChannelWork):
    """An in-place all-reduce of one buffer.

    Args:
        buffer: a contiguous tensor of the same shape on every rank.
        call: the description of the exchange.
        op: the operation.
        before: the factor that is applied before the reduction.
        after: the factor that is applied after the reduction.
        divisor: the number by which the reduced values are divided.
    """

    def __init__(
        self,
        buffer: Tensor,
        call: Request,
        op: ReduceOp,
        before: float,
        after: float,
        divisor: int,
    ) -> None:
        super().__init__(call)
        self.buffer, self._op, self._after, self._divisor = buffer, op, after, divisor
        if before != 1.0:
            buffer.mul_(before)

    def begin(self, link: Members, rows: Sequence[RequestRow]) -> None:  # noqa: ARG002
        """Start the all-reduce."""
        group = link.group(on_host=self.call.on_host)
        if group is not None:
            reduces = _TORCH_OPS[self._op]
            self.works = [dist.all_reduce(self.buffer, reduces, group=group, async_op=True)]

    def finish(self) -> Tensor:
        """Apply the divisor and the factor, and return the buffer."""
        if self._divisor != 1:
            self.buffer /= self._divisor
        if self._after != 1.0:
            self.buffer *= self._after
        return self.buffer


def start_reduction(
    buffer: Tensor,
    op: ReduceOp,
    process_set: ProcessSet,
    *,
    name: str | None = None,
    before: float = 1.0,
    after: float = 1.0,
    shape: tuple[int, ...] | None = None,
    detail: str = "",
) -> Handle:
    """Start an in-place all-reduce of a contiguous buffer. Collective.

    Args:
        buffer: the tensor to overwrite, of a dtype that gloo supports.
        op: the operation.
        process_set: the ranks that take part.
        name: the name of the exchange, the same on every rank.
        before: the factor that is applied before the reduction.
        after: the factor that is applied after the reduction.
        shape: the shape in messages; by default the buffer's.
        detail: further text that must be equal on all ranks.

    Returns:
        A handle whose result is the buffer.
    """
    channel = process_set.channel()
    factors = "" if (before, after) == (1.0, 1.0) else f"factors {before:g} and {after:g}"
    details = ", ".join(filter(None, (factors, detail)))
    call = Request(
        kind="allreduce",
        name=name,
        dtype=buffer.dtype,
        shape=tuple(buffer.shape) if shape is None else shape,
        on_host=is_on_host(buffer),
        op=op,
        detail=details,
        numel=buffer.numel(),
    )
    divisor = channel.link.size if op == Average else 1
    return channel.submit(Reduction(buffer, call, op, before, after, divisor))


def _carrier(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a tensor is reduced, as gloo does not support every dtype."""
    return {torch.int16: torch.int32, torch.bool: torch.uint8}.get(dtype, dtype)


def _reduce(
    tensors: Sequence[Tensor],
    into: Sequence[Tensor] | None,
    op: ReduceOp,
    process_set: ProcessSet,
    *,
    name: str | None,
    before: float,
    after: float,
    where: str,
) -> Handle:
    """Start an all-reduce of several tensors; those of one dtype and device share a message.

    Args:
        tensors: the tensors, which are not changed.
        into: the tensors to write the results to; None for new ones.
        op: the operation.
        process_set: the ranks that take part.
        name: the name of the exchange.
        before: the factor that is applied before the reduction.
        after: the factor that is applied after the reduction.
        where: the name of the public function, for messages.

    Returns:
        A handle whose result is a list of tensors.
    """
    chosen = set_of(process_set)
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for n, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor) or tensor.is_sparse:
            raise ConfigError(_no_tensor(tensor, where))
        _refuse_dtype(tensor.dtype, op, before * after, where)
        groups.setdefault((tensor.dtype, tensor.device), []).append(n)
    handles = []
    with torch.no_grad():
        for (dtype, _), numbers in groups.items():
            parts = [tensors[n].detach().reshape(-1) for n in numbers]
            flat = parts[0].clone() if len(parts) == 1 else torch.cat(parts)
            shape = tuple(tensors[numbers[0]].shape) if len(parts) == 1 else None
            handles.append(
                start_reduction(
                    flat.to(_carrier(dtype)),
                    op,
                    chosen,
                    name=name,
                    before=before,
                    after=after,
                    shape=shape,
                )
            )

    def taken_apart(flats: list[Tensor]) -> list[Tensor]:
        reduced: dict[int, Tensor] = {}
        for flat, numbers in zip(flats, groups.values(), strict=True):
            sizes = [tensors[n].numel() for n in numbers]
            for n, part in zip(numbers, torch.split(flat, sizes), strict=True):
                reduced[n] = part.view(tensors[n].shape).to(tensors[n].dtype)
        results = [reduced[n] for n in range(len(tensors))]
        if into is None:
            return results
        for target, result in zip(into, results, strict=True):
            target.detach().copy_(result)
        return list(into)

    return Several(handles, taken_apart)


def _no_tensor(value: Any, where: str) -> str:
    if isinstance(value, Tensor):
        return (
            f"hvd.{where}: the tensor is sparse. Use hvd.sparse_allreduce_async, or "
            "tensor.to_dense()."
        )
    return f"hvd.{where}: {type(value).__name__} is no tensor. Give torch.tensor({value!r})."


def _only(handle: Handle) -> Handle:
    return Several([handle], lambda results: results[0][0])


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> Handle:
    """Start an `allreduce` without a gradient; `synchronize` returns its result. Collective."""
    chosen = checked_op(op, average)
    factors = {"before": prescale_factor, "after": postscale_factor}
    return _only(
        _reduce([tensor], None, chosen, process_set, name=name, where="allreduce", **factors)
    )


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> Handle:
    """Start an `allreduce_`: the tensor is overwritten when `synchronize` returns. Collective."""
    chosen = checked_op(op, average)
    factors = {"before": prescale_factor, "after": postscale_factor}
    return _only(
        _reduce([tensor], [tensor], chosen, process_set, name=name, where="allreduce", **factors)
    )


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> Tensor:
    """Overwrite a tensor with its `allreduce`, without a gradient, and return it. Collective."""
    factors = (prescale_factor, postscale_factor)
    output: Tensor = allreduce_async_(tensor, average, name, op, *factors, process_set).result()
    return output


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> Tensor:
    """Return the average of a tensor over the ranks, or another reduction. Collective.

    The gradient is reduced over the ranks in the same way. `Min`, `Max` and `Product` have no
    gradient.

    Args:
        tensor: a dense tensor of the same shape on every rank; it is not changed.
        average: the older form of `op`: False for the sum.
        name: the name of the exchange, the same on every rank.
        compression: a compressor, which converts the tensor for the exchange.
        op: `hvd.Average`, `Sum`, `Min`, `Max` or `Product`; by default the average.
        prescale_factor: the factor that is applied before the reduction.
        postscale_factor: the factor that is applied after the reduction.
        process_set: the ranks that take part; by default all.

    Raises:
        ConfigError: `op` is Adasum or not known, integers would be averaged, the tensor is sparse,
            or the ranks call different exchanges.
    """
    return grouped_allreduce(
        *([tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set),
    )[0]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> Handle:
    """Start a `grouped_allreduce` that autograd does not record. Collective.

    `synchronize` returns the list of results.
    """
    chosen = checked_op(op, average, where="grouped_allreduce")
    options: dict[str, Any] = {"before": prescale_factor, "after": postscale_factor}
    options |= {"name": name, "where": "grouped_allreduce"}
    return _reduce(list(tensors), None, chosen, process_set, **options)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> Handle:
    """Start a `grouped_allreduce_`: `synchronize` overwrites the tensors. Collective."""
    chosen = checked_op(op, average, where="grouped_allreduce")
    options: dict[str, Any] = {"before": prescale_factor, "after": postscale_factor}
    options |= {"name": name, "where": "grouped_allreduce"}
    return _reduce(list(tensors), list(tensors), chosen, process_set, **options)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> list[Tensor]:
    """Overwrite several tensors with their `allreduce`, and return them. Collective.

    Tensors of one dtype and device share a message.
    """
    factors = (prescale_factor, postscale_factor)
    handle = grouped_allreduce_async_(tensors, average, name, op, *factors, process_set)
    outputs: list[Tensor] = handle.result()
    return outputs


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> list[Tensor]:
    """Return the `allreduce` of each of several tensors, with gradients. Collective.

    Tensors of one dtype and device share a message.
    """
    chosen = checked_op(op, average)
    travels = compressor_of(compression)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ConfigError(_no_tensor(tensor, "allreduce"))
    packed = [travels.compress(tensor) for tensor in tensors]
    options = (name, chosen, prescale_factor, postscale_factor, process_set)
    outputs = _AllReduce.apply(options, *[tensor for tensor, _ in packed])
    return [
        travels.decompress(output, ctx) for output, (_, ctx) in zip(outputs, packed, strict=True)
    ]


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.options = options
        name, op, before, after, process_set = options
        wanted = {"name": name, "before": before, "after": after, "where": "allreduce"}
        return tuple(_reduce(tensors, None, op, process_set, **wanted).result())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        name, op, before, after, process_set = ctx.options
        if op not in (Average, Sum):
            raise ConfigError(
                f"hvd.allreduce: op={op} has no gradient. Give tensor.detach(), or op=hvd.Average."
            )
        factors = (before, after)
        return (
            None,
            *grouped_allreduce(gradients, None, name, Compression.none, op, *factors, process_set),
        )


def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = _ALL,
) -> Handle:
    """Start an average or sum of a sparse tensor; only stored values are sent. Collective.

    Args:
        tensor: a tensor of layout `torch.sparse_coo`; ranks may store values at different indices.
        name: the name of the exchange, the same on every rank.
        op: `hvd.Average` or `hvd.Sum`.
        process_set: the ranks that take part.

    Returns:
        A handle whose result is a sparse tensor. Calling the handle waits for the result and
        returns it, as `synchronize` does.

    Raises:
        ConfigError: the tensor is dense, or `op` is another operation.
    """
    chosen = checked_op(op, where="sparse_allreduce_async")
    if not tensor.is_sparse or chosen not in (Average, Sum):
        got = f"op={chosen}" if tensor.is_sparse else f"a tensor of layout {tensor.layout}"
        raise ConfigError(
            f"hvd.sparse_allreduce_async: got {got}; a tensor of layout torch.sparse_coo and "
            "op=hvd.Average or op=hvd.Sum are needed. Use hvd.allreduce_async for others."
        )
    process_set = set_of(process_set)
    local = tensor.detach()
    local = local if local.is_coalesced() else local.coalesce()
    rows = local.indices().t().contiguous()
    parts = [
        allgather_async(part, f"{name or 'sparse'}.{part_name}", process_set)
        for part_name, part in (("indices", rows), ("values", local.values()))
    ]
    count = process_set.channel().link.size if chosen == Average else 1

    def joined(gathered: list[Tensor]) -> Tensor:
        indices, values = gathered
        return torch.sparse_coo_tensor(
            indices.t(), values / count, local.shape, check_invariants=False
        ).coalesce()

    return Several(parts, joined)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = _ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a `reducescatter` without a gradient; `synchronize` returns its result. Collective."""
    return _only(
        grouped_reducescatter_async(
            [tensor], name, op, process_set, prescale_factor, postscale_factor
        )
    )


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = _ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a `grouped_reducescatter` without a gradient; the result is a list. Collective."""
    chosen = checked_op(op, where="reducescatter")
    link = set_of(process_set).channel().link
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.dim() == 0:
            raise ConfigError(
                "hvd.reducescatter: a tensor without dims has no rows to divide. Give "
                "tensor.reshape(1), or use hvd.allreduce."
            )
    options: dict[str, Any] = {"before": prescale_factor, "after": postscale_factor}
    options |= {"name": name, "where": "reducescatter"}
    pending = _reduce(list(tensors), None, chosen, process_set, **options)

    def shared(reduced: list[list[Tensor]]) -> list[Tensor]:
        return [_share(summed, link).clone() for summed in reduced[0]]

    return Several([pending], shared)


def _share(tensor: Tensor, link: Members) -> Tensor:
    """Return this rank's share of the rows; the first ranks have one more if they do not divide."""
    return torch.tensor_split(tensor, link.size)[link.place]


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = _ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this rank's rows of the result of an `allreduce`. Collective.

    The rows of the first dim are split evenly; the first ranks have one more if they do not divide.
    As many bytes are sent as by `allreduce`. As in Horovod, the gradient of the tensor consists of
    the gradients of the rows of all ranks. For `Sum` these are multiplied by the number of ranks.

    Args:
        tensor: a dense tensor with at least one dim, of the same shape on every rank; it is not
            changed.
        name: the name of the exchange, the same on every rank.
        compression: a compressor, which converts the tensor for the exchange.
        op: see `allreduce`.
        process_set: the ranks that take part.
        prescale_factor: the factor that is applied before the reduction.
        postscale_factor: the factor that is applied after the reduction.

    Raises:
        ConfigError: the tensor has no dims; see also `allreduce`.
    """
    factors = (prescale_factor, postscale_factor)
    return grouped_reducescatter([tensor], name, compression, op, process_set, *factors)[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = _ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return the `reducescatter` of each of several tensors, with gradients. Collective."""
    travels = compressor_of(compression)
    packed = [travels.compress(tensor) for tensor in tensors]
    options = (name, op, process_set, prescale_factor, postscale_factor)
    outputs = _ReduceScatter.apply(options, *[tensor for tensor, _ in packed])
    return [
        travels.decompress(output, ctx) for output, (_, ctx) in zip(outputs, packed, strict=True)
    ]


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.options = options
        return tuple(grouped_reducescatter_async(tensors, *options).result())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        name, op, process_set, before, after = ctx.options
        if op not in (Average, Sum):
            raise ConfigError(
                f"hvd.reducescatter: op={op} has no gradient. Give tensor.detach(), or "
                "op=hvd.Average."
            )
        factor = before * after * (process_set.size() if op == Sum else 1)
        scaled = [gradient * factor for gradient in gradients]
        return None, *grouped_allgather(scaled, name, process_set)
