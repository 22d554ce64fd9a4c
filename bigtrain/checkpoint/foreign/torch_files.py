"""Files of `torch.save`: only their description is unpickled, and no code is run.

`torch.load(weights_only=True)` accepts only tensors, numbers, text and collections. Loading to the
meta device gives the offset of each tensor's values in the file. The values are read later.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from bigtrain.checkpoint.read import FileTensor
from bigtrain.errors import CheckpointError
from bigtrain.files.regular import open_regular
from bigtrain.tensors.shards import Extent, StateTensor, whole_extents

_HOLDERS = (
    *("deepspeed.", "argparse.Namespace", "pathlib."),
    *("numpy.core.multiarray.", "numpy._core.multiarray.", "numpy.ndarray", "numpy.dtype"),
)
"""Beginnings of the names of classes that trainers store next to tensors; see `Inert`."""


class Inert:
    """Replaces a class of another library: it stores its arguments, and runs none of their code."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


@dataclass(frozen=True)
class TorchTensor:
    """A tensor in a file of `torch.save`."""

    stored: FileTensor
    """A one-dimensional range of the file: the tensor's elements, and any others between them."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """The stride of each dim in elements, as of torch's tensors."""

    @property
    def dtype(self) -> torch.dtype:
        """The saved dtype."""
        return self.stored.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def values(self) -> Tensor:
        """Return all elements in row-major order, as a one-dimensional tensor on the CPU."""
        if self._is_in_order():
            return self.part(0, self.numel)
        flat = self.stored.read(whole_extents(self.stored.shape))
        return flat.as_strided(self.shape, self.stride).reshape(-1)

    def part(self, start: int, stop: int) -> Tensor:
        """Return the elements [start, stop) of `values`."""
        if not self._is_in_order():
            return self.values()[start:stop]
        return self.stored.read((Extent(start, stop - start),) if stop > start else ())

    def _is_in_order(self) -> bool:
        return torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous()

    def as_state(self) -> StateTensor:
        """Return the tensor in the form that a save takes."""
        read = self.stored.read if self._is_in_order() else None
        return StateTensor(
            self.dtype, self.shape, whole_extents(self.shape), self.values, read=read
        )


def _other_kind(path: Path, begins: bytes) -> str:
    """Return the message for a file that is not a complete ZIP, by its first bytes."""
    if begins == b"PK":
        return (
            f"{path} begins like a file of torch.save, but its end is missing or damaged. Copy it "
            "again"
        )
    if begins[:1] == b"\x80":
        return (
            f"{path} is not in the format of torch.save since torch 1.6. Save an older file "
            "again: python -c \"import torch; torch.save(torch.load('"
            f"{path}', weights_only=True), 'NEW.pt')\""
        )
    return f"{path} is not a file of torch.save, by its content. Give another, or copy it again"


def read_torch_file(path: Path, begin: int = 0, length: int | None = None) -> Any:
    """Return the object that `torch.save` wrote, with a `TorchTensor` for each tensor.

    Args:
        path: the path of the file.
        begin: offset of the first byte, if the file holds several saved objects.
        length: number of bytes; None for the rest of the file.

    Raises:
        CheckpointError: `torch.save` did not write the file, or it holds more than data.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size - begin if length is None else length
            window = io.BufferedReader(_Window(file, begin, size))
            if not zipfile.is_zipfile(window):
                window.seek(0)
                raise CheckpointError(_other_kind(path, window.read(2)))
            window.seek(0)
            strangers: list[str] = get_unsafe_globals_in_checkpoint(window)
            refused = [name for name in strangers if not name.startswith(_HOLDERS)]
            if refused:
                raise _code(path, ", ".join(sorted(refused)))
            window.seek(0)
            stand_ins: list[Any] = [(Inert, name) for name in strangers]
            with safe_globals(stand_ins) if stand_ins else nullcontext():
                value = torch.load(window, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        told = str(error)
        if "Unsupported operand" in told:  # `weights_only` supports only protocol 2
            told = "it was written with pickle's protocol 3 to 5, torch.save's own is 2"
        raise _code(path, told.splitlines()[-1]) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        told = str(getattr(error, "reason", error))
        first = (told.splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} is not readable: {first}") from None
    return _described(value, path, begin)


def _code(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} may hold more than tensors, numbers and text: {reason}. Reading it could run "
        "code, so it was not read. Save only the state dict where the file comes from: "
        "torch.save(model.state_dict(), 'NEW.pt')"
    )


def _described(stored: Any, path: Path, begin: int) -> Any:
    if isinstance(stored, Tensor):
        return _tensor(stored, path, begin)
    if isinstance(stored, Mapping):
        return {key: _described(value, path, begin) for key, value in stored.items()}
    if isinstance(stored, list | tuple) and not isinstance(stored, torch.Size):
        return [_described(value, path, begin) for value in stored]
    return stored


def _tensor(tensor: Tensor, path: Path, begin: int) -> TorchTensor:
    offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if type(tensor) not in (Tensor, torch.nn.Parameter) or offset is None or tensor.is_sparse:
        raise CheckpointError(
            f"{path} has a {type(tensor).__name__} ({tensor.layout}), which is not a plain tensor. "
            "Save full tensors: torch.distributed.checkpoint.state_dict.get_model_state_dict with "
            "full_state_dict=True"
        )
    shape, stride = tuple(tensor.shape), tensor.stride()
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    span = last + 1 if math.prod(shape) else 0
    offset_in_file = begin + int(offset) + int(tensor.storage_offset()) * tensor.element_size()
    return TorchTensor(FileTensor(path, offset_in_file, tensor.dtype, (span,)), shape, stride)


class _Window(io.RawIOBase):
    """A range of a file's bytes, as a file object."""

    def __init__(self, file: IO[bytes], begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._position = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        starts = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}
        self._position = max(0, starts[whence] + offset)
        return self._position

    def readinto(self, target: Any) -> int:
        wanted = memoryview(target)[: max(0, self._length - self._position)]
        count = os.preadv(self._file.fileno(), [wanted], self._begin + self._position)
        self._position += count
        return count
