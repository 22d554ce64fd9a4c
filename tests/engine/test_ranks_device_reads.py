"""The number of times that a step waits for the device: a frozen table by strategy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from support.device_reads import DeviceReads
from support.nets import BlockLM, tokens
from support.parity import adamw
from support.ranks import run_ranks
from torch import nn

import bigtrain
from bigtrain.data import GlobalOrder, MicroBatch, StepLoader
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy, as_loss
from bigtrain.losses.tasks import ClassificationTask, CustomTask, LanguageTask, SegmentationTask
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.tree import tree_tensors


class OwnLoss(CrossEntropy):
    """A user's loss, which counts one batch at a time."""

    queue_count = None

    def count(self, target):
        return int((target != -100).sum())


REPLICAS = ("ddp", "zero1_torch", "fsdp", "fsdp_zero2", "hybrid", "fsdp_checkpointing")
ENGINES = ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "oss", "sharded_ddp")
PIPELINES = ("gpipe", "1f1b", "zero_bubble", "interleaved_1f1b", "zbv", "dualpipev", "layer_split")
LOSS, NORM, BOTH = "read", "update", "read_with"


def reads(
    context: RunContext, strategies: Sequence[str], micro_batches: int, *, check: bool = True
) -> dict[str, list[str]]:
    """The places at which the third step of each strategy waits for the device."""
    places = {}
    for strategy in strategies:
        keys = {"train.accumulation_steps": micro_batches, "train.micro_batch_size": 2}
        keys |= {"memory.track_steps": 0, "memory.predict": False, "train.check_finite": check}
        if strategy.startswith(("fsdp", "hybrid")):
            # The test takes a CPU for a GPU, which has no memory that NumPy adds up.
            keys["strategy.replicate.exchange"] = "sockets"
        job = job_from_keys(strategy, keys)
        loss, samples = CrossEntropy(), tokens(64, ignored=False)
        inputs, targets = samples.inputs[:2], samples.targets[:2]
        example = MicroBatch(inputs, targets, loss.count(targets), 2)
        make = partial(BlockLM, width=32)
        with Engine(make, loss, adamw, job, context, example=example) as engine:
            loader = StepLoader(
                samples,
                GlobalOrder(len(samples), engine.plan.batch.global_size),
                count=loss.count,
                dp_rank=context.dp_rank,
                dp_size=context.dp_size,
                micro_batch_size=engine.plan.batch.micro_size,
            )
            batches = iter(loader)
            for _ in range(2):
                engine.step(next(batches))
            batch = next(batches)
            known_tensors = [*engine.model.parameters(), *engine.model.buffers()]
            known_tensors += [p for root in engine.runner.roots for p in root.parameters()]
            for micro_batch in batch.micro_batches:
                known_tensors += [
                    *tree_tensors(micro_batch.inputs),
                    *tree_tensors(micro_batch.targets),
                ]
            with DeviceReads(known_tensors) as device_reads:
                engine.step(batch)
            places[strategy] = device_reads.places
    return places


@pytest.mark.parametrize(("micro_batches", "check"), [*product([1, 3], [True, False])])
def test_replicas_wait_for_the_loss_and_for_the_norm(micro_batches, check):
    for rank in run_ranks(partial(reads, check=check), 2, REPLICAS, micro_batches):
        assert {name: waits(places) for name, places in rank.items()} == dict.fromkeys(
            REPLICAS, [LOSS, NORM] if check else [BOTH]
        )


@pytest.mark.parametrize(("check", "places"), [(True, (LOSS, NORM)), (False, (BOTH,))])
def test_alone_a_step_waits_as_often(check, places):
    strategies = ("single", "single_checkpointing", "accumulation")
    (rank,) = run_ranks(partial(reads, check=check), 1, strategies, 3)
    assert {tuple(waits(reads_of_rank)) for reads_of_rank in rank.values()} == {places}


