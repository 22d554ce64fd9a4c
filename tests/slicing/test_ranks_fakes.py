"""Exchanges on fake tensors equal those of the real ranks, for all kinds of slices."""

import copy
import warnings

import pytest
import torch
from support.fuzzed_nets import NETS
from support.ranks import run_ranks
from support.sliced import random_slices
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bigtrain.slicing.exchange import SliceGroup
from bigtrain.slicing.install import slice_modules, slice_tensors

SOME = ("gpt, tied", "recurrent", "upwards", "swin, second")


def made_fake(model, mode):
    """Replace the tensors of a model by fakes; tied tensors stay tied."""
    twins = {}
    for module in model.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None:
                fake = twins.get(id(tensor))
                fake = nn.Parameter(mode.from_tensor(tensor.detach())) if fake is None else fake
                twins[id(tensor)] = module._parameters[name] = fake
        for name, tensor in module._buffers.items():
            if tensor is not None:
                module._buffers[name] = mode.from_tensor(tensor)


def recorded_exchanges(context, names, seed):
    """The exchanges of random slices of each net, on real and on fake tensors."""
    warnings.simplefilter("ignore")
    exchanges = {}
    for name in names:
        whole, run = NETS[name]()
        slices = random_slices(whole, context.tp_size, seed, 0.6)
        kinds = []
        for slice_group_or_none in (context.group("tp"), None):
            group = SliceGroup(context.tp_rank, context.tp_size, slice_group_or_none, exchanges=[])
            model = copy.deepcopy(whole)
            slice_tensors(model, slices, group)
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            if slice_group_or_none is None:
                made_fake(model, mode)
            slice_modules(model, slices, group)
            torch.manual_seed(1)
            if slice_group_or_none is None:
                with mode:
                    run(model)[1].backward()
            else:
                run(model)[1].backward()
            kinds.append([(exchange.kind, exchange.nbytes) for exchange in group.exchanges])
        exchanges[name] = kinds
    return exchanges


def assert_alike(names, seed, ranks):
    for results in run_ranks(recorded_exchanges, ranks, names, seed, tp=ranks, timeout_s=200):
        for name, (real, fake) in results.items():
            assert real, name
            assert real == fake, name


def test_fakes_exchange_what_ranks_exchange():
    assert_alike(SOME, 1, 2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_more_fakes_exchange_what_ranks_exchange(ranks):
    for seed in (2, 3):
        assert_alike(tuple(NETS), seed, ranks)
