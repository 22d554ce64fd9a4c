"""Weight decay without norms and biases is the same for every division of the parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.nets import TinyLM, tokens
from support.parity import Record, largest_difference, train
from support.ranks import run_ranks

from bigtrain.job.optim_keys import OptimConfig
from bigtrain.optim.factory import optimizer_factory


def decaying(**keys: Any) -> torch.optim.Optimizer:
    config = OptimConfig(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.5, **keys)
    return optimizer_factory(config)


def decay_everything(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer that decays all parameters."""
    return decaying()(parameters)


def only_matrices(parameters: Any) -> torch.optim.Optimizer:
    return decaying(decay_norms_and_biases=False)(parameters)


def decay_matrices(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer with two groups made by hand: only matrices decay."""
    listed = list(parameters)
    matrices = [parameter for parameter in listed if parameter.dim() > 1]
    small_ones = [parameter for parameter in listed if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": small_ones}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def run(strategy: str, ranks: int, optimizer: Any, precision: str = "fp64") -> list[Record]:
    keys = {"train.precision": precision}
    return run_ranks(train, ranks, TinyLM, tokens(22), strategy, keys, 6, optimizer)


@pytest.fixture(scope="module")
def expected() -> Record:
    return run("single", 1, decay_matrices)[0]


def test_one_process_decays_what_has_more_than_one_dim(expected):
    assert largest_difference(expected, run("single", 1, only_matrices)[0]) < 1e-12
    assert largest_difference(expected, run("single", 1, decay_everything)[0]) > 1e-3


@pytest.mark.parametrize("strategy", ["zero1_torch", "zero1_torch_offload_disk", "fsdp", "oss"])
def test_every_way_to_cut_the_parameters_decays_the_same(expected, strategy):
    for record in run(strategy, 2, only_matrices):
        assert largest_difference(expected, record) < 1e-10


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_deepspeed_decays_the_same_in_fp32(strategy):
    alone = run("single", 1, decay_matrices, "fp32")[0]
    for record in run(strategy, 2, only_matrices, "fp32"):
        assert largest_difference(alone, record) < 1e-5
