"""Modules whose classes of slices are known by hand."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from support.sliced_nets import Block, GatedMLP, Heads, work_on
from torch import nn

from bigtrain.models.gpt import GPT, GPTConfig
from bigtrain.slice_planning.choose import plan_slices


def lines(model, *shape, ranks=2, **options):
    return plan_slices(work_on(model, *shape, **options), ranks).lines()


def whole_classes(model, *shape, ranks=2, **options):
    """Return slices of classes by names relative to the block."""
    plan = plan_slices(work_on(model, *shape, **options), ranks)
    alone = {name for form in plan.single_layers for name in form.slices}
    return {
        name.removeprefix("layer."): text
        for name, text in plan.lines().items()
        if name not in alone
    }


def test_mlp():
    model = Block(8, nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)))
    assert lines(model, 2, 3, 8) == {
        "layer.0.weight": "0/32",
        "layer.0.bias": "0/32",
        "layer.2.weight": "1/32",
    }


@pytest.mark.parametrize("fused", [True, False])
def test_gated_mlp(fused):
    expected = {"both.weight": "0/2x24", "both.bias": "0/2x24"}
    if not fused:
        expected = {
            f"{name}.{kind}": "0/24" for name in ("gate", "up") for kind in ("weight", "bias")
        }
    model = Block(8, GatedMLP(8, 24, fused=fused))
    assert whole_classes(model, 2, 3, 8) == {**expected, "down.weight": "1/24"}


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("layout", ["chunk", "3HD", "H3D", "H3D chunk", "split"])
def test_fused_queries_keys_and_values(layout, plain):
    spec = "0/96:24" if layout.startswith("H3D") else "0/3x32:8"
    model = Block(32, Heads(layout, 32, 4, plain=plain))
    assert whole_classes(model, 2, 5, 32) == {
        "qkv.weight": spec,
        "qkv.bias": spec,
        "out.weight": "1/32:8",
    }


def test_keys_that_queries_share_in_groups():
    separate = Block(64, Heads("separate", 64, 8, 2))
    classes = whole_classes(separate, 2, 5, 64)
    assert {name: classes[f"{name}.weight"] for name in ("q", "k", "v", "out")} == {
        "q": "0/64:32",
        "k": "0/16:8",
        "v": "0/16:8",
        "out": "1/64:32",
    }
    assert whole_classes(Block(64, Heads("split", 64, 8, 2)), 2, 5, 64) == {
        "qkv.weight": "0/64:32,2x16:8",
        "qkv.bias": "0/64:32,2x16:8",
        "out.weight": "1/64:32",
    }
    assert whole_classes(Block(64, Heads("groups", 64, 8, 2)), 2, 5, 64) == {
        "qkv.weight": "0/96:48",
        "qkv.bias": "0/96:48",
        "out.weight": "1/64:32",
    }


def test_fewer_keys_than_ranks_stay_whole_and_queries_are_sliced_within_groups():
    model = Block(64, Heads("separate", 64, 8, 2))
    assert whole_classes(model, 2, 5, 64, ranks=4) == {
        "q.weight": "0/2x32:8",
        "q.bias": "0/2x32:8",
        "out.weight": "1/2x32:8",
    }
    reasons = plan_slices(work_on(model, 2, 5, 64), 4).whole_reasons
    assert reasons["layer.k.bias"] == (
        "dim 0: it has 2 parts that stay together, for 4 ranks: mesh.tp=2 would work"
    )


def test_heads_of_keys_and_of_groups_are_one_axis_where_neither_is_enough():
    model = Block(48, Heads("separate", 48, 6, 3))
    classes = whole_classes(model, 2, 5, 48, ranks=4)
    assert classes == {"q.weight": "0/48:8", "q.bias": "0/48:8", "out.weight": "1/48:8"}


def test_one_key_for_all_queries_stays_whole():
    model = Block(64, Heads("separate", 64, 8, 1))
    assert whole_classes(model, 2, 5, 64) == {
        "q.weight": "0/64:8",
        "q.bias": "0/64:8",
        "out.weight": "1/64:8",
    }


class Einsum(nn.Module):
    """Attention without torch's layers: weights with a separate dim for the heads."""

    def __init__(self, width, heads):
        super().__init__()
        inner = width // heads
        self.qkv = nn.Parameter(torch.randn(3, heads, width, inner))
        self.out = nn.Parameter(torch.randn(heads, inner, width))
        self.scale = nn.Parameter(torch.ones(heads, 1, 1))

    def forward(self, x):
        q, k, v = torch.einsum("btw,nhwd->nbhtd", x, self.qkv)
        weights = (torch.einsum("bhtd,bhsd->bhts", q, k) * self.scale).softmax(-1)
        mixed = torch.einsum("bhts,bhsd->bhtd", weights, v)
        return torch.einsum("bhtd,hdw->btw", mixed, self.out)


