"""Folders of torch.distributed.checkpoint: `.metadata` and `*.distcp`.

`.metadata` is a pickle. The unpickler here replaces each of the few classes that torch writes there
by a class without behaviour. It refuses any other name before looking it up. A `.distcp` file is a
sequence of `torch.save` files, one per piece.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bigtrain.checkpoint.foreign.state import MODEL_KEYS, ForeignState, untried, unwrapped_names
from bigtrain.checkpoint.foreign.torch_files import Inert, TorchTensor, read_torch_file
from bigtrain.errors import CheckpointError
from bigtrain.files.regular import read_bytes
from bigtrain.tensors.shards import Extent, StateTensor, box_extents

_METADATA = ".metadata"
_TRIED = "1.0.0"
"""Metadata version of the folders that the tests read; torch 2.15 wrote them."""
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
        *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
}
_Path = tuple[str | int, ...]


class _DataUnpickler(pickle.Unpickler):
    """Creates only stand-ins without behaviour, tensor sizes, tensor types and collections."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return Inert
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"{module}.{name}")


def is_dcp_folder(path: Path) -> bool:
    """Whether torch.distributed.checkpoint wrote this folder."""
    return (path / _METADATA).is_file()


def open_dcp_folder(folder: Path) -> ForeignState:
    """Return the state in a folder of torch.distributed.checkpoint; tensors are read on demand.

    A tensor at state, PARAMETER, KEY belongs to the optimizer. Other tensors belong to the model,
    or only those below a key of `MODEL_KEYS` if there are any.

    Raises:
        CheckpointError: the folder is not readable, or holds more than data.
    """
    metadata = _read_metadata(folder / _METADATA)
    paths: Mapping[str, _Path] = metadata.get("planner_data") or {}
    storage: dict[tuple[str, tuple[int, ...]], Mapping[str, Any]] = {}
    for index, location in metadata["storage_data"].items():
        key = index.state["fqn"], tuple(index.state.get("offset") or ())
        storage[key] = location.state
    model: dict[_Path, StateTensor] = {}
    slots: dict[tuple[str, str], StateTensor] = {}
    numbers: dict[str, int] = {}
    for name, entry in metadata["state_dict_metadata"].items():
        path = tuple(paths.get(name, (name,)))
        if not isinstance(entry.state, Mapping) or "chunks" not in entry.state:
            numbers |= _number(folder, name, path, storage)
            continue
        tensor = _chunked(folder, name, entry.state, storage)
        if len(path) >= 3 and path[-3] == "state":
            slots[str(path[-2]), str(path[-1])] = tensor
        else:
            model[path] = tensor
    named, left_out = _of_model(folder, model)
    numbered = {key for key in slots if key[0].isdigit() and key[0] not in named}
    slots = {key: tensor for key, tensor in slots.items() if key not in numbered}
    names = unwrapped_names(named)
    of_slots = {**unwrapped_names(name for name, _ in slots if name not in names), **names}
    notes = [f"Left out: {', '.join(left_out)}."] if left_out else []
    if numbered:
        notes.append(
            f"{len(numbered)} tensors of the optimizer's state were left out: they have numbers "
            "instead of names, where torch.distributed.checkpoint.state_dict.get_state_dict gives "
            "names."
        )
    return ForeignState(
        "torch.distributed.checkpoint",
        {names[name]: tensor for name, tensor in named.items()},
        {f"{of_slots[name]}.{key}": tensor for (name, key), tensor in slots.items()},
        numbers.get("step", numbers.get("global_step")),
        numbers.get("samples_seen"),
        (*notes, *untried("Format", metadata.get("version"), _TRIED)),
    )


def _of_model(
    folder: Path, tensors: Mapping[_Path, StateTensor]
) -> tuple[dict[str, StateTensor], list[str]]:
    """Return the model's tensors by name, and the top keys of the other tensors."""
    marked = {path for path in tensors if {*path[:-1]} & {*MODEL_KEYS}} or {*tensors}
    named: dict[str, StateTensor] = {}
    for path, tensor in tensors.items():
        name = str(path[-1])
        if path in marked and name in named:
            raise CheckpointError(
                f"{folder} has two tensors of the name {name}: two models in one checkpoint. "
                "Save the state dict of one of them."
            )
        if path in marked:
            named[name] = tensor
    return named, sorted({str(path[0]) for path in tensors if path not in marked})


def _read_metadata(path: Path) -> Mapping[str, Any]:
    try:
        metadata = _DataUnpickler(io.BytesIO(read_bytes(path, most=1 << 32))).load()
        state = metadata.state
        if not isinstance(state, Mapping) or not {"state_dict_metadata", "storage_data"} <= {
            *state
        }:
            raise ValueError("it has no list of tensors")
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} names {error}, which torch does not write there. Reading it could run code, "
            "so it was not read."
        ) from None
    except Exception as error:  # a damaged pickle can raise any exception
        raise CheckpointError(f"{path} is not readable: {error}") from None
    return state


def _number(
    folder: Path, name: str, path: _Path, storage: Mapping[Any, Mapping[str, Any]]
) -> dict[str, int]:
    """Return a stored count of steps or samples, by its key; empty if the entry is no count."""
    if path[-1] not in ("step", "global_step", "samples_seen") or len(path) > 2:
        return {}
    location = storage[name, ()]
    try:
        value = read_torch_file(_file(folder, location), location["offset"], location["length"])
    except CheckpointError:  # an instance of another library's class: the count is unknown
        return {}
    return {str(path[-1]): int(value)} if isinstance(value, int | float) else {}


def _chunked(
    folder: Path,
    name: str,
    entry: Mapping[str, Any],
    storage: Mapping[Any, Mapping[str, Any]],
) -> StateTensor:
    """Return a tensor that is stored as several boxes, each in a file."""
    shape, dtype = tuple(entry["size"]), entry["properties"].state[0]
    extents: list[Extent] = []
    reads: list[Callable[[], Tensor]] = []
    for chunk in entry["chunks"]:
        offset, local = tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"])
        location = storage.get((name, offset)) or storage.get((name, ()))
        if location is None:
            raise CheckpointError(f"{folder}: no file is named for {name} at {offset}")
        if math.prod(local):
            extents += box_extents(shape, offset, local)
            reads.append(_piece_reader(folder, name, location, local))
    return StateTensor(dtype, shape, tuple(extents), lambda: torch.cat([r() for r in reads]))


def _piece_reader(
    folder: Path, name: str, location: Mapping[str, Any], shape: Sequence[int]
) -> Callable[[], Tensor]:
    file = _file(folder, location)
    if location.get("transform_descriptors"):
        raise CheckpointError(
            f"{file} is compressed, and compressed files are not supported. "
            "Save it without compression."
        )

    def read() -> Tensor:
        tensor = read_torch_file(file, location["offset"], location["length"])
        if not isinstance(tensor, TorchTensor) or tensor.shape != tuple(shape):
            raise CheckpointError(f"{file} does not hold {name} of shape {tuple(shape)}")
        return tensor.values()

    return read


def _file(folder: Path, location: Mapping[str, Any]) -> Path:
    """Return the path of a file in the folder. Names that lead out of the folder are refused."""
    relative = Path(str(location["relative_path"]))
    if relative.is_absolute() or ".." in relative.parts:
        raise CheckpointError(f"{folder / _METADATA} names the file {relative}, outside of it")
    return folder / relative
