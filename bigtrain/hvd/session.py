"""The state that `hvd.init` opens: the ranks of this run, and the node of each rank."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bigtrain.devices import nccl_version
from bigtrain.errors import LaunchError
from bigtrain.ranks.context import RunContext

PATIENCE_S = 1800.0
"""The timeout of an exchange in seconds. Ranks may have to wait for a rank that evaluates or writes
a checkpoint."""


@dataclass(frozen=True)
class NodePlace:
    """The node of a rank, and the rank's number in it."""

    node: int
    """The index of the node. Nodes are ordered by their first ranks."""
    local_rank: int
    """The number of the rank among those of its node, from 0."""


class Session:
    """The connection of this process. Horovod's interface has one for each process."""

    def __init__(self) -> None:
        self.context: RunContext | None = None
        self.closing = ExitStack()
        self.places: list[NodePlace] = []

    def opened(self) -> RunContext:
        """Return the context of the connected ranks.

        Raises:
            LaunchError: `init` was not called.
        """
        if self.context is None:
            raise LaunchError("hvd: the ranks are not connected yet. Call hvd.init() first.")
        return self.context

    def open(self, context: RunContext) -> None:
        """Use ranks that are connected already. Collective.

        Args:
            context: the context of this process.
        """
        self.context = context
        everyone = context.all_gather_objects((socket.gethostname(), context.local_rank))
        self.places = _node_places(everyone)


session = Session()


def _node_places(everyone: list[tuple[str, int]]) -> list[NodePlace]:
    """Return the node and local rank of each rank.

    A host that has several ranks with the same local rank counts as several nodes.

    Args:
        everyone: the host name and the local rank of each rank.
    """
    nodes: dict[tuple[str, int], int] = {}
    seen: dict[tuple[str, int], int] = {}
    places = []
    for host, local in everyone:
        node_number = seen[host, local] = seen.get((host, local), -1) + 1
        places.append(NodePlace(nodes.setdefault((host, node_number), len(nodes)), local))
    return places


def is_initialized() -> bool:
    """Whether `init` has connected the ranks."""
    return session.context is not None


def rank() -> int:
    """Return the number of this process among all processes, from 0.

    Raises:
        LaunchError: `init` was not called.
    """
    return session.opened().rank


def local_rank() -> int:
    """Return the number of this process among the processes of its node, from 0.

    Raises:
        LaunchError: `init` was not called.
    """
    return session.opened().local_rank


def size() -> int:
    """Return the number of processes.

    Raises:
        LaunchError: `init` was not called.
    """
    return session.opened().world_size


def local_size() -> int:
    """Return the number of processes on this node.

    Raises:
        LaunchError: `init` was not called.
    """
    return session.opened().local_world_size


def cross_rank() -> int:
    """Return the number, from 0, of this process among the processes with the same local rank.

    A node has at most one process with a given local rank. The processes are numbered in the order
    of their nodes.

    Raises:
        LaunchError: `init` was not called.
    """
    return _cross_ranks().index(rank())


def cross_size() -> int:
    """Return the number of nodes that have a process with the local rank of this process.

    Raises:
        LaunchError: `init` was not called.
    """
    return len(_cross_ranks())


def _cross_ranks() -> list[int]:
    mine = local_rank()
    ranks = [n for n, placement in enumerate(session.places) if placement.local_rank == mine]
    return sorted(ranks, key=lambda n: session.places[n].node)


def is_homogeneous() -> bool:
    """Whether every node has the same number of processes.

    Raises:
        LaunchError: `init` was not called.
    """
    session.opened()
    nodes = [placement.node for placement in session.places]
    return len({nodes.count(node) for node in nodes}) <= 1


def mpi_built() -> bool:
    """Return False: mpirun may start the ranks, but their exchanges do not use MPI."""
    return False


def mpi_enabled() -> bool:
    """Return False; see `mpi_built`."""
    return False


def mpi_threads_supported() -> bool:
    """Return False: MPI is not initialised here, so a script cannot use it through mpi4py."""
    return False


def gloo_built() -> bool:
    """Whether this torch has gloo, which exchanges CPU tensors."""
    return bool(dist.is_gloo_available())


def gloo_enabled() -> bool:
    """Return the result of `gloo_built`."""
    return gloo_built()


def nccl_built() -> int:
    """Return torch's NCCL version as one number, such as 22105 for 2.21.5; 0 without NCCL."""
    major, minor, patch = nccl_version() if dist.is_nccl_available() else (0, 0, 0)
    return major * 10_000 + minor * 100 + patch


def ddl_built() -> bool:
    """Return False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """Return False: Intel's oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Whether this torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this torch was built for ROCm."""
    return torch.version.hip is not None
