"""The typed job, and the arithmetic of batch sizes."""

from __future__ import annotations

import pytest

from bigtrain.errors import ConfigError
from bigtrain.job.batch import Batch, resolve_batch
from bigtrain.job.schema import Job, StrategyConfig, TrainConfig
from bigtrain.units import format_bytes, format_count, parse_bytes


def batch(dp: int = 1, **keys: int) -> Batch:
    return resolve_batch(TrainConfig(**keys), dp)


@pytest.mark.parametrize(
    ("keys", "dp", "expected"),
    [
        ({"global_batch_size": 32, "micro_batch_size": 4}, 2, (32, 4, 4)),
        ({"global_batch_size": 32, "accumulation_steps": 2}, 2, (32, 8, 2)),
        ({"micro_batch_size": 4, "accumulation_steps": 3}, 2, (24, 4, 3)),
        ({"global_batch_size": 32}, 4, (32, 8, 1)),
        ({"micro_batch_size": 4}, 4, (16, 4, 1)),
        ({"accumulation_steps": 4}, 2, (8, 1, 4)),
        ({}, 3, (3, 1, 1)),
        ({"global_batch_size": 24, "micro_batch_size": 4, "accumulation_steps": 3}, 2, (24, 4, 3)),
    ],
)
def test_any_two_batch_keys_give_the_third(keys, dp, expected):
    result = batch(dp, **keys)
    assert (result.global_size, result.micro_size, result.accumulation_steps) == expected
    assert result.global_size == result.micro_size * result.accumulation_steps * dp


@pytest.mark.parametrize(
    ("keys", "dp", "message"),
    [
        ({"global_batch_size": 7}, 2, r"global_batch_size=7 .* 1 \* 2 = 2 .*Use .*=8"),
        (
            {"global_batch_size": 10, "micro_batch_size": 4},
            2,
            r"global_batch_size=10 is not a multiple of micro_batch_size \* dp = 4 \* 2 = 8.*=8",
        ),
        (
            {"global_batch_size": 32, "micro_batch_size": 4, "accumulation_steps": 3},
            2,
            r"=32, but .* = 4 \* 3 \* 2 = 24\. Leave one",
        ),
        (
            {"global_batch_size": 1, "accumulation_steps": 4},
            2,
            r"global_batch_size=1 does not divide .*Use train.global_batch_size=8",
        ),
    ],
)
def test_an_impossible_batch_is_refused_with_the_equation(keys, dp, message):
    with pytest.raises(ConfigError, match=message):
        batch(dp, **keys)


def test_a_role_may_be_given_by_its_name_alone():
    strategy = StrategyConfig.model_validate(
        {"replicate": "ddp", "accumulate": {"name": "x", "k": 1}}
    )
    assert strategy.roles()["replicate"].name == "ddp"
    assert strategy.roles()["accumulate"].options == {"k": 1}


def test_a_dumped_job_reads_back_the_same():
    job = Job.model_validate({"strategy": {"replicate": {"name": "ddp", "static_graph": True}}})
    assert Job.model_validate(job.model_dump(mode="json")) == job


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2**31),
        ("1.5 MiB", 1572864),
        ("80GB", 80 * 10**9),
        (512, 512),
        ("512", 512),
        ("3k", 3072),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


def test_a_size_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="'much' is not a size.*2GiB"):
        parse_bytes("much")


def test_sizes_and_counts_are_written_for_people():
    assert format_bytes(3 * 2**30 // 2) == "1.50 GiB"
    assert format_bytes(13002342) == "12.4 MiB"
    assert format_bytes(12) == "12 B"
    assert format_count(10_600_000) == "10.6M"
    assert format_count(175e9) == "175.0B"
    assert format_count(12) == "12"