def test_einsum_of_weights_with_heads():
    assert whole_classes(Block(32, Einsum(32, 4)), 2, 5, 32) == {
        "qkv": "1/4",
        "out": "0/4",
        "scale": "0/4",
    }


@pytest.mark.parametrize("tied", [True, False])
def test_gpt(tied):
    config = GPTConfig(vocab_size=501, num_layers=3, width=64, tie_embeddings=tied)
    plan = plan_slices(work_on(GPT(config), 2, 16, tokens=501), 2)
    assert plan.lines() == {
        "embedding.token.weight": "0/501",
        "embedding.position.weight": "0/128",
        "blocks.*.attention.qkv.weight": "0/3x64:16",
        "blocks.*.attention.qkv.bias": "0/3x64:16",
        "blocks.*.attention.output.weight": "1/64:16",
        "blocks.*.mlp.expand.weight": "0/256",
        "blocks.*.mlp.expand.bias": "0/256",
        "blocks.*.mlp.output.weight": "1/256",
        "head.weight": "0/501",
    }
    assert not plan.single_layers
    assert plan.whole_reasons["norm.weight"].startswith("dim 0: a norm goes along it in 'blocks.0.")
    hidden = 2 * 16 * 64 * 4
    exchanged = {
        axis_class.name: sorted(
            (sent.kind, sent.nbytes, sent.backward) for sent in axis_class.exchanged
        )
        for axis_class in plan.classes
    }
    both_directions = [("all_reduce", hidden, False), ("all_reduce", hidden, True)]
    blocks = [axis_class for name, axis_class in exchanged.items() if name.startswith("blocks")]
    assert blocks == [both_directions] * 6, "Megatron-LM: two all-reduces a block in each direction"
    names = ("embedding.token.weight dim 0", "head.weight dim 0")
    vocabulary = [exchanged[name] for name in names if name in exchanged]
    assert sorted(sum(vocabulary, [])) == both_directions, (
        "one for the embedding's output, one for the head's input"
    )


def test_logits_that_go_into_no_cross_entropy_are_needed_whole():
    config = GPTConfig(vocab_size=501, num_layers=1, width=64, tie_embeddings=False)
    work = work_on(GPT(config), 2, 16, tokens=501, loss=nn.MSELoss())
    plan = plan_slices(work, 2)
    assert plan.slices["embedding.token.weight"].dim == 0
    assert "head.weight" in plan.gathered or "head.weight" not in plan.slices


class Cached(Heads):
    """Keys and values are appended to a cache, which is empty at first."""

    def _parts(self, x):
        q, k, v = super()._parts(x)
        cached = [torch.empty(len(x), self.heads, 0, self.width) for _ in range(2)]
        return q, torch.cat([cached[0], k], 2), torch.cat([cached[1], v], 2)


def test_what_is_put_behind_nothing_stays_what_it_is():
    classes = whole_classes(Block(32, Cached("separate", 32, 4)), 2, 5, 32)
    names = ("q.weight", "k.weight", "v.weight")
    assert {name: classes[name] for name in names} == dict.fromkeys(names, "0/32:8")
    plan = plan_slices(work_on(Block(32, Cached("separate", 32, 4)), 2, 5, 32), 2)
    assert len(plan.classes) == 1, "queries, keys and values are one class"


