"""Clusters: the provided files, a user's file, and the messages for a wrong one."""

from __future__ import annotations

import re

import pytest
import yaml

from bigtrain.errors import ConfigError
from bigtrain.machine.cluster import Cluster, cluster_names, load_cluster
from bigtrain.machine.local_cluster import cluster_from_rates, measure_local_cluster
from bigtrain.machine.rates import MeasuredRates
from bigtrain.units import GIB

RATES = MeasuredRates(
    device="cpu",
    flops={"fp32": 1e11, "bf16": 2e11},
    copy_bytes=5e9,
    disk_write_bytes=2e9,
    disk_read_bytes=1e9,
    to_device_bytes=None,
    link_ranks=2,
    link_latency=2e-4,
    link_bytes=1e9,
)
PLAIN = {
    "name": "mine",
    "source": "a test",
    "device": {
        "name": "a GPU",
        "kind": "cuda",
        "memory": "16GiB",
        "reserved": "1GiB",
        "flops": {"fp32": 1.0e13, "bf16": 1.0e14},
        "memory_bandwidth": 1.0e12,
        "launch": 5.0e-6,
    },
    "node": {"devices": 4, "host_memory": "256GiB", "host_link": 1.0e10},
    "inside": {"latency": 1.0e-6, "bandwidth": 1.0e11},
}


def write(tmp_path, changes=None, text=None):
    """Write a cluster file with changed keys (dotted); None deletes a key."""
    values = yaml.safe_load(yaml.safe_dump(PLAIN))
    for key, value in (changes or {}).items():
        *section_keys, last = key.split(".")
        node = values
        for name in section_keys:
            node = node[name]
        if value is None:
            del node[last]
        else:
            node[last] = value
    path = tmp_path / "mine.yaml"
    path.write_text(text or yaml.safe_dump(values, sort_keys=False))
    return str(path)


def test_the_known_clusters():
    assert cluster_names() == ["a100-node", "cpu", "h100-node", "h200-node", "v100-node"]


@pytest.mark.parametrize("name", ["a100-node", "cpu", "h100-node", "h200-node", "v100-node"])
def test_every_cluster_that_comes_along_is_whole(name):
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.source
    assert 0 < cluster.device.usable < cluster.device.memory
    assert cluster.device.flops.of("bf16") >= cluster.device.flops.of("fp32")
    on_gpu = cluster.device.kind == "cuda"
    assert (cluster.node.host_link is not None) == on_gpu
    assert cluster.node.shared != on_gpu
    if cluster.between is not None:
        assert cluster.between.bandwidth < cluster.inside.bandwidth
        assert cluster.between.latency > cluster.inside.latency


def test_data_sheet_figures_are_dense_and_of_one_direction():
    a100 = load_cluster("a100-node")
    assert a100.device.flops.bf16 == 312e12
    assert (a100.inside.bandwidth, a100.between.bandwidth) == (300e9, 25e9)
    assert load_cluster("h200-node").device.flops.bf16 == 1979e12 / 2


def test_a_file_of_ones_own_is_read(tmp_path):
    cluster = load_cluster(write(tmp_path, {"device.memory": "80e9", "inside.bandwidth": "2e11"}))
    assert cluster.device.memory == 80_000_000_000
    assert cluster.inside.bandwidth == 2e11
    assert cluster.between is None
    assert (cluster.device.efficiency, cluster.inside.efficiency) == (0.55, 0.8)
    assert cluster.inside.rate == 1.6e11
    assert cluster.device.flops.fp64 is None
    with pytest.raises(ConfigError, match="no device.flops.fp64"):
        cluster.device.flops.of("fp64")


