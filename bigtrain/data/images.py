"""MNIST and CIFAR-10, and code that image sources share: transforms, downloads.

torchvision is imported when a source is opened. Random transforms draw from torch's generator,
which `loader.SeededSamples` seeds for each sample.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from bigtrain.data.image_files import check_labels, packed_or_plain, read_cifar_batch, read_idx
from bigtrain.data.source import Data, NonNegativeCount, PositiveCount, Samples, existing_folder
from bigtrain.errors import ConfigError
from bigtrain.losses.tasks import ClassificationTask

_CIFAR_BINARY = "cifar-10-batches-bin"
_CIFAR_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_CIFAR_TEST = "test_batch"
IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class PixelSamples:
    """Images in memory, transformed at each read.

    Args:
        images: (number, channels, height, width), uint8.
        labels: (number,), int64.
        transform: makes an input from an image (channels, height, width).
    """

    def __init__(self, images: Tensor, labels: Tensor, transform: Callable[[Tensor], Any]) -> None:
        self.images = images
        self.labels = labels
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.images[index]), int(self.labels[index])


class LabelledImages(Dataset[tuple[Tensor, Tensor]]):
    """Images with labels, whose labels become 0-dim int64 tensors.

    Args:
        images: pairs of an image and a label, a Python integer.
        deterministic: whether reading draws no random numbers; see `Samples`.
    """

    def __init__(self, images: Samples, deterministic: bool) -> None:
        self.images = images
        self.deterministic = deterministic

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        try:
            image, target = self.images[index]
        except (OSError, SyntaxError) as error:  # raised by Pillow for a truncated file
            named = getattr(self.images, "samples", None)
            where = f"image {index}" if named is None else named[index][0]
            raise ConfigError(
                f"data.path: {where} cannot be read: {error}. Get this file again, or remove it."
            ) from error
        return image, torch.tensor(target)


def need_torchvision(name: str) -> None:
    """Check that torchvision is installed, without importing it.

    Args:
        name: the data source, for the message.

    Raises:
        ConfigError: torchvision is missing; the message has the command that installs it.
    """
    if importlib.util.find_spec("torchvision") is None:
        raise ConfigError(
            f"data.name={name} needs torchvision, which is not installed. "
            "Run: pip install torchvision"
        )


def final_transforms(mean: Sequence[float], deviation: Sequence[float]) -> list[Any]:
    """Return the last transforms of all sources: to normalised float32 (channels, height, width).

    Args:
        mean: the mean of each channel, of pixels in [0, 1].
        deviation: the standard deviation of each channel.
    """
    from torchvision.transforms import v2

    return [
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(list(mean), list(deviation)),
        v2.ToPureTensor(),
    ]


@contextlib.contextmanager
def explain_data_errors(name: str, path: Path) -> Iterator[None]:
    """Replace errors about files inside a `with` block by one line that names `data.path`.

    Args:
        name: the data source, for the message.
        path: the file or folder, for the message.

    Raises:
        ConfigError: torchvision raised an error about a missing or damaged file.
    """
    try:
        yield
    except ConfigError:  # it is a ValueError, but already names its file
        raise
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"data.path: {path} cannot be read as {name}: {first}. Check the files there, or "
            "remove them and get the data set again."
        ) from error


def download(name: str, path: Path, fetch: Callable[[Path], object]) -> None:
    """Download into a temporary folder, then move the files one by one to `path`.

    Archives that are already in `path` are not downloaded again.

    Args:
        name: the name of the source.
        path: `data.path`, created if it does not exist.
        fetch: downloads into the folder that it is called with.

    Raises:
        ConfigError: the download failed; the message has the reason.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path, prefix=".download-") as temporary:
            for archive in path.glob("*.tar*"):
                with contextlib.suppress(OSError):  # a file system without hard links
                    os.link(archive, Path(temporary) / archive.name)
            fetch(Path(temporary))
            # In reverse order of names: VOC's lists, which show that VOC is complete, come after
            # its images and masks.
            for file in sorted(Path(temporary).rglob("*"), reverse=True):
                if file.is_file():
                    target = path / file.relative_to(temporary)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(file, target)
    except (OSError, RuntimeError) as error:  # urllib's URLError is an OSError
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"data.args.download: {name} could not be fetched into {path}: {lines[-1]}. "
            f"Put the files there by hand and set data.args.download=false."
        ) from error


@dataclass(frozen=True, kw_only=True)
class _Downloadable:
    """The base of sources that torchvision can download into one folder."""

    path: Path | None = None
    download: bool = False
    """Fetch the data set into `data.path` if it is not there."""
    augment: bool = True
    """Crop at random in training, and flip if a flipped image keeps its class."""

    @property
    def _name(self) -> str:
        raise NotImplementedError

    def _missing(self, root: Path) -> list[Path]:
        raise NotImplementedError

    def _dataset(self, root: Path, train: bool, **options: Any) -> Any:
        """Return torchvision's data set, which can download."""
        raise NotImplementedError

    def _samples(self, root: Path, train: bool, transform: Any) -> Samples:
        raise NotImplementedError

    def check(self) -> None:
        """Refuse if torchvision is missing, or if files are missing and `download` is not set."""
        need_torchvision(self._name)
        if self.path is None or not self.download:
            self._root()

    def prepare(self) -> None:
        """Download the files if they are missing and `download` is set."""
        self.check()
        if self.path is not None and self.download and self._missing(self.path):
            root = self.path
            download(self._name, root, lambda folder: self._dataset(folder, True, download=True))

    def _root(self) -> Path:
        needs = (
            f"{self._name} needs a folder. Set data.path=FOLDER, or set data.args.download=true."
        )
        root = existing_folder(self.path, needs)
        missing = self._missing(root)
        if missing:
            raise ConfigError(
                f"data.path: {root} holds no {self._name}, {missing[0]} does not exist. "
                "Give the folder that has it, or set data.args.download=true."
            )
        return root

    def _open(self, train: list[Any], validation: list[Any]) -> Data:
        from torchvision.transforms import v2

        root = self._root()
        with explain_data_errors(self._name, root):
            first = self._samples(root, True, v2.Compose(train))
            second = self._samples(root, False, v2.Compose(validation))
        return Data(
            train=LabelledImages(first, deterministic=not self.augment),
            validation=LabelledImages(second, deterministic=True),
            task=ClassificationTask(10),
            description=f"{self._name}: {len(first)} images, {len(second)} held out",
        )


