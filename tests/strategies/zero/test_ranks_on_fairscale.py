"""fairscale's ZeRO: the numbers of one process, memory as predicted, one format of checkpoints."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from support.continued import continue_run
from support.nets import Sometimes, TinyConv, TinyLM, tokens
from support.parity import Record, adamw, largest_difference, sgd, train
from support.peaks import assert_same_parts, images, peaks, text, wide_model
from support.ranks import run_ranks
from support.whole import assert_same_tensors
from torch import nn
from torch.utils.checkpoint import checkpoint

from bigtrain.data import MicroBatch
from bigtrain.data.source import TensorSamples
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy

pytest.importorskip("fairscale")

BOTH = ["oss", "sharded_ddp"]
FP64 = {"train.precision": "fp64", "optim.clip_norm": 0.5}


ONCE: dict[object, Record] = {}
"""The runs that several tests compare with."""


def train_once(world_size, model, samples, strategy, keys, steps=6, optimizer=sgd) -> Record:
    case = (world_size, model, samples, strategy, tuple(keys.items()), steps, optimizer)
    if case not in ONCE:
        run = (model, samples(), strategy, keys, steps, optimizer)
        ONCE[case] = run_ranks(train, world_size, *run)[0]
    return ONCE[case]


def ragged() -> TensorSamples:
    """Every third batch of 8 is not full, and some samples have no target at all."""
    return tokens(22)


@pytest.fixture(scope="module")
def expected() -> Record:
    return train_once(1, TinyLM, ragged, "single", FP64)


@pytest.mark.parametrize(("world_size", "rows"), [(2, 1), (2, None), (4, 1)])
@pytest.mark.parametrize("strategy", BOTH)
def test_it_equals_one_process_in_float64(expected, strategy, world_size, rows):
    keys = {**FP64, **({"train.micro_batch_size": rows} if rows else {})}
    for record in run_ranks(train, world_size, TinyLM, tokens(22), strategy, keys):
        assert largest_difference(expected, record) < 1e-10


@pytest.mark.parametrize("strategy", BOTH)
def test_three_ranks_accumulate_without_losing_a_bit_that_matters(strategy):
    """Unlike with 2 or 4 ranks, multiplying and dividing by the number of ranks rounds."""
    keys = {**FP64, "train.global_batch_size": 9}
    single = train_once(1, TinyLM, ragged, "single", keys)
    keys["train.micro_batch_size"] = 1
    for record in run_ranks(train, 3, TinyLM, tokens(22), strategy, keys):
        assert largest_difference(single, record) < 1e-10


@pytest.mark.parametrize("strategy", BOTH)
def test_it_equals_one_process_in_float32(strategy):
    single = train_once(1, TinyLM, ragged, "single", {})
    keys = {"train.micro_batch_size": 2, "strategy.replicate.bucket_size": 64}
    for record in run_ranks(train, 2, TinyLM, tokens(22), strategy, keys):
        assert largest_difference(single, record) < 1e-5


@pytest.mark.parametrize("strategy", BOTH)
def test_adamw_has_the_same_losses(strategy):
    single = train_once(1, TinyLM, ragged, "single", {}, 10, adamw)
    for record in run_ranks(train, 2, TinyLM, tokens(22), strategy, {}, 10, adamw):
        assert record.losses == pytest.approx(single.losses, abs=2e-6)


@pytest.mark.parametrize("strategy", BOTH)
def test_bf16_is_that_of_ddp(strategy):
    keys = {"train.precision": "bf16", "optim.clip_norm": 0.5, "train.micro_batch_size": 2}
    ddp = train_once(2, TinyLM, ragged, "ddp", keys)
    for record in run_ranks(train, 2, TinyLM, tokens(22), strategy, keys):
        assert record.losses == pytest.approx(ddp.losses, rel=5e-3)
        assert all(t.dtype == torch.float32 for t in record.weights.values())


class Recomputed(TinyLM):
    """Its block is recomputed in the backward pass."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + checkpoint(self.block, x, use_reentrant=False)
        return self.head(x)

    def block(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


@pytest.mark.parametrize("strategy", BOTH)
def test_recomputing_changes_nothing(expected, strategy):
    keys = {**FP64, "train.micro_batch_size": 2}
    for record in run_ranks(train, 2, Recomputed, tokens(22), strategy, keys):
        assert largest_difference(expected, record) < 1e-10


def small_images() -> TensorSamples:
    generator = torch.Generator().manual_seed(3)
    return TensorSamples(torch.randn(16, 1, 8, 8, generator=generator), torch.arange(16) % 3)


@pytest.mark.parametrize("strategy", BOTH)
def test_buffers_follow_the_first_rank_as_under_ddp(strategy):
    ddp = train_once(2, TinyConv, small_images, "ddp", FP64)
    record = run_ranks(train, 2, TinyConv, small_images(), strategy, FP64)[0]
    assert largest_difference(ddp, record) < 1e-10


def one_weight() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3, bias=False))


