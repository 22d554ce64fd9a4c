"""The state that is read from another library's checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bigtrain.checkpoint.foreign.torch_files import TorchTensor
from bigtrain.errors import CheckpointError
from bigtrain.tensors.shards import StateTensor, whole_extents

MODEL_KEYS = ("state_dict", "model", "model_state_dict", "module", "weights")
"""Keys under which trainers store the model."""


@dataclass(frozen=True)
class ForeignState:
    """The state of a training run of any library. Tensors are read on demand.

    `model` has the model's plain names, `optimizer` has names `NAME.KEY`.
    """

    kind: str
    """Description of the source, for messages."""
    model: Mapping[str, StateTensor]
    optimizer: Mapping[str, StateTensor] = field(default_factory=dict)
    step: int | None = None
    """Optimizer steps done; None if the source does not record them."""
    samples_seen: int | None = None
    """Global samples seen; None if the source does not record them."""
    notes: tuple[str, ...] = ()
    """Sentences about the parts that were left out."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Further entries for the new checkpoint's `state.json`."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Contents of further files by name, such as `config.json`."""


def untried(library: str, version: object, tried: str) -> tuple[str, ...]:
    """Return a note if the library's version differs from the tested version; else empty.

    Args:
        library: name of the library that wrote the checkpoint.
        version: the version that the files record; None if they record none.
        tried: the version whose files the tests read.
    """
    if version == tried:
        return ()
    wrote = f"{library} {version} wrote it" if version else f"No version of {library} is named"
    return (f"{wrote}, and only files of {tried} are tested: compare some values.",)


def unwrapped_names(names: Iterable[str]) -> dict[str, str]:
    """Map the names of a model's tensors to names without the prefixes of DDP, FSDP and others.

    Raises:
        CheckpointError: two names are equal without the prefixes.
    """
    plain_names = {name: name for name in names}
    for wrapper in ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        plain_names = {name: plain.replace(wrapper, "") for name, plain in plain_names.items()}
    # DDP adds its prefix to every name.
    while plain_names and all(plain.startswith("module.") for plain in plain_names.values()):
        plain_names = {name: plain.removeprefix("module.") for name, plain in plain_names.items()}
    first: dict[str, str] = {}
    for name, plain in plain_names.items():
        if plain in first:
            raise CheckpointError(
                f"{first[plain]} and {name} are both {plain}: two models in one checkpoint. "
                "Save the state dict of one of them."
            )
        first[plain] = name
    return plain_names


def joined_tensor(
    shape: Sequence[int], parts: Sequence[tuple[TorchTensor, int, int]]
) -> StateTensor:
    """Return a tensor whose row-major elements are concatenated slices of flat tensors.

    Args:
        shape: the shape of the whole tensor.
        parts: (flat tensor, start, stop) of each slice, all of one type.

    Raises:
        CheckpointError: the slices have too few or too many elements.
    """
    present = sum(stop - start for _, start, stop in parts)
    if present != math.prod(shape):
        raise CheckpointError(
            f"a tensor of shape {tuple(shape)} needs {math.prod(shape)} elements, and has {present}"
        )
    dtype = parts[0][0].dtype if parts else torch.float32

    def values() -> Tensor:
        return torch.cat([tensor.part(start, stop) for tensor, start, stop in parts])

    return StateTensor(dtype, tuple(shape), whole_extents(shape), values)


def number_tensor(number: float) -> StateTensor:
    """Return a step count as a 0-dim fp32 tensor, the form in which torch's optimizers store it."""
    return StateTensor(torch.float32, (), whole_extents(()), lambda: torch.tensor([float(number)]))
