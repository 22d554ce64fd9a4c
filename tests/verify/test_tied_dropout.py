"""Dropout masks depend only on seed, step, sample and call, however a batch is divided or
recomputed.
"""

from __future__ import annotations

import pytest
import torch
from support.ranks import run_ranks
from support.sliced_models import WIDTH, WORDS, build_model, encoder_case, gpt_case, slice_group
from torch import nn
from torch.utils.checkpoint import checkpoint

from bigtrain.data.loader import MicroBatch
from bigtrain.verify.tied_dropout import TiedDropout, untied_reason


class Shared(nn.Module):
    """One dropout module called in every layer, attention's dropout, and stochastic depth
    by rows.
    """

    def __init__(self, recompute=False):
        super().__init__()
        self.drop, self.other = nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5))
        self.recompute = recompute

    def layer(self, x):
        x = self.drop(x)
        heads = x.unsqueeze(1)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)
        return self.other(x + mixed.squeeze(1) * x.new_empty(len(x), 1, 1).bernoulli_(0.5))

    def forward(self, x):
        x = self.drop(x)
        for _ in range(3):
            x = checkpoint(self.layer, x, use_reentrant=False) if self.recompute else self.layer(x)
        return x


def run(model, inputs, splits, *, seed=3, steps=1, spine=()):
    """Each step's outputs and input gradients, in micro-batches of these sizes; and the ties."""
    tied = TiedDropout(model, seed, spine)
    results = []
    for step in range(1, steps + 1):
        leaves = [part.clone().requires_grad_() for part in inputs.split(splits)]
        batches = [MicroBatch(leaf, None, len(leaf), len(leaf)) for leaf in leaves]
        places = iter(range(len(inputs)))
        tied.begin_step(step, {id(b): tuple(next(places) for _ in range(b.rows)) for b in batches})
        outputs = []
        with tied:
            for batch in batches:
                tied.begin_micro_batch(batch)
                outputs.append(model(batch.inputs))
            for output in reversed(outputs):  # all forward passes first, as in GPipe
                output.square().sum().backward()
        results.append((torch.cat(outputs).detach(), torch.cat([leaf.grad for leaf in leaves])))
    tied.close()
    return results, tied


def output(*args, **kwargs):
    return run(*args, **kwargs)[0][-1][0]


def test_masks_are_the_same_on_every_split_and_differ_by_sample_layer_step_and_seed():
    rows, drop = torch.ones(4, 6, 8), nn.Dropout(0.5)
    whole = output(drop, rows, [4])
    assert torch.equal(whole, output(drop, rows, [1, 2, 1]))
    masks = whole != 0
    assert 0.3 < masks.double().mean() < 0.7
    assert all(not torch.equal(masks[0], mask) for mask in masks[1:])
    assert not torch.equal(whole, output(drop, rows, [4], steps=2))
    assert not torch.equal(whole, output(drop, rows, [4], seed=4))
    assert not torch.equal(whole, output(nn.Sequential(drop), rows, [4]))
    twice = output(nn.Sequential(drop, drop), rows, [4]) != 0
    assert 0.1 < twice.double().mean() < 0.4  # the second call of a module has a different mask


def test_what_is_computed_again_draws_the_same_masks():
    rows = torch.rand(4, 6, 8, generator=torch.Generator().manual_seed(0)).double()
    ((plain,), tied), ((again,), _) = (
        run(Shared(), rows, [4]),
        run(Shared(recompute=True), rows, [2, 1, 1]),
    )
    for expected, computed in zip(plain, again, strict=True):
        assert expected.abs().sum() > 0
        assert torch.allclose(expected, computed, rtol=1e-12)
    assert not tied.untied


@pytest.mark.parametrize(
    "drawn",
    [
        lambda x: torch.native_dropout(x, 0.5, train=True)[0],
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
        lambda x: x * torch.bernoulli(x.detach(), 0.5),
        lambda x: x * (torch.rand_like(x) < 0.5),
        lambda x: x * (torch.rand(len(x), 1, 1) < 0.5),
        lambda x: x * (torch.empty_like(x).uniform_(-1, 1) < 0),
    ],
)
def test_masks_of_all_operations_are_tied(drawn):
    class Draws(nn.Module):
        def forward(self, x):
            return drawn(x)

    rows = torch.ones(8, 6, 8)
    results, tied = run(Draws(), rows, [8])
    assert not tied.untied
    assert torch.equal(results[0][0], output(Draws(), rows, [3, 5]))
    assert 0 < (results[0][0] != 0).double().mean() < 1


