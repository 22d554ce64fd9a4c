"""Buffers in memory that all ranks of a group on one host share, instead of messages between them.

The ranks write their parts, wait for each other, and read. Buffers are used in turn. A rank that
takes a used buffer again first waits until all ranks take it, so that none of them still reads what
it contained.
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

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from bigtrain.errors import BigtrainError
from bigtrain.machine.rates import usable_cores
from bigtrain.recorder.traffic_counter import TrafficCounter

SPIN_S = 0.05
"""For this many seconds a rank reads the counters of the others before it waits by gloo."""
_LINE = 8
"""Counters are this many numbers apart, so that no two of them are in one line of a cache."""


class Meeting:
    """Lets the ranks of a group wait for each other, by counters in shared memory.

    A rank that arrives increases its counter and reads those of the others. If one is late, all
    ranks wait by an all-reduce of one number, so that timeouts, lost ranks and the page on a hang
    work as with any other exchange. On a CPU that always computes, an all-reduce alone would take
    longer: gloo has to wake up two threads of every rank.

    Every rank of the group makes the object, and then calls `wait` equally often.

    Args:
        group: a gloo group whose ranks are on one host.

    Raises:
        BigtrainError: a rank cannot open the memory of another; on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self._count = group, 0
        ranks = group.size()
        memory, self._lock = _shared(group, 8 * _LINE * (1 + ranks))
        weakref.finalize(self, os.close, self._lock)
        numbers = np.frombuffer(memory, dtype=np.int64)
        self._by_gloo, self._arrived = numbers[:1], numbers[_LINE::_LINE]
        # Without a core for every rank, a rank that reads counters keeps others from computing.
        self._spin_s = SPIN_S if dist.get_world_size() <= usable_cores() else 0.0

    def wait(self) -> None:
        """Wait until all ranks have called this method equally often. Collective."""
        self._count += 1
        with self._locked():
            self._arrived[self.group.rank()] = self._count
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


class SharedBuffers:
    """Buffers that all ranks of a group can read and write.

    Every rank of the group makes the object, and then calls its methods in the same order.

    Args:
        meeting: lets the ranks wait for each other.
        nbytes: the most bytes of a buffer.
        held: the most buffers that a rank uses at once.

    Raises:
        BigtrainError: a rank cannot open the memory of another; on all ranks.
    """

    def __init__(self, meeting: Meeting, nbytes: int, held: int) -> None:
        self._meeting, self._count = meeting, held
        self._stride = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = shared_memory(meeting.group, max(1, self._count * self._stride))
        self._users: list[weakref.ref[torch.UntypedStorage] | None] = [None] * self._count
        self._next = 0

    def has_room(self, nbytes: int) -> bool:
        """Whether a buffer has at least this many bytes."""
        return nbytes <= self._stride

    def take(self, numels: list[int], own: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Take the next buffer. Collective.

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
        user = self._users[self._next]
        if user is not None:
            if user() is not None:
                raise BigtrainError(
                    f"strategy.replicate.exchange=shared_memory: more than {self._count} buffers "
                    "are needed at once. Set strategy.replicate.exchange=sockets."
                )
            self._meeting.wait()
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
