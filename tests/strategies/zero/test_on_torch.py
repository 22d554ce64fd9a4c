"""ZeRO with torch's optimizers and fully_shard, without ranks: refusals and advice."""

from __future__ import annotations

import pytest

from bigtrain.assembly.make_plan import make_plan
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys

REFUSED = {
    "shard_ranks=3 does not divide the 4 ranks": {"strategy.replicate.shard_ranks": 3},
    "bucket_size=1024 has no effect: torch's fully_shard": {"strategy.replicate.bucket_size": 1024},
    "strategy.replicate.stage": {"strategy.replicate.stage": 4},
    "stage=0 shards nothing": {"strategy.replicate.stage": 0},
    "strategy.replicate.engine": {"strategy.replicate.engine": "horovod"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_work_is_refused_before_any_group(message):
    with pytest.raises(ConfigError, match=message):
        make_plan(
            job_from_keys("fsdp", {"train.global_batch_size": 8, **REFUSED[message]}), 4, "cpu"
        )


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("config", "ds.json", "config=ds.json is for engine=deepspeed, and engine is torch"),
        ("shard_ranks", 2, "shard_ranks=2 is for stages 2 and 3, and stage is 1"),
    ],
)
def test_what_would_be_left_out_silently_is_refused(key, value, words):
    job = job_from_keys("zero1_torch", {f"strategy.replicate.{key}": value})
    with pytest.raises(ConfigError, match=words):
        make_plan(job, 4, "cpu")


def test_fp16_is_refused_with_what_to_use():
    with pytest.raises(ConfigError, match="train.precision"):
        job_from_keys("fsdp", {"train.precision": "fp16"})
