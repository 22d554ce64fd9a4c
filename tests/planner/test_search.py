"""The search finds the same as an exhaustive search, and its forecasts equal those of the runs."""

from __future__ import annotations

import random
import re
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.plan_candidates import GPT, ask_with_shared_model, candidate_of, every_plan

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.setup import open_setup
from bigtrain.job.load import load_job
from bigtrain.job.schema import Job
from bigtrain.machine.cluster import Cluster, load_cluster
from bigtrain.memory.cap import Limit
from bigtrain.planner.ask import PlannedAnswer, Question, ask, rank_limits
from bigtrain.planner.evaluate import EvaluatedPlan, RejectedPlan
from bigtrain.planner.search import MAX_PLANS
from bigtrain.planner.show import no_fit_lines, plan_document, plan_text, rejection_lines
from bigtrain.planner.space import Candidate, SearchSpace
from bigtrain.prediction.predict import forecast_rank
from bigtrain.prediction.sections import OpLog
from bigtrain.timing.step_time import MicroBatchSeconds, StepSeconds, StepTimer
from bigtrain.units import GIB, MIB, format_count

WHOLE_LAYERS = ["mesh.tp=1"]
"""Searches with tensor slices are in test_tensor_axis.py."""
NODE = load_cluster("a100-node")


def question(
    devices: int, memory: int | Limit, words: list[str] | None = None, **more: Any
) -> Question:
    job = load_job(None, "single", [*GPT, *WHOLE_LAYERS, *(words or [])])
    limit = memory if isinstance(memory, Limit) else Limit(memory, reserved=0)
    given = {"memory": limit, "margins": {"torch": 0.0}} | more
    return Question(job, NODE, devices, global_batch_size=8, **given)


@cache
def on_four(limit: int) -> PlannedAnswer:
    """The answer for four devices with `limit` MiB each."""
    return ask_with_shared_model(question(4, limit * MIB))


@pytest.fixture(scope="module")
def roomy() -> PlannedAnswer:
    return on_four(40)


def test_nothing_that_fits_is_faster_than_what_is_found(roomy: PlannedAnswer) -> None:
    """Every candidate is evaluated and compared with the search that stops early."""
    every = every_plan(roomy.search, roomy.question.limit)
    found = [one.seconds.total for one in every]
    found.sort()
    best = [one.seconds.total for one in roomy.result.best]
    assert best[0] <= found[0] * (1 + 1e-9)  # it has the finest form of its kind
    assert best[1:] == pytest.approx(found[1 : len(best)])
    assert len(best) == min(MAX_PLANS, len(found))


@pytest.mark.parametrize(("limit", "modes"), [(40, {None}), (3, {None}), (2, {None, "full"})])
def test_what_the_table_calls_a_plan_is_typed_back(limit: int, modes: set[str | None]) -> None:
    found = set()
    for one in on_four(limit).result.best:
        given = one.candidate
        if not given.is_typed:
            continue
        mesh = [
            f"mesh.pp={given.pp}",
            f"mesh.dp={given.dp}",
            f"train.micro_batch_size={given.rows}",
        ]
        typed = make_plan(load_job(None, one.label, [*GPT, *mesh]), 4, "cpu")
        for role in ("replicate", "offload"):
            assert typed.techniques.get(role) == one.plan.techniques.get(role)
        if given.schedule is not None:
            assert typed.techniques["cut"].schedule == given.schedule
            assert typed.techniques["cut"].per_rank() == given.stages_per_rank
        recompute = typed.techniques.get("recompute")
        mode = None if recompute is None else recompute.mode
        # A plan whose blocks differ names them only in its file.
        alike = set(one.recomputed.values()) if len(one.recomputed) == 4 else set()
        assert mode == (alike.pop() if len(alike) == 1 else None)
        found.add(mode)
    assert found == modes


