"""Run a model on fake tensors, shortened to at most three blocks of each sequence of equal blocks.

Runs are made on demand and cached. If two runs differ only in the loss, the blocks of the first run
are also used for the second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from bigtrain.activations.policy import BlockPolicy
from bigtrain.core.layer_strategies import SliceStrategy
from bigtrain.core.registry import make_technique
from bigtrain.core.strategy import Plan, Strategy
from bigtrain.core.workload import Workload
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.job.schema import RoleConfig, long_form
from bigtrain.losses.chunked_cross_entropy import ChunkedCrossEntropy
from bigtrain.losses.loss import Loss
from bigtrain.models.blocks import independent_blocks
from bigtrain.optim.update import MakeOptimizer
from bigtrain.prediction.fake_runs.slices import (
    are_even,
    coarser,
    of_shortened,
    slices_within,
    slicing_key,
)
from bigtrain.prediction.record_sections import (
    ONE_STEP,
    RecordedSections,
    UntraceableError,
    record_sections,
    record_split_backward,
)
from bigtrain.prediction.sections import Anchor, PassPair, Section
from bigtrain.prediction.shorten import shorten_model, untie_parameters
from bigtrain.prediction.whole_model import WHOLE_MODEL, WholeModel
from bigtrain.slicing.state import ModelSlices
from bigtrain.tensors.tree import tree_tensors

RECORDED_ROWS = (1, 2)
"""The numbers of rows of the two runs between which runs with other rows are interpolated."""
SEVERAL_ROWS = (2, 4)
"""The numbers of rows if one row is a special case: layers with batch statistics refuse to train on
a single row."""


class RunKind(NamedTuple):
    """The settings that distinguish runs on fake tensors, apart from the number of rows."""

    low: bool
    """See `Plan.bf16_parameters`."""
    moves: bool
    """See `Plan.moves_activations`."""
    choice: BlockPolicy
    """The policy of every block."""
    waiting: bool
    """Whether several micro-batches wait at the head, so that another loss is used."""
    cut: bool
    """Whether tied parameters are separate, as in a cut model."""
    contiguous_gradients: bool
    """Whether gradients of outputs are copied to the outputs' strides, as if they were received
    from another rank; see `RecordedSections.copies_gradient`."""
    sliced: str = ""
    """The `slicing_key` of the plan; empty if layers are whole."""
    frozen_low: bool = False
    """Whether frozen parameters alone are in bf16; see `Plan.frozen_in_bf16`."""


class FakeRuns:
    """The runs of one model. The arguments are those of `SectionLibrary`."""

    def __init__(
        self,
        model: nn.Module,
        example: MicroBatch,
        loss: Callable[[bool, int], Loss],
        make_optimizer: MakeOptimizer,
        device: torch.device,
        slices: ModelSlices | None,
    ) -> None:
        self._model, self._example, self._loss = model, example, loss
        self._make_optimizer, self._device = make_optimizer, device
        self._fixed_slices = slices
        self._slices_of: dict[str, ModelSlices | None] = {}
        """The slices of the model that is run, by `slicing_key`."""
        self._runs: dict[object, tuple[RecordedSections, ...]] = {}
        self._split_runs: dict[object, tuple[dict[str, PassPair], ...] | None] = {}
        self._ends: dict[object, Section] = {}
        self._short: dict[bool, tuple[nn.Module, Mapping[str, str]]] = {}
        self._still_shorter: dict[object, tuple[nn.Module | None, tuple[int, ...]]] = {}
        statistics = any(isinstance(module, _NormBase) for module in model.modules())
        self._sizes = SEVERAL_ROWS if statistics else RECORDED_ROWS
        self.named = [name for name, _ in independent_blocks(model)]
        """The names of the blocks of the model."""
        self.aliases: dict[str, str] = {}
        """For each parameter that was copied to untie it, the name of the original."""
        self.copied_gradient = False
        """Whether a run has copied a gradient; see `RecordedSections.copies_gradient`."""
        self.changes = 0
        """The number of times that cached runs were discarded because another model is run."""

    def loss(self, kind: RunKind, rows: int) -> Loss:
        """Return the loss of a run."""
        return self._loss(kind.waiting, rows)

    def waits(self, rows: int) -> bool:
        """Whether micro-batches of `rows` rows use another loss if several wait at the head."""
        return self._loss(True, rows) != self._loss(False, rows)

    def most_ranks(self, techniques: Iterable[Strategy]) -> int:
        """See `SectionLibrary.most_ranks`."""
        loss, model = self._loss(False, self._example.rows), self.shortened(cut=False)[0]
        workload = self._workload(loss, model)
        slicing = (technique for technique in techniques if isinstance(technique, SliceStrategy))
        return max((technique.most_ranks(workload) for technique in slicing), default=1)

    def sizes(self, plan: Plan, kind: RunKind, rows: int) -> tuple[int, int]:
        """Return the two numbers of rows to run.

        With sequence shards they are `SEVERAL_ROWS`, because shards of one row have other strides
        than shards of several rows.
        """
        slices = self._slices(plan, self.loss(kind, rows), cut=kind.cut)
        in_shards = slices is not None and slices.sequence_dim is not None
        return SEVERAL_ROWS if in_shards else self._sizes

    def recorded(
        self, plan: Plan, kind: RunKind, sizes: tuple[int, ...], rows: int
    ) -> tuple[RecordedSections, ...]:
        """Return runs with these numbers of rows.

        Args:
            plan: the plan of the runs.
            kind: the kind of the runs.
            sizes: the numbers of rows.
            rows: the number of rows for which the loss is made.

        Raises:
            ConfigError: the model does not run on fake tensors.
        """
        if (kind, sizes) not in self._runs:
            self._runs[kind, sizes] = self._run(plan, sizes, kind, self.loss(kind, rows))
        return self._runs[kind, sizes]

    def split_passes(
        self, plan: Plan, kind: RunKind, sizes: tuple[int, ...], rows: int
    ) -> tuple[dict[str, PassPair], ...] | None:
        """Return runs with split backward passes; None if the backward pass cannot be split.

        The arguments are those of `recorded`.
        """
        if (kind, sizes) not in self._split_runs:
            loss = self.loss(kind, rows)
            batches = [resize_micro_batch(self._example, size) for size in sizes]
            slices = self._slices(plan, loss, cut=kind.cut)
            model, names = self._model_run(cut=kind.cut)
            self._split_runs[kind, sizes] = record_split_backward(
                self._workload(loss, model),
                names,
                batches,
                _with_policy(plan, "keep"),
                self._device,
                slices,
                contiguous_gradients=kind.contiguous_gradients,
            )
        return self._split_runs[kind, sizes]

    def end(self, plan: Plan, kind: RunKind, rows: int) -> Section:
        """Return the section after the blocks for a micro-batch of `rows` rows.

        The optimizer state of its tensors may be incomplete, because the run may be of one step.
        """
        if (kind, rows) not in self._ends:
            recorded = self._with_one_block(plan, kind, (rows,), self.loss(kind, rows), ONE_STEP)
            (run,) = recorded or self.recorded(plan, kind, (rows,), rows)
            self._ends[kind, rows] = run.sections[-1]
        return self._ends[kind, rows]

    def in_one_round(self, plan: Plan, kind: RunKind, rows: int) -> bool:
        """Whether the loss of `rows` rows is computed at once, or in a single chunk."""
        loss = self.loss(kind, rows)
        if not isinstance(loss, ChunkedCrossEntropy):
            return True
        targets = sum(tensor.numel() for tensor in tree_tensors(self._example.targets))
        classes = len(self._model.get_submodule(loss.head).get_parameter("weight"))
        slices = self._slices(plan, loss, cut=False)
        head_slices = None if slices is None else slices.by_name.get(f"{loss.head}.weight")
        if head_slices is not None and head_slices.dim == 0:
            classes = head_slices.length(0, plan.tp)
        dtype = torch.float64 if plan.precision == "fp64" else torch.float32
        return loss.rounds(targets * rows // max(1, self._example.rows), classes, dtype) == 1

    def coarser(self, plan: Plan, kind: RunKind, rows: int) -> list[tuple[Plan, RunKind]]:
        """Return the plans with coarser slices from which this plan's run can be extrapolated.

        The list is empty if that is impossible or not exact.
        """
        others, loss = coarser(plan), self.loss(kind, rows)
        if not kind.sliced or others is None or self._fixed_slices is not None:
            return []
        by_plan = [self._slices(smaller, loss, cut=kind.cut) for smaller in (*others, plan)]
        if not are_even(by_plan, self._example):
            return []
        return [(smaller, kind._replace(sliced=slicing_key(smaller))) for smaller in others]

    def _run(
        self, plan: Plan, sizes: Sequence[int], kind: RunKind, loss: Loss
    ) -> tuple[RecordedSections, ...]:
        composed = self._with_other_ends(plan, sizes, kind, loss) if kind.waiting else ()
        if composed:
            return composed
        batches = [resize_micro_batch(self._example, rows) for rows in sizes]
        slices = self._slices(plan, loss, cut=kind.cut)
        model, names = self._model_run(cut=kind.cut)
        is_whole = len(names) == len(self.named)
        try:
            recorded = record_sections(
                self._workload(loss, model),
                names,
                batches,
                _with_policy(plan, kind.choice),
                self._device,
                slices,
                contiguous_gradients=kind.contiguous_gradients,
            )
        except UntraceableError as error:
            if is_whole:
                raise ConfigError(_untraceable(str(error), error.__cause__)) from error
        else:
            if is_whole or any(section.name for section in recorded[0].sections):
                self.copied_gradient = self.copied_gradient or recorded[-1].copies_gradient
                return recorded
        # The shortened model does not run, or its blocks do not run one after another. So run the
        # whole model, for all kinds of runs.
        shortened_before = self._short[kind.cut]
        whole_model = self._untied(cut=kind.cut)
        self._short[kind.cut] = whole_model, {name: name for name in self.named}
        try:
            recorded = self._run(plan, sizes, kind, loss)
        except ConfigError:
            self._short[kind.cut] = shortened_before
            raise
        # The cached runs are of the shortened model.
        self._runs, self._split_runs, self._ends, self._slices_of = {}, {}, {}, {}
        self.changes += 1
        return recorded

    def _with_other_ends(
        self, plan: Plan, sizes: Sequence[int], kind: RunKind, loss: Loss
    ) -> tuple[RecordedSections, ...]:
        """Compose runs with another loss from the blocks of the runs with the usual loss.

        The result is empty if storages of blocks, such as autocast's copies of weights, live until
        a later section.
        """
        usual = kind._replace(waiting=False)
        runs = self.recorded(plan, usual, tuple(sizes), sizes[-1])
        if any(_holds_beyond(block) for run in runs for block in run.sections[1:-1]):
            return ()
        ends = self._with_one_block(plan, kind, sizes, loss)
        pairs = zip(runs, ends, strict=True) if ends else ()
        return tuple(_with_ends_of(run, end) for run, end in pairs)

    def _with_one_block(
        self,
        plan: Plan,
        kind: RunKind,
        sizes: Sequence[int],
        loss: Loss,
        unit: WholeModel = WHOLE_MODEL,
    ) -> tuple[RecordedSections, ...]:
        """Run the model with a single block; empty if the blocks are not all equal."""
        model, names = self._model_run(cut=kind.cut)
        short, order = self._shorter(model, 1)
        slices = self._slices(plan, loss, cut=kind.cut)
        if short is None or set(order) != {0}:
            return ()
        batches = [resize_micro_batch(self._example, rows) for rows in sizes]
        try:
            recorded = record_sections(
                self._workload(loss, short),
                names[:1],
                batches,
                _with_policy(plan, "keep"),
                self._device,
                None if slices is None else slices_within(slices, short),
                contiguous_gradients=kind.contiguous_gradients,
                unit=unit,
            )
        except UntraceableError:
            return ()
        return recorded if all(run.profile is None for run in recorded) else ()

    def _shorter(self, model: nn.Module, most: int) -> tuple[nn.Module | None, tuple[int, ...]]:
        """Shorten a model with `shorten_model`; None if no block can be left out."""
        if (model, most) not in self._still_shorter:
            self._still_shorter[model, most] = shorten_model(model, most) or (None, ())
        return self._still_shorter[model, most]

    def _workload(self, loss: Loss, model: nn.Module) -> Workload:
        return Workload(model, self._example, loss, self._make_optimizer)

    def _model_run(self, *, cut: bool) -> tuple[nn.Module, list[str]]:
        """Return the model to run, and the names of its blocks that represent the model's blocks.

        An untied copy can have more independent blocks than the model.
        """
        model, stands_for = self.shortened(cut=cut)
        run = set(stands_for.values())
        return model, [name for name, _ in independent_blocks(model) if name in run]

    def _slices(self, plan: Plan, loss: Loss, *, cut: bool) -> ModelSlices | None:
        """Return the slices of the model that is run; None if the plan slices nothing.

        They are chosen for the whole model.

        Raises:
            ConfigError: the technique can slice no tensor of the model.
        """
        technique = plan.techniques.get("slice")
        if not isinstance(technique, SliceStrategy) or plan.tp == 1:
            return None
        key = slicing_key(plan)
        if key not in self._slices_of:
            model, stands_for = self.shortened(cut=False)
            if self._fixed_slices is None:
                work = replace(self._workload(loss, model), repeats=Counter(stands_for.values()))
                self._slices_of[key] = technique.lay_slices(work, plan)
            else:
                self._slices_of[key] = of_shortened(self._fixed_slices, stands_for)
        slices = self._slices_of[key]
        if slices is None:  # equal blocks have different slices, so the whole model is run
            untied = self._untied(cut=cut)
            self._short[cut] = untied, {name: name for name in self.named}
            slices = self._fixed_slices
        return slices

    def _untied(self, *, cut: bool) -> nn.Module:
        if not cut:
            return self._model
        copied, self.aliases = untie_parameters(self._model)
        return copied

    def shortened(self, *, cut: bool) -> tuple[nn.Module, Mapping[str, str]]:
        """Return the model to run, and the block that represents each block of the whole model."""
        if cut not in self._short:
            model = self._untied(cut=cut)
            result = shorten_model(model)
            if result is None:
                self._short[cut] = model, {name: name for name in self.named}
            else:
                short, order = result
                remaining = [name for name, _ in independent_blocks(short)]
                pairs = zip(self.named, order, strict=True)
                self._short[cut] = short, {name: remaining[index] for name, index in pairs}
        return self._short[cut]


def resize_micro_batch(example: MicroBatch, rows: int) -> MicroBatch:
    """Return a micro-batch of `rows` rows that are copies of the example's first row."""

    def grow(tensor: Tensor, dim: int) -> Tensor:
        shape = [*tensor.shape[:dim], rows, *tensor.shape[dim + 1 :]]
        return tensor.narrow(dim, 0, 1).expand(shape).contiguous()

    count = max(1, example.count * rows // max(1, example.rows))
    return replace(example.map_rows(grow), count=count, rows=rows)


def _with_policy(plan: Plan, choice: BlockPolicy) -> Plan:
    """Return a copy of the plan with one policy for every block."""
    techniques = dict(plan.techniques)
    techniques.pop("recompute", None)
    if choice in ("full", "selective"):
        config = RoleConfig.model_validate(long_form("recompute", choice))
        techniques["recompute"] = make_technique("recompute", config)
    return replace(plan, techniques=techniques)


def _untraceable(reason: str, error: BaseException | None) -> str:
    return (
        f"plan: the model does not run on fake tensors, so it cannot be planned: {reason}"
        f"{_where(error)}. Let its operations depend on shapes and not on values, or measure it: "
        "bigtrain compare."
    )


def _where(error: BaseException | None) -> str:
    """Return a clause that names the line of the user's code at which an error was raised."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__ if error else None)
    user_frames = [
        f for f in frames if "/torch/" not in f.filename and "/bigtrain/" not in f.filename
    ]
    return (
        f" (in {user_frames[-1].name}, {user_frames[-1].filename}:{user_frames[-1].lineno})"
        if user_frames
        else ""
    )


def _holds_beyond(section: Section) -> bool:
    """Whether the first or the last section of the model decides when a storage is freed."""
    return any(
        storage.until >= Anchor.FIRST
        for section_pass in section.passes
        for storage in section_pass.storages
    )


def _with_ends_of(run: RecordedSections, ends: RecordedSections) -> RecordedSections:
    """Return a run with the blocks of `run`, and the sections of `ends` before and after them."""
    sections = (ends.sections[0], *run.sections[1:-1], ends.sections[-1])
    return replace(run, sections=sections)
