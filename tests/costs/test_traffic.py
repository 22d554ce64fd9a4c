"""The traffic that each strategy states, compared with theory."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from published.formulas import theory_elements
from support.nets import BlockConv, BlockLM
from support.parity import adamw
from support.ranks import run_ranks
from support.traffic import PSI, REST, profile, traffic_of_plan
from torch import nn

import bigtrain.assembly.host_room
from bigtrain.activations.offload import ActivationOffloader
from bigtrain.assembly.host_room import ensure_host_room
from bigtrain.assembly.make_plan import make_plan
from bigtrain.assembly.resolve import resolve_plan
from bigtrain.core.strategy import Plan
from bigtrain.core.workload import Workload
from bigtrain.costs.traffic import (
    EXCHANGES,
    Traffic,
    message_count,
    offloaded_activations,
    parameter_shapes,
    pinned_activations,
)
from bigtrain.data import MicroBatch
from bigtrain.devices import accelerator
from bigtrain.engine.engine import Engine
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.prediction.predict import forecast_rank, predict
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.transfer import DiskTransfer, ScratchFile, pinned_bytes


def plan_of(strategy: str, ranks: int = 8, device: str = "cpu", **keys: Any) -> Plan:
    """A plan with dotted keys; for a GPU that is missing, the plan is made as for the CPU."""
    job = job_from_keys(strategy, {"train.micro_batch_size": 1, **keys})
    return replace(make_plan(job, ranks, "cpu"), device_type=device)


@pytest.mark.parametrize(
    ("strategy", "volume"),
    [
        ("ddp", (0, 2)),
        ("zero1", (0, 2)),
        ("zero2", (1, 1)),
        ("zero3", (3, 0)),
        ("fsdp_zero2", (2, 0)),
        ("fsdp", (3, 0)),
        # These average whole gradients, and send updated parameters after the step.
        ("zero1_torch", (0, 3)),
        ("oss", (0, 3)),
        ("sharded_ddp", (1, 1)),
    ],
)
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_the_volume_is_that_of_the_theory(strategy, volume, micro_batches):
    """ZeRO, section 7: 2 psi numbers for DDP and stages 1 and 2, 3 psi for stage 3."""
    plan = plan_of(strategy, **{"train.accumulation_steps": micro_batches})
    numbers_sent = theory_elements(traffic_of_plan(profile(), plan), micro_batches, size=4)
    of_each, once = volume
    assert numbers_sent == pytest.approx((of_each * micro_batches + once) * PSI, rel=0.005)
    exchanged = [t for t in traffic_of_plan(profile(), plan) if t.kind in EXCHANGES]
    assert all(t.ranks == 8 and t.stride == 1 for t in exchanged)


@pytest.mark.parametrize(
    "strategy", ["single", "ddp", "zero1_torch", "fsdp", "zero1", "zero3", "oss", "sharded_ddp"]
)
def test_one_rank_sends_nothing(strategy):
    assert traffic_of_plan(profile(buffer_bytes=8), plan_of(strategy, 1)) == ()


def test_a_group_of_replicas_has_the_distance_of_its_mesh():
    keys = {"mesh.pp": 4, "mesh.dp": 2, "train.accumulation_steps": 4}
    (exchange,) = traffic_of_plan(profile(), plan_of("1f1b_ddp", **keys))
    assert (exchange.ranks, exchange.stride, exchange.every, exchange.overlaps) == (
        2,
        4,
        "step",
        "nothing",
    )


def test_hybrid_sharding_gathers_among_neighbours_and_averages_shards_over_groups():
    plan = plan_of("hybrid", **{"strategy.replicate.shard_ranks": 4})
    by_kind = {t.kind: t for t in traffic_of_plan(profile(), plan)}
    assert (by_kind["reduce_scatter"].ranks, by_kind["reduce_scatter"].stride) == (4, 1)
    assert (by_kind["all_reduce"].ranks, by_kind["all_reduce"].stride) == (2, 4)
    assert by_kind["all_reduce"].nbytes * 4 == by_kind["reduce_scatter"].nbytes


def test_a_sharded_exchange_is_beside_the_pass_it_serves():
    def beside(strategy: str, device: str) -> set[str]:
        messages = traffic_of_plan(profile(), plan_of(strategy, device=device))
        return {message.overlaps for message in messages if message.kind != "copy"}

    for device in ("cpu", "cuda"):
        assert beside("fsdp", device) == {"forward", "backward"}
        assert beside("zero3", device) - {"nothing"} == {"forward", "backward"}
        assert beside("ddp", device) == {"backward"}


def test_fully_shard_copies_in_the_stream_that_computes_except_into_gathers():
    messages = traffic_of_plan(profile(), plan_of("fsdp", device="cuda"))
    gathered = sum(message.nbytes for message in messages if message.kind == "all_gather")
    reduced = sum(message.nbytes for message in messages if message.kind == "reduce_scatter")
    copies = [message for message in messages if message.kind == "copy"]
    in_stream = sum(copy.nbytes for copy in copies if copy.overlaps == "nothing")
    beside = sum(copy.nbytes for copy in copies if copy.overlaps != "nothing")
    assert in_stream == gathered + reduced
    assert beside == gathered // 8


def test_messages_are_packed_as_far_as_they_fit():
    assert message_count([], 10) == 0
    assert message_count([4, 4, 4], 10) == 2
    assert message_count([4, 4, 4], 10, may_exceed=True) == 1
    assert message_count([20, 1, 20], 10) == 3
    assert message_count([20, 1, 20], 10, may_exceed=True) == 2


def test_powersgd_sends_thin_matrices():
    keys = {"strategy.replicate.compress": "powersgd", "strategy.replicate.powersgd_rank": 2}
    (exchange,) = traffic_of_plan(profile(), plan_of("ddp", **keys))
    assert exchange.nbytes == 4 * (4 * 2 * 2000 + REST)


def test_a_profile_without_shapes_still_has_its_gradients():
    bare = profile(blocks=(), outside_blocks=None)
    assert parameter_shapes(bare) == [(PSI + REST,)]
    (exchange,) = traffic_of_plan(bare, plan_of("ddp"))
    assert (exchange.nbytes, exchange.calls) == (4 * (PSI + REST), 1)


def bytes_moved(stated_traffic: tuple[Traffic, ...], micro_batches: int = 1) -> dict[str, int]:
    """The bytes of a step by kind of move."""
    sums: Counter[str] = Counter()
    for traffic in stated_traffic:
        sums[traffic.kind] += traffic.step_bytes(micro_batches)
    return {kind: nbytes for kind, nbytes in sums.items() if "host" in kind or "disk" in kind}


def test_state_on_the_host_is_a_gradient_over_and_a_value_back():
    """ZeRO-Offload: for each parameter that a rank updates, 4 bytes to the host and 4
    bytes back.
    """
    keys = {"strategy.offload.optimizer": "cpu"}
    elements = PSI + REST
    plan = plan_of("ddp", device="cuda", **keys)
    assert bytes_moved(traffic_of_plan(profile(), plan)) == {
        "to_host": 4 * elements,
        "from_host": 4 * elements,
    }
    plan = plan_of("zero1_torch", device="cuda", **keys)
    assert bytes_moved(traffic_of_plan(profile(), plan)) == {
        "to_host": 4 * elements // 8,
        "from_host": 4 * elements // 8,
    }
    # On a CPU the state is on the host already
    assert bytes_moved(traffic_of_plan(profile(), plan_of("ddp", **keys))) == {}


def test_parameters_on_the_host_come_for_each_gathering():
    keys = {"strategy.offload.parameters": "cpu", "train.accumulation_steps": 3}
    moved = bytes_moved(traffic_of_plan(profile(), plan_of("fsdp", device="cuda", **keys)), 3)
    assert moved["from_host"] == pytest.approx(3 * 2 * 4 * PSI / 8, rel=0.005)
    assert moved["to_host"] == pytest.approx(3 * 4 * PSI / 8, rel=0.005)


def test_deepspeeds_offload_moves_gradients_and_values():
    share = (PSI + REST) // 8
    moved = bytes_moved(traffic_of_plan(profile(), plan_of("zero2_offload", device="cuda")))
    assert moved == {"to_host": 4 * share, "from_host": 4 * share}
    moved = bytes_moved(traffic_of_plan(profile(), plan_of("zero3_offload", device="cuda")))
    # The shards move twice; the gradient moves to the host, back, and again as the optimizer's
    # input.
    assert moved["from_host"] == pytest.approx((2 + 1) * 4 * share, rel=0.01)
    assert moved["to_host"] == pytest.approx(2 * 4 * share, rel=0.01)
    assert bytes_moved(traffic_of_plan(profile(), plan_of("zero3_offload"))) == {}


def gpt_like() -> nn.Module:
    return BlockLM(width=64, dropout=0.1)


def measured_moves(monkeypatch, make, batch, keys):
    """The bytes that a step moves to and from the disk, and the stated bytes."""
    batch = tuple(t.clone() for t in batch)
    job = job_from_keys(
        "single", {"train.global_batch_size": len(batch[0]), "memory.track_steps": 0, **keys}
    )
    loss, context = CrossEntropy(), RunContext.alone(torch.device("cpu"))
    example = MicroBatch(*batch, loss.count(batch[1]), len(batch[0]))
    movers, files = [], Counter()
    plain = Plan.make_offloader

    def kept(self, device, *, fake=False):
        movers.append(plain(self, device, fake=fake))
        return movers[-1]

    class CountedFile(ScratchFile):
        def write(self, tensor, offset):
            files["to_disk"] += tensor.nbytes
            super().write(tensor, offset)

        def read(self, tensor, offset):
            files["from_disk"] += tensor.nbytes
            super().read(tensor, offset)

    monkeypatch.setattr(Plan, "make_offloader", kept)
    monkeypatch.setattr("bigtrain.optim.state_store.ScratchFile", CountedFile)
    with Engine(make, loss, adamw, job, context, example=example) as engine:
        mover = movers[-1]
        for _ in range(3):
            files.clear()
            before = mover.bytes_moved if mover else 0
            engine.step(batch)
        moved = mover.bytes_moved - before if mover else 0
        rank = forecast_rank(engine.resolved, Workload(make(), example, loss, adamw))
        return moved, dict(files), traffic_of_plan(rank.profiles[0], engine.plan), rank.profiles[0]


@pytest.mark.parametrize(
    "recompute", [{}, {"strategy.recompute.every": 2}, {"strategy.recompute": "full"}]
)
def test_activations_move_as_stated(monkeypatch, recompute):
    batch = torch.randint(13, (64, 6)), torch.randint(13, (64, 6))
    keys = {"strategy.offload.activations": "disk", **recompute}
    moved, _, expected, forecast = measured_moves(monkeypatch, gpt_like, batch, keys)
    nbytes, calls = offloaded_activations(forecast)
    assert calls > 0
    assert moved == 2 * nbytes
    assert bytes_moved(expected) == {"to_disk": nbytes, "from_disk": nbytes}
    assert {t.kind: t.overlaps for t in expected} == {"to_disk": "forward", "from_disk": "backward"}


def test_activations_on_the_host_take_powers_of_two(monkeypatch):
    """Pinned memory is counted in powers of two; the run's host peak equals the forecast."""
    batch = torch.randint(13, (64, 6)), torch.randint(13, (64, 6))
    most = []
    close = ActivationOffloader.close

    def closed(self):
        most.append(self.peak_bytes_away)
        close(self)

    monkeypatch.setattr(DiskTransfer, "stored_bytes", lambda _, nbytes: pinned_bytes(nbytes))
    monkeypatch.setattr(ActivationOffloader, "close", closed)
    _, _, _, forecast = measured_moves(
        monkeypatch, gpt_like, batch, {"strategy.offload.activations": "disk"}
    )
    plain, _ = offloaded_activations(forecast)
    assert most == [pinned_activations(forecast)]
    assert most[0] > 1.1 * plain