@pytest.mark.parametrize("limit", [40, 3, 2])
def test_a_plan_is_forecast_as_the_run_of_its_file(limit: int, tmp_path: Path) -> None:
    planned = on_four(limit)
    for one in planned.result.best[:3]:
        file = tmp_path / "plan.yaml"
        file.write_text(plan_text(planned, one, "bigtrain plan"))
        job = load_job(None, None, GPT, plan=str(file))
        plan = make_plan(job, 4, "cpu")
        assert (plan.pp, plan.dp) == (one.candidate.pp, one.candidate.dp)
        assert plan.batch.accumulation_steps == one.candidate.micro_batches
        parts = open_setup(job, plan)
        peaks = []
        for rank in range(plan.pp):
            found = forecast_rank(parts.resolved, parts.workload, rank).forecast
            assert found is not None
            peaks.append(found.peak().bytes)
        schedule = one.candidate.schedule or ""
        # The run does not split the backward pass, so it uses no less
        if "zero_bubble" in schedule:
            assert max(peaks) <= one.peak.bytes * 1.015
        else:
            assert one.peak.bytes == pytest.approx(max(peaks), rel=0.01), one.candidate


DEEP = ["model.args.num_layers=24", "train.global_batch_size=16"]


def described(value: Any) -> str:
    """The label of a plan, or whether a candidate fits."""
    if isinstance(value, float):
        return "tight" if value < 1 else "roomy"
    return f"{value.label} {value.pp}x{value.dp} {value.rows}"


MANY_BLOCKS = [
    candidate_of(2, 1, "single", 1, 16, "interleaved_1f1b", 2),
    candidate_of(2, 1, "single", 2, 8, "interleaved_1f1b", 4),
    candidate_of(2, 2, "fsdp", 1, 8, "interleaved_1f1b", 2),
    candidate_of(2, 2, "fsdp", 1, 8, "interleaved_zero_bubble", 2),
    candidate_of(2, 2, "fsdp_zero2", 2, 4, "interleaved_zero_bubble", 4),
    candidate_of(2, 2, "zero1_torch", 1, 8, "1f1b"),
    candidate_of(2, 2, "fsdp_zero2", 2, 4, "gpipe"),
    candidate_of(1, 2, "fsdp", 4, 2),
    candidate_of(1, 2, "ddp", 4, 2),
    candidate_of(1, 2, "zero2", 4, 2),
    candidate_of(1, 2, "zero2", 8, 1),
    candidate_of(1, 4, "zero3", 4, 1),
    candidate_of(1, 2, "oss", 4, 2),
    candidate_of(1, 2, "sharded_ddp", 4, 1),
]


@pytest.mark.parametrize(("share", "candidate"), [*product([1.0, 0.9], MANY_BLOCKS)], ids=described)
def test_many_blocks_are_forecast_as_each_of_them(
    deep: PlannedAnswer, candidate: Candidate, share: float
) -> None:
    """Equal blocks and equal stages are evaluated only once."""
    judge = deep.search.evaluator
    plan = judge.plan_of(candidate)
    judged = judge.evaluate(candidate, plan, 2**40)
    assert isinstance(judged, EvaluatedPlan)
    if "zero1_torch" not in candidate.label:  # its peak is in the optimizer's step
        judged = judge.evaluate(candidate, plan, int(judged.peak.bytes * share))
    assert isinstance(judged, EvaluatedPlan)
    parts = open_setup(judged.job, make_plan(judged.job, candidate.pp * candidate.dp, "cpu"))
    for rank, peak in judged.peaks.items():
        found = forecast_rank(parts.resolved, parts.workload, rank).forecast
        assert found is not None
        assert peak.bytes == pytest.approx(found.peak().bytes, rel=0.002), rank


