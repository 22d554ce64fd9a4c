"""ZeRO on DeepSpeed without ranks: refusals and advice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from golden.product import own_peaks

from bigtrain.assembly.make_plan import make_plan
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.memory.timeline import Span, Timeline
from bigtrain.strategies.zero.on_deepspeed.config import overlaps_exchanges

# Not imported here: the ranks import this module, and must load DeepSpeed as a run does.
pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is missing")


ALONE = """
import os, torch, bigtrain
from functools import partial
from support.nets import TinyLM, tokens
from torch.nn.functional import cross_entropy
samples = tokens(8, ignored=False)
mean = lambda output, target: cross_entropy(output.flatten(0, 1), target.flatten())
loss = bigtrain.MeanLoss(mean, ignore_index=-100)
for stage in (1, 2, 3):
    how = {"strategy": f"zero{stage}", "train__global_batch_size": 8, "device": "cpu"}
    with bigtrain.prepare(TinyLM, loss, partial(torch.optim.SGD, lr=0.1), **how) as engine:
        found = [engine.step((samples.inputs, samples.targets)).loss for _ in range(3)]
        print(found, flush=True)
assert not os.path.exists(os.environ["TORCH_EXTENSIONS_DIR"])
"""


def test_one_rank_trains_silently_and_nothing_is_compiled(tmp_path):
    root = str(Path(__file__).parents[2])
    names = {n: v for n, v in os.environ.items() if n not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env = {**names, "PYTHONPATH": root, "TORCH_EXTENSIONS_DIR": str(tmp_path / "built")}
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = [eval(line) for line in done.stdout.splitlines()]
    assert len(lines) == 3
    assert lines[1] == pytest.approx(lines[0], abs=1e-6)
    assert lines[2] == pytest.approx(lines[0], abs=1e-6)
    assert done.stderr == ""


OF_UNITS = "strategy.replicate"
REFUSED = {
    "keep_gathered": (
        "zero3",
        {f"{OF_UNITS}.keep_gathered": 2},
        "keep_gathered=2 is for torch's.*deepspeed, stage 3.*stage3_param_persistence_threshold",
    ),
    "reduce": ("zero2", {f"{OF_UNITS}.reduce": "step"}, "reduces once a step in stage 1"),
    "prefetch": ("zero3", {f"{OF_UNITS}.prefetch": 1}, "set zero_opt.*prefetch_bucket_size"),
    "fp64": ("zero1", {"train.precision": "fp64"}, r"updates in fp32.*--strategy zero1_torch"),
    "fp64, 2": ("zero2", {"train.precision": "fp64"}, r"--strategy fsdp_zero2 \(engine=torch\)"),
    "fp64, 3": ("zero3", {"train.precision": "fp64"}, r"--strategy fsdp \(engine=torch\)"),
    "hybrid": ("zero3", {"strategy.replicate.shard_ranks": 2}, "engine=torch"),
    "whole": ("zero2_offload", {"strategy.offload.parameters": "cpu"}, "--strategy zero3"),
    "disk": (
        "zero3_offload",
        {"strategy.offload.optimizer": "disk", "strategy.offload.path": "/tmp"},
        "device=nvme.*--strategy fsdp with strategy.offload.optimizer=disk",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_do_is_refused_before_the_ranks_meet(case):
    strategy, keys, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words) as refusal:
        make_plan(job_from_keys(strategy, keys), 2, "cpu")
    assert "\n" not in str(refusal.value)


def test_without_deepspeed_it_says_what_to_install_and_what_else_to_use(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    for strategy, instead in (("zero1", "zero1_torch"), ("zero2", "fsdp_zero2"), ("zero3", "fsdp")):
        words = f'`pip install "deepspeed>=0.*<0.*"`, or use --strategy {instead}'
        with pytest.raises(ConfigError, match=words) as refusal:
            make_plan(job_from_keys(strategy, {}), 2, "cpu")
        assert "\n" not in str(refusal.value)


def profile_of(activations: int, elements: int = 1_000_000) -> Profile:
    saved = (Span(activations, "activations", 1, 9),)
    passes = dict.fromkeys(("first", "later"), Timeline(saved, ((0, "forward"), (5, "backward"))))
    return Profile(4 * elements, 4 * elements, 0, 8 * elements, 0, elements, 2.0, 4, passes)


@pytest.mark.parametrize(
    ("world_size", "keys", "profile", "words"),
    [
        (1, {}, profile_of(0), "nothing to shard on one rank.*--strategy single"),
        (2, {}, profile_of(1_000_000), None),
        (2, {"strategy.replicate.bucket_size": "64MiB"}, profile_of(0), r"need .* MiB, plain DDP"),
        (2, {}, profile_of(100_000_000), r"9\d% of the predicted peak .* are activations"),
    ],
)
def test_it_says_where_it_cannot_help(world_size, keys, profile, words):
    plan = make_plan(job_from_keys("zero2", keys), world_size, "cpu")
    advice = plan.techniques["replicate"].advise(Forecast.of(profile), profile, plan)
    assert advice is None if words is None else re.search(words, advice)


@pytest.mark.parametrize(("stage", "overlaps"), [(1, False), (2, False), (3, True)])
def test_a_section_without_overlap_comm_means_what_deepspeed_means(stage, overlaps):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for section in ({}, {"overlap_comm": None}, {"overlap_comm": not overlaps}):
        theirs = DeepSpeedZeroConfig(stage=stage, **section).overlap_comm
        assert overlaps_exchanges({"stage": stage, **section}) is theirs
    assert overlaps_exchanges({"stage": stage}) is overlaps


def test_offload_on_a_cpu_is_no_use():
    plan = make_plan(
        job_from_keys("zero3_offload", {"strategy.offload.optimizer": "device"}), 2, "cpu"
    )
    advice = plan.techniques["replicate"].advise(
        Forecast.of(profile_of(1_000_000)), profile_of(1_000_000), plan
    )
    assert "parameters=cpu moves nothing" in advice


TWO = {"train.micro_batch_size": 2}
LOW = {"train.precision": "bf16"}
TRACKED: dict[str, tuple[str, str, dict[str, object], tuple[int, int]]] = {
    # Its first parameter is used last, so that its gradient comes first.
    "the part of each rank": ("odd", "zero2", {}, (379_596, 383_392)),
    "whole gradients wait": ("odd", "zero1", TWO, (447_168, 460_996)),
    "what is added to is gone": ("tied", "zero1", TWO, (841_768, 915_688)),
    "not shared evenly": ("odd", "zero3", {}, (354_321, 354_321)),
    "converted": ("tied", "zero2", LOW, (824_732, 919_836)),
}
"""Peaks of two real ranks, tracked with DeepSpeed 0.19.8 and torch 2.15 on a CPU."""


@pytest.mark.parametrize("case", TRACKED)
def test_each_rank_is_forecast_as_it_was_tracked(case):
    net, strategy, keys, tracked = TRACKED[case]
    predicted = own_peaks(net, strategy, 2, {"train.global_batch_size": 16, **keys})
    assert predicted == pytest.approx(tracked, rel=1e-3)
