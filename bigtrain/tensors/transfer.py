"""Copies of device memory to host memory or to an anonymous file, and back.

Files are read and written, not mapped: a full disk then raises an error instead of a signal, and
the tracker counts all memory that is in use.
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
"""Waits for a copy, so that later computations of the calling thread see it as complete."""

_ALIGN = 4096
"""Tensors begin at multiples of this many bytes in the file: no page is written twice."""


class Transfer(Protocol):
    """Copies bytes off a device and back, in order, concurrently with computation."""

    def copy_out(self, source: Tensor) -> tuple[Any, WaitFn]:
        """Start to copy a contiguous uint8 tensor out; the tensor must live until the wait is over.

        Returns:
            The location of the copy, and a function that waits for it. Waiting raises
            `BigtrainError` if the copy could not be written.
        """

    def copy_in(self, location: Any, target: Tensor) -> WaitFn:
        """Start to copy back from a location; the uint8 target must live until the wait is over."""

    def stored_bytes(self, nbytes: int) -> int:
        """Return the bytes that a tensor of `nbytes` occupies outside the device."""

    def free(self, location: Any) -> None:
        """Allow later copies to overwrite this location."""

    def close(self) -> None:
        """Release threads, files and memory."""


def pinned_bytes(nbytes: int) -> int:
    """Return the bytes of a pinned buffer for `nbytes`: torch allocates a power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


class NullTransfer:
    """Copies nothing: for fake tensors, which have no values.

    Args:
        pinned: whether it represents copies to pinned host memory.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned

    def copy_out(self, source: Tensor) -> tuple[Any, WaitFn]:
        """See `Transfer.copy_out`."""
        del source
        return (), _no_wait

    def copy_in(self, location: Any, target: Tensor) -> WaitFn:
        """See `Transfer.copy_in`."""
        del location, target
        return _no_wait

    def stored_bytes(self, nbytes: int) -> int:
        """See `Transfer.stored_bytes`."""
        return pinned_bytes(nbytes) if self._pinned else nbytes

    def free(self, location: Any) -> None:
        """See `Transfer.free`."""

    def close(self) -> None:
        """See `Transfer.close`."""


def _no_wait() -> None:
    """Return at once: no copy is in progress."""


class HostCopies:
    """Copies between a device and the host, in order.

    Copies of a CUDA device run on a separate stream; those of other devices are synchronous.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = side_stream(device)

    @property
    def device(self) -> torch.device:
        """The device whose memory is copied."""
        return self._device

    @property
    def is_asynchronous(self) -> bool:
        """Whether copies run concurrently with computation and end after the call."""
        return self._stream is not None

    def host_bytes(self, nbytes: int) -> int:
        """Return the bytes that the host allocates for a buffer of `nbytes`."""
        return pinned_bytes(nbytes) if self._stream is not None else nbytes

    def host_buffer(self, like: Tensor) -> Tensor:
        """Allocate host memory for the values of a tensor: pinned, if copies are asynchronous."""
        # torch caches freed pinned memory for the next allocation of the same size.
        return torch.empty_like(
            like, device="cpu", pin_memory=self._stream is not None, requires_grad=False
        )

    def mark(self) -> Any:
        """Return a mark of everything computed so far, for `copy` on another thread."""
        return None if self._stream is None else current_stream(self._device).record_event()

    def copy(self, target: Tensor, source: Tensor, after: Any = None) -> None:
        """Copy after everything computed so far, or after the mark `after`."""
        if self._stream is None:
            target.copy_(source)
            return
        # Earlier computations may produce the source, or still use the target's memory.
        if after is None:
            self._stream.wait_stream(current_stream(self._device))
        else:
            self._stream.wait_event(after)
        with on_stream(self._stream):
            target.copy_(source, non_blocking=True)

    def host_wait(self) -> WaitFn:
        """Return a function that blocks the host until the copies so far are done."""
        if self._stream is None:
            return _no_wait
        event = self._stream.record_event()
        return lambda: event.synchronize()

    def device_wait(self) -> WaitFn:
        """Return a function that makes later computations on the device wait for these copies."""
        if self._stream is None:
            return _no_wait
        event = self._stream.record_event()
        return lambda: current_stream(self._device).wait_event(event)


