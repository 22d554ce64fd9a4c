"""The choice of slices, with prices for exchanges and with a memory limit."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from support.sliced_nets import Block, GatedMLP, Heads, work_on
from torch import nn
from torchvision import models

from bigtrain.errors import ConfigError
from bigtrain.machine.cluster import load_cluster
from bigtrain.machine.collective_cost import collective_seconds
from bigtrain.models.blocks import independent_blocks
from bigtrain.models.gpt import GPT, GPTConfig
from bigtrain.prediction.shorten import shorten_model
from bigtrain.slice_planning.choose import Prices, fullest_share, plan_slices
from bigtrain.slicing.slices import Slices, SliceSection

GPT_WORK = work_on(
    GPT(GPTConfig(vocab_size=2001, num_layers=4, width=128, num_heads=4)), 4, 64, tokens=2001
)


def held_bytes(plan, model, state=4.0):
    """Bytes of the rank with the most, without activations."""
    total = 0.0
    for name, parameter in model.named_parameters():
        tensor_slices = plan.slices.get(name)
        share = fullest_share(tensor_slices, plan.ranks) if tensor_slices is not None else 1.0
        total += parameter.numel() * parameter.element_size() * share * state
    return total


def sent_bytes(plan):
    parts = (*plan.classes, *plan.single_layers)
    return sum(sent.nbytes for part in parts for sent in part.exchanged)


def test_the_rank_with_most():
    assert fullest_share(Slices.even(0, 7), 2) == 4 / 7
    assert fullest_share(Slices(0, (SliceSection(24, 8), SliceSection(8, 8))), 2) == 24 / 32


def test_where_exchanges_are_free_all_that_computes_is_sliced():
    plan = plan_slices(GPT_WORK, 2, Prices(lambda *_: 0.0, seconds_per_flop=1e-12))
    assert {axis_class.name.split(".")[0] for axis_class in plan.classes} == {"blocks", "embedding"}
    assert len(plan.classes) == 10, "attention and MLP of four blocks, and two embedding tables"


def test_where_exchanges_take_longer_than_computing_nothing_is_sliced():
    plan = plan_slices(GPT_WORK, 2, Prices(lambda *_: 1.0, seconds_per_flop=1e-12))
    assert plan.slices == {}
    assert not plan.classes
    assert not plan.single_layers


def test_what_pays_is_sliced_and_what_does_not_is_not():
    # A block's MLP has twice the FLOPs of its attention's products, and sends equally many bytes.
    mlp = 2 * 4 * 64 * (2 * 128 * 512) * 3 / 2
    each = mlp * 1e-12 / 2  # the price of each of its two exchanges
    plan = plan_slices(GPT_WORK, 2, Prices(lambda *_: 0.9 * each, seconds_per_flop=1e-12))
    assert {name.split(".")[2] for name in plan.slices if name.startswith("blocks")} == {"mlp"}


def test_on_a_cluster_within_a_node_it_pays_and_over_slow_links_it_does_not():
    cluster = load_cluster("h100-node")
    flops = cluster.device.flops.bf16 * cluster.device.efficiency
    big = GPT(GPTConfig(vocab_size=2001, num_layers=2, width=1024, num_heads=8))
    work = work_on(big, 8, 128, tokens=2001)

    def prices(times):
        return Prices(
            lambda _kind, n: times * collective_seconds(_kind, n, 2, 1, cluster), 1.0 / flops
        )

    assert plan_slices(work, 2, prices(1.0)).slices
    assert not plan_slices(work, 2, prices(1e4)).slices


def test_a_limit_slices_what_it_must_and_the_cheapest_of_it():
    model = GPT_WORK.model
    whole = sum(p.numel() * p.element_size() for p in model.parameters()) * 4.0
    least = plan_slices(GPT_WORK, 2)
    sent = []
    for share in (1.0, 0.9, 0.75, 0.6):
        plan = plan_slices(GPT_WORK, 2, Prices(lambda *sent: sent[1]), limit=share * whole + 8e6)
        assert held_bytes(plan, model) <= share * whole + 8e6
        sent.append(sent_bytes(plan))
    assert sent == sorted(sent)
    assert sent[0] < sent[-1] <= sent_bytes(least) * 2


def test_a_limit_that_nothing_meets_is_refused_with_what_it_takes():
    message = (
        r"the limit of a rank is 1.0 MiB, and even with everything sliced .* it needs \d+.\d MiB"
    )
    with pytest.raises(ConfigError, match=rf"mesh.tp=2: {message}.*Use more ranks"):
        plan_slices(GPT_WORK, 2, limit=2**20)


def test_a_limit_without_prices_sends_the_fewest_bytes():
    model = nn.Sequential(
        Block(64, GatedMLP(64, 256, fused=True)), Block(64, Heads("chunk", 64, 4))
    )
    work = work_on(model, 2, 5, 64)
    everything = plan_slices(work, 2, limit=2**40)
    assert everything.slices == {}, "everything fits without slices"
    state_bytes = sum(p.numel() * p.element_size() for p in model.parameters()) * 4
    some = plan_slices(work, 2, limit=0.75 * state_bytes + 100_000)
    assert {name.split(".")[0] for name in some.slices} == {"0"}, (
        "slicing the larger layer is enough"
    )


def test_residual_blocks_send_no_more_than_two_exchanges_each():
    model = models.resnet18(weights=None)
    plan = plan_slices(work_on(model, 2, 3, 64, 64), 2)
    assert plan.sliced_share(model) > 0.9
    assert not plan.single_layers
    # By hand: the gradient of a block's input, and its output, as floats of two images.
    stages = [(64, 16), (128, 8), (256, 4), (512, 2)]
    outputs = [2 * channels * side * side * 4 for channels, side in stages]
    inputs = [outputs[0], outputs[0], outputs[1], outputs[2]]
    blocks = sum(first + last + 2 * last for first, last in zip(inputs, outputs, strict=True))
    head = 2 * 512 * 4
    assert sent_bytes(plan) <= blocks + head


def test_blocks_that_are_alike_are_sliced_alike():
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=500, num_layers=12, width=32, num_heads=4))
    slices = plan_slices(work_on(model, 2, 8, tokens=500), 2).lines()
    assert "blocks.*.attention.qkv.weight" in slices
    assert not any(name.startswith("blocks.0") for name in slices)


def test_few_parameters_that_cost_traffic_stay_whole():
    config = GPTConfig(vocab_size=9001, num_layers=2, width=128, sequence_length=32)
    plan = plan_slices(work_on(GPT(config), 2, 32, tokens=9001), 2)
    assert "embedding.position.weight" not in plan.slices
    why = "dim 0: it is 0.26% of the parameters, and slices of it would send 16.0 KiB"
    assert plan.whole_reasons["embedding.position.weight"].startswith(why)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_every_rank_has_a_part_of_all_that_is_sliced(ranks):
    with torch.device("meta"):
        model = models.vit_b_16(weights=None)
    plan = plan_slices(work_on(model, 1, 3, 224, 224), ranks)
    assert plan.sliced_share(model) > 0.9
    for slices in plan.slices.values():
        assert min(slices.length(rank, ranks) for rank in range(ranks)) > 0
    heads = plan.slices["encoder.layers.encoder_layer_0.self_attention.in_proj_weight"]
    assert heads == Slices(0, (SliceSection(768, 64),) * 3)


def test_a_shorter_model_is_sliced_as_the_one_that_its_blocks_stand_for():
    """With nine blocks the positions are such a small share that they stay whole; with
    three not.
    """
    small = {"vocab_size": 256, "width": 64, "num_heads": 4, "sequence_length": 32}
    model = GPT(GPTConfig(num_layers=9, **small))
    short, order = shorten_model(model)
    names = [name for name, _ in independent_blocks(short)]
    work = vars(work_on(short, 2, 32, tokens=256))
    repeats = Counter(names[block] for block in order)
    assert [*repeats.values()] == [1, 7, 1]
    whole = plan_slices(work_on(model, 2, 32, tokens=256), 2).slices
    alone = plan_slices(SimpleNamespace(**work), 2).slices
    slices = plan_slices(SimpleNamespace(**work), 2, repeats=repeats).slices
    assert alone.keys() - slices.keys() == {"embedding.position.weight"}
    assert slices == {name: whole[name] for name in slices}
    assert {n for n in whole if "blocks" not in n} == {n for n in slices if "blocks" not in n}
