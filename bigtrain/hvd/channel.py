"""A thread that runs exchanges one at a time, in the order in which the script requested them.

Every exchange begins with an all-gather of numbers that describe it. So if ranks request different
exchanges, an error names the exchanges before any tensor is sent. A rank that has called `join`
learns from the numbers in which exchange to take part. The script does not wait for an exchange
until it synchronizes.
"""

from __future__ import annotations

import atexit
import hashlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from bigtrain.devices import is_accelerator, set_current
from bigtrain.errors import BigtrainError, ConfigError
from bigtrain.hvd.session import PATIENCE_S, session
from bigtrain.ranks.context import RunContext
from bigtrain.ranks.exit_status import is_peer_failure
from bigtrain.ranks.hang_watch import BACKEND_GRACE_S

RequestKind = Literal["allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier"]
_REDUCES: RequestKind = "allreduce"
_WITH_JOINED: tuple[RequestKind, ...] = ("allreduce", "barrier")
"""Exchanges that remain possible while a rank has joined."""
_KINDS: tuple[RequestKind, ...] = (
    *("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier"),
)
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32),
    *(torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
)
_ADDS = (0, 1)  # indices in `_OPS` of the operations in which a zero changes nothing
_OPS = ("average", "sum", "min", "max", "product")
_ACTIVE, _JOINED = 0, 1
_FAREWELL_S = 5.0


@dataclass(frozen=True)
class Request:
    """The description of an exchange, equal on every rank except for `rows`."""

    kind: RequestKind
    name: str | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    """The part of the shape that must be equal on all ranks: without the first dim if the rows may
    differ."""
    on_host: bool
    op: str = ""
    root: int = -1
    detail: str = ""
    """Further text that must be equal on all ranks."""
    rows: int = 0
    """The size of the first dim, if it may differ between ranks."""
    numel: int = 0
    """The number of elements of an all-reduce, which joined ranks need for their zeros."""

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        words = [f"{self.kind}{f' {self.name!r}' if self.name else ''}"]
        if self.kind != "barrier":
            words.append(f"of {kind} {list(self.shape)}")
        if self.op:
            words.append(f"op={self.op}")
        if self.root >= 0:
            words.append(f"root_rank={self.root}")
        words += [self.detail] if self.detail else []
        return ", ".join(words) + ("" if self.on_host else ", on an accelerator")

    def numbers(self) -> list[int]:
        """Encode the request as the numbers that are sent to the other ranks."""
        digest = hashlib.blake2b(str(self).encode(), digest_size=7).digest()
        number = _DTYPES.index(self.dtype) if self.dtype in _DTYPES else -1
        op = _OPS.index(self.op) if self.op else 0
        kind = _KINDS.index(self.kind)
        fields = [kind, number, self.numel, op, int(self.on_host), self.rows]
        return [_ACTIVE, int.from_bytes(digest, "big"), *fields]


class UnequalRequestsError(ConfigError, RuntimeError):
    """Ranks request different exchanges. As with Horovod, scripts can catch a RuntimeError."""


class RequestRow(NamedTuple):
    """One rank's request as numbers."""

    state: int
    digest: int
    kind: int
    dtype: int
    numel: int
    op: int
    on_host: int
    rows: int