@pytest.mark.parametrize(
    "candidate",
    [
        candidate_of(2, 1, "single", 1, 16, "interleaved_zero_bubble", 2),
        candidate_of(2, 1, "single", 4, 4, "interleaved_zero_bubble", 4),
        candidate_of(2, 1, "single", 2, 8, "zbv_zero_bubble", 2),
        candidate_of(2, 2, "zero1_torch", 1, 8, "zbv_zero_bubble", 2),
        candidate_of(4, 1, "single", 4, 4, "zbv_zero_bubble", 2),
        candidate_of(4, 1, "single", 1, 16, "zbv_zero_bubble", 2),
    ],
    ids=lambda one: f"{one.label} {one.pp}x{one.dp} {one.stages_per_rank}",
)
def test_backward_passes_in_two_parts_are_forecast_as_such(
    deep: PlannedAnswer, candidate: Candidate
) -> None:
    judge = deep.search.evaluator
    judged = judge.evaluate(candidate, judge.plan_of(candidate), 2**40)
    assert isinstance(judged, EvaluatedPlan)
    assert judged.recomputed == {}
    parts = open_setup(judged.job, make_plan(judged.job, candidate.pp * candidate.dp, "cpu"))
    for rank, peak in judged.peaks.items():
        found = forecast_rank(parts.resolved, parts.workload, rank).forecast
        assert found is not None
        own = found.peak().bytes  # the run may compute the head's weight gradients earlier
        assert 0.998 * own <= peak.bytes <= 1.03 * own, rank
    # Not evaluated, because a bound shows that it is lower
    for rank in set(range(candidate.pp)) - set(judged.peaks):
        found = forecast_rank(parts.resolved, parts.workload, rank).forecast
        assert found is not None
        assert found.peak().bytes <= 1.002 * judged.peak.bytes, rank
    tight = judge.evaluate(candidate, judge.plan_of(candidate), int(judged.peak.bytes * 0.9))
    assert isinstance(tight, RejectedPlan)  # a block recomputed in both parts would use more memory


def test_a_plan_that_a_run_would_refuse_for_its_cut_is_none(deep: PlannedAnswer) -> None:
    """A V schedule puts the first and the last stage on one rank, and the tied weights
    with them.
    """
    judge = deep.search.evaluator
    tied = candidate_of(2, 2, "fsdp", 1, 8, "zbv_zero_bubble", 2)
    found = judge.evaluate(tied, judge.plan_of(tied), 2**40)
    assert isinstance(found, RejectedPlan)
    assert "embedding.token.weight is used by two stages of one rank" in found.reason


@pytest.fixture(scope="module")
def deep() -> PlannedAnswer:
    job = load_job(None, "single", [*GPT, *DEEP])
    here = load_cluster("cpu")
    here = here.model_copy(update={"node": here.node.model_copy(update={"devices": 4})})
    margins = {"torch": 0.0, "deepspeed": 0.0}
    return ask(Question(job, here, 4, Limit(2**40, 0), 16, margins=margins))


def test_less_room_costs_time_and_blocks_keep_less(roomy: PlannedAnswer) -> None:
    tight = ask_with_shared_model(question(1, 6 * MIB, dp=1))
    free = ask_with_shared_model(question(1, 400 * MIB, dp=1))
    assert free.result.best[0].recomputed == {}
    assert tight.result.best[0].peak.bytes <= 6 * MIB
    assert tight.result.best[0].seconds.total > free.result.best[0].seconds.total
    front = roomy.result.front
    peaks = [one.peak.bytes for one in front]
    seconds = [one.seconds.total for one in front]
    assert peaks == sorted(peaks, reverse=True)
    assert seconds == sorted(seconds)


@cache
def frontier() -> PlannedAnswer:
    return ask_with_shared_model(question(4, 40 * MIB, frontier=True))


def test_the_frontier_goes_from_the_least_time_to_the_least_memory() -> None:
    planned = frontier()
    front = planned.result.front
    smallest = planned.search.smallest()
    assert len(front) >= 6
    assert front[0].seconds.total == planned.result.best[0].seconds.total
    assert smallest is not None
    assert smallest.peak is not None
    assert front[-1].peak.bytes == smallest.peak.bytes
    figures = [(plan.peak.bytes, plan.seconds.total) for plan in front]
    assert sorted(figures, reverse=True) == figures
    assert sorted(figures, key=lambda figure: figure[1]) == figures


