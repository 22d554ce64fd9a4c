"""Buffers in memory that all ranks of a group on one host share, instead of messages between them.

The ranks write their parts, wait for each other, and read. The wait is an all-reduce of one number
by gloo, so timeouts, lost ranks and the page on a hang work as with any other exchange.

Buffers of one size are used in turn. If a rank uses at most `held` of them at once, `held` + 1 are
enough: a rank that takes a buffer has met the others in the exchange before. Each of them had taken
its buffer for that exchange, and then its next one was free, which `take` checks.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from bigtrain.errors import BigtrainError
from bigtrain.recorder.traffic_counter import TrafficCounter


class SharedBuffers:
    """Buffers of one size that all ranks of a group can read and write.

    Every rank of the group makes the object, and then calls its methods in the same order.

    Args:
        group: a gloo group whose ranks are on one host.
        nbytes: the bytes of a buffer.
        held: the most buffers that a rank uses at once.

    Raises:
        BigtrainError: a rank cannot open the memory of another; on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int, held: int) -> None:
        self._group, self._count = group, held + 1
        self._stride = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = shared_memory(group, max(1, self._count * self._stride))
        self._users: list[weakref.ref[torch.UntypedStorage] | None] = [None] * self._count
        self._next = 0

    def take(self, numels: list[int], own: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Take the next buffer.

        Args:
            numels: the elements of the buffer's parts, which lie one after the other.
            own: the index of the part for this rank's use.
            dtype: the dtype of the elements.

        Returns:
            The own part, and all parts. The buffer is in use until the storage of the own part is
            freed.

        Raises:
            BigtrainError: more than `held` buffers would be in use.
        """
        for number in (self._next, (self._next + 1) % self._count):
            user = self._users[number]
            if user is not None and user() is not None:
                raise BigtrainError(
                    "strategy.replicate.exchange=shared_memory: more than "
                    f"{self._count - 1} buffers of {self._stride} bytes are needed at once. Set "
                    "strategy.replicate.exchange=sockets."
                )
        parts, offset = [], self._next * self._stride
        for numel in numels:
            parts.append(self._part(numel, dtype, offset))
            offset += numel * dtype.itemsize
        self._users[self._next] = weakref.ref(parts[own].untyped_storage())
        self._next = (self._next + 1) % self._count
        return parts[own], parts

    def _part(self, numel: int, dtype: torch.dtype, offset: int) -> Tensor:
        if not numel:  # a unit whose parameters have no elements; torch refuses to read none
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=offset)


def can_share_memory(group: dist.ProcessGroup) -> bool:
    """Return whether all ranks of a group can share memory, which they try. Collective."""
    try:
        SharedBuffers(group, 1, 0)
    except BigtrainError:
        return False
    return True


def meet(group: dist.ProcessGroup) -> None:
    """Wait until all ranks of the group have called this function."""
    with _disable_current_modes():
        dist.all_reduce(torch.zeros(1), group=group)


def add_up(parts: Sequence[Tensor], total: Tensor, *, mean: bool) -> None:
    """Write the sum of tensors, or their mean, into another tensor.

    By NumPy, because a tracker of memory would count the tensors of other ranks as this rank's.

    Args:
        parts: at least two contiguous tensors of fp32 or fp64 on the CPU, in the order of the sum.
        total: a tensor of the same shape.
        mean: whether the sum is divided by the number of tensors.
    """
    result, (first, second, *rest) = total.numpy(), [part.numpy() for part in parts]
    np.add(first, second, out=result)
    for part in rest:
        np.add(result, part, out=result)
    if mean:
        np.divide(result, len(parts), out=result)


@contextmanager
def counted(counter: TrafficCounter, kind: str, ranks: int, nbytes: int) -> Iterator[None]:
    """Count what happens in a `with` block as one exchange, and the messages of gloo in it not.

    Args:
        counter: the counter of this rank.
        kind: the kind of exchange; see `TrafficCounter`.
        ranks: the number of ranks.
        nbytes: the bytes of the whole tensor.
    """
    counter.add(kind, ranks, nbytes)
    with counter.aside():
        yield


def shared_memory(group: dist.ProcessGroup, nbytes: int) -> mmap.mmap:
    """Return memory that the ranks of a group share, of zeros. Collective.

    It belongs to no file, so nothing is left behind when the processes end, and limits of /dev/shm
    do not apply.
    """
    said: list[tuple[int, int] | None] = [None]
    problem: str | None = None
    descriptor = -1
    with _disable_current_modes():
        if group.rank() == 0 and sys.platform == "linux":
            try:
                descriptor = os.memfd_create("bigtrain")
                os.ftruncate(descriptor, nbytes)
                said = [(os.getpid(), descriptor)]
            except OSError as error:
                problem = str(error)
        dist.broadcast_object_list(said, group=group, group_src=0, device=torch.device("cpu"))
        memory = None
        if said[0] is not None:
            try:
                if group.rank() != 0:
                    pid, number = said[0]
                    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
                memory = mmap.mmap(descriptor, nbytes)
            except (OSError, ValueError) as error:
                problem = str(error)
        failed = torch.tensor([float(memory is None)])
        dist.all_reduce(failed, group=group)  # also keeps the first rank's descriptor open so long
    if descriptor >= 0:
        os.close(descriptor)
    if memory is None or failed.item():
        raise BigtrainError(
            f"the ranks cannot share memory ({problem or 'another rank could not open it'}). They "
            "need Linux, one host, and one user. Set strategy.replicate.exchange=sockets."
        )
    return memory
