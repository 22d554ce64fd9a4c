"""The predicted seconds of a run's step equal the planner's for the same plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bigtrain.assembly.make_plan import make_plan
from bigtrain.costs.traffic import offloaded_activations
from bigtrain.engine.setup import RunSetup, open_setup
from bigtrain.job.load import job_from_keys, load_job
from bigtrain.job.schema import Job
from bigtrain.machine.cluster import Cluster, load_cluster
from bigtrain.machine.collective_cost import collective_seconds
from bigtrain.planner.evaluate import EvaluatedPlan, PlanEvaluator
from bigtrain.planner.space import SearchSpace
from bigtrain.prediction.memory_report import StepForecast
from bigtrain.prediction.predict import forecast_rank
from bigtrain.prediction.section_library import SectionLibrary
from bigtrain.ranks.context import RunContext
from bigtrain.timing import run_seconds
from bigtrain.timing.run_seconds import RunClock, StepWatch, forecast_on, forecast_step_seconds
from bigtrain.timing.step_time import StepTimer
from bigtrain.units import GIB

WORDS = [
    "model.name=gpt",
    "model.args={num_layers: 4, width: 64, num_heads: 4, sequence_length: 32}",
    "data.name=synthetic",
    "data.args={kind: language}",
    "train.global_batch_size=8",
]


CPU = torch.device("cpu")


def cluster(ranks: int) -> Cluster:
    cpu = load_cluster("cpu")
    return cpu.model_copy(update={"node": cpu.node.model_copy(update={"devices": ranks})})


@pytest.fixture(autouse=True)
def rates(monkeypatch, tmp_path):
    """Use the rates of a file as those of this machine; no block was timed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(run_seconds, "cached_local_cluster", lambda ranks, _: cluster(ranks))


def setup_of(strategy: str, ranks: int, *words: str) -> tuple[Job, RunSetup]:
    job = load_job(None, strategy, [*WORDS, *words])
    return job, open_setup(job, make_plan(job, ranks, "cpu"))


