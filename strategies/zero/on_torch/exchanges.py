"""The all-gathers and reduce-scatters of fully_shard on a CPU: by gloo, or in shared memory.

gloo sends through sockets, even between ranks of one host, and makes a reduce-scatter of an
all-reduce of a copy. In shared memory a rank writes its shard where all ranks read it, and adds up
its part of the gradients where the others have written them. With two ranks the sums are those of
gloo, bit for bit. With more, gloo's order of summation differs; here it is that of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import _disable_current_modes

from bigtrain.errors import BigtrainError
from bigtrain.memory.meter import MemoryMeter
from bigtrain.ranks.shared_buffers import Meeting, SharedBuffers, add_up, counted
from bigtrain.recorder.traffic_counter import TrafficCounter
from bigtrain.versions.torch_versions import all_gather_single, reduce_scatter_single

_SUMMED = (torch.float32, torch.float64)
"""The dtypes whose sums NumPy computes as torch does."""


class _Gloo:
    """An exchange by gloo. While memory is tracked, it waits until gloo frees it.

    The reason is in `MemoryMeter.exchange`. Otherwise it is fully_shard's own exchange.
    """

    def __init__(self, meter: MemoryMeter) -> None:
        self._meter = meter

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return a buffer as fully_shard's default exchange allocates it."""
        return torch.empty(*size, dtype=dtype, device=device)


class _GlooAllGather(_Gloo):
    """An all-gather. fully_shard frees its output soon, and gloo's thread may hold it longer."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather the shards."""
        with self._meter.exchanging(output_tensor, input_tensor):
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class _GlooReduceScatter(_Gloo):
    """A reduce-scatter, of whose input gloo makes a copy."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce, then scatter."""
        with self._meter.exchange():
            return reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


class _Shared:
    """Exchanges in shared memory.

    Args:
        meeting: lets the ranks, which are on one host, wait for each other.
        counter: counts the exchanged bytes of this rank.
    """

    def __init__(self, meeting: Meeting, counter: TrafficCounter) -> None:
        self._meeting, self._counter = meeting, counter
        self._group, self._buffers = meeting.group, SharedBuffers(meeting)

    def _take(self, numels: list[int], own: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        with self._counter.aside():
            return self._buffers.take(numels, own, dtype)


class _SharedAllGather(_Shared):
    """An all-gather whose output is one buffer for all ranks; fully_shard writes the shards."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return the output, of which fully_shard writes this rank's shard next."""
        del device
        return self._take([int(size[0])], 0, dtype)[0]

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Wait until all ranks have written their shards."""
        del input_tensor, async_op
        with counted(self._counter, "all_gather", group.size(), output_tensor.nbytes):
            self._meeting.wait()
        return None


class _SharedReduceScatter(_Shared):
    """A reduce-scatter of inputs that all ranks can read.

    Args:
        meeting: see `_Shared`.
        counter: see `_Shared`.
        gloo: reduces gradients of other dtypes than `_SUMMED`.
    """

    def __init__(self, meeting: Meeting, counter: TrafficCounter, gloo: _GlooReduceScatter) -> None:
        super().__init__(meeting, counter)
        self._gloo = gloo

    _inputs: list[Tensor] | None = None
    """The inputs of all ranks, from the allocation of the input to the exchange."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return the input at the first call of an exchange, and the output at the second."""
        ranks, numel = self._group.size(), int(size[0])
        is_output = self._inputs is not None and self._inputs[0].numel() == ranks * numel
        if is_output or dtype not in _SUMMED:
            return self._gloo.allocate(size, dtype=dtype, device=device)
        own, self._inputs = self._take([numel] * ranks, self._group.rank(), dtype)
        return own

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Add up this rank's part of all inputs, and divide it by their number for a mean.

        Raises:
            BigtrainError: the reduction is another one.
        """
        if input_tensor.dtype not in _SUMMED:
            return self._gloo(output_tensor, input_tensor, group, op, async_op)
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) or self._inputs is None:
            raise BigtrainError(
                f"strategy.replicate.exchange=shared_memory: {op} is neither a sum nor a mean. Set "
                "strategy.replicate.exchange=sockets."
            )
        inputs, self._inputs = self._inputs, None
        with counted(self._counter, "reduce_scatter", group.size(), input_tensor.nbytes):
            self._meeting.wait()
        length, rank = output_tensor.numel(), group.rank()
        with _disable_current_modes():
            parts = [each[rank * length : (rank + 1) * length] for each in inputs]
            add_up(parts, output_tensor, mean=op == dist.ReduceOp.AVG)
        return None


class Exchanges:
    """The exchanges of fully_shard on a CPU.

    Args:
        meter: the meter of the run.
        group: the ranks that share parameters.
        shared_memory: whether they exchange in shared memory.
        spins: see `Meeting`.
        counter: counts the exchanged bytes of this rank.
    """

    def __init__(
        self,
        meter: MemoryMeter,
        group: dist.ProcessGroup,
        counter: TrafficCounter,
        *,
        shared_memory: bool,
        spins: bool,
    ) -> None:
        gloo = _GlooReduceScatter(meter)
        self._gather: Any = _GlooAllGather(meter)
        self._reduce: Any = gloo
        if shared_memory and group.size() > 1:
            with counter.aside():
                meeting = Meeting(group, spins=spins)
            self._gather = _SharedAllGather(meeting, counter)
            self._reduce = _SharedReduceScatter(meeting, counter, gloo)

    def attach(self, unit: FSDPModule) -> None:
        """Let a unit exchange by them."""
        unit.set_custom_all_gather(self._gather)
        unit.set_custom_reduce_scatter(self._reduce)
