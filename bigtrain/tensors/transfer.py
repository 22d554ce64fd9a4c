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
from typing import Any, Protocol

import torch
from torch import Tensor

from bigtrain.devices import current_stream, on_stream, side_stream
from bigtrain.errors import BigtrainError
from bigtrain.memory.disk import anonymous_file

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

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy, when what was computed so far is done."""
        if self._stream is None:
            target.copy_(source)
            return
        # After what is computed so far: it makes the source, or last used the target's memory.
        self._stream.wait_stream(current_stream(self._device))
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


class DiskTransfer:
    """To a file of this rank and back, by a thread of its own.

    The room of what is free in the file is used again. A tensor of a GPU is copied to the host
    and back before the next thing is computed.

    Args:
        folder: where the file is made.

    Raises:
        ConfigError: the folder takes no file.
    """

    def __init__(self, folder: str) -> None:
        self._file = ScratchFile(folder, "Saved activations are kept there")
        self._space = FileAllocator()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="bigtrain-disk")
        self._shut = weakref.finalize(self, _shut, self._worker, self._file)

    def copy_out(self, source: Tensor) -> tuple[Any, WaitFn]:
        """See `Transfer.copy_out`."""
        size = source.numel()
        offset = self._space.allocate(size)
        return (offset, size), self._begin(self._file.write, source.cpu(), offset)

    def copy_in(self, spot: Any, target: Tensor) -> WaitFn:
        """See `Transfer.copy_in`."""
        staging = target if target.device.type == "cpu" else torch.empty_like(target, device="cpu")
        read = self._begin(self._file.read, staging, spot[0])

        def wait() -> None:
            read()
            if staging is not target:
                target.copy_(staging)

        return wait

    def _begin(
        self, transfer: Callable[[Tensor, int], None], tensor: Tensor, offset: int
    ) -> WaitFn:
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
