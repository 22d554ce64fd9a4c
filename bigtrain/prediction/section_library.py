"""A model's sections for the planner: any micro-batch size, any policy, any number of tp ranks.

Two runs on fake tensors with different numbers of rows show how each size grows with the rows. The
sections for all other numbers of rows are interpolated between them. In the same way, two runs of
sliced layers give the sections for other numbers of tp ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch
from torch import nn

from bigtrain.activations.policy import BlockPolicy
from bigtrain.core.strategy import Plan, Strategy
from bigtrain.data.loader import MicroBatch
from bigtrain.losses.chunked_cross_entropy import ChunkedCrossEntropy
from bigtrain.losses.loss import Loss
from bigtrain.memory.timeline import Breakdown
from bigtrain.optim.update import MakeOptimizer
from bigtrain.prediction.compose import count_parameters, section_states
from bigtrain.prediction.fake_runs.interpolate import interpolate_named, interpolate_sections
from bigtrain.prediction.fake_runs.runs import FakeRuns, RunKind
from bigtrain.prediction.fake_runs.slices import finer_share, slicing_key
from bigtrain.prediction.record_sections import RecordedSections
from bigtrain.prediction.sections import PassPair, Section
from bigtrain.slicing.state import ModelSlices


@dataclass(frozen=True, eq=False)
class ModelSections:
    """A model's sections for one micro-batch size, with one policy for all blocks."""

    base: RecordedSections
    """The run from which the sections were made; it may have fewer blocks than the model."""
    sections: tuple[Section, ...]
    """The part before the blocks, every block of the model, and the part after the blocks."""

    @cached_property
    def states(self) -> Breakdown:
        """Bytes of the states of the whole model in one process."""
        return section_states(self.sections)

    @cached_property
    def exchanges(self) -> tuple[tuple[object, int], ...]:
        """The exchanges over tp of each section, with the number of consecutive equal sections."""
        runs = groupby(section.exchanges for section in self.sections)
        return tuple((exchanges, sum(1 for _ in run)) for exchanges, run in runs)

    @cached_property
    def numbers(self) -> int:
        """The number of trained elements; tied parameters count once."""
        return count_parameters(self.sections, trained=True)

    @cached_property
    def trained(self) -> int:
        """The number of trained elements, summed over the sections.

        A parameter that is used both before and after the blocks, such as the embedding whose
        weight is also that of the head, is in two sections and counts twice.
        """
        return sum(t.numbers for section in self.sections for t in section.tensors if t.trained)


