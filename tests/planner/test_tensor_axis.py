"""Slices over the tp axis in the planner: search, bounds, and forecasts equal to those of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.plan_candidates import every_plan

from bigtrain.assembly.make_plan import make_plan
from bigtrain.core.variants import Variant, preset_options
from bigtrain.engine.setup import open_setup
from bigtrain.errors import ConfigError
from bigtrain.job.load import load_job
from bigtrain.machine.cluster import load_cluster
from bigtrain.memory.cap import Limit
from bigtrain.planner.ask import PlannedAnswer, Question, ask
from bigtrain.planner.bounds import PlanBounds
from bigtrain.planner.evaluate import EvaluatedPlan, PlanEvaluator
from bigtrain.planner.show import plan_text, plan_values
from bigtrain.planner.space import Candidate, SearchSpace
from bigtrain.prediction.predict import forecast_rank
from bigtrain.prediction.section_library import SectionLibrary
from bigtrain.timing.step_time import StepTimer
from bigtrain.units import MIB

WORDS = [
    "model.name=gpt",
    "model.args={num_layers: 4, width: 64, num_heads: 4, sequence_length: 32}",
    "data.name=synthetic",
    "data.args={kind: language}",
    "checkpoint.at_end=false",
]
NODE = load_cluster("a100-node")


def asked(limit: int, devices: int, *words: str, batch: int = 8, **given: Any) -> PlannedAnswer:
    job = load_job(None, "single", [*WORDS, *words, f"train.global_batch_size={batch}"])
    more = {"margins": {"torch": 0.0}, **given}
    return ask(Question(job, NODE, devices, Limit(limit, reserved=0), batch, **more))


@pytest.fixture(scope="module")
def deep() -> PlanEvaluator:
    job = load_job(
        None, "single", [*WORDS, "model.args.num_layers=9", "train.global_batch_size=16"]
    )
    work = open_setup(job, make_plan(job, 1, "cpu")).workload
    given = (lambda *_: work.loss, work.make_optimizer, torch.device("cpu"))
    library = SectionLibrary(work.model, work.micro_batch, *given)
    cluster = load_cluster("cpu")
    node = cluster.node.model_copy(update={"devices": 8})
    timer = StepTimer(cluster.model_copy(update={"node": node}))
    return PlanEvaluator(job, library, timer, {"torch": 0.0}, cut=True)


def of(label: str, pp: int, dp: int, tp: int, rows: int) -> Candidate:
    """The candidate with this label on eight devices."""
    space = SearchSpace(8, 8, 16, 9, pp=pp, dp=dp, tp=tp, rows=rows, most_ranks=8)
    return next(one for one in space.candidates() if one.label == label)


DEEP = [
    ("tensor+ddp", 1, 4, 2, 2),
    ("tensor", 1, 1, 8, 4),
    ("tensor_sequence", 1, 1, 8, 4),
    ("tensor_sequence+fsdp", 1, 2, 4, 2),
    ("1f1b+tensor+zero1_torch", 2, 2, 2, 2),
    ("interleaved_1f1b+tensor+fsdp_zero2", 2, 2, 2, 2),
    ("gpipe+tensor", 4, 1, 2, 4),
    ("zbv+tensor", 2, 1, 4, 2),
    ("1f1b+tensor_sequence+zero1_torch", 2, 2, 2, 2),
    ("interleaved_1f1b+tensor_sequence+fsdp_zero2", 2, 2, 2, 2),
    ("gpipe+tensor_sequence", 4, 1, 2, 4),
    ("zbv+tensor_sequence+ddp", 2, 2, 2, 2),
    ("1f1b+tensor_sequence", 2, 1, 4, 2),
]


@pytest.mark.parametrize("named", DEEP, ids=lambda one: f"{one[0]} {one[1:]}")
def test_a_plan_with_slices_is_forecast_as_its_run(deep: PlanEvaluator, named: Any) -> None:
    judge, candidate = deep, of(*named)
    plan = judge.plan_of(candidate)
    roomy = judge.evaluate(candidate, plan, 2**40)
    assert isinstance(roomy, EvaluatedPlan)
    tight = judge.evaluate(candidate, plan, int(0.85 * roomy.peak.bytes))
    for judged in (roomy, tight):
        if not isinstance(judged, EvaluatedPlan):
            # A peak in the optimizer's step, or of blocks that cannot be recomputed, cannot shrink.
            assert "zero1" in candidate.label or plan.splits_backward
            continue
        parts = open_setup(judged.job, make_plan(judged.job, 8, "cpu"))
        for rank, peak in judged.peaks.items():
            found = forecast_rank(parts.resolved, parts.workload, rank).forecast
            assert found is not None
            assert peak.bytes == pytest.approx(found.peak().bytes, rel=0.002), rank
        profile = judge._fits[candidate, True].even_stage()
        sent = {traffic.kind for one in plan.in_order for traffic in one.traffic(profile, plan)}
        assert "all_reduce" in sent


def test_nothing_with_slices_is_faster_than_what_is_found() -> None:
    """Every candidate is evaluated and compared with the search that stops early."""
    answer = asked(40 * MIB, 4, tp=2)
    every = every_plan(answer.search, answer.question.limit)
    found = [one.seconds.total for one in every]
    best = [one.seconds.total for one in answer.result.best]
    assert best == pytest.approx(sorted(found)[: len(best)])
    assert best


def test_a_plan_with_slices_is_read_back_from_its_file_and_by_its_words(tmp_path: Path) -> None:
    answer = asked(40 * MIB, 4, tp=2)
    for one in answer.result.best:
        file = tmp_path / "plan.yaml"
        file.write_text(plan_text(answer, one, "bigtrain plan"))
        given = one.candidate
        mesh = [f"mesh.{axis}={n}" for axis, n in zip(("pp", "dp", "tp"), given.axes, strict=True)]
        typed = load_job(None, one.label, [*WORDS, *mesh, "train.global_batch_size=8"])
        for job in (load_job(None, None, WORDS, plan=str(file)), typed):
            plan = make_plan(job, 4, "cpu")
            assert (plan.pp, plan.dp, plan.tp) == given.axes
            for role in ("slice", "replicate"):
                assert plan.techniques.get(role) == one.plan.techniques.get(role)
        assert plan_values(answer, one)["mesh"] == {"pp": given.pp, "dp": given.dp, "tp": 2}


def test_the_tp_axis_stays_on_a_node_and_below_what_the_model_has() -> None:
    def counts(devices: int, per_node: int, most: int, tp: int | None = None) -> set[int]:
        space = SearchSpace(devices, per_node, 48, 4, most_ranks=most, tp=tp)
        return {one.tp for one in space.candidates()}

    assert counts(16, 8, 4096) == {1, 2, 4, 8}
    assert counts(16, 8, 5) == {1, 2, 4}
    assert counts(12, 6, 4096) == {1, 2, 3, 6}
    assert counts(2, 8, 4096) == {1, 2}
    assert counts(8, 8, 1) == {1}
    assert counts(16, 8, 4096, tp=16) == {16}  # an explicit mesh.tp may span nodes
    with pytest.raises(
        ConfigError, match=r"with mesh.tp=3: pp \* dp \* tp has to be 16.*Leave mesh.tp out\."
    ):
        counts(16, 8, 4096, tp=3)


def test_labels_and_meshes_say_who_slices() -> None:
    slices = Variant("tensor_sequence", preset_options("slice", "tensor_sequence"))
    one = Candidate(2, 1, None, 1, 4, tp=4, slices=slices)
    assert (one.label, one.mesh, one.devices) == ("tensor_sequence", "pp 2 x dp 1 x tp 4", 8)
    assert Candidate(2, 1, None, 1, 4).mesh == "pp 2 x dp 1"


def test_a_sequence_that_is_not_there_is_not_searched_twice() -> None:
    """A network for images has no sequence: tensor_sequence would be the same plan as tensor."""
    words = ["model.name=lenet", "data.args={kind: classification, input_shape: [1, 32, 32]}"]
    job = load_job(None, "single", [*words, "data.name=synthetic", "train.global_batch_size=8"])
    answer = ask(Question(job, NODE, 2, Limit(2**40, 0), 8, tp=2, margins={"torch": 0.0}))
    labels = {one.candidate.label for one in answer.result.best}
    assert labels == {"tensor"}
    reasons = {one.reason for one in answer.result.rejected}
    assert "tensor_sequence: the same as with tensor" in reasons


def test_what_cannot_be_sliced_is_planned_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import torch\n\nclass Net(torch.nn.LayerNorm):\n    def __init__(self):\n"
    (tmp_path / "normed.py").write_text(f"{text}        super().__init__(2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = ["model.name=normed:Net", "data.args={input_shape: [2], num_classes: 2}"]
    job = load_job(None, "single", [*words, "data.name=synthetic", "train.global_batch_size=4"])
    question = Question(job, NODE, 2, Limit(2**40, reserved=0), 4, margins={"torch": 0.0})
    answer = ask(question)
    assert {one.candidate.tp for one in answer.result.best} == {1}
    assert all(one.tp == 1 for one in answer.search.space.candidates())


def test_stretches_of_a_sequence_hold_less_than_whole_activations(deep: PlanEvaluator) -> None:
    whole, stretches = of("tensor", 1, 1, 8, 4), of("tensor_sequence", 1, 1, 8, 4)
    bounds = PlanBounds(deep)
    for one in (whole, stretches):
        bounds.even_seconds(one, deep.plan_of(one))
    assert bounds.is_no_larger(stretches, whole)
    assert not bounds.is_no_larger(whole, stretches)


WIDE = "model.args={num_layers: 2, width: 8192, num_heads: 64, sequence_length: 2048}"


@pytest.mark.parametrize(
    ("words", "is_left_out"), [([WIDE, "train.precision=bf16"], True), ([], False)]
)
def test_slices_that_hold_more_and_are_hardly_faster_are_left_out(
    words: list[str], is_left_out: bool
) -> None:
    """In a small model sequence shards are slower, as they have more kernels: both are listed."""
    answer = asked(2**40, 8, *words, tp=8).result
    left_out = [
        one
        for one in answer.rejected
        if "uses no more memory and is at most 3% slower" in one.reason
    ]
    labels = {one.candidate.label for one in answer.best}
    assert {one.candidate.label for one in left_out} == ({"tensor"} if is_left_out else set())
    assert labels == ({"tensor_sequence"} if is_left_out else {"tensor", "tensor_sequence"})
