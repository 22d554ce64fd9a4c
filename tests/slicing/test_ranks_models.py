"""Models with sliced parameters on real ranks compute the same as one process."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_ranks

from bigtrain.models.gpt import GPT, GPTConfig
from bigtrain.slicing.exchange import SliceGroup
from bigtrain.slicing.install import slice_modules, slice_tensors
from bigtrain.slicing.slices import Slices, SliceSection

WORDS, WIDTH, HEADS = 53, 48, 6


def slice_group(context):
    return SliceGroup(context.tp_rank, context.tp_size, context.group("tp"))


def gpt(tied):
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "width": WIDTH, "num_heads": HEADS, "vocab_size": WORDS}
    return GPT(GPTConfig(**sizes, sequence_length=8, tie_embeddings=tied)).double()


def gpt_slices():
    head = WIDTH // HEADS
    slices = {}
    for block in ("blocks.0", "blocks.1"):
        for kind in ("weight", "bias"):
            slices[f"{block}.attention.qkv.{kind}"] = Slices(0, (SliceSection(WIDTH, head),) * 3)
            slices[f"{block}.mlp.expand.{kind}"] = Slices.even(0, 4 * WIDTH)
        slices[f"{block}.attention.output.weight"] = Slices.even(1, WIDTH, head)
        slices[f"{block}.mlp.output.weight"] = Slices.even(1, 4 * WIDTH)
    for name in ("embedding.token.weight", "head.weight"):
        slices[name] = Slices.even(0, WORDS)
    return slices


def one_pass(model, smoothing):
    torch.manual_seed(1)
    words, targets = torch.randint(WORDS, (3, 8)), torch.randint(WORDS, (3, 8))
    targets[0, :3] = -100
    logits = model(words).reshape(-1, WORDS)
    loss = F.cross_entropy(logits, targets.reshape(-1), reduction="sum", label_smoothing=smoothing)
    loss.backward()
    return loss


def compare_gpt(context, tied, smoothing):
    """The differences of loss and gradients of a sliced GPT."""
    whole, slices, group = gpt(tied), gpt_slices(), slice_group(context)
    model = copy.deepcopy(whole)
    slice_tensors(model, slices, group)
    slice_modules(model, slices, group)
    differences = {"loss": one_pass(whole, smoothing) - one_pass(model, smoothing)}
    for name, parameter in whole.named_parameters():
        wanted, gradient = parameter.grad, dict(model.named_parameters())[name].grad
        if name in slices:
            wanted = slices[name].local(wanted, group.rank, group.size)
        differences[name] = wanted - gradient
    return {name: d.abs().max().item() for name, d in differences.items()}, group.gathers


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_gpt_in_slices_has_the_gradients_of_a_whole_one(ranks):
    for tied, smoothing in ((False, 0.0), (True, 0.1)):
        for differences, gathers in run_ranks(compare_gpt, ranks, tied, smoothing, tp=ranks):
            assert max(differences.values()) < 1e-12, differences
            assert gathers == {}
