"""One checkpoint, opened for reading: each rank reads the bytes that it wants, and no others."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bigtrain.checkpoint.folders import as_folder
from bigtrain.checkpoint.layout import DTYPE_CODES, PIECE_BYTES
from bigtrain.checkpoint.manifest import STATE, Manifest
from bigtrain.errors import (
    CheckpointError,
    DamagedCheckpointError,
    ForeignFileError,
    UnreadableError,
)
from bigtrain.files.parse import read_json_object
from bigtrain.files.regular import open_regular
from bigtrain.files.tensor_header import read_tensor_header
from bigtrain.tensors.shards import Extent, read_whole

_DTYPE_OF = {code: dtype for dtype, code in DTYPE_CODES.items()}
_ITEMSIZES = {code: dtype.itemsize for code, dtype in _DTYPE_OF.items()}


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a safetensors file; see `SavedTensor`."""

    path: Path
    offset: int
    """Of its first byte in the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of the whole."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, extents: Sequence[Extent]) -> Tensor:
        """See `SavedTensor.read`.

        Raises:
            CheckpointError: the file ends before, or cannot be read.
        """
        wanted = [extent.scaled(self.dtype.itemsize) for extent in extents]
        result = torch.empty(sum(extent.size for extent in wanted), dtype=torch.uint8)
        try:
            with open_regular(self.path) as file:
                position = 0
                for extent in wanted:
                    values = result[position : position + extent.size]
                    self._read_extent(file.fileno(), extent, values)
                    position += extent.size
        except (OSError, UnreadableError) as error:
            reason = error.reason if isinstance(error, UnreadableError) else error
            raise DamagedCheckpointError(f"{self.path} is not readable: {reason}.") from None
        return result.view(self.dtype)

    def _read_extent(self, descriptor: int, extent: Extent, target: Tensor) -> None:
        if extent.count == 1:
            self._fill(descriptor, extent.start, target)
            return
        # Short runs side by side: what lies between them is read, too, and left out.
        end = extent.start + (extent.count - 1) * extent.pitch + extent.length
        block = torch.empty(read_beside_bytes([extent]), dtype=torch.uint8)
        for begin in range(extent.start, end, PIECE_BYTES):
            filled = block[: end - begin]
            self._fill(descriptor, begin, filled)
            for position, part in extent.within(begin, begin + len(filled)):
                size, stride = (part.count, part.length), (part.pitch or part.length, 1)
                runs = filled.as_strided(size, stride, part.start - begin)
                target[position : position + part.size].view(size).copy_(runs)

    def _fill(self, descriptor: int, begin: int, target: Tensor) -> None:
        data, place = memoryview(target.numpy()), self.offset + begin  # type: ignore[arg-type]
        while len(data):
            count = os.preadv(descriptor, [data], place)
            if count <= 0:
                raise OSError("the file was cut off")
            data, place = data[count:], place + count


def read_beside_bytes(extents: Iterable[Extent]) -> int:
    """What reading of these bytes of a tensor takes beside them: a block with what lies between."""
    spans = ((e.count - 1) * e.pitch + e.length for e in extents if e.count > 1)
    return min(PIECE_BYTES, max(spans, default=0))


class Checkpoint:
    """One checkpoint, opened for reading.

    Args:
        path: the folder `step-N`.
        verify: compare every piece of every file with its hash. Where several ranks open one,
            each looks for damage in a share of it instead: `find_damage`.

    Raises:
        CheckpointError: a file is missing or damaged, or the format is a newer one.
    """

    def __init__(self, path: str | Path, *, verify: bool = True) -> None:
        path = as_folder(path, "Checkpoint")
        if not os.path.lexists(path):
            raise CheckpointError(
                f"there is no checkpoint {path}: no such folder. Give a folder step-N, or what "
                "bigtrain.newest_checkpoint(FOLDER) returns."
            )
        self.path = path
        self.manifest = Manifest.open(path)
        found = self.manifest.find_damage() if verify else self._small_damage()
        if found is not None:
            raise DamagedCheckpointError(found)
        self.meta = _read_state(path / STATE)
        self._tensors: dict[str, FileTensor] | None = None

    def _small_damage(self) -> str | None:
        """What is wrong with what every rank reads as a whole."""
        return self.manifest.damage(STATE) if STATE in self.manifest.files else None

    def find_damage(self, share: tuple[int, int]) -> str | None:
        """What is wrong with one's share of the pieces; see `Manifest.damage`."""
        return self.manifest.find_damage(share)

    @property
    def tensors(self) -> Mapping[str, FileTensor]:
        """By name: `model.NAME` and `optimizer.NAME.KEY`."""
        if self._tensors is None:
            self._tensors = {}
            for name in self.manifest.tensor_files:
                part = name.partition("-" if self.manifest.format > 1 else ".")[0]
                try:
                    found = tensors_of_file(self.path / name)
                except CheckpointError as error:
                    self._tensors = None
                    raise DamagedCheckpointError(f"{error}.") from None
                for key, tensor in found.items():
                    self._tensors[f"{part}.{key}"] = tensor
        return self._tensors

    @property
    def names(self) -> list[str]:
        """The tensors: `model.NAME` and `optimizer.NAME.KEY`."""
        return list(self.tensors)

    def read(self, name: str) -> Tensor:
        """One tensor, whole, on the CPU."""
        return read_whole(self.tensors[name])

    def model_state(self) -> dict[str, Tensor]:
        """The model's parameters and buffers under its own names, on the CPU: a state dict."""
        own = (name for name in self.names if name.startswith("model."))
        return {name.removeprefix("model."): self.read(name) for name in own}


def _read_state(path: Path) -> dict[str, Any]:
    """What a checkpoint says beside its tensors.

    Raises:
        DamagedCheckpointError: it is not what a run writes.
    """
    try:
        found = read_json_object(path)
    except UnreadableError as error:
        raise DamagedCheckpointError(f"{path} is not readable: {error.reason}.") from None
    for key in ("step", "samples_seen"):
        if type(found.get(key)) is not int or found[key] < 0:
            raise DamagedCheckpointError(f"{path} is damaged: it has no whole number {key}.")
    return found


def tensors_of_file(path: Path) -> dict[str, FileTensor]:
    """The tensors of a safetensors file by name.

    Raises:
        ForeignFileError: it is none; see `read_tensor_header`.
    """
    try:
        header = read_tensor_header(path, _ITEMSIZES)
    except UnreadableError as error:
        raise ForeignFileError(f"{path} is no safetensors file: {error.reason}") from None
    return {
        name: FileTensor(path, entry.begin, _DTYPE_OF[entry.code], entry.shape)
        for name, entry in header.items()
    }
