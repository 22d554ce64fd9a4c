"""The seconds of an exchange between ranks, from the latency and bandwidth of the links.

The model is that of Thakur et al. 2005 (Optimization of Collective Communication Operations in
MPICH): a message of S bytes takes alpha + S/b seconds, where alpha is the latency, and b is the
bytes per second that a device sends while it receives at the same rate. In a ring of n ranks an
all-gather or a reduce-scatter of S bytes takes n-1 messages of S/n bytes. An all-reduce is a
reduce-scatter followed by an all-gather. Patarasu and Yuan 2009 (Bandwidth optimal all-reduce
algorithms for clusters of workstations) show that each rank sends at least 2 (n-1)/n S bytes in any
all-reduce.

A group over several nodes exchanges in one ring through all ranks, as NCCL does (NVIDIA/nccl,
src/graph/tuning.cc). Of its n-1 steps, m-1 cross from one of the m nodes to the next, and the
others stay inside a node. So an all-gather among 1,536 ranks on 192 nodes waits for 1,535
latencies, however few bytes it gathers. The bytes flow through all steps at once. So their rate is
the lower one of two: that of the link inside a node, and that of all links from one node to the
next. NCCL lays as many rings as a node has network cards, so the devices of a node share its
traffic to other nodes equally.

Only an all-reduce between GPUs may also go up and down a tree, which has few latencies: those of a
chain inside each node, and the logarithm of the number of nodes between them. NCCL takes the faster
of the two.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bigtrain.errors import ConfigError
from bigtrain.machine.cluster import Cluster, Link, MeasuredOp

TREE_SHARE = 0.92
"""The share of a ring's rate that a tree reaches. NCCL assumes it when it chooses between the two
(tuning.cc)."""


@dataclass(frozen=True)
class NodeSpread:
    """The distribution of a group's ranks over nodes."""

    ranks: int
    """The number of ranks of the group."""

    nodes: int
    """The number of nodes with ranks of the group."""
    most: int
    """The number of ranks on the node with the most ranks of the group."""
    least: int
    """The number of ranks on the node with the fewest ranks of the group. This many ranks send
    between nodes at once."""


