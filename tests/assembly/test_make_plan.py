"""Combinations of mesh, backend and device that a plan refuses."""

from __future__ import annotations

import pytest

from bigtrain.assembly.make_plan import make_plan
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys

KEYS = {"train.global_batch_size": 8, "mesh.backend": "gloo"}


@pytest.mark.parametrize(
    ("strategy", "subject"),
    [
        ("1f1b", "the stages of a pipeline \\(mesh.pp=2\\)"),
        ("gpipe", "the stages of a pipeline"),
        ("layer_split", "the stages of a pipeline"),
        ("ring", "the ranks of strategy.replicate=ring"),
        ("parameter_server", "the ranks of strategy.replicate=parameter_server"),
    ],
)
def test_gloo_does_not_send_tensors_of_a_gpu_from_rank_to_rank(strategy: str, subject: str) -> None:
    job = job_from_keys(strategy, KEYS)
    with pytest.raises(ConfigError, match=f"{subject}.* send each other tensors of a cuda device"):
        make_plan(job, 2, "cuda")
    make_plan(job, 2, "cpu")
    make_plan(job_from_keys(strategy, {**KEYS, "mesh.backend": "auto"}), 2, "cuda")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1_torch", "tensor", "sync_sgd"])
def test_what_all_of_a_group_exchange_goes_by_gloo_from_a_gpu(strategy: str) -> None:
    make_plan(job_from_keys(strategy, KEYS), 2, "cuda")
