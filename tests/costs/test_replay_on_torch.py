"""The replay of a step, compared with the bytes that torch's passes hold in real tensors."""

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)

from bigtrain.costs.replay import RecordedPass, replay_actions
from bigtrain.memory.timeline import Timeline
from bigtrain.memory.tracker import StorageTracker
from bigtrain.schedules.orders import Action


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.heads = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        heads = self.heads(self.norms[0](x)).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(*heads)
        return x + nn.functional.dropout(self.down(self.up(self.norms[1](x)).relu()), 0.1)


class Tracked:
    """A middle stage of a pipeline, and the storages of its micro-batches between actions."""

    def __init__(self, *, gradients):
        torch.manual_seed(0)
        self.model = nn.Sequential(Block(16), Block(16))
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if gradients else None
        self.tracker, self.held = StorageTracker(), {}
        with self.tracker:
            self.own()
        self.begin, self.beside = self.tracker.clock, self.tracker.live_bytes

    def own(self):
        self.tracker.label(self.model.parameters(), "parameters")
        self.tracker.label([p.grad for p in self.model.parameters()], "gradients")

    def act(self, kind, number):
        with self.tracker:
            self.tracker.enter_phase("forward" if kind == "F" else "backward")
            getattr(self, kind)(number)
            self.own()

    def F(self, number):  # noqa: N802
        x = torch.randn(2, 8, 16).requires_grad_()
        self.held[number] = x, self.model(x)

    def B(self, number):  # noqa: N802
        x, output = self.held.pop(number)
        stage_backward((output,), (torch.randn_like(output),), (x,))

    def I(self, number):  # noqa: E743, N802
        x, output = self.held.pop(number)
        come = torch.randn_like(output)
        sent, groups = stage_backward_input((output,), [come], [x], self.model.parameters())
        self.held[number] = x, output, come, sent, groups

    def W(self, number):  # noqa: N802
        *_held, groups = self.held.pop(number)
        stage_backward_weight(self.model.parameters(), groups)


def record_passes(kinds, *, gradients):
    """The recorded pass of a micro-batch, from its actions in order."""
    stage, starts = Tracked(gradients=gradients), []
    for kind in kinds:
        starts.append(stage.tracker.clock + 1)
        stage.act(kind, 0)
    timeline = stage.tracker.timeline()
    spans = tuple(span for span in timeline.spans if span.birth > stage.begin)
    return RecordedPass(Timeline(spans, timeline.phases), tuple(starts[1:]), stage.tracker.clock)


@pytest.mark.parametrize(
    "order",
    [
        "F0 B0",
        "F0 B0 F1 B1 F2 B2",
        "F0 F1 F2 B0 B1 B2",
        "F0 F1 F2 B2 B1 B0",
        "F0 I0 W0 F1 I1 W1",
        "F0 F1 I0 I1 W0 W1",
        "F0 F1 F2 I0 I1 F3 W0 I2 W1 I3 W2 W3",
    ],
)
def test_the_peak_is_what_torch_holds(order):
    actions = [Action(1, word[0], int(word[1])) for word in order.split()]
    stage = Tracked(gradients=False)
    for _, kind, number in actions:
        stage.act(kind, number)
    measured = stage.tracker.peak_bytes - stage.beside

    whole = {
        variant: record_passes("FB", gradients=variant == "later") for variant in ("first", "later")
    }
    split = {
        f"{variant}_split": record_passes("FIW", gradients=variant == "later") for variant in whole
    }
    assert replay_actions(actions, {1: whole | split}).peak().bytes == measured
    assert replay_actions(actions, {1: whole}).peak().bytes >= measured
