"""Ways out of a device's memory and back: a file without a name, or memory of the host.

Files are read and written, not mapped: a full disk is then an error with a message and not a
signal, and what is in memory is what the tracker counts.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from bigtrain.devices import current_stream, on_stream, set_current, side_stream
from bigtrain.errors import BigtrainError
from bigtrain.memory.disk import anonymous_file

_Result = TypeVar("_Result")
WaitFn = Callable[[], None]
"""Returns when a copy is done, as far as what is computed next on the calling thread can see."""

_ALIGN = 4096
"""Tensors begin at multiples of so many bytes in the file: no page of it is written twice."""


class Transfer(Protocol):
    """Copies bytes of a device away and back, in the order asked for, beside what is computed."""

    def copy_out(self, source: Tensor) -> tuple[Any, WaitFn]:
        """Begin to copy away a tensor of uint8 in one piece; it must live until it is waited for.

        Returns:
            Where it will be, and what waits until it is there. Waiting raises `BigtrainError`
            where the place took less.
        """

    def copy_in(self, spot: Any, target: Tensor) -> WaitFn:
        """Begin to copy back what `put` has put there, into uint8; the target must live as long."""

    def held_bytes(self, nbytes: int) -> int:
        """What a tensor of so many takes of the place."""

    def free(self, spot: Any) -> None:
        """What is put away from now on may overwrite what is there."""

    def close(self) -> None:
        """Let go of threads, files and memory."""


def pinned_bytes(nbytes: int) -> int:
    """What the host gives for a pinned buffer of so many: torch takes powers of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


class NullTransfer:
    """Copies nothing: for fake tensors, which have no numbers.

    Args:
        pinned: whether it stands for copies to pinned memory of the host.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned

    def copy_out(self, source: Tensor) -> tuple[Any, WaitFn]:
        """See `Transfer.copy_out`."""
        del source
        return (), _arrived

    def copy_in(self, spot: Any, target: Tensor) -> WaitFn:
        """See `Transfer.copy_in`."""
        del spot, target
        return _arrived

    def held_bytes(self, nbytes: int) -> int:
        """See `Transfer.held_bytes`."""
        return pinned_bytes(nbytes) if self._pinned else nbytes

    def free(self, spot: Any) -> None:
        """See `Transfer.free`."""

    def close(self) -> None:
        """See `Transfer.close`."""


def _arrived() -> None:
    """Nothing is under way."""


class HostCopies:
    """Copies between a device and the host, one after the other, in the order asked for.

    Of a CUDA device on a stream of their own, beside what it computes; elsewhere at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = side_stream(device)

    @property
    def device(self) -> torch.device:
        """Between which and the host it copies."""
        return self._device

    @property
    def beside(self) -> bool:
        """Whether copies go on beside what is computed, so that they end later than the call."""
        return self._stream is not None

    def host_bytes(self, nbytes: int) -> int:
        """What the host gives for a buffer of so many."""
        return pinned_bytes(nbytes) if self._stream is not None else nbytes

    def host_buffer(self, like: Tensor) -> Tensor:
        """Memory of the host for the values of a tensor: pinned, where copies are beside."""
        # Torch keeps pinned memory that is free for the next one who wants as much.
        return torch.empty_like(
            like, device="cpu", pin_memory=self._stream is not None, requires_grad=False
        )

    def mark(self) -> Any:
        """What `copy` may follow on another thread: all that was computed until now."""
        return None if self._stream is None else current_stream(self._device).record_event()

    def copy(self, target: Tensor, source: Tensor, after: Any = None) -> None:
        """Copy, when what was computed so far is done, or until the mark `after`."""
        if self._stream is None:
            target.copy_(source)
            return
        # After what is computed so far: it makes the source, or last used the target's memory.
        if after is None:
            self._stream.wait_stream(current_stream(self._device))
        else:
            self._stream.wait_event(after)
        with on_stream(self._stream):
            target.copy_(source, non_blocking=True)

    def host_wait(self) -> WaitFn:
        """What waits on the host, when it is called, for the copies so far."""
        if self._stream is None:
            return _arrived
        event = self._stream.record_event()
        return lambda: event.synchronize()

    def device_wait(self) -> WaitFn:
        """What puts the copies so far before all that the device computes after the call."""
        if self._stream is None:
            return _arrived
        event = self._stream.record_event()
        return lambda: current_stream(self._device).wait_event(event)


