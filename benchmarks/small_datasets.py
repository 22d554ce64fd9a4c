"""Write small data sets of real images, in the formats of MNIST, CIFAR-10, ImageNet and VOC.

    python benchmarks/small_datasets.py FOLDER [--only mnist cifar10 imagenet voc] [--seed 0]

The images come with installed packages: scikit-learn's 1,797 handwritten digits (8 x 8)
and its two photographs, and one of matplotlib's. Nothing is downloaded, and the same seed with the
same packages writes the same bytes.

* `FOLDER/mnist`: IDX files, gzipped; every digit once, scaled to 28 x 28.
* `FOLDER/cifar10`: the binary version (`cifar-10-batches-bin`); digits in colour on photographs.
* `FOLDER/imagenet`: train/CLASS and val/CLASS of JPEGs of several sizes; plates with digits.
* `FOLDER/voc`: VOCdevkit/VOC2012; plates with the digits 0 to 4 on photographs, and masks with a
  palette, in which a plate has the class digit + 1 and its border is 255. Here each digit has a
  different hue, so that a deep model learns them from initial weights in minutes on a CPU.

In all of them a fifth of the digits is held out: no digit of a training image is in a validation
image.
"""

from __future__ import annotations

import argparse
import colorsys
import gzip
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

Pixels = npt.NDArray[np.uint8]
Colours = tuple[tuple[int, int, int], tuple[int, int, int]]
"""Of a plate, and of the digit on it."""
Place = tuple[int, int, int]
"""Left, top and side of a square, in pixels."""

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
VOC_CLASSES = 5
"""Digits on the plates of voc."""
BORDER = 255
"""The value in a mask of a pixel that does not count."""


@dataclass(frozen=True)
class Digits:
    """Handwritten digits: images (number, 8, 8) from 0 to 255, and what they show."""

    images: Pixels
    labels: Pixels

    def drawn(self, index: int, side: int) -> Image.Image:
        """Return one digit in grey, scaled."""
        return Image.fromarray(self.images[index]).resize((side, side), Image.Resampling.BICUBIC)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the selected data sets, and print their folders."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(WRITERS), default=list(WRITERS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for name in options.only:
        write_small(name, options.folder / name, options.seed)
        print(f"{options.folder / name}", flush=True)
    return 0


def write_small(name: str, folder: Path, seed: int = 0, share: float = 1.0) -> None:
    """Write one of the data sets.

    Args:
        name: mnist, cifar10, imagenet or voc.
        folder: to be `data.path`; made if it is not there.
        seed: of the split, and of what is drawn where.
        share: of the usual number of images, for tests.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    train, held_out = split_digits(random)
    WRITERS[name](folder, train, held_out, random, share)


def split_digits(random: np.random.Generator) -> tuple[Digits, Digits]:
    """Return scikit-learn's digits in two parts, 1437 and 360."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 8, 8) * 255 / 16).round().astype(np.uint8)
    order = random.permutation(len(images))
    cut = len(order) * 4 // 5
    parts = [Digits(images[part], labels[part].astype(np.uint8)) for part in np.split(order, [cut])]
    return parts[0], parts[1]


def photographs() -> list[Image.Image]:
    """Return three photographs in colour: 640 x 427 twice, and 512 x 600."""
    import matplotlib
    from sklearn.datasets import load_sample_images

    pictures = [Image.fromarray(picture) for picture in load_sample_images().images]
    with Image.open(Path(matplotlib.get_data_path(), "sample_data", "grace_hopper.jpg")) as third:
        return [*pictures, third.convert("RGB")]


