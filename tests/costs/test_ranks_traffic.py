"""The traffic that each strategy states equals the traffic of real ranks."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from support.nets import BlockConv, BlockLM, tokens
from support.parity import adamw
from support.ranks import run_ranks
from support.traffic import traffic_of_plan
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bigtrain.assembly.make_plan import make_plan
from bigtrain.core.workload import Workload
from bigtrain.costs.traffic import EXCHANGES
from bigtrain.data import GlobalOrder, StepLoader
from bigtrain.data.source import TensorSamples
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.models.gpt import GPT, GPTConfig
from bigtrain.prediction.predict import forecast_rank
from bigtrain.versions.torch_versions import COUNTS_EXCHANGES

OPERATIONS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
}


class ExchangeLog(TorchDispatchMode):
    """Records every exchange in order: its kind and the bytes of the whole tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sent = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
            # Losses, norms, counts and flags are fp64 numbers, gathered as a list of tensors;
            # stages exchange integers about tied parameters.
            number = sent and sent[0].dtype == torch.float64
            number = number and (sent[0].numel() == 1 or func.__name__.startswith("allgather_."))
            if sent and not number and sent[0].dtype != torch.int32:
                name = func.__name__.partition(".")[0]
                if name not in ("send", "recv_"):  # not the small control messages of a technique
                    self.seen.append((OPERATIONS.get(name, name), max(t.nbytes for t in sent)))
        return func(*args, **(kwargs or {}))


def record_step(context, make, samples, strategy, keys):
    """The fifth step's exchanges as (kind, bytes), and the traffic that the strategy states."""
    job = job_from_keys(strategy, {"train.global_batch_size": 8, "memory.track_steps": 0, **keys})
    loss = CrossEntropy()
    plan = make_plan(job, context.world_size, "cpu")
    rows = plan.batch.micro_size
    order = GlobalOrder(len(samples), rows, shuffle=False)
    example = next(iter(StepLoader(samples, order, count=loss.count, micro_batch_size=rows)))
    example = example.micro_batches[0]
    with Engine(make, loss, adamw, job, context, example=example) as engine:
        loader = StepLoader(
            samples,
            GlobalOrder(len(samples), engine.plan.batch.global_size, seed=3),
            count=loss.count,
            dp_rank=context.dp_rank,
            dp_size=context.dp_size,
            micro_batch_size=engine.plan.batch.micro_size,
        )
        for number, batch in zip(range(5), loader, strict=False):
            with ExchangeLog() as log:
                engine.step(batch)
            assert number < 5
        rank = forecast_rank(
            engine.resolved, Workload(make(), example, loss, adamw), context.pp_rank
        )
        stated_traffic = traffic_of_plan(rank.profiles[0], engine.plan)
        report = engine.memory()
        return log.seen, stated_traffic, engine.plan.batch.accumulation_steps, report


def images() -> TensorSamples:
    generator = torch.Generator().manual_seed(1)
    return TensorSamples(torch.randn(64, 1, 8, 8, generator=generator), torch.arange(64) % 3)


def text() -> TensorSamples:
    return tokens(64, ignored=False)


