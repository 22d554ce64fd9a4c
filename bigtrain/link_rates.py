"""How fast the ranks of this machine talk: the time of a small and of a large all-reduce.

`bigtrain.rates` runs it in a process of its own, which starts the ranks; each rank is this file
again:

    python bigtrain/link_rates.py --start N ANSWER DEVICE
    python bigtrain/link_rates.py ANSWER DEVICE          as a rank

ANSWER is a file that rank 0 writes: {"ranks": 2, "latency": seconds, "bytes": per second}.
"""

import os
import sys

# As in train.py: a file run by its path has its own folder on sys.path, not the package's.
if not __package__ and sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(__file__):
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import json
import statistics
import time
from pathlib import Path
from typing import Literal

import torch

from bigtrain.distributed import RunContext, connect
from bigtrain.environment import detect
from bigtrain.failures import run_guarded
from bigtrain.launch import start_ranks

LARGE = 2**25
"""Bytes of the large message: as a bucket of gradients."""


def main(arguments: list[str]) -> int:
    """Start the ranks, or be one of them; returns the exit status."""
    if arguments[0] == "--start":
        return start_ranks(int(arguments[1]), arguments[2:], Path(__file__))
    answer, kind = arguments
    device: Literal["cpu", "cuda"] = "cuda" if kind == "cuda" else "cpu"
    placement = detect(os.environ)
    with connect(placement, device=device, setup_timeout=60, timeout=60) as context:
        latency = _seconds(context, torch.zeros(1, device=context.device), warm=20, times=100)
        large = torch.zeros(LARGE // 4, device=context.device)
        seconds = _seconds(context, large, warm=2, times=7)
        if context.is_main:
            ranks = context.world_size
            sent = 2 * (ranks - 1) / ranks * LARGE
            found = {"ranks": ranks, "latency": latency, "bytes": sent / seconds}
            Path(answer).write_text(json.dumps(found), "utf-8")
    return 0


def _seconds(context: RunContext, tensor: torch.Tensor, *, warm: int, times: int) -> float:
    """The median time of an all-reduce; collective."""
    group = context.group()
    if group is None:
        raise ValueError("one rank has nobody to talk to")
    taken = []
    for _ in range(warm + times):
        began = time.perf_counter()
        torch.distributed.all_reduce(tensor, group=group)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[warm:])


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(sys.argv[1:])))