def write_mnist(
    folder: Path, train: Digits, held_out: Digits, random: np.random.Generator, share: float
) -> None:
    """`MNIST/raw/*-ubyte.gz`; the order of the IDX headers is high byte first."""
    del random
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for part, digits in (("train", train), ("t10k", held_out)):
        number = round(len(digits.labels) * share)
        images = np.stack([np.asarray(digits.drawn(index, 28)) for index in range(number)])
        for kind, array in (("images-idx3", images), ("labels-idx1", digits.labels[:number])):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            packed = gzip.compress(header + array.tobytes(), mtime=0)
            (raw / f"{part}-{kind}-ubyte.gz").write_bytes(packed)


def write_cifar10(
    folder: Path, train: Digits, held_out: Digits, random: np.random.Generator, share: float
) -> None:
    """Five files of 400 images and one of 360: a byte for the class, then red, green and blue."""
    inner = folder / "cifar-10-batches-bin"
    inner.mkdir(parents=True, exist_ok=True)
    pictures = photographs()
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for number, name in enumerate(names):
        digits, first, size = train, number * 400, 400
        if name == "test_batch":
            digits, first, size = held_out, 0, len(held_out.labels)
        records = bytearray()
        for index in range(first, first + round(size * share)):
            at = index % len(digits.labels)
            scene = crop(pictures, (32, 32), random)
            side = int(random.integers(24, 33))
            left, top = (int(random.integers(0, 33 - side)) for _ in range(2))
            scene.paste(contrasting(scene, random), (left, top), digits.drawn(at, side))
            records.append(digits.labels[at])
            records += np.asarray(scene).transpose(2, 0, 1).tobytes()
        (inner / f"{name}.bin").write_bytes(records)
    (inner / "batches.meta.txt").write_text("\n".join(WORDS) + "\n")


def write_imagenet(
    folder: Path, train: Digits, held_out: Digits, random: np.random.Generator, share: float
) -> None:
    """100 images of each class to train with and 20 held out."""
    pictures = photographs()
    for part, digits, number in (("train", train, 100), ("val", held_out, 20)):
        for label, word in enumerate(WORDS):
            inner = folder / part / word
            inner.mkdir(parents=True, exist_ok=True)
            indices = np.flatnonzero(digits.labels == label)
            for index in range(round(number * share)):
                width, height = (int(random.integers(96, 161)) for _ in range(2))
                scene = crop(pictures, (width, height), random)
                side = int(random.integers(72, 97))
                position = (
                    int(random.integers(0, width - side + 1)),
                    int(random.integers(0, height - side + 1)),
                    side,
                )
                digit = digits.drawn(indices[index % len(indices)], side)
                paste_plate(scene, digit, position, any_colours(random))
                scene.save(inner / f"{word}_{index}.JPEG", quality=90)


def write_voc(
    folder: Path, train: Digits, held_out: Digits, random: np.random.Generator, share: float
) -> None:
    """400 images to train with and 80 held out, of 64 to 88 pixels on a side."""
    inner = folder / "VOCdevkit" / "VOC2012"
    lists = inner / "ImageSets" / "Segmentation"
    for subfolder in (inner / "JPEGImages", inner / "SegmentationClass", lists):
        subfolder.mkdir(parents=True, exist_ok=True)
    pictures = photographs()
    for part, digits, number in (("train", train, 400), ("val", held_out, 80)):
        names = [f"2012_{part}_{index:06d}" for index in range(round(number * share))]
        for name in names:
            scene, mask = plates(digits, pictures, random)
            scene.save(inner / "JPEGImages" / f"{name}.jpg", quality=90)
            mask.save(inner / "SegmentationClass" / f"{name}.png")
        (lists / f"{part}.txt").write_text("\n".join(names) + "\n")