@pytest.mark.parametrize(
    ("drawn", "reason"),
    [
        (lambda x: nn.functional.dropout(x.transpose(0, 1)).transpose(0, 1), "first dimension"),
        (lambda x: x + torch.randn_like(x), "randn_like draws inside its kernel"),
        (lambda x: x * torch.empty(1, 1, 1).bernoulli_(0.5), "first dimension is not that of"),
    ],
)
def test_what_cannot_be_tied_is_named(tmp_path, drawn, reason):
    class Draws(nn.Module):
        def forward(self, x):
            return drawn(x)

    _, tied = run(nn.Sequential(Draws()), torch.ones(4, 6, 8), [4])
    assert reason in tied.untied["0"]
    tied.write(tmp_path, 0)
    assert untied_reason(tmp_path, tmp_path).startswith("0: ")


def test_what_several_stages_run_is_named():
    _, tied = run(Shared(), torch.ones(4, 6, 8), [4], spine={""})
    assert "several stages run" in tied.untied[""]


def test_a_call_that_a_stage_skips_counts():
    model, rows = nn.Sequential(*[nn.Dropout(0.5)] * 2), torch.ones(4, 6, 8)
    both_stages = output(model, rows, [4])
    calls = iter((lambda x: x, model[0]._call_impl))
    model[0]._compiled_call_impl = lambda x: next(calls)(x)
    second = output(model, rows, [4])
    assert not torch.equal(second, rows)
    first_only = iter((model[0]._call_impl, lambda x: x))
    model[0]._compiled_call_impl = lambda x: next(first_only)(x)
    assert torch.equal(output(model, rows, [4]) * second, both_stages)


def test_micro_batches_that_are_taken_ahead_are_noticed():
    model = nn.Sequential(nn.Dropout(0.5))
    tied = TiedDropout(model, 3)
    batches = [MicroBatch(torch.ones(2, 4), None, 2, 2) for _ in range(2)]
    tied.begin_step(1, {id(b): (2 * n, 2 * n + 1) for n, b in enumerate(batches)})
    with tied:
        for batch in batches:
            tied.begin_micro_batch(batch)
        model(batches[0].inputs)
    assert "placed before earlier ones are computed" in tied.untied[""]
    tied.close()


def tied_pass(model, inputs):
    """Loss and gradients with masks tied to samples; and reasons why some are not tied."""
    tied = TiedDropout(model, 3)
    batch = MicroBatch(inputs, None, len(inputs), len(inputs))
    tied.begin_step(1, {id(batch): tuple(range(len(inputs)))})
    with tied:
        tied.begin_micro_batch(batch)
        loss = model(batch.inputs).square().mean()
        loss.backward()
    tied.close()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}, tied.untied


def masks_in_slices(context, name, modes):
    """Relative differences of a rank's loss and gradients, by mode and dim of the sequence."""
    drops = {"dropout": 0.4}
    torch.manual_seed(0)
    if name == "gpt":
        case, inputs = gpt_case(tied=False, **drops), torch.randint(WORDS, (3, 8))
    else:
        case = encoder_case(batch_first=True, **drops)
        inputs = torch.randn(3, 8, WIDTH, dtype=torch.float64)
    wanted, gradients, untied = tied_pass(build_model(case, None), inputs)
    plain, _, _ = tied_pass(build_model(case, None).eval(), inputs)
    assert abs(wanted - plain) > 1e-3 * wanted  # dropout has an effect
    differences = {}
    for mode in modes:
        for sequence_dim in (None, 1):
            group = slice_group(context, sequence_dim=sequence_dim)
            group.draws.whole = True
            loss, input_gradients, not_tied = tied_pass(build_model(case, group, mode), inputs)
            apart = [(loss - wanted).abs() / wanted]
            for key, gradient in gradients.items():
                if key in case.slices:
                    gradient = case.slices[key].local(gradient, group.rank, group.size)
                apart.append((input_gradients[key] - gradient).abs().max())
            differences[mode, sequence_dim] = float(max(apart)), not_tied
    return differences, untied


@pytest.mark.parametrize("name", ["gpt", "encoder"])
def test_masks_of_slices_are_those_of_the_whole(name):
    for differences, untied in run_ranks(masks_in_slices, 3, name, ["", "full", "selective"], tp=3):
        assert untied == {}
        for key, (apart, not_tied) in differences.items():
            assert apart < 1e-12, key
            assert not_tied == {}, key
