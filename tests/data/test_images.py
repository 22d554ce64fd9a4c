"""Data sets of images: reading, validation split, augmentation, downloads and refusals."""

import gzip
import hashlib
import pickle
import struct

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets

from bigtrain.data import GlobalOrder, StepLoader, check_data, open_data, prepare_data
from bigtrain.errors import ConfigError

RANDOM = np.random.default_rng(0)


def pixels(*shape):
    return RANDOM.integers(0, 256, shape, dtype=np.uint8)


def write_mnist(root, packed=False):
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, number in (("train", 12), ("t10k", 5)):
        images, labels = pixels(number, 28, 28), np.arange(number, dtype=np.uint8) % 10
        for name, array in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            file = raw / f"{part}-{name}"
            if packed:
                with gzip.open(f"{file}.gz", "wb") as stream:
                    stream.write(header + array.tobytes())
            else:
                file.write_bytes(header + array.tobytes())
    return root


def write_cifar10(root, monkeypatch):
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    sums = {}
    for name in [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta"]:
        entry = {"label_names": [f"class {n}" for n in range(10)]}
        if name != "batches.meta":
            entry = {"data": pixels(4, 3072), "labels": [1, 9, 0, 4]}
        (folder / name).write_bytes(pickle.dumps(entry))
        sums[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
    # The real class checks the hashes of the real files; here it gets those of the small ones.
    trains = [[f"data_batch_{n}", sums[f"data_batch_{n}"]] for n in range(1, 6)]
    monkeypatch.setattr(datasets.CIFAR10, "train_list", trains)
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    meta = {**datasets.CIFAR10.meta, "md5": sums["batches.meta"]}
    monkeypatch.setattr(datasets.CIFAR10, "meta", meta)
    return root


def write_classes(folder, number=6, classes=("cat", "dog", "eel")):
    for name in classes:
        (folder / name).mkdir(parents=True)
        for index in range(number):
            picture = Image.fromarray(pixels(20, 24, 3))
            picture.save(folder / name / f"{index}.png")
    return folder


def write_voc(root, year="2012", inner=""):
    folder = root / inner / "VOCdevkit" / f"VOC{year}"
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (folder / name).mkdir(parents=True)
    for part, number in (("train", 4), ("val", 2)):
        names = [f"{part}{index}" for index in range(number)]
        (folder / "ImageSets" / "Segmentation" / f"{part}.txt").write_text("\n".join(names))
        for name in names:
            # The image encodes its classes: red is the class times 10.
            mask = np.zeros((40, 60), dtype=np.uint8)
            mask[:20, :30], mask[20:, 30:], mask[:20, 30:] = 5, 20, 255
            picture = np.stack([mask, mask * 0, mask * 0], axis=-1)
            Image.fromarray(picture).save(folder / "JPEGImages" / f"{name}.jpg", quality=100)
            palette = Image.fromarray(mask)  # as VOC has them: a pixel's number is its class
            palette.putpalette([0] * 768)
            palette.save(folder / "SegmentationClass" / f"{name}.png")
    return root


def opened(name, path, **args):
    return open_data(name, str(path), args, seed=0)


def test_mnist(tmp_path):
    data = opened("mnist", write_mnist(tmp_path))
    inputs, target = data.train[11]
    assert (inputs.shape, inputs.dtype) == ((1, 28, 28), torch.float32)
    assert (target.dtype, int(target)) == (torch.int64, 1)
    assert (len(data.train), len(data.validation)) == (12, 5)
    assert type(inputs) is torch.Tensor
    assert data.task.num_classes == 10
    assert opened("mnist", tmp_path, size=32).train[0][0].shape == (1, 32, 32)
    raw = datasets.MNIST(tmp_path, train=False).data[3].float() / 255
    torch.testing.assert_close(data.validation[3][0][0], (raw - 0.1307) / 0.3081)


def test_packed_mnist_is_read_where_it_is(tmp_path):
    write_mnist(tmp_path, packed=True)
    check_data("mnist", str(tmp_path), {})
    raw = tmp_path / "MNIST" / "raw"
    before = sorted(raw.iterdir())
    packed, beside = opened("mnist", tmp_path), opened("mnist", raw)
    assert sorted(raw.iterdir()) == before
    assert torch.equal(packed.validation[3][0], beside.validation[3][0])
    for file in before:  # a plain file is preferred to a packed one
        file.with_suffix("").write_bytes(gzip.decompress(file.read_bytes()))
        file.write_bytes(b"not looked at")
    assert torch.equal(opened("mnist", tmp_path).validation[3][0], packed.validation[3][0])


def test_cifar10(tmp_path, monkeypatch):
    data = opened("cifar10", write_cifar10(tmp_path, monkeypatch))
    assert (len(data.train), len(data.validation)) == (20, 4)
    assert data.train[0][0].shape == (3, 32, 32)
    assert [int(data.validation[i][1]) for i in range(4)] == [1, 9, 0, 4]
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"cannot be read as cifar10: .*not found or corrupted"):
        opened("cifar10", tmp_path)


def test_image_folder_holds_images_out(tmp_path):
    data = opened("image_folder", write_classes(tmp_path), size=16, validation_fraction=0.25)
    again = open_data(
        "image_folder", str(tmp_path), {"size": 16, "validation_fraction": 0.25}, seed=9
    )
    assert (len(data.train), len(data.validation)) == (14, 4)
    assert sorted([*data.train.indices, *data.validation.indices]) == list(range(18))
    assert again.validation.indices == data.validation.indices
    assert data.train[0][0].shape == data.validation[0][0].shape == (3, 16, 16)
    assert data.task.num_classes == 3
    assert torch.equal(data.validation[1][0], data.validation[1][0])
    assert opened("image_folder", tmp_path, validation_fraction=0).validation is None


def test_image_folder_with_its_own_validation(tmp_path):
    write_classes(tmp_path / "train")
    write_classes(tmp_path / "val", number=2)
    for name in ("image_folder", "imagenet"):
        data = opened(name, tmp_path, size=16)
        assert (len(data.train), len(data.validation)) == (18, 6)
        assert [int(data.validation[i][1]) for i in range(6)] == [0, 0, 1, 1, 2, 2]


def test_a_class_may_be_called_train(tmp_path):
    write_classes(tmp_path, classes=("car", "train"))
    assert opened("image_folder", tmp_path).task.num_classes == 2


def test_voc_cuts_image_and_mask_alike(tmp_path):
    data = opened("voc", write_voc(tmp_path), size=32)
    assert (len(data.train), len(data.validation), data.task.num_classes) == (4, 2, 21)
    padded = set()
    for samples in (data.train, data.validation):
        for _ in range(10):
            inputs, target = samples[1]
            assert (inputs.shape, target.shape) == ((3, 32, 32), (32, 32))
            assert (inputs.dtype, target.dtype) == (torch.float32, torch.int64)
            assert type(target) is torch.Tensor
            assert set(target.unique().tolist()) <= {0, 5, 20, 255}
            red = (inputs[0] * 0.229 + 0.485) * 255
            # The mean colour was added where the image did not reach.
            added = (red - 0.485 * 255).abs() < 0.6
            assert bool((target[added] == 255).all())
            padded.add(bool(added.any()))
            wanted = target.float()
            assert ((red - wanted).abs() < 30)[~added].float().mean() > 0.9
    assert padded == {True, False}
    assert opened("voc", write_voc(tmp_path / "b", "2007"), year="2007").train[0]
    assert opened("voc", write_voc(tmp_path / "c", "2011", "TrainVal"), year="2011").train[0]


@pytest.mark.parametrize("name", ["mnist", "cifar10", "image_folder", "voc"])
def test_augmentation_does_not_depend_on_the_ranks(name, tmp_path, monkeypatch):
    if name == "cifar10":
        write_cifar10(tmp_path, monkeypatch)
    else:
        {"mnist": write_mnist, "image_folder": write_classes, "voc": write_voc}[name](tmp_path)
    data = opened(name, tmp_path, size=24)
    order = GlobalOrder(len(data.train), len(data.train), seed=1)

    def epochs(ranks, micro):
        loaders = [
            iter(
                StepLoader(
                    data.train, order, count=len, dp_rank=r, dp_size=ranks, micro_batch_size=micro
                )
            )
            for r in range(ranks)
        ]
        steps = [[next(loader) for loader in loaders] for _ in range(2)]
        return [
            torch.cat(
                [
                    part.inputs
                    for rank_batch in step
                    for part in rank_batch.micro_batches
                    if part.rows
                ]
            )
            for step in steps
        ]

    alone, spread = epochs(1, 3), epochs(2, 2)
    assert torch.equal(alone[0], spread[0])
    assert torch.equal(alone[1], spread[1])
    places = [order.batch_at(epoch * len(data.train)).indices for epoch in range(2)]
    same = alone[1][[places[1].index(i) for i in places[0]]]
    assert not torch.equal(alone[0], same)  # a different epoch, a different crop


@pytest.mark.parametrize("name", ["mnist", "cifar10", "image_folder", "voc"])
def test_augment_false_is_deterministic(name, tmp_path, monkeypatch):
    if name == "cifar10":
        write_cifar10(tmp_path, monkeypatch)
    else:
        {"mnist": write_mnist, "image_folder": write_classes, "voc": write_voc}[name](tmp_path)
    data = opened(name, tmp_path, augment=False)
    assert data.train.deterministic
    assert data.validation.deterministic
    before = torch.get_rng_state()
    assert torch.equal(data.train[0][0], data.train[0][0])
    assert torch.equal(torch.get_rng_state(), before)
    assert not opened(name, tmp_path).train.deterministic


@pytest.mark.parametrize("name", ["mnist", "cifar10", "voc"])
def test_missing_files_are_named(name, tmp_path):
    fix = r"set data\.args\.download=true"
    with pytest.raises(ConfigError, match=rf"data\.path is not set: {name} needs .*{fix}"):
        check_data(name, None, {})
    with pytest.raises(ConfigError, match=rf"data\.path is not set: {name} needs "):
        check_data(name, None, {"download": True})
    with pytest.raises(ConfigError, match=rf"data\.path: .*/no does not exist: {name} .*{fix}"):
        check_data(name, str(tmp_path / "no"), {})
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data\.path: .*/file is not a folder"):
        check_data(name, str(tmp_path / "file"), {})
    for step in (check_data, prepare_data):
        with pytest.raises(ConfigError, match=rf"holds no {name}.* does not exist.*{fix}"):
            step(name, str(tmp_path), {})
    check_data(name, str(tmp_path), {"download": True})


DOWNLOADS = {
    "mnist": (datasets.MNIST, write_mnist),
    "cifar10": (datasets.CIFAR10, None),
    "voc": (datasets.VOCSegmentation, write_voc),
}


@pytest.mark.parametrize("name", DOWNLOADS)
def test_a_download_is_made_once_in_a_temporary_folder(name, tmp_path, monkeypatch):
    kind, write = DOWNLOADS[name]
    target, calls = tmp_path / "new" / "place", []
    real = kind.__init__

    def fetch(self, root, *args, download=False, **options):
        if download:
            calls.append((root, sorted(file.name for file in root.iterdir())))
            write(root) if write else write_cifar10(root, monkeypatch)
        real(self, root, *args, **options)

    monkeypatch.setattr(kind, "__init__", fetch)
    target.mkdir(parents=True)
    (target / "archive.tar.gz").write_bytes(b"already here")
    for _ in range(2):
        prepare_data(name, str(target), {"download": True})
    assert len(calls) == 1
    root, folders_given = calls[0]
    assert root.parent == target
    assert not root.exists()
    assert folders_given == ["archive.tar.gz"]
    assert len(opened(name, target, download=True).train) in (4, 12, 20)


@pytest.mark.parametrize("name", DOWNLOADS)
def test_a_failed_download_leaves_nothing(name, tmp_path, monkeypatch):
    def fail(self, root, *args, **options):
        (root / "half").write_text("")
        raise RuntimeError("Error downloading\nTried a mirror, got: no route to host")

    monkeypatch.setattr(DOWNLOADS[name][0], "__init__", fail)
    message = rf"data\.args\.download: {name} could not be fetched.*no route to host.*by hand"
    with pytest.raises(ConfigError, match=message):
        prepare_data(name, str(tmp_path), {"download": True})
    assert list(tmp_path.iterdir()) == []


def test_bad_folders_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.path is not set: give the folder with one"):
        check_data("image_folder", None, {})
    with pytest.raises(ConfigError, match=r"has no folders, and one per class.*CLASS/NAME\.png"):
        check_data("image_folder", str(tmp_path), {})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"/empty has no image, and a class needs"):
        opened("image_folder", tmp_path)
    with pytest.raises(ConfigError, match=r"/train does not exist, and imagenet needs train/CLASS"):
        check_data("imagenet", str(tmp_path), {})
    (tmp_path / "train").mkdir()
    (tmp_path / "val").mkdir()
    with pytest.raises(ConfigError, match=r"/train has no folders, and one per class"):
        check_data("imagenet", str(tmp_path), {})
    write_classes(tmp_path / "b" / "train", classes=("cat", "dog"))
    write_classes(tmp_path / "b" / "val", classes=("cat", "cow"))
    message = r"train has 2 classes and .*val 2; 'cow' is only in one of them"
    for name in ("image_folder", "imagenet"):
        with pytest.raises(ConfigError, match=message):
            check_data(name, str(tmp_path / "b"), {})
    write_classes(tmp_path / "c", number=1, classes=("cat",))
    with pytest.raises(ConfigError, match=r"validation_fraction=0\.9 holds out all 1 images"):
        opened("image_folder", tmp_path / "c", validation_fraction=0.9)