def test_a_cluster_that_nobody_knows_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="--cluster: unknown 'h200', did you mean 'h200-node'?"):
        load_cluster("h200")
    with pytest.raises(ConfigError, match="Known: a100-node, cpu, h100-node"):
        load_cluster("abacus")
    with pytest.raises(ConfigError, match=re.escape("--cluster: there is no file 'no/such.yaml'")):
        load_cluster("no/such.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device.launch": None}, r"mine.yaml:\d+: device.launch is missing. Write it; device has"),
        ({"device": None}, "mine.yaml: device is missing. Write it; a cluster has the keys name"),
        ({"device.flops.bf16": None}, r"device.flops.bf16 is missing.*keys fp32, bf16, fp64"),
        (
            {"device.memry": "1GiB"},
            r"mine.yaml:\d+: a cluster has no key 'device.memry', did you mean 'memory'\? Known",
        ),
        ({"links": 3}, r"mine.yaml:\d+: a cluster has no key 'links'. Known there: name, source"),
        (
            {"between": {"latency": 1.0e-5, "bandwith": 1.0e10}},
            "between.bandwidth is missing. Write it; between has the keys latency, bandwidth",
        ),
        ({"node.devices": 0}, r"node.devices: input should be greater.*equal to 1 \(got 0\)"),
        ({"node.devices": 2.5}, r"node.devices: input should be a valid integer.*\(got 2.5\)"),
        ({"device.memory_bandwidth": -1.0}, r":\d+: device.memory_bandwidth: .*greater than 0"),
        ({"device.memory_bandwidth": 0}, r"device.memory_bandwidth: .*greater than 0 \(got 0\)"),
        ({"device.memory_bandwidth": float("inf")}, "device.memory_bandwidth: .*finite number"),
        ({"device.memory_bandwidth": True}, "device.memory_bandwidth: is not a number; write it"),
        ({"device.memory_bandwidth": "fast"}, "device.memory_bandwidth: .*valid number.*'fast'"),
        ({"device.memory": "much"}, r"device.memory: is not a size in bytes; .* \(got 'much'\)"),
        ({"device.memory": "-1"}, "device.memory: input should be greater than 0"),
        ({"device.memory": [1]}, r"device.memory: is not a size in bytes; .* \(got \[1\]\)"),
        ({"device.memory": float("nan")}, "device.memory: is not a size in bytes"),
        ({"device.reserved": "16GiB"}, r"mine.yaml:\d+: device.reserved=16.00 GiB leaves nothing"),
        ({"device.efficiency": 1.5}, "device.efficiency: input should be less than or equal to 1"),
        ({"device.kind": "tpu"}, "device.kind: input should be 'cuda' or 'cpu'"),
        ({"device": 3}, "device: input should be a valid dictionary"),
        ({"node.host_link": None}, "mine.yaml: node.host_link is missing: device.kind is cuda"),
        ({"inside": None}, "inside is missing"),
    ],
)
def test_wrong_figures_are_refused_with_file_key_and_fix(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_cluster(write(tmp_path, changes))


def test_an_empty_file_and_one_that_is_not_yaml_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="mine.yaml: name is missing"):
        load_cluster(write(tmp_path, text="# nothing\n"))
    with pytest.raises(ConfigError, match="mine.yaml:1: not valid YAML"):
        load_cluster(write(tmp_path, text="device: {"))


def test_a_preset_that_is_wrong_would_be_named_by_its_short_path(monkeypatch):
    from bigtrain.job.presets import ConfigTree
    from bigtrain.machine import cluster

    monkeypatch.setattr(cluster, "read_preset", lambda *_: ConfigTree({"name": "cpu"}, {}))
    with pytest.raises(ConfigError, match="clusters/cpu.yaml: source is missing"):
        load_cluster("cpu")


def test_figures_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        load_cluster("cpu").name = "other"


def test_rates_of_a_cpu_make_a_node_whose_ranks_share_it():
    cluster = cluster_from_rates(RATES, devices=2, host_memory=8 * GIB)
    assert cluster.device.kind == "cpu"
    assert cluster.device.memory == 4 * GIB
    assert cluster.device.efficiency == cluster.inside.efficiency == 1.0
    assert cluster.device.memory_bandwidth == 1e10  # a copy reads and writes each byte
    assert cluster.inside.latency == 1e-4  # an all-reduce between two ranks is two messages
    assert cluster.inside.rate == 1e9
    assert cluster.node.shared
    assert cluster.node.host_link is None
    assert cluster.between is None
    assert Cluster.model_validate(cluster.model_dump()) == cluster


