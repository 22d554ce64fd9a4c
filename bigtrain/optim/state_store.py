"""Stores for optimizer state and parameters' fp32 copies between steps: device, disk or host.

State on disk is read, updated and written back a chunk at a time, as in ZeRO-Infinity (Rajbhandari
et al. 2021, arXiv 2104.07857, sections 5 and 6). State on the host is updated there, as in
ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from bigtrain.errors import ConfigError
from bigtrain.memory.disk import SpaceRequest, find_shortage, free_disk_bytes
from bigtrain.memory.host_memory import free_host_bytes
from bigtrain.optim.update import MakeOptimizer, state_bytes_per_parameter_byte
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.memory_format import flat_view
from bigtrain.tensors.transfer import BouncedFile, HostCopies, ScratchFile
from bigtrain.units import format_bytes

T = TypeVar("T")

_ALIGN = 64
"""The alignment in bytes of tensors that share a buffer, for vector kernels."""


@dataclass(frozen=True)
class StoredTensor:
    """A placeholder in the optimizer's state for a tensor that is on disk between the steps."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Offset of the tensor in the file, in bytes."""
    device: torch.device
    """The device on which the tensor is used; in a run on a GPU, a parameter may be on the host."""

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.shape.numel() * self.dtype.itemsize


class StateStore:
    """Leaves fp32 copies and optimizer state on the parameters' device; subclasses move them."""

    updates_elsewhere = False
    """Whether the optimizer updates copies on another device than the device of the parameters."""
    chunked = False
    """Whether one chunk is updated at a time, so that the state of one chunk is in memory."""

    def ensure_space(
        self, updated_bytes: int, copied: Sequence[int], make_optimizer: MakeOptimizer
    ) -> None:
        """Check that there is enough space for this rank's share, before it is moved. Collective.

        Args:
            updated_bytes: the bytes of all pieces that this rank updates.
            copied: the bytes of each piece that is a copy of its parameter.
            make_optimizer: makes the optimizer, whose state for each parameter byte is measured.

        Raises:
            ConfigError: there is not enough space; every rank raises the same message.
        """

    def place(self, value: Tensor) -> Tensor:
        """Move a new copy of a parameter to the device where it is updated, and return it."""
        return value

    def store(self, tensor: Tensor, before: StoredTensor | None) -> StoredTensor | None:
        """Store a tensor, and return its placeholder; None if the tensor stays in memory.

        Args:
            tensor: the tensor.
            before: the placeholder of its earlier values, which are overwritten if the size is the
                same; None without earlier values.
        """
        del tensor, before
        return None

    def prepare_chunk(self, upcoming: Iterable[StoredTensor]) -> None:
        """Prepare to load the tensors of a chunk."""

    def load(self, stored: StoredTensor) -> Tensor:
        """Load a tensor. Within a step it is valid until `prepare_chunk` or `finish_step`."""
        raise NotImplementedError

    def begin_copy(self, gradient: Tensor, like: Tensor) -> Callable[[], Tensor]:
        """Begin to move a gradient to the device and the dtype of `like`.

        Returns:
            A function that waits for the copy, and returns it.
        """
        return lambda: gradient.to(like)

    def copy_back(self, target: Tensor, value: Tensor) -> None:
        """Copy updated values to a parameter; the copy is complete after `finish_step`.

        Args:
            target: the parameter, or a view of it.
            value: the updated values.
        """
        target.copy_(value)

    def finish_step(self) -> None:
        """End the step: wait until the parameters have their new values."""

    def close(self) -> None:
        """Close files."""