@pytest.mark.parametrize("strategy", BOTH)
def test_fewer_parameters_than_ranks(strategy):
    single = train_once(1, one_weight, small_images, "single", FP64)
    for record in run_ranks(train, 4, one_weight, small_images(), strategy, FP64):
        assert largest_difference(single, record) < 1e-10


def test_the_last_micro_batch_may_do_without_a_parameter():
    """The sum of the earlier micro-batches was averaged once, and must stay so."""
    keys = {**FP64, "train.micro_batch_size": 2}
    unused = {"strategy.replicate.find_unused_parameters": True}
    ddp = train_once(2, Sometimes, ragged, "ddp", {**keys, **unused})
    for record in run_ranks(train, 2, Sometimes, tokens(22), "sharded_ddp", keys):
        assert largest_difference(ddp, record) < 1e-10


class Joined(nn.Module):
    """Two weights used as one: their gradients are slices of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 2), nn.Linear(64, 1)

    def forward(self, images):
        weight = torch.cat([self.first.weight, self.second.weight])
        bias = torch.cat([self.first.bias, self.second.bias])
        return nn.functional.linear(images.flatten(1), weight, bias)


def test_gradients_that_share_memory_are_sent_one_by_one():
    keys = {**FP64, "train.micro_batch_size": 2}
    single = train_once(1, Joined, small_images, "single", keys)
    for record in run_ranks(train, 2, Joined, small_images(), "sharded_ddp", keys):
        assert largest_difference(single, record) < 1e-10


def in_two_groups(parameters):
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def trained_with_rates(context, strategy):
    job = job_from_keys(strategy, {"train.global_batch_size": 8})
    samples, size = tokens(8), 8 // context.world_size
    mine = slice(context.rank * size, (context.rank + 1) * size)
    batch = samples.inputs[mine], samples.targets[mine]
    rate = (1e-2, 5e-3, 1e-3, 2e-2).__getitem__
    how = {"learning_rate": rate}
    with Engine(TinyLM, CrossEntropy(), in_two_groups, job, context, **how) as engine:
        losses = []
        for _ in range(4):
            losses.append(engine.step(batch).loss)
            engine.evaluate([MicroBatch(*batch, engine.loss.count(batch[1]), size)])
        return losses


@pytest.mark.parametrize("strategy", BOTH)
def test_rates_and_groups_reach_the_optimizer_that_does_the_work(strategy):
    """An evaluation between the steps changes nothing."""
    single = run_ranks(trained_with_rates, 1, "single")[0]
    for losses in run_ranks(trained_with_rates, 2, strategy):
        assert losses == pytest.approx(single, abs=2e-6)


WAYS = [("ddp", 2, "oss", 4, sgd), ("oss", 4, "ddp", 2, adamw), ("ddp", 4, "sharded_ddp", 2, adamw)]
WAYS += [("sharded_ddp", 2, "ddp", 4, sgd), ("oss", 2, "sharded_ddp", 4, adamw)]


@pytest.mark.parametrize("direction", WAYS, ids=lambda way: f"{way[0]}-{way[2]}")
def test_a_checkpoint_goes_from_one_strategy_to_another(direction, tmp_path):
    saver, savers, loader, loaders, optimizer = direction
    path, losses = run_ranks(continue_run, savers, saver, tmp_path / "a", optimizer, None)[0]
    again = run_ranks(continue_run, loaders, loader, tmp_path / "b", optimizer, path)
    for _, rank_losses in again:
        assert rank_losses == pytest.approx(losses, abs=2e-6)
    # A checkpoint written right after loading equals the loaded one, byte by byte.
    assert_same_tensors(path, again[0][0])


PEAKS = {
    "fp32": ({}, adamw),
    "bf16, clipped": ({"train.precision": "bf16", "optim.clip_norm": 1.0}, adamw),
    "accumulating": ({"train.micro_batch_size": 2}, adamw),
    "bf16, accumulating, sgd": ({"train.precision": "bf16", "train.micro_batch_size": 2}, sgd),
}


@pytest.mark.parametrize(
    "case",
    # The bf16 case also has several micro-batches.
    PEAKS,
)
@pytest.mark.parametrize("strategy", BOTH)
def test_the_peak_of_the_fullest_rank_is_predicted(strategy, case):
    keys, optimizer = PEAKS[case]
    runs = [(4, wide_model, text()), (2, wide_model, text()), (2, TinyConv, images())]
    for world_size, model, batch in runs if case == "fp32" else runs[:1]:
        results = run_ranks(peaks, world_size, model, batch, strategy, keys, optimizer)
        predicted, _, note = results[0]
        measured = max((m for _, m, _ in results), key=lambda peak: peak.bytes)
        assert note is None
        assert_same_parts(predicted, measured)


def test_each_stage_holds_less_than_the_one_before():
    batch = text()
    peak = {}
    for strategy in ("ddp", *BOTH):
        results = run_ranks(peaks, 2, wide_model, batch, strategy, {}, adamw)
        peak[strategy] = max(measured.bytes for _, measured, _ in results)
    assert peak["ddp"] > peak["oss"] > peak["sharded_ddp"]


class Stack(nn.Module):
    """Blocks, a head tied to the embedding, and sizes that 2 and 4 ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 7)
        layers = [nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 7)) for _ in range(3)]
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(1))

    def forward(self, tokens):
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def without_streams(context, fn, *args):
    """Call `fn` so that fairscale's stage 3 runs on a CPU: everything in order, without streams."""
    from fairscale.internal import reduce_scatter_bucketer
    from fairscale.nn.data_parallel import fully_sharded_data_parallel

    from bigtrain.strategies.zero.on_fairscale import engine, fsdp

    stream = SimpleNamespace(wait_stream=lambda _: None, synchronize=lambda: None)
    cuda = SimpleNamespace(
        is_available=lambda: True,
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda _: nullcontext(),
        synchronize=lambda: None,
    )
    fully_sharded_data_parallel.torch = SimpleNamespace(**{**vars(torch), "cuda": cuda})
    for module in (fully_sharded_data_parallel, reduce_scatter_bucketer):
        module.enable_nccl_base_collectives = False
    torch.Tensor.record_stream = lambda _self, _stream: None
    warnings.filterwarnings("ignore", message="TypedStorage")
    fsdp.FairscaleFSDP.check = lambda own, plan: engine.refuse_common(own, plan)
    return fn(context, *args)


