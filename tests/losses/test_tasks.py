"""The losses and figures of the tasks: parts add up to the whole batch's, refusals."""

import functools
import math
from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bigtrain.errors import ConfigError
from bigtrain.losses.loss import CrossEntropy, MeanLoss, main_logits
from bigtrain.losses.tasks import ClassificationTask, CustomTask, LanguageTask, SegmentationTask

CASES = {
    "classes": ((6, 5), (6,), CrossEntropy()),
    "tokens": ((6, 7, 5), (6, 7), CrossEntropy()),
    "pixels": ((6, 5, 3, 4), (6, 3, 4), CrossEntropy(255, 1)),
    "smoothed": ((6, 7, 5), (6, 7), CrossEntropy(label_smoothing=0.1)),
    "smoothed pixels": ((6, 5, 3, 4), (6, 3, 4), CrossEntropy(255, 1, label_smoothing=0.1)),
}


def example(logits_shape, target_shape, loss, ignored=0.4):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(logits_shape, generator=generator, dtype=torch.float64)
    target = torch.randint(5, target_shape, generator=generator)
    hidden = torch.rand(target_shape, generator=generator) < ignored
    target = target.masked_fill(hidden, loss.ignore_index)
    return logits.requires_grad_(), target


@pytest.mark.parametrize("case", CASES)
def test_parts_add_up_to_the_whole_in_loss_and_gradient(case):
    logits_shape, target_shape, loss = CASES[case]
    logits, target = example(logits_shape, target_shape, loss)
    whole = F.cross_entropy(
        logits if loss.class_dim == 1 else logits.flatten(0, -2),
        target if loss.class_dim == 1 else target.flatten(),
        ignore_index=loss.ignore_index,
        label_smoothing=loss.label_smoothing,
    )
    (expected,) = torch.autograd.grad(whole, logits)
    count = sum(loss.count(part) for part in target.split([1, 2, 3]))
    parts = zip(logits.split([1, 2, 3]), target.split([1, 2, 3]), strict=True)
    total = sum(loss(output, part) / count for output, part in parts)
    (gradient,) = torch.autograd.grad(total, logits)
    assert count == int((target != loss.ignore_index).sum()) < target.numel()
    assert isinstance(count, int)
    torch.testing.assert_close(total, whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_no_valid_target_is_a_zero_in_the_graph(case):
    logits_shape, target_shape, loss = CASES[case]
    logits, target = example(logits_shape, target_shape, loss, ignored=1.1)
    total = loss(logits, target)
    total.backward()
    assert loss.count(target) == 0
    assert total.item() == 0
    assert logits.grad.abs().max() == 0


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
@pytest.mark.parametrize("class_dim", [-1, 1])
def test_the_loss_is_computed_in_float32_at_least(dtype, expected, class_dim):
    logits = torch.randn(3, 5, 4, 5).to(dtype)
    target = torch.randint(5, (3, 5, 4) if class_dim == -1 else (3, 4, 5))
    loss = CrossEntropy(class_dim=class_dim)(logits, target)
    assert loss.dtype is expected
    torch.testing.assert_close(loss, CrossEntropy(class_dim=class_dim)(logits.to(expected), target))


def test_auxiliary_heads_have_their_customary_weights():
    a, b, c = (torch.randn(4, 5, dtype=torch.float64) for _ in range(3))
    target = torch.tensor([0, 4, -100, 2])
    loss = CrossEntropy()
    la, lb, lc = (loss(x, target) for x in (a, b, c))
    google = namedtuple("google", ["logits", "aux_logits2", "aux_logits1"])  # noqa: PYI024
    inception = namedtuple("inception", ["logits", "aux_logits"])  # noqa: PYI024
    assert loss(google(a, b, c), target).item() == pytest.approx((la + 0.3 * lb + 0.3 * lc).item())
    assert loss(inception(a, b), target).item() == pytest.approx((la + 0.4 * lb).item())
    assert loss(inception(a, None), target) == la
    assert loss(OrderedDict(out=a, aux=b), target).item() == pytest.approx((la + 0.5 * lb).item())
    assert loss({"logits": a}, target) == la
    weighted = CrossEntropy(auxiliary_weight=0.25)
    assert weighted({"out": a, "aux": b}, target).item() == pytest.approx((la + 0.25 * lb).item())
    assert CrossEntropy(auxiliary_weight=0.0)({"out": a, "aux": b}, target) == la
    assert main_logits(google(a, b, c)) is a


def test_the_heads_of_real_models_are_known():
    from torchvision.models import googlenet
    from torchvision.models.segmentation import fcn_resnet50

    model = googlenet(weights=None, num_classes=5, aux_logits=True, init_weights=False)
    images, target = torch.randn(2, 3, 64, 64), torch.tensor([1, 2])
    output = model.train()(images)
    loss = CrossEntropy()
    expected = loss(output.logits, target) + 0.3 * (
        loss(output.aux_logits1, target) + loss(output.aux_logits2, target)
    )
    torch.testing.assert_close(loss(output, target), expected)
    assert set(ClassificationTask(5).measure(model.eval()(images), target)) == {
        "loss",
        "count",
        "top1",
        "top5",
    }

    model = fcn_resnet50(weights=None, weights_backbone=None, num_classes=4, aux_loss=True)
    output = model.train()(torch.randn(2, 3, 32, 32))
    target = torch.randint(4, (2, 32, 32))
    loss = SegmentationTask(4).loss()
    expected = loss(output["out"], target) + 0.5 * loss(output["aux"], target)
    torch.testing.assert_close(loss(output, target), expected)


def test_an_output_without_logits_is_refused():
    with pytest.raises(ConfigError, match=r"model\.name: the loss got a tuple, and needs logits"):
        CrossEntropy()((torch.ones(2, 3), torch.ones(2, 3)), torch.zeros(2).long())
    with pytest.raises(ConfigError, match=r"got a dict.*set model\.loss="):
        CrossEntropy()({"boxes": torch.ones(2)}, torch.zeros(2).long())


def test_targets_of_another_shape_are_refused():
    with pytest.raises(ConfigError, match=r"\(4, 9, 5\) need targets of shape \(4, 9\).*\(4,\)"):
        CrossEntropy()(torch.ones(4, 9, 5), torch.zeros(4).long())
    with pytest.raises(ConfigError, match=r"\(2, 5, 3, 3\) need targets of shape \(2, 3, 3\)"):
        CrossEntropy(class_dim=1)(torch.ones(2, 5, 3, 3), torch.zeros(2, 3, 4).long())


WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "fn",
    [
        F.cross_entropy,
        nn.CrossEntropyLoss,
        nn.CrossEntropyLoss(ignore_index=-100, label_smoothing=0.1),
        nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1),
        nn.CrossEntropyLoss(ignore_index=3),
        functools.partial(F.cross_entropy, ignore_index=2),
        functools.partial(F.cross_entropy, weight=WEIGHTS),
    ],
)
def test_a_users_mean_adds_up_over_unequal_parts(fn):
    logits, target = example((12, 5), (12,), CrossEntropy())
    if getattr(fn, "ignore_index", None) == 3 or getattr(fn, "keywords", {}).get("ignore_index"):
        target = torch.arange(12) % 5
    loss = MeanLoss(fn)
    whole = (fn() if isinstance(fn, type) else fn)(logits, target)
    (expected,) = torch.autograd.grad(whole, logits)
    pieces = list(zip(logits.split([1, 4, 7]), target.split([1, 4, 7]), strict=True))
    count = sum(loss.count(part) for _, part in pieces)
    total = sum(loss(output, part) for output, part in pieces) / count
    (gradient,) = torch.autograd.grad(total, logits)
    torch.testing.assert_close(total, whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


def test_rows_are_counted_where_nothing_is_ignored():
    output = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    target = torch.randn(6, 3, dtype=torch.float64)
    loss = MeanLoss(F.mse_loss)
    parts = zip(output.split([1, 5]), target.split([1, 5]), strict=True)
    total = sum(loss(o, t) for o, t in parts) / 6
    torch.testing.assert_close(total, F.mse_loss(output, target), rtol=0, atol=1e-12)
    assert loss.count(target) == 6
    assert loss.count({"boxes": target, "labels": target}) == 6
    assert loss.count(["a", "b"]) == 2
    probabilities = torch.softmax(target, -1)
    assert MeanLoss(F.cross_entropy).count(probabilities) == 6


def test_an_explicit_ignore_index_counts_valid_targets():
    loss = MeanLoss(lambda output, target: output[target != 7].mean(), ignore_index=7)
    output = torch.arange(4.0, requires_grad=True)
    assert loss.count(torch.tensor([1, 7, 7, 2])) == 2
    assert loss(output, torch.tensor([1, 7, 7, 2])).item() == 3.0
    zero = loss({"a": output}, torch.full((4,), 7))
    zero.backward()
    assert zero.item() == 0
    assert output.grad.tolist() == [0, 0, 0, 0]


def test_low_precision_means_are_multiplied_in_float32():
    loss = MeanLoss(F.mse_loss)(torch.ones(3, 2).bfloat16(), torch.zeros(3, 2).bfloat16())
    assert loss.dtype is torch.float32
    assert loss.item() == 3


@pytest.mark.parametrize(
    "fn",
    [
        nn.CrossEntropyLoss(reduction="sum"),
        functools.partial(F.mse_loss, reduction="none"),
    ],
)
def test_another_reduction_is_refused(fn):
    with pytest.raises(ConfigError, match=r"model\.loss: .* has reduction='(sum|none)'.*Use redu"):
        MeanLoss(fn)


def test_two_ignore_indices_are_refused():
    message = r"cross_entropy ignores -100.*are 255.*partial\(cross_entropy, ignore_index=255\)"
    with pytest.raises(ConfigError, match=message):
        MeanLoss(F.cross_entropy, ignore_index=255)


def test_a_loss_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match=r"model\.loss: <lambda> returned \(2,\).*loss\.mean"):
        MeanLoss(lambda output, target: output + target)(torch.ones(2), torch.ones(2))
    with pytest.raises(ConfigError, match=r"returned float"):
        MeanLoss(lambda output, target: float((output + target).sum()))(
            torch.ones(2), torch.ones(2)
        )