def test_rates_of_gpus_make_a_node_of_them():
    gpu_rates = {**vars(RATES), "device": "cuda", "to_device_bytes": 2e10, "link_ranks": 8}
    cluster = cluster_from_rates(
        MeasuredRates(**gpu_rates),
        devices=8,
        host_memory=8 * GIB,
        device_memory=80 * GIB,
        device_name="a GPU",
    )
    assert (cluster.device.kind, cluster.device.name) == ("cuda", "a GPU")
    assert cluster.device.memory == 80 * GIB
    assert cluster.inside.latency == pytest.approx(2e-4 / 14)
    assert cluster.node.host_link == 2e10
    assert not cluster.node.shared
    with pytest.raises(ConfigError, match="device_memory is missing"):
        cluster_from_rates(MeasuredRates(**gpu_rates), devices=8, host_memory=8 * GIB)


@pytest.mark.parametrize(
    ("missing", "part"),
    [
        ({"link_latency": None}, "link: no answer"),
        ({"copy_bytes": None}, "memory: no reason"),
        ({"flops": {"fp32": 1e11}}, "compute: no reason"),
    ],
)
def test_rates_that_could_not_be_measured_are_named(missing, part):
    rates = MeasuredRates(**{**vars(RATES), "problems": {"link": "no answer"}, **missing})
    with pytest.raises(ConfigError, match=f"have no {part}.*--again"):
        cluster_from_rates(rates, devices=2, host_memory=8 * GIB)


def test_more_ranks_than_the_memory_holds_are_refused():
    with pytest.raises(ConfigError, match=r"--devices 64: .*128\.0 MiB.*Use --devices 15 or"):
        cluster_from_rates(RATES, devices=64, host_memory=8 * GIB)
    assert cluster_from_rates(RATES, devices=15, host_memory=8 * GIB).device.usable > 0


def test_kinds_of_exchange_have_the_figures_that_were_measured_of_them():
    kinds = {
        "all_gather": {
            "latency": 3e-4,
            "bytes": 5e8,
            "curve": [],
            "after_work": [],
            "work": 0.0,
            "issue": 0.0,
        },
        "send": {
            "latency": 5e-5,
            "bytes": 3e9,
            "curve": [[1e5, 4e-4], [1e6, 1e-3]],
            "after_work": [[1e5, 2e-3]],
            "work": 0.0,
            "issue": 6e-4,
        },
    }
    rates = MeasuredRates(**{**vars(RATES), "link_ranks": 4, "link_kinds": kinds})
    link = cluster_from_rates(rates, devices=4, host_memory=8 * GIB).inside
    assert link.of("all_gather").latency == pytest.approx(1e-4)  # each of three steps
    assert link.of("all_gather").rate == 5e8
    assert (link.of("send").latency, link.of("send").rate) == (5e-5, 3e9)
    assert link.of("reduce") == link  # like every collective without its measurement
    assert link.kinds["send"].curve == [(1e5, 4e-4), (1e6, 1e-3)]
    assert link.kinds["send"].after_work == [(1e5, 2e-3)]
    assert link.kinds["send"].issue == 6e-4
    assert link.kinds["send"].ranks == 4
    assert link.latency == pytest.approx(2e-4 / 6)


def test_this_machine_is_a_cluster(monkeypatch):
    asked = []
    measured = "bigtrain.machine.local_cluster.measured_rates"
    monkeypatch.setattr(measured, lambda ranks: asked.append(ranks) or RATES)
    cluster = measure_local_cluster(4)
    assert cluster.node.devices == 4
    assert cluster.node.cores >= 1
    measure_local_cluster(16)
    assert asked == [4, 8]  # no more ranks than eight are started to measure links
    assert cluster.device.memory == cluster.node.host_memory // 4
    assert measure_local_cluster().node.devices >= 1