class DiskStateStore(StateStore):
    """Stores state and fp32 copies in an unlinked file, which exists until it is closed.

    Args:
        context: the ranks, which may share a disk.
        folder: the folder of the file.
        copies: copies between the device and the host; None for the default copies of the device.
    """

    chunked = True

    def __init__(self, context: RunContext, folder: str, copies: HostCopies | None = None) -> None:
        self._context, self._folder = context, folder
        self._end = 0
        self._buffer: Tensor | None = None
        self._buffer_used = 0
        self._file = ScratchFile(folder, "The optimizer's state is stored there")
        copies = copies or HostCopies(context.device)
        self._bounced = BouncedFile(self._file, copies) if copies.is_asynchronous else None

    def ensure_space(
        self, updated_bytes: int, copied: Sequence[int], make_optimizer: MakeOptimizer
    ) -> None:
        """See `StateStore.ensure_space`. Allocates all blocks of the file."""
        needed = sum(copied) + round(updated_bytes * state_bytes_per_parameter_byte(make_optimizer))
        where, free = str(os.fstat(self._file.fd).st_dev), free_disk_bytes(self._folder)
        shortage = find_shortage(_gather_requests(self._context, where, needed, free))
        if shortage is not None:
            raise ConfigError(
                disk_shortage_message(self._folder, shortage.wanted, shortage.free, shortage.ranks)
            )
        fault = None
        if needed:
            try:
                os.posix_fallocate(self._file.fd, 0, needed)
            except OSError as error:
                fault = f"strategy.offload.path={self._folder}: {format_bytes(needed)}: {error}."
        faults = [fault for fault in _gather(self._context, fault) if fault]
        if faults:
            raise ConfigError(f"{faults[0]} Set strategy.offload.path to a folder on another disk.")

    def store(self, tensor: Tensor, before: StoredTensor | None) -> StoredTensor:
        """See `StateStore.store`."""
        value = tensor.detach()
        elements = flat_view(value)
        in_place = elements.is_contiguous() and elements.data_ptr() == value.data_ptr()
        stride = value.stride() if in_place else value.contiguous().stride()
        nbytes = value.numel() * value.element_size()
        if before is not None and before.nbytes == nbytes:
            offset = before.offset
        else:
            offset, self._end = self._end, self._end + nbytes
        elements, bounced = elements.contiguous(), self._bounced_for(value.device)
        if bounced is None:
            self._file.write(elements, offset)
        else:
            bounced.write(elements.view(torch.uint8), offset)
        return StoredTensor(value.dtype, value.shape, tuple(stride), offset, value.device)

    def prepare_chunk(self, upcoming: Iterable[StoredTensor]) -> None:
        """See `StateStore.prepare_chunk`. All chunks of a step share one buffer."""
        stored = list(upcoming)
        total_bytes = sum(_aligned(tensor.nbytes) for tensor in stored)
        on_host = [tensor for tensor in stored if self._bounced_for(tensor.device) is None]
        host_bytes = sum(_aligned(tensor.nbytes) for tensor in on_host)
        self._buffer_used = 0
        if self._buffer is None or len(self._buffer) < host_bytes:
            self._buffer = None
            self._buffer = torch.empty(host_bytes, dtype=torch.uint8)
        if stored:  # chunks are in the file in order, so the next one can be read ahead
            ends = max(tensor.offset + tensor.nbytes for tensor in stored)
            with suppress(OSError):
                os.posix_fadvise(self._file.fd, ends, total_bytes, os.POSIX_FADV_WILLNEED)

    def load(self, stored: StoredTensor) -> Tensor:
        """See `StateStore.load`."""
        bounced = self._bounced_for(stored.device)
        if bounced is not None:
            elements = torch.empty(stored.nbytes, dtype=torch.uint8, device=stored.device)
            bounced.read(elements, stored.offset)()
            return elements.view(stored.dtype).as_strided(stored.shape, stored.stride, None)
        if self._buffer is not None and self._buffer_used + stored.nbytes <= len(self._buffer):
            elements = self._buffer[self._buffer_used : self._buffer_used + stored.nbytes]
            self._buffer_used += _aligned(stored.nbytes)
        else:
            elements = torch.empty(stored.nbytes, dtype=torch.uint8)
        self._file.read(elements, stored.offset)
        return elements.view(stored.dtype).as_strided(stored.shape, stored.stride, None)

    def _bounced_for(self, device: torch.device) -> BouncedFile | None:
        """Return the file with bounce buffers for a tensor on the accelerator; None on the host."""
        return self._bounced if device.type == self._context.device.type else None

    def finish_step(self) -> None:
        """See `StateStore.finish_step`."""
        self._buffer, self._buffer_used = None, 0

    def close(self) -> None:
        """See `StateStore.close`. Frees the blocks of the file."""
        self.finish_step()
        self._file.close()


