"""The predicted seconds of a step: tiles of products, and the cost of every operation and
exchange.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.setup import open_setup
from bigtrain.job.load import load_job
from bigtrain.machine.cluster import Cluster, Link, load_cluster
from bigtrain.prediction.compose import compose_profile
from bigtrain.prediction.section_library import ModelSections, SectionLibrary
from bigtrain.prediction.sections import OpLog
from bigtrain.timing.step_time import MicroBatchSeconds, StepTimer, product_efficiency

A100, CPU = load_cluster("a100-node"), load_cluster("cpu")
WORDS = [
    "model.name=gpt",
    "model.args={num_layers: 2, width: 64, num_heads: 4, sequence_length: 32}",
    *("data.name=synthetic", "data.args={kind: language}", "train.global_batch_size=8"),
]


def plan_of(strategy: str, device: str = "cuda") -> Any:
    return make_plan(load_job(None, strategy, WORDS), 8, device)


@cache
def sections() -> ModelSections:
    job = load_job(None, "single", WORDS)
    setup = open_setup(job, make_plan(job, 1, "cpu"))
    work = setup.workload
    library = SectionLibrary(
        work.model,
        work.micro_batch,
        lambda *_: work.loss,
        work.make_optimizer,
        torch.device("cpu"),
    )
    return library.model_sections(setup.plan, 6, "keep")


def efficiency(m: float, n: float, k: float, batch: float = 1, overhead: float = 0.0) -> float:
    efficiencies = product_efficiency(np.array([[m, n, k, batch]]), 108, np.array([overhead]))
    return float(efficiencies[0])


def test_edges_of_the_output_count_as_whole_tiles() -> None:
    assert efficiency(12 * 128, 9 * 128, 512) == 1.0
    assert efficiency(12 * 128 - 64, 9 * 128, 512) == pytest.approx(11.5 / 12)
    assert efficiency(108 * 128, 64, 512) == 1.0  # tiles of half the width exist, too
    assert efficiency(108 * 128, 16, 512) == 0.25


def test_the_last_wave_is_as_long_as_the_others() -> None:
    assert efficiency(109 * 128, 128, 512) == pytest.approx(109 / 216)
    assert efficiency(128, 128, 512, batch=162) == pytest.approx(0.75)


def test_a_short_k_weighs_less_than_writing_the_result() -> None:
    assert efficiency(108 * 128, 128, 80, overhead=80.0) == pytest.approx(0.5)


def test_few_tiles_are_cut_along_k_where_it_is_long_enough() -> None:
    long = 10**6
    assert efficiency(128, 128, long, overhead=80.0) == pytest.approx(long / (long + 108 * 80.0))
    assert efficiency(128, 128, 80, overhead=80.0) < 2 / 108


def test_what_is_no_product_is_as_it_was() -> None:
    assert efficiency(0, 0, 0, batch=0, overhead=80.0) == 1.0


def test_the_log_has_the_sizes_of_every_product_also_between_recorded_sizes() -> None:
    for section in sections().sections:
        for work in (section.forward, section.backward):
            is_product = work.products[:, 0] > 0
            assert (is_product == (work.flops > 0)).all()
    block = sections().sections[1].forward
    rows = 6 * 32  # rows of a micro-batch size that was not recorded
    assert [rows, 256, 64, 1] in block.products.round(9).tolist()  # into the MLP
    products = block.flops[block.products[:, 3] == 1]
    assert products.sum() == pytest.approx(2 * rows * 12 * 64**2)


def seconds(cluster: Cluster, work: OpLog) -> float:
    """The seconds with one rate for all products, whatever their size."""
    device = cluster.device
    arithmetic = work.flops / (device.flops.fp32 * device.efficiency)
    longer = np.maximum(arithmetic, work.nbytes / device.memory_bandwidth)
    return float(((longer + device.launch) * work.times).sum())


def test_small_products_are_slower_on_a_gpu_and_as_before_elsewhere() -> None:
    alone = CPU.node.model_copy(update={"devices": 1, "cores": 1})
    with_processors = CPU.model_copy(update={"node": alone})
    device = with_processors.device.model_copy(update={"processors": 108})  # has no effect on a CPU
    unknown = A100.device.model_copy(update={"processors": None})
    block = sections().sections[1].forward.scaled(1000)
    for cluster in (
        with_processors,
        with_processors.model_copy(update={"device": device}),
        A100.model_copy(update={"device": unknown}),
    ):
        assert StepTimer(cluster).op_seconds(block) == pytest.approx(seconds(cluster, block))
    assert StepTimer(A100).op_seconds(block) > 3 * seconds(A100, block)


def test_shards_of_a_state_are_updated_in_as_many_operations() -> None:
    base = sections().base
    numbers = sum(t.numbers for s in base.sections for t in s.tensors if t.trained)
    launches = float(base.step_work.times.sum()) * A100.device.launch
    whole, shard = (
        StepTimer(A100).update_seconds(plan_of(strategy), base, numbers)
        for strategy in ("ddp", "fsdp")
    )
    assert launches < shard < whole
    assert shard - launches == pytest.approx((whole - launches) / 8)
    whole, shard = (
        StepTimer(CPU).update_seconds(plan_of(strategy, "cpu"), base, numbers)
        for strategy in ("ddp", "fsdp")
    )
    assert shard == pytest.approx(whole / 8)  # as a part of the timed seconds


def test_what_fully_shard_gathers_is_copied_in_and_out() -> None:
    plan, base = plan_of("fsdp"), sections().base
    profile = compose_profile(base, sections().sections)
    every = [t for technique in plan.techniques.values() for t in technique.traffic(profile, plan)]
    gathered = sum(t.nbytes for t in every if t.kind == "all_gather")
    reduced = sum(t.nbytes for t in every if t.kind == "reduce_scatter")
    copied = [t for t in every if t.kind == "copy"]
    assert sum(t.nbytes for t in copied) == gathered + gathered // 8 + reduced
    timer = StepTimer(A100)
    seconds = sum(timer._traffic_seconds(t) for t in copied)
    read_and_written = 2 * sum(t.nbytes for t in copied)
    assert seconds == pytest.approx(read_and_written / A100.device.memory_bandwidth)


def test_one_message_has_nothing_to_hide_behind() -> None:
    """All gradients of a small model are in one bucket, which is complete only at the end."""
    plan, base = plan_of("ddp"), sections().base
    profile = compose_profile(base, sections().sections)
    every = [t for technique in plan.techniques.values() for t in technique.traffic(profile, plan)]
    (traffic,) = [t for t in every if t.kind == "all_reduce"]
    assert traffic.calls == 1
    slow = A100.inside.model_copy(update={"bandwidth": 1e6})
    timer = StepTimer(A100.model_copy(update={"inside": slow}))
    step = timer.step(plan, [MicroBatchSeconds(100.0, 200.0)], [[profile]], 0.0)
    assert step.exchange == pytest.approx(2 * 7 / 8 * traffic.nbytes / 0.8e6, rel=1e-3)
    assert step.compute == 300.0


def issuing(**seconds: float) -> Cluster:
    """A cluster with a core for each rank, and with these seconds to issue an exchange."""
    kinds = {
        kind: {"latency": 1e-4, "bandwidth": 1e9, "issue": issue} for kind, issue in seconds.items()
    }
    values = CPU.model_dump()
    values["inside"]["kinds"] = kinds
    values["node"] |= {"devices": 8, "cores": 8}
    return Cluster.model_validate(values)


def test_computing_that_overlaps_with_exchanges_has_fewer_processors() -> None:
    """NCCL's channels keep multiprocessors busy, so an exchange is never free."""
    plan, base = plan_of("fsdp"), sections().base
    profile = compose_profile(base, sections().sections)
    alone = A100.inside.model_copy(update={"channels": None, "bandwidth": 1e6})
    taking = alone.model_copy(update={"channels": 27})  # a quarter of an A100

    def exchange(link: Link) -> float:
        timer = StepTimer(A100.model_copy(update={"inside": link}))
        long = MicroBatchSeconds(1000.0, 2000.0)
        return timer.step(plan, [long], [[profile]], 0.0).exchange

    every = [t for technique in plan.techniques.values() for t in technique.traffic(profile, plan)]
    whole = sum(7 / 8 * t.nbytes / 0.8e6 for t in every if t.ranks > 1)
    hidden = whole - exchange(alone)
    assert 0 < hidden < whole
    assert exchange(taking) == pytest.approx(exchange(alone) + hidden / 4, rel=1e-2)


