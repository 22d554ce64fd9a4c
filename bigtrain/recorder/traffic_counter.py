"""The bytes that this rank exchanges in its steps, counted by hooks on torch's process groups.

A hook on each group sees every collective, send and receive: of DDP's reducer in C++,
`fully_shard`, DeepSpeed, fairscale or a pipeline. The hook takes microseconds for each exchange.
Some versions of torch have no such hooks (see `torch_versions`). With them nothing is counted.

Exchanges of bigtrain's own bookkeeping are not counted: those of `RunContext` (losses, counts,
flags), and all-reduces of one number (norms).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_HOOK_ID = 0x62_75  # torch identifies the hooks of a group by numbers
_KINDS = {
    "ALLREDUCE": "all_reduce",
    "ALLREDUCE_COALESCED": "all_reduce",
    "ALLGATHER": "all_gather",
    "ALLGATHER_BASE": "all_gather",
    "ALLGATHER_COALESCED": "all_gather",
    "ALLGATHER_INTO_TENSOR_COALESCED": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter",
    "REDUCE_SCATTER_BASE": "reduce_scatter",
    "REDUCE_SCATTER_TENSOR_COALESCED": "reduce_scatter",
    "BROADCAST": "broadcast",
    "REDUCE": "reduce",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all",
    "SEND": "send",
    "RECV": "receive",
    "RECVANYSOURCE": "receive",
}
"""The kinds of exchanges in `costs.traffic` by torch's names of operations; other operations are
not counted."""

Exchanged = Counter[tuple[str, int]]
"""Bytes of whole tensors, by the kind of exchange and the number of ranks of its group."""


class TrafficCounter:
    """Counts the bytes that a rank exchanges from `begin` to `end`.

    It counts the bytes of whole tensors, as they are before a reduce-scatter and after an
    all-gather. A rank sends a share of these bytes, which `costs.traffic.StepVolume` computes.
    """

    def __init__(self) -> None:
        self.counts = False
        """Whether the exchanges of a group are counted; False until `begin` finds a group."""
        self._known: set[str] = set()
        self._thread_state = threading.local()
        self._begun = False
        self._bytes: Exchanged = Counter()

    def begin(self) -> None:
        """Begin a step: count the exchanges of all existing groups from zero."""
        import torch.distributed as dist

        from bigtrain.versions.torch_versions import COUNTS_EXCHANGES

        if COUNTS_EXCHANGES and dist.is_initialized():
            for group, name in list(dist.distributed_c10d._world.pg_names.items()):
                self._watch(group, name)
        self._bytes.clear()
        self._begun = True

    def end(self) -> Exchanged | None:
        """End the step and return its exchanges; None if no group is counted.

        This is so in a run of one process, or if torch has no hooks on groups.
        """
        self._begun = False
        return Counter(self._bytes) if self.counts else None

    def leave_out(self, group: Any) -> None:
        """Do not count the exchanges of this group; call this before `begin` sees the group."""
        self._known.add(group.group_name)

    def add(self, kind: str, ranks: int, nbytes: int) -> None:
        """Count an exchange that no group makes.

        Args:
            kind: the kind in `costs.traffic`.
            ranks: the number of ranks.
            nbytes: the bytes of the whole tensor.
        """
        if self._begun:
            self._bytes[kind, ranks] += nbytes

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Do not count this thread's exchanges inside the `with` block."""
        outer = getattr(self._thread_state, "aside", False)
        self._thread_state.aside = True
        try:
            yield
        finally:
            self._thread_state.aside = outer

    def _watch(self, group: Any, name: str) -> None:
        if name in self._known:
            return
        self._known.add(name)
        ranks, self.counts = group.size(), True

        def begins(call: Any) -> None:
            kind = _KINDS.get(call.name.name)
            if not self._begun or kind is None or getattr(self._thread_state, "aside", False):
                return
            inputs, outputs = call.input_tensors, call.output_tensors
            if kind == "all_reduce" and sum(tensor.numel() for tensor in inputs) == 1:
                return
            sizes = [sum(map(_nbytes, side)) for side in (inputs, outputs)]
            self._bytes[kind, ranks] += max(sizes)

        group.register_pre_hook(_HOOK_ID, begins)


def _nbytes(tensor: Any) -> int:
    if tensor.is_sparse:  # gradients of an embedding
        return int(tensor._values().nbytes + tensor._indices().nbytes)
    return int(tensor.nbytes)