def summed_figures(task, output, target, sizes):
    """The figures of a task, from sums over parts of the batch."""
    sums = {}
    for part, wanted in zip(output.split(sizes), target.split(sizes), strict=True):
        for name, value in task.measure(part, wanted).items():
            assert value.dtype is torch.float64
            sums[name] = sums.get(name, 0) + value
    return task.summarize(sums)


def test_language_reports_nats_and_bits():
    task = LanguageTask(5, byte_level=True)
    logits, target = example((6, 7, 5), (6, 7), task.loss())
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten()).item()
    figures = summed_figures(task, logits.detach(), target, [1, 5])
    assert figures == pytest.approx({"loss": loss, "bits_per_byte": loss / math.log(2)}, abs=1e-12)
    assert set(summed_figures(LanguageTask(5), logits.detach(), target, [6])) == {"loss"}
    assert (task.name, task.num_classes) == ("language", 5)


def test_classification_reports_top1_and_top5():
    task = ClassificationTask(8)
    logits = torch.zeros(4, 8)
    logits[:, :6] = torch.arange(6, 0, -1.0)  # class 0 first, then 1, ...
    target = torch.tensor([0, 4, 7, -100])
    figures = summed_figures(task, logits, target, [1, 3])
    assert figures["top1"] == pytest.approx(1 / 3)
    assert figures["top5"] == pytest.approx(2 / 3)
    assert figures["loss"] == pytest.approx(F.cross_entropy(logits, target).item())
    assert set(summed_figures(ClassificationTask(4), logits[:, :4], target[:1].expand(4), [4])) == {
        "loss",
        "top1",
    }


