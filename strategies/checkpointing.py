"""Activation checkpointing: blocks that keep less for the backward pass, and compute it again.

Memory: `full` leaves a block's inputs; `selective` the results of products and attention, too.
With `budget` each block is given what takes the least time while the predicted peak fits.
Communication: none.
Constraints: a block computes the same twice from the same inputs; random numbers are repeated, and
running statistics move once.
Example: torchrun --nproc-per-node 2 bigtrain/train.py --strategy ddp strategy.recompute=full

Source: Chen et al. 2016 (arXiv 1604.06174); Korthikanti et al. 2022 (arXiv 2205.05198), section 5;
for the choice under a budget Beaumont et al. 2019, Rotor (arXiv 1911.13214), and Jain et al. 2020,
Checkmate (arXiv 1910.02653).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import nn

from bigtrain.activations.policy import BlockPolicy
from bigtrain.core.layer_strategies import RecomputeStrategy
from bigtrain.core.strategy import ModelFacts, Plan
from bigtrain.core.traits import Traits
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Role
from bigtrain.memory.cap import device_capacity_bytes
from bigtrain.models.blocks import find_blocks, matching_modules
from bigtrain.ranks.launcher_env import detect_rank_info
from bigtrain.units import MIB, parse_bytes


def _size_or_share(value: object) -> object:
    """A share of the device (0.8 or '80%'), or a size."""
    if isinstance(value, str) and (match := _SHARE.fullmatch(value.strip())):
        value = float(match[1]) / 100 if match[2] else float(match[1])
    if isinstance(value, float) and 0 < value <= 1:
        return value
    is_size = isinstance(value, (str, int)) and not isinstance(value, bool)
    size = parse_bytes(value) if is_size else 0  # type: ignore[arg-type]
    if size <= 0:
        raise ValueError(
            f"{value} is neither a size above 0 nor a share of the device up to 1; "
            "write it like 6GiB, 80% or 0.8"
        )
    return size


_SHARE = re.compile(r"(-?[0-9]*\.[0-9]+|-?[0-9]+(?=%))(%?)")


Budget = Annotated[int | float, BeforeValidator(_size_or_share)]


class Checkpointing(RecomputeStrategy):
    """What each block keeps."""

    name: ClassVar[str] = "checkpointing"
    role: ClassVar[Role] = "recompute"
    summary: ClassVar[str] = "blocks keep less for the backward pass and compute it again"

    mode: Literal["full", "selective"] = "full"
    """What a chosen block keeps: its inputs, or also the results of products and attention."""
    every: int | None = Field(None, ge=1)
    """Every k-th block is chosen, from the k-th on; left out, all are."""
    layers: tuple[str, ...] = ()
    """Names of the modules that are chosen; `*` stands for a part of a name (blocks.*.mlp)."""
    budget: Budget | None = None
    """The most that a rank may hold, in bytes (6GiB) or as a share of the device (80%)."""
    blocks: dict[str, BlockPolicy] | None = None
    """What each block keeps, by name: what a budget has been turned into."""

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`: what a block writes, it would write twice."""
        return Traits(cannot_hold=frozenset({"writes_in_block"}))

    def remedies(self, plan: Plan, limit: int) -> Sequence[Sequence[str]]:  # noqa: ARG002
        """See `Strategy.remedies`: as little as is enough, and as much as there is."""
        budget = f"strategy.recompute={max(1, limit // MIB)}MiB"
        return [[budget], ["strategy.recompute=full"]]

    def check(self, plan: Plan) -> None:
        """Refuse two ways to say the same, and a cut that already computes again."""
        is_said = {
            "every": self.every is not None,
            "layers": bool(self.layers),
            "budget": self.budget is not None,
            "blocks": self.blocks is not None,
        }
        given_keys = [key for key, is_given in is_said.items() if is_given]
        if len(given_keys) > 1:
            raise ConfigError(
                f"strategy.recompute.{given_keys[0]} and {given_keys[1]} both say which blocks "
                "keep less. "
                f"Leave strategy.recompute.{given_keys[1]} out."
            )
        chosen_key = "budget" if self.budget is not None else "blocks"
        if (is_said["budget"] or is_said["blocks"]) and "mode" in self.model_fields_set:
            raise ConfigError(
                f"strategy.recompute.mode={self.mode}: {chosen_key} says what each block keeps. "
                f"Leave strategy.recompute.mode out, or strategy.recompute.{chosen_key}."
            )
        self._check_moves(plan)
        cut = plan.cut
        if cut is not None and cut.recompute != "never":
            raise ConfigError(
                f"strategy.cut.checkpoint={cut.recompute} computes whole stages again, and "
                "strategy.recompute their blocks. Set strategy.cut.checkpoint=never, or leave "
                "strategy.recompute out."
            )

        self._check_split(plan)

    def _check_moves(self, plan: Plan) -> None:
        """What is moved has to have a place, and what `selective` keeps stays here."""
        moved = [name for name, choice in (self.blocks or {}).items() if "offload" in choice]
        if moved and not plan.moves_activations:
            raise ConfigError(
                f"strategy.recompute.blocks moves what {moved[0]} keeps away, and there is no "
                "place for it. Set strategy.offload.activations=disk (or cpu, on a GPU)."
            )
        alone = self.every is None and not self.layers and self.blocks is None
        if alone and self.mode == "selective" and plan.moves_activations:
            raise ConfigError(
                "strategy.recompute.mode=selective keeps what strategy.offload.activations is to "
                "move, in all blocks. Use strategy.recompute.mode=full, or a budget, which uses "
                "both, or one of the two alone."
            )

    def _check_split(self, plan: Plan) -> None:
        """Kept results are handed out once, as they were made."""
        by_name = (self.blocks or {}).values()
        kept = "selective" in by_name or (self.blocks is None and self.mode == "selective")
        if not kept or plan.keeps_products:
            return
        if plan.replicate.replaces_products:
            raise ConfigError(
                "strategy.recompute: selective keeps the results of products, and DeepSpeed's "
                "stage 3 computes linear layers in a way that changes them in place. Use "
                "strategy.recompute.mode=full, or --strategy fsdp."
            )
        raise ConfigError(
            "strategy.recompute: selective hands each kept result to one backward pass, and "
            "this schedule has two for each micro-batch. Use strategy.recompute.mode=full, or "
            "strategy.cut.schedule=1f1b."
        )

    def limit(self, plan: Plan) -> int | None:
        """See `RecomputeStrategy.limit`."""
        if self.budget is None or isinstance(self.budget, int):
            return self.budget
        whole = device_capacity_bytes(torch.device(plan.device_type))
        if whole is None:
            raise ConfigError(
                f"strategy.recompute.budget={self.budget} is a share of this device's memory, "
                "which the system does not tell. Give bytes: strategy.recompute.budget=6GiB."
            )
        # The ranks of a node share the host's memory; a GPU is one rank's.
        ranks = detect_rank_info(os.environ).local_world_size if plan.device_type == "cpu" else 1
        return int(whole * self.budget / ranks)

    def with_policies(self, blocks: Mapping[str, BlockPolicy]) -> Checkpointing:
        """See `RecomputeStrategy.with_policies`."""
        return Checkpointing(blocks=dict(blocks))

    def block_policies(self, model: nn.Module, plan: Plan) -> Mapping[str, BlockPolicy]:
        """See `Strategy.block_policies`."""
        if self.blocks is not None:
            return {name: self.blocks[name] for name in _known(model, self.blocks)}
        names = [name for name, _ in find_blocks(model)]
        if self.layers:
            names = matching_modules(model, self.layers, "strategy.recompute.layers")
        elif self.every is not None:
            if self.every > len(names):
                raise ConfigError(
                    f"strategy.recompute.every={self.every}, and the model has {len(names)} "
                    f"blocks. Use strategy.recompute.every={max(1, len(names))} or less."
                )
            names = names[self.every - 1 :: self.every]
        if self.mode == "full" and plan.moves_activations:
            return dict.fromkeys(names, "full_offload")
        return dict.fromkeys(names, self.mode)

    def check_model(self, facts: ModelFacts, plan: Plan) -> None:  # noqa: ARG002
        """Say what a selective block cannot do: change in place what it has kept."""
        missing = facts.untraceable or ""
        kind, _, said = missing.partition(": ")
        if kind == "ConfigError" and said.startswith("strategy.recompute"):
            raise ConfigError(said)
        if "modified by an inplace operation" in missing:
            raise ConfigError(
                "strategy.recompute: a block of this model changes its input in place, which is "
                "then not there any more to compute it again. Leave that block out: name the "
                "others in strategy.recompute.layers."
            )

    def advise(self, forecast: Forecast, profile: Profile, plan: Plan) -> str | None:  # noqa: ARG002
        """Say where nothing is saved."""
        called = {name for name, _, _ in profile.windows}
        never_called = sorted(profile.recomputed - called)
        if never_called:
            name = never_called[0]
            return f"strategy.recompute: {name} is not called in a forward pass: nothing is saved."
        if not profile.windows and self.blocks is None:
            return (
                "strategy.recompute saves nothing: this model has no blocks. "
                "Name modules: strategy.recompute.layers=[...]."
            )
        return None


def _known(model: nn.Module, names: Mapping[str, BlockPolicy]) -> list[str]:
    return matching_modules(model, tuple(names), "strategy.recompute.blocks")