def spread_over_nodes(ranks: int, stride: int, devices: int) -> NodeSpread:
    """Return how the ranks of a mesh axis' first group are distributed over nodes.

    The ranks of this group are 0, stride, 2 stride, ... The axes of a mesh are (dp, pp, tp), of
    which the last changes fastest, and nodes are filled in the order of ranks. So the stride is 1
    for a tp group, tp for a pp group, and pp * tp for a dp group. The other groups of an axis have
    the same distribution if `ranks * stride` divides the devices of a node, or is a multiple of
    them.

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
        return NodeSpread(ranks, ranks, 1, 1)
    counts = Counter(rank * stride // devices for rank in range(ranks)).values()
    return NodeSpread(ranks, len(counts), max(counts), min(counts))


def collective_seconds(
    kind: MeasuredOp,
    nbytes: float,
    ranks: int,
    stride: int,
    cluster: Cluster,
    calls: int = 1,
    *,
    after_work: bool = False,
    work: float | None = None,
) -> float:
    """Return the seconds of exchanges of one kind on idle links; 0 in a group of one rank.

    An exchange of S bytes among n ranks of one node takes these seconds, where alpha is the latency
    and b the rate of the link:

    * all_gather, reduce_scatter: (n-1) alpha + (n-1)/n S/b
    * all_reduce: 2 (n-1) alpha + 2 (n-1)/n S/b
    * broadcast, reduce: (n-1) alpha + S/b, from rank to rank in a chain, in small pieces
    * send: alpha + S/b, over the slowest link between neighbours of the group

    On m nodes, where each node has at least k of the ranks, the (n-1) latencies are (n-m) of the
    link inside a node and (m-1) of the link between nodes. The rate is the lower of b and k times
    that of the link between nodes. Between GPUs an all-reduce takes a tree if that is shorter; see
    `_by_tree`.

    If the cluster has a measured curve for this kind of exchange, the curve replaces the formula.

    Args:
        kind: the kind of exchange.
        nbytes: the bytes of the whole tensor, as it is before a reduce-scatter and after an
            all-gather, summed over all calls.
        ranks: the number of ranks of the group.
        stride: the distance from one rank of the group to the next; see `spread_over_nodes`.
        cluster: the cluster, with the number of devices of a node and the links.
        calls: the number of exchanges; each adds the latency.
        after_work: whether ranks compute between two exchanges; see `LinkSpec.after_work`.
        work: the seconds that a rank computes between two exchanges; None for as many as in the
            measurement. The time that ranks wait for each other grows as the square root of them
            (`benchmarks/waiting.py`), as it does if delays are independent.

    Raises:
        ConfigError: the group spans several nodes, and the cluster has no link between nodes.
        ValueError: `nbytes` or `calls` is below 0.
    """
    if nbytes < 0 or calls < 0:
        raise ValueError(f"nbytes={nbytes} calls={calls}: neither is below 0")
    node_spread = spread_over_nodes(ranks, stride, cluster.node.devices)
    if ranks == 1 or calls == 0:
        return 0.0
    if node_spread.nodes == 1:
        link = cluster.inside
        return _on_one(kind, link, ranks, nbytes, calls, after_work=after_work, work=work)
    if cluster.between is None:
        raise ConfigError(
            f"cluster {cluster.name} is one node of {cluster.node.devices} devices, and {ranks} "
            f"ranks with a distance of {stride} need {node_spread.nodes} nodes. Add a link to its "
            "file: between: {latency: 1e-5, bandwidth: 50e9}, or plan fewer ranks."
        )
    if kind == "send":
        return _on_one("send", cluster.between, 2, nbytes, calls)
    near, far = cluster.inside.of(kind), cluster.between.of(kind)
    # NCCL has trees; gloo's all-reduce is always a ring.
    trees = kind == "all_reduce" and cluster.device.kind == "cuda"
    return _over_nodes(kind, near, far, node_spread, nbytes, calls, trees=trees)


def _over_nodes(
    kind: MeasuredOp,
    near: Link,
    far: Link,
    node_spread: NodeSpread,
    nbytes: float,
    calls: int,
    *,
    trees: bool,
) -> float:
    """Return the seconds of a ring, a chain or a tree through the ranks of several nodes.

    The node with the fewest ranks has the fewest links to other nodes, so it limits the rate.

    Args:
        kind: the kind of exchange, but not `send`.
        near: the link inside a node.
        far: the link between nodes.
        node_spread: the distribution of the ranks over nodes.
        nbytes: see `collective_seconds`.
        calls: see `collective_seconds`.
        trees: whether an all-reduce takes a tree if that is faster.
    """
    rate = node_spread.least * far.rate
    if node_spread.most > 1:
        rate = min(near.rate, rate)
    ranks, nodes = node_spread.ranks, node_spread.nodes
    latencies = calls * ((ranks - nodes) * near.latency + (nodes - 1) * far.latency)
    if kind in ("broadcast", "reduce"):
        return latencies + nbytes / rate
    half = latencies + (ranks - 1) / ranks * nbytes / rate
    if kind != "all_reduce":
        return half
    ring = 2 * half
    return min(ring, _by_tree(near, far, node_spread, nbytes / rate, calls)) if trees else ring


def _by_tree(near: Link, far: Link, node_spread: NodeSpread, transfer: float, calls: int) -> float:
    """Return the seconds of an all-reduce up and down a tree of nodes.

    Inside a node the tree is a chain. NCCL's trees reach `TREE_SHARE` of a ring's rate. `transfer`
    is the seconds in which all bytes flow once, at a ring's rate.
    """
    depth = math.floor(math.log2(node_spread.nodes))
    latencies = (node_spread.most - 1) * near.latency + depth * far.latency
    return 2 * (calls * latencies + transfer / TREE_SHARE)


def _on_one(
    kind: MeasuredOp,
    link: Link,
    ranks: int,
    nbytes: float,
    calls: int,
    *,
    after_work: bool = False,
    work: float | None = None,
) -> float:
    """Return the seconds of a ring or a chain over equal links."""
    if ranks == 1:
        return 0.0
    seconds = _by_formula(kind, link.of(kind), ranks, nbytes, calls)
    spec = link.kinds.get(kind)
    if spec is None or not spec.curve:
        return seconds
    message = nbytes / calls
    known = _by_formula(kind, link.of(kind), spec.ranks, message, 1)
    measured = _on_curve(spec.curve, message, known)
    if after_work and spec.after_work:
        waiting = max(0.0, _on_curve(spec.after_work, message, known) - measured)
        scaled = math.sqrt(work / spec.work) if work is not None and spec.work else 1.0
        measured += waiting * scaled
    return seconds * measured / known


def _by_formula(kind: MeasuredOp, link: Link, ranks: int, nbytes: float, calls: int) -> float:
    alpha, transfer = calls * link.latency, nbytes / link.rate
    if kind == "send":
        return alpha + transfer
    if kind in ("broadcast", "reduce"):
        return (ranks - 1) * alpha + transfer
    half = (ranks - 1) * alpha + (ranks - 1) / ranks * transfer
    return 2 * half if kind == "all_reduce" else half


def _on_curve(curve: Sequence[tuple[float, float]], nbytes: float, otherwise: float) -> float:
    """Interpolate the seconds between measured sizes; return `otherwise` outside of the curve."""
    for (low, before), (high, after) in pairwise(curve):
        if low <= nbytes <= high:
            return before + (after - before) * (nbytes - low) / (high - low)
    return otherwise


def sent_bytes(kind: MeasuredOp, nbytes: float, ranks: int) -> float:
    """Return the bytes that the busiest rank of a ring or a chain sends.

    Papers on ZeRO call this the communication volume.

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
