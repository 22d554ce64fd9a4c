"""The seconds of a step with any number of ranks, from a cluster's figures."""

from __future__ import annotations

import pytest

from bigtrain.errors import ConfigError
from bigtrain.job.load import load_job
from bigtrain.machine.cluster import Cluster, Link, load_cluster
from bigtrain.speedup.command import main
from bigtrain.speedup.forecast import StepForecaster, candidates, counts

WORDS = [
    *("model.name=lenet", "data.name=synthetic", "data.args.kind=classification"),
    *("data.args.input_shape=[1,32,32]", "train.global_batch_size=null"),
    *("train.micro_batch_size=4", "train.accumulation_steps=2"),
]
LINK = Link(latency=1e-3, bandwidth=1e6, efficiency=1.0)


def cluster(link: Link | None = LINK) -> Cluster:
    """Hosts with one rank each."""
    cpu = load_cluster("cpu")
    node = cpu.node.model_copy(update={"devices": 1, "cores": 1})
    return cpu.model_copy(update={"name": "hosts", "node": node, "between": link})


@pytest.fixture(autouse=True)
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_replicas_wait_for_a_ring_between_hosts():
    forecaster = StepForecaster(load_job(None, "ddp", WORDS), cluster(), 2)
    nbytes = 4 * sum(p.numel() for p in forecaster.setup.blueprint.model.parameters())
    for ranks in (2, 8):
        step = forecaster.step(ranks)
        messages = forecaster.messages(ranks)
        assert [kind for kind, _, _ in messages] == ["all_reduce"]
        assert messages[0][1] == nbytes  # once a step, for any number of micro-batches
        latency = 2 * (ranks - 1) * 1e-3 * messages[0][2]
        assert step.latency == pytest.approx(latency)
        assert step.whole == pytest.approx(latency + 2 * (ranks - 1) / ranks * nbytes / 1e6)
        assert step.exposed == pytest.approx(step.whole)  # on a CPU communication does not overlap
        assert (step.workers, step.batch) == (ranks, 8)
        assert step.compute == pytest.approx(forecaster.alone, rel=1e-6)
    assert forecaster.bandwidth(2) == 1e6


def test_a_cluster_of_one_node_has_no_more_ranks():
    forecaster = StepForecaster(load_job(None, "ddp", WORDS), load_cluster("cpu"), 2)
    assert forecaster.step(2).exposed > 0
    with pytest.raises(
        ConfigError, match="cluster cpu is one node of 2 devices, and 4 ranks need more. Add a link"
    ):
        forecaster.step(4)


def test_ranks_that_are_run_and_tried():
    assert [counts(n) for n in (2, 3, 8)] == [[2], [2, 3], [2, 4, 8]]
    tried = candidates()
    assert tried[0] == 2
    assert tried[-1] == 4096
    assert sorted(set(tried)) == tried


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "1"], "speedup: -n 1, and one rank does not synchronise: .* Use -n 2"),
        (["-n", "2", "--strategies", "dpd"], "dpd"),
        (["-n", "2", "--strategies", "1f1b"], "1f1b cuts the model .* Use --strategy ddp"),
        (["-n", "2", "--picture", "a.pdf"], "name a file that ends in .svg or .png"),
        (["-n", "2", "--cluster", "nowhere"], "nowhere"),
        (["-n", "2", "--strategies", "single"], "single"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        main([*words, *WORDS])
    assert not (tmp_path / "runs").exists()
