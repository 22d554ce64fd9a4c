"""Ways out of a device's memory and back: a file without a name, or pinned memory of the host.

Files are read and written, not mapped: a full disk is then an error with a message and not a
signal, and what is in memory is what the tracker counts.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, Protocol

import torch
from torch import Tensor

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

    def free(self, spot: Any) -> None:
        """What is put away from now on may overwrite what is there."""

    def close(self) -> None:
        """Let go of threads, files and memory."""


class NullTransfer:
    """Copies nothing: for fake tensors, which have no numbers."""

    def copy_out(self, source: Tensor) -> tuple[Any, WaitFn]:
        """See `Transfer.copy_out`."""
        del source
        return (), _arrived

    def copy_in(self, spot: Any, target: Tensor) -> WaitFn:
        """See `Transfer.copy_in`."""
        del spot, target
        return _arrived

    def free(self, spot: Any) -> None:
        """See `Transfer.free`."""

    def close(self) -> None:
        """See `Transfer.close`."""


def _arrived() -> None:
    """Nothing is under way."""


class HostTransfer:
    """To pinned memory of the host and back, on a CUDA stream of its own.

    Nothing waits on the host: what is waited for is put before what the device computes next.
    Torch keeps pinned memory that is free for the next one who wants as much.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy_out(self, source: Tensor) -> tuple[Any, WaitFn]:
        """See `Transfer.copy_out`."""
        spot = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        return spot, self._copy(spot, source)

    def copy_in(self, spot: Any, target: Tensor) -> WaitFn:
        """See `Transfer.copy_in`."""
        return self._copy(target, spot)

    def _copy(self, target: Tensor, source: Tensor) -> WaitFn:
        # After what is computed so far: it makes the source, or last used the target's memory.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        event = self._stream.record_event()
        # The memory is let go of after this, and then used for what is computed behind the event.
        return lambda: torch.cuda.current_stream(self._device).wait_event(event)

    def free(self, spot: Any) -> None:
        """See `Transfer.free`. Torch does it, when the last reference goes."""

    def close(self) -> None:
        """See `Transfer.close`."""
        self._stream.synchronize()


class DiskTransfer:
    """To a file of this rank and back, by a thread of its own.

    The file has no name and vanishes with the process; the room of what is free in it is used
    again. A tensor of a GPU is copied to the host and back before the next thing is computed.

    Args:
        folder: where the file is made.

    Raises:
        ConfigError: the folder takes no file.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        file = anonymous_file(folder)
        self._fd = file.fileno()
        self._space = FileAllocator()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="bigtrain-disk")
        self._shut = weakref.finalize(self, _shut, self._worker, file)

    def copy_out(self, source: Tensor) -> tuple[Any, WaitFn]:
        """See `Transfer.copy_out`."""
        size = source.numel()
        offset = self._space.allocate(size)
        write = self._worker.submit(_whole, os.pwritev, self._fd, [source.cpu()], offset)
        return (offset, size), lambda: self._wait(write)

    def copy_in(self, spot: Any, target: Tensor) -> WaitFn:
        """See `Transfer.copy_in`."""
        staging = target if target.device.type == "cpu" else torch.empty_like(target, device="cpu")
        read = self._worker.submit(_whole, os.preadv, self._fd, [staging], spot[0])

        def wait() -> None:
            self._wait(read)
            if staging is not target:
                target.copy_(staging)

        return wait

    def _wait(self, job: Future[None]) -> None:
        try:
            job.result()
        except OSError as error:
            raise BigtrainError(
                f"strategy.offload.path={self._folder}: {error}. Saved activations are kept "
                "there; make room on that disk, or use another, and resume."
            ) from None

    def free(self, spot: Any) -> None:
        """See `Transfer.free`."""
        self._space.release(*spot)

    def close(self) -> None:
        """See `Transfer.close`. The file's blocks are free again."""
        self._shut()


def _shut(worker: ThreadPoolExecutor, file: IO[bytes]) -> None:
    worker.shutdown(wait=True)
    file.close()


def _whole(transfer: Callable[..., int], fd: int, holder: list[Tensor], offset: int) -> None:
    """Read or write all of a tensor; the system may do less than it is asked for.

    Args:
        transfer: `os.preadv` or `os.pwritev`.
        fd: the file.
        holder: one tensor of uint8 on the CPU. It is taken out, so that this thread lets go of it
            before anybody learns that it is done: the last reference never goes here.
        offset: the offset in bytes.
    """
    tensor = holder.pop()
    # Not through numpy: whatever runs here must not be seen as an operation.
    remaining = memoryview((ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())).cast(
        "B"
    )
    while remaining.nbytes:
        transferred = transfer(fd, [remaining], offset)
        if transferred <= 0:
            raise OSError("the file was cut off")
        remaining, offset = remaining[transferred:], offset + transferred


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
