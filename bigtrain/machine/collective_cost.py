"""The seconds of an exchange between ranks, from the latency and bandwidth of the links.

The model is that of Thakur et al. 2005 (Optimization of Collective Communication Operations in
MPICH): a message of S bytes takes alpha + S/b seconds, where alpha is the latency, and b is the
bytes per second that a device sends while it receives at the same rate. In a ring of n ranks an
all-gather or a reduce-scatter of S bytes takes n-1 messages of S/n bytes. An all-reduce is a
reduce-scatter followed by an all-gather. Patarasu and Yuan 2009 (Bandwidth optimal all-reduce
algorithms for clusters of workstations) show that each rank sends at least 2 (n-1)/n S bytes in any
all-reduce.

In a group over several nodes an all-reduce has three stages: a reduce-scatter inside each node, an
all-reduce between the nodes, and an all-gather inside each node. So each device of a node sends one
part over its link. Any other exchange has only the stages that it needs.
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
    """Return the seconds of exchanges of one kind on idle links; 0 in a group of one rank.

    An exchange of S bytes among n ranks of one node takes these seconds, where alpha is the latency
    and b the rate of the link:

    * all_gather, reduce_scatter: (n-1) alpha + (n-1)/n S/b
    * all_reduce: 2 (n-1) alpha + 2 (n-1)/n S/b
    * broadcast, reduce: (n-1) alpha + S/b, from rank to rank in a chain, in small pieces
    * send: alpha + S/b, over the slowest link between neighbours of the group

    On m nodes with k ranks each, an exchange has the stages in the module's docstring. Between the
    nodes there are k rings of m ranks, each for S/k bytes. Inside a node there is a ring of k ranks
    for all S bytes.

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
    """Return the sum of the seconds of all stages.

    The ring inside is slowest on the node with the most ranks. The node with the fewest ranks has
    the fewest links to other nodes.
    """
    if kind == "send":
        return _on_one("send", between, 2, nbytes, calls)
    across = _on_one(kind, between, node_spread.nodes, nbytes / node_spread.least, calls)
    half = _on_one("all_gather", inside, node_spread.most, nbytes, calls)
    # An exchange needs an all-gather, or a reduce-scatter, or both; the two take equally long.
    return across + (half if kind in ("all_gather", "reduce_scatter") else 2 * half)


def _on_one(
    kind: CommOp, link: Link, ranks: int, nbytes: float, calls: int, *, after_work: bool = False
) -> float:
    """Return the seconds of a ring or a chain over equal links."""
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
    """Interpolate the seconds between measured sizes; return `otherwise` outside of the curve."""
    for (low, before), (high, after) in pairwise(curve):
        if low <= nbytes <= high:
            return before + (after - before) * (nbytes - low) / (high - low)
    return otherwise


def sent_bytes(kind: CommOp, nbytes: float, ranks: int) -> float:
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
