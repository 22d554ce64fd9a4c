"""The rates of this machine: measured, cached, and measured again if the cache is unusable."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from bigtrain.machine import rate_cache, rates
from bigtrain.machine.busy import CpuClock
from bigtrain.machine.local_cluster import cached_local_cluster
from bigtrain.machine.rate_cache import (
    RATES,
    cached_rates,
    faster_precision,
    measured_rates,
    rates_fingerprint,
)
from bigtrain.machine.rates import MeasuredRates

GIVEN = MeasuredRates(
    device="cpu",
    flops={"fp32": 1e9, "bf16": 2e9},
    copy_bytes=3e9,
    disk_write_bytes=4e8,
    disk_read_bytes=5e8,
    to_device_bytes=None,
    link_ranks=2,
    link_latency=1e-4,
    link_bytes=6e8,
    link_kinds={
        "all_gather": {
            "latency": 2e-4,
            "bytes": 3e8,
            "curve": [[1e5, 1e-3]],
            "after_work": [],
            "work": 0.0,
            "issue": 0.0,
        }
    },
)


def plant(folder: Path, values: object, key: str | None = None) -> None:
    """Write a cache file with an entry for this machine."""
    key = key or json.dumps(rates_fingerprint(), sort_keys=True)
    path = folder / "bigtrain" / "rates.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({key: {"rates": values}}))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_what_is_kept_is_given_back_without_measuring(home):
    plant(home, asdict(GIVEN))
    assert cached_rates() == GIVEN
    assert measured_rates() == GIVEN


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="here the links are those of the GPUs")
def test_other_hardware_or_ranks_have_rates_of_their_own(home, monkeypatch):
    plant(home, asdict(GIVEN))
    assert cached_rates(3) is None
    assert cached_rates(1) == cached_rates(2) == GIVEN  # one rank needs no link
    monkeypatch.setattr(rate_cache, "cpu_name", lambda: "another")
    assert cached_rates() is None


def test_launchers_that_allow_a_rank_one_thread_change_no_rates(home, monkeypatch):
    plant(home, asdict(GIVEN))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert cached_rates() == GIVEN
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "values",
    [
        {**asdict(GIVEN), "copy_bytes": -1.0},
        {**asdict(GIVEN), "copy_bytes": "fast"},
        {**asdict(GIVEN), "link_latency": None},
        {**asdict(GIVEN), "link_kinds": {"send": {"latency": 1e-4}}},
        {
            **asdict(GIVEN),
            "link_kinds": {
                "send": {
                    "latency": 1e-4,
                    "bytes": "fast",
                    "curve": [],
                    "after_work": [],
                    "work": 0.0,
                    "issue": 0.0,
                }
            },
        },
        {
            **asdict(GIVEN),
            "link_kinds": {
                "send": {
                    "latency": 1e-4,
                    "bytes": 1e9,
                    "curve": [1],
                    "after_work": [],
                    "work": 0.0,
                    "issue": 0.0,
                }
            },
        },
        {
            **asdict(GIVEN),
            "link_kinds": {"send": {**GIVEN.link_kinds["all_gather"], "issue": -1.0}},
        },
        {
            **asdict(GIVEN),
            "link_kinds": {"send": {**GIVEN.link_kinds["all_gather"], "work": None}},
        },
        {**asdict(GIVEN), "link_kinds": None},
        {**asdict(GIVEN), "flops": {"fp32": 1e9}},
        {**asdict(GIVEN), "unknown": 1},
        {**asdict(GIVEN), "device": "cuda"},  # a GPU without a host link
        {"flops": 1},
        [],
        None,
    ],
)
def test_an_entry_that_is_no_rates_does_not_count(home, values):
    plant(home, values)
    assert cached_rates() is None


@pytest.mark.parametrize("text", ["", "[]", "3", '{"half', "\0\0", '{"key": 3}'])
def test_a_damaged_file_has_nothing_in_it(home, text):
    plant(home, None)
    RATES.path.write_text(text)
    assert cached_rates() is None


def test_the_cache_lies_where_the_standard_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert RATES.path == tmp_path / "x" / "bigtrain" / "rates.json"
    monkeypatch.setenv("HOME", str(tmp_path))
    for unusable in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert RATES.path == tmp_path / ".cache" / "bigtrain" / "rates.json"


def test_what_cannot_be_measured_is_a_line_and_is_not_kept(home, monkeypatch):
    plant(home, asdict(GIVEN))
    monkeypatch.setattr(rates, "free_disk_bytes", lambda _folder: 1000)
    monkeypatch.setattr(rates, "LINK_TIMEOUT_S", 0.05)
    before = torch.get_rng_state()
    measured = measured_rates(again=True)
    assert set(measured.problems) == {"disk", "link"}
    assert "1000 B free" in measured.problems["disk"]
    assert (measured.disk_write_bytes, measured.link_latency, measured.link_bytes) == (
        None,
        None,
        None,
    )
    assert measured.copy_bytes is not None
    assert measured.copy_bytes != GIVEN.copy_bytes
    assert cached_rates() == GIVEN
    assert torch.equal(torch.get_rng_state(), before)


def use_cores_elsewhere(monkeypatch: pytest.MonkeyPatch, cores: float) -> None:
    """Make every measurement find that other programs use so many cores."""
    monkeypatch.setattr(rate_cache, "measure_rates", lambda _ranks: GIVEN)
    monkeypatch.setattr(rate_cache, "others_cores", lambda _uses: cores)


def test_rates_of_a_busy_machine_are_marked_and_taken_again(home, monkeypatch, capsys):
    monkeypatch.setattr("bigtrain.machine.busy.usable_cores", lambda: 2)
    use_cores_elsewhere(monkeypatch, 1.4)
    assert measured_rates(again=True) == replace(GIVEN, others_cores=1.4)
    errors = capsys.readouterr().err
    assert "were measured while other programs used 1.4 of the 2 cores: they are too low" in errors
    assert "bigtrain doctor --again" in errors
    cluster = cached_local_cluster(2, "cpu")
    assert cluster.caveat == "while other programs used 1.4 of the 2 cores"

    use_cores_elsewhere(monkeypatch, 1.9)  # busier than before, so the cached rates are better
    assert measured_rates().others_cores == 1.4
    use_cores_elsewhere(monkeypatch, 0.0)
    capsys.readouterr()
    assert measured_rates() == replace(GIVEN, others_cores=0.0)
    assert capsys.readouterr().err == ""
    use_cores_elsewhere(monkeypatch, 1.0)
    # Not measured again
    assert measured_rates() == cached_rates() == replace(GIVEN, others_cores=0.0)
    assert cached_local_cluster(2, "cpu").caveat == ""


def test_work_of_children_is_not_that_of_others():
    clock = CpuClock()
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    use = clock.read()
    assert use.process > 0.05


def test_products_that_are_far_faster_in_bf16_are_mentioned_with_the_words():
    assert faster_precision({"fp32": 9e10, "bf16": 1.2e12}) == [
        "bf16 products run at 1.2 TFLOP/s, fp32 products at 90.0 GFLOP/s (13.3 times): "
        "train.precision=bf16 uses them"
    ]
    assert faster_precision({"fp32": 9e10, "bf16": 1e11}) == faster_precision({}) == []


def test_ranks_that_fail_say_why():
    with pytest.raises(RuntimeError, match="measured: -n 0: at least 1 rank is needed"):
        rates._link(0)