@pytest.mark.parametrize("world_size", [2, 4])
def test_stage_3_equals_one_process(world_size):
    """On a CPU with stand-ins for the streams: the sharding, and the gathered state."""
    keys = {"optim.clip_norm": 0.5}
    single = train_once(1, Stack, ragged, "single", keys)
    args = (Stack, tokens(22), "fairscale_fsdp", {**keys, "train.micro_batch_size": 1})
    for record in run_ranks(without_streams, world_size, train, *args):
        assert largest_difference(single, record) < 1e-5


@pytest.mark.parametrize(
    ("saver", "loader"), [("ddp", "fairscale_fsdp"), ("fairscale_fsdp", "oss")]
)
def test_a_checkpoint_goes_to_stage_3_and_back(saver, loader, tmp_path):
    first = (continue_run, saver, tmp_path / "a", adamw, None)
    path, losses = run_ranks(without_streams, 2, *first)[0]
    again = run_ranks(without_streams, 4, continue_run, loader, tmp_path / "b", adamw, path)
    for _, rank_losses in again:
        assert rank_losses == pytest.approx(losses, abs=2e-6)
    assert_same_tensors(path, again[0][0])


def mixed() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Linear(3, 3).double())


def test_parameters_of_several_types_are_refused():
    with pytest.raises(
        AssertionError, match=r"is float64, and .* float32.*oss does not support.*fsdp"
    ):
        run_ranks(train, 2, mixed, small_images(), "oss", {})