TWO, BF16 = {"train.micro_batch_size": 2}, {"train.micro_batch_size": 2, "train.precision": "bf16"}
MESH = {"train.micro_batch_size": 1, "mesh.pp": 2, "mesh.dp": 2}
THREE = {
    "train.micro_batch_size": 2,
    "train.global_batch_size": 12,
    "strategy.replicate.bucket_size": 20004,
}
SHARED = {"train.micro_batch_size": 2, "train.global_batch_size": 12}
SOCKETS = {"strategy.replicate.exchange": "sockets"}  # the log does not see shared memory
SERVERS = {"train.micro_batch_size": 2, "strategy.replicate.servers": 2}
LM: Any = (partial(BlockLM, width=32), text)
CONV: Any = (BlockConv, images)
CASES: dict[str, tuple[Any, ...]] = {
    "ddp": (2, *LM, "ddp", TWO),
    "ddp, one micro-batch": (2, *LM, "ddp", {}),
    "ddp, several buckets": (2, *LM, "ddp", {**TWO, "strategy.replicate.bucket_size": "16KiB"}),
    "ddp, buffers": (2, *CONV, "ddp", TWO),
    "ddp, compressed": (2, *LM, "ddp", {**TWO, "strategy.replicate.compress": "bf16"}),
    "sync_sgd": (2, *LM, "sync_sgd", TWO),
    "sync_sgd, buffers": (2, *CONV, "sync_sgd", {}),
    "ring": (2, *CONV, "ring", TWO),
    "ring, several buckets, uneven chunks": (3, *LM, "ring", THREE),
    "parameter_server": (2, *LM, "parameter_server", TWO),
    "parameter_server, three workers, buffers": (4, *CONV, "parameter_server", SHARED),
    "parameter_server, two servers": (4, *LM, "parameter_server", SERVERS),
    "zero1_torch": (2, *LM, "zero1_torch", TWO),
    "zero1_torch, in bf16": (2, *LM, "zero1_torch", BF16),
    "fsdp": (2, *LM, "fsdp", {**TWO, **SOCKETS}),
    "fsdp, in bf16": (2, *LM, "fsdp", {**BF16, **SOCKETS}),
    "fsdp, in fp64": (2, *LM, "fsdp", {**TWO, **SOCKETS, "train.precision": "fp64"}),
    "fsdp, computed again": (2, *LM, "fsdp_checkpointing", {**TWO, **SOCKETS}),
    "fsdp_zero2": (2, *LM, "fsdp_zero2", {**TWO, **SOCKETS}),
    "hybrid": (4, *LM, "hybrid", {"train.micro_batch_size": 1, **SOCKETS}),
    "zero1": (2, *LM, "zero1", TWO),
    "zero2": (2, *CONV, "zero2", TWO),
    "zero2, in bf16": (2, *LM, "zero2", BF16),
    "oss": (2, *LM, "oss", TWO),
    "sharded_ddp": (2, *CONV, "sharded_ddp", TWO),
    "1f1b_ddp": (4, *LM, "1f1b_ddp", MESH),
    "1f1b_zero1": (4, *LM, "1f1b_zero1", MESH),
    "1f1b_fsdp": (4, *LM, "1f1b_fsdp", {**MESH, **SOCKETS}),
    "1f1b_fsdp, in bf16": (4, *LM, "1f1b_fsdp", {**MESH, **SOCKETS, "train.precision": "bf16"}),
    "pipeline_deepspeed_zero1": (4, *LM, "pipeline_deepspeed_zero1", MESH),
}


def totals(seen, stated_traffic, micro_batches):
    """Bytes and messages by kind: of the real ranks, and as stated."""
    sent, calls = Counter(), Counter()
    for kind, nbytes in seen:
        sent[kind] += nbytes
        calls[kind] += 1
    expected, messages = Counter(), Counter()
    for traffic in stated_traffic:
        if traffic.kind not in EXCHANGES or traffic.kind in ("send", "receive"):
            continue
        expected[traffic.kind] += traffic.step_bytes(micro_batches)
        messages[traffic.kind] += traffic.step_calls(micro_batches)
    return sent, calls, expected, messages


@pytest.mark.parametrize("case", CASES)
def test_real_ranks_exchange_what_is_stated(case):
    world_size, make, data, strategy, keys = CASES[case]
    mesh = {"pp": 2, "dp": 2} if "mesh.pp" in keys else {}
    results = run_ranks(
        record_step,
        world_size,
        make,
        data(),
        strategy,
        keys,
        force_group=True,
        timeout_s=120,
        **mesh,
    )
    for rank in results[0][-1].ranks:
        assert (rank.volume is not None) is COUNTS_EXCHANGES
        assert rank.volume in (None, rank.predicted_volume), rank.rank
    for seen, stated_traffic, micro_batches, _ in results:
        sent, calls, expected, messages = totals(seen, stated_traffic, micro_batches)
        assert sent.keys() == expected.keys()
        for kind, nbytes in sent.items():
            assert nbytes == pytest.approx(expected[kind], abs=16), kind
            if kind == "broadcast" and data is images:
                continue  # one message per buffer; a profile does not know their number
            # Only DeepSpeed knows which gradients share a bucket.
            spare = 0.5 * calls[kind] if kind == "reduce" else 0
            assert messages[kind] == pytest.approx(calls[kind], abs=spare), kind


