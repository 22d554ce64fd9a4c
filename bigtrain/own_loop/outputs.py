"""Share a model's outputs with all ranks of a pipeline, and refuse direct calls of a stage."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigtrain.errors import ConfigError
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.tree import map_tensors, tree_tensors
from bigtrain.tracing.call_hooks import is_watched


def share_outputs(outputs: Any, context: RunContext) -> Any:
    """Broadcast the outputs of the last stage to all ranks of its pipeline.

    Collective over the ranks of the pp axis.

    Args:
        outputs: the outputs on one rank of the pp axis; None on the other ranks.
        context: this rank's context.

    Returns:
        The outputs, with tensors on this rank's device; `outputs` itself without a pp axis.
    """
    if context.pp_size == 1:
        return outputs
    last_stage = context.all_gather_numbers(float(outputs is not None), "pp").index(1.0)
    source, group = context.ranks_of("pp")[last_stage], context.pp_group
    template: list[Any] = [None if outputs is None else map_tensors(outputs, _without_values)]
    host = torch.device("cpu")
    dist.broadcast_object_list(template, src=source, group=group, device=host)
    tensors = [tensor.contiguous() for tensor in tree_tensors(outputs)]
    if outputs is None:
        empty = tree_tensors(template[0])
        tensors = [torch.empty(t.shape, dtype=t.dtype, device=context.device) for t in empty]
    for tensor in tensors:
        dist.broadcast(tensor, src=source, group=group)
    received = iter(tensors)
    return outputs if outputs is not None else map_tensors(template[0], lambda _: next(received))


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def refuse_calls(model: nn.Module) -> Any:
    """Add a hook that refuses direct calls of a model of which this rank has one stage.

    Returns:
        The handle of the hook.
    """
    model_id = id(model)

    def refuse(module: nn.Module, _: Any) -> None:
        if id(module) == model_id and not is_watched():
            raise ConfigError(
                "engine.model(...): this rank has one stage of the model only. Call "
                "engine.predict(inputs) on all ranks; engine.save(folder) writes the whole model."
            )

    return model.register_forward_pre_hook(refuse)
