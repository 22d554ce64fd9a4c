"""Bytes of parameters, gradients, buffers and optimizer state, counted by storage."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bigtrain.memory.timeline import Breakdown


def state_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, late: Collection[str] = ()
) -> Breakdown:
    """Return the bytes of parameters, gradients, buffers and optimizer state, by kind.

    Args:
        model: the profiled model.
        optimizer: the optimizer of the model after a step, so that its state exists; None to count
            no optimizer state.
        late: names of parameters that are frozen here and may be trained later in the run. They
            count as trained parameters, without gradients.
    """
    slots = optimizer.state.values() if optimizer else ()
    trained = storage_bytes(p for p in model.parameters() if p.requires_grad)
    not_frozen = storage_bytes(
        p for name, p in model.named_parameters() if p.requires_grad or name in late
    )
    return Breakdown(
        parameters=not_frozen,
        frozen=storage_bytes(model.parameters()) - not_frozen,
        gradients=trained,
        buffers=storage_bytes(model.buffers()),
        optimizer=storage_bytes(value for state in slots for value in state.values()),
    )


def optimizer_state_figures(
    model: nn.Module, optimizer: torch.optim.Optimizer, widths: Mapping[str, float]
) -> dict[str, Any]:
    """Return the number of trained elements, and the sizes of the optimizer's state.

    Args:
        model: the profiled model.
        optimizer: the optimizer of the model after a step.
        widths: by the key of a tensor of the state, its bytes for each element of a bf16 parameter
            that is updated in fp32. If a technique shards the state, it updates parameters in fp32;
            see `state_bytes_by_slot`.

    Returns:
        The fields `trained_elements`, `state_slots` and `state_scalars` of `Profile`, by name.
    """
    elements, state_numbers, scalars = 0, 0.0, 0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        elements += parameter.numel()
        is_bf16 = parameter.dtype == torch.bfloat16
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
                width = value.element_size() / parameter.element_size()
                state_numbers += value.numel() * (widths.get(key, 4.0) / 4 if is_bf16 else width)
            elif isinstance(value, Tensor):
                scalars += value.numel() * value.element_size()
    slots = state_numbers / elements if elements else 0.0
    return {"trained_elements": elements, "state_slots": slots, "state_scalars": scalars}


def updated_shapes(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Return `Profile.updated`; empty if the optimizer updates copies of the parameters."""
    groups = {id(p): n for n, g in enumerate(optimizer.param_groups) for p in g["params"]}
    trained = [p for p in model.parameters() if p.requires_grad]
    if not all(id(p) in groups for p in trained):
        return ()
    return tuple((tuple(p.shape), groups[id(p)]) for p in trained)


def storage_bytes(leaves: Iterable[object]) -> int:
    """Return the bytes of the distinct storages of the tensors among `leaves`.

    A tensor on the meta device counts like a real one.
    """
    storages: dict[int, int] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            storage = leaf.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
