"""Damaged image files are refused with their path and the fix, before training starts."""

from __future__ import annotations

import gzip
import os
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bigtrain.data import open_data
from bigtrain.data.image_files import (
    check_complete,
    decode_image,
    image_header,
    read_colours,
    read_idx,
)
from bigtrain.errors import ConfigError

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from small_datasets import WRITERS, photographs, write_small  # noqa: E402

SIZES = {
    "mnist": (72, 18, (1, 28, 28)),
    "cifar10": (100, 18, (3, 32, 32)),
    "imagenet": (50, 10, (3, 224, 224)),
    "voc": (20, 4, (3, 256, 256)),
}


@pytest.fixture(scope="module")
def small_sets(tmp_path_factory):
    """The small data sets in a temporary folder."""
    root = tmp_path_factory.mktemp("small")
    for name in SIZES:
        write_small(name, root / name, share=0.05)
    return root


@pytest.fixture
def small(small_sets, tmp_path):
    """A function that copies a data set, so that a test may damage the copy."""

    def make(name):
        for file in (small_sets / name).rglob("*"):
            if file.is_file():
                target = tmp_path / file.relative_to(small_sets)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read_bytes())
        return tmp_path / name

    return make


def opened(name, path):
    return open_data(name, str(path), {}, seed=0)


def assert_refused(name, path, message):
    """Assert that opening the data set raises this message."""
    with pytest.raises(ConfigError, match=message):
        opened(name, path)


@pytest.mark.parametrize("name", SIZES)
def test_the_small_data_sets_are_read_as_the_real_ones(small_sets, name):
    data = opened(name, small_sets / name)
    train, held_out, shape = SIZES[name]
    assert (len(data.train), len(data.validation)) == (train, held_out)
    assert data.train[0][0].shape == data.validation[0][0].shape == shape
    assert data.task.num_classes == (21 if name == "voc" else 10)
    assert set(WRITERS) == set(SIZES)


def test_the_same_seed_writes_the_same_bytes(small_sets, tmp_path):
    for name in ("mnist", "cifar10", "voc"):
        for seed in (0, 1):
            write_small(name, tmp_path / str(seed) / name, seed, share=0.05)
        files = [file for file in (small_sets / name).rglob("*") if file.is_file()]
        for seed, alike in ((0, True), (1, False)):
            second_files = [tmp_path / str(seed) / file.relative_to(small_sets) for file in files]
            pairs = zip(files, second_files, strict=True)
            assert all(a.read_bytes() == b.read_bytes() for a, b in pairs) is alike


def test_small_cifar10_is_stored_by_channels(small_sets):
    """Its images are crops of photographs, whose neighbouring pixels are similar."""
    images = torch.cat(
        [opened("cifar10", small_sets / "cifar10").validation[i][0] for i in range(9)]
    )
    near, far = images.diff(dim=-1).abs().mean(), (images - images.flip(-1)).abs().mean()
    assert near < 0.5 * far
    assert len(photographs()) == 3


def test_masks_of_the_small_voc_have_classes_borders_and_colours(small_sets):
    folder = small_sets / "voc" / "VOCdevkit" / "VOC2012" / "SegmentationClass"
    seen: set[int] = set()
    for file in folder.iterdir():
        with Image.open(file) as mask:
            assert mask.mode == "P"
            seen.update(np.unique(np.asarray(mask)).tolist())
            palette = mask.getpalette()
    assert {0, 255} < seen <= {0, 1, 2, 3, 4, 5, 255}
    # The published colours of background, aeroplane, bicycle and the border.
    colours = [tuple(palette[3 * n : 3 * n + 3]) for n in (0, 1, 2, 255)]
    assert colours == [(0, 0, 0), (128, 0, 0), (0, 128, 0), (224, 224, 192)]


