"""`bigtrain doctor`: what is found on this machine, and rates that are measured once and kept."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from support.programs import environment
from support.zygote import forked_cli

from bigtrain.job.strategy_words import whole_strategies
from bigtrain.machine import doctor, rate_cache, rates
from bigtrain.machine.busy import CpuClock
from bigtrain.machine.cluster import CommOp
from bigtrain.machine.local_cluster import cached_local_cluster
from bigtrain.machine.rate_cache import (
    RATES,
    cached_rates,
    faster_precision,
    measured_rates,
    rates_fingerprint,
)
from bigtrain.machine.rates import MeasuredRates
from bigtrain.memory.allocator import tcmalloc

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
            "issue": 0.0,
        }
    },
)


def look(cache: Path, *options: str) -> subprocess.CompletedProcess[str]:
    there = environment({"XDG_CACHE_HOME": str(cache)})
    return forked_cli(["doctor", *options], env=there, timeout=180, flavour="deepspeed")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache whose file is damaged."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "bigtrain").mkdir()
    (folder / "bigtrain" / "rates.json").write_text('{"half of a fi')
    return folder


@pytest.fixture(scope="module")
def first(cache: Path) -> dict[str, Any]:
    """What the first look finds, which has to measure."""
    done = look(cache, "--json")
    assert done.returncode == 0, done.stderr
    assert "measuring rates" in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def numbers(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found["rates"].items() if name != "from_cache"}


def test_the_machine_is_described(first):
    version = first["versions"]["torch"]["version"]
    assert version.partition("+")[0] == torch.__version__.partition("+")[0]
    assert first["versions"]["python"]["version"].startswith("3.")
    assert first["backends"]["gloo"] is True
    assert first["launchers"]["torchrun"]
    assert first["devices"]["cpu"]["usable_cores"] >= 1
    assert len(first["devices"]["gpus"]) == torch.cuda.device_count()
    assert first["devices"]["allocator"] == tcmalloc()
    memory = first["devices"]["memory"]
    assert 0 < memory["free_bytes"] <= memory["total_bytes"]
    assert first["devices"]["scratch"]["free_bytes"] > 0
    operators = first["deepspeed_operators"]
    assert operators["problem"] is None
    assert set(operators["operators"]["cpu_adam"]) == {"compatible", "built"}


def test_every_preset_either_runs_or_says_what_it_lacks(first):
    strategies = first["strategies"]
    assert sorted([*strategies["run"], *strategies["refused"]]) == whole_strategies()
    assert strategies["run"]["single"] == 1
    assert strategies["run"]["1f1b"] == 2
    if not torch.cuda.is_available():
        assert "needs CUDA" in strategies["refused"]["fairscale_fsdp"]


def test_rates_are_measured_where_the_cache_is_damaged(first, cache):
    found = first["rates"]
    assert found["from_cache"] is False
    assert found["problems"] == {}
    assert found["cache"] == str(cache / "bigtrain" / "rates.json")
    assert set(found["flops"]) == {"fp32", "bf16"}
    # Any machine that runs torch is within these: units that are mixed up are not.
    assert all(1e8 < rate < 1e16 for rate in found["flops"].values())
    assert 1e8 < found["copy_bytes"] < 1e14
    assert 1e5 < found["disk_write_bytes"] < 1e12
    assert 1e5 < found["disk_read_bytes"] < 1e12
    assert 1e-6 < found["link_latency"] < 1
    assert 1e6 < found["link_bytes"] < 1e13
    kinds = found["link_kinds"]
    assert set(kinds) == set(get_args(CommOp))
    assert all(1e-6 < kind["latency"] < 1 and 1e6 < kind["bytes"] < 1e13 for kind in kinds.values())
    curves = [kind[name] for kind in kinds.values() for name in ("curve", "after_work")]
    sizes = [[nbytes for nbytes, _ in curve] for curve in curves]
    assert all(each == sorted(each) and len(each) == 5 for each in sizes)
    assert all(1e-6 < seconds < 10 for curve in curves for _, seconds in curve)
    # On a CPU hooks and actions take their time; broadcasts and the like are issued as they are.
    issued = {kind for kind, figures in kinds.items() if figures["issue"] > 0}
    assert issued <= {"all_gather", "reduce_scatter", "send"}
    assert issued, "one of them may drown in the noise of a machine that does other things, too"
    assert all(0 <= figures["issue"] < 0.5 for figures in kinds.values())
    assert (found["to_device_bytes"] is not None) == torch.cuda.is_available()
    assert {file.name for file in (cache / "bigtrain").iterdir()} == {"rates.json", "rates.lock"}


def test_the_second_look_has_the_same_rates(first, cache):
    again = look(cache, "--json")
    assert "measuring rates" not in again.stderr
    found = json.loads(again.stdout)
    assert found["rates"]["from_cache"] is True
    assert numbers(found) == numbers(first)


def test_a_person_is_shown_all_of_it(first, capsys):
    doctor._show(first)
    shown = capsys.readouterr().out
    for word in ("gloo", "torchrun", "cpu_adam", "all-reduce, ", "FLOP/s", "host memory"):
        assert word in shown
    for name, reason in first["strategies"]["refused"].items():
        assert re.search(rf"\n  {name} +{re.escape(reason[:40])}", shown)


def plant(folder: Path, values: object, key: str | None = None) -> None:
    """Write a cache with an entry for this machine."""
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


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="links are those of the GPUs")
def test_other_hardware_or_ranks_have_rates_of_their_own(home, monkeypatch):
    plant(home, asdict(GIVEN))
    assert cached_rates(3) is None
    assert cached_rates(1) == cached_rates(2) == GIVEN  # one rank has nobody to talk to
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
                    "issue": 0.0,
                }
            },
        },
        {
            **asdict(GIVEN),
            "link_kinds": {"send": {**GIVEN.link_kinds["all_gather"], "issue": -1.0}},
        },
        {**asdict(GIVEN), "link_kinds": None},
        {**asdict(GIVEN), "flops": {"fp32": 1e9}},
        {**asdict(GIVEN), "unknown": 1},
        {**asdict(GIVEN), "device": "cuda"},  # without its way to the device
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
    found = measured_rates(again=True)
    assert set(found.problems) == {"disk", "link"}
    assert "1000 B free" in found.problems["disk"]
    assert (found.disk_write_bytes, found.link_latency, found.link_bytes) == (None, None, None)
    assert found.copy_bytes is not None
    assert found.copy_bytes != GIVEN.copy_bytes
    assert cached_rates() == GIVEN
    assert torch.equal(torch.get_rng_state(), before)


def others_take(monkeypatch: pytest.MonkeyPatch, cores: float) -> None:
    """Let every measurement find other programs at work."""
    monkeypatch.setattr(rate_cache, "measure_rates", lambda _ranks: GIVEN)
    monkeypatch.setattr(rate_cache, "others_cores", lambda _uses: cores)


def test_rates_of_a_busy_machine_are_marked_and_taken_again(home, monkeypatch, capsys):
    monkeypatch.setattr("bigtrain.machine.busy.usable_cores", lambda: 2)
    others_take(monkeypatch, 1.4)
    assert measured_rates(again=True) == replace(GIVEN, others_cores=1.4)
    said = capsys.readouterr().err
    assert "were measured while other programs used 1.4 of the 2 cores: they are too low" in said
    assert "bigtrain doctor --again" in said
    cluster = cached_local_cluster(2, "cpu")
    assert cluster.caveat == "while other programs used 1.4 of the 2 cores"

    others_take(monkeypatch, 1.9)  # busier than before: what was kept is the better
    assert measured_rates().others_cores == 1.4
    others_take(monkeypatch, 0.0)
    capsys.readouterr()
    assert measured_rates() == replace(GIVEN, others_cores=0.0)
    assert capsys.readouterr().err == ""
    others_take(monkeypatch, 1.0)
    assert measured_rates() == cached_rates() == replace(GIVEN, others_cores=0.0)  # not again
    assert cached_local_cluster(2, "cpu").caveat == ""


def test_work_of_children_is_not_that_of_others():
    clock = CpuClock()
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    use = clock.read()
    assert use.own > 0.05


def test_products_that_are_far_faster_in_bf16_are_mentioned_with_the_words():
    assert faster_precision({"fp32": 9e10, "bf16": 1.2e12}) == [
        "bf16 products run at 1.2 TFLOP/s, fp32 products at 90.0 GFLOP/s (13.3 times): "
        "train.precision=bf16 uses them"
    ]
    assert faster_precision({"fp32": 9e10, "bf16": 1e11}) == faster_precision({}) == []


def test_ranks_that_fail_say_why():
    with pytest.raises(RuntimeError, match="measured: -n 0: at least 1 rank is needed"):
        rates._link(0)


def test_a_crash_costs_the_answers_after_it_and_nothing_else():
    code = "print('noise')\nanswer('one', 1)\nos.abort()\nanswer('two', 2)"
    answers, problem = doctor._ask(code)
    assert answers == [["one", 1]]
    assert problem is not None
    assert "signal 6" in problem
    answers, problem = doctor._ask("answer(1)\nraise OSError('no such thing')")
    assert (answers, problem) == ([[1]], "failed: OSError: no such thing")


def test_what_lies_in_the_current_folder_misleads_no_probe(monkeypatch, tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    monkeypatch.chdir(tmp_path)
    code = "import bigtrain\nanswer(bigtrain.__file__)"
    answers, problem = doctor._ask(code)
    assert problem is None
    assert Path(answers[0][0]).samefile(Path(doctor.__file__).parents[1] / "__init__.py")


def test_where_nothing_answers_the_status_says_so(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 0.05)
    assert doctor.main(["--json", "--no-rates"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["rates"] is None
    assert found["strategies"]["run"] == {}
    assert "no further answer" in found["strategies"]["problem"]
    assert "no further answer" in found["deepspeed_operators"]["problem"]
    assert doctor.main(["--no-rates"]) == 1
    assert "no further answer" in capsys.readouterr().out


def test_a_library_that_is_missing_is_named_with_the_words_that_get_it(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 0.05)
    monkeypatch.setitem(doctor._LIBRARIES, "no-such-library", "pip install no-such-library")
    monkeypatch.setenv("PATH", os.devnull)
    doctor.main(["--no-rates"])
    shown = capsys.readouterr().out
    assert "missing: pip install no-such-library" in shown
    assert re.search(r"\n  ninja +not found: pip install ninja *\n", shown)


def test_contradicting_options_are_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--no-rates", "--again"])
    assert ended.value.code == 2
    assert "not allowed with" in capsys.readouterr().err
