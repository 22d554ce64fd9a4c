"""fully_shard in shared memory: gloo's numbers, its memory and traffic, and when it is used."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.odd_nets import WIDTH, Empty
from support.parity import adamw
from support.ranks import RankFailure, run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from bigtrain.assembly.make_plan import make_plan
from bigtrain.data import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.errors import BigtrainError, ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.models.gpt import GPT, GPTConfig
from bigtrain.ranks.context import RunContext
from bigtrain.ranks.shared_buffers import (
    MAX_BUFFERS,
    Meeting,
    SharedBuffers,
    add_up,
    shared_memory,
)

EXCHANGE = "strategy.replicate.exchange"
ROWS, LENGTH, WORDS, STEPS = 8, 16, 64, 4
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("fsdp", {}),
    "stage 2": ("fsdp_zero2", {}),
    "micro-batches": ("fsdp", {"train.micro_batch_size": 2}),
    "reduced once": ("fsdp", {"train.micro_batch_size": 2, "strategy.replicate.reduce": "step"}),
    "ahead": ("fsdp", {"strategy.replicate.prefetch": 3}),
    "not ahead": ("fsdp", {"strategy.replicate.prefetch": 0}),
    "outside apart": ("fsdp", {"strategy.replicate.outside_blocks": "apart"}),
    "recomputed": ("fsdp+full", {}),
    "bf16": ("fsdp", {"train.precision": "bf16"}),
    "fp64": ("fsdp", {"train.precision": "fp64"}),
}
FOUR: dict[str, tuple[str, dict[str, Any]]] = {
    "pairs": ("fsdp", {"strategy.replicate.shard_ranks": 2}),
    "pipeline": ("1f1b+fsdp", {"mesh.pp": 2, "train.micro_batch_size": 2}),
    "slices": ("fsdp+tensor", {"mesh.tp": 2}),
}


def gpt() -> nn.Module:
    sizes = {"num_layers": 4, "width": 32, "num_heads": 4, "vocab_size": WORDS}
    return GPT(GPTConfig(**sizes, sequence_length=LENGTH, tie_embeddings=False))


def batch(context: RunContext, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + context.dp_rank)
    tokens = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


Figures = tuple[list[Any], dict[str, Tensor], int, str]
"""Numbers of each step, the weights of this rank, the measured peak, and the class that gathers."""


def low_gpt() -> nn.Module:
    """A model that has bf16 parameters without being asked for them."""
    return gpt().bfloat16()


def trained(
    context: RunContext,
    strategy: str,
    keys: dict[str, Any],
    exchange: str | None,
    make: Callable[[], nn.Module] = gpt,
) -> Any:
    given = {"train.global_batch_size": ROWS * context.dp_size, "memory.track_steps": STEPS}
    given |= {"optim.clip_norm": 1.0, "memory.predict": False, **keys}
    given |= {} if exchange is None else {EXCHANGE: exchange}
    job = job_from_keys(strategy, given)
    size = job.train.micro_batch_size or ROWS
    inputs, targets = (part[:size] for part in batch(context, 0))
    example = MicroBatch(inputs, targets, targets.numel(), size)
    with Engine(make, CrossEntropy(), adamw, job, context, example=example) as engine:
        steps = []
        for step in range(STEPS):
            result = engine.step(batch(context, step))
            steps.append((result.loss, result.grad_norm, result.sent_bytes, result.received_bytes))
        weights = {n: whole(p).detach().clone() for n, p in engine.model.named_parameters()}
        units = [m for m in engine.model.modules() if isinstance(m, FSDPModule)]
        kind = type(units[0]._get_fsdp_state()._fsdp_param_group._all_gather_comm)
        return steps, weights, engine.meter.measured().peak.bytes, kind.__name__


def beside(context: RunContext, cases: dict[str, Any]) -> dict[str, list[bool]]:
    """Compare both exchanges on this rank: numbers, weights, peaks, and the classes."""
    found = {}
    for name, (strategy, keys) in cases.items():
        gloo, shared = (trained(context, strategy, keys, e) for e in ("sockets", None))
        found[name] = [
            gloo[0] == shared[0],
            all(torch.equal(gloo[1][name], shared[1][name]) for name in gloo[1]),
            abs(gloo[2] - shared[2]) <= 64,
            (gloo[3], shared[3]) == ("_GlooAllGather", "_SharedAllGather"),
        ]
    return found


def whole(tensor: Any) -> Tensor:
    result: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return result


def test_two_ranks_have_the_numbers_of_gloo_bit_for_bit() -> None:
    for rank in run_ranks(beside, 2, CASES, timeout_s=300):
        assert rank == {name: [True] * 4 for name in CASES}


def test_groups_of_two_of_four_ranks_too() -> None:
    for pp, tp, name in ((1, 1, "pairs"), (2, 1, "pipeline"), (1, 2, "slices")):
        for rank in run_ranks(beside, 4, {name: FOUR[name]}, pp=pp, tp=tp, timeout_s=300):
            assert rank == {name: [True] * 4}


def in_bf16(context: RunContext) -> list[Any]:
    return [trained(context, "fsdp", {}, exchange, low_gpt)[0] for exchange in ("sockets", None)]


def test_sums_that_numpy_lacks_are_left_to_gloo() -> None:
    for gloo, shared in run_ranks(in_bf16, 2):
        assert gloo == shared


def of_empty(context: RunContext) -> list[list[float]]:
    """The losses of a net with a unit whose trained parameters have no elements."""
    x = torch.ones(ROWS, WIDTH) * (1 + context.rank)
    found = []
    for exchange in ("sockets", "shared_memory"):
        keys = {"train.global_batch_size": ROWS * context.dp_size, EXCHANGE: exchange}
        job = job_from_keys("fsdp", keys)
        example = MicroBatch(x, x[:, :4], ROWS, ROWS)
        with Engine(Empty, F.mse_loss, adamw, job, context, example=example) as engine:
            found.append([engine.step((x, x[:, :4])).loss for _ in range(2)])
    return found


def test_units_without_elements_are_exchanged() -> None:
    for gloo, shared in run_ranks(of_empty, 2):
        assert gloo == shared


def losses(context: RunContext) -> list[list[float]]:
    return [
        [loss for loss, *_ in trained(context, "fsdp", {"train.precision": "fp64"}, e)[0]]
        for e in ("sockets", "shared_memory")
    ]


def test_more_ranks_differ_by_the_order_of_the_sum_only() -> None:
    for gloo, shared in run_ranks(losses, 3):
        assert shared == pytest.approx(gloo, rel=1e-12, abs=0)


def kinds(context: RunContext) -> list[str]:
    with patch.object(os, "memfd_create", side_effect=OSError("no memory of this kind")):
        return [trained(context, "fsdp", {}, None)[3], refusal(context)]


def refusal(context: RunContext) -> str:
    with pytest.raises(ConfigError) as caught:
        trained(context, "fsdp", {}, "shared_memory")
    return str(caught.value)


def test_memory_that_cannot_be_shared_is_not_used() -> None:
    for kind, message in run_ranks(kinds, 2):
        assert kind == "_GlooAllGather"
        assert message.startswith(f"{EXCHANGE}=shared_memory: the ranks cannot open each other's")
        assert message.endswith("Leave it out.")


def on_two_hosts(context: RunContext) -> tuple[str, str]:
    context = replace(context, local_world_size=1)
    kind = trained(context, "fsdp", {}, None)[3]
    with pytest.raises(ConfigError) as caught:
        trained(context, "fsdp", {}, "shared_memory")
    return kind, str(caught.value)


def test_ranks_of_several_hosts_do_not_share_memory() -> None:
    for kind, message in run_ranks(on_two_hosts, 2):
        assert kind == "_GlooAllGather"
        assert "shared_memory: the 2 ranks are on several hosts, and all have to be" in message


def test_a_gpu_refuses_it() -> None:
    job = job_from_keys("fsdp", {"train.global_batch_size": 8, EXCHANGE: "shared_memory"})
    with pytest.raises(ConfigError, match="is for ranks on a CPU, and this run is on cuda.*out."):
        make_plan(job, 2, "cuda")


def test_other_engines_refuse_it() -> None:
    for strategy in ("zero3", "zero1_torch", "ddp"):
        with pytest.raises(ConfigError, match="exchange"):
            make_plan(job_from_keys(strategy, {EXCHANGE: "sockets"}), 2, "cpu")


def one_leaves(context: RunContext) -> None:
    job = job_from_keys("fsdp", {"train.global_batch_size": 2 * ROWS})
    with Engine(gpt, CrossEntropy(), adamw, job, context) as engine:
        engine.step(batch(context, 0))
        if context.rank == 1:
            os._exit(7)
        engine.step(batch(context, 1))


def test_a_lost_rank_ends_the_others() -> None:

    with pytest.raises(RankFailure) as caught:
        run_ranks(one_leaves, 2, timeout_s=60)
    assert caught.value.rank == 0, "rank 0 waits for the lost rank"
    assert "ended with exit status 1" in str(caught.value)


def turns(context: RunContext) -> tuple[list[list[float]], list[int], str]:
    """Take buffers of two sizes in turn, then several at once, one of which only rank 0 holds."""
    group = context.group()
    assert group is not None
    meeting, seen = Meeting(group, spins=True), []
    buffers = SharedBuffers(meeting)
    for turn in range(5):
        size = 3 + turn % 2
        own, parts = buffers.take([size, size], context.rank, torch.float32)
        own.fill_(10 * turn + context.rank)
        meeting.wait()
        seen.append([float(part[0]) for part in parts])
        del own, parts
    counts = [len(buffers._buffers)]
    held = [buffers.take([6], 0, torch.float32)[0] for _ in range(2)]
    if context.rank:
        del held[0]
    counts.append(len(buffers._buffers))
    third = buffers.take([6], 0, torch.float32)[0]
    third.fill_(7.0)
    held[-1].fill_(8.0)
    meeting.wait()
    assert float(third[0]) == 7.0, "a buffer that another rank uses was taken"
    counts.append(len(buffers._buffers))
    with pytest.raises(BigtrainError) as caught:
        held += [buffers.take([6], 0, torch.float32)[0] for _ in range(MAX_BUFFERS)]
    return seen, counts, str(caught.value)


def test_buffers_are_used_again_and_never_while_a_rank_uses_them() -> None:
    for seen, counts, message in run_ranks(turns, 2):
        assert seen == [[10 * turn, 10 * turn + 1] for turn in range(5)]
        assert counts == [1, 2, 3]
        assert "more than 16 buffers are needed at once. Set" in message


def write_and_read(context: RunContext, spin_s: float, waits: int) -> tuple[list[float], int]:
    """Write into shared memory, wait, and read what the others wrote; return it with the count."""
    group = context.group()
    assert group is not None
    meeting, seen, by_gloo = Meeting(group, spins=True), [], []
    meeting._spin_s = spin_s
    memory = np.frombuffer(shared_memory(group, 8 * 64), dtype=np.float64)
    generator = random.Random(context.rank)

    def counted_all_reduce(*arguments: Any, **options: Any) -> Any:
        by_gloo.append(1)
        return all_reduce(*arguments, **options)

    all_reduce = dist.all_reduce
    with patch.object(dist, "all_reduce", counted_all_reduce):
        for turn in range(waits):
            time.sleep(generator.choice([0, 0, 0.001, 0.004]))
            memory[context.rank] = turn
            assert meeting.wait(10 * turn + context.rank) == [
                10 * turn + rank for rank in range(context.world_size)
            ]
            seen.append(float(memory[: context.world_size].sum()) / context.world_size)
            meeting.wait()
    return seen, len(by_gloo)


@pytest.mark.parametrize(("ranks", "spin_s"), [(2, 20.0), (2, 0.001), (2, 0.0), (3, 0.001)])
def test_no_rank_reads_before_all_have_written(ranks: int, spin_s: float) -> None:
    """Ranks that are late by up to 4 ms wait by counters, by gloo, or by both in turn."""
    results = run_ranks(partial(write_and_read, spin_s=spin_s, waits=200), ranks)
    assert all(seen == [float(turn) for turn in range(200)] for seen, _ in results)
    counts = {count for _, count in results}
    assert len(counts) == 1, "all ranks wait by gloo, or none"
    assert (counts == {0}) == (spin_s == 20.0)


def wait_in_vain(context: RunContext, ends: bool) -> str:
    """Wait for rank 1, which ends or comes too late."""
    group = context.group()
    assert group is not None
    meeting = Meeting(group, spins=True)
    if context.rank == 1:
        if ends:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(6)
        return ""
    with pytest.raises(RuntimeError) as caught:
        meeting.wait()
    return str(caught.value)


def test_a_lost_rank_is_reported_as_by_gloo() -> None:
    message, _ = run_ranks(wait_in_vain, 2, True, timeout=2.0, killed=(1,))
    assert "onnection" in message


def test_a_hang_ends_with_a_page(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailure):
        run_ranks(wait_in_vain, 2, False, timeout=2.0)
    said = capfd.readouterr().err
    assert "rank 0 waits for an exchange (all_gather in shared memory) for 2 s; rank 1" in said


def test_sums_are_in_the_order_of_the_ranks() -> None:
    parts = [torch.tensor([value], dtype=torch.float32) for value in (1e8, 1.0, -1e8)]
    total = torch.empty(1)
    add_up(parts, total, mean=False)
    assert total.item() == (parts[0] + parts[1] + parts[2]).item()
    add_up(parts[:2], total, mean=True)
    assert total.item() == ((parts[0] + parts[1]) / 2).item()
