"""The number of CPU threads of each rank of a node."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator

import torch

from bigtrain.ranks.launcher_env import RankInfo
from bigtrain.ranks.rendezvous import Rendezvous


@contextlib.contextmanager
def share_cores(placement: RankInfo, meeting: Rendezvous) -> Iterator[None]:
    """Give each rank its share of the node's cores, unless OMP_NUM_THREADS is set.

    mpiexec and srun may have bound each rank to separate cores or all to the same ones: a core that
    n ranks may use counts as 1/n for each.
    """
    ranks = placement.local_world_size
    if "OMP_NUM_THREADS" in os.environ or ranks == 1 or not hasattr(os, "sched_getaffinity"):
        yield
        return
    prefix = f"cores/{os.uname().nodename}"
    mine = os.sched_getaffinity(0)
    meeting.store.set(f"{prefix}/{placement.local_rank}", ",".join(map(str, sorted(mine))))
    users = dict.fromkeys(mine, 0)
    for other in range(ranks):
        for core in meeting.store.get(f"{prefix}/{other}").decode().split(","):
            if int(core) in users:
                users[int(core)] += 1
    before = torch.get_num_threads()
    torch.set_num_threads(thread_share(list(users.values())))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def thread_share(users: list[int]) -> int:
    """Return the threads for one rank.

    Args:
        users: for each core that this rank may use, the ranks of the node that may use it.
    """
    # The small addend is for rounding: three thirds are 0.999... in binary.
    return max(1, math.floor(sum(1 / number for number in users) + 1e-9))
