"""Pascal VOC: a class for every pixel, through torchvision."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import Dataset

from bigtrain.data.images import (
    IMAGENET_DEVIATION,
    IMAGENET_MEAN,
    download,
    explain_data_errors,
    final_transforms,
    need_torchvision,
)
from bigtrain.data.source import Data, PositiveCount, Samples, existing_folder
from bigtrain.errors import ConfigError
from bigtrain.losses.tasks import SegmentationTask

NUM_CLASSES = 21
Year = Literal["2007", "2008", "2009", "2010", "2011", "2012"]


class SegmentedImages(Dataset[tuple[Tensor, Tensor]]):
    """Images with masks, cut and flipped together.

    Inputs (3, size, size), targets (size, size) int64 with 255 for what is not to be judged.
    """

    def __init__(self, images: Samples, size: int, augment: bool) -> None:
        from torchvision.transforms import v2

        self.images = images
        self.deterministic = not augment
        # Masks are resized to the nearest pixel: v2 knows a Mask from an image.
        self._both = v2.Compose(
            [v2.RandomResizedCrop(size, scale=(0.5, 1.0)), v2.RandomHorizontalFlip()]
            if augment
            else [v2.Resize(size), v2.CenterCrop(size)]
        )
        self._image = v2.Compose(final_transforms(IMAGENET_MEAN, IMAGENET_DEVIATION))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        from torchvision import tv_tensors
        from torchvision.transforms.v2 import functional

        picture, palette = self.images[index]
        mask = tv_tensors.Mask(functional.pil_to_tensor(palette)[0])
        image, mask = self._both(tv_tensors.Image(functional.pil_to_tensor(picture)), mask)
        target: Tensor = mask.as_subclass(Tensor).long()
        return self._image(image), target


@dataclass(frozen=True, kw_only=True)
class VocSource:
    """`voc`: `data.path`/VOCdevkit/VOC<year>, 21 classes, 255 ignored."""

    path: Path | None = None
    year: Year = "2012"
    size: PositiveCount = 256
    """Pixels on a side of an input."""
    augment: bool = True
    """Crop and flip at random in training."""
    download: bool = False
    """Fetch the data set into `data.path` if it is not there."""

    def _list(self, root: Path) -> Path:
        inner = ("TrainVal",) if self.year == "2011" else ()
        folder = root.joinpath(*inner, "VOCdevkit", f"VOC{self.year}")
        return folder / "ImageSets" / "Segmentation" / "train.txt"

    def check(self) -> None:
        """Refuse where torchvision or the files are missing and no download is asked for."""
        need_torchvision("voc")
        if self.path is None or not self.download:
            self._root()

    def _root(self) -> Path:
        root = existing_folder(
            self.path,
            "voc needs the folder of VOCdevkit. Set data.path=FOLDER, or set "
            "data.args.download=true.",
        )
        if not self._list(root).is_file():
            raise ConfigError(
                f"data.path: {root} holds no voc {self.year}, {self._list(root)} does not exist. "
                "Give the folder that has VOCdevkit, or set data.args.download=true."
            )
        return root

    def prepare(self) -> None:
        """Download, if that was asked for and the files are not there."""
        self.check()
        if self.path is not None and self.download and not self._list(self.path).is_file():
            root = self.path
            download("voc", root, lambda beside: self._dataset(beside, "train", download=True))

    def _dataset(self, root: Path, part: str, **options: Any) -> Any:
        from torchvision.datasets import VOCSegmentation

        return VOCSegmentation(root, year=self.year, image_set=part, **options)

    def open(self, *, seed: int, sequence_length: int | None) -> Data:
        """The train and the val list of the year."""
        del seed, sequence_length
        self.prepare()
        root = self._root()
        with explain_data_errors("voc", root):
            first, second = self._dataset(root, "train"), self._dataset(root, "val")
        return Data(
            train=SegmentedImages(first, self.size, self.augment),
            validation=SegmentedImages(second, self.size, augment=False),
            task=SegmentationTask(NUM_CLASSES),
            description=f"voc {self.year}: {len(first)} images of {self.size} x {self.size}, "
            f"{len(second)} held out",
        )