def test_hooks_of_fully_shard_take_time_for_every_unit_on_a_cpu() -> None:
    plan, base = plan_of("fsdp", "cpu"), sections().base
    profile = compose_profile(base, sections().sections)
    stage_seconds = [MicroBatchSeconds(0.1, 0.2)]
    free, costly = (
        StepTimer(issuing(all_gather=gather, reduce_scatter=reduce)).step(
            plan, stage_seconds, [[profile]], 0.0
        )
        for gather, reduce in ((0.0, 0.0), (0.001, 0.01))
    )
    units = 3  # two blocks, and the parameters outside blocks
    assert costly.exchange - free.exchange == pytest.approx(5 * 0.001 + units * 0.01)
    ddp = plan_of("ddp", "cpu")
    exchange_seconds = [
        StepTimer(issuing(all_reduce=issue)).step(ddp, stage_seconds, [[profile]], 0.0).exchange
        for issue in (0.0, 0.01)
    ]
    assert exchange_seconds[0] == exchange_seconds[1]  # DDP has no such hooks


def test_every_action_of_a_schedule_takes_time_on_a_cpu() -> None:
    plan = plan_of("1f1b", "cpu")
    profile = compose_profile(sections().base, sections().sections)
    stage_seconds = [MicroBatchSeconds(0.1, 0.2)] * plan.pp
    free, costly = (
        StepTimer(issuing(send=issue)).step(plan, stage_seconds, [[profile]], 0.0)
        for issue in (0.0, 0.01)
    )
    # Forward and backward for every micro-batch, with messages from and to both neighbours.
    actions = 2 * (plan.batch.accumulation_steps + plan.pp - 1)
    assert costly.total - free.total == pytest.approx(actions * 0.01)


def test_who_waits_leaves_the_cores_to_others_but_sending_is_work_too() -> None:
    """Eight stages on two cores: simultaneous work takes four times as long as on a core each."""
    plan = plan_of("1f1b", "cpu")
    profile = compose_profile(sections().base, sections().sections)
    crowded = issuing(send=0.01).model_dump()
    crowded["node"]["cores"] = 2
    stage_seconds = [MicroBatchSeconds(0.1, 0.2)] * plan.pp
    timer = StepTimer(Cluster.model_validate(crowded))
    step = timer.step(plan, stage_seconds, [[profile]], 0.0)
    micro_batches = plan.batch.accumulation_steps
    sent = timer._sending(plan, [profile], 0.15)
    assert step.total >= 8 / 2 * micro_batches * (0.3 + 2 * sent)
