"""State dicts of torch (.pt, .pth, .bin), files of safetensors, and folders as the Hub has them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bigtrain.checkpoint.foreign.state import MODEL_KEYS, ForeignState, unwrapped_names
from bigtrain.checkpoint.foreign.torch_files import TorchTensor, read_torch_file
from bigtrain.checkpoint.read import FileTensor, tensors_of_file
from bigtrain.errors import CheckpointError
from bigtrain.files.parse import read_json_object
from bigtrain.files.regular import is_regular, read_text
from bigtrain.tensors.shards import StateTensor, read_whole, whole_extents

_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_FOLDER_FILES = (
    *("model.safetensors.index.json", "model.safetensors"),
    *("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
"""What the Hub's folders have, the first that is there."""


def is_state_dict(path: Path) -> bool:
    """Whether it is a file or folder that `open_state_dict` reads, by its name."""
    if path.is_dir():
        return any((path / name).is_file() for name in _FOLDER_FILES)
    return path.is_file() and path.suffix in (*_TORCH, ".safetensors")


def open_state_dict(path: Path) -> ForeignState:
    """Describe the weights in a file, or in a folder of files with an index.

    Raises:
        CheckpointError: a file is missing, not readable, or holds more than data.
    """
    if path.is_file():
        found, more = _tensors(path)
        kind = f"state dict in {path.name}"
    else:
        first = next(name for name in _FOLDER_FILES if (path / name).is_file())
        found, more = {}, []
        for name in _files_of(path / first):
            tensors, others = _tensors(path / name)
            found |= tensors
            more += others
        kind = f"folder with {first}"
    if not found:
        raise CheckpointError(f"{path} has no tensors of a model under names")
    names = unwrapped_names(found)
    config = path / "config.json"
    texts = {"config.json": read_text(config)} if is_regular(config) else {}
    notes = (f"Left out: {', '.join(sorted(set(more)))}.",) if more else ()
    model = {names[name]: tensor for name, tensor in found.items()}
    return ForeignState(kind, model, notes=notes, texts=texts)


def _files_of(path: Path) -> list[str]:
    """The files that an index names, or the one that there is."""
    if not path.name.endswith(".index.json"):
        return [path.name]
    try:
        places: Mapping[str, str] = read_json_object(path)["weight_map"]
        names = sorted(set(places.values()))
        if not all(isinstance(name, str) for name in names):
            raise ValueError("its weight_map has something else than names of files")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        reason = getattr(error, "reason", error)
        raise CheckpointError(f"{path} is not readable: {reason}") from None
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{path} names the file {name}, outside of its folder")
        if not (path.parent / name).is_file():
            raise CheckpointError(f"{path.parent / name} is missing: {path.name} names it")
    return names


def _tensors(path: Path) -> tuple[dict[str, StateTensor], list[str]]:
    """Of one file by name; and the names of what is no tensor of the model."""
    if path.suffix == ".safetensors":
        return {name: saved_state(tensor) for name, tensor in tensors_of_file(path).items()}, []
    found = read_torch_file(path)
    others: list[str] = []
    while isinstance(found, Mapping) and not any(map(_is_tensor, found.values())):
        key = next((k for k in MODEL_KEYS if isinstance(found.get(k), Mapping)), None)
        if key is None:
            break
        others += [str(k) for k in found if k != key]
        found = found[key]
    if not isinstance(found, Mapping):
        raise CheckpointError(
            f"{path} has a {type(found).__name__} in place of tensors by name. Save "
            "model.state_dict()"
        )
    others += [str(name) for name, value in found.items() if not _is_tensor(value)]
    return {str(n): t.as_state() for n, t in found.items() if _is_tensor(t)}, others


def _is_tensor(value: Any) -> bool:
    return isinstance(value, TorchTensor)


def saved_state(tensor: FileTensor, dtype: torch.dtype | None = None) -> StateTensor:
    """A tensor in a safetensors file, as what is to be saved.

    Args:
        tensor: in the file.
        dtype: what floating-point numbers are saved in; left out, their own.
    """
    kept = tensor.dtype if dtype is None or not tensor.dtype.is_floating_point else dtype

    def values() -> Tensor:
        return read_whole(tensor).reshape(-1).to(kept)

    return StateTensor(kept, tensor.shape, whole_extents(tensor.shape), values)