def test_no_plan_that_was_left_out_beats_one_of_the_frontier() -> None:
    """Every candidate is evaluated at the limit of each plan of the frontier."""
    planned = frontier()
    for limit, plan in zip(planned.result.front_limits, planned.result.front, strict=True):
        every = every_plan(planned.search, limit, with_offload=True)
        fastest = min(one.seconds.total for one in every)
        assert plan.seconds.total <= fastest * (1 + 1e-9)


def test_a_point_of_the_frontier_is_found_again_at_its_limit() -> None:
    plan, limit = frontier().result.front[2], frontier().result.front_limits[2]
    asked = question(4, limit, only_best=True, peak_option="--at ")
    again = ask_with_shared_model(asked).result.best[0]
    assert (again.peak.bytes, again.seconds.total) == (plan.peak.bytes, plan.seconds.total)


def test_where_nothing_fits_the_least_that_would_do_is_named() -> None:
    """The named memory is enough, also with a margin, and one MiB less is not."""
    margin = {"margins": {"torch": 0.05}}
    planned = ask_with_shared_model(question(2, 1 * MIB, **margin))
    assert planned.result.best == []
    said = " ".join(no_fit_lines(planned))
    assert "no plan fits 1.0 MiB of tensors on a rank of 2 devices" in said
    size = int(said.partition("Use --memory ")[2].partition("MiB")[0])
    assert ask_with_shared_model(question(2, size * MIB, **margin)).result.best
    assert not ask_with_shared_model(question(2, (size - 1) * MIB, **margin)).result.best


def test_where_nothing_fits_the_largest_model_that_would_is_named() -> None:
    deep = ["model.args.num_layers=12"]
    size = 4 * MIB
    planned = ask_with_shared_model(question(1, size, deep))
    assert planned.result.best == []
    said = " ".join(no_fit_lines(planned))
    found = re.search(r"or a model with (\d+) of its 12 blocks \((\S+ ?\S*) parameters\)", said)
    assert found is not None, said
    blocks = int(found[1])
    assert 1 <= blocks < 12
    shallow = ask_with_shared_model(question(1, size, [f"model.args.num_layers={blocks}"]))
    assert shallow.result.best
    assert format_count(shallow.num_parameters) == found[2]
    assert not ask_with_shared_model(
        question(1, size, [f"model.args.num_layers={blocks + 1}"])
    ).result.best


@pytest.mark.parametrize("name", ["cpu", "a100-node"])
def test_where_nothing_fits_the_optimizers_state_goes_elsewhere(name: str) -> None:
    cluster = load_cluster(name)
    job = load_job(None, "single", GPT)

    def asked(limit: int) -> PlannedAnswer:
        return ask_with_shared_model(
            Question(job, cluster, 1, Limit(limit, 0), 8, margins={"torch": 0.0})
        )

    roomy = asked(2**40)
    least = roomy.search.smallest()
    assert least is not None
    assert least.peak is not None
    assert all(one.candidate.offload is None for one in roomy.result.best)
    best = asked(least.peak.bytes - 1).result.best[0]
    place = "disk" if name == "cpu" else "cpu"
    assert best.candidate.label == f"single+offload_{place}"
    assert best.job.strategy.offload.model_dump()["optimizer"] == place
    assert best.peak.bytes < least.peak.bytes
    kept = [one for one in roomy.result.best if one.candidate.rows == best.candidate.rows]
    assert best.seconds.moving > 0
    assert best.seconds.total > max(one.seconds.total for one in kept)
    if name == "cpu":
        parts = open_setup(best.job, make_plan(best.job, 1, "cpu"))
        found = forecast_rank(parts.resolved, parts.workload).forecast
        assert found is not None
        assert best.peak.bytes == pytest.approx(found.peak().bytes, rel=0.002)


