"""Bounds of the planner in bf16, with weights that autocast converts at each use and without."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.plan_candidates import GPT, candidate_of, every_plan

from bigtrain.job.load import load_job
from bigtrain.machine.cluster import load_cluster
from bigtrain.memory.cap import Limit
from bigtrain.planner.ask import Question, ask, open_evaluator
from bigtrain.planner.bounds import PlanBounds, are_no_larger
from bigtrain.planner.evaluate import EvaluatedPlan
from bigtrain.planner.search import DOMINANCE_SLACK
from bigtrain.planner.space import Candidate

A100 = load_cluster("a100-node")


def bf16_question() -> Question:
    """Plans of a model so large that transfer times exceed the latency of launches."""
    words = ["model.args={num_layers: 8, width: 1024, num_heads: 16, sequence_length: 512}"]
    job = load_job(None, "single", [*GPT, *words, "train.precision=bf16"])
    return Question(job, A100, 4, Limit(2**40, 0), 16, margins={"torch": 0.0})


def on_torch(candidate: Candidate) -> Candidate:
    assert candidate.replicate is not None
    options = {**candidate.replicate.options, "engine": "torch"}
    return replace(
        candidate, replicate=replace(candidate.replicate, options=options, engine="torch")
    )


def test_the_search_finds_the_fastest_plan() -> None:
    """Evaluate every candidate: the search may miss the fastest by at most the slack."""
    planned = ask(bf16_question())
    every = every_plan(planned.search, planned.question.limit)
    seconds = [one.seconds.total for one in every]
    best = planned.result.best[0].seconds.total
    assert (1 - DOMINANCE_SLACK) * best <= min(seconds) <= best


def test_stage_2_of_shards_has_its_parameters_whole_after_a_forward_pass() -> None:
    """Stage 2 holds two bytes for each number in addition to the shards of stage 3."""
    _, _, judge = open_evaluator(bf16_question())
    bounds = PlanBounds(judge)
    numbers = judge.whole_model(2).numbers
    least = {}
    for preset in ("fsdp_zero2", "fsdp"):
        candidate = on_torch(candidate_of(1, 4, preset, 2, 1))
        plan = judge.plan_of(candidate)
        least[preset] = bounds.least_bytes(candidate, plan)
        one = judge.evaluate(candidate, plan, 2**40)
        assert isinstance(one, EvaluatedPlan)
        assert least[preset] <= one.peak.bytes
    shards = 12 * -(-numbers // 4)
    assert least["fsdp_zero2"] == pytest.approx(2 * numbers + shards, rel=0.001)
    assert least["fsdp"] < least["fsdp_zero2"]


def test_slices_with_other_sections_are_not_compared() -> None:
    """A later run may have recorded that a model does not run in blocks."""
    sections: Any = [SimpleNamespace(name=name) for name in ("", "blocks.0", "")]
    assert not are_no_larger([sections[0], sections[-1]], sections, 1)
    assert not are_no_larger(sections, [sections[0], sections[-1]], 1)
