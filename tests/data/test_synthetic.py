"""Synthetic data sets and the digits of scikit-learn."""

import importlib.util

import pytest
import torch

from bigtrain.data import check_data, open_data, prepare_data
from bigtrain.errors import ConfigError


def synthetic(sequence_length=None, seed=0, **args):
    return open_data("synthetic", None, args, seed=seed, sequence_length=sequence_length)


def test_classification_samples():
    data = synthetic(input_shape=[1, 4, 6], num_classes=3, samples=50, validation_samples=5)
    inputs, target = data.train[49]
    assert (inputs.shape, inputs.dtype) == ((1, 4, 6), torch.float32)
    assert (target.shape, target.dtype) == ((), torch.int64)
    assert {int(data.train[i][1]) for i in range(50)} == {0, 1, 2}
    assert (len(data.train), len(data.validation)) == (50, 5)
    assert not torch.equal(data.validation[0][0], data.train[0][0])
    assert (data.task.name, data.task.num_classes) == ("classification", 3)
    assert data.description == "synthetic classification: 50 samples of 1 x 4 x 6"
    with pytest.raises(IndexError):
        data.train[50]


def test_segmentation_samples():
    data = synthetic(kind="segmentation", input_shape=[3, 8, 9], num_classes=4)
    inputs, target = data.train[0]
    assert (inputs.shape, target.shape) == ((3, 8, 9), (8, 9))
    assert (data.task.name, data.validation) == ("segmentation", None)


def test_language_samples_are_shifted():
    data = synthetic(kind="language", vocabulary=1000, length=16)
    inputs, target = data.train[0]
    assert torch.equal(inputs[1:], target[:-1])
    assert inputs.max() > 255
    assert data.task.num_classes == 1000
    assert synthetic(20, kind="language").train[0][0].shape == (20,)
    assert synthetic(kind="language").train[0][0].shape == (128,)


def test_samples_depend_on_the_seed_and_the_index_alone():
    first, again, second_seed = synthetic(seed=1), synthetic(seed=1), synthetic(seed=2)
    torch.rand(3)
    for index in (5, 0, 5):
        assert torch.equal(first.train[index][0], again.train[index][0])
    assert not torch.equal(first.train[5][0], second_seed.train[5][0])
    assert not torch.equal(first.train[5][0], first.train[6][0])


@pytest.mark.parametrize("kind", ["classification", "segmentation", "language"])
def test_a_share_of_the_targets_is_ignored(kind):
    data = synthetic(kind=kind, ignore_fraction=0.25, samples=400)
    loss = data.task.loss()
    targets = torch.stack([data.train[i][1] for i in range(400)])
    assert loss.count(targets) / targets.numel() == pytest.approx(0.75, abs=0.07)
    assert not (data.train[0][0] == loss.ignore_index).any()


def test_bad_shapes_are_refused():
    with pytest.raises(ConfigError, match=r"input_shape=\[3\]: segmentation needs.*\[3,64,64\]"):
        check_data("synthetic", None, {"kind": "segmentation", "input_shape": [3]})
    with pytest.raises(ConfigError, match=r"num_classes=300: class 255 marks.*=255 or less"):
        synthetic(kind="segmentation", num_classes=300)
    with pytest.raises(ConfigError, match=r"data\.args\.input_shape: .*needs 1 or more"):
        synthetic(input_shape=[3, 0])
    prepare_data("synthetic", None, {})


def test_digits_are_split_the_same_for_every_seed():
    data, second = (open_data("digits", None, {"size": 8}, seed=seed) for seed in (0, 1))
    assert (len(data.train), len(data.validation)) == (1437, 360)
    assert torch.equal(data.train.inputs, second.train.inputs)
    images = torch.cat([data.train.inputs, data.validation.inputs])
    assert images.shape == (1797, 1, 8, 8)
    assert abs(images.mean()) < 0.01
    assert abs(images.std() - 1) < 0.01
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    got = sorted(
        (int(t), tuple(x.flatten().tolist()))
        for x, t in zip(
            (images * 0.376 + 0.305).mul(16).round(),
            torch.cat([data.train.targets, data.validation.targets]),
            strict=True,
        )
    )
    wanted = sorted((int(t), tuple(x.tolist())) for x, t in zip(pixels, labels, strict=True))
    assert got == wanted  # every image once, with its label
    assert data.validation.targets.bincount().min() > 20


def test_digits_are_resized_and_read_in_bulk():
    data = open_data("digits", None, {}, seed=0)
    assert data.train[0][0].shape == (1, 32, 32)
    many = data.train.__getitems__([5, 2])
    assert torch.equal(many[1][0], data.train[2][0])
    assert torch.equal(many[0][1], data.train[5][1])


def test_missing_packages_are_named(monkeypatch):
    real = importlib.util.find_spec
    hidden = ("sklearn", "torchvision")
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n in hidden else real(n))
    with pytest.raises(ConfigError, match=r'digits needs scikit-learn.*"bigtrain\[digits\]"'):
        check_data("digits", None, {})
    for name in ("mnist", "cifar10", "image_folder", "voc"):
        with pytest.raises(ConfigError, match=rf"data\.name={name} needs torchvision.*pip install"):
            check_data(name, ".", {})