class Residual(nn.Module):
    """Convolutions and a skip connection, as in ResNet."""

    def __init__(self, width, inner):
        super().__init__()
        self.one, self.norm = nn.Conv2d(width, inner, 3, padding=1), nn.BatchNorm2d(inner)
        self.two = nn.Conv2d(inner, width, 3, padding=1)
        self.last = nn.GroupNorm(1, width)

    def forward(self, x):
        return self.last(x + self.two(self.norm(self.one(x)).relu()))


def test_convolutions_and_batch_norm_with_its_statistics():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(1, 8), Residual(8, 16))
    slices = lines(model, 2, 3, 6, 6)
    names = ("one.weight", "one.bias", "norm.weight", "norm.bias")
    assert {name: slices[f"2.{name}"] for name in names} == dict.fromkeys(names, "0/16")
    assert slices["2.norm.running_mean"] == slices["2.norm.running_var"] == "0/16"
    assert slices["2.two.weight"] == "1/16"
    assert "2.norm.num_batches_tracked" not in slices


def inverted_bottleneck(width, inner, groups):
    """An inverted bottleneck: a grouped convolution between two of size 1."""
    return nn.Sequential(
        nn.Conv2d(width, inner, 1, bias=False),
        nn.BatchNorm2d(inner),
        nn.Conv2d(inner, inner, 3, padding=1, groups=groups, bias=False),
        nn.Conv2d(inner, width, 1, bias=False),
        nn.GroupNorm(1, width),
    )


def test_depthwise_convolution():
    model = nn.Sequential(nn.GroupNorm(1, 8), *inverted_bottleneck(8, 24, 24))
    classes = whole_classes(model, 2, 8, 6, 6)
    assert {n: classes[f"{n}.weight"] for n in (1, 2, 3, 4)} == {
        1: "0/24",
        2: "0/24",
        3: "0/24",
        4: "1/24",
    }


def test_grouped_convolution_is_sliced_by_groups_or_by_what_is_in_a_group():
    model = nn.Sequential(nn.GroupNorm(1, 8), *inverted_bottleneck(8, 24, 6))
    classes = whole_classes(model, 2, 8, 6, 6)
    by_groups = {1: "0/24:4", 2: "0/24:4", 3: "0/24:4", 4: "1/24:4"}
    assert {n: classes[f"{n}.weight"] for n in (1, 2, 3, 4)} == by_groups


