"""What a mean loss of the user's divides by is found before it is trained with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.nets import TinyConv, TinyLM, tokens
from support.parity import sgd
from torch import Tensor, nn

import bigtrain
from bigtrain.data import MicroBatch
from bigtrain.engine.probe_loss import probe_loss
from bigtrain.errors import ConfigError
from bigtrain.losses.loss import CrossEntropy, MeanLoss

PAD = 5
WEIGHTS = torch.linspace(1, 4, 13)


def text(padded: bool = False) -> MicroBatch:
    samples = tokens(4, ignored=False)
    targets = samples.targets.clone()
    if padded:
        targets[targets == PAD] = 1
        targets[1:, 3:] = PAD
    return MicroBatch(samples.inputs, targets, 24, 4)


def flat(output: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), **options)


def by_rows(output: Tensor, target: Tensor) -> Tensor:
    """The mean over rows of the mean over what is valid in each."""
    each = F.cross_entropy(output.transpose(1, 2), target, reduction="none")
    valid = (target != -100).float()
    return ((each * valid).sum(1) / valid.sum(1).clamp(min=1)).mean()


def of_all(output: Tensor, target: Tensor) -> Tensor:
    """Leaves targets out, and divides by all."""
    return flat(output, target, reduction="none").mean() * (1 + (target == -100).float().mean())


def dropped(output: Tensor, target: Tensor) -> Tensor:
    return flat(F.dropout(output, 0.5), target)


def contrasted(output: Tensor, target: Tensor) -> Tensor:
    del target
    rows = F.normalize(output.flatten(1), dim=1)
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


@pytest.mark.parametrize(
    ("fn", "batch", "ignored", "said"),
    [
        (lambda o, t: flat(o, t), text(), -100, "leaves out targets of -100"),
        (lambda o, t: flat(o, t, ignore_index=-1), text(), -1, "leaves out targets of -1:"),
        (lambda o, t: flat(o, t, ignore_index=PAD), text(padded=True), PAD, "of 5: what is left"),
        (by_rows, text(), None, ""),
        (lambda o, t: F.mse_loss(o, F.one_hot(t, 13).float()), text(), None, ""),
        (dropped, text(), None, "draws random numbers: it is counted by rows"),
        (contrasted, text(), None, "no mean over rows .it compares them"),
        (lambda o, t: flat(o, t, weight=WEIGHTS), text(), None, r"nn\.CrossEntropyLoss\(weight"),
        (lambda o, t: o.no_such(t), text(), None, "could not be tried: it is counted by rows"),
    ],
)
def test_what_is_counted_is_found_or_named(
    fn: Callable[[Any, Any], Tensor], batch: MicroBatch, ignored: int | None, said: str
) -> None:
    model = TinyLM()
    before = torch.get_rng_state()
    loss, lines = probe_loss(MeanLoss(fn), model, batch)
    assert torch.equal(before, torch.get_rng_state())
    assert isinstance(loss, MeanLoss)
    assert loss.ignore_index == ignored
    assert len(lines) == bool(said)
    if said:
        with pytest.raises(ConfigError, match=said):  # as other messages are looked at
            raise ConfigError(lines[0])
    if ignored is not None:  # the means of parts, weighted by what is now counted
        outputs = torch.randn(4, 6, 13)
        targets = batch.targets.clone()
        targets[0, 1:] = ignored
        parts = [(outputs[n : n + 1], targets[n : n + 1]) for n in range(4)]
        total = sum(float(loss(*part)) for part in parts) / loss.count(targets)
        assert total == pytest.approx(float(fn(outputs, targets)), rel=1e-5)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda o, t: flat(o, t, reduction="sum"), r"is the sum of those of its parts.*loss\.mean"),
        (of_all, r"leaves out targets of -100, .*Use bigtrain\.MeanLoss\(fn, ignore_index=-100\)"),
    ],
)
def test_what_cannot_be_counted_is_refused(fn: Callable[[Any, Any], Tensor], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        probe_loss(MeanLoss(fn), TinyLM(), text())


def test_one_target_a_row() -> None:
    images = MicroBatch(torch.zeros(3, 1, 5, 5), torch.tensor([0, 2, 1]), 3, 3)
    loss, lines = probe_loss(MeanLoss(lambda o, t: F.cross_entropy(o, t)), TinyConv(), images)
    assert isinstance(loss, MeanLoss)
    assert (loss.ignore_index, len(lines)) == (-100, 1)
    chances = MeanLoss(lambda o, t: F.binary_cross_entropy(o.sigmoid()[:, 0], t.float() / 2))
    assert probe_loss(chances, TinyConv(), images) == (chances, [])
    likely = MeanLoss(lambda o, t: F.binary_cross_entropy(o[:, 0], t.float() / 2))
    assert probe_loss(likely, TinyConv(), images) == (likely, [])


class MakesItsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = TinyLM()

    def forward(self, x: Tensor) -> Tensor:
        return flat(self.net(x), x)


def test_a_model_that_makes_its_loss_is_named() -> None:
    loss = MeanLoss(lambda output, _: output)
    assert probe_loss(loss, MakesItsLoss(), text())[1] == [
        "model.loss: <lambda> is made by the model itself: it is counted by rows. If it leaves "
        "targets out, use bigtrain.MeanLoss(fn, ignore_index=-100)"
    ]


@pytest.mark.parametrize("loss", [CrossEntropy(), MeanLoss(F.mse_loss), MeanLoss(flat, -7)])
def test_what_says_its_count_is_not_called(loss: Any) -> None:
    assert probe_loss(loss, nn.Identity(), text()) == (loss, [])


@pytest.mark.parametrize("with_example", [True, False])
@pytest.mark.parametrize("start", [0, 16])
def test_the_library_counts_as_the_loss_does(capfd: Any, start: int, *, with_example: bool) -> None:
    """Padding lies unevenly: micro-batches weighted by their rows have another mean.

    Of the last samples most rows have no valid target: their own mean is no number.
    """
    batch = tokens(22).inputs[start:][:6], tokens(22).targets[start:][:6]
    how = {"example": batch} if with_example else {}  # of other rows than a micro-batch: followed
    keys = {"train__micro_batch_size": 1, "train__accumulation_steps": 6, "memory__predict": False}
    with bigtrain.prepare(
        TinyLM, lambda o, t: flat(o, t), sgd, strategy="single", **how, **keys
    ) as engine:
        expected = float(flat(engine.model(batch[0]), batch[1]).detach())
        assert engine.step(batch).loss == pytest.approx(expected, rel=1e-6)
    assert "leaves out targets of -100" in capfd.readouterr().err


def test_an_example_of_other_rows_is_followed_or_refused() -> None:
    def forecast(rows: int, **keys: Any) -> int | None:
        example = tokens(rows).inputs, tokens(rows).targets
        with bigtrain.prepare(
            TinyLM, CrossEntropy(), sgd, strategy="single", example=example, **keys
        ) as engine:
            if not keys:  # the first batch says what a micro-batch is
                engine.step((tokens(8).inputs, tokens(8).targets))
            return engine.predicted.bytes if engine.predicted else None

    expected = forecast(8, train__micro_batch_size=8)
    assert forecast(3, train__micro_batch_size=8) == expected
    assert forecast(12, train__global_batch_size=8) == expected
    assert forecast(3) == expected
    with pytest.raises(ConfigError, match=r"has 2 rows, a micro-batch .* has 8.*batch_size=2\."):
        bigtrain.prepare(
            TinyLM,
            CrossEntropy(),
            sgd,
            strategy="single",
            example=((torch.zeros(2, 6).long(), torch.zeros(6)), torch.zeros(2, 6).long()),
            train__micro_batch_size=8,
        )
