"""The seconds of a collective: one ring inside a node or through several, and trees."""

from __future__ import annotations

import pytest

from bigtrain.errors import ConfigError
from bigtrain.machine.cluster import Cluster, load_cluster
from bigtrain.machine.collective_cost import (
    NodeSpread,
    collective_seconds,
    sent_bytes,
    spread_over_nodes,
)

ALPHA, RATE = 1e-6, 1e11
FAR_ALPHA, FAR_RATE = 1e-5, 1e10
S = 1 << 30


def cluster(devices: int = 8, *, nodes: bool = True) -> Cluster:
    """A cluster whose links reach their full stated rates."""
    values = load_cluster("a100-node").model_dump()
    values["node"]["devices"] = devices
    values["inside"] = {"latency": ALPHA, "bandwidth": RATE, "efficiency": 1.0}
    values["between"] = {"latency": FAR_ALPHA, "bandwidth": FAR_RATE, "efficiency": 1.0}
    if not nodes:
        values["between"] = None
    return Cluster.model_validate(values)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_ring_on_one_node(ranks):
    half = (ranks - 1) * ALPHA + (ranks - 1) / ranks * S / RATE
    assert collective_seconds("all_gather", S, ranks, 1, cluster()) == pytest.approx(half)
    assert collective_seconds("reduce_scatter", S, ranks, 1, cluster()) == pytest.approx(half)
    assert collective_seconds("all_reduce", S, ranks, 1, cluster()) == pytest.approx(2 * half)
    chain = (ranks - 1) * ALPHA + S / RATE
    assert collective_seconds("broadcast", S, ranks, 1, cluster()) == pytest.approx(chain)
    assert collective_seconds("reduce", S, ranks, 1, cluster()) == pytest.approx(chain)
    assert collective_seconds("send", S, ranks, 1, cluster()) == pytest.approx(ALPHA + S / RATE)


def test_every_message_has_its_latency_and_the_bytes_are_those_of_all():
    single, many = (collective_seconds("all_reduce", S, 4, 1, cluster(), calls=n) for n in (1, 10))
    assert many - single == pytest.approx(9 * 2 * 3 * ALPHA)
    assert collective_seconds("all_reduce", 0, 4, 1, cluster()) == pytest.approx(6 * ALPHA)
    assert collective_seconds("all_reduce", 0, 4, 1, cluster(), calls=0) == 0


def test_one_rank_has_nobody_to_talk_to():
    for kind in ("all_reduce", "all_gather", "broadcast", "send"):
        assert collective_seconds(kind, S, 1, 1, cluster()) == 0
        assert collective_seconds(kind, S, 1, 64, cluster(nodes=False)) == 0


@pytest.mark.parametrize(
    ("ranks", "stride", "devices", "found"),
    [
        (8, 1, 8, NodeSpread(8, 1, 8, 8)),
        (4, 2, 8, NodeSpread(4, 1, 4, 4)),
        (16, 1, 8, NodeSpread(16, 2, 8, 8)),
        (8, 2, 8, NodeSpread(8, 2, 4, 4)),
        (4, 8, 8, NodeSpread(4, 4, 1, 1)),
        (2, 16, 8, NodeSpread(2, 2, 1, 1)),
        (12, 1, 8, NodeSpread(12, 2, 8, 4)),
        (4, 3, 8, NodeSpread(4, 2, 3, 1)),
        (1, 1, 8, NodeSpread(1, 1, 1, 1)),
    ],
)
def test_how_a_group_lies_on_nodes(ranks, stride, devices, found):
    assert spread_over_nodes(ranks, stride, devices) == found


def test_a_ring_over_nodes_waits_for_every_rank_and_flows_at_the_slowest_links():
    k, m = 8, 4
    n = k * m
    latencies = (n - m) * ALPHA + (m - 1) * FAR_ALPHA
    rate = min(RATE, k * FAR_RATE)
    half = latencies + (n - 1) / n * S / rate
    arguments = (S, n, 1, cluster())
    assert collective_seconds("all_gather", *arguments) == pytest.approx(half)
    assert collective_seconds("reduce_scatter", *arguments) == pytest.approx(half)
    assert collective_seconds("all_reduce", *arguments) == pytest.approx(2 * half)
    chain = latencies + S / rate
    assert collective_seconds("broadcast", *arguments) == pytest.approx(chain)
    assert collective_seconds("send", *arguments) == pytest.approx(FAR_ALPHA + S / FAR_RATE)


def test_a_small_all_reduce_goes_up_and_down_a_tree():
    tree = 2 * (7 * ALPHA + 6 * FAR_ALPHA)  # 64 nodes
    assert collective_seconds("all_reduce", 0, 8 * 64, 1, cluster()) == pytest.approx(tree)
    ring = 2 * collective_seconds("all_gather", 0, 8 * 64, 1, cluster())
    assert ring > 10 * tree


def test_more_ranks_gather_the_same_bytes_in_more_time():
    """The bytes take equally long, because the ranks of a node share its links; latencies grow."""
    seconds = [collective_seconds("all_gather", S, n, 1, cluster()) for n in (64, 512, 1536)]
    assert seconds == sorted(seconds)
    grown = 1472 / 8 * (7 * ALPHA + FAR_ALPHA) + (1 / 64 - 1 / 1536) * S / (8 * FAR_RATE)
    assert seconds[2] - seconds[0] == pytest.approx(grown)


