"""What there is to choose from: mesh, replicas, cut, slices, micro-batch, offload.

The techniques say what of themselves there is to choose from (`Strategy.variants`). What blocks
keep is no choice of its own: every candidate is given what costs the least time among what fits
(see `judge`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import product
from typing import Any

from bigtrain.activations.policy import BlockPolicy
from bigtrain.core.registry import make_technique, techniques_of
from bigtrain.core.strategy import CutStrategy, Strategy
from bigtrain.core.traits import CutTraits, Traits
from bigtrain.core.variants import Shape, Variant
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Job, Role, StrategyConfig

CHOSEN: tuple[Role, ...] = ("replicate", "cut", "slice", "offload")
"""The roles whose techniques are asked."""
MAX_ROWS = 64
"""Rows of a micro-batch from which on more do not make a device faster."""


@dataclass(frozen=True)
class Candidate:
    """One plan before it is checked."""

    pp: int
    dp: int
    replicate: Variant | None
    """How replicas share their state; None is as the job's defaults have it."""
    rows: int
    """Of a micro-batch."""
    micro_batches: int
    """Of a step, for each replica."""
    cut: Variant | None = None
    offload: Variant | None = None
    tp: int = 1
    slices: Variant | None = None
    """How layers are laid over the tp ranks."""

    @property
    def axes(self) -> tuple[int, int, int]:
        """Of the mesh: pp, dp, tp."""
        return self.pp, self.dp, self.tp

    @property
    def devices(self) -> int:
        """Of the mesh."""
        return math.prod(self.axes)

    @property
    def mesh(self) -> str:
        """For a person."""
        return mesh_words(self.pp, self.dp, self.tp)

    @property
    def engine(self) -> str:
        """Who shares the replicas' state."""
        return self.replicate.engine if self.replicate is not None else Traits.engine

    @cached_property
    def cut_traits(self) -> CutTraits | None:
        """Of the technique that cuts the model."""
        technique = _technique("cut", self.cut)
        return technique.traits if isinstance(technique, CutStrategy) else None

    @property
    def schedule(self) -> str | None:
        """In which order a rank takes its micro-batches; None where the model is whole."""
        return self.cut_traits.schedule if self.cut_traits is not None else None

    @property
    def stages_per_rank(self) -> int:
        """How many stages lie on each rank."""
        return self.cut_traits.stages_per_rank if self.cut_traits is not None else 1

    @property
    def stages(self) -> int:
        """Stages of the model."""
        return self.pp * self.stages_per_rank

    @property
    def label(self) -> str:
        """Its name in tables: words that `--strategy` takes; the mesh is not among them."""
        shares = self.dp > 1 or self.pp * self.tp == 1
        shown = [self.cut, self.slices, self.replicate if shares else None, self.offload]
        return "+".join(one.label for one in shown if one is not None)

    def strategy(self, **more: Any) -> StrategyConfig:
        """The section of a job."""
        values: dict[str, Any] = {"name": "planned"}
        if self.replicate is not None:
            values["replicate"] = dict(self.replicate.options)
        values |= more
        if self.cut is not None:
            values["cut"] = {**self.cut.options, **more.get("cut", {})}
        if self.slices is not None:
            values["slice"] = dict(self.slices.options)
        if self.offload is not None:
            values["offload"] = dict(self.offload.options)
        return StrategyConfig.model_validate(values)

    def job(self, job: Job, **more: Any) -> Job:
        """A copy of the job with this candidate's mesh, batch and strategy."""
        mesh = job.mesh.model_copy(update={"pp": self.pp, "dp": self.dp, "tp": self.tp})
        batch = {
            "global_batch_size": self.rows * self.micro_batches * self.dp,
            "micro_batch_size": self.rows,
            "accumulation_steps": None,
        }
        train = job.train.model_copy(update=batch)
        return job.model_copy(
            update={"mesh": mesh, "train": train, "strategy": self.strategy(**more)}
        )


def mesh_words(pp: int, dp: int, tp: int) -> str:
    """`pp 2 x dp 4`, and `x tp 2` where layers are sliced."""
    return f"pp {pp} x dp {dp}" + (f" x tp {tp}" if tp > 1 else "")


@cache
def _technique(role: Role, variant: Variant | None) -> Strategy | None:
    if variant is None:
        return None
    section = StrategyConfig.model_validate({"name": "planned", role: dict(variant.options)})
    return make_technique(role, section.roles()[role])


def searched_techniques(job: Job) -> dict[Role, list[Strategy]]:
    """By role the techniques whose variants are searched: ours, and those of the user's own.

    Args:
        job: whose `strategy` names the latter as `package.module:Class`.

    Raises:
        ConfigError: one cannot be imported, or takes no such options.
    """
    found = {role: techniques_of(role) for role in CHOSEN}
    for role, config in job.strategy.roles().items():
        if role in found and ":" in config.name:
            found[role].append(make_technique(role, config))
    return found


def _ours() -> dict[Role, list[Strategy]]:
    return {role: techniques_of(role) for role in CHOSEN}


