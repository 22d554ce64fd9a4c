"""A shortened model has the same kinds of blocks, and shows the uses of the whole model's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bigtrain.data.loader import MicroBatch
from bigtrain.losses.loss import CrossEntropy
from bigtrain.models.blocks import independent_blocks
from bigtrain.prediction.shorten import shorten_model, uses_by_block
from bigtrain.tracing.parameter_uses import parameter_uses


class Block(nn.Module):
    """A block; a special one has another width inside, and a counter that it writes."""

    def __init__(self, inside: int = 8, *, counts: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, inside), nn.Linear(inside, 8)
        self.spare = nn.Linear(8, 8)  # the loss does not reach it
        self.counter = nn.Parameter(torch.zeros(1), requires_grad=False) if counts else None

    def forward(self, x: Tensor) -> Tensor:
        if self.counter is not None:
            self.counter.add_(1)
        return x + self.down(self.up(x).relu())


class Body(nn.Module):
    """A list of blocks that is not a direct child of the model, as in transformers."""

    def __init__(self, blocks: int, *, special: bool, counts: bool) -> None:
        super().__init__()
        kinds = [Block(counts=counts) for _ in range(blocks)]
        if special:
            kinds[blocks // 2] = Block(16, counts=counts)
        self.layers = nn.ModuleList(kinds)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Net(nn.Module):
    def __init__(self, blocks: int, *, special: bool = False, counts: bool = False) -> None:
        super().__init__()
        self.body, self.head = Body(blocks, special=special, counts=counts), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@pytest.mark.parametrize(("most", "left"), [(1, 1), (2, 2), (3, 3)])
def test_blocks_stay_blocks(most: int, left: int):
    with torch.device("meta"):
        model = Net(7)
    shortened = shorten_model(model, most)
    assert shortened is not None
    short, order = shortened
    assert [name for name, _ in independent_blocks(short)] == [
        f"body.layers.{n}" for n in range(left)
    ]
    assert len(order) == 7
    assert set(order) == set(range(left))
    again = shorten_model(short, 1)
    if left > 1:
        assert again is not None
        assert [name for name, _ in independent_blocks(again[0])] == ["body.layers.0"]
    assert len(model.body.layers) == 7  # the model itself is not changed


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("counts", [False, True])
def test_uses_of_the_whole_model_are_seen_in_few_of_its_blocks(special: bool, counts: bool):  # noqa: FBT001
    model = Net(9, special=special, counts=counts)
    batch = MicroBatch(torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64), 2, 2)
    loss = CrossEntropy()
    whole, quick = parameter_uses(model, batch, loss), uses_by_block(model, batch, loss)
    assert whole is not None
    assert quick is not None
    assert (quick.called, quick.used, quick.reached) == (whole.called, whole.used, whole.reached)
    assert "body.layers.8.spare.weight" not in (quick.reached or ())
    assert bool(quick.writes) == bool(whole.writes) == counts
    assert {write.name for write in quick.writes} <= {write.name for write in whole.writes}


def test_nothing_to_leave_out():
    with torch.device("meta"):
        model = Net(2)
    assert shorten_model(model) is None
    batch = MicroBatch(torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64), 2, 2)
    assert uses_by_block(model, batch, CrossEntropy()) is None