class HostTransfer:
    """Copies to host memory and back. Only the device waits for copies, not the host."""

    def __init__(self, device: torch.device) -> None:
        self._copies = HostCopies(device)

    def copy_out(self, source: Tensor) -> tuple[Any, WaitFn]:
        """See `Transfer.copy_out`."""
        location = self._copies.host_buffer(source)
        self._copies.copy(location, source)
        return location, self._copies.device_wait()

    def copy_in(self, location: Any, target: Tensor) -> WaitFn:
        """See `Transfer.copy_in`."""
        self._copies.copy(target, location)
        return self._copies.device_wait()

    def stored_bytes(self, nbytes: int) -> int:
        """See `Transfer.stored_bytes`."""
        return self._copies.host_bytes(nbytes)

    def free(self, location: Any) -> None:
        """See `Transfer.free`. torch frees the buffer with its last reference."""

    def close(self) -> None:
        """See `Transfer.close`."""
        self._copies.host_wait()()


class ScratchFile:
    """An anonymous file of this rank, which the system removes when the process ends.

    Args:
        folder: the folder in which the file is created.
        contents: a sentence for error messages, such as `Saved activations are kept there`.

    Raises:
        ConfigError: no file can be created in the folder.
    """

    def __init__(self, folder: str, contents: str) -> None:
        self._folder, self._contents = folder, contents
        self._file = anonymous_file(folder)
        self.fd = self._file.fileno()

    def write(self, tensor: Tensor, offset: int) -> None:
        """Write a contiguous CPU tensor at an offset in bytes.

        Raises:
            BigtrainError: the disk is full, or failed.
        """
        self._transfer_all(os.pwritev, tensor, offset)

    def read(self, tensor: Tensor, offset: int) -> None:
        """Read a contiguous CPU tensor from an offset in bytes.

        Raises:
            BigtrainError: the file is shorter, or the disk failed.
        """
        self._transfer_all(os.preadv, tensor, offset)

    def _transfer_all(self, transfer: Callable[..., int], tensor: Tensor, offset: int) -> None:
        """Read or write all bytes; a system call may transfer fewer."""
        # Not through numpy: dispatch modes must see no torch operation here.
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
        """Close the file, which frees its blocks on the disk."""
        self._file.close()


BOUNCE_BYTES = 16 << 20
"""Bytes of each of the two buffers between an accelerator and a file; a power of two."""


