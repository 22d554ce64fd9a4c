"""`bigtrain verify --fuzz`: the drawn plans, the reduction of a failure, and its repetition."""

from __future__ import annotations

import json
import random
import shlex
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from support.zygote import forked_cli

from bigtrain.job.arguments import verify_arguments
from bigtrain.job.load import load_job
from bigtrain.planner.space import SearchSpace
from bigtrain.ranks.exit_status import run_guarded
from bigtrain.verify.command import main
from bigtrain.verify.fuzz import FuzzedPlan, draw_plans, model_sizes, shrink

NAMES = ["blocks.1", "blocks.2", "blocks.3"]


def drawn_plans(seed, count):
    """The first plans that a seed draws."""
    spaces = [SearchSpace(n, n, 16, len(NAMES) + 1) for n in (2, 4)]
    return list(islice(draw_plans(random.Random(seed), spaces, NAMES), count))


def test_a_seed_draws_the_same_plans_of_all_kinds_and_each_is_a_job():
    plans = drawn_plans(0, 60)
    assert plans == drawn_plans(0, 60)
    assert plans != drawn_plans(1, 60)
    assert {(plan.pp, plan.dp) for plan in plans} == {(1, 2), (2, 1), (1, 4), (2, 2), (4, 1)}
    assert {plan.recompute for plan in plans} == {None, "full", "selective", "every_2"}
    assert {plan.cut is None for plan in plans} == {True, False}
    assert any(plan.at for plan in plans)
    assert any(plan.offload for plan in plans)
    assert len({plan.replicate for plan in plans}) > 4
    for plan in plans[:12]:
        job = load_job(None, plan.strategy, plan.words)
        assert (job.mesh.pp, job.mesh.dp) == (plan.pp, plan.dp)
        assert job.train.global_batch_size == 16
        assert job.strategy.cut is None or tuple(job.strategy.cut.options.get("at", ())) == plan.at


def test_layers_are_sliced_where_they_can_be():
    spaces = [SearchSpace(n, n, 16, len(NAMES) + 1, most_ranks=4) for n in (2, 4)]
    plans = list(islice(draw_plans(random.Random(0), spaces, NAMES), 80))
    meshes = {(1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 1, 4), (1, 2, 2), (2, 1, 2)}
    assert meshes < {(plan.pp, plan.dp, plan.tp) for plan in plans}
    sliced = [plan for plan in plans if plan.tp > 1]
    assert {plan.slices for plan in sliced} == {"tensor", "tensor_sequence"}
    assert {plan.slices for plan in plans if plan.tp == 1} == {None}
    for plan in sliced[:12]:
        job = load_job(None, plan.strategy, plan.words)
        assert (job.mesh.pp, job.mesh.dp, job.mesh.tp) == (plan.pp, plan.dp, plan.tp)
        assert job.strategy.slice.name == "tensor"
        assert plan.num_ranks == plan.pp * plan.dp * plan.tp


LARGE = FuzzedPlan(
    *(2, 4, 4, 8),
    replicate="zero1",
    cut="1f1b",
    recompute="full",
    offload="offload_disk",
    at=("blocks.2",),
    tp=4,
    slices="tensor_sequence",
)
SIZES = {"num_layers": 4, "width": 256, "num_heads": 4}


@pytest.mark.parametrize(
    ("fails", "smallest"),
    [
        (lambda _: True, {"pp": 1, "dp": 1, "num_layers": 1, "width": 1, "num_heads": 1}),
        (lambda plan: plan.dp >= 2 and plan.steps == 3, {"dp": 2, "steps": 3, "width": 1}),
        (lambda plan: dict(plan.sizes).get("width", 256) >= 16, {"width": 16, "num_layers": 1}),
        (lambda plan: plan.cut == "1f1b" and plan.micro_batches > 1, {"pp": 2, "micro_batches": 2}),
        (lambda plan: plan.recompute == "full" and plan.rows >= 3, {"rows": 4}),
        (lambda plan: plan.tp > 1, {"tp": 2, "slices": "tensor", "pp": 1, "dp": 1}),
    ],
)
def test_a_failure_is_made_as_small_as_it_stays_one(fails, smallest):
    plan = shrink(LARGE, SIZES, fails, most=1000)
    assert fails(plan)
    values = vars(plan) | dict(plan.sizes)
    assert {name: values[name] for name in smallest} == smallest
    assert (plan.recompute == "full") is ("rows" in smallest)
    assert (plan.cut is not None) is ("micro_batches" in smallest)
    assert plan.offload is None
    assert plan.at == ()


