"""A user's loss: the micro-batches' contributions add up to the loss of the whole batch.

The reference is the user's function applied to the model's output for the whole batch.
"""

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
from bigtrain.engine.run_loss.follow_loss import follow_loss
from bigtrain.errors import ConfigError
from bigtrain.losses.global_mean import GlobalMeanLoss, loss_scope
from bigtrain.losses.loss import CrossEntropy, MeanLoss

WEIGHTS = torch.linspace(1, 4, 13)
LossFunction = Callable[[Any, Any], Tensor]


def text() -> MicroBatch:
    """Four rows, two of which are padded by different lengths."""
    inputs = tokens(4, ignored=False).inputs
    targets = tokens(4, ignored=False).targets.clone()
    targets[0, 2:] = -100
    targets[2, 4:] = -100
    return MicroBatch(inputs, targets, 24, 4)


def token_loss(output: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), **options)


def loss_per_target(output: Tensor, target: Tensor) -> Tensor:
    """The loss of each target, without reduction."""
    return F.cross_entropy(output.transpose(1, 2), target, reduction="none")


def valid(target: Tensor) -> Tensor:
    return target != -100


def labels(target: Tensor) -> Tensor:
    return F.one_hot(target.clamp(min=0), 13).float()


def by_rows(output: Tensor, target: Tensor) -> Tensor:
    """The mean over rows of the mean over each row's valid targets."""
    mask = valid(target).float()
    return ((loss_per_target(output, target) * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def read_count(output: Tensor, target: Tensor) -> Tensor:
    count = valid(target).sum().item()
    return (loss_per_target(output, target) * valid(target)).sum() / max(count, 1)


def per_class(output: Tensor, target: Tensor) -> Tensor:
    counts = labels(target).sum((0, 1)).clamp(min=1)
    return ((output.softmax(-1) * labels(target)).sum((0, 1)) / counts).mean()


def shifted_in_place(output: Tensor, target: Tensor) -> Tensor:
    moved = torch.full_like(target, -100)
    moved[:, :-1] = target[:, 1:]
    return token_loss(output, moved)


def loss_with_check(output: Tensor, target: Tensor) -> Tensor:
    """A loss that reads its output to check for NaN."""
    if torch.isnan(output).any():
        raise ValueError("no numbers")
    return token_loss(output, target)


def loss_with_logging(output: Tensor, target: Tensor) -> Tensor:
    """A loss that reads its value, as for a log."""
    value = token_loss(output, target)
    assert float(value.detach()) >= 0
    return value


def own_nll(output: Tensor, target: Tensor) -> Tensor:
    chosen = output.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    return -(chosen * valid(target)).sum() / (valid(target).sum() + 1e-8)


def in_place_sum(output: Tensor, target: Tensor) -> Tensor:
    total = token_loss(output, target)
    total += 0.1 * output.abs().mean()
    total *= 0.5
    return total


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main, self.other = nn.CrossEntropyLoss(label_smoothing=0.1), nn.L1Loss()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        main = self.main(output[:, 1:].flatten(0, 1), target[:, 1:].flatten())
        return main + 0.3 * self.other(output.softmax(-1), labels(target))


LOSSES: dict[str, LossFunction] = {
    "shifted inside": lambda o, t: token_loss(o[:, :-1], t[:, 1:]),
    "shifted in place": shifted_in_place,
    "first position dropped": lambda o, t: token_loss(o[:, 1:], t[:, 1:], ignore_index=-100),
    "another mark": lambda o, t: token_loss(o, t.where(valid(t), -1), ignore_index=-1),
    "class weights": lambda o, t: token_loss(o, t, weight=WEIGHTS, label_smoothing=0.1),
    "probabilities": lambda o, t: F.cross_entropy(o.flatten(0, 1), labels(t).flatten(0, 1)),
    "nll": lambda o, t: F.nll_loss(o.log_softmax(-1).transpose(1, 2), t),
    "by rows": by_rows,
    "sum of two": lambda o, t: token_loss(o, t) + 0.5 * o.abs().mean(),
    "sum in place": in_place_sum,
    "a module of two": Criterion(),
    "a constant": lambda o, t: token_loss(o, t) + 3.0,
    "stacked": lambda o, t: torch.stack([token_loss(o, t), o.square().mean()]).mean(),
    "masked by hand": lambda o, t: (loss_per_target(o, t) * valid(t)).sum() / valid(t).sum(),
    "masked mean of means": lambda o, t: (
        (loss_per_target(o, t) * valid(t)).mean() / valid(t).float().mean()
    ),
    "count read by Python": read_count,
    "count with an epsilon": own_nll,
    "selected": lambda o, t: F.cross_entropy(o[valid(t)], t[valid(t)]),
    "selected, two counts": lambda o, t: (
        o[valid(t)].square().mean() + F.mse_loss(o[valid(t)], labels(t)[valid(t)])
    ),
    "masked_select": lambda o, t: loss_per_target(o, t).masked_select(valid(t)).mean(),
    "a sum over rows": lambda o, t: o.square().sum() / len(t),
    "a sum over numbers": lambda o, _: o.square().sum() / o.numel(),
    "a sum": lambda o, _: o.square().sum(),
    "weights of rows": lambda o, t: (
        o.square().mean((1, 2)) * (valid(t).float().sum(1) / valid(t).sum())
    ).sum(),
    "per class": per_class,
    "batchmean": lambda o, t: F.kl_div(o.log_softmax(-1), labels(t), reduction="batchmean"),
    "unused targets": lambda o, _: o.square().mean(),
    "scaled by a mean of targets": lambda o, t: token_loss(o, t) * (1 + valid(t).float().mean()),
    "checks numbers": loss_with_check,
    "reads its value": loss_with_logging,
}


def contributions(loss: GlobalMeanLoss, model: nn.Module, batch: MicroBatch) -> Tensor:
    """The sum of the losses of uneven micro-batches; their gradients are left in the model."""
    parts = [batch.part(0, 1), batch.part(1, 3), batch.part(3, 4)]
    counted = [MicroBatch(p.inputs, p.targets, loss.count(p.targets), p.rows) for p in parts]
    total = torch.zeros(())
    for part in loss.with_totals(counted):
        with loss_scope(loss, part):
            value = loss(model(part.inputs), part.targets, part.count) / batch.rows
        value.backward()
        total += value.detach()
    return total


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_add_up_to_the_whole_batch(name: str) -> None:
    model, batch, fn = TinyLM(), text(), LOSSES[name]
    before = torch.get_rng_state()
    loss = follow_loss(MeanLoss(fn), model, batch, 3)
    assert torch.equal(before, torch.get_rng_state())
    assert isinstance(loss, GlobalMeanLoss)
    expected = fn(model(batch.inputs), batch.targets)
    expected.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    loss_sum = contributions(loss, model, batch)
    scale = max(1.0, float(expected.detach().abs()))
    assert float((loss_sum - expected.detach()).abs()) <= 1e-6 * scale
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        assert float((parameter.grad - gradient).abs().max()) <= 1e-6 * scale


@pytest.mark.parametrize("name", ["shifted inside", "selected", "masked by hand"])
def test_a_micro_batch_without_valid_targets_contributes_nothing(name: str) -> None:
    model, batch = TinyLM(), text()
    batch.targets[3] = -100
    loss = follow_loss(MeanLoss(LOSSES[name]), model, text(), 3)
    assert isinstance(loss, GlobalMeanLoss)
    expected = float(LOSSES[name](model(batch.inputs), batch.targets).detach())
    assert float(contributions(loss, model, batch)) == pytest.approx(expected, rel=1e-6)
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def root(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean().sqrt() + 0 * target.sum()


def contrastive_loss(output: Tensor, _: Tensor) -> Tensor:
    """A loss that compares the rows of the batch with each other."""
    rows = F.normalize(output.flatten(1), dim=1)
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def chosen_by(output: Tensor) -> Tensor:
    """The number of places that chose each of the classes."""
    return torch.histc(output.argmax(-1).float(), bins=13, min=0, max=12)


REFUSED: dict[str, tuple[LossFunction, str]] = {
    "a root of a mean": (root, "sqrt of a mean over the batch is not a mean"),
    "rows compared": (contrastive_loss, "compares the rows of a batch with each other"),
    "a maximum": (lambda o, _: o.max(), "max over the rows is not an average"),
    "a product of means": (
        lambda o, t: token_loss(o, t) * o.square().mean(),
        "mul of a mean over the batch is not a mean",
    ),
    "centred": (
        lambda o, _: (o - o.mean()).square().mean(),
        "relates each row to a figure of its micro-batch",
    ),
    "divided by what outputs say": (
        lambda o, _: o.square().sum() / (o > 0).sum(),
        "div of a mean over the batch is not a mean",
    ),
    "softmax over rows": (
        lambda o, _: (o.softmax(0) * o).sum(),
        "softmax goes along the rows of a batch",
    ),
    "one row": (lambda o, _: o[0].mean(), "__getitem__ over the rows is not an average"),
    "the hardest half": (
        lambda o, t: loss_per_target(o, t).flatten().topk(t.numel() // 2).values.mean(),
        "topk goes along the rows of a batch",
    ),
    "sorted": (
        lambda o, t: (
            loss_per_target(o, t).flatten().sort(descending=True)[0][: t.numel() // 2].mean()
        ),
        "sort goes along the rows of a batch",
    ),
    "experts in balance": (
        lambda o, _: (o.flatten(0, 1).softmax(-1) * chosen_by(o)).mean(),
        "mul of a count of rows of one micro-batch",
    ),
    "halves of the rows in pairs": (
        lambda o, _: F.mse_loss(*o.chunk(2)),
        "of random outputs it is .* for 4 rows at once, and .* for two halves",
    ),
    "in another order": (
        lambda o, _: F.mse_loss(o, o.flip(0)),
        "flip goes along the rows of a batch",
    ),
    "neighbours": (
        lambda o, _: F.mse_loss(o, o.roll(1, 0)),
        "roll goes along the rows of a batch",
    ),
    "two sums multiplied": (
        lambda o, _: torch.einsum("bti,cti->", o, o),
        "of random outputs",
    ),
    "a count of rows": (lambda o, _: chosen_by(o).sum(), "it counts rows"),
    "a value for each row": (lambda o, t: loss_per_target(o, t).sum(1), "a value for each row"),
    "a bug": (lambda o, t: o.no_such(t), "cannot be followed .*no_such"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_sum_of_means_is_refused_with_the_words_to_type(name: str) -> None:
    fn, reason = REFUSED[name]
    with pytest.raises(ConfigError, match=reason) as refusal:
        follow_loss(MeanLoss(fn), TinyLM(), text(), 2)
    assert 'bigtrain.MeanLoss(fn, count_of="rows")' in str(refusal.value)
    by_rows_loss = MeanLoss(fn, count_of="rows")
    assert follow_loss(by_rows_loss, TinyLM(), text(), 2) is by_rows_loss
    alone = MeanLoss(fn)  # with a single micro-batch any loss is right
    assert follow_loss(alone, TinyLM(), text(), 1) is alone


def test_count_of_says_what_is_divided_by() -> None:
    def by_hand(output: Tensor, target: Tensor) -> Tensor:
        return token_loss(output[:, :-1], target[:, 1:])

    loss = MeanLoss(by_hand, count_of=lambda t: (t[:, 1:] != -100).sum())
    output, target = torch.randn(4, 6, 13), text().targets
    parts = sum(float(loss(output[n : n + 1], target[n : n + 1])) for n in range(4))
    assert parts / loss.count(target) == pytest.approx(float(by_hand(output, target)), rel=1e-6)
    assert MeanLoss(F.cross_entropy, count_of="rows").count(torch.tensor([1, -100, 2])) == 3


def test_one_target_a_row() -> None:
    images = MicroBatch(torch.zeros(4, 1, 5, 5), torch.tensor([0, -100, 1, 2]), 4, 4)
    for fn in (
        lambda o, t: F.cross_entropy(o, t),
        lambda o, t: F.binary_cross_entropy(o.sigmoid()[:, 0], t.clamp(min=0).float() / 2),
    ):
        model = TinyConv().eval()
        loss = follow_loss(MeanLoss(fn), model, images, 2)
        assert isinstance(loss, GlobalMeanLoss)
        expected = float(fn(model(images.inputs), images.targets).detach())
        assert float(contributions(loss, model, images)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("loss", [CrossEntropy(), MeanLoss(F.mse_loss), MeanLoss(token_loss, -7)])
def test_what_says_its_count_is_not_called(loss: Any) -> None:
    assert follow_loss(loss, nn.Identity(), text(), 2) is loss


def branching(output: Tensor, target: Tensor) -> Tensor:
    """Computes differently if no target is padded; both branches divide by the valid targets."""
    if bool((target == -100).any()):
        return token_loss(output, target)
    return token_loss(2 * output, target)


def test_branches_on_targets_are_taken_batch_by_batch() -> None:
    model, batch = TinyLM(), text()
    loss = follow_loss(MeanLoss(branching), model, batch, 2)
    assert isinstance(loss, GlobalMeanLoss)
    whole = MicroBatch(batch.inputs, tokens(4, ignored=False).targets, 4, 4)
    expected = float(branching(model(whole.inputs), whole.targets).detach())
    assert float(contributions(loss, model, whole)) == pytest.approx(expected, rel=1e-6)


def test_a_branch_that_divides_by_something_else_is_refused_at_that_step() -> None:
    def other(output: Tensor, target: Tensor) -> Tensor:
        if bool((target == -100).any()):
            return token_loss(output, target)
        return output.square().mean()

    loss = follow_loss(MeanLoss(other), TinyLM(), text(), 2)
    assert isinstance(loss, GlobalMeanLoss)
    whole = MicroBatch(text().inputs, tokens(4, ignored=False).targets, 4, 4)
    with pytest.raises(ConfigError, match=r"divides by values of mean.*valid targets of cross"):
        loss.with_totals([whole])


class MakesItsLoss(nn.Module):
    """Returns its loss of padded, shifted labels, and a second loss."""

    def __init__(self, extra: float = 0.0) -> None:
        super().__init__()
        self.net, self.extra = TinyLM(), extra

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = self.net(batch["ids"])
        loss = token_loss(logits[:, :-1], batch["labels"][:, 1:])
        if self.extra:
            loss = loss + self.extra * logits.square().mean()
        return {"loss": loss, "logits": logits}


class RoutesAndMakesItsLoss(MakesItsLoss):
    """Sorts the rows by their experts, as for grouped matrix products, and restores the order."""

    def __init__(self) -> None:
        super().__init__(0.2)
        self.experts = nn.Parameter(torch.randn(3, 13, 13) / 4)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        rows = self.net(batch["ids"]).flatten(0, 1)
        number, order = torch.sort(rows[:, :3].argmax(-1))
        ends = torch.histc(number.float(), bins=3, min=0, max=2).cumsum(0, dtype=torch.int32)
        expert = torch.searchsorted(ends, torch.arange(len(rows), dtype=torch.int32), right=True)
        made = torch.einsum("rc,rcd->rd", rows[order], self.experts[expert])
        logits = (rows + made[torch.argsort(order)]).unflatten(0, batch["ids"].shape)
        loss = token_loss(logits[:, :-1], batch["labels"][:, 1:])
        return {"loss": loss + self.extra * logits.square().mean()}


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = MakesItsLoss(0.5)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.inner(batch)["loss"]


@pytest.mark.parametrize(
    "make", [MakesItsLoss, lambda: MakesItsLoss(0.3), Wrapped, RoutesAndMakesItsLoss]
)
def test_a_loss_of_the_model_itself(make: Callable[[], nn.Module]) -> None:
    def taken(output: Any, _: Any) -> Tensor:
        return output["loss"] if isinstance(output, dict) else output

    model, whole_batch = make(), text()
    batch = MicroBatch(
        {"ids": whole_batch.inputs, "labels": whole_batch.targets}, whole_batch.targets, 4, 4
    )
    loss = follow_loss(MeanLoss(taken), model, batch, 3)
    assert isinstance(loss, GlobalMeanLoss)
    expected = float(taken(model(batch.inputs), None).detach())
    assert float(contributions(loss, model, batch)) == pytest.approx(expected, rel=1e-6)
    # A validation has no totals, so it returns the model's mean.
    assert float(loss(model(batch.inputs), whole_batch.targets).detach()) / 4 == pytest.approx(
        expected, rel=1e-6
    )


def ctc(output: Tensor, target: dict[str, Tensor]) -> Tensor:
    chances = output.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(chances, target["labels"], target["frames"], target["lengths"])


def test_ctc_divides_by_rows() -> None:
    inputs = tokens(4).inputs
    lengths = torch.tensor([2, 1, 2, 1])
    target = {
        "labels": torch.randint(1, 13, (4, 2), generator=torch.Generator().manual_seed(0)),
        "frames": torch.full((4,), 6),
        "lengths": lengths,
    }
    model, batch = TinyLM(), MicroBatch(inputs, target, 4, 4)
    loss = follow_loss(MeanLoss(ctc), model, batch, 3)
    assert isinstance(loss, GlobalMeanLoss)
    expected = float(ctc(model(inputs), target).detach())
    assert float(contributions(loss, model, batch)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("with_example", [True, False])
@pytest.mark.parametrize("start", [0, 16])
def test_the_library_counts_as_the_loss_does(start: int, *, with_example: bool) -> None:
    """Padding is uneven, so weighting micro-batches by their rows would give a different mean.

    Most of the last rows have no valid target, so their mean alone is NaN.
    """
    batch = tokens(22).inputs[start:][:6], tokens(22).targets[start:][:6]
    # It has a different number of rows than a micro-batch
    how = {"example": batch} if with_example else {}
    keys = {"train__micro_batch_size": 1, "train__accumulation_steps": 6, "memory__predict": False}
    with bigtrain.prepare(
        TinyLM, lambda o, t: token_loss(o, t), sgd, strategy="single", **how, **keys
    ) as engine:
        expected = float(token_loss(engine.model(batch[0]), batch[1]).detach())
        assert engine.step(batch).loss == pytest.approx(expected, rel=1e-6)


def test_an_example_of_other_rows_is_followed() -> None:
    def forecast(rows: int, **keys: Any) -> int | None:
        example = tokens(rows).inputs, tokens(rows).targets
        with bigtrain.prepare(
            TinyLM, CrossEntropy(), sgd, strategy="single", example=example, **keys
        ) as engine:
            if not keys:  # the first batch determines the micro-batch
                engine.step((tokens(8).inputs, tokens(8).targets))
            return engine.prediction.peak.bytes if engine.prediction.peak else None

    expected = forecast(8, train__micro_batch_size=8)
    assert forecast(3, train__micro_batch_size=8) == expected
    assert forecast(12, train__global_batch_size=8) == expected
    assert forecast(3) == expected


def test_a_validation_weighs_batches_by_what_they_count() -> None:
    whole, keys = text(), {"train__global_batch_size": 4, "train__micro_batch_size": 2}
    with bigtrain.prepare(
        TinyLM,
        LOSSES["shifted inside"],
        sgd,
        strategy="single",
        example=(whole.inputs[:2], whole.targets[:2]),
        memory__predict=False,
        **keys,
    ) as engine:
        engine.step((whole.inputs, whole.targets))
        figure = engine.evaluate([whole.part(0, 1), whole.part(1, 4)])["loss"]
        output = engine.model.eval()(whole.inputs)
        expected = float(LOSSES["shifted inside"](output, whole.targets).detach())
    assert figure == pytest.approx(expected, rel=1e-6)


def test_following_changes_nothing_that_a_loss_keeps() -> None:
    centre = torch.ones(13)

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, output: Tensor, _: Tensor) -> Tensor:
            self.seen += 1
            return output.square().mean()

    def keeps(output: Tensor, _: Tensor) -> Tensor:
        centre.mul_(0.9)
        return (output - centre).square().mean()

    class Trainer:
        def __init__(self) -> None:
            self.criterion = module

        def loss(self, output: Tensor, target: Tensor) -> Tensor:
            return self.criterion(output, target)

    module = Centred()
    for fn in (module, keeps, Trainer().loss, lambda o, t: module(o, t)):
        assert isinstance(follow_loss(MeanLoss(fn), TinyLM(), text(), 2), GlobalMeanLoss)
    assert float(module.seen) == 0
    assert torch.equal(centre, torch.ones(13))
