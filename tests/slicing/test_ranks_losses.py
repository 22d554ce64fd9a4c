"""Cross entropy on real ranks, with sliced logits, heads and hidden states."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_ranks
from support.sliced_models import WIDTH, WORDS, build_model, gpt_case, slice_group
from torch import nn

from bigtrain.losses.chunked_cross_entropy import (
    ChunkedCrossEntropy,
    attach_head,
    head_targets,
    is_head_loss,
)
from bigtrain.losses.linear_cross_entropy import chunked_cross_entropy
from bigtrain.losses.loss import CrossEntropy
from bigtrain.slicing.sliced_tensor import SlicedTensor
from bigtrain.slicing.slices import Slices, SliceSection

SHAPES = {"rows": (7, 11), "pixels": (2, 11, 3, 5)}
OPTIONS = list(
    itertools.product(("none", "sum", "mean"), (0.0, 0.1), (False, True), ("some", "all"))
)


def values(shape, ignored):
    torch.manual_seed(2)
    logits = torch.randn(shape, dtype=torch.float64) * 3
    target = torch.randint(shape[1], (shape[0], *shape[2:]))
    target.view(-1)[:: 1 if ignored == "all" else 3] = -100
    return logits, target, torch.rand(shape[1], dtype=torch.float64) + 0.5


def loss_and_gradient(context, logits, dim, compute, sections=None):
    """The loss and the gradient of this rank's part, and those of one process."""
    group = slice_group(context)
    slices = Slices(dim, sections) if sections else Slices.even(dim, logits.shape[dim])
    whole = logits.clone().requires_grad_()
    wanted = compute(whole)
    wanted.sum().backward()
    shard = slices.local(logits, group.rank, group.size).clone().requires_grad_()
    loss = compute(SlicedTensor.of(shard, slices, group))
    if isinstance(loss, SlicedTensor):
        loss = loss.whole()
    loss.sum().backward()
    gradient = slices.local(whole.grad, group.rank, group.size)
    same = torch.allclose(loss, wanted, atol=1e-13, rtol=1e-13, equal_nan=True)
    near = torch.allclose(shard.grad, gradient, atol=1e-13, rtol=1e-13, equal_nan=True)
    return same and loss.shape == wanted.shape and loss.dtype == wanted.dtype, near, group.gathers


def compare_logits(context):
    """The names of cases whose loss of sliced logits differs."""
    wrong = []
    for (name, shape), of in itertools.product(SHAPES.items(), OPTIONS):
        reduction, smoothing, weighted, ignored = of
        logits, target, weight = values(shape, ignored)

        def compute(sliced_logits, target=target, weight=weight, weighted=weighted, of=of):
            reduction, smoothing, *_ = of
            return F.cross_entropy(
                sliced_logits,
                target,
                weight if weighted else None,
                reduction=reduction,
                label_smoothing=smoothing,
            )

        for dim in range(len(shape)):
            same, near, gathers = loss_and_gradient(context, logits, dim, compute)
            if not (same and near) or gathers:
                wrong.append((name, dim, *of, same, near, gathers))
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_cross_entropy_of_logits_in_slices(ranks):
    """Sliced by classes, by targets, by pixels; with all options of torch's function."""
    assert run_ranks(compare_logits, ranks, tp=ranks) == [[]] * ranks


def low_precision_losses(context):
    """Cross entropy of 16-bit logits, in a run and by torch's function."""
    results = []
    for shape, loss in (((7, 11), CrossEntropy()), ((2, 11, 3, 5), CrossEntropy(class_dim=1))):
        logits, target, _ = values(shape, "some")
        logits = logits.bfloat16()
        for compute in (
            lambda sliced_logits, target=target, loss=loss: loss(sliced_logits, target),
            lambda sliced_logits, target=target: F.cross_entropy(sliced_logits, target),
        ):
            group, slices = slice_group(context), Slices.even(1, 11)
            whole = logits.clone().requires_grad_()
            wanted = compute(whole)
            wanted.backward()
            shard = slices.local(logits, group.rank, group.size).clone().requires_grad_()
            loss_here = compute(SlicedTensor.of(shard, slices, group))
            loss_here.backward()
            gradient = slices.local(whole.grad, group.rank, group.size)
            far = (shard.grad - gradient).abs().max() / gradient.abs().max()
            results.append((loss_here.dtype == wanted.dtype, shard.grad.dtype == gradient.dtype))
            results.append(
                (abs(loss_here - wanted).item() / wanted.item() < 1e-2, far.item() < 1e-2)
            )
            if wanted.dtype == torch.float32:
                results.append((abs(loss_here - wanted).item() / wanted.item() < 1e-6, True))
            results.append((not group.gathers, True))
    return results


def test_low_precision_is_computed_in_float32():
    for results in run_ranks(low_precision_losses, 2, tp=2):
        assert all(map(all, results)), results


