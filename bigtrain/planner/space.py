"""The search space: mesh, replicas, cut, slices, micro-batch, offload.

The techniques list their own variants (`Strategy.variants`). Recomputation is not part of the
space: each candidate gets the fastest policies that fit (`StageFitter`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import product
from typing import Any

from bigtrain.activations.policy import BlockPolicy
from bigtrain.assembly.make_plan import default_replicas
from bigtrain.core.registry import make_technique, techniques_of
from bigtrain.core.strategy import CutStrategy, Strategy
from bigtrain.core.traits import CutTraits, Traits
from bigtrain.core.variants import Shape, Variant
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Job, Role, RoleConfig, StrategyConfig

CHOSEN: tuple[Role, ...] = ("replicate", "cut", "slice", "offload")
"""The roles whose techniques list variants."""
MAX_ROWS = 64
"""The most rows of a micro-batch that are searched: more do not make a device faster."""


FINER_FORMS = 3
"""The most finer forms of a technique that are searched; the best plan then gets the finest that
fits."""


@dataclass(frozen=True)
class Candidate:
    """A point of the search space: a mesh, a batch and variants of techniques, not yet checked."""

    pp: int
    dp: int
    replicate: Variant | None
    """How replicas share their state; None for the default of a job."""
    rows: int
    """The rows of a micro-batch."""
    micro_batches: int
    """The number of micro-batches of a replica in one step."""
    cut: Variant | None = None
    """How the model is cut into pipeline stages; None if it is whole."""
    offload: Variant | None = None
    """Which state is moved off the device; None for no offload."""
    tp: int = 1
    slices: Variant | None = None
    """How layers are sliced over the tp ranks; None if they are whole."""

    @property
    def axes(self) -> tuple[int, int, int]:
        """The sizes of the mesh: (pp, dp, tp)."""
        return self.pp, self.dp, self.tp

    @property
    def devices(self) -> int:
        """The number of devices of the mesh."""
        return math.prod(self.axes)

    @property
    def mesh(self) -> str:
        """The mesh as text; see `mesh_words`."""
        return mesh_words(self.pp, self.dp, self.tp)

    @property
    def engine(self) -> str:
        """The engine that runs the replicas: 'torch', 'deepspeed' or 'fairscale'."""
        return self.replicate.engine if self.replicate is not None else Traits.engine

    @cached_property
    def cut_traits(self) -> CutTraits | None:
        """The traits of the technique that cuts the model; None if the model is whole."""
        technique = _technique("cut", self.cut)
        return technique.traits if isinstance(technique, CutStrategy) else None

    @property
    def schedule(self) -> str | None:
        """The pipeline schedule; None if the model is whole."""
        return self.cut_traits.schedule if self.cut_traits is not None else None

    @property
    def stages_per_rank(self) -> int:
        """The number of stages on each rank."""
        return self.cut_traits.stages_per_rank if self.cut_traits is not None else 1

    @property
    def stages(self) -> int:
        """The number of stages of the model."""
        return self.pp * self.stages_per_rank

    @property
    def label(self) -> str:
        """The candidate's name in tables: the labels of its variants, joined by +.

        If all variants are presets, it is also a value of `--strategy`.
        """
        shares = self.dp > 1 or self.pp * self.tp == 1
        shown = [self.cut, self.slices, self.replicate if shares else None, self.offload]
        return "+".join(part.label for part in shown if part is not None)

    @property
    def is_typed(self) -> bool:
        """Whether the label is a value of `--strategy`; see `Variant.is_word`."""
        parts = (self.cut, self.slices, self.replicate, self.offload)
        return all(part is None or part.is_word for part in parts)

    def has(self, wanted: Mapping[Role, RoleConfig]) -> bool:
        """Whether the candidate has these techniques with these options, and no others."""
        shares = self.dp > 1
        own = {"cut": self.cut, "slice": self.slices, "offload": self.offload}
        if any((own[role] is None) != (role not in wanted) for role in own):
            return False
        replicas = wanted.get("replicate", default_replicas(shares=shares))
        asked = {**wanted, "replicate": replicas}
        if not shares and self.pp * self.tp > 1:  # a single replica shares nothing
            asked.pop("replicate")
        return all(
            _agrees(role, config, self.replicate if role == "replicate" else own[role])
            for role, config in asked.items()
        )

    def strategy(self, **more: Any) -> StrategyConfig:
        """Make the `strategy` section of a job that runs the candidate.

        Args:
            more: options by role, in addition to those of the candidate; see `written_options`.
        """
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
        """Return a copy of a job with this candidate's mesh, batch and strategy.

        Args:
            job: the job.
            more: see `strategy`.
        """
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


def _agrees(role: Role, config: RoleConfig, variant: Variant | None) -> bool:
    """Whether a variant is a technique of this name, with the options that are set."""
    technique, wanted = _technique(role, variant), make_technique(role, config)
    if technique is None or technique.name != wanted.name:
        return False
    own, asked = technique.model_dump(), wanted.model_dump()
    return all(own[key] == asked[key] for key in config.options)


def mesh_words(pp: int, dp: int, tp: int) -> str:
    """Return a mesh as text: `pp 2 x dp 4`, and `x tp 2` if layers are sliced."""
    return f"pp {pp} x dp {dp}" + (f" x tp {tp}" if tp > 1 else "")


@cache
def _technique(role: Role, variant: Variant | None) -> Strategy | None:
    if variant is None:
        return None
    section = StrategyConfig.model_validate({"name": "planned", role: dict(variant.options)})
    return make_technique(role, section.roles()[role])


def searched_techniques(job: Job) -> dict[Role, list[Strategy]]:
    """Return by role the techniques whose variants are searched: bigtrain's and the user's.

    Args:
        job: the job, whose `strategy` may name techniques of the user as `package.module:Class`.

    Raises:
        ConfigError: a user's technique cannot be imported, or does not take its options.
    """
    techniques = {role: techniques_of(role) for role in CHOSEN}
    for role, config in job.strategy.roles().items():
        if role in techniques and ":" in config.name:
            techniques[role].append(make_technique(role, config))
    return techniques


def _ours() -> dict[Role, list[Strategy]]:
    return {role: techniques_of(role) for role in CHOSEN}


@dataclass(frozen=True)
class SearchSpace:
    """The candidates for one model, global batch and number of devices."""

    devices: int
    per_node: int
    """The devices of one node."""
    global_batch_size: int
    """Samples of a step, over all replicas."""
    num_blocks: int
    """Blocks of the model. A cut is at the start of a block, or after the last one."""
    pp: int | None = None
    """The pp size that the user has fixed; None to search it. The same holds for `dp`, `tp` and
    `rows`. A `dp` of -1 also means that it is searched."""
    dp: int | None = None
    tp: int | None = None
    most_ranks: int = 1
    """The largest tp size that the model's layers allow."""
    rows: int | None = None
    engines: Sequence[str] | None = None
    """The engines to search where there are several replicas; None for all engines."""
    device_type: str = "cpu"
    within: Mapping[Role, RoleConfig] | None = None
    """See `Question.within`."""
    techniques: Mapping[Role, Sequence[Strategy]] = field(default_factory=_ours)
    """The techniques that list variants, by role."""

    @property
    def slice_counts(self) -> list[int]:
        """The tp sizes to search: common divisors of the number of devices and of those of a node.

        A fixed `tp` is the only size; the list is empty if `tp` does not divide the devices.
        """
        if self.tp is not None:
            return [self.tp] if self.devices % self.tp == 0 else []
        node = math.gcd(self.per_node, self.devices)
        return [n for n in range(1, min(node, self.most_ranks) + 1) if node % n == 0]

    def meshes(self) -> list[tuple[int, int, int]]:
        """Return the meshes (pp, dp, tp) that use all devices and divide the global batch.

        Raises:
            ConfigError: no mesh with the given sizes divides the devices and the batch.
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
            fixed = {key: size for key, size in named.items() if size is not None}
            raise ConfigError(
                f"plan: --devices {self.devices} with {_listed(fixed, '=')}: "
                f"pp * dp * tp has to be {self.devices}, and the model's {self.num_blocks} blocks "
                f"allow at most {self.num_blocks + 1} stages. Leave {_listed(fixed)} out."
            )
        dividing = [mesh for mesh in possible if self.global_batch_size % mesh[1] == 0]
        if not dividing:
            least = min(dp for _, dp, _ in possible)
            raise ConfigError(
                f"plan: --global-batch-size {self.global_batch_size} does not divide among the "
                f"replicas of any mesh: {self.devices} devices with at most {self.num_blocks + 1} "
                f"stages are at least {least} replicas. Use --global-batch-size "
                f"{-(-self.global_batch_size // least) * least}, or fewer --devices."
            )
        return dividing

    def candidates(self, *, fallback_tier: bool = False) -> Iterator[Candidate]:
        """Yield all candidates, including those that a technique will refuse.

        Args:
            fallback_tier: whether to yield the candidates with offload; by default, those without
                it.

        Raises:
            ConfigError: see `meshes`.
        """
        for pp, dp, tp in self.meshes():
            for rows in self._rows(self.global_batch_size // dp):
                steps = self.global_batch_size // dp // rows
                shape = self._shape(pp, dp, tp, steps)
                offloads = list(self._variants("offload", shape)) if fallback_tier else [None]
                cuts = list(self._variants("cut", shape)) if pp > 1 else [None]
                slices = list(self._variants("slice", shape)) if tp > 1 else [None]
                for replicate in self._replicates(shape):
                    if dp > 1 and self.engines is not None and replicate.engine not in self.engines:
                        continue
                    traits = _traits("replicate", replicate)
                    for cut in cuts:
                        if cut is not None and cut.splits and traits.whole_backward:
                            continue
                        for offload, sliced in product(offloads, slices):
                            candidate = Candidate(
                                pp, dp, replicate, rows, steps, cut, offload, tp, sliced
                            )
                            if self.within is None or candidate.has(self.within):
                                yield candidate

    def _variants(self, role: Role, shape: Shape) -> Iterator[Variant]:
        for technique in self.techniques[role]:
            yield from technique.variants(shape)

    def _shape(self, pp: int, dp: int, tp: int, steps: int) -> Shape:
        sizes = self.per_node, self.device_type, self.num_blocks
        return Shape(pp, dp, *sizes, steps, tp, self.most_ranks)

    def finer_forms(self, candidate: Candidate) -> list[Candidate]:
        """Return the candidate with each finer form of its data parallelism, slowest first."""
        if candidate.replicate is None:
            return []
        shape = self._shape(*candidate.axes, candidate.micro_batches)
        forms = finer_forms(candidate.replicate, shape)
        return [replace(candidate, replicate=form) for form in forms]

    def _replicates(self, shape: Shape) -> Iterator[Variant]:
        """Yield the forms of data parallelism, each followed by some of its finer forms."""
        for variant in self._variants("replicate", shape):
            yield variant
            if shape.pp == 1:
                yield from finer_sample(variant, shape)

    def _rows(self, share: int) -> list[int]:
        if self.rows is not None:
            return [self.rows] if share % self.rows == 0 else []
        return round_sizes(share)


def finer_forms(variant: Variant, shape: Shape) -> list[Variant]:
    """Return all finer forms of a form of data parallelism; see `Strategy.finer_variants`."""
    technique = _technique("replicate", variant)
    return [] if technique is None else list(technique.finer_variants(shape))


def finer_sample(variant: Variant, shape: Shape) -> list[Variant]:
    """Return at most `FINER_FORMS` finer forms of a form, evenly spread, without the last one.

    The last one has the most memory and is a form of its own.
    """
    finer = finer_forms(variant, shape)[:-1]
    places = {len(finer) * part // (FINER_FORMS + 1) for part in range(1, FINER_FORMS + 1)}
    return [finer[place] for place in sorted(places) if place < len(finer)]


def _listed(sizes: Mapping[str, int], separator: str = "") -> str:
    """Return the keys as text; with a separator, each key is followed by its size."""
    words = [f"{key}{separator}{size}" if separator else key for key, size in sizes.items()]
    return " and ".join(words)


def round_sizes(share: int) -> list[int]:
    """Return the micro-batch sizes to search, in samples, ascending.

    They are the sizes up to `MAX_ROWS` that divide the share and are a power of two or three times
    a power of two.

    Args:
        share: the samples of one replica in a step.
    """
    return [n for n in range(1, min(share, MAX_ROWS) + 1) if share % n == 0 and _is_round(n)]


def _traits(role: Role, variant: Variant) -> Traits:
    technique = _technique(role, variant)
    return technique.traits if technique is not None else Traits()


def _is_round(number: int) -> bool:
    """Whether a number is 2**n or 3 * 2**n: kernels are fast with such sizes."""
    while number % 2 == 0:
        number //= 2
    return number in (1, 3)


def written_options(
    cuts: Sequence[str], recomputed: Mapping[str, BlockPolicy], blocks: int
) -> dict[str, Any]:
    """Return the options of a plan that are not in its candidate: cuts and recompute policies.

    Args:
        cuts: the name of the first block of each stage but the first stage.
        recomputed: by name, the policies of the blocks that do not save all activations.
        blocks: the number of blocks of the model.

    Returns:
        The options by role; a role without options is left out.
    """
    options: dict[str, Any] = {}
    if cuts:
        options["cut"] = {"at": list(cuts)}
    kinds = set(recomputed.values())
    if len(kinds) == 1 and len(recomputed) == blocks:
        options["recompute"] = {"mode": kinds.pop()}
    elif recomputed:
        options["recompute"] = {"blocks": dict(recomputed)}
    return options