@dataclass(frozen=True, kw_only=True)
class MnistSource(_Downloadable):
    """`mnist`: images (1, size, size) in ten classes.

    The IDX files, gzipped or not, are in torchvision's download folder, `data.path`/MNIST/raw, or
    in `data.path` itself.
    """

    size: PositiveCount = 28
    """Pixels on a side after resizing; LeNet takes 32."""
    crop_padding: NonNegativeCount = 2
    """Pixels added on each side before the random crop."""

    _KINDS: ClassVar[tuple[str, str]] = ("images-idx3-ubyte", "labels-idx1-ubyte")

    @property
    def _name(self) -> str:
        return "mnist"

    def _missing(self, root: Path) -> list[Path]:
        raw = self._raw(root)
        files = [raw / f"{part}-{kind}" for part in ("train", "t10k") for kind in self._KINDS]
        return [file for file in files if packed_or_plain(file) is None]

    def _raw(self, root: Path) -> Path:
        """Return `root` if only it has the files; otherwise torchvision's download folder."""
        inner = root / "MNIST" / "raw"
        return inner if inner.is_dir() or not self._holds_files(root) else root

    def _holds_files(self, root: Path) -> bool:
        return packed_or_plain(root / f"train-{self._KINDS[0]}") is not None

    def _dataset(self, root: Path, train: bool, **options: Any) -> Any:
        from torchvision.datasets import MNIST

        return MNIST(root, train=train, **options)

    def _samples(self, root: Path, train: bool, transform: Any) -> Samples:
        part = "train" if train else "t10k"
        files = [packed_or_plain(self._raw(root) / f"{part}-{kind}") for kind in self._KINDS]
        image_file, label_file = (file for file in files if file is not None)
        images, labels = read_idx(image_file, 3), read_idx(label_file, 1).long()
        check_labels(label_file, labels, 10)
        if len(images) != len(labels):
            raise ConfigError(
                f"data.path: {image_file} has {len(images)} images, and {label_file.name} has "
                f"{len(labels)} labels. Get both files again."
            )
        return PixelSamples(images[:, None], labels, transform)

    def open(self, *, seed: int, sequence_length: int | None) -> Data:
        """Return the 60000 images for training, and the 10000 test images for validation."""
        del seed, sequence_length
        self.prepare()
        from torchvision.transforms import v2

        resize = [] if self.size == 28 else [v2.Resize((self.size, self.size))]
        crop = [v2.RandomCrop(self.size, padding=self.crop_padding)] if self.augment else []
        last = final_transforms((0.1307,), (0.3081,))
        return self._open([*resize, *crop, *last], [*resize, *last])


@dataclass(frozen=True, kw_only=True)
class Cifar10Source(_Downloadable):
    """`cifar10`: images (3, size, size) in ten classes.

    The binary version (`data.path`/cifar-10-batches-bin) is read without pickle. The Python version
    (cifar-10-batches-py) consists of pickles. torchvision reads it, and first verifies the
    checksums of the published files.
    """

    size: PositiveCount = 32
    """Pixels on a side after resizing."""
    crop_padding: NonNegativeCount = 4
    """Pixels added on each side before the random crop."""

    @property
    def _name(self) -> str:
        return "cifar10"

    def _missing(self, root: Path) -> list[Path]:
        binary = root / _CIFAR_BINARY
        if binary.is_dir():
            files = [binary / f"{name}.bin" for name in (*_CIFAR_TRAIN, _CIFAR_TEST)]
        else:
            names = (*_CIFAR_TRAIN, _CIFAR_TEST, "batches.meta")
            files = [root / "cifar-10-batches-py" / name for name in names]
        return [file for file in files if not file.is_file()]

    def _dataset(self, root: Path, train: bool, **options: Any) -> Any:
        from torchvision.datasets import CIFAR10

        return CIFAR10(root, train=train, **options)

    def _samples(self, root: Path, train: bool, transform: Any) -> Samples:
        binary = root / _CIFAR_BINARY
        if not binary.is_dir():
            samples: Samples = self._dataset(root, train, transform=transform)
            return samples
        names = _CIFAR_TRAIN if train else (_CIFAR_TEST,)
        batches = [read_cifar_batch(binary / f"{name}.bin") for name in names]
        images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        return PixelSamples(images, labels, transform)

    def open(self, *, seed: int, sequence_length: int | None) -> Data:
        """Return the 50000 images for training, and the 10000 test images for validation."""
        del seed, sequence_length
        self.prepare()
        from torchvision.transforms import v2

        resize = [] if self.size == 32 else [v2.Resize((self.size, self.size))]
        crop = [v2.RandomCrop(self.size, padding=self.crop_padding), v2.RandomHorizontalFlip()]
        last = final_transforms((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
        return self._open([*resize, *(crop if self.augment else []), *last], [*resize, *last])
