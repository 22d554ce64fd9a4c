"""Images in one folder per class: ImageNet, and other data sets."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigtrain.data.image_files import MOST_CHECKED, check_complete, read_colours
from bigtrain.data.images import (
    IMAGENET_DEVIATION,
    IMAGENET_MEAN,
    LabelledImages,
    explain_data_errors,
    final_transforms,
    need_torchvision,
)
from bigtrain.data.sampler import permute_indices
from bigtrain.data.source import (
    Data,
    PositiveCount,
    SampleFraction,
    Samples,
    SampleSubset,
    existing_folder,
)
from bigtrain.errors import ConfigError
from bigtrain.files.regular import names_in
from bigtrain.losses.tasks import ClassificationTask

_VALIDATION_FOLDERS = ("val", "valid", "validation")
_SPLIT_SEED = 0


def _classes(folder: Path) -> list[str]:
    """Return the names of a folder's class folders.

    Raises:
        ConfigError: the folder has no folders.
    """
    class_names = [n for n in names_in(folder) if os.path.isdir(folder / n)]
    if not class_names:
        raise ConfigError(
            f"data.path: {folder} has no folders, and one per class is needed. "
            f"Put images as {folder}/CLASS/NAME.png."
        )
    return class_names


def _check_images(listed: Any) -> None:
    """Refuse a class without an image, and image files that are truncated.

    Args:
        listed: torchvision's ImageFolder.

    Raises:
        ConfigError: a class or a file is refused; the message names it.
    """
    counts = Counter(listed.targets)
    for index, name in enumerate(listed.classes):
        if not counts[index]:
            raise ConfigError(
                f"data.path: {Path(listed.root) / name} has no image, and a class needs at least "
                f"1. Put images there ({', '.join(listed.extensions)}), or remove the folder."
            )
    check_complete([Path(file) for file, _ in listed.samples], MOST_CHECKED)


def _transforms(size: int, augment: bool) -> tuple[Any, Any]:
    """Return the transforms for training and for validation; both make inputs (3, size, size)."""
    from torchvision.transforms import v2

    last = final_transforms(IMAGENET_MEAN, IMAGENET_DEVIATION)
    # Without augmentation an input is the middle 7/8 of the shorter side, which is customary: 224
    # of 256 pixels.
    centre = [v2.Resize(round(size * 8 / 7)), v2.CenterCrop(size)]
    crop = [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()] if augment else centre
    return v2.Compose([*crop, *last]), v2.Compose([*centre, *last])


@dataclass(frozen=True, kw_only=True)
class ImageFolderSource:
    """`image_folder`: images in folders `data.path`/CLASS, or in train/CLASS and val/CLASS.

    The folders train and val are in `data.path`; val may also be named valid or validation. Without
    val, a fraction of the images is held out.
    """

    path: Path | None = None
    size: PositiveCount = 224
    """Pixels on a side of an input."""
    augment: bool = True
    """Crop and flip at random in training."""
    validation_fraction: SampleFraction = 0.1
    """Fraction of the images that is held out for validation if there is no folder val."""

    @property
    def _name(self) -> str:
        return "image_folder"

    def _folders(self) -> tuple[Path, Path | None]:
        needs = "give the folder with one folder of images per class."
        root = existing_folder(self.path, needs)
        validation_folders = [
            root / name for name in _VALIDATION_FOLDERS if os.path.isdir(root / name)
        ]
        train = root / "train"
        # A folder "train" without folders may be a class, of vehicles.
        if os.path.isdir(train) and any(os.path.isdir(train / n) for n in names_in(train)):
            return root / "train", validation_folders[0] if validation_folders else None
        return root, None

    def check(self) -> None:
        """Refuse if torchvision, the folder or its classes are missing.

        Raises:
            ConfigError: one of them is missing, or training and validation have different classes.
        """
        need_torchvision(self._name)
        train, validation = self._folders()
        classes = _classes(train)
        if validation is not None and _classes(validation) != classes:
            others = _classes(validation)
            odd = sorted(set(classes) ^ set(others))[0]
            raise ConfigError(
                f"data.path: {train} has {len(classes)} classes and {validation} {len(others)}; "
                f"{odd!r} is only in one of them. Make the class folders the same in both."
            )

    def prepare(self) -> None:
        """Only check: the images are read from their folders, and no file is made."""
        self.check()

    def open(self, *, seed: int, sequence_length: int | None) -> Data:
        """Return the images; the choice of those for validation does not depend on the seed."""
        del seed, sequence_length
        self.check()
        from torchvision.datasets import ImageFolder

        folder, validation_folder = self._folders()
        augmented, unaugmented = _transforms(self.size, self.augment)
        with explain_data_errors(self._name, folder):
            images = ImageFolder(folder, transform=augmented, allow_empty=True, loader=read_colours)
            second = ImageFolder(
                validation_folder or folder,
                transform=unaugmented,
                allow_empty=True,
                loader=read_colours,
            )
        for listed in (images, second) if validation_folder is not None else (images,):
            _check_images(listed)
        train: Samples = LabelledImages(images, deterministic=not self.augment)
        validation: Samples | None = LabelledImages(second, deterministic=True)
        if validation_folder is None:
            train, validation = self._held_out(train, LabelledImages(second, deterministic=True))
        return Data(
            train=train,
            validation=validation,
            task=ClassificationTask(len(images.classes)),
            description=f"{self._name}: {len(train)} images of {len(images.classes)} classes, "
            f"{len(validation) if validation is not None else 0} held out",
        )

    def _held_out(self, train: Samples, unaugmented: Samples) -> tuple[Samples, Samples | None]:
        total = len(train)
        number = round(total * self.validation_fraction)
        if not number:
            return train, None
        if number == total:
            raise ConfigError(
                f"data.args.validation_fraction={self.validation_fraction} holds out all {total} "
                "images. Set data.args.validation_fraction=0 or add images."
            )
        order = permute_indices(range(total), total, _SPLIT_SEED).tolist()
        return SampleSubset(train, sorted(order[number:])), SampleSubset(
            unaugmented, sorted(order[:number])
        )


@dataclass(frozen=True, kw_only=True)
class ImageNetSource:
    """`imagenet`: images in folders `data.path`/train/CLASS and `data.path`/val/CLASS."""

    path: Path | None = None
    size: PositiveCount = 224
    """Pixels on a side of an input."""
    augment: bool = True
    """Crop and flip at random in training."""

    def check(self) -> None:
        """Refuse if train or val is missing, or if their classes differ."""
        needs = "imagenet needs the folder that holds train and val."
        root = existing_folder(self.path, needs)
        for name in ("train", "val"):
            if not os.path.isdir(root / name):
                raise ConfigError(
                    f"data.path: {root / name} does not exist, and imagenet needs train/CLASS "
                    "and val/CLASS. Give the folder that has both, or use "
                    "data.name=image_folder."
                )
            _classes(root / name)
        self._images().check()

    def prepare(self) -> None:
        """Only check: the images are read from their folders, and no file is made."""
        self.check()

    def open(self, *, seed: int, sequence_length: int | None) -> Data:
        """Return the images of train and of val."""
        self.check()
        return self._images().open(seed=seed, sequence_length=sequence_length)

    def _images(self) -> ImageFolderSource:
        return ImageFolderSource(path=self.path, size=self.size, augment=self.augment)
