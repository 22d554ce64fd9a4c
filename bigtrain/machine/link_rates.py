"""Measure the links between ranks of this machine: the seconds of small and of large exchanges.

`bigtrain.machine.rates` runs this file in a separate process, which starts the ranks. Each rank
runs this file again:

    python bigtrain/machine/link_rates.py --start N ANSWER DEVICE
    python bigtrain/machine/link_rates.py ANSWER DEVICE          as a rank

ANSWER is a JSON file that rank 0 writes. It contains "ranks", their number, and for an all-reduce
"latency" (seconds) and "bytes" (per second). It also contains "kinds", an object for each kind of
exchange with "latency", "bytes", "curve" (pairs of bytes and seconds), "after_work" (such a curve
for exchanges after computation) and "issue" (seconds). See `bigtrain.machine.cluster.LinkSpec`.
"""

import os
import sys

# If Python runs a file by its path, sys.path begins with the file's folder, where Python does not
# find the package `bigtrain`.
if not __package__ and sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(__file__):
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist

from bigtrain.devices import Kind, synchronize
from bigtrain.machine.cluster import CommOp, MeasuredOp, SharedOp
from bigtrain.machine.collective_cost import sent_bytes
from bigtrain.machine.issue_rates import action_seconds, unit_seconds
from bigtrain.machine.rates import usable_cores
from bigtrain.ranks.connect import connect
from bigtrain.ranks.context import RunContext
from bigtrain.ranks.exit_status import run_guarded
from bigtrain.ranks.launch import start_ranks
from bigtrain.ranks.launcher_env import detect_rank_info
from bigtrain.ranks.shared_buffers import Meeting, SharedBuffers, add_up, can_share_memory
from bigtrain.versions.torch_versions import all_gather_single, reduce_scatter_single

LARGE = 2**25
"""Bytes of the largest exchange: the size of a bucket of gradients."""
CURVE = (2**14, 2**17, 2**20, 2**23, LARGE)
"""Bytes of the exchanges of a curve. Latency and bandwidth do not predict the seconds of medium
sizes."""
WORK = 1536, 1024, 1024
"""The sizes of a matrix product that is computed before an exchange, as a block is computed in
a step. The product replaces the content of caches, and afterwards ranks do not begin the exchange
at the same moment. On two cores an all-gather of a block's parameters takes twice as long after a
product as after another all-gather."""


def main(arguments: list[str]) -> int:
    """Start the ranks, or measure as one of them; return the exit status.

    Args:
        arguments: the arguments in the module's docstring.
    """
    if arguments[0] == "--start":
        return start_ranks(int(arguments[1]), arguments[2:], Path(__file__))
    answer, kind = arguments
    placement = detect_rank_info(os.environ)
    device = cast(Literal["cpu"] | Kind, kind)
    with connect(placement, device=device, setup_timeout=60, timeout=60) as context:
        shared_work = _shared_work_seconds(context)
        ops = [*get_args(CommOp), *(get_args(SharedOp) if _shares_memory(context) else ())]
        kinds = {kind: _rates(context, kind, shared_work) for kind in ops}
        if context.device.type == "cpu":
            _add_issue(context, kinds)
        if context.is_main:
            all_reduce = {key: kinds["all_reduce"][key] for key in ("latency", "bytes")}
            figures = {"ranks": context.world_size, **all_reduce, "kinds": kinds}
            Path(answer).write_text(json.dumps(figures), "utf-8")
    return 0


