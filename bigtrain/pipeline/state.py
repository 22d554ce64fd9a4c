"""What the ranks of a pipeline tell each other of the stages that each holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from bigtrain.ranks.context import RunContext


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