def forecast(job: Job, setup: RunSetup, nodes: int = 1) -> StepForecast:
    ranks = setup.plan.world_size
    context = replace(RunContext.alone(), world_size=ranks, local_world_size=ranks // nodes)
    return forecast_step_seconds(job, setup.resolved, setup.workload, context)


@pytest.mark.parametrize(
    ("pp", "tp", "schedule"),
    [(1, 1, None), (2, 1, "interleaved_1f1b"), (1, 2, None), (2, 2, "1f1b")],
)
def test_a_run_is_predicted_as_the_planner_predicts_its_plan(pp, tp, schedule):
    ranks = max(2, pp * tp)
    job, setup = setup_of("single", 1)
    work, engines = setup.workload, ("torch",)
    library = SectionLibrary(
        work.model, work.micro_batch, lambda *_: work.loss, work.make_optimizer, CPU
    )
    evaluator = PlanEvaluator(job, library, StepTimer(cluster(ranks)), {"torch": 0.0}, cut=pp > 1)
    search_options = {"pp": pp, "tp": tp, "most_ranks": tp, "rows": 2, "engines": engines}
    space = SearchSpace(ranks, ranks, 8, 4, **search_options)
    candidate = next(c for c in space.candidates() if c.schedule == schedule)
    judged = evaluator.evaluate(candidate, evaluator.plan_of(candidate), GIB)
    assert isinstance(judged, EvaluatedPlan)
    run = open_setup(judged.job, make_plan(judged.job, ranks, "cpu"))
    assert run.plan.tp == tp
    forecast_found = forecast(judged.job, run)
    assert forecast_found.seconds == pytest.approx(judged.seconds.total, rel=1e-6)
    assert sum(forecast_found.parts.values()) == pytest.approx(forecast_found.seconds)
    assert forecast_found.basis == "rates"


def test_recomputation_takes_its_time():
    job, setup = setup_of("single", 1, "strategy.recompute=full")
    without = forecast(job, replace(setup, resolved=replace(setup.resolved, policies={})))
    again = forecast(job, setup)
    assert without.seconds < again.seconds < 1.4 * without.seconds


def test_a_cut_through_a_block_divides_its_seconds_as_its_flops():
    job, setup = setup_of("1f1b", 2, "strategy.cut.at=[blocks.2.mlp]")
    clock = RunClock(job, setup.resolved, setup.workload, StepTimer(cluster(2)))
    sections = clock._sections("keep").sections
    begin, edge, end = clock._edges()
    width, length = 64, 32
    attention, mlp = 8 * width**2 + 4 * length * width, 16 * width**2
    assert (begin, end) == (0, 2 + 4)
    assert edge == pytest.approx(3 + attention / (attention + mlp))
    seconds = [clock._stage_seconds(sections, *each) for each in ((begin, edge), (edge, end))]
    whole = clock._stage_seconds(sections, begin, end)
    assert sum(stage.total for stage in seconds) == pytest.approx(whole.total)
    assert forecast(job, setup).parts["compute"] == pytest.approx(
        setup.plan.batch.accumulation_steps * max(stage.total for stage in seconds)
    )


def test_ranks_with_slices_compute_less_and_talk_in_every_pass():
    """A slice has half of the products; the exchanges between them do not overlap."""
    words = ("train.micro_batch_size=2", "model.chunked_loss=false", "model.args.width=512")
    two_devices = cluster(2)
    seconds = {}
    for name, more in (("plain", ()), ("again", ("strategy.recompute=full",))):
        job, setup = setup_of("tensor", 2, *words, *more)
        (profile,) = forecast_rank(setup.resolved, setup.workload).profiles
        sent = [
            collective_seconds(exchange.kind, exchange.nbytes, 2, 1, two_devices, after_work=True)
            for exchange in profile.exchanges
        ]
        seconds[name] = forecast(job, setup).parts
        # Two in the forward and two in the backward pass of each of four blocks; recomputation
        # repeats the first. For the vocabulary: the embedding, two sums of the loss, and the
        # gradient of the head's input.
        assert len(sent) == 4 * (4 if name == "plain" else 5) + 4
        assert seconds[name]["exchange"] == pytest.approx(4 * sum(sent))
        whole_job, whole = setup_of("single", 1, *words, *more)
        clock = RunClock(
            whole_job, whole.resolved, whole.workload, StepTimer(two_devices), at_once=0
        )
        alone = clock.forecast().parts["compute"]
        assert 0.5 * alone < seconds[name]["compute"] < 0.6 * alone
    assert seconds["again"]["exchange"] > seconds["plain"]["exchange"]


def test_a_run_without_a_prediction_has_the_reason(monkeypatch):
    job, setup = setup_of("ddp", 2)
    assert "several nodes" in forecast(job, setup, nodes=2).source
    monkeypatch.setattr(run_seconds, "cached_local_cluster", lambda *_: None)
    prediction = forecast(job, setup)
    assert prediction.seconds is None
    assert (
        prediction.source
        == "the rates of this machine are not known: bigtrain doctor measures them"
    )

    def broken(*_: object) -> Cluster:
        raise RuntimeError("the seventh seal\nand more")

    monkeypatch.setattr(run_seconds, "cached_local_cluster", broken)
    assert forecast(job, setup).source == "RuntimeError: the seventh seal"


def test_only_steps_that_are_not_tracked_count():
    watch = StepWatch(RunContext.alone())
    assert watch.measured() is None
    for tracked, seconds in ((True, 9.0), (False, 1.0), (False, 3.0), (False, 2.0)):
        watch.begin(tracked=tracked)
        watch.end(seconds)
    measured = watch.measured()
    assert measured is not None
    assert (measured.count, measured.seconds) == (3, 2.0)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble"])
@pytest.mark.parametrize(
    ("pp", "stages", "layers"), [(2, 1, 4), (2, 2, 2), (2, 3, 4), (2, 4, 4), (3, 3, 4), (4, 2, 3)]
)
def test_several_stages_of_a_rank_have_their_seconds(schedule, pp, stages, layers):
    """Also if a stage is smaller than a block: 6 stages of a model with 4."""
    words = [f"strategy.cut.schedule={schedule}", f"strategy.cut.stages_per_rank={stages}"]
    words += [f"model.args.num_layers={layers}", "train.global_batch_size=12"]
    job, setup = setup_of("interleaved_1f1b", pp, *words, "train.micro_batch_size=1")
    assert len(setup.resolved.layout.ranks) == pp * stages
    prediction = forecast(job, setup)
    assert prediction.seconds is not None, prediction.source
    assert sum(prediction.parts.values()) == pytest.approx(prediction.seconds)


@pytest.mark.parametrize(
    ("edges", "count", "whole"),
    [
        ([0, 1.4, 3.6, 5], 5, [0, 1, 4, 5]),
        ([0, 0.2, 0.4, 5], 5, [0, 1, 2, 5]),
        ([0, 3.9, 3.95, 4], 4, [0, 2, 3, 4]),
        ([0, 1.2, 1.6, 2], 2, [0, 0, 1, 2]),
    ],
)
def test_every_stage_has_whole_sections(edges, count, whole):
    assert run_seconds._whole_edges(edges, count) == whole


def test_activations_that_move_to_the_host_take_the_time_of_the_link() -> None:
    """Composed from sections, none of which is recomputed."""
    keys = {
        "model.name": "gpt",
        "model.args": {"num_layers": 4, "width": 128, "num_heads": 4, "vocab_size": 64},
        "data.name": "synthetic",
        "data.args": {"kind": "language", "vocabulary": 64},
        "train.global_batch_size": 8,
        "strategy.offload.activations": "cpu",
    }
    job = job_from_keys("single", keys)
    parts = open_setup(job, make_plan(job, 1, "cuda"))
    h100 = load_cluster("h100-node")
    # So slow that it does not overlap completely
    node = h100.node.model_copy(update={"host_link": 1e6})
    slow = h100.model_copy(update={"node": node})
    forecast = forecast_on(StepTimer(slow), job, parts.resolved, parts.workload)
    recorded = forecast_rank(parts.resolved, parts.workload, 0).profiles[0]
    nbytes, _ = offloaded_activations(recorded)
    assert nbytes > 0
    assert forecast.parts["moving"] == pytest.approx(2 * nbytes / 1e6, rel=0.15)