@dataclass(frozen=True)
class SearchSpace:
    """What is open, and what is given."""

    devices: int
    per_node: int
    global_batch_size: int
    num_blocks: int
    """Blocks of the model: stages begin with one."""
    pp: int | None = None
    """Where it is given."""
    dp: int | None = None
    tp: int | None = None
    most_ranks: int = 1
    """Over how many ranks the model's layers can be sliced."""
    rows: int | None = None
    engines: Sequence[str] | None = None
    """Whose implementations of replicas may be chosen; None for everyone's."""
    device_type: str = "cpu"
    techniques: Mapping[Role, Sequence[Strategy]] = field(default_factory=_ours)
    """Whose variants there are to choose from."""

    @property
    def slice_counts(self) -> list[int]:
        """Sizes of the tp axis: ranks of one node, and as many groups of them as fill it."""
        if self.tp is not None:
            return [self.tp] if self.devices % self.tp == 0 else []
        node = math.gcd(self.per_node, self.devices)
        return [n for n in range(1, min(node, self.most_ranks) + 1) if node % n == 0]

    def meshes(self) -> list[tuple[int, int, int]]:
        """(pp, dp, tp) for all devices.

        Raises:
            ConfigError: none divides devices and batch as asked for.
        """
        possible = [
            (pp, groups // pp, tp)
            for tp in self.slice_counts
            for groups in [self.devices // tp]
            for pp in range(1, groups + 1)
            if groups % pp == 0
            and pp <= self.num_blocks + 1
            and self.pp in (None, pp)
            and self.dp in (None, -1, groups // pp)
        ]
        if not possible:
            named = {"mesh.pp": self.pp, "mesh.dp": self.dp, "mesh.tp": self.tp}
            given = {key: size for key, size in named.items() if size is not None}
            raise ConfigError(
                f"plan: --devices {self.devices} with {_listed(given, '=')}: "
                f"pp * dp * tp has to be {self.devices}, and the model's {self.num_blocks} blocks "
                f"make at most {self.num_blocks + 1} stages. Leave {_listed(given)} out."
            )
        dividing = [mesh for mesh in possible if self.global_batch_size % mesh[1] == 0]
        if not dividing:
            least = min(dp for _, dp, _ in possible)
            raise ConfigError(
                f"plan: --global-batch-size {self.global_batch_size} cannot be dealt to the "
                f"replicas of any mesh: {self.devices} devices and at most {self.num_blocks + 1} "
                f"stages make {least} replicas at least. Use --global-batch-size "
                f"{-(-self.global_batch_size // least) * least}, or fewer --devices."
            )
        return dividing

    def candidates(self, *, fallback_tier: bool = False) -> Iterator[Candidate]:
        """All of them; what a technique refuses is not left out yet.

        Args:
            fallback_tier: with what the offload role's techniques offer, and not without.
        """
        for pp, dp, tp in self.meshes():
            for rows in self._rows(self.global_batch_size // dp):
                steps = self.global_batch_size // dp // rows
                given = (self.per_node, self.device_type, self.num_blocks, steps)
                shape = Shape(pp, dp, *given, tp, self.most_ranks)
                offloads = list(self._variants("offload", shape)) if fallback_tier else [None]
                cuts = list(self._variants("cut", shape)) if pp > 1 else [None]
                slices = list(self._variants("slice", shape)) if tp > 1 else [None]
                for replicate in self._variants("replicate", shape):
                    if dp > 1 and self.engines is not None and replicate.engine not in self.engines:
                        continue
                    traits = _traits("replicate", replicate)
                    for cut in cuts:
                        if cut is not None and cut.splits and traits.whole_backward:
                            continue
                        for offload, sliced in product(offloads, slices):
                            chosen = (cut, offload, tp, sliced)
                            yield Candidate(pp, dp, replicate, rows, steps, *chosen)

    def _variants(self, role: Role, shape: Shape) -> Iterator[Variant]:
        for technique in self.techniques[role]:
            yield from technique.variants(shape)

    def _rows(self, share: int) -> list[int]:
        if self.rows is not None:
            return [self.rows] if share % self.rows == 0 else []
        return round_sizes(share)


def _listed(given: Mapping[str, int], between: str = "") -> str:
    """Keys, and with something between them and their sizes these, too."""
    words = [f"{key}{between}{size}" if between else key for key, size in given.items()]
    return " and ".join(words)


def round_sizes(share: int) -> list[int]:
    """Sizes of a micro-batch, of so many samples, that are searched."""
    return [n for n in range(1, min(share, MAX_ROWS) + 1) if share % n == 0 and _is_round(n)]


def _traits(role: Role, variant: Variant) -> Traits:
    technique = _technique(role, variant)
    return technique.traits if technique is not None else Traits()


def _is_round(number: int) -> bool:
    """Powers of two, and three times them: what kernels are quick with, and divides batches."""
    while number % 2 == 0:
        number //= 2
    return number in (1, 3)


def written_options(
    cuts: Sequence[str], recomputed: Mapping[str, BlockPolicy], blocks: int
) -> dict[str, Any]:
    """What stands in the plan beside the candidate's own: where it is cut, what blocks keep."""
    options: dict[str, Any] = {}
    if cuts:
        options["cut"] = {"at": list(cuts)}
    kinds = set(recomputed.values())
    if len(kinds) == 1 and len(recomputed) == blocks:
        options["recompute"] = {"mode": kinds.pop()}
    elif recomputed:
        options["recompute"] = {"blocks": dict(recomputed)}
    return options
