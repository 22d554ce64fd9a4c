"""The seconds of an exchange between ranks, by latency and bandwidth of the links.

The model is that of Thakur et al. 2005 (Optimization of Collective Communication Operations in
MPICH): a message of S bytes takes alpha + S/b, where b is the bytes per second that a device sends
while it receives at the same rate. In a ring of n ranks an all-gather or a reduce-scatter of S
bytes takes n-1 such steps with S/n bytes in each; an all-reduce is a reduce-scatter followed by an
all-gather. Patarasu and Yuan 2009 (Bandwidth optimal all-reduce algorithms for clusters of
workstations) show that no all-reduce sends fewer bytes than the 2 (n-1)/n S of each rank.

An all-reduce in a group over several nodes has three stages, so that each device of a node sends
one part over its link: a reduce-scatter inside the nodes, an all-reduce between them, an all-gather
inside. Other exchanges have the stages that they need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bigtrain.errors import ConfigError
from bigtrain.machine.cluster import Cluster, CommOp, Link


@dataclass(frozen=True)
class NodeSpread:
    """The distribution of a group's ranks over nodes."""

    nodes: int
    """The number of nodes with ranks of the group."""
    most: int
    """Ranks on the node with the most of them."""
    least: int
    """Ranks on the node with the fewest: this many send between the nodes at once."""


def spread_over_nodes(ranks: int, stride: int, devices: int) -> NodeSpread:
    """Return the distribution of an axis' first group, whose ranks are 0, stride, 2 stride, ...

    The axes of a mesh are (dp, pp, tp), the last the fastest, and nodes are filled in the order of
    ranks: a tp group has stride 1, a pp group tp, a dp group pp * tp. The other groups of an axis
    have the same distribution if `ranks * stride` divides the devices of a node, or is a multiple
    of them.

    Args:
        ranks: the number of ranks of the group.
        stride: the distance from one rank of the group to the next.
        devices: the number of devices of a node.

    Raises:
        ValueError: a number is below 1.
    """
    if min(ranks, stride, devices) < 1:
        raise ValueError(f"ranks={ranks} stride={stride} devices={devices}: each is 1 or more")
    if stride >= devices:
        return NodeSpread(ranks, 1, 1)
    counts = Counter(rank * stride // devices for rank in range(ranks)).values()
    return NodeSpread(len(counts), max(counts), min(counts))


def collective_seconds(
    kind: CommOp,
    nbytes: float,
    ranks: int,
    stride: int,
    cluster: Cluster,
    calls: int = 1,
    *,
    after_work: bool = False,
) -> float:
    """Return the seconds of an exchange on idle links; 0 in a group of one.

    With S bytes and n ranks on one node, alpha the latency and b the rate of the link:

    * all_gather, reduce_scatter: (n-1) alpha + (n-1)/n S/b
    * all_reduce: 2 (n-1) alpha + 2 (n-1)/n S/b
    * broadcast, reduce: (n-1) alpha + S/b, from rank to rank in a chain, in small pieces
    * send: alpha + S/b, over the slowest link between neighbours of the group

    On several nodes, k ranks on each and m nodes, the stages of the module's docstring: between
    the nodes there are rings of m, of which each carries S/k, and inside rings of k with all of S.

    Args:
        kind: the kind of exchange.
        nbytes: S, summed over all calls: the whole tensor, as it is before a reduce-scatter and
            after an all-gather.
        ranks: the number of ranks of the group.
        stride: the distance from one rank of the group to the next; see `spread_over_nodes`.
        cluster: has the devices of a node, and the links.
        calls: the number of messages; each adds the latency.
        after_work: whether ranks compute between two messages; see `LinkSpec.after_work`.

    Raises:
        ConfigError: the group spans nodes, and the cluster has no link between them.
        ValueError: bytes or calls are below 0.
    """
    if nbytes < 0 or calls < 0:
        raise ValueError(f"nbytes={nbytes} calls={calls}: neither is below 0")
    node_spread = spread_over_nodes(ranks, stride, cluster.node.devices)
    if ranks == 1 or calls == 0:
        return 0.0
    if node_spread.nodes == 1:
        return _on_one(kind, cluster.inside, ranks, nbytes, calls, after_work=after_work)
    if cluster.between is None:
        raise ConfigError(
            f"cluster {cluster.name} is one node of {cluster.node.devices} devices, and {ranks} "
            f"ranks with a distance of {stride} need {node_spread.nodes} nodes. Add a link to its "
            "file: between: {latency: 1e-5, bandwidth: 50e9}, or plan fewer ranks."
        )
    return _over_nodes(kind, cluster.inside, cluster.between, node_spread, nbytes, calls)


def _over_nodes(
    kind: CommOp, inside: Link, between: Link, node_spread: NodeSpread, nbytes: float, calls: int
) -> float:
    """The sum of the stages.

    The node with most ranks has the slowest ring, the one with fewest the fewest links.
    """
    if kind == "send":
        return _on_one("send", between, 2, nbytes, calls)
    across = _on_one(kind, between, node_spread.nodes, nbytes / node_spread.least, calls)
    half = _on_one("all_gather", inside, node_spread.most, nbytes, calls)
    # A reduce-scatter takes as long as an all-gather; an exchange needs one of the two, or both.
    return across + (half if kind in ("all_gather", "reduce_scatter") else 2 * half)


def _on_one(
    kind: CommOp, link: Link, ranks: int, nbytes: float, calls: int, *, after_work: bool = False
) -> float:
    """The seconds of a ring or a chain over links of one kind."""
    if ranks == 1:
        return 0.0
    seconds = _by_formula(kind, link.of(kind), ranks, nbytes, calls)
    spec = link.kinds.get(kind)
    curve = [] if spec is None else (after_work and spec.after_work) or spec.curve
    if spec is None or not curve:
        return seconds
    message = nbytes / calls
    known = _by_formula(kind, link.of(kind), spec.ranks, message, 1)
    return seconds * _on_curve(curve, message, known) / known


def _by_formula(kind: CommOp, link: Link, ranks: int, nbytes: float, calls: int) -> float:
    alpha, transfer = calls * link.latency, nbytes / link.rate
    if kind == "send":
        return alpha + transfer
    if kind in ("broadcast", "reduce"):
        return (ranks - 1) * alpha + transfer
    half = (ranks - 1) * alpha + (ranks - 1) / ranks * transfer
    return 2 * half if kind == "all_reduce" else half


def _on_curve(curve: Sequence[tuple[float, float]], nbytes: float, otherwise: float) -> float:
    """The seconds between measured sizes, interpolated; outside of them `otherwise`."""
    for (low, before), (high, after) in pairwise(curve):
        if low <= nbytes <= high:
            return before + (after - before) * (nbytes - low) / (high - low)
    return otherwise


def sent_bytes(kind: CommOp, nbytes: float, ranks: int) -> float:
    """Return the bytes that the busiest rank of a ring sends: the volume in papers on ZeRO.

    Args:
        kind: the kind of exchange.
        nbytes: the bytes of the whole tensor; see `collective_seconds`.
        ranks: the number of ranks of the group.
    """
    if ranks == 1:
        return 0.0
    if kind in ("broadcast", "reduce", "send"):
        return nbytes
    share = nbytes * (ranks - 1) / ranks
    return 2 * share if kind == "all_reduce" else share
