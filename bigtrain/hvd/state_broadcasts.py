"""Broadcast weights and optimizer state, for example after one rank has read a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bigtrain.errors import ConfigError
from bigtrain.hvd.gathers import (
    allgather_object,
    broadcast_,
    broadcast_async_,
    broadcast_object,
)
from bigtrain.hvd.process_sets import ProcessSet, global_process_set
from bigtrain.hvd.session import rank, session, size
from bigtrain.tensors.tree import map_tensors, tree_tensors

_ALL = global_process_set


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any],
    root_rank: int = 0,
    process_set: ProcessSet = _ALL,
) -> None:
    """Overwrite weights with those of a rank. Collective.

    Args:
        params: `model.state_dict()`, `model.named_parameters()` or `model.parameters()`, or a list
            of their entries; the same number on every rank. Entries of a dict are sorted by name.
        root_rank: the sender, numbered among all ranks of the run.
        process_set: the ranks that take part.

    Raises:
        ConfigError: an entry is neither a tensor nor a pair of name and tensor, or names or shapes
            differ between ranks.
    """
    handles = []
    with torch.no_grad():
        for name, tensor in _named(params):
            handles.append(broadcast_async_(tensor, root_rank, name, process_set))
        for handle in handles:
            handle.result()


def _named(params: Any) -> list[tuple[str | None, Tensor]]:
    """Return the tensors with their names, in the same order on all ranks."""
    if isinstance(params, Mapping):
        return [_pair(item) for item in sorted(params.items())]
    if isinstance(params, (Tensor, nn.Module)) or not isinstance(params, Iterable):
        raise ConfigError(
            f"hvd.broadcast_parameters: {type(params).__name__} is no dict or list of parameters. "
            "Give model.state_dict(), or list(model.named_parameters())."
        )
    return [_pair(item) for item in params]


def _pair(item: Any) -> tuple[str | None, Tensor]:
    # A tensor of two rows unpacks like a pair, so the type decides and not the length.
    if isinstance(item, Tensor):
        return None, item
    is_pair = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)
    if is_pair and isinstance(item[1], Tensor):
        return str(item[0]), item[1]
    fault = (
        f"{item[0]!r} is {type(item[1]).__name__}" if is_pair else f"{type(item).__name__} found"
    )
    raise ConfigError(
        f"hvd.broadcast_parameters: {fault}, and tensors or pairs of a name and a tensor are "
        "needed. Leave it out, and use hvd.broadcast_object for what is no tensor."
    )


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: nn.Module | None = None,  # noqa: ARG001 - Horovod looks for sparse parameters in it
) -> None:
    """Overwrite an optimizer's state and options with those of a rank. Collective.

    Tensors are sent, and also other values, such as learning rates and None.

    Args:
        optimizer: an optimizer with the same parameters on every rank. The optimizers of receivers
            may have no state yet.
        root_rank: the sender, numbered among all ranks of the run.
        model: not used.

    Raises:
        ConfigError: the parameter groups differ between ranks.
    """
    if size() == 1:
        return
    mine = optimizer.state_dict()
    here = session.opened().device
    frame = map_tensors(mine, lambda t: _Frame(tuple(t.shape), t.dtype, t.device.type == "cpu"))
    frame = broadcast_object(frame if rank() == root_rank else None, root_rank, "optimizer")
    lengths = allgather_object([len(group["params"]) for group in mine["param_groups"]])
    for other_rank, group_sizes in enumerate(lengths):
        if group_sizes != lengths[root_rank]:
            raise ConfigError(
                f"hvd.broadcast_optimizer_state: rank {root_rank} has groups of "
                f"{lengths[root_rank]} parameters, and rank {other_rank} of {group_sizes}. Make "
                "the same optimizer on every rank."
            )
    if rank() != root_rank:
        mine = _filled(frame, here)
    for tensor in tree_tensors(mine):
        broadcast_(tensor, root_rank, "optimizer")
    if rank() != root_rank:
        optimizer.load_state_dict(mine)


@dataclass(frozen=True)
class _Frame:
    """The shape and type of a tensor, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool


def _filled(frame: Any, device: torch.device) -> Any:
    """Return the structure with an empty tensor for each frame."""
    if isinstance(frame, _Frame):
        tensor_device = torch.device("cpu") if frame.on_host else device
        return torch.empty(frame.shape, dtype=frame.dtype, device=tensor_device)
    if isinstance(frame, dict):
        return {key: _filled(value, device) for key, value in frame.items()}
    if isinstance(frame, (list, tuple)):
        return type(frame)(_filled(value, device) for value in frame)
    return frame
