"""Tensor parallelism by DeepSpeed's AutoTP: linear layers in slices, beside its ZeRO 1 and 2.

AutoTP knows models by tables; here it is given a plan. What is sliced is our own choice as `tensor`
makes it, of which AutoTP does pairs of linear layers: by columns, with queries, keys and values in
sections, and by rows. Its layers stand in the model, whose code sees what one rank has; before
anything runs, that is tried on tensors without numbers, and refused where it comes out otherwise.

Memory: sliced parameters, their gradients and optimizer state by the number of ranks, and then by
ZeRO's; embeddings, convolutions, norms and the loss are whole on each rank of the tp axis.
Communication: for each pair of layers an all-reduce of their output in the forward pass, and for
each layer by columns one of its input's gradient in the backward pass, which nothing hides. Where
such layers share an input (queries, keys, values apart) each has its own, and one is forecast.
Constraints: DeepSpeed's ZeRO of stage 1 or 2 beside it, fp32, no dropout between sliced layers.
Example: bigtrain train -n 2 --strategy autotp

Source: Shoeybi et al. 2019, Megatron-LM (arXiv 1909.08053); DeepSpeed's AutoTP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar

from bigtrain.core.layer_strategies import SliceStrategy
from bigtrain.core.strategy import Assembly, Plan
from bigtrain.core.traits import SECOND_BACKWARD, SPARSE, Traits
from bigtrain.core.variants import Shape, Variant
from bigtrain.core.workload import Workload
from bigtrain.costs.forecast import Profile
from bigtrain.costs.traffic import Traffic
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Role
from bigtrain.slice_planning.choose import most_ranks, plan_slices
from bigtrain.slice_planning.slice_specs import merged_lines, spec_text
from bigtrain.slicing.install import sliced_tensors
from bigtrain.slicing.state import ModelSlices
from bigtrain.strategies.autotp.adapter import AUTOTP, keep_values, partition_config, use_groups
from bigtrain.strategies.autotp.choose import layer_specs, pairs_of, whole_shapes
from bigtrain.strategies.autotp.local_widths import check_local_widths
from bigtrain.strategies.deepspeed_adapter import require_deepspeed


class AutoTP(SliceStrategy):
    """Pairs of linear layers in slices over the ranks of the tp axis, by DeepSpeed's layers."""

    name: ClassVar[str] = "autotp"
    role: ClassVar[Role] = "slice"
    summary: ClassVar[str] = (
        "linear layers in slices by DeepSpeed's AutoTP, beside its ZeRO 1 and 2"
    )

    replaces_layers: ClassVar[bool] = True

    keep: tuple[str, ...] = ()
    """Modules that stay whole, by patterns of names: `blocks.0.attention`."""

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`."""
        return Traits(
            engine="deepspeed",
            needs_group=True,
            cannot_hold=SPARSE | SECOND_BACKWARD | {"gradient_hooks", "accumulate_hooks", "writes"},
        )

    def warning(self) -> str | None:
        """See `Strategy.warning`."""
        return None  # ZeRO's, which runs beside it, tells of the version

    def check(self, plan: Plan) -> None:
        """Refuse what AutoTP does not go with, or was not seen to go with."""
        if plan.tp == 1:
            raise ConfigError(
                "strategy autotp slices layers over the ranks of mesh.tp, and mesh.tp=1. "
                "Start 2 ranks or more, or leave the technique out."
            )
        if "cut" in plan.techniques:
            raise ConfigError(
                f"strategy autotp slices a whole model, and strategy.cut (mesh.pp={plan.pp}) cuts "
                "it. Use --strategy 1f1b+tensor, or leave strategy.cut out."
            )
        replicate: Any = plan.techniques["replicate"]
        if replicate.traits.engine != "deepspeed" or replicate.stage not in (1, 2):
            raise ConfigError(
                "strategy autotp puts DeepSpeed's layers into the model for DeepSpeed's ZeRO of "
                f"stage 1 or 2, and strategy.replicate is {replicate.name} on "
                f"{replicate.traits.engine}, stage {getattr(replicate, 'stage', 0)}. "
                "Use --strategy autotp (strategy.replicate.stage=2 for stage 2), or tensor."
            )
        if replicate.config is not None:
            raise ConfigError(
                f"strategy.replicate.config={replicate.config}: a DeepSpeed file says what a whole "
                "model needs, and strategy autotp slices it. Leave the file out."
            )
        if "offload" in plan.techniques:
            raise ConfigError(
                "strategy autotp was not tried with DeepSpeed's offload. Leave strategy.offload "
                "out, or use slice=tensor with --strategy fsdp."
            )
        for key, is_set, wanted, value in (
            ("train.compile", plan.compiles_blocks, "none", "blocks"),
            ("train.memory_format", plan.channels_last, "contiguous", "channels_last"),
            ("train.sync_batchnorm", plan.sync_batchnorm, "false", "true"),
            ("train.precision", plan.precision != "fp32", "fp32", plan.precision),
        ):
            if is_set:
                raise ConfigError(
                    f"strategy autotp does not go with {key}={value}. Use {key}={wanted}."
                )
        words = "strategy.slice=autotp", "use --strategy tensor"
        require_deepspeed(plan.device_type, *words)
        AUTOTP.refuse_missing(*words)

    def variants(self, shape: Shape) -> Iterable[Variant]:  # noqa: ARG002
        """See `Strategy.variants`: none; `tensor` slices more, beside more."""
        return ()

    def most_ranks(self, workload: Workload) -> int:
        """See `SliceStrategy.most_ranks`."""
        return most_ranks(workload)

    def lay_slices(self, workload: Workload, plan: Plan) -> ModelSlices:
        """See `SliceStrategy.lay_slices`."""
        found = plan_slices(workload, plan.tp, keep=self.keep, repeats=workload.repeats)
        slices = pairs_of(found, workload.model, plan.tp)
        check_local_widths(workload, slices, layer_specs(slices), plan.tp)
        names = [name for name, _ in workload.model.named_parameters()]
        whole = {n: found.kept.get(n, "") for n in names if n not in slices}
        texts = {name: spec_text(own) for name, own in slices.items()}
        lines = merged_lines(texts, whole)
        # AutoTP's layers do not know of each other.
        laid = ModelSlices(slices, size=plan.tp, lines=lines, kept=found.kept)
        return replace(laid, merges_gradients=False)

    def replace_layers(self, assembly: Assembly, closing: ExitStack) -> dict[str, Any]:
        """See `SliceStrategy.replace_layers`."""
        state, context = assembly.slices, assembly.context
        if state is None or state.group.group is None or context.dp_group is None:
            raise ValueError("layers are replaced where there are ranks")
        specs = layer_specs(state.by_name)
        held = [name for name, _ in sliced_tensors(assembly.model, state.by_name)]
        shapes = whole_shapes(assembly.model, state.by_name, held)
        use_groups(state.group.group, context.dp_group, closing)
        differ = keep_values(assembly.model, specs, state.group.group, shapes)
        if differ:
            raise ConfigError(
                f"strategy autotp: DeepSpeed slices {differ[0]} otherwise than evenly over "
                f"{state.group.size} ranks. Use --strategy tensor."
            )
        return {"autotp_size": state.group.size, "partition_config": partition_config(specs)}

    def traffic(self, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
        """What a micro-batch exchanges, as `tensor`'s run on fake tensors has it."""
        counts: Counter[str] = Counter(exchange.kind for exchange in profile.exchanges)
        nbytes = sum(exchange.nbytes for exchange in profile.exchanges)
        if not counts:
            return ()
        count = counts["all_reduce"]
        return (Traffic("all_reduce", nbytes, count, "micro_batch", "passes", plan.tp, 1),)