def test_an_idx_file_is_held_to_its_header(tmp_path):
    numbers = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    good = struct.pack(">4I", 0x803, 2, 3, 4) + numbers.tobytes()
    file = tmp_path / "images"
    file.write_bytes(good)
    assert torch.equal(read_idx(file, 3), torch.from_numpy(numbers))
    for content, message in (
        (b"\x00\x00\x08\x01" + good[4:], r"images cannot be read: its magic number is 0x00000801"),
        (good[:10], r"it has 10 bytes, its header alone needs 16"),
        (good[:-1], r"it has 39 bytes, and 40 are needed for \[2, 3, 4\]\. Get this file again"),
        (good + b"x", r"it has 41 bytes, and 40 are needed"),
        (b"", r"its magic number is 0x00000000, needed is 0x00000803"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            read_idx(file, 3)
    packed = tmp_path / "images.gz"
    packed.write_bytes(gzip.compress(good)[:-9])
    with pytest.raises(ConfigError, match=r"images\.gz cannot be read: Compressed file ended"):
        read_idx(packed, 3)
    packed.write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match=r"images\.gz cannot be read: Not a gzipped file"):
        read_idx(packed, 3)


def test_labels_of_mnist_belong_to_its_images(small):
    root = small("mnist")
    labels = root / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
    labels.write_bytes(struct.pack(">2I", 0x801, 3) + bytes([1, 2, 3]))
    assert_refused("mnist", root, r"t10k-images-idx3-ubyte\.gz has 18 images, and .* has 3 labels")
    labels.write_bytes(struct.pack(">2I", 0x801, 18) + bytes([12] * 18))
    assert_refused("mnist", root, r"t10k-labels.* has the label 12, all must be below 10")
    labels.with_name(f"{labels.name}.gz").unlink()
    labels.unlink()
    assert_refused("mnist", root, r"holds no mnist, .*t10k-labels-idx1-ubyte does not exist")


def test_batches_of_cifar10_are_whole(small):
    root = small("cifar10")
    batch = root / "cifar-10-batches-bin" / "data_batch_3.bin"
    content = batch.read_bytes()
    batch.write_bytes(content[:-1])
    assert_refused("cifar10", root, rf"3\.bin .*has {len(content) - 1} bytes, .* multiple of 3073")
    batch.write_bytes(b"\x0a" + content[1:])
    assert_refused("cifar10", root, r"data_batch_3\.bin .*has the label 10, all must be below 10")
    batch.unlink()
    assert_refused("cifar10", root, r"holds no cifar10, .*data_batch_3\.bin does not exist")


def test_classes_of_imagenet_have_images_that_are_whole(small):
    root = small("imagenet")
    (picture, *other_pictures) = sorted((root / "val" / "three").iterdir())
    content = picture.read_bytes()
    picture.write_bytes(content[: len(content) // 2])
    assert_refused(
        "imagenet", root, r"val/three/three_0\.JPEG cannot be read: .*truncated.*Get this file"
    )
    picture.write_bytes(content + b"written after its end")
    assert len(opened("imagenet", root).validation) == 10
    for file in (picture, *other_pictures):
        file.unlink()
    assert_refused(
        "imagenet", root, r"val/three has no image, and a class needs at least 1\. Put images"
    )
    (root / "val" / "three").rmdir()
    assert_refused("imagenet", root, r"val 9; 'three' is only in one of them")


def test_an_image_that_is_damaged_later_is_named(small):
    root = small("imagenet")
    data = opened("imagenet", root)
    picture = root / "train" / "eight" / "eight_0.JPEG"
    picture.write_bytes(picture.read_bytes()[:600])
    with pytest.raises(
        ConfigError, match=r"data\.path: .*train/eight/eight_0\.JPEG cannot be read"
    ):
        data.train[0]


def test_masks_of_voc_fit_their_images(small):
    root = small("voc")
    folder = root / "VOCdevkit" / "VOC2012"
    mask, picture = (
        folder / "SegmentationClass" / "2012_train_000001.png",
        folder / "JPEGImages" / "2012_train_000001.jpg",
    )
    content = mask.read_bytes()
    mask.write_bytes(content[: len(content) // 2])
    assert_refused("voc", root, r"2012_train_000001\.png cannot be read: ")
    Image.new("P", (30, 20)).save(mask)
    assert_refused(
        "voc", root, r"000001\.png has 30 x 20 pixels, and its image .*000001\.jpg \d+ x \d+\."
    )
    with Image.open(picture) as image:
        size = image.size
    Image.new("RGB", size).save(mask)
    assert_refused(
        "voc", root, r"000001\.png has pixels of mode RGB, needed are palette numbers \(P\)"
    )
    Image.new("L", size, 30).save(mask)
    with pytest.raises(ConfigError, match=r"000001\.png has the class 30, and voc has 0 to 20"):
        opened("voc", root).train[1]
    mask.write_bytes(content)
    picture.unlink()
    assert_refused("voc", root, r"000001\.jpg cannot be read: .*No such file")
    lists = folder / "ImageSets" / "Segmentation"
    (lists / "train.txt").write_text("\n")
    assert_refused("voc", root, r"train\.txt names no image, at least 1 is needed")
    (lists / "val.txt").unlink()
    assert_refused("voc", root, r"holds no voc 2012, .*val\.txt does not exist")


def test_a_range_of_scales_ascends(small_sets):
    with pytest.raises(ConfigError, match=r"scale=\[1\.5, 0\.5\] needs .*scale=\[0\.5,1\.5\]"):
        open_data("voc", str(small_sets / "voc"), {"scale": [1.5, 0.5]}, seed=0)
    with pytest.raises(ConfigError, match=r"data\.args\.scale: needs more than 0"):
        open_data("voc", str(small_sets / "voc"), {"scale": [0, 0.5]}, seed=0)


def test_many_files_are_looked_at_in_part(tmp_path):
    files = [tmp_path / f"{number}.jpg" for number in range(10)]
    for file in files:
        Image.new("RGB", (2, 2)).save(file)
    files[3].write_bytes(b"\xff\xd8")
    check_complete(files, most=5)
    with pytest.raises(ConfigError, match=r"3\.jpg cannot be read: "):
        check_complete(files, most=10)


@pytest.mark.parametrize("kind", ["bomb", "pipe", "device", "folder", "text", "no header"])
def test_what_is_no_harmless_image_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "odd.png"
    if kind == "bomb":  # a small file that expands to ten gigabytes
        size = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
        chunks = [(b"IHDR", size), (b"IDAT", b"x"), (b"IEND", b"")]
        packed = [
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
            for name, data in chunks
        ]
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(packed))
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"a text" if kind == "text" else b"\x89PNG\r\n\x1a\nIEND\xaeB`\x82")
    for read in (
        decode_image,
        image_header,
        read_colours,
        lambda one: check_complete([one], most=1),
    ):
        with pytest.raises(ConfigError, match=r"data\.path: .*odd\.png cannot be read: .*Get this"):
            read(path)


@pytest.mark.parametrize("packed", [False, True])
def test_an_idx_file_that_stands_for_too_much(tmp_path, packed, monkeypatch):
    monkeypatch.setattr("bigtrain.data.image_files._MOST_IDX", 1000)
    path = tmp_path / ("images.gz" if packed else "images")
    with gzip.open(path, "wb") if packed else path.open("wb") as file:
        file.write(bytes(2000))
    with pytest.raises(ConfigError, match="it holds more than 1000 bytes"):
        read_idx(path, 3)
