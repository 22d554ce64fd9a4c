"""Variants: the forms of a technique that the planner may choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from bigtrain.job.schema import Role
from bigtrain.job.strategy_words import read_strategy


@dataclass(frozen=True)
class Shape:
    """The part of a plan that is fixed when `Strategy.variants` is called."""

    pp: int
    dp: int
    devices_per_node: int
    device_type: str
    num_blocks: int
    """The number of blocks of the model. Each stage after the first begins at a block."""
    micro_batches: int
    """Micro-batches of a step in each replica."""
    tp: int = 1
    """The number of ranks over which layers are sliced."""
    most_ranks: int = 1
    """The largest number of ranks over which the model's layers can be sliced."""


@dataclass(frozen=True)
class Variant:
    """One form of a technique, as a job would set it."""

    label: str
    """The name in tables. If a preset has this form, the name is the value of `--strategy`."""
    options: Mapping[str, Any] = field(hash=False)
    """The section of the technique's role in a job, with `name` if the role has several
    techniques."""
    engine: str = "torch"
    """The value of `Traits.engine`, known before the technique's module is imported."""
    is_word: bool = True
    """Whether the label is a word of `--strategy`; some forms exist only in plan files."""
    splits: bool = False
    """Whether this form pays only with split backward passes. The planner then does not combine it
    with a replicate technique that has `Traits.whole_backward`."""


@cache
def preset_options(role: Role, preset: str) -> Mapping[str, Any]:
    """Return the section of a role in a preset of `--strategy`, such as 'fsdp'."""
    options: dict[str, Any] = read_strategy(preset, "plan").values["strategy"][role]
    return options
