"""What is taken over from a checkpoint of another library."""

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
"""Under which of a trainer's keys the model is."""


@dataclass(frozen=True)
class ForeignState:
    """The state of a training run, of whichever library; tensors are read when they are asked for.

    `model` is by the model's plain names, `optimizer` by `NAME.KEY`.
    """

    kind: str
    """What it was, in words."""
    model: Mapping[str, StateTensor]
    optimizer: Mapping[str, StateTensor] = field(default_factory=dict)
    step: int | None = None
    """Optimizer steps done; None where it is not said."""
    samples_seen: int | None = None
    notes: tuple[str, ...] = ()
    """What was left out, as sentences."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """What else of it goes to the new checkpoint's `state.json`."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Other files by name, such as `config.json`."""


def untried(library: str, version: object, tried: str) -> tuple[str, ...]:
    """A note where a version wrote a checkpoint whose files were never read here.

    Args:
        library: its name.
        version: as the files say; None where they do not.
        tried: the one whose files the tests read.
    """
    if version == tried:
        return ()
    wrote = f"{library} {version} wrote it" if version else f"No version of {library} is named"
    return (f"{wrote}, and files of {tried} alone were tried: compare some values.",)


def unwrapped_names(names: Iterable[str]) -> dict[str, str]:
    """The names of a model's tensors without those of what was wrapped around it.

    Raises:
        CheckpointError: two become one.
    """
    found = {name: name for name in names}
    for wrapper in ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        found = {name: plain.replace(wrapper, "") for name, plain in found.items()}
    while found and all(plain.startswith("module.") for plain in found.values()):  # DDP's
        found = {name: plain.removeprefix("module.") for name, plain in found.items()}
    first: dict[str, str] = {}
    for name, plain in found.items():
        if plain in first:
            raise CheckpointError(
                f"{first[plain]} and {name} are both {plain}: two models in one checkpoint. "
                "Save the state dict of one of them."
            )
        first[plain] = name
    return found


def joined_tensor(
    shape: Sequence[int], parts: Sequence[tuple[TorchTensor, int, int]]
) -> StateTensor:
    """A tensor whose row-major elements are stretches of others, one after the other.

    Args:
        shape: of the whole.
        parts: (flat tensor, start, stop) of each stretch, all of one type.

    Raises:
        CheckpointError: they are too few or too many.
    """
    there = sum(stop - start for _, start, stop in parts)
    if there != math.prod(shape):
        raise CheckpointError(
            f"a tensor of shape {tuple(shape)} needs {math.prod(shape)} elements, {there} are there"
        )
    dtype = parts[0][0].dtype if parts else torch.float32

    def values() -> Tensor:
        return torch.cat([tensor.part(start, stop) for tensor, start, stop in parts])

    return StateTensor(dtype, tuple(shape), whole_extents(shape), values)


def number_tensor(number: float) -> StateTensor:
    """A step count, as torch's optimizers keep it."""
    return StateTensor(torch.float32, (), whole_extents(()), lambda: torch.tensor([float(number)]))
