"""Readers of published image files, with messages that say what is wrong with a file.

They read IDX (MNIST; the format is described at the end of LeCun's page
yann.lecun.com/exdb/mnist), the binary version of CIFAR-10 (cs.toronto.edu/~kriz/cifar.html) and
images, and check whether an image file is complete. Nothing here reads a pickle.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import math
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bigtrain.errors import ConfigError, UnreadableError
from bigtrain.files.regular import is_there, open_regular, read_bytes

_UNSIGNED_BYTE = 8
"""The data type code of an IDX file; all of MNIST's files have this one."""
_CIFAR_SHAPE = (3, 32, 32)
_CIFAR_RECORD = 1 + math.prod(_CIFAR_SHAPE)
_MOST_IDX = 256 << 20
"""Largest IDX file in bytes, unpacked: a small gzip file can expand to very many bytes."""
MOST_CHECKED = 10_000
"""Largest number of files checked before a run: all files of VOC, some files of ImageNet."""
_ENDS = (b"\xff\xd9", b"IEND\xaeB`\x82")
"""The last bytes of a complete JPEG, and of a complete PNG."""


def packed_or_plain(path: Path) -> Path | None:
    """Return the path, or the path with .gz added, whichever exists; None if neither exists."""
    return next((file for file in (path, Path(f"{path}.gz")) if is_there(file)), None)


def read_idx(path: Path, num_dims: int) -> Tensor:
    """Read an IDX file of unsigned bytes, gzipped if its name ends in .gz.

    Args:
        path: the file.
        num_dims: the number of dims that the header must have.

    Returns:
        A uint8 tensor of the shape in the header.

    Raises:
        ConfigError: the file cannot be read, its magic number is wrong, or its size is not the one
            in its header.
    """
    try:
        with open_regular(path) as packed:
            opened = gzip.GzipFile(fileobj=packed) if path.suffix == ".gz" else packed
            content = opened.read(_MOST_IDX + 1)
    except UnreadableError as error:
        raise _damaged(path, error.reason) from None
    except (OSError, EOFError, zlib.error) as error:  # EOFError: the file was cut off
        raise _damaged(path, str(error)) from error
    if len(content) > _MOST_IDX:
        raise _damaged(
            path, f"it holds more than {_MOST_IDX} bytes, and MNIST's largest 47,040,016"
        )
    expected = _UNSIGNED_BYTE << 8 | num_dims
    header = 4 * (1 + num_dims)
    magic = int.from_bytes(content[:4], "big")
    if magic != expected:
        raise _damaged(path, f"its magic number is 0x{magic:08x}, needed is 0x{expected:08x}")
    if len(content) < header:
        raise _damaged(path, f"it has {len(content)} bytes, its header alone needs {header}")
    shape = struct.unpack(f">{num_dims}I", content[4:header])
    needed = header + math.prod(shape)
    if len(content) != needed:
        raise _damaged(
            path, f"it has {len(content)} bytes, and {needed} are needed for {list(shape)}"
        )
    numbers = np.frombuffer(content, dtype=np.uint8, offset=header)
    return torch.from_numpy(numbers.reshape(shape).copy())


def read_cifar_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Read a file of CIFAR-10's binary version.

    Returns:
        The images (number, 3, 32, 32), uint8, and the labels (number,), int64.

    Raises:
        ConfigError: the file cannot be read or is empty, its size is not a multiple of 3073 bytes,
            or a label is not below 10.
    """
    try:
        content = np.frombuffer(bytearray(read_bytes(path)), dtype=np.uint8)
    except UnreadableError as error:
        raise _damaged(path, error.reason) from None
    if not len(content) or len(content) % _CIFAR_RECORD:
        raise _damaged(
            path, f"it has {len(content)} bytes, needed is a multiple of {_CIFAR_RECORD}"
        )
    records = torch.from_numpy(content).reshape(-1, _CIFAR_RECORD)
    labels = records[:, 0].long()
    check_labels(path, labels, 10)
    return records[:, 1:].reshape(-1, *_CIFAR_SHAPE), labels


def check_labels(path: Path, labels: Tensor, num_classes: int) -> None:
    """Check that every label is the number of a class.

    Args:
        path: the file of the labels, for the message.
        labels: (number,), not negative.
        num_classes: the number of classes.

    Raises:
        ConfigError: a label is not below `num_classes`.
    """
    most = int(labels.max()) if len(labels) else 0
    if most >= num_classes:
        raise _damaged(path, f"it has the label {most}, all must be below {num_classes}")


def check_complete(files: Sequence[Path], most: int) -> None:
    """Check that image files are not truncated.

    The header of each file is read. Only files that do not end as a complete JPEG or PNG are
    decoded.

    Args:
        files: files in any format that Pillow reads.
        most: the largest number of files to check, which are spread evenly over `files`: checking a
            million files would take minutes.

    Raises:
        ConfigError: a file is truncated or no image; the message names the first such file.
    """
    number = min(len(files), most)
    for index in range(number):
        path = files[index * len(files) // number]
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(-min(8, size), 2)
                is_complete = file.read().endswith(_ENDS)
        except UnreadableError as error:
            raise _damaged(path, error.reason) from None
        except OSError as error:
            raise _damaged(path, str(error.strerror)) from error
        if is_complete:
            image_header(path)
        else:
            decode_image(path)


@contextlib.contextmanager
def opened_image(path: Path) -> Iterator[Any]:
    """Open an image with Pillow for a `with` block, and read only its header.

    Raises:
        ConfigError: the file does not exist, is no image, or has more pixels than Pillow accepts;
            or the image cannot be decoded inside the block.
    """
    from PIL import Image

    try:
        with open_regular(path) as raw, io.BufferedReader(raw) as file, Image.open(file) as image:
            yield image
    except UnreadableError as error:
        raise _damaged(path, error.reason) from None
    except Image.DecompressionBombError as error:
        raise _damaged(path, str(error).partition(",")[0]) from None
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error) as error:
        if isinstance(error, ConfigError):
            raise
        raise _damaged(path, str(error) or type(error).__name__) from error


def decode_image(path: Path) -> None:
    """Decode an image file, to find damage; the pixels are discarded.

    Raises:
        ConfigError: the image cannot be decoded.
    """
    with opened_image(path) as image:
        image.load()


def read_colours(path: str | Path) -> Any:
    """Return an image in RGB, whatever its mode: the loader for torchvision's ImageFolder.

    Raises:
        ConfigError: the image cannot be read.
    """
    with opened_image(Path(path)) as image:
        return image.convert("RGB")


def image_header(path: Path) -> tuple[tuple[int, int], str]:
    """Return (width, height) in pixels and Pillow's mode, without decoding the pixels.

    Raises:
        ConfigError: the file does not exist, or is no image.
    """
    with opened_image(path) as image:
        return image.size, image.mode


def _damaged(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"data.path: {path} cannot be read: {reason.rstrip('.')}. Get this file again, or remove "
        "it where it does not belong to the data set."
    )
