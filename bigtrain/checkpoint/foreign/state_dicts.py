"""State dicts of torch (.pt, .pth, .bin), safetensors files, and folders in the Hub's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from bigtrain.checkpoint.foreign.state import ForeignState, unwrapped_names
from bigtrain.checkpoint.foreign.torch_files import read_torch_file
from bigtrain.checkpoint.foreign.trainers import TrainerState, read_trainer
from bigtrain.checkpoint.read import FileTensor, tensors_of_file
from bigtrain.errors import CheckpointError, ConfigError
from bigtrain.files.parse import read_json_object
from bigtrain.files.regular import is_regular, open_regular, read_text
from bigtrain.tensors.shards import Extent, StateTensor, whole_extents

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar", ".checkpoint", ".safetensors")
"""Suffixes of state dicts, for damaged files; other files are recognized by their content."""
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80\x02"
_LARGEST_HEADER = 100_000_000
_FOLDER_FILES = (
    *("model.safetensors.index.json", "model.safetensors"),
    *("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
"""Files of the Hub's folders; the first that exists is read."""


def is_state_dict(path: Path) -> bool:
    """Whether `open_state_dict` reads this file or folder, judged by its content or its name."""
    if path.is_dir():
        return any((path / name).is_file() for name in _FOLDER_FILES)
    if not path.is_file():
        return False
    return path.suffix in _SUFFIXES or _is_torch(path) or _is_safetensors(path)


def _beginning(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read(16)


def _is_torch(path: Path) -> bool:
    """Whether `torch.save` may have written the file, in its ZIP format or in its older format."""
    return _beginning(path).startswith((_ZIP, _PICKLE))


def _is_safetensors(path: Path) -> bool:
    begin = _beginning(path)
    length = int.from_bytes(begin[:8], "little")
    return begin[8:9] == b"{" and 2 <= length <= _LARGEST_HEADER


def open_state_dict(
    path: Path, *, key: str | None = None, strip: str | None = None
) -> ForeignState:
    """Return the state in a file, or in a folder in the Hub's layout; tensors are read on demand.

    Args:
        path: the path of the file or folder.
        key: the model's key in a trainer's file with several models.
        strip: a prefix that the caller will remove; None to detect Lightning's.

    Raises:
        CheckpointError: a file is missing, not readable, or holds more than data.
        ConfigError: there is no such key.
    """
    if path.is_file():
        state = _tensors(path, key, strip)
        kind = f"state dict in {path.name}"
    else:
        first = next(name for name in _FOLDER_FILES if (path / name).is_file())
        state = TrainerState({})
        for name in _files_of(path / first):
            in_file = _tensors(path / name, key, strip)
            state.model |= in_file.model
            state.left_out += in_file.left_out
        kind = f"folder with {first}"
    if not state.model:
        raise CheckpointError(f"{path} has no named tensors of a model")
    config = path / "config.json"
    texts = {"config.json": read_text(config)} if is_regular(config) else {}
    notes = list(state.notes)
    if state.left_out:
        notes.append(f"Left out: {', '.join(sorted(set(state.left_out)))}.")
    return ForeignState(
        *(kind, state.model, state.optimizer, state.step, state.samples_seen, tuple(notes)),
        texts=texts,
    )


def _files_of(path: Path) -> list[str]:
    """Return the names of the files in an index, or the name of the single file itself."""
    if not path.name.endswith(".index.json"):
        return [path.name]
    try:
        places: Mapping[str, str] = read_json_object(path)["weight_map"]
        names = sorted(set(places.values()))
        if not all(isinstance(name, str) for name in names):
            raise ValueError("its weight_map has values that are not file names")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        reason = getattr(error, "reason", error)
        raise CheckpointError(f"{path} is not readable: {reason}") from None
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{path} names the file {name}, outside of its folder")
        if not (path.parent / name).is_file():
            raise CheckpointError(f"{path.parent / name} is missing: {path.name} names it")
    return names


def _tensors(path: Path, key: str | None, strip: str | None) -> TrainerState:
    """Describe one file's tensors, by names without prefixes of wrappers."""
    if _is_safetensors(path) or (path.suffix == ".safetensors" and not _is_torch(path)):
        if key is not None:
            raise ConfigError(
                f"convert: --key {key}: {path} is a safetensors file, which has only tensors. "
                "Leave --key out; --strip PREFIX takes those whose names begin with it."
            )
        tensors = {name: saved_state(tensor) for name, tensor in tensors_of_file(path).items()}
        names = unwrapped_names(tensors)
        return TrainerState({names[name]: tensor for name, tensor in tensors.items()})
    return read_trainer(read_torch_file(path), path, key, strip)


def saved_state(tensor: FileTensor, dtype: torch.dtype | None = None) -> StateTensor:
    """Return a tensor of a safetensors file in the form that a save takes.

    Args:
        tensor: the tensor in the file.
        dtype: the dtype in which floating-point numbers are saved; None for that of the tensor.
    """
    saved_dtype = tensor.dtype if dtype is None or not tensor.dtype.is_floating_point else dtype

    def read(extents: Sequence[Extent]) -> Tensor:
        return tensor.read(extents).to(saved_dtype)

    whole = whole_extents(tensor.shape)
    return StateTensor(saved_dtype, tensor.shape, whole, lambda: read(whole), read=read)
