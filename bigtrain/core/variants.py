"""What a technique offers to those who look for a plan, as data: forms of itself, and remedies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from bigtrain.job.schema import Role
from bigtrain.job.strategy_words import read_strategy


@dataclass(frozen=True)
class Shape:
    """What of a plan is settled when a technique is asked for its variants."""

    pp: int
    dp: int
    devices_per_node: int
    device_type: str
    num_blocks: int
    """Blocks of the model: stages begin with one."""
    micro_batches: int
    """Of a step, for each replica."""
    tp: int = 1
    """Ranks that the layers of a stage are sliced over."""
    most_ranks: int = 1
    """Over so many ranks the model's layers can be sliced."""


@dataclass(frozen=True)
class Variant:
    """One form of a technique, as it would stand in a job."""

    label: str
    """For tables: words that `--strategy` takes, where there is a preset."""
    options: Mapping[str, Any] = field(hash=False)
    """The section of its role, `name` included where the role has several techniques."""
    engine: str = "torch"
    """As `Traits.engine`, known before its module is imported."""
    splits: bool = False
    """It pays only where backward passes go in two parts: not beside `Traits.whole_backward`."""


@cache
def preset_options(role: Role, preset: str) -> Mapping[str, Any]:
    """What a preset says of a role."""
    options: dict[str, Any] = read_strategy(preset, "plan").values["strategy"][role]
    return options