class HostStateStore(StateStore):
    """Stores state and values of parameters in the host's memory, where they are updated.

    Gradients are copied to the host, and updated values are copied back. While the host updates a
    chunk, the gradients of the next chunk and the values of the previous one are copied. The host
    writes a value only after waiting for the copy of its new gradient. In the stream of copies,
    that copy comes after all copies of the previous step. So no value is overwritten before it is
    copied back.

    Args:
        context: the ranks that share the host's memory.
        copies: copies between the device and the host; None for the default copies of the device.
    """

    updates_elsewhere = True

    def __init__(self, context: RunContext, copies: HostCopies | None = None) -> None:
        self._context = context
        self._copies = copies or HostCopies(context.device)

    def ensure_space(
        self, updated_bytes: int, copied: Sequence[int], make_optimizer: MakeOptimizer
    ) -> None:
        """See `StateStore.ensure_space`."""
        state = round(updated_bytes * state_bytes_per_parameter_byte(make_optimizer))
        needed = state + sum(map(self._copies.host_bytes, copied))
        free = free_host_bytes()
        if free is None:
            return
        shortage = find_shortage(_gather_requests(self._context, "memory", needed, free))
        if shortage is not None:
            raise ConfigError(host_shortage_message(shortage.wanted, shortage.free, shortage.ranks))

    def place(self, value: Tensor) -> Tensor:
        """See `StateStore.place`."""
        return self._copies.host_buffer(value).copy_(value)

    def begin_copy(self, gradient: Tensor, like: Tensor) -> Callable[[], Tensor]:
        """See `StateStore.begin_copy`."""
        staging = self._copies.host_buffer(like)
        self._copies.copy(staging, gradient)
        wait = self._copies.host_wait()
        # A reference keeps the gradient alive: the allocator does not know that the copy stream
        # reads its memory.
        read = [gradient] if self._copies.is_asynchronous else []

        def wait_and_get() -> Tensor:
            wait()
            read.clear()
            return staging

        return wait_and_get

    def copy_back(self, target: Tensor, value: Tensor) -> None:
        """See `StateStore.copy_back`."""
        self._copies.copy(target, value)

    def finish_step(self) -> None:
        """See `StateStore.finish_step`."""
        self._copies.device_wait()()


def disk_shortage_message(folder: str, needed: int, free: int, ranks: int) -> str:
    """Return the message that the state does not fit on a disk.

    Args:
        folder: the folder on the disk.
        needed: bytes that the ranks need.
        free: free bytes of the disk.
        ranks: the number of ranks that share the disk.
    """
    return (
        f"strategy.offload.path={folder} has {format_bytes(free)} free ({free} bytes), and the "
        f"optimizer's state of {_ranks(ranks)} there takes {format_bytes(needed)} ({needed} "
        "bytes). Make room, or set strategy.offload.path to a folder on a larger disk."
    )


def host_shortage_message(needed: int, free: int, ranks: int) -> str:
    """Return the message that the state does not fit into the host's memory.

    Args:
        needed: bytes that the ranks need.
        free: free bytes of the host's memory.
        ranks: the number of ranks on the host.
    """
    return (
        f"strategy.offload.optimizer=cpu: the host has {format_bytes(free)} of memory free ({free} "
        f"bytes), and the values and state of {_ranks(ranks)} there take {format_bytes(needed)} "
        f"({needed} bytes). Use strategy.offload.optimizer=disk, or more nodes with --strategy "
        "zero1_torch."
    )


def _ranks(number: int) -> str:
    return "the 1 rank" if number == 1 else f"the {number} ranks"


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _gather_requests(context: RunContext, where: str, needed: int, free: int) -> list[SpaceRequest]:
    return _gather(context, SpaceRequest(platform.node(), where, needed, free))


def _gather(context: RunContext, value: T) -> list[T]:
    values: list[T] = context.broadcast_object(context.gather_objects(value))
    return values