def test_a_cap_that_would_do_is_named_as_one() -> None:
    def capped(cap: int) -> PlannedAnswer:
        memory, _ = rank_limits(NODE, memory=None, cap=str(cap))
        return ask_with_shared_model(question(1, memory, margins={"torch": 0.02}))

    said = " ".join(no_fit_lines(capped(271 * MIB)))
    size = int(said.partition("Use --cap ")[2].partition("MiB")[0])
    assert capped(size * MIB).result.best
    assert not capped((size - 1) * MIB).result.best


def test_a_cap_on_a_gpu_leaves_room_for_workspaces_and_segments() -> None:
    on_gpu, said = rank_limits(NODE, memory=None, cap="10GiB")
    on_cpu, _ = rank_limits(load_cluster("cpu"), memory=None, cap="10GiB")
    assert on_gpu.for_tensors == int(10 * GIB * 0.95) - 256 * MIB
    assert on_cpu.for_tensors == int(10 * GIB * 0.95) - 8 * MIB
    assert said == "of the cap 768.0 MiB are reserved for memory other than tensors"
    assert Limit(
        on_gpu.memory_for(on_gpu.for_tensors), non_tensor_bytes=on_gpu.non_tensor_bytes
    ).for_tensors >= (on_gpu.for_tensors)


def test_what_is_in_the_way_has_its_number(roomy: PlannedAnswer) -> None:
    planned = ask_with_shared_model(question(4, 2 * MIB))
    lines = list(rejection_lines(planned))
    assert any("too much" in line and "of" in line for line in lines)
    found = plan_document(planned, "")
    assert found["plans"][0]["predicted"]["peak_bytes"] <= found["limit_bytes"]
    assert (
        sum(found["plans"][0]["predicted"]["breakdown"].values())
        == (found["plans"][0]["predicted"]["peak_bytes"])
    )


def test_the_space_has_every_mesh_and_no_batch_that_does_not_divide() -> None:
    space = SearchSpace(devices=8, per_node=8, global_batch_size=24, num_blocks=12)
    found = list(space.candidates())
    assert {(c.pp, c.dp) for c in found} == {(1, 8), (2, 4), (4, 2), (8, 1)}
    assert {c.rows for c in found if c.dp == 8} == {1, 3}
    assert all(c.rows * c.micro_batches * c.dp == 24 for c in found)
    assert {"1f1b", "gpipe", "interleaved_1f1b", "zbv_zero_bubble"} <= {c.schedule for c in found}
    only = SearchSpace(devices=8, per_node=8, global_batch_size=24, num_blocks=12, pp=2, rows=3)
    assert {(c.pp, c.rows) for c in only.candidates()} == {(2, 3)}
    assert len(set(found)) == len(found)


def clock(cluster: Cluster = NODE) -> StepTimer:
    return StepTimer(cluster)


def test_operations_take_the_longer_of_arithmetic_and_memory() -> None:
    device = NODE.device
    flops = device.flops.bf16 * device.efficiency
    work = OpLog(
        *(torch.tensor(v).double().numpy() for v in ([0.0, 0], [flops, 0], [0, 0], [1, 2])),
        torch.zeros(2, 4).double().numpy(),
    )
    assert clock().op_seconds(work) == pytest.approx(1.0 + 3 * device.launch)
    slow = OpLog(
        *(torch.tensor([v]).double().numpy() for v in (0.0, 1.0, device.memory_bandwidth, 3.0)),
        torch.zeros(1, 4).double().numpy(),
    )
    assert clock().op_seconds(slow) == pytest.approx(3 * (1.0 + device.launch))


def plan_of(strategy: str, ranks: int, **keys: Any) -> tuple[Job, Any]:
    words = [f"{key}={value}" for key, value in keys.items()]
    job = load_job(None, strategy, [*GPT, *words])
    return job, make_plan(job, ranks, "cuda")


def test_a_pipeline_waits_as_its_bubble_says() -> None:
    _, plan = plan_of("gpipe", 4, **{"train.micro_batch_size": 2, "mesh.pp": 4})
    found = clock().step(plan, [MicroBatchSeconds(1.0, 2.0)] * 4, [], 0.0)
    assert found.compute == pytest.approx(4 * 3.0)
    assert found.bubble == pytest.approx(3 * 3.0, rel=1e-3)  # (p - 1) (F + B)


