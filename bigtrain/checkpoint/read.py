"""Reading one checkpoint: each rank reads only the bytes that it needs."""

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
    """Offset of the tensor's first byte in the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, extents: Sequence[Extent]) -> Tensor:
        """Read the elements of these extents; see `SavedTensor.read`.

        Raises:
            CheckpointError: the file is too short, or cannot be read.
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
        # Nearby short runs are read as one block, and the bytes between them are dropped.
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
        data, position = memoryview(target.numpy()), self.offset + begin  # type: ignore[arg-type]
        while len(data):
            count = os.preadv(descriptor, [data], position)
            if count <= 0:
                raise OSError("the file was cut off")
            data, position = data[count:], position + count


def read_beside_bytes(extents: Iterable[Extent]) -> int:
    """Return the size of the block that is needed to read extents of bytes.

    Separate runs are read together with the bytes between them, one block at a time. The size is 0
    if each extent is a single run.
    """
    spans = ((e.count - 1) * e.pitch + e.length for e in extents if e.count > 1)
    return min(PIECE_BYTES, max(spans, default=0))


class Checkpoint:
    """One checkpoint, opened for reading.

    Args:
        path: the folder `step-N`.
        verify: whether to compare every piece of every file with its hash. If several ranks open
            the same checkpoint, each can instead check a share of it with `find_damage`.

    Raises:
        CheckpointError: a file is missing or damaged, or the format is newer than this version.
        ConfigError: `path` is not a path.
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
        damage = self.manifest.find_damage() if verify else self._small_damage()
        if damage is not None:
            raise DamagedCheckpointError(damage)
        self.meta = _read_state(path / STATE)
        self._tensors: dict[str, FileTensor] | None = None

    def _small_damage(self) -> str | None:
        """Describe the damage of the small files that every rank reads as a whole."""
        return self.manifest.damage(STATE) if STATE in self.manifest.files else None

    def find_damage(self, share: tuple[int, int]) -> str | None:
        """Describe the damage in a share of the pieces; see `Manifest.find_damage`."""
        return self.manifest.find_damage(share)

    @property
    def tensors(self) -> Mapping[str, FileTensor]:
        """The tensors by name, `model.NAME` and `optimizer.NAME.KEY`; values are read on demand.

        Raises:
            CheckpointError: a file of tensors is damaged.
        """
        if self._tensors is None:
            self._tensors = {}
            for name in self.manifest.tensor_files:
                part = name.partition("-" if self.manifest.format > 1 else ".")[0]
                try:
                    tensors_in_file = tensors_of_file(self.path / name)
                except CheckpointError as error:
                    self._tensors = None
                    raise DamagedCheckpointError(f"{error}.") from None
                for key, tensor in tensors_in_file.items():
                    self._tensors[f"{part}.{key}"] = tensor
        return self._tensors

    @property
    def names(self) -> list[str]:
        """Names of the tensors: `model.NAME` and `optimizer.NAME.KEY`."""
        return list(self.tensors)

    def read(self, name: str) -> Tensor:
        """Read one whole tensor to the CPU, by a name of `names`."""
        return read_whole(self.tensors[name])

    def model_state(self) -> dict[str, Tensor]:
        """Read the model's parameters and buffers to the CPU, as a state dict."""
        model_names = (name for name in self.names if name.startswith("model."))
        return {name.removeprefix("model."): self.read(name) for name in model_names}


def _read_state(path: Path) -> dict[str, Any]:
    """Read the checkpoint's `state.json`.

    Raises:
        DamagedCheckpointError: the file cannot be read, or lacks the step or the position.
    """
    try:
        state = read_json_object(path)
    except UnreadableError as error:
        raise DamagedCheckpointError(f"{path} is not readable: {error.reason}.") from None
    for key in ("step", "samples_seen"):
        if type(state.get(key)) is not int or state[key] < 0:
            raise DamagedCheckpointError(f"{path} is damaged: it has no whole number {key}.")
    return state


def tensors_of_file(path: Path) -> dict[str, FileTensor]:
    """Return the tensors of a safetensors file by name.

    Raises:
        ForeignFileError: the file is not safetensors; see `read_tensor_header`.
    """
    try:
        header = read_tensor_header(path, _ITEMSIZES)
    except UnreadableError as error:
        raise ForeignFileError(f"{path} is no safetensors file: {error.reason}") from None
    return {
        name: FileTensor(path, entry.begin, _DTYPE_OF[entry.code], entry.shape)
        for name, entry in header.items()
    }