@pytest.mark.parametrize(
    ("strategy", "width"),
    [("zero3_checkpointing", 32), ("zero3", 32), ("zero3", 256)],
)
def test_deepspeeds_stage_3_gathers_what_is_stated_and_tied_parameters_again(strategy, width):
    """With a width of 256 biases and norms are not sharded, and are gathered once a step."""
    make = partial(BlockLM, width=width)
    arguments = (make, text(), strategy, TWO)
    results = run_ranks(record_step, 2, *arguments, force_group=True, timeout_s=120)
    parameter = make().embedding.weight.nbytes
    for rank in results[0][-1].ranks:
        gathered, foreseen = (
            v.sent.pop("all_gather") for v in (rank.volume, rank.predicted_volume)
        )
        assert gathered - foreseen == parameter * 2 * results[0][2] // 2  # see below
        assert rank.volume.sent == rank.predicted_volume.sent
    for seen, stated_traffic, micro_batches, _ in results:
        sent, calls, expected, messages = totals(seen, stated_traffic, micro_batches)
        assert sent.keys() == expected.keys() == {"all_gather", "reduce_scatter"}
        # The head's and the embedding's weight: one parameter, gathered for each of them.
        tied = 4 * make().embedding.weight.numel() * 2 * micro_batches
        assert sent["all_gather"] == pytest.approx(expected["all_gather"] + tied, rel=0.005)
        assert sent["reduce_scatter"] == pytest.approx(expected["reduce_scatter"], rel=0.005)
        assert messages["all_gather"] == pytest.approx(calls["all_gather"], rel=0.2)
        assert messages["reduce_scatter"] == pytest.approx(calls["reduce_scatter"], rel=0.5)
        assert any(t.every == "step" for t in stated_traffic) == (width == 256)


def untied_gpt() -> GPT:
    """A GPT whose head is not tied to its embedding."""
    sizes = {"num_layers": 4, "width": 32, "num_heads": 4, "vocab_size": 64}
    return GPT(GPTConfig(**sizes, sequence_length=16, tie_embeddings=False))


def words() -> TensorSamples:
    numbers = torch.arange(64 * 17).view(64, 17) * 7 % 64
    return TensorSamples(numbers[:, :-1].contiguous(), numbers[:, 1:].contiguous())


A_BOUNDARY = 4 * 8 * 16 * 32
"""Bytes between two blocks for the eight rows of a step, in fp32."""


@pytest.mark.skipif(not COUNTS_EXCHANGES, reason="torch before 2.14 has no such hooks")
@pytest.mark.parametrize(
    ("strategy", "tp", "times"),
    [
        ("1f1b", 1, 1),
        ("1f1b+tensor", 2, 1),
        ("1f1b+tensor", 4, 1),
        ("1f1b+tensor_sequence", 2, 1),
        ("interleaved_1f1b+tensor", 2, 3),
        ("interleaved_1f1b+tensor_sequence", 2, 3),
        ("zbv+tensor", 2, 2),
        ("zbv+tensor_sequence", 2, 2),
    ],
)
def test_stages_send_each_other_one_part_for_each_rank_of_slices(strategy, tp, times):
    """Each time a stage boundary crosses, a rank sends one part of `tp`."""
    at = {1: ["blocks.2"]}.get(times, ["blocks.1", "blocks.2", "blocks.3"])
    keys = {**TWO, "strategy.cut.at": at}
    volumes = volumes_of(strategy, keys, pp=2, tp=tp)
    for volume in volumes:
        assert volume.sent["send"] == volume.received["receive"] == times * A_BOUNDARY // tp
    # Sequence shards cross without a gather on either side
    if strategy.endswith("tensor_sequence"):
        (alone, _) = volumes_of("tensor_sequence", TWO, tp=tp)
        for kind in ("all_gather", "reduce_scatter", "all_reduce"):
            of_stages = sum(volume.sent[kind] for volume in volumes[::tp])
            assert of_stages == alone.sent[kind], kind


def volumes_of(strategy, keys, **mesh):
    """Each rank sends and receives the stated bytes in a step."""
    keys = {**keys, **{f"mesh.{axis}": n for axis, n in mesh.items()}}
    arguments = (untied_gpt, words(), strategy, keys)
    results = run_ranks(record_step, math.prod(mesh.values()), *arguments, timeout_s=200, **mesh)
    for rank in results[0][-1].ranks:
        assert rank.volume == rank.predicted_volume, rank.rank
    return [rank.volume for rank in results[0][-1].ranks]
