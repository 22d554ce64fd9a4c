"""Exchanges without arithmetic: allgather, broadcast and alltoall; also barrier and join."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

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
    as_bytes,
    is_on_host,
)
from bigtrain.hvd.process_sets import ProcessSet, global_process_set, set_of

_ALL = global_process_set


def _source(tensor: Any, where: str, *, rows: bool = True) -> Tensor:
    """Check a tensor, and return it detached and contiguous for sending."""
    if not isinstance(tensor, Tensor):
        raise ConfigError(
            f"hvd.{where}: {type(tensor).__name__} is no tensor. Give torch.tensor(...), or use "
            f"hvd.{'broadcast' if where == 'broadcast' else 'allgather'}_object."
        )
    if rows and tensor.dim() == 0:
        raise ConfigError(
            f"hvd.{where}: a tensor without dims has no rows. Give tensor.reshape(1)."
        )
    if tensor.is_sparse:
        raise ConfigError(f"hvd.{where}: the tensor is sparse. Give tensor.to_dense().")
    return tensor.detach().contiguous()


class _AllGather(ChannelWork):
    def __init__(self, source: Tensor, name: str | None) -> None:
        inner = tuple(source.shape[1:])
        super().__init__(
            Request(
                *("allgather", name, source.dtype, inner, is_on_host(source)),
                rows=source.shape[0],
            )
        )
        self._source = source
        self._counts: list[int] = []
        self._parts: list[Tensor] = []

    def begin(self, link: Members, rows: Sequence[RequestRow]) -> None:
        self._counts = [row.rows for row in rows]
        group = link.group(on_host=self.call.on_host)
        if group is None:
            return
        longest = max(self._counts)
        mine = self._source
        if mine.shape[0] < longest:  # padded, because gloo needs the same size from each rank
            padded = mine.new_zeros((longest, *mine.shape[1:]))
            padded[: mine.shape[0]] = mine
            mine = padded
        self._parts = [torch.empty_like(mine) for _ in rows]
        if mine.numel():
            into = [as_bytes(part) for part in self._parts]
            self.works = [dist.all_gather(into, as_bytes(mine), group=group, async_op=True)]

    def finish(self) -> Tensor:
        if not self._parts:
            return self._source.clone()
        parts = [part[:count] for part, count in zip(self._parts, self._counts, strict=True)]
        return torch.cat(parts)

    def counts(self) -> list[int]:
        """Return the number of rows of each rank, after `begin`."""
        return self._counts


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = _ALL
) -> Handle:
    """Start an `allgather` without a gradient; `synchronize` returns its result. Collective."""
    exchange = _AllGather(_source(tensor, "allgather"), name)
    return set_of(process_set).channel().submit(exchange)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = _ALL
) -> Handle:
    """Start an `allgather_async` of several tensors; the handle's result is a list. Collective."""
    return Several([allgather_async(tensor, name, process_set) for tensor in tensors], list)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = _ALL) -> Tensor:
    """Return the tensors of all ranks, concatenated along the first dim. Collective.

    The gradient follows Horovod: it is the *average* over the ranks of the gradients of this rank's
    rows, not their sum.

    Args:
        tensor: a dense tensor with at least one dim. The first dim may differ between ranks, and
            may be 0.
        name: the name of the exchange, the same on every rank.
        process_set: the ranks that take part.

    Raises:
        ConfigError: the tensor has no dims or is sparse, or other dims differ between the ranks.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = _ALL
) -> list[Tensor]:
    """Return the `allgather` of each of several tensors. Collective."""
    outputs = _Gathered.apply((name, process_set), *tensors)
    return list(outputs)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: tuple[Any, Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        name, process_set = options
        channel = set_of(process_set).channel()
        exchanges = [_AllGather(_source(tensor, "allgather"), name) for tensor in tensors]
        handles = [channel.submit(exchange) for exchange in exchanges]
        results = tuple(handle.result() for handle in handles)
        index = channel.link.place
        ctx.channel, ctx.name = channel, name
        ctx.spans = [
            (sum(started.counts()[:index]), started.counts()[index]) for started in exchanges
        ]
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        mean = [average_over(ctx.channel, gradient, ctx.name) for gradient in gradients]
        parts = [
            averaged.narrow(0, first, count)
            for averaged, (first, count) in zip(mean, ctx.spans, strict=True)
        ]
        return None, *parts


class _Summed(ChannelWork):
    """An in-place sum of a gradient over the ranks."""

    def __init__(self, buffer: Tensor, name: str | None) -> None:
        shape, on_host = tuple(buffer.shape), is_on_host(buffer)
        super().__init__(
            Request(
                *("allreduce", name, buffer.dtype, shape, on_host, "sum"),
                numel=buffer.numel(),
            )
        )
        self._buffer = buffer

    def begin(self, link: Members, rows: Sequence[RequestRow]) -> None:  # noqa: ARG002
        group = link.group(on_host=self.call.on_host)
        if group is not None:
            self.works = [dist.all_reduce(self._buffer, group=group, async_op=True)]

    def finish(self) -> Tensor:
        return self._buffer


def average_over(channel: Any, gradient: Tensor, name: str | None) -> Tensor:
    """Return the average of a gradient over the ranks of a channel, as a new tensor. Collective."""
    summed: Tensor = channel.submit(_Summed(gradient.detach().clone(), name)).result()
    count: int = channel.link.size
    return summed / count


class _Broadcast(ChannelWork):
    def __init__(
        self, buffer: Tensor, root: int, name: str | None, into: Tensor | None = None
    ) -> None:
        shape, on_host = tuple(buffer.shape), is_on_host(buffer)
        super().__init__(Request("broadcast", name, buffer.dtype, shape, on_host, root=root))
        self._buffer, self._into = buffer, into

    def begin(self, link: Members, rows: Sequence[RequestRow]) -> None:  # noqa: ARG002
        group = link.group(on_host=self.call.on_host)
        if group is not None and self._buffer.numel():
            flat = as_bytes(self._buffer)
            self.works = [dist.broadcast(flat, self.call.root, group=group, async_op=True)]

    def finish(self) -> Tensor:
        if self._into is None:
            return self._buffer
        if self._into is not self._buffer:
            self._into.detach().copy_(self._buffer)
        return self._into


def _start_broadcast(
    tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, in_place: bool
) -> Handle:
    chosen = set_of(process_set)
    channel = chosen.channel()
    if root_rank not in channel.link.members:
        raise ConfigError(
            f"hvd.broadcast: root_rank={root_rank} is not among the ranks "
            f"{list(channel.link.members)}. It is a number among all ranks: give one of these."
        )
    source = _source(tensor, "broadcast", rows=False)
    if in_place:
        # If the tensor is contiguous, `source` is a view of the same memory.
        return channel.submit(_Broadcast(source, root_rank, name, tensor))
    return channel.submit(_Broadcast(source.clone(), root_rank, name))


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = _ALL
) -> Handle:
    """Start a `broadcast` without a gradient; `synchronize` returns its result. Collective."""
    return _start_broadcast(tensor, root_rank, name, process_set, in_place=False)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = _ALL
) -> Handle:
    """Start a `broadcast_`: the tensor is overwritten when `synchronize` returns. Collective."""
    return _start_broadcast(tensor, root_rank, name, process_set, in_place=True)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = _ALL
) -> Tensor:
    """Overwrite a tensor with that of `root_rank`, and return it. Collective.

    Args:
        tensor: a dense tensor of the same shape on every rank.
        root_rank: the sender, numbered among all ranks of the run.
        name: the name of the exchange, the same on every rank.
        process_set: the ranks that take part.

    Raises:
        ConfigError: `root_rank` is not among the ranks, or the shapes differ.
    """
    broadcast_async_(tensor, root_rank, name, process_set).result()
    return tensor


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = _ALL
) -> Tensor:
    """Return a rank's tensor on every rank. Collective.

    The gradient follows Horovod: the sender gets the average of the ranks' gradients, and the other
    ranks get zeros.

    Args:
        tensor: a dense tensor of the same shape on every rank; it is not changed.
        root_rank: the sender, numbered among all ranks of the run.
        name: the name of the exchange, the same on every rank.
        process_set: the ranks that take part.

    Raises:
        ConfigError: `root_rank` is not among the ranks, or the shapes differ.
    """
    output: Tensor = _Broadcasted.apply(tensor, root_rank, name, process_set)
    return output


class _Broadcasted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, root: int, name: str | None, process_set: ProcessSet
    ) -> Tensor:
        ctx.channel, ctx.root, ctx.name = set_of(process_set).channel(), root, name
        result: Tensor = broadcast_async(tensor, root, name, process_set).result()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        mean = average_over(ctx.channel, gradients[0], ctx.name)
        is_root = ctx.channel.link.rank == ctx.root
        return mean if is_root else torch.zeros_like(mean), None, None, None


class _AllToAll(ChannelWork):
    def __init__(self, source: Tensor, splits: list[int], name: str | None) -> None:
        inner, on_host = tuple(source.shape[1:]), is_on_host(source)
        super().__init__(
            Request("alltoall", name, source.dtype, inner, on_host, rows=source.shape[0])
        )
        self._source, self._splits = source, splits
        self._received: list[int] = []
        self._into = source

    def begin(self, link: Members, rows: Sequence[RequestRow]) -> None:  # noqa: ARG002
        table = link.all_gather_rows(self._splits)
        self._received = [row[link.place] for row in table]
        group = link.group(on_host=self.call.on_host)
        if group is None:
            self._into = self._source.clone()
            return
        shape = (sum(self._received), *self._source.shape[1:])
        self._into = self._source.new_empty(shape)
        row_bytes = self._source[:1].numel() * self._source.element_size()
        if not self._source.shape[0]:
            row_bytes = self._into[:1].numel() * self._into.element_size()
        self.works = [
            dist.all_to_all_single(
                as_bytes(self._into),
                as_bytes(self._source),
                [count * row_bytes for count in self._received],
                [count * row_bytes for count in self._splits],
                group=group,
                async_op=True,
            )
        ]

    def finish(self) -> tuple[Tensor, list[int]]:
        return self._into, self._received


def _splits_of(tensor: Tensor, splits: Any, count: int) -> list[int]:
    """Check the argument `splits`, and return the number of rows for each rank."""
    rows = tensor.shape[0]
    if splits is None:
        if rows % count:
            raise ConfigError(
                f"hvd.alltoall: {rows} rows do not divide evenly among {count} ranks. Give "
                "splits=[...], the rows that go to each."
            )
        return [rows // count] * count
    counts = [int(n) for n in (splits.tolist() if isinstance(splits, Tensor) else splits)]
    if len(counts) != count or min(counts) < 0 or sum(counts) != rows:
        raise ConfigError(
            f"hvd.alltoall: splits={counts}, and {count} numbers whose sum is the {rows} rows are "
            "needed, one for each rank."
        )
    return counts


def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = _ALL
) -> Handle:
    """Start an `alltoall` without a gradient. Collective.

    The handle's result is always a pair: the received rows, and the number from each rank.
    """
    channel = set_of(process_set).channel()
    source = _source(tensor, "alltoall")
    exchange = _AllToAll(source, _splits_of(source, splits, channel.link.size), name)

    def with_counts(results: list[Any]) -> tuple[Tensor, Tensor]:
        rows, received = results[0]
        kind = splits.dtype if isinstance(splits, Tensor) else torch.int32
        return rows, torch.tensor(received, dtype=kind)

    return Several([channel.submit(exchange)], with_counts)


def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = _ALL
) -> Any:
    """Send rows to each rank, and return the rows that the ranks send to this one. Collective.

    Args:
        tensor: a dense tensor with at least one dim; the first dim may differ between ranks.
        splits: the number of rows for each rank, as a list or a tensor; None to send the same
            number to every rank.
        name: the name of the exchange, the same on every rank.
        process_set: the ranks that take part.

    Returns:
        The received rows in rank order. With `splits`, a pair: these rows, and a tensor with the
        number from each rank.

    Raises:
        ConfigError: the splits do not add up to the rows, or the rows do not divide by the ranks.
    """
    rows, received = _Swapped.apply(tensor, splits, name, process_set)
    return rows if splits is None else (rows, received)


class _Swapped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        rows, received = alltoall_async(tensor, splits, name, process_set).result()
        ctx.received, ctx.options = received, (name, process_set)
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back, _ = alltoall_async(gradients[0], ctx.received, *ctx.options).result()
        return back, None, None, None


class _Barrier(ChannelWork):
    def begin(self, link: Members, rows: Sequence[RequestRow]) -> None:
        """Send nothing: to exchange the requests, the ranks have already waited for each other."""


def barrier(process_set: ProcessSet = _ALL) -> None:
    """Wait until every rank of the set calls this function. Collective."""
    call = Request("barrier", None, torch.int64, (), True)
    set_of(process_set).channel().submit(_Barrier(call)).result()


def join(device: int = -1) -> int:  # noqa: ARG001 - Horovod's: zeros are made where they are needed
    """Report that this rank has no more data, and wait until all ranks report it. Collective.

    Until then this rank contributes zeros to sums and averages by `allreduce`; an average still
    divides by the number of all ranks. On the other ranks, exchanges other than these and `barrier`
    raise a ConfigError.

    Args:
        device: not used.

    Returns:
        The last rank that has joined.
    """
    return _ALL.channel().join()


def poll(handle: Handle) -> bool:
    """Whether an exchange is done, so that `synchronize` would not wait."""
    return _handle(handle).done()


def wait_for(handle: Handle) -> Any:
    """Wait for an exchange, and return its result: that of the function without `async`.

    Args:
        handle: the result of a function with `async` in its name.

    Raises:
        ConfigError: the ranks requested different exchanges, or the argument is not a handle.
        ConnectionError: another rank has ended.
    """
    return _handle(handle).result()


def _handle(handle: Any) -> Handle:
    if isinstance(handle, Handle):
        return handle
    raise ConfigError(
        f"hvd.synchronize: {type(handle).__name__} is no handle. Give what hvd.allreduce_async and "
        "its like return."
    )


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = _ALL
) -> Any:
    """Return a rank's object on every rank. Collective.

    Args:
        obj: a picklable object; it is ignored on ranks other than `root_rank`.
        root_rank: the sender, numbered among all ranks of the run.
        name: the name of the exchange, the same on every rank.
        process_set: the ranks that take part.
    """
    link = set_of(process_set).channel().link
    if link.size == 1:
        return obj
    name = name or "object"
    is_root = link.rank == root_rank
    data = bytearray(pickle.dumps(obj)) if is_root else bytearray()
    length = torch.tensor([len(data)])
    broadcast_(length, root_rank, f"{name}.size", process_set)
    if is_root:
        content = torch.frombuffer(data, dtype=torch.uint8)
    else:
        content = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(content, root_rank, f"{name}.data", process_set)
    return obj if is_root else pickle.loads(content.numpy().tobytes())


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = _ALL
) -> list[Any]:
    """Return the objects of all ranks, in rank order. Collective.

    Args:
        obj: a picklable object.
        name: the name of the exchange, the same on every rank.
        process_set: the ranks that take part.
    """
    channel = set_of(process_set).channel()
    if channel.link.size == 1:
        return [obj]
    content = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    exchange = _AllGather(content, name or "object")
    everything: Tensor = channel.submit(exchange).result()
    parts = torch.split(everything, exchange.counts())
    return [pickle.loads(part.numpy().tobytes()) for part in parts]