def test_equal_logits_are_no_hit_for_every_class():
    sums = ClassificationTask(10).measure(torch.zeros(10, 10), torch.arange(10))
    assert sums["top1"] == 1
    assert sums["top5"] == 5


def test_segmentation_reports_accuracy_and_mean_iou():
    task = SegmentationTask(4)
    predicted = torch.tensor([[[0, 0, 1, 1]], [[1, 2, 0, 0]]])
    target = torch.tensor([[[0, 1, 1, 1]], [[1, 2, 255, 0]]])
    logits = F.one_hot(predicted, 4).movedim(-1, 1).double() * 5
    figures = summed_figures(task, logits, target, [1, 1])
    assert figures["pixel_accuracy"] == pytest.approx(6 / 7)
    assert figures["mean_iou"] == pytest.approx((2 / 3 + 3 / 4 + 1) / 3)  # class 3 is absent
    assert figures["loss"] == pytest.approx(
        F.cross_entropy(logits, target, ignore_index=255).item(), abs=1e-12
    )


def test_segmentation_takes_a_model_with_more_classes_than_the_data():
    target = torch.tensor([[[0, 1, 1, 1]]])
    logits = F.one_hot(torch.tensor([[[0, 1, 1, 5]]]), 6).movedim(-1, 1).double() * 5
    figures = summed_figures(SegmentationTask(2), logits, target, [1])
    assert figures["pixel_accuracy"] == pytest.approx(3 / 4)
    assert figures["mean_iou"] == pytest.approx((1 + 2 / 3 + 0) / 3)


def test_a_custom_loss_reports_itself():
    task = CustomTask(MeanLoss(F.mse_loss))
    output, target = torch.randn(5, 2), torch.randn(5, 2)
    figures = summed_figures(task, output, target, [1, 4])
    assert figures == pytest.approx({"loss": F.mse_loss(output, target).item()}, rel=1e-6)
    assert (task.name, task.num_classes) == ("custom", None)


@pytest.mark.parametrize("task", [LanguageTask(5), ClassificationTask(5), SegmentationTask(5)])
def test_no_valid_target_at_all_is_nan(task):
    loss = task.loss()
    shape = (2, 5, 3, 3) if task.name == "segmentation" else (2, 5)
    target = torch.full((2, *shape[2:]), loss.ignore_index)
    figures = task.summarize(task.measure(torch.randn(shape), target))
    assert all(math.isnan(figure) for figure in figures.values())
