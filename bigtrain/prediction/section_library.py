"""A model as the search sees it: its blocks, for any micro-batch size and whatever they keep.

Runs on fake tensors are made when they are first asked for, of a model in which blocks that are
alike stand three times at most, and kept. What two of them show to grow with the rows of a
micro-batch is known for all other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from bigtrain.activations.policy import BlockPolicy
from bigtrain.core.registry import make_technique
from bigtrain.core.strategy import Plan, SliceStrategy, Strategy
from bigtrain.core.workload import Workload
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.job.schema import RoleConfig, long_form
from bigtrain.losses.chunked_cross_entropy import ChunkedCrossEntropy
from bigtrain.losses.loss import Loss
from bigtrain.models.blocks import independent_blocks
from bigtrain.optim.update import MakeOptimizer
from bigtrain.prediction.record_sections import (
    RecordedSections,
    UntraceableError,
    record_sections,
    record_split_backward,
)
from bigtrain.prediction.sections import PassPair, Section
from bigtrain.prediction.shorten import shorten_model, untie_parameters
from bigtrain.prediction.sizes.interpolate import interpolate_named, interpolate_sections
from bigtrain.prediction.sizes.slices import (
    are_even,
    coarser,
    finer_share,
    of_shortened,
    slicing_key,
)
from bigtrain.slicing.state import ModelSlices
from bigtrain.tensors.tree import tree_tensors

RECORDED_ROWS = (1, 2)
"""Rows of the two runs that others are read off."""
SEVERAL_ROWS = (2, 4)
"""The same where one row is special, as for layers that take statistics over a batch: they refuse
to train on it."""


@dataclass(frozen=True)
class ModelSections:
    """A model's sections for one micro-batch size, all blocks choosing alike."""

    base: RecordedSections
    sections: tuple[Section, ...]
    """What is before the blocks, every block of the model, what is after them."""


class _Kind(NamedTuple):
    """What makes one run on fake tensors differ from another, but for its rows."""

    low: bool
    """See `Plan.bf16_parameters`."""
    moves: bool
    """See `Plan.moves_activations`."""
    choice: BlockPolicy
    waiting: bool
    cut: bool
    """Whether tied parameters are several."""
    as_sent: bool
    """Whether gradients come as other ranks send them; see `RecordedSections.copies_gradient`."""
    sliced: str = ""
    """By whom and over how many ranks; empty where layers are whole."""


