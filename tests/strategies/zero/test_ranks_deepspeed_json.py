"""A run follows the settings of a DeepSpeed configuration file."""

from __future__ import annotations

import pytest
from support.deepspeed_files import write_config
from support.nets import TinyLM, tokens
from support.parity import adamw, largest_difference, train
from support.ranks import run_ranks


def test_it_trains_to_the_numbers_of_one_process(tmp_path):
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
    zero = {
        "stage": 1,
        "reduce_bucket_size": 500,
        "contiguous_gradients": False,
        "round_robin_gradients": True,
    }
    path = write_config(tmp_path, zero_optimization=zero, scheduler=scheduler)
    keys = {"optim.clip_norm": 0.5, "train.micro_batch_size": 2}
    single = run_ranks(train, 1, TinyLM, tokens(22), "single", keys)[0]
    named = {**keys, "strategy.deepspeed": path}
    for record in run_ranks(train, 2, TinyLM, tokens(22), "zero1", named):
        assert largest_difference(single, record) < 1e-5
    # Its values are exact in bf16, so every engine starts equally
    low = {**named, "train.precision": "bf16"}
    plain = run_ranks(train, 2, TinyLM, tokens(22), "zero1", {**keys, "train.precision": "bf16"})
    dealt_out = run_ranks(train, 2, TinyLM, tokens(22), "zero1", low)
    assert largest_difference(plain[0], dealt_out[0]) < 1e-6
    adaptive = run_ranks(train, 1, TinyLM, tokens(22), "single", {}, 6, adamw)[0]
    record = run_ranks(
        train, 2, TinyLM, tokens(22), "zero1", {"strategy.deepspeed": path}, 6, adamw
    )[0]
    assert record.losses == pytest.approx(adaptive.losses, abs=2e-6)
