"""fairscale's ZeRO without ranks: refusals and advice."""

from __future__ import annotations

import re
import sys

import pytest

from bigtrain.assembly.make_plan import make_plan
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.memory.timeline import Span, Timeline
from bigtrain.strategies.zero.on_fairscale.fsdp import FairscaleFSDP
from bigtrain.strategies.zero.on_fairscale.memory import bucket_mib

pytest.importorskip("fairscale")


REFUSED = {
    "state on the host": (
        "oss",
        {"strategy.offload.name": "offload", "strategy.offload.optimizer": "cpu"},
        r"optimizer=cpu.*--strategy zero1_torch\.",
    ),
    "fp64": ("fairscale_fsdp", {"train.precision": "fp64"}, r"fp32 parameters.*--strategy fsdp\."),
    "stage 3 on a CPU": ("fairscale_fsdp", {}, r"needs CUDA.*--strategy fsdp\."),
    "hybrid": ("sharded_ddp", {"strategy.replicate.shard_ranks": 2}, "engine=torch"),
    "another's file": ("oss", {"strategy.replicate.config": "d.json"}, "engine=deepspeed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_do_is_refused_before_the_ranks_meet(case):
    strategy, keys, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words):
        make_plan(job_from_keys(strategy, keys), 2, "cuda" if case == "fp64" else "cpu")


@pytest.mark.parametrize(
    ("size", "mib"), [(None, 25), ("1KiB", 1), ("1MiB", 1), ("3.5MiB", 3), ("64MiB", 64)]
)
def test_a_bucket_of_stage_3_has_whole_mebibytes(size, mib):
    options = FairscaleFSDP.model_validate({"stage": 3, "engine": "fairscale", "bucket_size": size})
    assert bucket_mib(options) == mib


def advice(strategy: str, ranks: int, slots: int, sizes=(100, 100, 100, 100)) -> str | None:
    first = Timeline(tuple(Span(size, "gradients", 1, 3) for size in sizes), ((0, "backward"),))
    profile = Profile(
        parameter_bytes=400,
        gradient_bytes=400,
        buffer_bytes=0,
        optimizer_bytes=400 * slots,
        batch_bytes=8,
        passes={"first": first, "later": Timeline((), ((0, "forward"),))},
    )
    plan = make_plan(job_from_keys(strategy, {}), ranks, "cpu")
    return plan.techniques["replicate"].advise(Forecast.of(profile), profile, plan)


def test_it_says_where_sharing_cannot_help():
    assert "Start more ranks" in (advice("oss", 1, 2) or "")
    assert re.search(r"stage 1 on 2 ranks .* Use --strategy ddp\.", advice("oss", 2, 0) or "")
    assert "too little" in (advice("oss", 2, 2, sizes=(400,)) or ""), (
        "a single parameter cannot be divided"
    )
    assert advice("oss", 2, 2) is None
    assert advice("sharded_ddp", 2, 2) is None


@pytest.mark.parametrize(
    ("strategy", "instead"),
    [("oss", "zero1_torch"), ("sharded_ddp", "fsdp_zero2"), ("fairscale_fsdp", "fsdp")],
)
def test_without_fairscale_it_says_what_to_install_and_what_else_to_use(
    monkeypatch, strategy, instead
):
    for name in ("fairscale", "fairscale.optim", "fairscale.nn.data_parallel"):
        monkeypatch.setitem(sys.modules, name, None)
    words = f'`pip install "fairscale>=0.*<0.*"`, or use --strategy {instead}'
    with pytest.raises(ConfigError, match=words) as refusal:
        make_plan(job_from_keys(strategy, {}), 2, "cpu")
    assert "\n" not in str(refusal.value)
