"""Blocks that save less compute the same, need the predicted memory, and stay inside a budget."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.nets import BlockConv, BlockLM, tokens
from support.parity import largest_difference, train
from support.ranks import run_ranks
from support.recomputed import RECOMPUTE, WAYS, gpt, gpt_without, run, text
from torch import nn

from bigtrain.assembly.make_plan import make_plan
from bigtrain.job.load import job_from_keys
from bigtrain.models.gpt import GPT, GPTConfig


def images(rows: int = 8) -> tuple[Any, Any]:
    return torch.randn(rows, 1, 12, 12, generator=torch.Generator().manual_seed(6)), (
        torch.arange(rows) % 3
    )


@pytest.fixture(scope="module")
def plain():
    return run_ranks(run, 1, gpt, text(), {})[0]


@pytest.mark.parametrize("mode", WAYS)
def test_one_process_computes_the_same_to_the_last_bit_dropout_on(plain, mode):
    losses, state, (predicted, measured), _ = run_ranks(run, 1, gpt, text(), WAYS[mode])[0]
    assert losses == plain[0]
    assert all(torch.equal(state[name], plain[1][name]) for name in plain[1])
    assert predicted == measured
    # At this size the peak is due to activations: every setting reduces it.
    assert measured.bytes < plain[2][1].bytes


@pytest.mark.parametrize("keys", [WAYS["full"], WAYS["moved"], WAYS["inputs moved"]])
def test_running_statistics_move_once_and_changes_in_place_are_right(keys):
    plain = run_ranks(run, 1, BlockConv, images(), {})[0]
    recomputed = run_ranks(run, 1, BlockConv, images(), keys)[0]
    assert plain[0] == recomputed[0]
    assert int(recomputed[1]["model.layers.0.1.num_batches_tracked"]) == 3
    assert all(torch.equal(recomputed[1][name], plain[1][name]) for name in plain[1])


def test_selective_and_a_product_changed_in_place():
    model = partial(BlockConv, inplace=False)
    plain = run_ranks(run, 1, model, images(), {})[0]
    recomputed = run_ranks(run, 1, model, images(), WAYS["selective"])[0]
    assert plain[0] == recomputed[0]
    with pytest.raises(Exception, match=r"changes one in place.*Use strategy.recompute.mode=full"):
        run_ranks(run, 1, BlockConv, images(), WAYS["selective"])


def test_full_takes_almost_all_of_what_the_blocks_save_away():
    batch = text(64)
    none, full = (run_ranks(run, 1, gpt, batch, keys)[0][2][1] for keys in ({}, WAYS["full"]))
    assert full.breakdown.activations < 0.15 * none.breakdown.activations


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_other_precisions(precision):
    keys = {"train.precision": precision, "train.micro_batch_size": 4}
    plain = run_ranks(run, 1, gpt, text(), keys)[0]
    for mode in ("full", "selective"):
        recomputed = run_ranks(run, 1, gpt, text(), {**keys, **WAYS[mode]})[0]
        assert plain[0] == recomputed[0]
        assert recomputed[2][0].bytes == pytest.approx(recomputed[2][1].bytes, rel=0.005)


FP64 = {"train.precision": "fp64", "train.micro_batch_size": 2, "optim.clip_norm": 0.5}
CUT_WAYS = [
    ("gpipe", "selective"),
    ("interleaved_1f1b", "full"),
    ("zero_bubble", "full"),
    ("zbv", "full"),
    ("1f1b", "every second"),
    ("1f1b", "moved"),
    ("layer_split_devices", "full"),
    ("gpipe_fairscale", "full"),
    ("ddp", "selective"),
    ("fsdp_zero2", "full"),
    ("fsdp", "selective"),
    ("zero1_torch", "moved"),
]


@pytest.mark.parametrize(("strategy", "mode"), CUT_WAYS)
def test_under_other_strategies_the_numbers_are_those_of_one_process(strategy, mode):
    samples = tokens(22)
    single = run_ranks(train, 1, BlockLM, samples, "single", FP64)[0]
    ranks = 1 if strategy in ("layer_split_devices", "gpipe_fairscale") else 2
    plan = make_plan(job_from_keys(strategy, {"train.global_batch_size": 8, **FP64}), ranks, "cpu")
    keys = {**FP64, **WAYS[mode]}
    for record in run_ranks(train, ranks, BlockLM, samples, strategy, keys, pp=plan.pp):
        assert largest_difference(single, record) < 1e-10


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "pipeline_deepspeed"])
def test_under_deepspeed(strategy):
    samples, keys = tokens(22), {"train.micro_batch_size": 2}
    single = run_ranks(train, 1, BlockLM, samples, "single", keys)[0]
    plan = make_plan(job_from_keys(strategy, {"train.global_batch_size": 8, **keys}), 2, "cpu")
    for record in run_ranks(
        train, 2, BlockLM, samples, strategy, {**keys, **WAYS["selective"]}, pp=plan.pp
    ):
        assert largest_difference(single, record) < 1e-5


def test_a_block_that_a_cut_goes_through_keeps_less_in_its_parts():
    keys = {**FP64, **WAYS["full"], "strategy.cut.at": ["blocks.1.mlp"]}
    samples = tokens(22)
    single = run_ranks(train, 1, small_gpt, samples, "single", FP64)[0]
    for record in run_ranks(train, 2, small_gpt, samples, "gpipe", keys, pp=2):
        assert largest_difference(single, record) < 1e-10


def small_gpt() -> nn.Module:
    shape = {"vocab_size": 13, "sequence_length": 6, "num_layers": 2, "width": 16, "num_heads": 2}
    return GPT(GPTConfig(**shape))


# Budgets


BUDGETED = [
    ("single", 1, {}),
    ("single", 1, {"train.micro_batch_size": 16}),
    ("ddp", 2, {}),
    ("fsdp", 2, {}),
    ("1f1b", 2, {"train.micro_batch_size": 8}),
    ("interleaved_1f1b", 2, {"train.micro_batch_size": 8}),
    ("single", 1, {"strategy.offload.activations": "disk"}),
]


@pytest.mark.parametrize(("strategy", "ranks", "keys"), BUDGETED)
def test_a_budget_is_kept_and_used(strategy, ranks, keys):
    pp = 2 if "1f1b" in strategy else 1
    batch, axes = text(32), {"pp": pp}
    wide = run_ranks(run, ranks, gpt_without, batch, keys, strategy, **axes)
    least = {**keys, f"{RECOMPUTE}.mode": "full"}
    narrow = run_ranks(run, ranks, gpt_without, batch, least, strategy, 1, **axes)
    high = max(result[2][0].bytes for result in wide)
    low = max(result[2][0].bytes for result in narrow)
    assert low < high
    limit = (high + low) // 2
    words = {**keys, f"{RECOMPUTE}.budget": limit}
    for result in run_ranks(run, ranks, gpt_without, batch, words, strategy, **axes):
        assert result[0] == pytest.approx(wide[0][0], rel=1e-5)
        assert result[2][0].bytes <= limit
        assert result[2][1].bytes <= 1.02 * limit
        lines = [line for line in result[3] if "budget" in line]
        assert len(lines) == pp
        assert "longer" in lines[0]
    assert max(f[2][0].bytes for f in wide) > limit