class HostTransfer:
    """To memory of the host and back. Only the device waits, not the host."""

    def __init__(self, device: torch.device) -> None:
        self._copies = HostCopies(device)

    def copy_out(self, source: Tensor) -> tuple[Any, WaitFn]:
        """See `Transfer.copy_out`."""
        spot = self._copies.host_buffer(source)
        self._copies.copy(spot, source)
        return spot, self._copies.device_wait()

    def copy_in(self, spot: Any, target: Tensor) -> WaitFn:
        """See `Transfer.copy_in`."""
        self._copies.copy(target, spot)
        return self._copies.device_wait()

    def held_bytes(self, nbytes: int) -> int:
        """See `Transfer.held_bytes`."""
        return self._copies.host_bytes(nbytes)

    def free(self, spot: Any) -> None:
        """See `Transfer.free`. Torch does it, when the last reference goes."""

    def close(self) -> None:
        """See `Transfer.close`."""
        self._copies.host_wait()()


class ScratchFile:
    """A file of this rank, which has no name and vanishes with the process.

    Args:
        folder: where it is made.
        contents: what a failure says of it, as `Saved activations are kept there`.

    Raises:
        ConfigError: the folder takes no file.
    """

    def __init__(self, folder: str, contents: str) -> None:
        self._folder, self._contents = folder, contents
        self._file = anonymous_file(folder)
        self.fd = self._file.fileno()

    def write(self, tensor: Tensor, offset: int) -> None:
        """Write a tensor of the CPU, in one piece, to an offset in bytes.

        Raises:
            BigtrainError: the disk took less.
        """
        self._transfer_all(os.pwritev, tensor, offset)

    def read(self, tensor: Tensor, offset: int) -> None:
        """Fill a tensor of the CPU, in one piece, with what is at an offset in bytes.

        Raises:
            BigtrainError: there was less.
        """
        self._transfer_all(os.preadv, tensor, offset)

    def _transfer_all(self, transfer: Callable[..., int], tensor: Tensor, offset: int) -> None:
        """Read or write all bytes; the system may do less than it is asked for."""
        # Not through numpy: whatever runs here must not be seen as an operation.
        content = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
        remaining = memoryview(content).cast("B")
        try:
            while remaining.nbytes:
                transferred = transfer(self.fd, [remaining], offset)
                if transferred <= 0:
                    raise OSError("the file was cut off")
                remaining, offset = remaining[transferred:], offset + transferred
        except OSError as error:
            raise BigtrainError(
                f"strategy.offload.path={self._folder}: {error}. {self._contents}; make room on "
                "that disk, or use another, and resume."
            ) from None

    def close(self) -> None:
        """The file's blocks are free again."""
        self._file.close()


BOUNCE_BYTES = 16 << 20
"""Of each of the two buffers on the way between an accelerator and a file; a power of two."""


class BouncedFile:
    """Tensors of an accelerator to a file and back, through two buffers of pinned memory.

    While the file has one of them, the other is copied. For one thread at a time.
    """

    def __init__(self, file: ScratchFile, copies: HostCopies) -> None:
        self._file, self._copies = file, copies
        like = torch.empty(BOUNCE_BYTES, dtype=torch.uint8, device="meta")
        self._buffers = [copies.host_buffer(like) for _ in range(2)]
        self._waits: list[WaitFn] = [_arrived, _arrived]
        self._turn = 0

    def write(self, tensor: Tensor, offset: int, after: Any = None) -> None:
        """Write a tensor of uint8, in one piece; it is in the file when the call returns.

        Args:
            tensor: on the device.
            offset: in bytes.
            after: the mark that the copies follow; None for all that is computed so far.

        Raises:
            BigtrainError: the disk took less.
        """
        waiting: tuple[int, Tensor, int] | None = None
        for part in torch.split(tensor.view(-1), BOUNCE_BYTES):
            turn, buffer = self._free_buffer(part)
            self._copies.copy(buffer, part, after)
            self._waits[turn] = self._copies.host_wait()
            if waiting is not None:
                self._write_arrived(*waiting)
            waiting, offset = (turn, buffer, offset), offset + len(part)
        if waiting is not None:
            self._write_arrived(*waiting)

    def read(self, tensor: Tensor, offset: int, after: Any = None) -> WaitFn:
        """Fill a tensor of uint8, in one piece, as `write` takes it.

        Returns:
            What puts that before all that the device computes after its call.

        Raises:
            BigtrainError: there was less.
        """
        for part in torch.split(tensor.view(-1), BOUNCE_BYTES):
            turn, buffer = self._free_buffer(part)
            self._file.read(buffer, offset)
            self._copies.copy(part, buffer, after)
            self._waits[turn] = self._copies.host_wait()
            offset += len(part)
        return self._copies.device_wait()

    def _free_buffer(self, part: Tensor) -> tuple[int, Tensor]:
        """The buffer whose turn it is, as long as a part, when its last copy is made."""
        turn, self._turn = self._turn, 1 - self._turn
        self._wait(turn)
        return turn, self._buffers[turn][: len(part)]

    def _wait(self, turn: int) -> None:
        wait, self._waits[turn] = self._waits[turn], _arrived
        wait()

    def _write_arrived(self, turn: int, buffer: Tensor, offset: int) -> None:
        self._wait(turn)
        self._file.write(buffer, offset)