def forecast_on_a_gpu(**keys):
    """The forecast of a run on a GPU that this machine lacks."""
    batch = torch.randint(13, (64, 6)), torch.randint(13, (64, 6))
    job, loss = job_from_keys("single", {"train.global_batch_size": 64, **keys}), CrossEntropy()
    example = MicroBatch(*batch, loss.count(batch[1]), len(batch[0]))
    workload = Workload(gpt_like(), example, loss, adamw)
    return predict(resolve_plan(make_plan(job, 1, "cuda"), workload), workload)


@pytest.mark.skipif(accelerator() is not None, reason="this machine has an accelerator")
def test_a_gpu_that_is_not_here_offloads_in_its_forecast():
    resident, moved, to_disk = (
        forecast_on_a_gpu(),
        *(
            forecast_on_a_gpu(**{"strategy.offload.activations": target})
            for target in ("cpu", "disk")
        ),
    )
    assert resident.host_bytes == to_disk.host_bytes == 0
    assert moved.peak == to_disk.peak
    assert moved.peak.bytes < resident.peak.bytes
    assert moved.host_bytes > 0


def shortage_of(context, free: int, wanted: int, storage_place: str = "cpu") -> str:
    bigtrain.assembly.host_room.free_host_bytes = lambda: free if context.rank == 1 else 10**12
    job = job_from_keys(
        "ddp", {"train.global_batch_size": 8, "strategy.offload.activations": storage_place}
    )
    try:
        ensure_host_room(make_plan(job, 2, "cuda"), wanted + context.rank, context)
    except ConfigError as error:
        return str(error)
    return ""