class SectionLibrary:
    """The sections of one model, for any plan.

    Args:
        model: a model on the meta device; it is not changed.
        example: a micro-batch of any size.
        loss: (several micro-batches wait at the head, rows of each) -> the loss of the run.
        make_optimizer: makes the optimizer as a run does.
        device: the device whose kernels are assumed.
        slices: the model's slices in a plan that slices it; None for the slices that the plan's
            technique chooses.
    """

    def __init__(
        self,
        model: nn.Module,
        example: MicroBatch,
        loss: Callable[[bool, int], Loss],
        make_optimizer: MakeOptimizer,
        device: torch.device,
        slices: ModelSlices | None = None,
    ) -> None:
        self._runs = FakeRuns(model, example, loss, make_optimizer, device, slices)
        self._bodies: dict[object, ModelSections] = {}
        self._changes = 0
        names = list(model.named_parameters(remove_duplicate=False))
        self._ties = len({id(p) for _, p in names}) < len(names)
        self._has_frozen = not all(p.requires_grad for p in model.parameters())
        self._named = self._runs.named

    @property
    def num_blocks(self) -> int:
        """The number of the model's blocks."""
        return len(self._named)

    def most_ranks(self, techniques: Iterable[Strategy]) -> int:
        """Return the largest tp size at which these techniques can slice the model.

        It is 1 if none of them can.
        """
        return self._runs.most_ranks(techniques)

    def first_blocks(self, blocks: int) -> SectionLibrary:
        """Return a library of the same model with only its first blocks.

        It shares the runs on fake tensors with this library.

        Args:
            blocks: the number of blocks.
        """
        library = copy(self)
        library._named, library._bodies = self._named[:blocks], {}
        return library

    def model_sections(
        self,
        plan: Plan,
        rows: int,
        choice: BlockPolicy,
        *,
        waiting: bool = False,
        cut: bool = False,
        exact: bool = True,
    ) -> ModelSections:
        """Return the sections in a run of this plan.

        Args:
            plan: the plan; the policies of its blocks are ignored.
            rows: the number of rows of a micro-batch.
            choice: the policy of every block.
            waiting: whether several micro-batches wait at the head.
            cut: whether the sections are on several ranks, so that tied parameters are separate.
            exact: whether the memory of the part after the blocks has to be exact, which may take
                one more run if the loss is computed in chunks.

        Raises:
            ConfigError: the model does not run on fake tensors, or not with this policy.
        """
        # The parts before and after the blocks are those of the policy "keep". So the loss and the
        # ties of parameters do not matter for other policies.
        keeps_all = choice == "keep"
        kind = self._kind(plan, rows, choice, waiting=keeps_all and waiting, cut=cut)
        kind = kind._replace(cut=keeps_all and kind.cut)
        if self._changes != self._runs.changes:
            self._bodies, self._changes = {}, self._runs.changes
        if (kind, rows, exact) not in self._bodies:
            self._body(plan, kind, rows, exact=exact)
            if cut and self._runs.copied_gradient and not kind.contiguous_gradients:
                # The run has copied a gradient, so run again with contiguous gradients.
                return self.model_sections(
                    plan, rows, choice, waiting=waiting, cut=cut, exact=exact
                )
        return self._bodies[kind, rows, exact]

    def _kind(
        self, plan: Plan, rows: int, choice: BlockPolicy, *, waiting: bool, cut: bool
    ) -> RunKind:
        return RunKind(
            plan.bf16_parameters,
            plan.moves_activations,
            choice,
            waiting and self._runs.waits(rows),
            cut and self._ties,
            cut and self._runs.copied_gradient,
            slicing_key(plan),
            self._has_frozen and plan.frozen_in_bf16 and not plan.bf16_parameters,
        )

    def _body(self, plan: Plan, kind: RunKind, rows: int, *, exact: bool) -> None:
        recorded, is_exact = self._read_off(plan, kind, rows)
        # With another policy than "keep" only the blocks of a run are used.
        if exact and not is_exact and kind.choice == "keep":
            *sections, end = recorded.sections
            exact_end = replace(self._runs.end(plan, kind, rows), tensors=end.tensors)
            recorded = replace(recorded, sections=(*sections, exact_end))
        body = ModelSections(recorded, self._full_depth(recorded, cut=kind.cut))
        for key in {exact, exact or is_exact or kind.choice != "keep"}:
            self._bodies[kind, rows, key] = body
        self._bodies.setdefault((kind, rows, False), body)

    def _read_off(self, plan: Plan, kind: RunKind, rows: int) -> tuple[RecordedSections, bool]:
        """Return the sections for `rows` rows, and whether their memory is exact.

        They are interpolated between runs with other numbers of rows, or with coarser slices.
        """
        runs, others = self._runs, self._runs.coarser(plan, kind, rows)
        if others:
            (few, few_exact), (many, many_exact) = (
                self._read_off(coarser_plan, coarser_kind, rows)
                for coarser_plan, coarser_kind in others
            )
            share = finer_share(plan.tp, *(coarser_plan.tp for coarser_plan, _ in others))
            finer = interpolate_sections(few, many, share)
            if finer is not None:
                is_chunked = isinstance(runs.loss(kind, rows), ChunkedCrossEntropy)
                return finer[0], finer[1] and few_exact and many_exact and not is_chunked
        sizes = runs.sizes(plan, kind, rows)
        if rows < sizes[0]:
            return runs.recorded(plan, kind, (rows,), rows)[0], True
        small, large = runs.recorded(plan, kind, sizes, rows)
        if rows in sizes:
            return (small, large)[sizes.index(rows)], True
        share = (rows - small.rows) / (large.rows - small.rows)
        interpolated = interpolate_sections(small, large, share)
        if interpolated is None:
            return runs.recorded(plan, kind, (rows,), rows)[0], True
        return interpolated[0], interpolated[1] and runs.in_one_round(plan, kind, rows)

    def split_passes(
        self, plan: Plan, rows: int, *, waiting: bool = False, cut: bool = False
    ) -> dict[str, PassPair] | None:
        """Return the forward and the split backward pass of each section (zero bubble).

        Args:
            plan: see `model_sections`.
            rows: see `model_sections`.
            waiting: see `model_sections`.
            cut: see `model_sections`.

        Returns:
            The passes of each block by its name, and of the part after the blocks under "". None if
            the backward pass of the model cannot be split.
        """
        kind = self._kind(plan, rows, "keep", waiting=waiting, cut=cut)
        passes = self._split(plan, kind, rows)
        _, stands_for = self._runs.shortened(cut=kind.cut)
        if passes is None:
            return None
        blocks = {name: passes[s] for name, s in stands_for.items() if s in passes}
        return {**blocks, "": passes[""]}

    def _split(self, plan: Plan, kind: RunKind, rows: int) -> dict[str, PassPair] | None:
        """Return `split_passes` for the blocks of the model that is run, which may be shortened."""
        runs, others = self._runs, self._runs.coarser(plan, kind, rows)
        if others and not isinstance(runs.loss(kind, rows), ChunkedCrossEntropy):
            share = finer_share(plan.tp, *(coarser_plan.tp for coarser_plan, _ in others))
            coarser_passes = [
                self._split(coarser_plan, coarser_kind, rows)
                for coarser_plan, coarser_kind in others
            ]
            finer = interpolate_named(coarser_passes, share)
            if finer is not None:
                return finer
        sizes = runs.sizes(plan, kind, rows)
        recorded = runs.split_passes(plan, kind, sizes if rows >= sizes[0] else (rows,), rows)
        if recorded is None or rows <= sizes[0] or rows == sizes[1]:
            return None if recorded is None else recorded[rows == sizes[1]]
        share = (rows - sizes[0]) / (sizes[1] - sizes[0])
        interpolated = interpolate_named(recorded, share)
        return interpolated or (runs.split_passes(plan, kind, (rows,), rows) or (None,))[0]

    def _full_depth(self, recorded: RecordedSections, *, cut: bool) -> tuple[Section, ...]:
        """Return the part before the blocks, every block in order, and the part after them."""
        _, stands_for = self._runs.shortened(cut=cut)
        sections = [self._with_original_names(section) for section in recorded.sections]
        places = {section.name: index for index, section in enumerate(sections)}
        ordered = [
            (places[stands_for[name]], place, name)
            for place, name in enumerate(self._named)
            if stands_for[name] in places
        ]
        ordered.sort(key=lambda block: block[0])
        blocks = [
            replace(sections[index], name=name, place=place)
            for index, place, name in ordered
            if index
        ]
        return (sections[0], *blocks, sections[-1])

    def _with_original_names(self, section: Section) -> Section:
        """Return the section with the original names of tied tensors that were copied."""
        aliases = self._runs.aliases
        tensors = (
            replace(t, name=aliases.get(t.name, t.name)) if t.is_between or not section.name else t
            for t in section.tensors
        )
        return replace(section, tensors=tuple(tensors))
