"""Tensor parallelism: each layer's weights in slices on the ranks of the tp axis.

Any model is sliced, without a plan by hand: what its forward pass does with each dim is traced, and
a weight is sliced by columns where what follows goes on with slices, by rows where they are summed
up, attention by heads, embeddings and the loss by the vocabulary.

Memory: sliced parameters, their gradients and optimizer state, and what is computed with them, by
the number of ranks; activations between sliced layers are whole, unless `sequence` splits them.
Communication: for each pair of sliced layers an all-reduce of their output in the forward pass, and
one of their input's gradient in the backward pass, which nothing hides. Between stages of a
pipeline each rank sends its part, 1/tp, of what goes on and of what comes back, and the ranks that
receive the parts gather them; what has less than 1 KiB goes whole. With `sequence` a stretch of
activations goes as it lies, and is not gathered; a mask, or a table of positions, is.
Constraints: the ranks should be of one node; a module has a part for each rank or stays whole.
Example: bigtrain train -n 2 --strategy tensor

Source: Shoeybi et al. 2019, Megatron-LM (arXiv 1909.08053); with `sequence` Korthikanti et al. 2022
(arXiv 2205.05198); between stages Narayanan et al. 2021 (arXiv 2104.04473), section 4.1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import ClassVar

from pydantic import ConfigDict

from bigtrain.core.layer_strategies import SliceStrategy
from bigtrain.core.strategy import Plan
from bigtrain.core.traits import SECOND_BACKWARD, SPARSE, Traits
from bigtrain.core.variants import Shape, Variant, preset_options
from bigtrain.core.workload import Workload
from bigtrain.costs.forecast import Profile
from bigtrain.costs.traffic import Traffic
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Role
from bigtrain.slice_planning.choose import most_ranks, plan_slices, refuse_listed
from bigtrain.slice_planning.slice_specs import read_lines
from bigtrain.slicing.state import ModelSlices


class TensorSlices(SliceStrategy):
    """Layers in slices over the ranks of the tp axis."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    name: ClassVar[str] = "tensor"
    role: ClassVar[Role] = "slice"
    summary: ClassVar[str] = "each layer's weights in slices; two all-reduces for a pair of layers"

    sequence: bool = False
    """Split activations between sliced layers along the sequence, too (sequence parallelism)."""
    slices: dict[str, str] | None = None
    """What is sliced, by patterns of names: `blocks.*.mlp.expand.weight: 0`, as a dry run prints
    it; left out, it is chosen."""
    keep: tuple[str, ...] = ()
    """Modules that stay whole, by patterns of names: `blocks.0.attention`."""

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`."""
        return Traits(cannot_hold=SPARSE | SECOND_BACKWARD | {"accumulate_hooks"})

    def check(self, plan: Plan) -> None:
        """Refuse what goes past a module's own code, or wants whole parameters."""
        if self.slices is not None and self.keep:
            raise ConfigError(
                "strategy.slice.slices says what is sliced, and strategy.slice.keep what is not "
                "to be chosen. Leave strategy.slice.keep out."
            )
        if plan.tp == 1:
            raise ConfigError(
                "strategy tensor slices layers over the ranks of mesh.tp, and mesh.tp=1. "
                "Start 2 ranks or more, or leave the technique out."
            )
        replicate = plan.techniques["replicate"]
        engine = replicate.traits.engine
        if engine != "torch" or replicate.traits.num_servers or replicate.traits.inexact_reason:
            raise ConfigError(
                f"strategy tensor gives each rank slices of layers, and {replicate.name} on "
                f"{engine} does not know of them. Use strategy.replicate=ddp, zero1_torch or fsdp."
            )
        if plan.cut is not None and not (plan.cut.is_distributed and plan.cut.engine == "torch"):
            raise ConfigError(
                "strategy tensor works in pipelines of torch's, whose stages are on ranks. "
                "Use strategy.cut.schedule=1f1b, or leave strategy.cut out."
            )
        for key, is_set, wanted, value in (
            ("train.compile", plan.compiles_blocks, "none", "blocks"),
            ("train.memory_format", plan.channels_last, "contiguous", "channels_last"),
            ("train.sync_batchnorm", plan.sync_batchnorm, "false", "true"),
        ):
            if is_set:
                raise ConfigError(
                    f"strategy tensor does not go with {key}={value}. Use {key}={wanted}."
                )

    def variants(self, shape: Shape) -> Iterable[Variant]:
        """See `Strategy.variants`: activations between sliced layers whole, and split."""
        if 1 < shape.tp <= shape.most_ranks:
            for preset in ("tensor", "tensor_sequence"):
                yield Variant(preset, preset_options(self.role, preset))

    def most_ranks(self, workload: Workload) -> int:
        """See `SliceStrategy.most_ranks`."""
        return most_ranks(workload)

    def lay_slices(self, workload: Workload, plan: Plan) -> ModelSlices:
        """See `SliceStrategy.lay_slices`."""
        sequence_dim = 1 if self.sequence else None
        if self.slices is not None:
            by_name, gathered = read_lines(self.slices, workload.model, plan.tp)
            refuse_listed(workload, by_name)
            return ModelSlices(by_name, gathered, plan.tp, sequence_dim, self.slices)
        found = plan_slices(workload, plan.tp, keep=self.keep, repeats=workload.repeats)
        lines, own = found.lines(), (found.slices, found.gathered)
        return ModelSlices(*own, plan.tp, sequence_dim, lines, found.kept)

    def traffic(self, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
        """What a micro-batch exchanges, as a run on fake tensors has it."""
        counts: Counter[str] = Counter()
        nbytes: Counter[str] = Counter()
        for exchange in profile.exchanges:
            counts[exchange.kind] += 1
            nbytes[exchange.kind] += exchange.nbytes
        return tuple(
            Traffic(kind, nbytes[kind], counts[kind], "micro_batch", "passes", plan.tp, 1)
            for kind in ("all_reduce", "all_gather", "reduce_scatter")
            if counts[kind]
        )
