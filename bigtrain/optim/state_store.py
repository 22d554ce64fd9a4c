"""Where optimizer state and fp32 copies live between the steps: in place, on disk, on the host.

On disk a chunk of the state is read into memory, updated and written back (Ren et al. 2021,
arXiv 2101.06840, and Rajbhandari et al. 2021, arXiv 2104.07857, sections 5 and 6, do the same at
the scale of clusters). Files are read and written, not mapped: a full disk is then an error with
a message and not a signal, and what is in memory is what the tracker counts.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Protocol, TypeVar

import torch
from torch import Tensor

from bigtrain.errors import BigtrainError, ConfigError
from bigtrain.memory.disk import Need, find_shortage, free_on_disk, nameless_file
from bigtrain.memory.host_memory import free_memory
from bigtrain.optim.update import MakeOptimizer, state_slots
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.dtensors import flat
from bigtrain.units import format_bytes

T = TypeVar("T")

_ALIGN = 64
"""Tensors that share a buffer begin at multiples of so many bytes: vector kernels want that."""


@dataclass(frozen=True)
class Kept:
    """A tensor that is put away between the steps: it stands in the optimizer's state for it."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    place: int
    """The file's offset in bytes."""
    device: torch.device
    """Where it is used: a parameter may be on the host in a run on a GPU."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.shape.numel() * self.dtype.itemsize


class Home:
    """Where fp32 copies and optimizer state live between the steps: on the parameters' device."""

    moves = False
    """Whether the optimizer updates copies that are on another device than the parameters."""
    chunked = False
    """Whether to update a chunk at a time, so that little of the state is in memory at once."""

    def reserve(self, updated: int, copied: int, make_optimizer: MakeOptimizer) -> None:
        """Make sure of the room, before anything is moved. Collective.

        Args:
            updated: bytes of the pieces that this rank updates.
            copied: bytes of those of which a copy is kept beside the parameters.
            make_optimizer: tells how much state there is for each of these bytes.

        Raises:
            ConfigError: it does not fit; the same message on every rank.
        """

    def settle(self, value: Tensor) -> Tensor:
        """Bring a new copy to the device where it is updated."""
        return value

    def keep(self, tensor: Tensor, before: Kept | None) -> Kept | None:
        """Put the values of a tensor away, over those of `before`; None: it stays in memory."""
        del tensor, before
        return None

    def expect(self, kept: Iterable[Kept]) -> None:
        """Make room for the tensors of a chunk, which are fetched next."""

    def fetch(self, kept: Kept) -> Tensor:
        """The tensor, in memory again; within a step until the next `expect` or `rest`."""
        raise NotImplementedError

    def bring(self, gradient: Tensor, like: Tensor) -> Callable[[], Tensor]:
        """Begin to move a gradient to where `like` is; calling the result waits for it."""
        return lambda: gradient.to(like)

    def give_back(self, target: Tensor, value: Tensor) -> None:
        """Copy updated values into the parameter; they are in it after `rest`."""
        target.copy_(value)

    def rest(self) -> None:
        """The step is over: whoever reads the parameters from now on finds the new values."""

    def close(self) -> None:
        """Let go of files."""


class DiskHome(Home):
    """State and fp32 copies in a file of this rank, which has no name and vanishes with it.

    Args:
        context: the ranks that may share a disk.
        folder: where the file is made.
    """

    chunked = True

    def __init__(self, context: RunContext, folder: str) -> None:
        self._context, self._folder = context, folder
        self._pinned = context.device.type == "cuda"
        self._end = 0
        self._room: Tensor | None = None
        self._used = 0
        self._file: IO[bytes] = nameless_file(folder)
        self._fd = self._file.fileno()

    def reserve(self, updated: int, copied: int, make_optimizer: MakeOptimizer) -> None:
        """See `Home.reserve`. The blocks are taken at once, so that nobody else can have them."""
        wanted = copied + round(updated * state_slots(make_optimizer))
        where, free = str(os.fstat(self._fd).st_dev), free_on_disk(self._folder)
        short = find_shortage(_everyone(self._context, where, wanted, free))
        if short is not None:
            raise ConfigError(disk_message(self._folder, short.wanted, short.free, short.ranks))
        fault = None
        if wanted:
            try:
                os.posix_fallocate(self._fd, 0, wanted)
            except OSError as error:
                fault = f"strategy.offload.path={self._folder}: {format_bytes(wanted)}: {error}."
        faults = [fault for fault in _gather(self._context, fault) if fault]
        if faults:
            raise ConfigError(f"{faults[0]} Set strategy.offload.path to a folder on another disk.")

    def keep(self, tensor: Tensor, before: Kept | None) -> Kept:
        """See `Home.keep`."""
        value = tensor.detach()
        elements = flat(value)
        in_place = elements.is_contiguous() and elements.data_ptr() == value.data_ptr()
        stride = value.stride() if in_place else value.contiguous().stride()
        nbytes = value.numel() * value.element_size()
        if before is not None and before.nbytes == nbytes:
            place = before.place
        else:
            place, self._end = self._end, self._end + nbytes
        self._whole(os.pwritev, elements.contiguous().cpu(), place)
        return Kept(value.dtype, value.shape, tuple(stride), place, value.device)

    def expect(self, kept: Iterable[Kept]) -> None:
        """See `Home.expect`. One buffer serves all chunks of a step."""
        found = list(kept)
        size = sum(_aligned(one.nbytes) for one in found)
        self._used = 0
        if self._room is None or len(self._room) < size:
            self._room = None
            self._room = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        if found:  # chunks lie in the file in their order: the next one is read meanwhile
            ends = max(one.place + one.nbytes for one in found)
            with suppress(OSError):
                os.posix_fadvise(self._fd, ends, size, os.POSIX_FADV_WILLNEED)

    def fetch(self, kept: Kept) -> Tensor:
        """See `Home.fetch`."""
        if self._room is not None and self._used + kept.nbytes <= len(self._room):
            elements = self._room[self._used : self._used + kept.nbytes]
            self._used += _aligned(kept.nbytes)
        else:
            elements = torch.empty(kept.nbytes, dtype=torch.uint8)
        self._whole(os.preadv, elements, kept.place)
        shaped = elements.view(kept.dtype).as_strided(kept.shape, kept.stride, None)
        return shaped.to(kept.device)

    def _whole(self, move: Callable[..., int], tensor: Tensor, place: int) -> None:
        """Read or write all bytes of a tensor; the system may do less than it is asked for."""
        rest = tensor.view(torch.uint8).numpy().data
        while rest.nbytes:
            try:
                done = move(self._fd, [rest], place)
            except OSError as error:
                raise BigtrainError(
                    f"strategy.offload.path={self._folder}: {error}. The optimizer's state lives "
                    "there; make room on that disk, or use another, and resume."
                ) from None
            if done <= 0:
                raise BigtrainError(f"strategy.offload.path={self._folder}: the file was cut off.")
            rest, place = rest[done:], place + done

    def rest(self) -> None:
        """See `Home.rest`."""
        self._room, self._used = None, 0

    def close(self) -> None:
        """See `Home.close`. The file's blocks are free again."""
        self.rest()
        self._file.close()


