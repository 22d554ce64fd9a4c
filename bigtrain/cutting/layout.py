"""The layout of a cut model: its stages, and the rank of each stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from bigtrain.cutting.choose import ChosenCut
from bigtrain.cutting.self_check import compare_cut
from bigtrain.cutting.stage import Crossings
from bigtrain.cutting.traced_model import Numerics
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.hub.nf4 import parameter_elements
from bigtrain.losses.loss import Loss
from bigtrain.models.parameters import bf16_parameter_names
from bigtrain.slicing.exchange import SliceGroup
from bigtrain.slicing.scatter_gather import Crossing
from bigtrain.units import MIB, format_bytes, format_count

MAX_CHECKED_BYTES = 256 * MIB
"""The most parameter bytes with which the stages are compared with the whole model."""


@dataclass(frozen=True)
class Layout:
    """The stages of a model and their ranks on the pp axis; the same on all ranks."""

    chosen: ChosenCut
    ranks: tuple[int, ...]
    """The pp rank of each stage, or the index of its device if one process has all stages."""
    place_word: str = "pp rank"
    """The word for an entry of `ranks` in messages."""
    note: str = ""
    """A line about how stages differ from the whole model; "" if they do not."""

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Return the indices of the stages of one rank, in order."""
        return tuple(stage for stage, rank in enumerate(self.ranks) if rank == pp_rank)

    def between_ranks(self, stage: int) -> tuple[bool, bool]:
        """Return whether a stage's inputs, and whether its outputs, pass between two ranks."""
        neighbours = (self.ranks[stage - 1 : stage], self.ranks[stage + 1 : stage + 2])
        inputs, outputs = (
            any(rank != self.ranks[stage] for rank in neighbour) for neighbour in neighbours
        )
        return inputs, outputs

    def crossings(self, stage: int, group: SliceGroup | None) -> Crossings:
        """Return how the inputs and the outputs of a stage pass between stages.

        Args:
            stage: the index of the stage.
            group: the tp ranks with slices of the stage; None if it is not sliced.
        """
        inputs, outputs = self.between_ranks(stage)
        return Crossing(group, inputs), Crossing(group, outputs)

    @property
    def all_stages(self) -> range:
        """The indices of the stages of all ranks."""
        return range(len(self.ranks))

    def tensor_names(self, stage: int) -> set[str]:
        """Return the first names of the parameters and buffers that a stage uses."""
        return self.chosen.cut.tensor_names_of([stage])

    @property
    def shared(self) -> list[str]:
        """The first names of the parameters that several stages of one rank use."""
        names = []
        for name, stages in self.chosen.cut.ties:
            ranks = [self.ranks[stage] for stage in stages]
            if len(set(ranks)) < len(ranks):
                names.append(name)
        return names

    @property
    def untrained(self) -> list[int]:
        """The indices of the stages without a trained parameter."""
        cut = self.chosen.cut
        named = cut.traced_model.fake_model.named_parameters()
        trained = {name for name, parameter in named if parameter.requires_grad}
        return [s for s in self.all_stages if trained.isdisjoint(cut.tensor_names_of([s]))]

    def check(self, model: nn.Module, micro_batch: MicroBatch, loss: Loss) -> str:
        """Compare the stages with the whole model on a small input, if the model is small.

        Args:
            model: the whole model, on any device; it is not changed.
            micro_batch: a micro-batch; its first rows are used.
            loss: the loss of the run.

        Returns:
            A line with the result, or with the reason why they were not compared.

        Raises:
            ConfigError: the loss or a gradient of the stages differs from the whole model's.
        """
        size = sum(self.chosen.parameter_bytes)
        if size > MAX_CHECKED_BYTES:
            return (
                f"cut: not compared with the whole model, because its parameters have "
                f"{format_bytes(size)}, more than {format_bytes(MAX_CHECKED_BYTES)}"
            )
        try:
            worst = compare_cut(self.chosen.cut, model, micro_batch, loss)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - user code with invented weights runs here
            kind = type(error).__name__
            first = (str(error).splitlines() or [""])[0]
            return f"cut: not compared with the whole model ({kind}: {first})"
        return f"cut: the stages give the whole model's loss and gradients, within {worst:.1g}"

    def lines(self) -> Iterator[str]:
        """Yield a line for each stage (its first module, size and share of work), then the note."""
        chosen = self.chosen
        names = ["the input", *(name for name, _ in chosen.cut.call_sites)]
        work = sum(chosen.partition.seconds) or 1.0
        elements = parameter_elements(chosen.cut.traced_model.fake_model)
        for stage, name in enumerate(names):
            names_of_stage = chosen.cut.tensor_names_of([stage])
            numbers = sum(elements.get(tensor, 0) for tensor in names_of_stage)
            share = chosen.partition.seconds[stage] / work
            sent = ""
            if stage < len(chosen.crossing_bytes):
                sent = f", sends {format_bytes(chosen.crossing_bytes[stage])} a micro-batch"
            yield (
                f"stage {stage} on {self.place_word} {self.ranks[stage]}: from {name}, "
                f"{format_count(numbers)} parameters, {100 * share:.0f} % of the work{sent}"
            )
        if self.note:
            yield self.note


def numerics_for(precision: str, *, bf16_parameters: bool, of_cuda: bool) -> Numerics:
    """Return the settings that decide the dtypes in a run of this precision.

    Args:
        precision: the precision of the job: 'fp32', 'bf16' or 'fp64'.
        bf16_parameters: see `Plan.bf16_parameters`.
        of_cuda: see `stands_for_cuda`.
    """
    return Numerics(
        double=precision == "fp64",
        autocast=precision == "bf16",
        low=bf16_parameter_names if bf16_parameters else None,
        of_cuda=of_cuda,
    )
