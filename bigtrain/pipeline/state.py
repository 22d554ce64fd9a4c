"""The whole model's state on every rank of a pipeline, of which each holds its own stages'."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bigtrain.ranks.context import RunContext
from bigtrain.tensors.source import TensorSource

StageTensors = Mapping[str, tuple[int, TensorSource]]
"""By name: the stage, which says where in the order it stands, and the tensor."""


def gather_state(context: RunContext, own_tensors: StageTensors) -> dict[str, TensorSource]:
    """What all ranks of a pipeline hold, in the order of stages. Collective over the pp axis.

    A name that several ranks have is read where its first stage is.

    Args:
        context: this rank, and the pp group.
        own_tensors: what this rank holds.

    Returns:
        Sources whose `read` is collective: the owner's values are sent to all ranks.
    """
    descriptions = [(stage, name, s.dtype, s.shape) for name, (stage, s) in own_tensors.items()]
    if context.pp_group is None or context.pp_size == 1:
        return {name: source for name, (_, source) in own_tensors.items()}
    descriptions_of = gather_over_stages(context, descriptions)
    rows = [
        (row[0], owner, position)
        for owner, part in enumerate(descriptions_of)
        for position, row in enumerate(part)
    ]
    result: dict[str, TensorSource] = {}
    for _, owner, position in sorted(rows):
        _, name, dtype, shape = descriptions_of[owner][position]
        if name not in result:
            source = own_tensors[name][1] if owner == context.pp_rank else None
            read = _reader(context, owner, source, dtype, shape)
            result[name] = TensorSource(dtype, shape, read)
    return result


def gather_names(context: RunContext, mine: Iterable[str]) -> set[str]:
    """The names that any rank of the pipeline has. Collective over the pp axis."""
    return {name for part in gather_over_stages(context, list(mine)) for name in part}


def gather_over_stages(context: RunContext, value: Any) -> list[Any]:
    """Every rank's object in the order of the pp axis, on every rank of the pipeline."""
    if context.pp_group is None:
        return [value]
    everyone: list[Any] = [None] * context.pp_size
    dist.all_gather_object(everyone, value, group=context.pp_group)
    return everyone


def _reader(
    context: RunContext,
    owner: int,
    source: TensorSource | None,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> Callable[[], Tensor]:
    def read() -> Tensor:
        if source is not None:
            # The owner's replicas read together; then each sends down its own pipeline.
            value = source.read().detach().to(context.device).contiguous()
        else:
            value = torch.empty(shape, dtype=dtype, device=context.device)
        if value.numel():  # as bytes: not every backend knows every type
            flat = value.reshape(-1).view(torch.uint8)
            dist.broadcast(flat, src=context.ranks_of("pp")[owner], group=context.pp_group)
        return value

    return read
