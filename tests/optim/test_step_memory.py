"""The memory of an optimizer's step in addition to its inputs, found by running the step."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from bigtrain.optim.step_memory import StepMemory, fake_safe_optimizer, group_options

CPU = torch.device("cpu")
SIZE = 1 << 16
COPY = 4 * SIZE


def memory(make, device_type="cpu"):
    optimizer = make([nn.Parameter(torch.zeros(2, 2))])
    return StepMemory(make, CPU, device_type, group_options(optimizer), type(optimizer).__name__)


def copies(make, groups, device_type="cpu", dtype=torch.float32):
    """The step's memory peak on pieces of `SIZE` numbers, in units of such a piece."""
    timeline = memory(make, device_type).timeline(groups, dtype)
    assert timeline is not None
    return timeline.peak().bytes / COPY


@pytest.mark.parametrize(
    ("make", "one", "four"),
    [
        (partial(torch.optim.SGD, lr=0.1), 0, 0),
        (partial(torch.optim.SGD, lr=0.1, weight_decay=0.1), 1, 1),
        # The last temporary of the previous parameter is still alive
        (partial(torch.optim.AdamW, lr=0.1), 2, 3),
        (partial(torch.optim.AdamW, lr=0.1, foreach=True), 1, 4),
        (partial(torch.optim.AdamW, lr=0.1, fused=True), 0, 0),
        (partial(torch.optim.RMSprop, lr=0.1, foreach=True), 1, 4),
    ],
)
def test_one_by_one_or_all_at_once(make, one, four):
    assert copies(make, [[(SIZE,)]]) == pytest.approx(one, abs=0.02)
    assert copies(make, [[(SIZE,)] * 4]) == pytest.approx(four, abs=0.05)


def test_an_accelerator_works_on_all_at_once_unless_it_is_told_otherwise():
    make = partial(torch.optim.AdamW, lr=0.1)
    assert copies(make, [[(SIZE,)] * 4], "cuda") == pytest.approx(4, abs=0.05)
    loop = partial(torch.optim.AdamW, lr=0.1, foreach=False)
    assert copies(loop, [[(SIZE,)] * 4], "cuda") == pytest.approx(3, abs=0.05)


def test_each_group_is_updated_with_its_own_options():
    def make(parameters):
        plain = list(parameters)
        groups = [
            {"params": [p for p in plain if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in plain if p.dim() == 1]},
        ]
        return torch.optim.SGD([g for g in groups if g["params"]], lr=0.1)

    optimizer = make([nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))])
    step_memory = StepMemory(make, CPU, "cpu", group_options(optimizer), "SGD")
    decayed, plain = (step_memory.timeline(g) for g in ([[(SIZE,)], []], [[], [(SIZE,)]]))
    assert decayed.peak().bytes == pytest.approx(COPY, rel=0.02)
    assert plain.peak().bytes < 0.02 * COPY
    highest = step_memory.highest([(SIZE, 0), (SIZE // 2, 0), (4 * SIZE, 1)])
    assert highest.peak().bytes == pytest.approx(COPY, rel=0.02)


@pytest.mark.parametrize("name", ["NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop"])
@pytest.mark.parametrize("foreach", [False, True])
def test_every_optimizer_runs_without_numbers(name, foreach):
    make = partial(getattr(torch.optim, name), lr=0.1, foreach=foreach)
    size = copies(make, [[(SIZE,)]])
    # For one parameter at a time: ASGD makes no copy before step `t0`, when it begins to average.
    assert size < 0.02 if (name, foreach) == ("ASGD", False) else size >= 0.9


def test_one_that_does_not_run_on_flat_pieces_is_not_guessed_at():
    class Rows(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.sum(dim=1)
            return super().step(closure)

    step_memory = memory(partial(Rows, lr=0.1))
    assert step_memory.timeline([[(8, 8)]]) is not None
    assert step_memory.timeline([[(64,)]]) is None
    assert step_memory.highest([(64, 0)]) is None
    assert step_memory.timeline([[]]) is None


def test_nothing_of_torch_is_changed_for_good():
    kinds = list(torch_optimizer._foreach_supported_types)
    memory(partial(torch.optim.AdamW, lr=0.1), "cuda").timeline([[(8,)]])
    assert torch_optimizer._foreach_supported_types == kinds
    optimizer = fake_safe_optimizer(partial(torch.optim.SGD, lr=0.1), "cuda")(
        [nn.Parameter(torch.ones(2))]
    )
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()
    assert optimizer.param_groups[0]["params"][0].tolist() == pytest.approx([0.9, 0.9])