class SectionLibrary:
    """The sections of one model.

    Args:
        model: on the meta device; it is left as it is.
        example: a micro-batch of any size.
        loss: the loss of a run; told whether several micro-batches wait at the head, and the rows
            of each.
        make_optimizer: as in a run.
        device: whose kernels are meant.
        slices: of the model in a plan that slices it; left out, as the plan's technique lays them.

    Raises:
        ConfigError: the model does not run without its numbers.
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
        self._model, self._example, self._loss = model, example, loss
        self._given_slices = slices
        self._laid: dict[object, ModelSlices | None] = {}
        self._make_optimizer, self._device = make_optimizer, device
        self._runs: dict[object, tuple[RecordedSections, ...]] = {}
        self._bodies: dict[object, ModelSections] = {}
        self._halved: dict[object, tuple[dict[str, PassPair], ...] | None] = {}
        self._short: dict[bool, tuple[nn.Module, Mapping[str, str]]] = {}
        names = list(model.named_parameters(remove_duplicate=False))
        self._ties = len({id(p) for _, p in names}) < len(names)
        statistics = any(isinstance(module, _NormBase) for module in model.modules())
        self._sizes = SEVERAL_ROWS if statistics else RECORDED_ROWS
        self._aliases: dict[str, str] = {}
        self._relaid = False
        """Whether a run has shown it: see `RecordedSections.copies_gradient`."""
        self._named = [name for name, _ in independent_blocks(model)]

    @property
    def num_blocks(self) -> int:
        """Of the model."""
        return len(self._named)

    def most_ranks(self, techniques: Iterable[Strategy]) -> int:
        """Over how many ranks one of these can slice something of the model; 1: over none."""
        loss = self._loss(False, self._example.rows)
        given = Workload(self._shortened(cut=False)[0], self._example, loss, self._make_optimizer)
        return max(
            (t.most_ranks(given) for t in techniques if isinstance(t, SliceStrategy)), default=1
        )

    def shallower(self, blocks: int) -> SectionLibrary:
        """The same model with its first blocks alone; runs are shared."""
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
        """The sections in a run of this plan.

        Args:
            plan: for the precision and all that is not the choice.
            rows: of a micro-batch.
            choice: of every block.
            waiting: whether several micro-batches wait at the head.
            cut: whether the sections are laid over ranks, each with parameters of its own.
            exact: whether the memory of what is after the blocks matters, which may take a run of
                its own where the loss goes in chunks.

        Raises:
            ConfigError: the model does not run without its numbers, or not with this choice.
        """
        # What is before and after the blocks is taken from the run in which they keep all.
        keeps_all = choice == "keep"
        kind = self._kind(plan, rows, choice, waiting=keeps_all and waiting, cut=cut)
        kind = kind._replace(cut=keeps_all and kind.cut)
        if (kind, rows, exact) not in self._bodies:
            self._body(plan, kind, rows, exact=exact)
            if cut and self._relaid and not kind.as_sent:  # it has shown it
                given = {"waiting": waiting, "cut": cut, "exact": exact}
                return self.model_sections(plan, rows, choice, **given)
        return self._bodies[kind, rows, exact]

    def _kind(
        self, plan: Plan, rows: int, choice: BlockPolicy, *, waiting: bool, cut: bool
    ) -> _Kind:
        return _Kind(
            plan.bf16_parameters,
            plan.moves_activations,
            choice,
            waiting and self._waits(rows),
            cut and self._ties,
            cut and self._relaid,
            slicing_key(plan),
        )

    def _waits(self, rows: int) -> bool:
        """Whether micro-batches of so many rows have another loss where several wait."""
        return self._loss(True, rows) != self._loss(False, rows)

    def _body(self, plan: Plan, kind: _Kind, rows: int, *, exact: bool) -> None:
        recorded, is_exact = self._read_off(plan, kind, rows)
        # Of blocks that keep less nobody asks what is after them.
        if exact and not is_exact and kind.choice == "keep":
            recorded = self._with_own_end(plan, kind, rows, recorded)
        found = ModelSections(recorded, self._whole(recorded, cut=kind.cut))
        for key in {exact, exact or is_exact or kind.choice != "keep"}:
            self._bodies[kind, rows, key] = found
        if exact:
            self._bodies.setdefault((kind, rows, False), found)

    def _read_off(self, plan: Plan, kind: _Kind, rows: int) -> tuple[RecordedSections, bool]:
        """A run, and whether it is exact: of other rows than were run, and of finer slices."""
        others = self._coarser(plan, kind, rows)
        if others:
            (few, few_exact), (many, many_exact) = (self._read_off(*one, rows) for one in others)
            share = finer_share(plan.tp, *(one.tp for one, _ in others))
            finer = interpolate_sections(few, many, share)
            if finer is not None:
                is_chunked = isinstance(self._loss(kind.waiting, rows), ChunkedCrossEntropy)
                return finer[0], finer[1] and few_exact and many_exact and not is_chunked
        sizes = self._sizes_of(plan, kind, rows)
        if rows < sizes[0]:
            return self._recorded(plan, kind, (rows,), rows)[0], True
        pair_of_rows = self._recorded(plan, kind, sizes, rows)
        if rows in sizes:
            return pair_of_rows[sizes.index(rows)], True
        small, large = pair_of_rows
        share = (rows - small.rows) / (large.rows - small.rows)
        found = interpolate_sections(small, large, share)
        if found is None:
            return self._recorded(plan, kind, (rows,), rows)[0], True
        return found[0], found[1] and self._in_one_round(plan, kind, rows)

    def _sizes_of(self, plan: Plan, kind: _Kind, rows: int) -> tuple[int, int]:
        """The rows that are run; stretches of one sequence lie otherwise than those of several."""
        slices = self._slices(plan, self._loss(kind.waiting, rows), cut=kind.cut)
        in_stretches = slices is not None and slices.sequence_dim is not None
        return SEVERAL_ROWS if in_stretches else self._sizes

    def _with_own_end(
        self, plan: Plan, kind: _Kind, rows: int, recorded: RecordedSections
    ) -> RecordedSections:
        """A run that was read off others, but for its end, which is run with these rows."""
        if (kind, rows) not in self._runs:
            short = shorten_model(self._untied(cut=kind.cut), most=1)
            names = [] if short is None else [name for name, _ in independent_blocks(short[0])]
            found: tuple[RecordedSections, ...] = ()
            if short is not None and names == list(self._shortened(cut=kind.cut)[1].values())[:1]:
                loss, batch = (
                    self._loss(kind.waiting, rows),
                    resize_micro_batch(self._example, rows),
                )
                slices = self._slices(plan, loss, cut=kind.cut)
                workload = Workload(short[0], self._example, loss, self._make_optimizer)
                given = (workload, names, [batch], _with_policy(plan, "keep"), self._device, slices)
                with suppress(UntraceableError):
                    found = record_sections(*given, as_sent=kind.as_sent)
            self._runs[kind, rows] = found or self._recorded(plan, kind, (rows,), rows)
        (end,) = self._runs[kind, rows]
        return replace(recorded, sections=(*recorded.sections[:-1], end.sections[-1]))

    def _coarser(self, plan: Plan, kind: _Kind, rows: int) -> list[tuple[Plan, _Kind]]:
        """Plans off which finer slices are read; none where there are few, or some are uneven."""
        others, loss = coarser(plan), self._loss(kind.waiting, rows)
        if not kind.sliced or others is None or self._given_slices is not None:
            return []
        laid = [self._slices(one, loss, cut=kind.cut) for one in (*others, plan)]
        if not are_even(laid, self._example):
            return []
        return [(one, kind._replace(sliced=slicing_key(one))) for one in others]

    def _recorded(
        self, plan: Plan, kind: _Kind, sizes: tuple[int, ...], rows: int
    ) -> tuple[RecordedSections, ...]:
        if (kind, sizes) not in self._runs:
            self._runs[kind, sizes] = self._run(plan, sizes, kind, self._loss(kind.waiting, rows))
        return self._runs[kind, sizes]

    def _in_one_round(self, plan: Plan, kind: _Kind, rows: int) -> bool:
        """Whether a loss in chunks has one chunk, also with so many rows."""
        loss = self._loss(kind.waiting, rows)
        if not isinstance(loss, ChunkedCrossEntropy):
            return True
        targets = sum(tensor.numel() for tensor in tree_tensors(self._example.targets))
        classes = len(self._model.get_submodule(loss.head).get_parameter("weight"))
        slices = self._slices(plan, loss, cut=False)
        own = None if slices is None else slices.by_name.get(f"{loss.head}.weight")
        if own is not None and own.dim == 0:
            classes = own.length(0, plan.tp)
        dtype = torch.float64 if plan.precision == "fp64" else torch.float32
        return loss.rounds(targets * rows // max(1, self._example.rows), classes, dtype) == 1

    def split_passes(
        self, plan: Plan, rows: int, *, waiting: bool = False, cut: bool = False
    ) -> dict[str, PassPair] | None:
        """The blocks by their names, and what is after them under "", going back in two parts.

        Args:
            plan: as all others: see `model_sections`.
            rows: of a micro-batch.
            waiting: see `model_sections`.
            cut: see `model_sections`.

        Returns:
            None where the model does not run so.
        """
        kind = self._kind(plan, rows, "keep", waiting=waiting, cut=cut)
        found = self._split(plan, kind, rows)
        _, stands_for = self._shortened(cut=kind.cut)
        if found is None:
            return None
        blocks = {name: found[s] for name, s in stands_for.items() if s in found}
        return {**blocks, "": found[""]}

    def _split(self, plan: Plan, kind: _Kind, rows: int) -> dict[str, PassPair] | None:
        """The same of the model that is run."""
        others = self._coarser(plan, kind, rows)
        is_chunked = isinstance(self._loss(kind.waiting, rows), ChunkedCrossEntropy)
        if others and not is_chunked:
            share = finer_share(plan.tp, *(one.tp for one, _ in others))
            found = interpolate_named([self._split(*one, rows) for one in others], share)
            if found is not None:
                return found
        sizes = self._sizes_of(plan, kind, rows)
        recorded = self._halves(plan, kind, sizes if rows >= sizes[0] else (rows,), rows)
        if recorded is None or rows <= sizes[0] or rows == sizes[1]:
            return None if recorded is None else recorded[rows == sizes[1]]
        share = (rows - sizes[0]) / (sizes[1] - sizes[0])
        found = interpolate_named(recorded, share)
        return found or (self._halves(plan, kind, (rows,), rows) or (None,))[0]

    def _halves(
        self, plan: Plan, kind: _Kind, sizes: tuple[int, ...], rows: int
    ) -> tuple[dict[str, PassPair], ...] | None:
        if (kind, sizes) not in self._halved:
            loss = self._loss(kind.waiting, rows)
            batches = [resize_micro_batch(self._example, size) for size in sizes]
            slices = self._slices(plan, loss, cut=kind.cut)
            workload, names = self._workload(loss, cut=kind.cut)
            given = (workload, names, batches, _with_policy(plan, "keep"), self._device)
            found = record_split_backward(*given, slices, as_sent=kind.as_sent)
            self._halved[kind, sizes] = found
        return self._halved[kind, sizes]

    def _run(
        self, plan: Plan, sizes: Sequence[int], kind: _Kind, loss: Loss
    ) -> tuple[RecordedSections, ...]:
        batches = [resize_micro_batch(self._example, rows) for rows in sizes]
        slices = self._slices(plan, loss, cut=kind.cut)
        workload, names = self._workload(loss, cut=kind.cut)
        is_whole = len(names) == len(self._named)
        given = (workload, names, batches, _with_policy(plan, kind.choice), self._device)
        try:
            recorded = record_sections(*given, slices, as_sent=kind.as_sent)
        except UntraceableError as error:
            if is_whole:
                raise ConfigError(_untraceable(str(error), error.__cause__)) from error
        else:
            if is_whole or any(section.name for section in recorded[0].sections):
                self._relaid = self._relaid or recorded[-1].copies_gradient
                return recorded
        # It does not take being shortened, or its blocks do not follow one another: from now on
        # it is run whole, if it runs so.
        shortened_before = self._short[kind.cut]
        whole_model = self._untied(cut=kind.cut)
        self._short[kind.cut] = whole_model, {name: name for name in self._named}
        try:
            recorded = self._run(plan, sizes, kind, loss)
        except ConfigError:
            self._short[kind.cut] = shortened_before
            raise
        for cache in (self._runs, self._bodies, self._halved, self._laid):  # of the shortened model
            cache.clear()
        return recorded

    def _workload(self, loss: Loss, *, cut: bool) -> tuple[Workload, list[str]]:
        """What is run, and the names of its blocks: a copy that ties nothing might have more."""
        model, stands_for = self._shortened(cut=cut)
        workload = Workload(model, self._example, loss, self._make_optimizer)
        run = set(stands_for.values())
        return workload, [name for name, _ in independent_blocks(model) if name in run]

    def _slices(self, plan: Plan, loss: Loss, *, cut: bool) -> ModelSlices | None:
        """How a plan slices the model that is run: as the whole one, tied as that is.

        Raises:
            ConfigError: nothing can be sliced so.
        """
        technique = plan.techniques.get("slice")
        if not isinstance(technique, SliceStrategy) or plan.tp == 1:
            return None
        key = slicing_key(plan)
        if key not in self._laid:
            model, stands_for = self._shortened(cut=False)
            if self._given_slices is None:
                workload = Workload(model, self._example, loss, self._make_optimizer)
                self._laid[key] = technique.lay_slices(workload, plan)
            else:
                self._laid[key] = of_shortened(self._given_slices, stands_for)
        laid = self._laid[key]
        if laid is None:  # blocks that are alike are not sliced alike: it is run whole
            whole = self._untied(cut=cut)
            self._short[cut] = whole, {name: name for name in self._named}
            laid = self._given_slices
        return laid

    def _untied(self, *, cut: bool) -> nn.Module:
        if not cut:
            return self._model
        copied, self._aliases = untie_parameters(self._model)
        return copied

    def _shortened(self, *, cut: bool) -> tuple[nn.Module, Mapping[str, str]]:
        """The model to be run, and for each block of the whole one that which stands for it."""
        if cut not in self._short:
            model = self._untied(cut=cut)
            result = shorten_model(model)
            if result is None:
                self._short[cut] = model, {name: name for name in self._named}
            else:
                short, order = result
                remaining = [name for name, _ in independent_blocks(short)]
                pairs = zip(self._named, order, strict=True)
                self._short[cut] = short, {name: remaining[place] for name, place in pairs}
        return self._short[cut]

    def _whole(self, recorded: RecordedSections, *, cut: bool) -> tuple[Section, ...]:
        """Every block of the model, in the order of the pass."""
        _, stands_for = self._shortened(cut=cut)
        places = {section.name: place for place, section in enumerate(recorded.sections)}
        ordered = [(places[stands_for[n]], n) for n in self._named if stands_for[n] in places]
        ordered.sort(key=lambda pair: pair[0])
        blocks = [replace(recorded.sections[place], name=name) for place, name in ordered if place]
        return (self._own(recorded.sections[0]), *blocks, self._own(recorded.sections[-1]))

    def _own(self, section: Section) -> Section:
        """With the model's own names of what was tied."""
        tensors = (replace(t, name=self._aliases.get(t.name, t.name)) for t in section.tensors)
        return replace(section, tensors=tuple(tensors))