def test_a_backward_pass_in_two_parts_takes_what_was_timed_of_each() -> None:
    _, plan = plan_of("zero_bubble", 2, **{"train.micro_batch_size": 2, "mesh.pp": 2})
    paces = [MicroBatchSeconds(1.0, 2.0)] * 4
    halves = clock().step(plan, paces, [], 0.0)
    assert halves.compute == pytest.approx(4 * 2 * 3.0)
    parts = clock().step(plan, paces, [], 0.0, split=(0.8, 0.4))
    assert parts.compute == pytest.approx(4 * 2 * (1.0 + 1.2 * 2.0))
    # The weight part does not fill the whole bubble: (p - 1) (F + I - W).
    assert halves.bubble == pytest.approx(1.0, rel=1e-2)
    assert parts.bubble == pytest.approx(1.0 + 1.6 - 0.8, rel=1e-2)


def test_ranks_that_wait_leave_a_crowded_cpu_to_the_others() -> None:
    """Four ranks on two cores: each is as fast as a core, and two of them compute at a time."""
    cpu = load_cluster("cpu")
    free = {"latency": 1e-30, "bandwidth": 1e30}
    node = cpu.node.model_copy(update={"devices": 4, "cores": 2})
    link = cpu.inside.model_copy(update=free)
    crowded = clock(cpu.model_copy(update={"node": node, "inside": link}))
    _, plan = plan_of("gpipe", 4, **{"train.micro_batch_size": 2, "mesh.pp": 4})
    found = crowded.step(plan, [MicroBatchSeconds(1.0, 2.0)] * 4, [], 0.0)
    assert found.total == pytest.approx(4 * 4 * 3.0 / 2)  # the bubble of (4 - 1) 3 is gone
    _, plan = plan_of("gpipe", 4, **{"train.micro_batch_size": 8, "mesh.pp": 4})
    alone = crowded.step(plan, [MicroBatchSeconds(1.0, 2.0)] * 4, [], 0.0)
    assert alone.total == pytest.approx(4 * 3.0)  # with one micro-batch only one core is busy
    _, plan = plan_of("ddp", 4, **{"train.micro_batch_size": 2})
    assert crowded.step(plan, [MicroBatchSeconds(1.0, 2.0)], [], 1.0).total == pytest.approx(
        2 * (3.0 + 1.0)
    )
    assert clock().oversubscription == clock(cpu).oversubscription == 1.0


def test_a_step_adds_up() -> None:
    found = StepSeconds(1.0, 0.5, 0.25, 0.125, 0.0625)
    assert found.total == 1.9375


def test_candidates_say_what_they_are() -> None:
    one = candidate_of(2, 4, "zero1_torch", 2, 8, "interleaved_1f1b", 2, "cpu")
    assert one.label == "interleaved_1f1b+zero1_torch+offload_cpu"
    assert one.stages == 4
    assert candidate_of(1, 1, "single", 1, 1).label == "single"


class LeavesLayersOut(torch.nn.Module):
    """Skips one of two layers at random."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.head = torch.nn.Linear(64, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.one if random.random() < 0.5 else self.other
        return self.head(chosen(x.flatten(1)))


def test_what_the_model_refuses_is_no_plan() -> None:
    words = ["model.name=planner.test_search:LeavesLayersOut", "data.name=synthetic"]
    words += ["data.args={kind: classification, input_shape: [1, 8, 8]}"]
    job = load_job(None, "single", words)
    margins = {"torch": 0.0, "deepspeed": 0.0}
    asked = Question(job, NODE, 2, Limit(2**30, 0), 8, margins=margins)
    answer = ask(asked)
    assert answer.result.best
    engines = {
        one.candidate.replicate.engine for one in answer.result.best if one.candidate.replicate
    }
    assert engines == {"torch"}
    reasons = [one.reason for one in answer.result.rejected]
    assert any("not every pass uses one, other" in reason for reason in reasons)
