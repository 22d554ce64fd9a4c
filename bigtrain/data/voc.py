"""Pascal VOC: a class for every pixel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import Dataset

from bigtrain.data.image_files import MOST_CHECKED, check_complete, image_header, opened_image
from bigtrain.data.images import (
    IMAGENET_DEVIATION,
    IMAGENET_MEAN,
    download,
    explain_data_errors,
    final_transforms,
    need_torchvision,
)
from bigtrain.data.source import Data, PositiveCount, PositiveFactor, existing_folder
from bigtrain.errors import ConfigError, as_word
from bigtrain.files.regular import is_there, read_text
from bigtrain.losses.tasks import SegmentationTask

NUM_CLASSES = 21
IGNORED = 255
"""The class of ignored pixels in a mask, such as the borders of objects."""
Year = Literal["2007", "2008", "2009", "2010", "2011", "2012"]


_FILL_IMAGE = [round(255 * mean) for mean in IMAGENET_MEAN]
"""The colour of padding: the mean colour, which is 0 after normalisation."""


class SegmentedImages(Dataset[tuple[Tensor, Tensor]]):
    """Images with masks, which are cropped and flipped together.

    Inputs are (3, size, size) float32, and targets (size, size) int64. Ignored pixels are 255 in
    the targets: those that the mask marks, and the padding of images that are smaller than `size`.

    In training an image is scaled so that its longer side is half to twice `size` (or as `scale`
    says) and cropped to a random square (Chen et al. 2017, arXiv 1706.05587, section 4.1). In
    validation the whole image is used, and scaled down only if it is larger than `size`.

    Args:
        files: pairs of an image and its mask.
        size: pixels on a side.
        augment: whether to scale, crop and flip at random.
        scale: range of the longer side in training, as multiples of `size`.
    """

    def __init__(
        self,
        files: Sequence[tuple[Path, Path]],
        size: int,
        augment: bool,
        scale: tuple[float, float] = (0.5, 2.0),
    ) -> None:
        from torchvision import tv_tensors
        from torchvision.transforms import v2

        self.files = files
        self.size = size
        self.deterministic = not augment
        fill: dict[Any, Any] = {tv_tensors.Image: _FILL_IMAGE, tv_tensors.Mask: IGNORED}
        cut = v2.RandomCrop(size, pad_if_needed=True, fill=fill)
        jitter = v2.ScaleJitter((size, size), scale_range=scale)
        # v2 resizes a tv_tensors.Mask by the nearest pixel, so classes are not mixed.
        self._random = v2.Compose([jitter, cut, v2.RandomHorizontalFlip()])
        self._fill = fill
        self._image = v2.Compose(final_transforms(IMAGENET_MEAN, IMAGENET_DEVIATION))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        from torchvision import tv_tensors
        from torchvision.transforms.v2 import functional

        image_file, mask_file = self.files[index]
        with explain_data_errors("voc", image_file), opened_image(image_file) as picture:
            image = tv_tensors.Image(functional.pil_to_tensor(picture.convert("RGB")))
        with explain_data_errors("voc", mask_file), opened_image(mask_file) as palette:
            mask = tv_tensors.Mask(functional.pil_to_tensor(palette)[0])
        _check_classes(mask_file, mask)
        image, mask = self._padded(image, mask) if self.deterministic else self._random(image, mask)
        target: Tensor = mask.as_subclass(Tensor).long()
        return self._image(image), target

    def _padded(self, image: Any, mask: Any) -> tuple[Any, Any]:
        """Return the whole image and mask in the upper left of a square."""
        from torchvision.transforms import v2
        from torchvision.transforms.v2 import functional

        longer = max(image.shape[-2:])
        if longer > self.size:
            sides = [max(1, round(side * self.size / longer)) for side in image.shape[-2:]]
            image, mask = v2.Resize(sides)(image, mask)
        height, width = image.shape[-2:]
        padding = [0, 0, self.size - width, self.size - height]
        padded = [functional.pad(part, padding, self._fill[type(part)]) for part in (image, mask)]
        return padded[0], padded[1]


def _check_classes(mask_file: Path, mask: Tensor) -> None:
    odd = mask[(mask >= NUM_CLASSES) & (mask != IGNORED)]
    if len(odd):
        raise ConfigError(
            f"data.path: {mask_file} has the class {int(odd[0])}, and voc has 0 to "
            f"{NUM_CLASSES - 1}, and {IGNORED} for ignored pixels. Correct this mask."
        )


def _check_pairs(files: Sequence[tuple[Path, Path]]) -> None:
    """Refuse a mask that is missing, has another size than its image, or has no classes as pixels.

    Raises:
        ConfigError: a file is refused; the message names it.
    """
    for image_file, mask_file in files:
        image_size, _ = image_header(image_file)
        mask_size, mode = image_header(mask_file)
        if image_size != mask_size:
            raise ConfigError(
                f"data.path: {mask_file} has {mask_size[0]} x {mask_size[1]} pixels, and its image "
                f"{image_file} {image_size[0]} x {image_size[1]}. Get both files again."
            )
        if mode not in ("P", "L"):
            raise ConfigError(
                f"data.path: {mask_file} has pixels of mode {mode}, needed are palette numbers "
                "(P) or grey values (L) that are classes. Get the file again as VOC publishes it."
            )
    check_complete([file for pair in files for file in pair], MOST_CHECKED)


@dataclass(frozen=True, kw_only=True)
class VocSource:
    """`voc`: images and masks in `data.path`/VOCdevkit/VOC<year>, of 21 classes; 255 is ignored."""

    path: Path | None = None
    year: Year = "2012"
    size: PositiveCount = 256
    """Pixels on a side of an input."""
    augment: bool = True
    """Scale, crop and flip at random in training."""
    scale: tuple[PositiveFactor, PositiveFactor] = (0.5, 2.0)
    """Range of an image's longer side in training, as multiples of `size`."""
    download: bool = False
    """Fetch the data set into `data.path` if it is not there."""

    def _folder(self, root: Path) -> Path:
        inner = ("TrainVal",) if self.year == "2011" else ()
        return root.joinpath(*inner, "VOCdevkit", f"VOC{self.year}")

    def _lists(self, root: Path) -> list[Path]:
        lists = self._folder(root) / "ImageSets" / "Segmentation"
        return [lists / "train.txt", lists / "val.txt"]

    def _missing(self, root: Path) -> list[Path]:
        return [path for path in self._lists(root) if not is_there(path)]

    def check(self) -> None:
        """Refuse a wrong `scale`, and missing files if `download` is not set.

        Raises:
            ConfigError: `scale` is wrong, files are missing, or torchvision is missing.
        """
        need_torchvision("voc")
        if self.scale[0] > self.scale[1]:
            raise ConfigError(
                f"data.args.scale={list(self.scale)} needs the smaller number first. Use "
                f"{as_word('data.args.scale', self.scale[::-1])}."
            )
        if self.path is None or not self.download:
            self._root()

    def _root(self) -> Path:
        root = existing_folder(
            self.path,
            "voc needs the folder of VOCdevkit. Set data.path=FOLDER, or set "
            "data.args.download=true.",
        )
        missing = self._missing(root)
        if missing:
            raise ConfigError(
                f"data.path: {root} holds no voc {self.year}, {missing[0]} does not exist. "
                "Give the folder that has VOCdevkit, or set data.args.download=true."
            )
        return root

    def prepare(self) -> None:
        """Download the files if they are missing and `download` is set."""
        self.check()
        if self.path is not None and self.download and self._missing(self.path):
            root = self.path
            download("voc", root, self._fetch)

    def _fetch(self, root: Path) -> object:
        from torchvision.datasets import VOCSegmentation

        return VOCSegmentation(root, year=self.year, image_set="train", download=True)

    def _pairs(self, part: Path) -> list[tuple[Path, Path]]:
        """Return the files of the image and the mask of each name in a list file."""
        folder = part.parents[2]
        with explain_data_errors("voc", part):
            names = read_text(part).split()
        if not names:
            raise ConfigError(
                f"data.path: {part} names no image, at least 1 is needed. Get this file again."
            )
        files = [
            (folder / "JPEGImages" / f"{name}.jpg", folder / "SegmentationClass" / f"{name}.png")
            for name in names
        ]
        _check_pairs(files)
        return files

    def open(self, *, seed: int, sequence_length: int | None) -> Data:
        """Return the images of the year's lists: train for training, and val for validation."""
        del seed, sequence_length
        self.prepare()
        root = self._root()
        first, second = (self._pairs(part) for part in self._lists(root))
        return Data(
            train=SegmentedImages(first, self.size, self.augment, self.scale),
            validation=SegmentedImages(second, self.size, augment=False),
            task=SegmentationTask(NUM_CLASSES),
            description=f"voc {self.year}: {len(first)} images of {self.size} x {self.size}, "
            f"{len(second)} held out",
        )