def test_a_group_with_one_rank_on_each_node_has_the_link_between_them_alone():
    ring = 3 * FAR_ALPHA + 3 / 4 * S / FAR_RATE
    assert collective_seconds("all_gather", S, 4, 8, cluster()) == pytest.approx(ring)
    assert collective_seconds("all_reduce", S, 4, 8, cluster()) == pytest.approx(2 * ring)


def test_a_neighbour_is_over_the_link_that_leads_to_it():
    assert collective_seconds("send", S, 2, 4, cluster()) == pytest.approx(ALPHA + S / RATE)
    assert collective_seconds("send", S, 2, 8, cluster()) == pytest.approx(FAR_ALPHA + S / FAR_RATE)
    assert collective_seconds("send", S, 4, 4, cluster()) == pytest.approx(FAR_ALPHA + S / FAR_RATE)


def test_more_nodes_than_there_are_links_for_are_refused():
    one_node = cluster(nodes=False)
    assert collective_seconds("all_reduce", S, 8, 1, one_node) > 0
    with pytest.raises(ConfigError, match="is one node of 8 devices, and 8 ranks.*need 2 nodes"):
        collective_seconds("all_reduce", S, 8, 2, one_node)


@pytest.mark.parametrize("given", [(S, 0, 1), (S, 2, 0), (-1, 2, 1)])
def test_what_makes_no_sense_is_an_error(given):
    with pytest.raises(ValueError, match="1 or more|below 0"):
        collective_seconds("all_reduce", *given, cluster())


def test_a_link_that_reaches_a_share_takes_longer():
    values = cluster().model_dump()
    values["inside"]["efficiency"] = 0.5
    slow = Cluster.model_validate(values)
    assert collective_seconds("send", S, 2, 1, slow) == pytest.approx(ALPHA + 2 * S / RATE)


def test_the_volume_of_a_ring():
    assert sent_bytes("all_reduce", 8, 4) == 12
    assert sent_bytes("all_gather", 8, 4) == sent_bytes("reduce_scatter", 8, 4) == 6
    assert sent_bytes("broadcast", 8, 4) == 8
    assert sent_bytes("all_reduce", 8, 1) == 0


def test_measured_figures_give_the_measured_times():
    """cpu.yaml: an all-reduce of one number took 2.3e-4 s, and a large one 1.3 GB/s per rank."""
    cpu = load_cluster("cpu")
    assert collective_seconds("all_reduce", 4, 2, 1, cpu) == pytest.approx(2.3e-4, rel=0.1)
    assert S / collective_seconds("all_reduce", S, 2, 1, cpu) == pytest.approx(1.3e9, rel=0.01)


def test_a_measured_curve_says_what_lies_between_latency_and_bandwidth():
    values = cluster().model_dump()
    values["inside"]["kinds"] = {
        "all_reduce": {
            "latency": ALPHA,
            "bandwidth": RATE,
            "ranks": 4,
            "curve": [(1e4, 5e-4), (1e6, 1e-3)],
            "after_work": [(1e4, 2e-3), (1e6, 4e-3)],
        }
    }
    measured = Cluster.model_validate(values)

    def waiting(*, spec_work: float, work: float | None) -> float:
        values["inside"]["kinds"]["all_reduce"]["work"] = spec_work
        after = Cluster.model_validate(values)
        return collective_seconds("all_reduce", 1e4, 4, 1, after, after_work=True, work=work)

    def seconds(nbytes: float, ranks: int = 4, calls: int = 1, *, work: bool = False) -> float:
        arguments = ("all_reduce", nbytes, ranks, 1, measured, calls)
        return collective_seconds(*arguments, after_work=work)

    assert seconds(1e4) == pytest.approx(5e-4)
    assert seconds(5.05e5) == pytest.approx(7.5e-4)
    assert seconds(3e4, calls=3) == pytest.approx(3 * 5e-4)
    # Ranks that have computed before each collective wait for one another.
    assert seconds(3e4, calls=3, work=True) == pytest.approx(3 * 2e-3)
    assert waiting(spec_work=0.01, work=None) == pytest.approx(2e-3)
    # They wait for one another as the square root of what they compute, if that was measured.
    assert waiting(spec_work=0.01, work=0.04) == pytest.approx(5e-4 + 2 * 1.5e-3)
    assert waiting(spec_work=0.01, work=0.0) == pytest.approx(5e-4)
    assert waiting(spec_work=0.0, work=0.04) == pytest.approx(2e-3)
    # For other numbers of ranks the curve is scaled as by the formula, also beyond its end.
    plain = cluster()
    share = collective_seconds("all_reduce", 1e6, 2, 1, plain) / collective_seconds(
        "all_reduce", 1e6, 4, 1, plain
    )
    assert seconds(1e6, ranks=2) == pytest.approx(share * 1e-3)
    assert seconds(1e8) == collective_seconds("all_reduce", 1e8, 4, 1, plain)