def compare_head(context, has_bias, sliced_head, hidden_dim, smoothing, ignored, chunk_size):
    """A head with a chunked loss: its three gradients equal those of one process."""
    torch.manual_seed(4)
    group = slice_group(context)
    hidden = torch.randn(3, 6, WIDTH, dtype=torch.float64, requires_grad=True)
    head = nn.Linear(WIDTH, WORDS, bias=has_bias).double()
    target = torch.randint(WORDS, (3, 6))
    if ignored:
        target[:, :ignored] = -100
    plain = F.cross_entropy(
        head(hidden).view(-1, WORDS), target.view(-1), reduction="sum", label_smoothing=smoothing
    )
    (plain * 0.5).backward()
    hidden_slices = (
        None if hidden_dim is None else Slices.even(hidden_dim, hidden.shape[hidden_dim])
    )
    words = Slices.even(0, WORDS)

    def mine(tensor, slices):
        part = tensor if slices is None else slices.local(tensor, group.rank, group.size)
        return part.detach().clone()

    def given(tensor, slices):
        return tensor if slices is None else SlicedTensor.of(tensor, slices, group)

    of_head = words if sliced_head else None
    own_hidden = mine(hidden, hidden_slices).requires_grad_()
    own_weight = mine(head.weight, of_head).requires_grad_()
    own_bias = mine(head.bias, of_head).requires_grad_() if has_bias else None
    loss = chunked_cross_entropy(
        given(own_hidden, hidden_slices),
        given(own_weight, of_head),
        None if own_bias is None else given(own_bias, of_head),
        target,
        label_smoothing=smoothing,
        chunk_size=chunk_size,
    )
    (loss * 0.5).backward()
    pairs = [(loss, plain), (own_hidden.grad, mine(hidden.grad, hidden_slices))]
    pairs.append((own_weight.grad, mine(head.weight.grad, of_head)))
    if has_bias:
        pairs.append((own_bias.grad, mine(head.bias.grad, of_head)))
    return max((a - b).abs().max().item() for a, b in pairs), dict(group.gathers)


def compare_heads(context):
    """The comparison of a head's chunked loss in all combinations of options."""
    cases = itertools.product(
        (False, True), (True, False), (None, 0, 1, 2), (0.0, 0.1), (0, 2, 6), (1, 2000, 1 << 20)
    )
    results = {}
    for case in cases:
        if case[1] or case[2] in (0, 1):
            results[case] = compare_head(context, *case)
    return results


@pytest.mark.parametrize("ranks", [2, 3])
def test_chunks_of_a_head_in_slices(ranks):
    for results in run_ranks(compare_heads, ranks, tp=ranks):
        for case, (distance, gathers) in results.items():
            assert distance < 1e-12, (case, distance)
            assert not gathers, case


def compare_model(context, sequence_dim, tied):
    """A GPT whose head computes the loss equals one with plain logits in one process."""
    case = gpt_case(tied=tied)
    loss = ChunkedCrossEntropy(head="head", chunk_size=1500, label_smoothing=0.1)
    exchanges = []
    group = slice_group(context, sequence_dim=sequence_dim, exchanges=exchanges)
    whole, model = build_model(case, None), build_model(case, group)
    attach_head(loss, model)
    torch.manual_seed(1)
    words, targets = torch.randint(WORDS, (3, 8)), torch.randint(WORDS, (3, 8))
    targets[0, :3] = -100
    wanted = CrossEntropy(label_smoothing=0.1)(whole(words), targets)
    wanted.backward()
    with head_targets(loss, targets):
        output = model(words)
        seen = is_head_loss(output) and is_head_loss(output.view_as(output))
        value = loss(output, targets)
    value.backward()
    parameters = dict(model.named_parameters())
    differences = [(wanted - value).abs().item()]
    for name, parameter in whole.named_parameters():
        gradient = parameter.grad
        if name in case.slices:
            gradient = case.slices[name].local(gradient, group.rank, group.size)
        differences.append((gradient - parameters[name].grad).abs().max().item())
    return seen, max(differences), dict(group.gathers), value.item()


@pytest.mark.parametrize("sequence_dim", [None, 1])
def test_a_model_whose_head_gives_the_loss(sequence_dim):
    for tied in (False, True):
        results = run_ranks(compare_model, 2, sequence_dim, tied, tp=2)
        for seen, distance, gathers, loss in results:
            assert seen
            assert distance < 1e-12
            assert not gathers
            assert loss == results[0][3]


def compare_class_sections(context):
    """Classes in several sections have no rule: they are gathered, and the result is right."""
    logits, target, _ = values((7, 12), "some")
    two = (SliceSection(6), SliceSection(6))
    return loss_and_gradient(
        context, logits, 1, lambda sliced_logits: F.cross_entropy(sliced_logits, target), two
    )


def test_classes_in_sections_are_gathered():
    for same, near, gathers in run_ranks(compare_class_sections, 2, tp=2):
        assert same
        assert near
        assert gathers == {"cross_entropy": 1}