class DiskTransfer:
    """To a file of this rank and back, by a thread of its own, beside what is computed.

    The room of what is free in the file is used again.

    Args:
        folder: where the file is made.
        copies: between the device of the tensors and the host.

    Raises:
        ConfigError: the folder takes no file.
    """

    def __init__(self, folder: str, copies: HostCopies) -> None:
        self._file = ScratchFile(folder, "Saved activations are kept there")
        self._copies = copies
        self._bounced = BouncedFile(self._file, copies) if copies.beside else None
        self._space = FileAllocator()
        # A new thread's device is the first, where it would take memory of another rank's.
        self._worker = ThreadPoolExecutor(
            1,
            thread_name_prefix="bigtrain-disk",
            initializer=set_current,
            initargs=(copies.device,),
        )
        self._shut = weakref.finalize(self, _shut, self._worker, self._file)

    def copy_out(self, source: Tensor) -> tuple[Any, WaitFn]:
        """See `Transfer.copy_out`."""
        size = source.numel()
        offset = self._space.allocate(size)
        write = self._file.write
        if self._bounced is not None:
            write = partial(self._bounced.write, after=self._copies.mark())
        return (offset, size), self._begin(write, source, offset)

    def copy_in(self, spot: Any, target: Tensor) -> WaitFn:
        """See `Transfer.copy_in`."""
        if self._bounced is None:
            return self._begin(self._file.read, target, spot[0])
        read = partial(self._bounced.read, after=self._copies.mark())
        begun = self._begin(read, target, spot[0])
        return lambda: begun()()

    def _begin(
        self, transfer: Callable[[Tensor, int], _Result], tensor: Tensor, offset: int
    ) -> Callable[[], _Result]:
        # Taken out of the list, the thread lets go of it before anybody learns that it is done:
        # the last reference never goes there.
        holder = [tensor]
        return self._worker.submit(lambda: transfer(holder.pop(), offset)).result

    def held_bytes(self, nbytes: int) -> int:
        """See `Transfer.held_bytes`."""
        return nbytes

    def free(self, spot: Any) -> None:
        """See `Transfer.free`."""
        self._space.release(*spot)

    def close(self) -> None:
        """See `Transfer.close`. The file's blocks are free again."""
        self._shut()


def _shut(worker: ThreadPoolExecutor, file: ScratchFile) -> None:
    worker.shutdown(wait=True)
    file.close()


class FileAllocator:
    """Which parts of a file are free; the first that is large enough is taken. Bytes."""

    def __init__(self) -> None:
        self.end = 0
        """How long the file has become."""
        self._free: list[tuple[int, int]] = []  # place and size, sorted, none next to another

    def allocate(self, size: int) -> int:
        """The place of so many bytes that nobody else has."""
        size = _aligned(size)
        for index, (offset, free_size) in enumerate(self._free):
            if free_size >= size:
                remainder = [(offset + size, free_size - size)] if free_size > size else []
                self._free[index : index + 1] = remainder
                return offset
        self.end += size
        return self.end - size

    def release(self, offset: int, size: int) -> None:
        """Take back what `take` gave."""
        size = _aligned(size)
        index = bisect_left(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + size:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            previous_offset, free_size = self._free.pop(index - 1)
            offset, size, index = previous_offset, size + free_size, index - 1
        self._free.insert(index, (offset, size))


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