class Members:
    """The process groups of some ranks: gloo for host tensors, the device's backend for others.

    To construct a `Members` is collective among all ranks of the run.

    Args:
        context: the context of this process.
        members: the ranks, ascending. There are no groups if there is only one rank.
    """

    def __init__(self, context: RunContext, members: Sequence[int]) -> None:
        self.members = tuple(members)
        self.device = context.device
        self.rank = context.rank
        self.host: dist.ProcessGroup | None = None
        self.own: dist.ProcessGroup | None = None
        if context.mesh is None or len(members) < 2:
            return
        wait = timedelta(seconds=PATIENCE_S + BACKEND_GRACE_S)
        host = dist.new_group(list(members), backend="gloo", timeout=wait)
        own_group = None
        if is_accelerator(context.device):  # also for all ranks: a thread needs its own group
            own_group = dist.new_group(list(members), timeout=wait)
        if context.rank in self.members:
            self.host = cast("dist.ProcessGroup", host)
            self.own = cast("dist.ProcessGroup | None", own_group)
            context.recorder.traffic.leave_out(self.host)
            self.all_gather_rows([0])  # no rank may end before all are connected

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.members)

    @property
    def place(self) -> int:
        """The index of this rank among the members."""
        return self.members.index(self.rank)

    def group(self, *, on_host: bool) -> dist.ProcessGroup | None:
        """Return the group for tensors on the host or on the device; None for a single rank."""
        return self.host if on_host or self.own is None else self.own

    def all_gather_rows(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the integers of every rank, in rank order. Collective.

        Args:
            numbers: the integers of this rank; every rank has the same number of them.
        """
        if self.host is None:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.int64)
        everyone = [torch.empty_like(mine) for _ in self.members]
        dist.all_gather(everyone, mine, group=self.host)
        return [row.tolist() for row in everyone]


class ChannelWork(ABC):
    """One exchange: the channel's thread calls `begin`, the script's thread calls `finish`.

    Args:
        call: the description of the exchange.
    """

    def __init__(self, call: Request) -> None:
        self.call = call
        self.works: list[Any] = []

    @abstractmethod
    def begin(self, link: Members, rows: Sequence[RequestRow]) -> None:
        """Start the exchange, and set `works` to torch's handles of the transfers to wait for.

        Args:
            link: the ranks. It has no process groups if there is only one rank.
            rows: the request of each rank.
        """

    def finish(self) -> Any:
        """Return the result of the exchange; called after all `works` are done."""
        return None


class Handle(ABC):
    """A running exchange, for `hvd.poll` and `hvd.synchronize`."""

    @abstractmethod
    def done(self) -> bool:
        """Whether `result` would return without waiting."""

    @abstractmethod
    def result(self) -> Any:
        """Wait for the exchange, and return its result."""

    def __call__(self) -> Any:
        """The same as `result`."""
        return self.result()


class Pending(Handle):
    """The handle of one exchange of a channel.

    Args:
        exchange: the exchange.
    """

    def __init__(self, exchange: ChannelWork) -> None:
        self.exchange = exchange
        self.begun = threading.Event()
        self.error: BaseException | None = None
        self.timed: Callable[[], None] | None = None
        self._result: Any = None
        self._is_finished = False

    def done(self) -> bool:
        """Whether `result` would return or raise without waiting."""
        if not self.begun.is_set():
            return False
        return self.error is not None or all(work.is_completed() for work in self.exchange.works)

    def result(self) -> Any:
        """Wait for the exchange, and return its result or raise its error."""
        if not self._is_finished:
            self.begun.wait()
            if self.error is None:
                for work in self.exchange.works:
                    work.wait()
                with torch.no_grad():
                    self._result = self.exchange.finish()
                if self.timed is not None:
                    self.timed()
            self._is_finished = True
        if self.error is not None:
            raise self.error
        return self._result

    def fail(self, error: BaseException) -> None:
        """Let `result` raise an error."""
        self.error = error
        self.begun.set()


class Several(Handle):
    """The handle of several exchanges with one result.

    Args:
        parts: the handles of the exchanges.
        joins: combines the results of the exchanges.
    """

    def __init__(self, parts: Sequence[Handle], joins: Callable[[list[Any]], Any]) -> None:
        self._parts, self._joins = parts, joins
        self._results: list[Any] = []

    def done(self) -> bool:
        """Whether all parts are done."""
        return all(part.done() for part in self._parts)

    def result(self) -> Any:
        """Wait for all parts, and return the combined result."""
        if not self._results:
            results = [part.result() for part in self._parts]
            with torch.no_grad():
                self._results = [self._joins(results)]
        return self._results[0]


class _Join(ChannelWork):
    """A rank's message that the rank has no more data; the result is the last rank to send one."""

    last = -1

    def begin(self, link: Members, rows: Sequence[RequestRow]) -> None:
        """Do nothing: the channel serves the other ranks until all have joined."""

    def finish(self) -> int:
        return self.last


class Channel:
    """Runs the exchanges of some ranks in one order.

    Args:
        context: the context of this process.
        members: the ranks, ascending, which include this rank.
    """

    timeline: Callable[[str, str, float, float], None] | None = None
    """Called twice for each exchange, with a kind, the name, and start and end as `time.time`
    returns them: for the agreement of the ranks and for the exchange. None to record nothing."""

    def __init__(self, context: RunContext, members: Sequence[int]) -> None:
        self.link = Members(context, members)
        self._queue: SimpleQueue[tuple[Pending, torch.Stream | None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._broken: BaseException | None = None
        self._joined: list[int] = []  # as of the last exchange; equal on all ranks

    def submit(self, exchange: ChannelWork) -> Pending:
        """Queue an exchange behind the earlier ones, without waiting for it. Collective."""
        pending = Pending(exchange)
        if self.link.host is None:
            exchange.begin(self.link, [RequestRow(*exchange.call.numbers())])
            pending.begun.set()
            return pending
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="bigtrain-hvd", daemon=True)
            self._thread.start()
        stream = None
        if not exchange.call.on_host:
            stream = torch.accelerator.current_stream(self.link.device)
        self._queue.put((pending, stream))
        return pending

    def join(self) -> int:
        """Contribute zeros until all ranks have joined; return the last to join. Collective."""
        if self.link.host is None:
            return self.link.rank
        call = Request("barrier", "join", torch.int64, (), True)
        return int(self.submit(_Join(call)).result())

    def close(self) -> None:
        """End the thread after the queued exchanges, and wait at most a few seconds for its end."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_FAREWELL_S)
            self._thread = None

    def _serve(self) -> None:
        set_current(self.link.device)
        torch.set_grad_enabled(False)
        while (item := self._queue.get()) is not None:
            pending, stream = item
            if self._broken is not None:
                pending.fail(self._broken)
                continue
            try:
                with _on(stream):
                    self._do(pending)
            except BigtrainError as error:  # every rank raises it, so the channel stays usable
                pending.fail(error)
            except BaseException as error:
                self._broken = _in_words(error, pending.exchange.call)
                pending.fail(self._broken)

    def _do(self, pending: Pending) -> None:
        exchange, asked = pending.exchange, time.time()
        if isinstance(exchange, _Join):
            exchange.last = self._serve_others()
            pending.begun.set()
            return
        rows = self._agreed(exchange.call)
        begun = time.time()
        exchange.begin(self.link, rows)
        if self.timeline is not None:
            timeline, name = self.timeline, exchange.call.name or exchange.call.kind
            timeline(f"NEGOTIATE_{exchange.call.kind.upper()}", name, asked, begun)
            kind = exchange.call.kind.upper()
            pending.timed = lambda: timeline(kind, name, begun, time.time())
        pending.begun.set()

    def _rows(self, numbers: Sequence[int]) -> list[RequestRow]:
        rows = [RequestRow(*row) for row in self.link.all_gather_rows(numbers)]
        self._joined = [n for n, row in enumerate(rows) if row.state == _JOINED]
        return rows

    def _agreed(self, call: Request) -> list[RequestRow]:
        """Return every rank's row; refuse exchanges that differ, or that joined ranks cannot do."""
        rows = self._rows(call.numbers())
        active = [row for row in rows if row.state == _ACTIVE]
        if len({row.digest for row in active}) > 1:
            raise self._differing(str(call), rows)
        if len(active) < len(rows):
            _check_joined(call, [n for n, row in enumerate(rows) if row.state == _JOINED])
        return rows

    def _differing(self, text: str, rows: Sequence[RequestRow]) -> UnequalRequestsError:
        """Return the error for ranks that request different exchanges. Collective."""
        texts: list[Any] = [None] * self.link.size
        dist.all_gather_object(texts, text, group=self.link.host)
        first = next(n for n, row in enumerate(rows) if row.state == _ACTIVE)
        second = next(n for n, row in enumerate(rows) if row[:2] not in (rows[first][:2], (1, 0)))
        mine, theirs = self.link.members[first], self.link.members[second]
        return UnequalRequestsError(
            f"hvd: rank {mine} asks for {texts[first]}, and rank {theirs} for {texts[second]}. "
            "Call the same exchanges in the same order on every rank, with tensors of one shape."
        )

    def _serve_others(self) -> int:
        """Contribute zeros until all ranks have joined; return the last rank to join."""
        while True:
            before = self._joined
            rows = self._rows([_JOINED, 0, 0, 0, 0, 0, 0, 0])
            active = [row for row in rows if row.state == _ACTIVE]
            if not active:
                late = [n for n in self._joined if n not in before]
                self._joined = []
                return self.link.members[max(late)]
            if len({row.digest for row in active}) > 1:
                self._differing("", rows)
            elif _KINDS[active[0].kind] == _REDUCES and active[0].op in _ADDS:
                self._add_nothing(active[0])

    def _add_nothing(self, row: RequestRow) -> None:
        on_host = bool(row.on_host)
        device = torch.device("cpu") if on_host else self.link.device
        nothing = torch.zeros(row.numel, dtype=_DTYPES[row.dtype], device=device)
        dist.all_reduce(nothing, group=self.link.group(on_host=on_host))


def _in_words(error: BaseException, call: Request) -> BaseException:
    """Return an error that names the exchange, if the error means that another rank has ended."""
    if not is_peer_failure(error):
        return error
    first = str(error).splitlines()[0]
    explained = ConnectionError(
        f"hvd: {call}: another rank has ended meanwhile ({first}). Where ranks have different "
        "amounts of data, call hvd.join() after the last batch."
    )
    explained.__cause__ = error
    return explained


def _check_joined(call: Request, joined: list[int]) -> None:
    """Refuse an exchange that needs the data of ranks that have joined."""
    adds = call.kind != _REDUCES or _OPS.index(call.op) in _ADDS
    if call.kind in _WITH_JOINED and adds:
        return
    operation = call.kind if adds else f"allreduce with op={call.op}"
    fix = "Call it before hvd.join()"
    if call.kind == "allgather":
        fix += ", or give DistributedOptimizer sparse_as_dense=True where it is of its gradients"
    raise UnequalRequestsError(
        f"hvd.{operation}: rank {joined[0]} has joined, and takes part only in sums and averages, "
        f"with zeros. {fix}."
    )


def _on(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    """Make a stream current inside of a `with` block; None has no effect."""
    if stream is None:
        return nullcontext()
    return _OnStream(stream)


class _OnStream:
    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_stream(self._stream.device)
        torch.accelerator.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_stream(self._before)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, 1-dim and uint8, so that backends exchange any element type.

    The result shares the memory of a contiguous tensor, so a backend can receive into it. The
    result for any other tensor may be a copy.
    """
    return tensor.detach().reshape(-1).view(torch.uint8)


def is_on_host(tensor: Tensor) -> bool:
    """Whether gloo exchanges the tensor."""
    return not is_accelerator(tensor.device)


_open: list[Channel] = []


def open_channel(members: Sequence[int]) -> Channel:
    """Connect some ranks, and return their channel.

    Collective among all ranks of the run, not only among these.

    Args:
        members: the ranks, ascending.

    Raises:
        LaunchError: `init` was not called.
    """
    context = session.opened()
    channel = Channel(context, members)
    _open.append(channel)
    return channel


def channels() -> list[Channel]:
    """Return the open channels."""
    return list(_open)


def close_channels() -> None:
    """End the threads of all open channels."""
    while _open:
        _open.pop().close()


atexit.register(close_channels)
