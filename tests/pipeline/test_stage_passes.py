"""The passes of one stage in one process, compared with plain autograd."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bigtrain.pipeline.stage_passes import StagePasses
from bigtrain.pipeline.stage_worker import StageWorker

SHAPE = (2, 4)


class Middle(nn.Module):
    """A middle stage: one input is unused, and one parameter depends on no input."""

    index, count = 1, 3

    def __init__(self, *, fails=False):
        super().__init__()
        self.layer, self.fails = nn.Linear(4, 4), fails
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x, unused, *, micro_batch, scale=None, final=True):
        del unused, micro_batch, scale, final
        if self.fails:
            x.register_hook(fail)
        return torch.tanh(self.layer(x)), self.bias * 2.0

    def incoming(self, micro_batch):  # noqa: ARG002
        return tuple(torch.empty(SHAPE, device="meta").requires_grad_() for _ in range(2))

    def outgoing(self, micro_batch):  # noqa: ARG002
        shapes = (SHAPE, (4,))
        return tuple(torch.empty(shape, device="meta").requires_grad_() for shape in shapes)


def fail(_gradient):
    raise KeyError("of the stage")


class Runner:
    """The parts of a `StepRunner` that a stage's passes use."""

    context = SimpleNamespace(device=torch.device("cpu"))

    def __init__(self):
        self.phases, self.placed = [], 0
        self.meter = SimpleNamespace(phase=self.phases.append)

    def place_batch(self, micro_batch):
        self.placed += 1
        return micro_batch

    def label_batch(self, micro_batch):
        pass

    def label_gradients(self):
        self.phases.append("labelled")

    def autocast(self):
        return nullcontext()


def passes_of(stage, runner):
    worker = StageWorker(runner, {1: stage})
    worker.begin(["first", "second"], 1.0)
    return StagePasses(worker, stage, worker.shapes("first")[1])


def plain(stage, inputs, gradients):
    x = inputs[0].clone().requires_grad_()
    outputs = stage(x, inputs[1], micro_batch=None)
    torch.autograd.backward(outputs, gradients)
    all_gradients = [x.grad, *(parameter.grad for parameter in stage.parameters())]
    for parameter in stage.parameters():
        parameter.grad = None
    return all_gradients


@pytest.mark.parametrize("splits", [False, True])
def test_whole_and_split_backward_passes_give_the_gradients_of_autograd(splits):
    torch.manual_seed(0)
    stage, runner = Middle(), Runner()
    batches = [[torch.randn(SHAPE) for _ in range(2)] for _ in range(2)]
    gradients = [[torch.randn(SHAPE), torch.randn(4)] for _ in range(2)]
    wanted = [plain(stage, b, g) for b, g in zip(batches, gradients, strict=True)]
    passes, sent = passes_of(stage, runner), []
    for number, batch in enumerate(batches):
        outputs = passes.forward(number, [tensor.clone() for tensor in batch])
        assert not any(output.requires_grad for output in outputs)
    for number in range(2):
        if splits:
            sent.append(passes.input_backward(number, gradients[number]))
            passes.weight_backward(number)
        else:
            sent.append(passes.backward(number, gradients[number]))
    for mine, expected in zip(sent, wanted, strict=True):
        torch.testing.assert_close(mine[0], expected[0])
        torch.testing.assert_close(mine[1], torch.zeros(SHAPE))  # the output does not depend on it
        assert all(gradient.is_contiguous() for gradient in mine)
    for parameter, whole_gradient, split_gradient in zip(
        stage.parameters(), *(w[1:] for w in wanted), strict=True
    ):
        torch.testing.assert_close(parameter.grad, whole_gradient + split_gradient)
    assert runner.placed == 2
    assert runner.phases.count("labelled") == (4 if splits else 2)
    assert not passes._saved
    assert not passes._weights_left


class AfterFrozen(Middle):
    """A middle stage whose inputs need no gradient, because all layers before it are frozen."""

    def incoming(self, micro_batch):  # noqa: ARG002
        return tuple(torch.empty(SHAPE, device="meta") for _ in range(2))


def test_after_frozen_stages_the_whole_backward_pass_is_left_to_the_weights():
    torch.manual_seed(0)
    stage, gradients = AfterFrozen(), [torch.randn(SHAPE), torch.randn(4)]
    inputs = [torch.randn(SHAPE), torch.randn(SHAPE)]
    wanted = plain(stage, inputs, gradients)[1:]
    passes = passes_of(stage, Runner())
    for number in range(2):
        passes.forward(number, [tensor.clone() for tensor in inputs])
    for number in range(2):
        assert passes.input_backward(number, gradients) == []
        before = [parameter.grad for parameter in stage.parameters()]
        assert number == 1 or before == [None, None, None]
        passes.weight_backward(number)
        # The second gradient is added in place, and no third tensor is made.
        after = [parameter.grad for parameter in stage.parameters()]
        assert number == 0 or all(a is b for a, b in zip(after, before, strict=True))
    for parameter, expected in zip(stage.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * expected)


def test_nothing_is_saved_without_gradients():
    passes = passes_of(Middle(), Runner())
    with torch.no_grad():
        outputs = passes.forward(0, [torch.randn(SHAPE), torch.randn(SHAPE)])
    assert [output.shape for output in outputs] == [SHAPE, (4,)]
    assert not passes._saved


@pytest.mark.parametrize("splits", [False, True])
def test_an_error_of_a_stage_is_raised_as_it_is(splits):
    passes = passes_of(Middle(fails=True), Runner())
    passes.forward(0, [torch.randn(SHAPE), torch.randn(SHAPE)])
    run = passes.input_backward if splits else passes.backward
    with pytest.raises(KeyError, match="of the stage"):
        run(0, [torch.ones(SHAPE), torch.ones(4)])
    passes.clear()
    assert not passes._saved
