"""`bigtrain doctor`: its findings about this machine, and rates that are measured once
and cached.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from support.programs import environment
from support.zygote import forked_cli

from bigtrain.doctor import command, probes
from bigtrain.doctor.show import show_machine
from bigtrain.job.strategy_words import whole_strategies
from bigtrain.machine.cluster import CommOp, SharedOp
from bigtrain.memory.allocator import find_allocator


def look(cache: Path, *options: str) -> subprocess.CompletedProcess[str]:
    there = environment({"XDG_CACHE_HOME": str(cache)})
    return forked_cli(["doctor", *options], env=there, timeout=180, flavour="deepspeed")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder whose file is damaged."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "bigtrain").mkdir()
    (folder / "bigtrain" / "rates.json").write_text('{"half of a fi')
    return folder


@pytest.fixture(scope="module")
def machine(cache: Path) -> dict[str, Any]:
    """The findings without rates, which take most of a minute to measure."""
    done = look(cache, "--json", "--no-rates")
    assert done.returncode == 0, done.stderr
    assert "measuring rates" not in done.stderr
    findings: dict[str, Any] = json.loads(done.stdout)
    return findings


@pytest.fixture(scope="module")
def first(cache: Path) -> dict[str, Any]:
    """The findings of the first call with rates, which has to measure them."""
    done = look(cache, "--json")
    assert done.returncode == 0, done.stderr
    assert "measuring rates" in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def numbers(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found["rates"].items() if name != "from_cache"}


def test_the_machine_is_described(machine):
    version = machine["versions"]["torch"]["version"]
    assert version.partition("+")[0] == torch.__version__.partition("+")[0]
    assert machine["versions"]["python"]["version"].startswith("3.")
    assert machine["backends"]["gloo"] is True
    assert machine["launchers"]["torchrun"]
    assert machine["devices"]["cpu"]["usable_cores"] >= 1
    assert len(machine["devices"]["gpus"]) == torch.cuda.device_count()
    assert machine["devices"]["allocator"] == find_allocator()
    memory = machine["devices"]["memory"]
    assert 0 < memory["free_bytes"] <= memory["total_bytes"]
    assert machine["devices"]["scratch"]["free_bytes"] > 0
    operators = machine["deepspeed_operators"]
    assert operators["problem"] is None
    assert set(operators["operators"]["cpu_adam"]) == {"compatible", "built"}


def test_every_preset_either_runs_or_says_what_it_lacks(machine):
    strategies = machine["strategies"]
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
    # Every machine that runs torch is within these bounds; a wrong unit would exceed them.
    assert all(1e8 < rate < 1e16 for rate in found["flops"].values())
    assert 1e8 < found["copy_bytes"] < 1e14
    assert 1e5 < found["disk_write_bytes"] < 1e12
    assert 1e5 < found["disk_read_bytes"] < 1e12
    assert 1e-6 < found["link_latency"] < 1
    assert 1e6 < found["link_bytes"] < 1e13
    kinds = found["link_kinds"]
    assert set(kinds) == {*get_args(CommOp), *get_args(SharedOp)}
    assert all(1e-6 < kind["latency"] < 1 and 1e6 < kind["bytes"] < 1e13 for kind in kinds.values())
    curves = [kind[name] for kind in kinds.values() for name in ("curve", "after_work")]
    sizes = [[nbytes for nbytes, _ in curve] for curve in curves]
    assert all(each == sorted(each) and len(each) == 5 for each in sizes)
    assert all(1e-6 < seconds < 10 for curve in curves for _, seconds in curve)
    # On a CPU, hooks and schedule actions take measurable time; collectives are issued without
    # delay.
    issued = {kind for kind, figures in kinds.items() if figures["issue"] > 0}
    assert issued <= {"all_gather", "reduce_scatter", "send", *get_args(SharedOp)}
    assert issued, "no cost of issuing was measurable: was the machine too busy?"
    assert all(0 <= figures["issue"] < 0.5 for figures in kinds.values())
    assert (found["to_device_bytes"] is not None) == torch.cuda.is_available()
    assert {file.name for file in (cache / "bigtrain").iterdir()} == {"rates.json", "rates.lock"}


def test_the_second_look_has_the_same_rates(first, cache):
    again = look(cache, "--json")
    assert "measuring rates" not in again.stderr
    found = json.loads(again.stdout)
    assert found["rates"]["from_cache"] is True
    assert numbers(found) == numbers(first)


def test_a_person_is_shown_the_rates(first, capsys):
    show_machine(first)
    shown = capsys.readouterr().out
    for word in ("gloo", "all-reduce, ", "FLOP/s", "host memory"):
        assert word in shown


def test_a_person_is_shown_the_machine(machine, capsys):
    show_machine(machine)
    shown = capsys.readouterr().out
    for word in ("gloo", "torchrun", "cpu_adam", "host memory"):
        assert word in shown
    for name, reason in machine["strategies"]["refused"].items():
        assert re.search(rf"\n  {name} +{re.escape(reason[:40])}", shown)


def test_a_crash_costs_the_answers_after_it_and_nothing_else():
    code = "print('noise')\nanswer('one', 1)\nos.abort()\nanswer('two', 2)"
    answers, problem = probes._ask(code)
    assert answers == [["one", 1]]
    assert problem is not None
    assert "signal 6" in problem
    answers, problem = probes._ask("answer(1)\nraise OSError('no such thing')")
    assert (answers, problem) == ([[1]], "failed: OSError: no such thing")


def test_what_lies_in_the_current_folder_misleads_no_probe(monkeypatch, tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    monkeypatch.chdir(tmp_path)
    code = "import bigtrain\nanswer(bigtrain.__file__)"
    answers, problem = probes._ask(code)
    assert problem is None
    assert Path(answers[0][0]).samefile(Path(probes.__file__).parents[1] / "__init__.py")


def test_where_nothing_answers_the_status_says_so(monkeypatch, capsys):
    monkeypatch.setattr(probes, "PROBE_TIMEOUT_S", 0.05)
    assert command.main(["--json", "--no-rates"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["rates"] is None
    assert found["strategies"]["run"] == {}
    assert "no further answer" in found["strategies"]["problem"]
    assert "no further answer" in found["deepspeed_operators"]["problem"]
    assert command.main(["--no-rates"]) == 1
    assert "no further answer" in capsys.readouterr().out


def test_a_library_that_is_missing_is_named_with_the_words_that_get_it(monkeypatch, capsys):
    monkeypatch.setattr(probes, "PROBE_TIMEOUT_S", 0.05)
    monkeypatch.setitem(probes.LIBRARIES, "no-such-library", "pip install no-such-library")
    monkeypatch.setenv("PATH", os.devnull)
    command.main(["--no-rates"])
    shown = capsys.readouterr().out
    assert "missing: pip install no-such-library" in shown
    assert re.search(r"\n  ninja +not found: pip install ninja *\n", shown)


def test_contradicting_options_are_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--no-rates", "--again"])
    assert ended.value.code == 2
    assert "not allowed with" in capsys.readouterr().err
