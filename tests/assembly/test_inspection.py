"""Features of a model that a plan cannot handle are refused before any process group exists."""

from __future__ import annotations

import functools

import pytest
import torch
from support.odd_parameters import Global, batch, make_net
from torch import nn

import bigtrain
from bigtrain.assembly.inspection import found_in_model, refuse_found
from bigtrain.assembly.make_plan import make_plan
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.tracing.parameter_uses import parameter_uses

SGD = functools.partial(torch.optim.SGD, lr=0.1)

MESSAGES = {
    ("Sparse", "fsdp"): r"e\.weight has sparse gradients .*strategy fsdp.*--strategy ddp",
    ("SparseF", "ddp"): r"e has sparse gradients .*Set sparse=False, or use --strategy single",
    ("SparseHead", "ddp"): r"e\.weight has sparse gradients .* in one use, and dense .*Set sparse",
    ("Teacher", "zero3"): r"t\.weight is written in place in the forward pass.*--strategy fsdp",
    ("Complex", "zero2"): r"f is complex64, which strategy zero2 .*--strategy fsdp",
    ("Mixed", "zero2"): r"s is trained in float64, .*--strategy fsdp",
    ("Mixed", "oss"): r"float64, which strategy oss does not support.*--strategy fsdp",
    ("Empty", "zero3"): r"e\.weight has no elements \(\[0, 16\]\).*--strategy fsdp",
    ("PostHook", "zero2"): r"b\.bias has a hook .*post_accumulate.*--strategy fsdp",
    ("TensorExtra", "ddp"): r"_extra_state: get_extra_state returned a Tensor .*JSON",
}


def inspect(net: nn.Module, strategy: str, world_size: int = 2, **keys: object) -> None:
    keys = {"train.global_batch_size": 8, **keys}
    plan = make_plan(job_from_keys(strategy, keys), world_size, "cpu")
    refuse_found(plan, found_in_model(net, parameter_uses(net, MicroBatch(*batch(0), 8, 8))))


@pytest.mark.parametrize(("net", "strategy"), MESSAGES)
def test_it_is_refused_by_name_with_a_strategy_that_holds_it(net, strategy):
    with pytest.raises(ConfigError, match=MESSAGES[net, strategy]):
        inspect(make_net(net), strategy)


class Own(nn.Linear):
    """Clamps its weight in the forward pass; under fsdp that would be its gathered weight."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Codebook(nn.Module):
    """Writes a buffer that depends on the rank's rows of the batch."""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(16, 4)
        self.mean = nn.Parameter(torch.zeros(16), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return self.l(x - self.mean)


def test_a_write_into_a_gathered_parameter_is_refused():
    net = nn.Sequential(Own(16, 16), nn.Linear(16, 4))
    with pytest.raises(ConfigError, match=r"0\.weight is written .*that it is sharded with"):
        inspect(net, "fsdp")
    inspect(net, "ddp")
    with pytest.raises(ConfigError, match=r"0\.weight is written in place"):
        inspect(net, "ddp+full")


def test_a_write_that_follows_from_the_batch_is_refused_on_replicas():
    with pytest.raises(ConfigError, match=r"mean is written .*own part of the batch"):
        inspect(Codebook(), "ddp")
    inspect(Codebook(), "single", 1)


def test_sparse_gradients_of_stages_are_held_where_nothing_averages_or_shares_them():
    inspect(make_net("Sparse"), "1f1b")
    with pytest.raises(ConfigError, match=r"e\.weight is shared, and has sparse .*1f1b"):
        inspect(make_net("SparseShared"), "1f1b")
    with pytest.raises(ConfigError, match=r"e\.weight has sparse gradients .*1f1b\+ddp"):
        inspect(make_net("Sparse"), "1f1b+ddp", 4, **{"mesh.pp": 2})
    with pytest.raises(ConfigError, match=r"e\.weight has sparse gradients"):
        inspect(make_net("Sparse"), "zero_bubble")


def test_types_that_no_checkpoint_holds_are_refused():
    net = nn.Linear(16, 4)
    net.big = nn.Parameter(torch.zeros(2, dtype=torch.complex128), requires_grad=False)
    with pytest.raises(ConfigError, match=r"big is complex128, which checkpoints cannot store"):
        inspect(net, "ddp")


def test_two_types_in_a_block_that_is_sharded_are_refused():
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    net[0].bias = nn.Parameter(net[0].bias.double())
    with pytest.raises(ConfigError, match=r"0\.bias|bias is float64, .* of 0 are float32"):
        inspect(net, "fsdp")


@pytest.mark.parametrize(
    ("net", "make", "words"),
    [
        ("Sparse", SGD, "e.weight has sparse gradients"),
        ("Base", torch.optim.LBFGS, "wants a closure"),
    ],
)
def test_prepare_refuses_before_the_ranks_connect(net, make, words):
    keys = {"train__global_batch_size": 8, "device": "cpu"}
    with pytest.raises(ConfigError, match=words):
        bigtrain.prepare(
            make_net(net), nn.functional.mse_loss, make, strategy="fsdp", example=batch(0), **keys
        )
    assert not torch.distributed.is_initialized()


def test_an_optimizer_that_looks_at_all_parameters_is_refused_by_its_class():
    from bigtrain.assembly.optimizer_check import check_kind
    from bigtrain.optim.whole import WholeOptimizer

    plan = make_plan(job_from_keys("zero1_torch", {"train.global_batch_size": 8}), 2, "cpu")
    whole = WholeOptimizer(functools.partial(Global, lr=0.1), make_net("Base"))
    with pytest.raises(ConfigError, match=r"step of Global reads all .*--strategy ddp"):
        check_kind(whole, plan)
