"""Tensor parallelism: each layer's weights are sliced over the ranks of the tp axis.

The slices of any model are chosen automatically. A trace of the forward pass shows how each dim is
used: a weight is sliced by columns where the next layers compute with slices, and by rows where
slices are summed. Attention is sliced by heads, embeddings and the loss by the vocabulary.

Memory: sliced parameters, their gradients, optimizer state and activations are divided by the
number of ranks; activations between sliced layers are whole, unless `sequence` shards them.
Communication: each pair of sliced layers all-reduces its output in the forward pass and the
gradient of its input in the backward pass. No computation overlaps with these all-reduces. Between
pipeline stages each rank sends 1/tp of an activation, or of its gradient, and the receiving ranks
gather the parts; tensors below 1 KiB are sent whole. With `sequence` each rank sends its sequence
shard, and only masks and tables of positions are gathered.
Constraints: the ranks should share a node; a layer with fewer units than ranks stays whole.
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
    """Layers sliced over the ranks of the tp axis."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    name: ClassVar[str] = "tensor"
    role: ClassVar[Role] = "slice"
    summary: ClassVar[str] = "layers' weights sliced over ranks; two all-reduces per pair of layers"

    sequence: bool = False
    """Shard activations between sliced layers along the sequence, too (sequence parallelism)."""
    slices: dict[str, str] | None = None
    """Slices by patterns of names, in the form in which a dry run prints them.

    Example: `blocks.*.mlp.expand.weight: 0`. By default the slices are chosen automatically.
    """
    keep: tuple[str, ...] = ()
    """Modules that stay whole, by patterns of names: `blocks.0.attention`."""

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`."""
        return Traits(cannot_hold=SPARSE | SECOND_BACKWARD | {"accumulate_hooks", "packed"})

    def check(self, plan: Plan) -> None:
        """Refuse options that contradict each other, and techniques that need whole layers.

        Raises:
            ConfigError: with the key, and the value to use instead.
        """
        if self.slices is not None and self.keep:
            raise ConfigError(
                "strategy.slice.slices lists all slices, and strategy.slice.keep excludes modules "
                "from slices that are chosen. Leave strategy.slice.keep out."
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
                "strategy tensor needs a pipeline with strategy.cut.engine=torch and stages on "
                f"ranks, and strategy.cut has engine={plan.cut.engine} "
                f"schedule={plan.cut.schedule}. Use strategy.cut.engine=torch "
                "strategy.cut.schedule=1f1b, or leave strategy.cut out."
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
        """See `Strategy.variants`: with whole and with sharded activations between layers."""
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
        chosen = plan_slices(workload, plan.tp, keep=self.keep, repeats=workload.repeats)
        return ModelSlices(
            by_name=chosen.slices,
            gathered=chosen.gathered,
            size=plan.tp,
            sequence_dim=sequence_dim,
            lines=chosen.lines(),
            whole_reasons=chosen.whole_reasons,
        )

    def traffic(self, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
        """Return the collectives of a micro-batch, as recorded on fake tensors."""
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
