"""Gather names and objects over the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from bigtrain.ranks.context import RunContext


def gather_names(context: RunContext, names: Iterable[str]) -> set[str]:
    """Return the union of the names of all ranks of the pipeline. Collective over the pp axis."""
    return {name for part in gather_over_stages(context, list(names)) for name in part}


def gather_over_stages(context: RunContext, value: Any) -> list[Any]:
    """Return the objects of all ranks of the pipeline, in rank order. Collective over pp.

    Args:
        context: the ranks.
        value: the object of this rank, which can be pickled.
    """
    if context.pp_group is None:
        return [value]
    gathered: list[Any] = [None] * context.pp_size
    dist.all_gather_object(gathered, value, group=context.pp_group)
    return gathered