class BouncedFile:
    """Writes tensors of an accelerator to a file and reads them, through two pinned buffers.

    While one buffer is written to the file or read from it, the other is copied from the device or
    to it. Not thread-safe.
    """

    def __init__(self, file: ScratchFile, copies: HostCopies) -> None:
        self._file, self._copies = file, copies
        like = torch.empty(BOUNCE_BYTES, dtype=torch.uint8, device="meta")
        self._buffers = [copies.host_buffer(like) for _ in range(2)]
        self._waits: list[WaitFn] = [_no_wait, _no_wait]
        self._next_slot = 0

    def write(self, tensor: Tensor, offset: int, after: Any = None) -> None:
        """Write a contiguous uint8 tensor; it is in the file when the call returns.

        Args:
            tensor: a tensor on the device.
            offset: the offset in bytes.
            after: the mark (`HostCopies.mark`) after which the copies start; None for everything
                computed so far.

        Raises:
            BigtrainError: the disk is full, or failed.
        """
        waiting: tuple[int, Tensor, int] | None = None
        for part in torch.split(tensor.view(-1), BOUNCE_BYTES):
            slot, buffer = self._free_buffer(part)
            self._copies.copy(buffer, part, after)
            self._waits[slot] = self._copies.host_wait()
            if waiting is not None:
                self._write_arrived(*waiting)
            waiting, offset = (slot, buffer, offset), offset + len(part)
        if waiting is not None:
            self._write_arrived(*waiting)

    def read(self, tensor: Tensor, offset: int, after: Any = None) -> WaitFn:
        """Read a contiguous uint8 tensor; the arguments are those of `write`.

        Returns:
            A function that makes later computations of the device wait for the copies.

        Raises:
            BigtrainError: the file is shorter, or the disk failed.
        """
        for part in torch.split(tensor.view(-1), BOUNCE_BYTES):
            slot, buffer = self._free_buffer(part)
            self._file.read(buffer, offset)
            self._copies.copy(part, buffer, after)
            self._waits[slot] = self._copies.host_wait()
            offset += len(part)
        return self._copies.device_wait()

    def _free_buffer(self, part: Tensor) -> tuple[int, Tensor]:
        """Return the next buffer, cut to the length of a part, after its last copy is done."""
        slot, self._next_slot = self._next_slot, 1 - self._next_slot
        self._wait(slot)
        return slot, self._buffers[slot][: len(part)]

    def _wait(self, slot: int) -> None:
        wait, self._waits[slot] = self._waits[slot], _no_wait
        wait()

    def _write_arrived(self, slot: int, buffer: Tensor, offset: int) -> None:
        self._wait(slot)
        self._file.write(buffer, offset)


class DiskTransfer:
    """Copies to an anonymous file of this rank and back, on a thread.

    Freed space in the file is used again.

    Args:
        folder: the folder in which the file is created.
        copies: the copies between the tensors' device and the host.

    Raises:
        ConfigError: no file can be created in the folder.
    """

    def __init__(self, folder: str, copies: HostCopies) -> None:
        self._file = ScratchFile(folder, "Saved activations are kept there")
        self._copies = copies
        self._bounced = BouncedFile(self._file, copies) if copies.is_asynchronous else None
        self._space = FileAllocator()
        # A new thread's current device is device 0, which may belong to another rank.
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

    def copy_in(self, location: Any, target: Tensor) -> WaitFn:
        """See `Transfer.copy_in`."""
        if self._bounced is None:
            return self._begin(self._file.read, target, location[0])
        read = partial(self._bounced.read, after=self._copies.mark())
        begun = self._begin(read, target, location[0])
        return lambda: begun()()

    def _begin(
        self, transfer: Callable[[Tensor, int], _Result], tensor: Tensor, offset: int
    ) -> Callable[[], _Result]:
        # The thread pops the tensor from the list, so its reference ends before the result is set.
        # The caller's reference lives longer, so the last one is never dropped on the thread.
        holder = [tensor]
        return self._worker.submit(lambda: transfer(holder.pop(), offset)).result

    def stored_bytes(self, nbytes: int) -> int:
        """See `Transfer.stored_bytes`."""
        return nbytes

    def free(self, location: Any) -> None:
        """See `Transfer.free`."""
        self._space.release(*location)

    def close(self) -> None:
        """See `Transfer.close`. Frees the file's blocks on the disk."""
        self._shut()


def _shut(worker: ThreadPoolExecutor, file: ScratchFile) -> None:
    worker.shutdown(wait=True)
    file.close()


class FileAllocator:
    """A first-fit allocator of space in a file, in bytes."""

    def __init__(self) -> None:
        self.end = 0
        """The length that the file has reached."""
        self._free: list[tuple[int, int]] = []  # offset and size, sorted, no two adjacent

    def allocate(self, size: int) -> int:
        """Return the offset of `size` free bytes."""
        size = _aligned(size)
        for index, (offset, free_size) in enumerate(self._free):
            if free_size >= size:
                remainder = [(offset + size, free_size - size)] if free_size > size else []
                self._free[index : index + 1] = remainder
                return offset
        self.end += size
        return self.end - size

    def release(self, offset: int, size: int) -> None:
        """Free space that `allocate` returned."""
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