def _rates(context: RunContext, kind: MeasuredOp, shared_work: float | None) -> dict[str, Any]:
    """Measure one kind of exchange. Collective.

    Args:
        context: this rank's context.
        kind: the kind of exchange.
        shared_work: the result of `_shared_work_seconds`.
    """
    latency = _seconds(context, kind, context.world_size, warm=10, times=50)
    curve = []
    for nbytes in CURVE:
        # All ranks have equal shares of the numbers.
        numbers = nbytes // 4 // context.world_size * context.world_size
        curve.append((4 * numbers, _seconds(context, kind, numbers, warm=2, times=9)))
    after_work, work_seconds = [], []
    for nbytes, alone in ((4 * context.world_size, latency), *curve[1:]):
        seconds, computed = _seconds_after_work(context, kind, nbytes // 4, shared_work)
        after_work.append((nbytes, max(alone, seconds)))
        work_seconds.append(computed)
    nbytes, seconds = curve[-1]
    rate = sent_bytes(kind, nbytes, context.world_size) / seconds
    scales = context.device.type == "cpu" and shared_work is None  # where it was measured
    work = statistics.fmean(work_seconds) if scales else 0.0
    curves = {"curve": curve, "after_work": after_work, "work": work}
    return {"latency": latency, "bytes": rate, **curves, "issue": 0.0}


def _shares_memory(context: RunContext) -> bool:
    group = context.group()
    return context.device.type == "cpu" and group is not None and can_share_memory(group)


def _add_issue(context: RunContext, kinds: dict[MeasuredOp, dict[str, Any]]) -> None:
    """Measure `LinkSpec.issue` for sends, all-gathers and reduce-scatters. Collective."""
    send, gather, reduce = (kinds[kind] for kind in ("send", "all_gather", "reduce_scatter"))
    send["issue"] = action_seconds(context, send["latency"])
    gather["issue"], reduce["issue"] = unit_seconds(context, gather["latency"], reduce["latency"])
    for kind, like in (("shared_all_gather", gather), ("shared_reduce_scatter", reduce)):
        if kind in kinds:
            kinds[kind]["issue"] = like["issue"]


def _seconds(
    context: RunContext, kind: MeasuredOp, numbers: int, *, warm: int, times: int
) -> float:
    """Return the median seconds of an exchange of `numbers` floats. Collective."""
    taken = _times(context, kind, numbers, warm=warm, times=times, before=None)
    return statistics.median(exchange for _, exchange in taken) / _directions(kind)


def _seconds_after_work(
    context: RunContext, kind: MeasuredOp, numbers: int, shared_work: float | None
) -> tuple[float, float]:
    """Return the mean seconds of an exchange after computation, and of the latter. Collective.

    The former include the time that ranks wait for each other.
    """
    compute = _product(context.device)
    times = 12 if shared_work is None else 6  # rounds take longer on shared cores
    taken = _times(context, kind, numbers, warm=1, times=times, before=compute)
    if shared_work is not None:
        rounds = [work + exchange - shared_work for work, exchange in taken]
    else:
        rounds = [exchange for _, exchange in taken]
    # The mean and not the median, because the waiting varies and all of it counts. The slowest
    # round is an outlier.
    seconds = statistics.fmean(sorted(rounds)[:-1]) / _directions(kind)
    return seconds, statistics.fmean(work for work, _ in taken)


def _directions(kind: MeasuredOp) -> int:
    """Return the number of timed messages of an exchange: 2 for a send, which is sent back.

    The receiver of one message cannot know when the sender began.
    """
    return 2 if kind == "send" else 1


def _times(
    context: RunContext,
    kind: MeasuredOp,
    numbers: int,
    *,
    warm: int,
    times: int,
    before: Callable[[], None] | None,
) -> list[tuple[float, float]]:
    """Return for each round the seconds of the work and of the exchange after it. Collective."""
    exchange = make_exchange(context, kind, numbers)
    taken = []
    for _ in range(warm + times):
        start = time.perf_counter()
        if before is not None:
            before()
        began = time.perf_counter()
        exchange()
        synchronize(context.device)
        taken.append((began - start, time.perf_counter() - began))
    return taken[warm:]


def _product(device: torch.device) -> Callable[[], None]:
    """Return a function that multiplies two matrices of the sizes in `WORK`."""
    rows, inner, columns = WORK
    left, right = torch.ones(rows, inner, device=device), torch.ones(inner, columns, device=device)

    def compute() -> None:
        left @ right
        synchronize(device)

    return compute


def _shared_work_seconds(context: RunContext) -> float | None:
    """Return the seconds of all ranks' products if ranks share cores; None if they do not.

    A rank that waits leaves its core to other ranks. So a round takes the time of the products of
    all ranks, which the caller subtracts. Collective.
    """
    cores = usable_cores()
    if context.device.type != "cpu" or context.world_size <= cores:
        return None
    compute, taken = _product(context.device), [0.0]
    for _ in range(6):
        context.barrier()
        began = time.perf_counter()
        if context.rank < cores:  # one rank for each core; the others wait
            compute()
            taken.append(time.perf_counter() - began)
    context.barrier()
    return context.world_size / cores * statistics.median(taken[1:] or taken)


def make_exchange(context: RunContext, kind: MeasuredOp, numbers: int) -> Callable[[], None]:
    """Return a function that does one exchange among all ranks. Both are collective.

    Args:
        context: this rank's context.
        kind: the kind of exchange. "send" is a message from rank 0 to rank 1 and back.
        numbers: the fp32 numbers of the whole tensor, as it is before a reduce-scatter and after an
            all-gather; a multiple of the number of ranks for these two.

    Raises:
        ValueError: there is only one rank.
    """
    group = context.group()
    if group is None:
        raise ValueError("one rank cannot exchange: at least 2 are needed")
    share = torch.zeros(numbers // context.world_size, device=context.device)
    if kind in get_args(SharedOp):
        return _in_shared_memory(group, kind, numbers, share)
    whole = torch.zeros(numbers, device=context.device)

    def messages() -> None:
        if context.rank < 2:
            for sender in (0, 1):
                if context.rank == sender:
                    dist.send(whole, 1 - sender, group=group)
                else:
                    dist.recv(whole, sender, group=group)

    exchanges: dict[MeasuredOp, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: all_gather_single(whole, share, group=group),
        "reduce_scatter": lambda: reduce_scatter_single(share, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "reduce": lambda: dist.reduce(whole, 0, group=group),
        "send": messages,
    }
    return exchanges[kind]


def _in_shared_memory(
    group: dist.ProcessGroup, kind: MeasuredOp, numbers: int, share: torch.Tensor
) -> Callable[[], None]:
    """Return an exchange in shared memory, without the copies into its buffer; see `make_exchange`.

    fully_shard makes these copies in any exchange, so they are counted elsewhere.
    """
    ranks, rank, length = group.size(), group.rank(), share.numel()
    gathers = kind == "shared_all_gather"
    numels = [numbers] if gathers else [numbers] * ranks
    meeting = Meeting(group, spins=ranks <= usable_cores())
    buffers = SharedBuffers(meeting)

    def exchange() -> None:
        own, inputs = buffers.take(numels, 0 if gathers else rank, torch.float32)
        own[:1] = 0.0
        meeting.wait()
        if not gathers:
            parts = [each[rank * length : (rank + 1) * length] for each in inputs]
            add_up(parts, share, mean=False)

    return exchange


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(sys.argv[1:])))
