"""Activation checkpointing: blocks save less for the backward pass and are recomputed in it.

Memory: with `full` a block saves only its inputs, with `selective` also the results of matrix
products and attention. `budget` chooses the policy of each block: of the choices whose predicted
peak fits the budget, the one that costs the least time.
Communication: none.
Constraints: a block has to compute the same results from the same inputs. Recomputation draws the
same random numbers, and running statistics are updated once.
Example: torchrun --nproc-per-node 2 bigtrain/train.py --strategy ddp strategy.recompute=full

Source: Chen et al. 2016 (arXiv 1604.06174); Korthikanti et al. 2022 (arXiv 2205.05198), section 5;
for the choice of policies under a budget Beaumont et al. 2019, Rotor (arXiv 1911.13214), and Jain
et al. 2020, Checkmate (arXiv 1910.02653).
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
    """Return a share of the device's memory (0.8 or '80%') as a float, or a size in bytes."""
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
    """Choose what each block saves for the backward pass."""

    name: ClassVar[str] = "checkpointing"
    role: ClassVar[Role] = "recompute"
    summary: ClassVar[str] = "blocks save less for the backward pass and are recomputed in it"

    mode: Literal["full", "selective"] = "full"
    """The tensors that a chosen block saves: its inputs (full), or also the results of matrix
    products and of attention (selective)."""
    every: int | None = Field(None, ge=1)
    """Choose every k-th block, starting at the k-th; by default all blocks."""
    layers: tuple[str, ...] = ()
    """Names of the chosen modules; `*` matches any part of a name (blocks.*.mlp)."""
    budget: Budget | None = None
    """The highest peak of a rank, in bytes (6GiB) or as a share of the device's memory (80%)."""
    blocks: dict[str, BlockPolicy] | None = None
    """The policy of each block, by name; set in the plan that results from a budget."""

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`: a recomputed block would do its in-place writes twice."""
        return Traits(cannot_hold=frozenset({"writes_in_block"}))

    def remedies(self, plan: Plan, limit: int) -> Sequence[Sequence[str]]:  # noqa: ARG002
        """See `Strategy.remedies`: a budget equal to the limit, then full recomputation."""
        budget = f"strategy.recompute={max(1, limit // MIB)}MiB"
        return [[budget], ["strategy.recompute=full"]]

    def check(self, plan: Plan) -> None:
        """Refuse options that contradict each other, and a cut that recomputes whole stages."""
        is_set = {
            "every": self.every is not None,
            "layers": bool(self.layers),
            "budget": self.budget is not None,
            "blocks": self.blocks is not None,
        }
        keys = [key for key, value in is_set.items() if value]
        if len(keys) > 1:
            raise ConfigError(
                f"strategy.recompute.{keys[0]} and {keys[1]} both choose blocks. "
                f"Leave strategy.recompute.{keys[1]} out."
            )
        chosen_key = "budget" if self.budget is not None else "blocks"
        if (is_set["budget"] or is_set["blocks"]) and "mode" in self.model_fields_set:
            raise ConfigError(
                f"strategy.recompute.mode={self.mode}: strategy.recompute.{chosen_key} sets the "
                "mode of each block. "
                f"Leave strategy.recompute.mode out, or strategy.recompute.{chosen_key}."
            )
        self._check_moves(plan)
        cut = plan.cut
        if cut is not None and cut.recompute != "never":
            raise ConfigError(
                f"strategy.cut.checkpoint={cut.recompute} recomputes whole stages, and "
                "strategy.recompute their blocks. Set strategy.cut.checkpoint=never, or leave "
                "strategy.recompute out."
            )

        self._check_split(plan)

    def _check_moves(self, plan: Plan) -> None:
        """Refuse offload without a destination, and `selective` with offload of activations."""
        moved = [name for name, choice in (self.blocks or {}).items() if "offload" in choice]
        if moved and not plan.moves_activations:
            raise ConfigError(
                f"strategy.recompute.blocks offloads the activations of {moved[0]}, and "
                "strategy.offload.activations is not set. Set strategy.offload.activations=disk "
                "(or cpu, on a GPU)."
            )
        alone = self.every is None and not self.layers and self.blocks is None
        if alone and self.mode == "selective" and plan.moves_activations:
            raise ConfigError(
                "strategy.recompute.mode=selective keeps activations of all blocks on the "
                "device, and strategy.offload.activations would move them. Use "
                "strategy.recompute.mode=full, or strategy.recompute=80% (a budget, which combines "
                "both), or leave strategy.offload.activations out."
            )

    def _check_split(self, plan: Plan) -> None:
        """Refuse `selective` if saved products change in place, or serve two backward passes."""
        by_name = (self.blocks or {}).values()
        selective = "selective" in by_name or (self.blocks is None and self.mode == "selective")
        if not selective or plan.keeps_products:
            return
        if plan.replicate.replaces_products:
            raise ConfigError(
                "strategy.recompute: selective saves the results of products, and the linear "
                "layers of DeepSpeed's stage 3 change them in place. Use "
                "strategy.recompute.mode=full, or --strategy fsdp."
            )
        raise ConfigError(
            "strategy.recompute: selective saves each result for one backward pass, and "
            "this schedule has two for each micro-batch. Use strategy.recompute.mode=full, or "
            "strategy.cut.schedule=1f1b."
        )

    def limit(self, plan: Plan) -> int | None:
        """See `RecomputeStrategy.limit`."""
        if self.budget is None or isinstance(self.budget, int):
            return self.budget
        capacity = device_capacity_bytes(torch.device(plan.device_type))
        if capacity is None:
            raise ConfigError(
                f"strategy.recompute.budget={self.budget} is a share of this device's memory, "
                "whose size is not known. Give bytes: strategy.recompute.budget=6GiB."
            )
        # The ranks of a node share the host's memory; each rank has its own GPU.
        ranks = detect_rank_info(os.environ).local_world_size if plan.device_type == "cpu" else 1
        return int(capacity * self.budget / ranks)

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
        """Refuse a model that cannot be recomputed: a block may change its input in place."""
        missing = facts.untraceable or ""
        kind, _, reason = missing.partition(": ")
        if kind == "ConfigError" and reason.startswith("strategy.recompute"):
            raise ConfigError(reason)
        if "modified by an inplace operation" in missing:
            raise ConfigError(
                "strategy.recompute: a block of this model changes its input in place, and cannot "
                "be recomputed from the changed one. Leave that block out: name the "
                "others in strategy.recompute.layers."
            )

    def advise(self, forecast: Forecast, profile: Profile, plan: Plan) -> str | None:  # noqa: ARG002
        """Return one line if recomputation saves no memory: no blocks, or a module never called."""
        called = {name for name, _, _ in profile.windows}
        never_called = sorted(profile.recomputed - called)
        if never_called:
            name = never_called[0]
            return (
                f"strategy.recompute: {name} is not called in a forward pass, so recomputing "
                "it saves no memory."
            )
        if not profile.windows and self.blocks is None:
            return (
                "strategy.recompute saves no memory: this model has no repeated blocks. Name "
                "modules: strategy.recompute.layers=[...]."
            )
        return None


def _known(model: nn.Module, names: Mapping[str, BlockPolicy]) -> list[str]:
    return matching_modules(model, tuple(names), "strategy.recompute.blocks")