def test_the_hosts_memory_must_hold_the_activations_of_all_ranks():
    assert run_ranks(shortage_of, 2, 2001, 1000) == ["", ""]
    assert run_ranks(shortage_of, 2, 0, 1000, "disk") == ["", ""]
    first, second = run_ranks(shortage_of, 2, 2000, 1000)
    assert first == second
    assert "(2001 bytes) of pinned memory" in first
    assert "free (2000 bytes)" in first
    assert "the 2 ranks" in first


def test_activations_of_images_move_as_stated(monkeypatch):
    batch = torch.randn(32, 1, 16, 16), torch.arange(32) % 3
    keys = {"strategy.offload.activations": "disk"}
    moved, _, expected, _ = measured_moves(
        monkeypatch, partial(BlockConv, inplace=False), batch, keys
    )
    assert moved == sum(bytes_moved(expected).values()) > 0


def test_the_state_goes_to_disk_and_back_once_a_step(monkeypatch):
    batch = torch.randint(13, (8, 6)), torch.randint(13, (8, 6))
    keys = {"strategy.offload.optimizer": "disk"}
    _, files, expected, _ = measured_moves(monkeypatch, gpt_like, batch, keys)
    assert files == bytes_moved(expected)
    assert files["to_disk"] == 2 * 4 * sum(p.numel() for p in gpt_like().parameters())


def test_no_strategy_states_what_it_does_not_do():
    """Each exchange has a group of ranks; a copy has none."""
    for strategy in ("ddp", "zero1_torch", "fsdp", "zero1", "zero2", "zero3", "oss", "sharded_ddp"):
        for traffic in traffic_of_plan(profile(buffer_bytes=64), plan_of(strategy)):
            exchanged = traffic.kind in EXCHANGES
            assert traffic.ranks == (8 if exchanged else 1), strategy
            assert (traffic.calls > 0) == exchanged
            assert traffic.nbytes > 0
            assert math.isfinite(traffic.nbytes)