def test_no_more_plans_are_tried_than_said_and_none_twice():
    tried = []
    shrink(LARGE, SIZES, lambda plan: tried.append(plan) or plan.dp > 1, most=12)
    assert len(tried) == len(set(tried)) <= 12


def test_the_line_that_repeats_a_plan_is_the_plan():
    options = verify_arguments(["--fuzz", "3", "--seed", "7", "model.args={width: 32}"])
    assert (options.fuzz, options.seed) == (3, 7)
    line = LARGE.command(options)
    words = shlex.split(line)
    assert words[:2] == ["bigtrain", "verify"]
    again = verify_arguments(words[2:])
    assert (again.num_ranks, again.strategies, again.steps) == (32, LARGE.strategy, 3)
    assert again.overrides == ["model.args={width: 32}", *LARGE.words]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fuzz", "-1"], "--fuzz -1: at least 1 is needed"),
        (["--fuzz", "0"], "--fuzz 0: at least 1 is needed"),
        (["--seed", "3"], "--seed is the seed of --fuzz. Add --fuzz N"),
        (
            ["--fuzz", "2", "--strategies", "ddp"],
            "--fuzz draws strategies, and --strategy names some. Leave one of them out",
        ),
        (["--fuzz", "1", "model.name=support.odd_strategies:Nothing"], "has no 'Nothing'"),
        (
            ["--fuzz", "1", "-n", "3", "mesh.pp=2", "train.global_batch_size=9"],
            "verify --fuzz: no plan of at most 3 ranks can be drawn: it needs a number of ranks "
            "that mesh.pp x mesh.tp = 2 divides, and that divides the 9 samples of a step.",
        ),
    ],
)
def test_wrong_input(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert run_guarded(lambda: main(words)) == 2
    assert message in capsys.readouterr().err


def test_the_sizes_of_a_model_are_found():
    job = load_job(None, "single", ["model.name=support.odd_strategies:Net"])
    assert model_sizes(job, torch.nn.Identity()) == {"num_classes": 10}
    model = SimpleNamespace(config=SimpleNamespace(num_layers=4, width=256, bias=True, rate=0.5))
    changed = load_job(None, "single", ["model.args={width: 32}"])
    assert model_sizes(changed, model) == {"num_layers": 4, "width": 32}


def test_a_seeded_fault_is_found_and_made_small(tmp_path):
    words = ["model.name=support.odd_strategies:Net", "data.name=synthetic"]
    words += ["mesh.pp=1", "mesh.tp=1"]
    words += ["data.args={kind: classification, input_shape: [1, 8, 8]}"]
    words += ["train.global_batch_size=8", "strategy.replicate=support.odd_strategies:Forgets"]
    line = ["verify", "--fuzz", "1", "-n", "2", "--json", "--output", "found", *words]
    done = forked_cli(line, cwd=tmp_path, timeout=600)
    assert done.returncode == 1, done.stderr + done.stdout
    (row,) = json.loads(done.stdout)["rows"]
    assert row["verdict"] == "differs"
    assert "the gradient of the parameter head.bias" in row["first_difference"]
    assert "--steps 1" in row["command"]
    assert (
        "mesh.dp=2 mesh.tp=1 train.global_batch_size=2 train.micro_batch_size=1" in row["command"]
    )