def resize_micro_batch(example: MicroBatch, rows: int) -> MicroBatch:
    """A micro-batch of so many rows, all of them the first of the example."""

    def grow(tensor: Tensor) -> Tensor:
        if tensor.dim() and len(tensor) == example.rows:
            return tensor[:1].expand(rows, *tensor.shape[1:]).contiguous()
        return tensor

    count = max(1, example.count * rows // max(1, example.rows))
    return replace(example.map(grow), count=count, rows=rows)


def _with_policy(plan: Plan, choice: BlockPolicy) -> Plan:
    """The plan with this choice for every block, whatever it had."""
    techniques = dict(plan.techniques)
    techniques.pop("recompute", None)
    if choice in ("full", "selective"):
        config = RoleConfig.model_validate(long_form("recompute", choice))
        techniques["recompute"] = make_technique("recompute", config)
    return replace(plan, techniques=techniques)


def _untraceable(reason: str, error: BaseException | None) -> str:
    return (
        f"plan: the model does not run on fake tensors, so nothing can be said of it: {reason}"
        f"{_where(error)}. Make what it computes depend on shapes and not on values, or measure "
        "it: bigtrain compare."
    )


def _where(error: BaseException | None) -> str:
    """The line of the user's code that an error came from."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__ if error else None)
    own = [f for f in frames if "/torch/" not in f.filename and "/bigtrain/" not in f.filename]
    return f" (in {own[-1].name}, {own[-1].filename}:{own[-1].lineno})" if own else ""
