"""Internals of DeepSpeed and fairscale that are used: all exist, or the version is reported or
refused.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

import pytest
from support.rooms import ROOT

from bigtrain.assembly.make_plan import make_plan
from bigtrain.core.strategy import Plan
from bigtrain.doctor import probes
from bigtrain.engine.prepare import connect_job
from bigtrain.engine.setup import open_setup
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys, load_job
from bigtrain.machine import libraries
from bigtrain.machine.libraries import ForeignLibrary, foreign_names
from bigtrain.ranks.context import RunContext
from bigtrain.ranks.launcher_env import SINGLE_RANK
from bigtrain.report.dry_run import dry_run_lines
from bigtrain.strategies import deepspeed_adapter, fairscale_adapter
from bigtrain.strategies.deepspeed_adapter import DEEPSPEED, load_deepspeed
from bigtrain.strategies.fairscale_adapter import FAIRSCALE

LIBRARIES = {"deepspeed": DEEPSPEED, "fairscale": FAIRSCALE}
ADAPTERS = {"deepspeed": deepspeed_adapter, "fairscale": fairscale_adapter}
RUN_BY = {
    ("deepspeed", "zero1", 2): "strategy.replicate.engine=deepspeed",
    ("deepspeed", "zero2", 2): "strategy.replicate.engine=deepspeed",
    ("deepspeed", "zero3", 2): "strategy.replicate.engine=deepspeed",
    ("deepspeed", "pipeline_deepspeed", 2): "strategy.cut.engine=deepspeed",
    ("deepspeed", "pipeline_deepspeed_zero1", 4): "strategy.cut.engine=deepspeed",
    ("fairscale", "oss", 2): "strategy.replicate.engine=fairscale",
    ("fairscale", "sharded_ddp", 2): "strategy.replicate.engine=fairscale",
    ("fairscale", "fairscale_fsdp", 2): "strategy.replicate.engine=fairscale",
    ("fairscale", "gpipe_fairscale", 1): "strategy.cut.engine=fairscale",
}


def needs(library: str) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is missing")


def plan_of(strategy: str, ranks: int) -> Plan:
    """A plan of the strategy, for a GPU if the strategy needs one."""
    device = "cuda" if strategy == "fairscale_fsdp" else "cpu"
    return make_plan(job_from_keys(strategy, {"train.global_batch_size": 32}), ranks, device)


@pytest.mark.parametrize("name", LIBRARIES)
def test_what_is_installed_has_all_names_and_was_seen_to_work(name):
    needs(name)
    if name == "deepspeed":
        load_deepspeed("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert LIBRARIES[name].missing_names() == []
    assert LIBRARIES[name].warning() is None


@pytest.mark.parametrize(("library", "strategy", "ranks"), RUN_BY)
def test_a_version_without_a_name_is_refused_before_the_ranks_connect(
    library, strategy, ranks, monkeypatch
):
    needs(library)
    seen: ForeignLibrary = LIBRARIES[library]
    gone = foreign_names("replace", "test", library, "gone")
    monkeypatch.setattr(
        ADAPTERS[library], library.upper(), replace(seen, names=(*seen.names, *gone))
    )
    user = RUN_BY[library, strategy, ranks]
    words = (
        rf"^{user}: {library} [\d.]+ has no {library}\.gone, .*{seen.requirement} was tested"
        rf".*Run `{seen.fix}`, or (use --strategy|set strategy\.cut\.engine=torch)"
    )
    with pytest.raises(ConfigError, match=words) as refusal:
        plan_of(strategy, ranks)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("library", "strategy", "ranks"), RUN_BY)
def test_another_version_than_those_seen_is_told_once(library, strategy, ranks, monkeypatch):
    needs(library)
    monkeypatch.setattr(libraries, "installed_version", lambda _name: "9.9")
    lines = plan_of(strategy, ranks).warnings
    assert len(lines) == 1
    assert lines[0].startswith(f"{library} 9.9 is installed and was never tested with bigtrain")
    assert f"`{LIBRARIES[library].fix}`" in lines[0]
    assert make_plan(job_from_keys("ddp", {}), ranks, "cpu").warnings == []


def test_deepspeed_serves_one_kind_of_device_in_a_process(monkeypatch):
    load_deepspeed("cpu")
    accelerator = import_module("deepspeed.accelerator").get_accelerator()
    monkeypatch.setattr(accelerator, "device_name", lambda *_: "cuda")
    with pytest.raises(
        ConfigError, match=r"began with cuda, .* run is on cpu\. Start a new process"
    ):
        deepspeed_adapter.connect_deepspeed(RunContext.alone(), ExitStack())


def test_loading_deepspeed_loads_no_compiler():
    needs("deepspeed")
    code = (
        "import sys, torch\n"
        "from bigtrain.strategies.deepspeed_adapter import load_deepspeed\n"
        "compile = torch.compile\n"
        "load_deepspeed('cpu')\n"
        "assert torch.compile is compile\n"
        "assert 'torch._inductor.compile_fx' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rank_0_tells_before_the_ranks_connect_and_a_dry_run_does(capsys, monkeypatch):
    needs("fairscale")
    monkeypatch.setattr(libraries, "installed_version", lambda _name: "9.9")
    job = load_job("default", "oss", ["device=cpu", "train.global_batch_size=4"])
    plan = make_plan(job, 1, "cpu")
    connection = connect_job(job, plan, SINGLE_RANK, {})
    # Printed before the ranks connect
    assert capsys.readouterr().err == f"bigtrain: {plan.warnings[0]}\n"
    with connection as context:
        assert context.is_main
    connect_job(job, plan, replace(SINGLE_RANK, rank=1, world_size=2, launcher="env"), {})
    assert capsys.readouterr().err == ""
    assert next(dry_run_lines(job, plan, open_setup(job, plan))) == plan.warnings[0]


def test_setup_and_doctor_ask_for_the_versions_that_were_seen():
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (wanted,) = (
        ast.literal_eval(keyword.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "install_requires"
    )
    for name, library in LIBRARIES.items():
        assert [word for word in wanted if word.startswith(name)] == [library.requirement]
        assert probes.LIBRARIES[name] == library.fix