@pytest.mark.parametrize("check", [True, False])
def test_engines_of_others_wait_as_often(check):
    # DeepSpeed receives the norm as a number, before its step.
    once = () if check else ("oss", "sharded_ddp")
    for rank in run_ranks(partial(reads, check=check), 2, ENGINES, 2):
        counts = {name: len(places) for name, places in rank.items()}
        assert counts == {name: 1 if name in once else 2 for name in ENGINES}


@pytest.mark.parametrize(("micro_batches", "check"), [*product([4, 8], [True, False])])
def test_of_a_pipeline_the_rank_with_the_loss_waits_once_more(micro_batches, check):
    first, last = run_ranks(partial(reads, check=check), 2, PIPELINES, micro_batches, pp=2)
    for name in PIPELINES:
        waits_by_rank = [waits(first[name]), waits(last[name])]
        # In a V schedule the first rank also has the last stage.
        ends = waits_by_rank[::-1] if name in ("zbv", "dualpipev") else waits_by_rank
        assert ends == ([[NORM], [LOSS, NORM]] if check else [["read_with"], [BOTH]]), name


def test_a_read_is_seen():
    values = torch.ones(3, requires_grad=True)
    chosen = (lambda t: t[t > 0], lambda t: t.long().bincount())
    for read in (lambda t: float(t.sum()), torch.Tensor.tolist, torch.Tensor.numpy, *chosen):
        with DeviceReads([values]) as device_reads:
            read((values * 2).detach())
        assert len(device_reads.places) == 1
    with DeviceReads([values]) as device_reads:
        float(torch.ones(3).sum())
    assert device_reads.places == []


LOSSES = {
    "cross entropy": CrossEntropy(),
    "mean": F.cross_entropy,
    "weights": nn.CrossEntropyLoss(torch.tensor([0.5, 1.0, 2.0])),
    "rows": F.mse_loss,
    "own": OwnLoss(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_batches_that_are_on_the_device_are_counted_with_one_read(name):
    keys = {"train__accumulation_steps": 4, "memory__predict": False, "memory__track_steps": 0}
    inputs, targets = torch.randn(8, 4), torch.arange(8) % 3
    targets = torch.randn(8, 3) if name == "rows" else targets.where(targets != 1, -100)
    with bigtrain.prepare(lambda: nn.Linear(4, 3), LOSSES[name], adamw, **keys) as engine:
        engine.step((inputs, targets))
        with DeviceReads([inputs, targets]) as device_reads:
            micro_batches, _ = engine._micro_batches((inputs, targets))
        assert len(device_reads.places) == {"rows": 0, "own": 4}.get(name, 1)
        counts = [micro_batch.count for micro_batch in micro_batches]
        one_by_one = [engine.loss.count(micro_batch.targets) for micro_batch in micro_batches]
        assert counts == one_by_one
        assert {type(count) for count in counts} == {type(count) for count in one_by_one}
        assert (len(set(counts)) > 1) is (name != "rows")


def test_an_evaluation_waits_for_its_end_only():
    output, target = torch.randn(2, 4, 3, 3), torch.arange(18).reshape(2, 3, 3) % 4
    target[0, 0, 0] = 255
    rows = output.reshape(-1, 4)[:8], target.reshape(-1)[1:9]
    tasks = (SegmentationTask(4), output, target), (ClassificationTask(4), *rows)
    tasks = (*tasks, (LanguageTask(4), output.transpose(1, 3), target.where(target < 4, -100)))
    for task, *both in tasks:
        with DeviceReads(both) as device_reads:
            task.measure(*both)
        assert device_reads.places == [], task
    custom = CustomTask(as_loss(F.cross_entropy))
    with DeviceReads(rows) as device_reads:
        custom.measure(*rows)
    assert len(device_reads.places) == 1


def waits(places: list[str]) -> list[str]:
    """The functions that wait in a step."""
    return [entry.rpartition(" ")[2] for entry in places]