def plates(
    digits: Digits, pictures: Sequence[Image.Image], random: np.random.Generator
) -> tuple[Image.Image, Image.Image]:
    """Return a photograph with plates, and its mask, in which a pixel's number is a class."""
    width, height = (int(side) for side in random.integers(64, 89, 2))
    few = np.flatnonzero(digits.labels < VOC_CLASSES)
    scene = crop(pictures, (width, height), random)
    mask = Image.new("P", (width, height), 0)
    mask.putpalette(voc_palette())
    taken: list[Place] = []
    for _ in range(int(random.integers(1, 3))):
        side = int(random.integers(40, 57))
        left, top = int(random.integers(0, width - side)), int(random.integers(0, height - side))
        if any(abs(left - x) < max(side, s) and abs(top - y) < max(side, s) for x, y, s in taken):
            continue  # plates must not overlap
        taken.append((left, top, side))
        index = int(few[random.integers(len(few))])
        label = int(digits.labels[index])
        colours = colours_of(label, random)
        paste_plate(scene, digits.drawn(index, side), (left, top, side), colours)
        ImageDraw.Draw(mask).rounded_rectangle(
            (left, top, left + side - 1, top + side - 1),
            radius=side // 6,
            fill=label + 1,
            outline=BORDER,
            width=2,
        )
    return scene, mask


def any_colours(random: np.random.Generator) -> Colours:
    """Return the colours of a plate and its digit: dark on light or light on dark."""
    light, dark = colour(random.integers(160, 256, 3)), colour(random.integers(0, 96, 3))
    return (light, dark) if random.random() < 0.5 else (dark, light)


def colours_of(label: int, random: np.random.Generator) -> Colours:
    """Return the colours of a plate with a hue for its class, and of its digit in black."""
    saturation, value = 0.6 + 0.4 * random.random(), 0.7 + 0.3 * random.random()
    ground = colorsys.hsv_to_rgb(label / VOC_CLASSES, saturation, value)
    return colour(np.round(255 * np.asarray(ground))), (0, 0, 0)


def paste_plate(scene: Image.Image, digit: Image.Image, position: Place, colours: Colours) -> None:
    """Draw a rounded square with a digit in it."""
    left, top, side = position
    ground, ink = colours
    box = (left, top, left + side - 1, top + side - 1)
    ImageDraw.Draw(scene).rounded_rectangle(box, radius=side // 6, fill=ground)
    inner = side * 4 // 5
    offset = (side - inner) // 2
    scene.paste(ink, (left + offset, top + offset), digit.resize((inner, inner)))


def crop(
    pictures: Sequence[Image.Image], size: tuple[int, int], random: np.random.Generator
) -> Image.Image:
    """Return a part of a photograph, taken at up to twice its size in pixels."""
    picture = pictures[int(random.integers(len(pictures)))]
    scale = 1 + random.random()
    width, height = (int(side * scale) for side in size)
    left = int(random.integers(0, picture.width - width + 1))
    top = int(random.integers(0, picture.height - height + 1))
    return picture.resize(size, box=(left, top, left + width, top + height))


def contrasting(scene: Image.Image, random: np.random.Generator) -> tuple[int, int, int]:
    """Return a colour that is darker than a light scene, and lighter than a dark one."""
    mean = np.asarray(scene, dtype=np.float64).mean()
    low, high = (0, 80) if mean > 127 else (176, 256)
    return colour(random.integers(low, high, 3))


def colour(values: npt.NDArray[Any]) -> tuple[int, int, int]:
    """Return red, green and blue as Pillow takes them."""
    red, green, blue = (int(value) for value in values)
    return red, green, blue


def voc_palette() -> list[int]:
    """Return the colours of VOC's masks: the bits of a number go to red, green, blue in turn."""
    values = []
    for number in range(256):
        for channel in range(3):
            bits = [(number >> (3 * bit_number + channel)) & 1 for bit_number in range(3)]
            values.append(sum(bit << (7 - bit_number) for bit_number, bit in enumerate(bits)))
    return values


Writer = Callable[[Path, Digits, Digits, np.random.Generator, float], None]
WRITERS: dict[str, Writer] = {
    "mnist": write_mnist,
    "cifar10": write_cifar10,
    "imagenet": write_imagenet,
    "voc": write_voc,
}

if __name__ == "__main__":
    sys.exit(main())
