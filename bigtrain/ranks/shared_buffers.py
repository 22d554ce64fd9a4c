"""Buffers in memory that all ranks of a group on one host share, instead of messages between them.

The ranks write their parts, wait for each other, and read. A buffer is used again once all ranks
have said that they no longer need what it contains.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import and_

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from bigtrain.errors import BigtrainError
from bigtrain.recorder.traffic_counter import TrafficCounter

SPIN_S = 0.05
"""For this many seconds a rank reads the counters of the others before it waits by gloo."""
MAX_BUFFERS = 16
"""The most buffers of a `SharedBuffers`: each has a bit in a number that ranks show each other."""
_LINE = 8
"""The numbers of a rank are this many, so that those of two ranks are not in one line of a cache:
its counter, and the number that it shows the others at an odd and at an even meeting."""


class Meeting:
    """Lets the ranks of a group wait for each other, by counters in shared memory.

    A rank that arrives increases its counter and reads those of the others. If one is late, all
    ranks wait by an all-reduce of one number, so that timeouts, lost ranks and the page on a hang
    work as with any other exchange. An all-reduce takes some milliseconds while all cores compute.

    Every rank of the group makes the object, and then calls `wait` equally often.

    Args:
        group: a gloo group whose ranks are on one host.
        spins: whether a rank reads the counters of late ranks before it waits by gloo. Unless every
            rank of the host has a core, it would keep others from computing.

    Raises:
        BigtrainError: a rank cannot open the memory of another; on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, *, spins: bool) -> None:
        self.group, self._count = group, 0
        memory, self._lock = _shared(group, 8 * _LINE * (1 + group.size()))
        weakref.finalize(self, os.close, self._lock)
        numbers = np.frombuffer(memory, dtype=np.int64).reshape(-1, _LINE)
        self._by_gloo, self._arrived, self._shown = numbers[:1, 0], numbers[1:, 0], numbers[1:, 1:3]
        self._spin_s = SPIN_S if spins else 0.0

    def wait(self, shown: int = 0) -> list[int]:
        """Wait until all ranks have called this method equally often. Collective.

        Args:
            shown: a number that all ranks get.

        Returns:
            The numbers of all ranks, by rank.
        """
        self._count += 1
        rank, numbers = self.group.rank(), self._shown[:, self._count % 2]
        with self._locked():
            # These numbers are overwritten at the meeting after the next. By then all ranks have
            # read them, because all have come to the next meeting.
            numbers[rank] = shown
            self._arrived[rank] = self._count
        deadline = time.perf_counter() + self._spin_s
        while not self._all_arrived() and time.perf_counter() < deadline:
            os.sched_yield()
        with self._locked():
            # A rank that does not see all others here lets all of them wait by gloo. After the last
            # rank has arrived, none does.
            if not self._all_arrived():
                self._by_gloo[0] = self._count
            is_by_gloo = self._by_gloo[0] == self._count
        if is_by_gloo:
            with _disable_current_modes():
                dist.all_reduce(torch.zeros(1), group=self.group)
        with self._locked():
            return [int(number) for number in numbers]

    def _all_arrived(self) -> bool:
        return bool(self._arrived.min() >= self._count)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the counters. It also orders what ranks write and read on all CPUs."""
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)


@dataclass
class _Buffer:
    """A buffer."""

    memory: mmap.mmap
    user: weakref.ref[torch.UntypedStorage] | None = None
    """The storage of this rank's part, as long as it exists."""

    @property
    def is_free(self) -> bool:
        return self.user is None or self.user() is None


class SharedBuffers:
    """Buffers that all ranks of a group can read and write.

    They are made when they are needed, and made anew when a larger one is needed.

    Every rank of the group makes the object, and then calls `take` with the same sizes.

    Args:
        meeting: lets the ranks wait for each other.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting, self._nbytes = meeting, 0
        self._buffers: list[_Buffer] = []

    def take(self, numels: list[int], own: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Take a buffer that no rank uses. Collective.

        Args:
            numels: the elements of the buffer's parts, which lie one after the other.
            own: the index of the part for this rank's use.
            dtype: the dtype of the elements.

        Returns:
            The own part, and all parts. The buffer is in use until the storage of the own part is
            freed on every rank.

        Raises:
            BigtrainError: a rank cannot open the memory of another, or more than `MAX_BUFFERS`
                buffers would be in use; on all ranks.
        """
        nbytes = sum(numels) * dtype.itemsize
        if nbytes > self._nbytes:
            self._nbytes, self._buffers = nbytes, []
        buffer = self._free_buffer()
        parts, offset = [], 0
        for numel in numels:
            parts.append(_part(buffer.memory, numel, dtype, offset))
            offset += numel * dtype.itemsize
        buffer.user = weakref.ref(parts[own].untyped_storage())
        return parts[own], parts

    def _free_buffer(self) -> _Buffer:
        """Return the first buffer that is free on all ranks, or a new one."""
        free = sum(1 << number for number, each in enumerate(self._buffers) if each.is_free)
        free = reduce(and_, self._meeting.wait(free))
        for number, buffer in enumerate(self._buffers):
            if free & 1 << number:
                return buffer
        if len(self._buffers) == MAX_BUFFERS:
            raise BigtrainError(
                f"strategy.replicate.exchange=shared_memory: more than {MAX_BUFFERS} buffers are "
                "needed at once. Set strategy.replicate.exchange=sockets."
            )
        memory = shared_memory(self._meeting.group, max(1, self._nbytes))
        self._buffers.append(_Buffer(memory))
        return self._buffers[-1]


def _part(memory: mmap.mmap, numel: int, dtype: torch.dtype, offset: int) -> Tensor:
    if not numel:  # a unit whose parameters have no elements; torch refuses to read none
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)


def can_share_memory(group: dist.ProcessGroup) -> bool:
    """Return whether all ranks of a group can share memory, which they try. Collective."""
    try:
        shared_memory(group, 1)
    except BigtrainError:
        return False
    return True


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

    Raises:
        BigtrainError: a rank cannot open the memory of another; on all ranks.
    """
    memory, descriptor = _shared(group, nbytes)
    os.close(descriptor)
    return memory


def _shared(group: dist.ProcessGroup, nbytes: int) -> tuple[mmap.mmap, int]:
    """Return memory as `shared_memory` does, and its open descriptor."""
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
    if memory is None or failed.item():
        if descriptor >= 0:
            os.close(descriptor)
        raise BigtrainError(
            f"the ranks cannot share memory ({problem or 'another rank could not open it'}). They "
            "need Linux, one host, and one user. Set strategy.replicate.exchange=sockets."
        )
    return memory, descriptor