class Lane(Protocol):
    """Copies one after the other, beside what the device computes."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy, when what was computed so far is done."""

    def mark(self) -> Callable[[], None]:
        """What waits, when it is called, for the copies so far."""

    def join(self) -> None:
        """What is computed from now on finds all copies done."""


class AtOnce:
    """The lane of a device that has no streams: everything is done when it is asked for."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `Lane.copy`."""
        target.copy_(source)

    def mark(self) -> Callable[[], None]:
        """See `Lane.mark`."""
        return lambda: None

    def join(self) -> None:
        """See `Lane.join`."""


class Stream:
    """A lane on a CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `Lane.copy`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Callable[[], None]:
        """See `Lane.mark`."""
        event = self._stream.record_event()
        return lambda: event.synchronize()

    def join(self) -> None:
        """See `Lane.join`."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class HostHome(Home):
    """Values and state in the host's memory: gradients come over, updated values go back.

    While the host updates a chunk, the next one's gradients are on their way and the last one's
    values go back. The host touches a value only after waiting for its new gradient, which is
    copied behind everything the step before has given back: so no copy is overtaken.

    Args:
        context: the ranks that share the host's memory.
        lane: makes the copies; left out, a CUDA stream, or none on a CPU.
    """

    moves = True

    def __init__(self, context: RunContext, lane: Lane | None = None) -> None:
        self._context = context
        self._pinned = context.device.type == "cuda"
        self._lane = lane or (Stream(context.device) if self._pinned else AtOnce())

    def reserve(self, updated: int, copied: int, make_optimizer: MakeOptimizer) -> None:
        """See `Home.reserve`."""
        wanted = copied + round(updated * state_slots(make_optimizer))
        free = free_memory()
        if free is None:
            return
        short = find_shortage(_everyone(self._context, "memory", wanted, free))
        if short is not None:
            raise ConfigError(memory_message(short.wanted, short.free, short.ranks))

    def settle(self, value: Tensor) -> Tensor:
        """See `Home.settle`."""
        return self._like(value).copy_(value)

    def bring(self, gradient: Tensor, like: Tensor) -> Callable[[], Tensor]:
        """See `Home.bring`."""
        here = self._like(like)
        self._lane.copy(here, gradient)
        wait = self._lane.mark()

        def arrived() -> Tensor:
            wait()
            return here

        return arrived

    def give_back(self, target: Tensor, value: Tensor) -> None:
        """See `Home.give_back`."""
        self._lane.copy(target, value)

    def rest(self) -> None:
        """See `Home.rest`."""
        self._lane.join()

    def _like(self, tensor: Tensor) -> Tensor:
        # Pinned memory, as only that is copied while the host and the device go on.
        return torch.empty_like(tensor, device="cpu", pin_memory=self._pinned, requires_grad=False)


def disk_message(folder: str, wanted: int, free: int, ranks: int) -> str:
    """Why the state does not fit on a disk, with the numbers and the fix."""
    return (
        f"strategy.offload.path={folder} has {format_bytes(free)} free ({free} bytes), and the "
        f"optimizer's state of {_ranks(ranks)} there takes {format_bytes(wanted)} ({wanted} "
        "bytes). Make room, or set strategy.offload.path to a folder on a larger disk."
    )


def memory_message(wanted: int, free: int, ranks: int) -> str:
    """Why the state does not fit into the host's memory, with the numbers and the fix."""
    return (
        f"strategy.offload.optimizer=cpu: the host has {format_bytes(free)} of memory free ({free} "
        f"bytes), and the values and state of {_ranks(ranks)} there take {format_bytes(wanted)} "
        f"({wanted} bytes). Use strategy.offload.optimizer=disk, or more nodes with --strategy "
        "zero1_torch."
    )


def _ranks(number: int) -> str:
    return "the 1 rank" if number == 1 else f"the {number} ranks"


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _everyone(context: RunContext, where: str, wanted: int, free: int) -> list[Need]:
    return _gather(context, Need(platform.node(), where, wanted, free))


def _gather(context: RunContext, value: T) -> list[T]:
    everyone: list[T] = context.broadcast_object(context.gather_objects(value))
    return everyone
