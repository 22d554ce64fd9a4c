"""Parameters that the loss does not reach are found before a run."""

from __future__ import annotations

import random

import pytest
import torch
from support.nets import Sometimes, TinyLM, Unreached, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigtrain.assembly.make_plan import make_plan
from bigtrain.assembly.resolve import check_known
from bigtrain.data import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.chunked_cross_entropy import ChunkedCrossEntropy
from bigtrain.losses.loss import CrossEntropy, Loss, MeanLoss
from bigtrain.tracing.unreached import freeze_unreached, unfreeze

UNREACHED = ("spare", "pooler.weight", "pooler.bias")


def example() -> MicroBatch:
    samples = tokens(4)
    return MicroBatch(samples.inputs, samples.targets, 5, 4)


class LeftOutByChance(TinyLM):
    """A layer that most training passes skip."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if not self.training or random.random() < 1e-9:
            x = x + self.extra(x)
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))


class Hidden(Unreached):
    """The graph does not show that a part's parameters are used; the backward pass does."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        inner = checkpoint(lambda x: self.down(torch.relu(self.up(x))), x, use_reentrant=True)
        return self.head(x + self.norm(inner))


class Detached(Unreached):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).detach()


class Branching(Unreached):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * (2 if tokens.sum() > 3 else 1)


@pytest.mark.parametrize(
    ("model", "loss", "expected"),
    [
        (TinyLM, CrossEntropy(), ()),
        (Unreached, CrossEntropy(), UNREACHED),
        (Unreached, ChunkedCrossEntropy(head="head"), UNREACHED),
        (Sometimes, CrossEntropy(), ()),
        (LeftOutByChance, CrossEntropy(), ()),
        (Hidden, CrossEntropy(), UNREACHED),
        (Detached, CrossEntropy(), ()),  # its backward pass shows it
        (Branching, CrossEntropy(), ()),  # its path depends on values, so nothing is known
    ],
)
def test_what_no_pass_reaches_is_frozen(model: type[TinyLM], loss: Loss, expected: object) -> None:
    net = model()
    before = random.getstate()
    assert freeze_unreached(net, example(), loss) == expected
    assert random.getstate() == before
    assert tuple(n for n, p in net.named_parameters() if not p.requires_grad) == expected


def test_a_loss_may_know_the_parameters_itself() -> None:
    net = Unreached()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output.mean() + net.spare.square().to(output.device).mean()

    assert freeze_unreached(net, example(), MeanLoss(loss)) == UNREACHED[1:]


class AskedLater(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)
        self.late = False

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        return logits + self.extra(logits[..., :8]).sum() if self.late else logits


def test_what_was_left_out_and_is_used_later_is_refused() -> None:
    net = AskedLater()
    assert freeze_unreached(net, example(), CrossEntropy()) == ("extra.weight", "extra.bias")
    net.late = True
    with pytest.raises(ConfigError, match=r"extra\.weight is used in this step.*Use --strategy"):
        net(example().inputs)
    net.eval()(example().inputs)
    unfreeze(net, ("extra.weight", "extra.bias"))
    net.train()(example().inputs).sum().backward()
    assert net.extra.weight.grad is not None


@pytest.mark.parametrize("strategy", ["ddp", "zero1_torch"])
def test_without_an_example_an_exchange_that_counts_on_gradients_is_refused(strategy: str) -> None:
    job = job_from_keys(strategy, {"train.global_batch_size": 4})
    with pytest.raises(ConfigError, match=r"not reach spare, .*Give prepare\(\.\.\., exam"):
        check_known(make_plan(job, 2, "cpu"), UNREACHED)
    check_known(make_plan(job, 1, "cpu"), UNREACHED)