class Dense(nn.Module):
    """Every layer reads the concatenated outputs of all layers before it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8 + 4 * n, 4, 1) for n in range(3))
        self.last = nn.Conv2d(20, 8, 1)
        self.norm = nn.GroupNorm(1, 8)

    def forward(self, x):
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return self.norm(self.last(x))


def test_parts_side_by_side_are_sliced_alike():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Dense())
    plan = plan_slices(work_on(model, 2, 3, 6, 6), 2)
    assert plan.slices["1.last.weight"].sections in (((8, 1), (4, 1), (4, 1), (4, 1)),), (
        plan.lines()
    )


def test_one_head_is_not_sliced_and_its_weights_are_by_themselves():
    plan = plan_slices(work_on(Block(32, Heads("chunk", 32, 1)), 2, 5, 32), 2)
    assert not plan.classes
    assert plan.lines()["layer.qkv.weight"] == "0/96 gather"
    assert plan.gathered == {"layer.qkv.weight", "layer.out.weight"}


def test_of_classes_that_share_a_weight_those_with_most_bytes_are_sliced():
    layers = (nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    # The 16 hidden places and the 4 of the output have 1428 numbers, the 64 hidden places 1344.
    assert lines(nn.Sequential(*layers), 3, 8) == {
        "0.weight": "0/16",
        "0.bias": "0/16",
        "2.weight": "1/16",
        "4.weight": "0/4",
        "4.bias": "0/4",
    }
    # If the output is not a row of logits, its 4 places are not a class.
    work = work_on(nn.Sequential(*layers), 3, 8, loss=nn.MSELoss())
    assert plan_slices(work, 2).lines() == {
        "2.weight": "0/64",
        "2.bias": "0/64",
        "4.weight": "1/64",
    }


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Doubles(nn.Module):
    def forward(self, x):
        return Doubled.apply(x)


def test_what_an_autograd_function_of_the_users_own_is_given_is_whole():
    layers = nn.Sequential(nn.Linear(8, 32), Doubles(), nn.Linear(32, 8))
    plan = plan_slices(work_on(Block(8, layers), 2, 3, 8), 2)
    assert not plan.classes
    assert plan.gathered == {"layer.0.weight"}
    why = "it is passed to Doubled, a custom autograd function of the model, in 'layer.1'"
    assert why in plan.whole_reasons.get("layer.2.weight", why)
    checkpointed = nn.Sequential(nn.Linear(8, 32), Recomputed(), nn.Linear(32, 8))
    assert plan_slices(work_on(Block(8, checkpointed), 2, 3, 8), 2).classes


class Recomputed(nn.Module):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(torch.relu, x, use_reentrant=False)


class ByValues(nn.Module):
    """Its second layer is used only if a sum is above 0."""

    def __init__(self, then):
        super().__init__()
        self.first = Block(8, nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)))
        self.second, self.then = nn.Linear(8, 8), then

    def forward(self, x):
        x = self.first(x)
        return self.then(self.second(x)) if x.sum() > 0 else x


def test_where_values_decide_one_way_of_several_is_looked_at():
    plan = plan_slices(work_on(ByValues(nn.Identity()), 2, 3, 8), 2)
    assert plan.slices["first.layer.0.weight"].dim == 0
    assert "depends on the value of a tensor" in plan.guessed
    assert not plan.failed


class NeedsValues(nn.Module):
    def forward(self, x):
        return torch.unique(x)[None, None]


def test_what_needs_values_stays_whole_and_what_came_before_is_sliced_all_the_same():
    plan = plan_slices(work_on(ByValues(NeedsValues()), 2, 3, 8), 2)
    assert plan.slices["first.layer.0.weight"].dim == 0
    assert "depends on the value of a tensor" in plan.failed
    assert "depends on the value of a tensor" in plan.whole_reasons["second.weight"]


class Experts(nn.Module):
    """Each token goes through the layers that its row of numbers selects, one by one."""

    def __init__(self):
        super().__init__()
        self.choose = nn.Linear(16, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)
        )

    def forward(self, x):
        flat = x.flatten(0, 1)
        weight, number = self.choose(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for n, expert in enumerate(self.experts):
            rows = (number == n).nonzero()[:, 0]
            made = expert(flat[rows]) * weight[rows, None]
            out = out.index_add(0, rows, made)
        return out.view_as(x)


def test_experts_that_tokens_are_sent_to_by_their_numbers():
    plan = plan_slices(work_on(Block(16, Experts()), 2, 8, 16), 2)
    assert {
        "layer.experts.*.0.weight": "0/64",
        "layer.experts.*.0.bias": "0/64",
        "layer.experts.*.2.weight": "1/64",
    }.items() <= plan.lines().items()
    assert not plan.failed


class OneExpert(Experts):
    def forward(self, x):
        return self.experts[int((x.sum() * 0).abs())](x)


def test_an_unused_layer_is_sliced_as_those_like_it():
    plan = plan_slices(work_on(Block(16, OneExpert()), 2, 8, 16), 2)
    assert plan.lines()["layer.experts.*.0.weight"] == "0/64"
    assert plan.lines()["layer.experts.*.2.weight"] == "1/64"


def test_what_the_forward_pass_leaves_alone_costs_nothing_in_slices():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(8, 4), nn.Linear(8, 40)

        def forward(self, x):
            return self.used(x)

    plan = plan_slices(work_on(Spare(), 2, 8), 2)
    assert plan.lines()["spare.weight"] == "0/40"
    assert plan.whole_reasons["spare.bias"] == "this forward pass does not use it"
