"""Time a model's blocks on this machine once, and compare them with the seconds that rates predict.

The rates of a device are those of large products and copies; an operation of another kind or size
may take twice as long. So one block of each kind is timed, on as many ranks at once as will share
the machine, and the predicted seconds of a section are multiplied by its block's slowdown. The
times are cached in $XDG_CACHE_HOME/bigtrain/blocks.json (by default in ~/.cache).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

from bigtrain.activations.policy import BlockPolicy
from bigtrain.assembly.make_plan import device_type_of
from bigtrain.data.loader import MicroBatch
from bigtrain.files.drafts import say_damaged
from bigtrain.job.load import ONE_PROCESS, override_job
from bigtrain.job.schema import Job
from bigtrain.machine.busy import CpuClock, describe_others, others_cores
from bigtrain.machine.cache import Cache, device_fingerprint
from bigtrain.machine.rates import measured_by_ranks, usable_cores
from bigtrain.machine.residuals import StepBasis
from bigtrain.memory.allocator import allocator_of_ranks
from bigtrain.models.blocks import independent_blocks
from bigtrain.prediction.section_library import ModelSections
from bigtrain.prediction.sections import Section
from bigtrain.prediction.shorten import shorten_model
from bigtrain.ranks.launcher_env import launch_key
from bigtrain.timing.step_time import StepTimer, TimedParts

BLOCKS = Cache("blocks", indent=None)
MAX_SIZES = 6
"""The most micro-batch sizes that are timed; the slowdowns of other sizes are interpolated."""
SECONDS_ALLOWED = 30.0
"""A micro-batch size is timed if the timing is expected to end within this many seconds."""
TIMEOUT_S = 180.0
"""After this many seconds the ranks that time blocks are stopped, and a process that waits for them
gives up."""
_TIMING = "timing the model's blocks on this machine, once for this model ...\n"
MAX_CACHED_MODELS = 200
"""The most entries in the cache, one for each model and number of ranks; the oldest are removed."""


BlockVariant = Literal["split", "selective", "full"]
"""A way to run a block: with its backward pass split into one for the inputs and one for the
weights ("split"), or with a recompute policy ("selective", "full")."""


@dataclass(frozen=True)
class BlockRequest:
    """The job, micro-batch sizes and limits of one timing."""

    job: dict[str, Any]
    """The job as JSON values, for one process with the strategy `single`."""
    rows: list[int]
    """Micro-batch sizes, ascending."""
    bf16_parameters: bool
    """See `Plan.bf16_parameters`."""
    seconds: float
    """A size is timed if the timing is expected to end within this many seconds."""


@dataclass(frozen=True)
class BlockSeconds:
    """Timed seconds of a micro-batch of one size: medians over repeats, means over ranks."""

    rows: int
    """The rows of the micro-batch."""
    sections: list[tuple[float, float]]
    """Forward and backward seconds of each section of the model that `shorten_model` returns: the
    part before the blocks, each block, and the part after the blocks. If the blocks do not follow
    one another, the only entry is for the whole model."""
    update: float
    """Seconds of clipping and the optimizer's step."""
    trained: int
    """The number of trained elements that the optimizer's step updates."""
    shares: Mapping[BlockVariant, tuple[float, float]] = field(default_factory=dict)
    """The seconds of a block in each variant, divided by those of a block that saves all
    activations: forward and backward. For "split" they are the seconds of the two parts of the
    backward pass, each divided by those of a whole backward pass."""


@dataclass(frozen=True)
class Slowdowns:
    """Slowdowns, by micro-batch size: timed seconds divided by those that rates predict."""

    rows: tuple[int, ...]
    """The timed sizes, ascending."""
    by_block: Mapping[str, Sequence[tuple[float, float]]]
    """By name of the block, the slowdowns of its forward and backward pass for each size. The keys
    BEFORE and AFTER are the parts of the model before and after the blocks."""
    update: float
    """The slowdown of clipping and the optimizer's step."""
    shares: Sequence[Mapping[BlockVariant, tuple[float, float]]]
    """For each size, the shares of the variants; see `BlockSeconds.shares`."""

    def parts(self, rows: int) -> TimedParts:
        """The timed parts of a step other than the sections.

        Args:
            rows: the rows of a micro-batch; this size need not have been timed.
        """
        return TimedParts(self.update, self.share("split", rows) or TimedParts.split)

    def share(self, variant: BlockVariant, rows: int) -> tuple[float, float] | None:
        """The shares of a variant, interpolated; None if it was not timed at every size.

        Args:
            variant: the variant.
            rows: the rows of a micro-batch; this size need not have been timed.
        """
        if not all(variant in each for each in self.shares):
            return None
        return self._between(rows)([each[variant] for each in self.shares])

    def at(self, rows: int) -> dict[str, tuple[float, float]]:
        """The slowdowns of every block, interpolated: forward and backward.

        Args:
            rows: the rows of a micro-batch. Beyond the timed sizes, the nearest one is used.
        """
        between = self._between(rows)
        return {name: between(pairs) for name, pairs in self.by_block.items()}

    def _between(self, rows: int) -> Callable[[Sequence[tuple[float, float]]], tuple[float, float]]:
        """Return a function that interpolates pairs, given one for each timed size."""
        upper = next((n for n, size in enumerate(self.rows) if size >= rows), len(self.rows) - 1)
        lower = max(0, upper - 1) if self.rows[upper] > rows else upper
        low, high = self.rows[lower], self.rows[upper]
        share = 0.0 if high == low else math.log(rows / low) / math.log(high / low)

        def between(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
            forward, backward = (
                a + (b - a) * share for a, b in zip(pairs[lower], pairs[upper], strict=True)
            )
            return forward, backward

        return between

    def applied(
        self,
        model: ModelSections,
        model_sections: ModelSections,
        choice: BlockPolicy,
        rows: int,
        timer: StepTimer,
    ) -> ModelSections:
        """Return the sections of a micro-batch, each with its slowdown.

        Args:
            model: the sections, whose blocks all have one policy.
            model_sections: the sections of the same model where blocks save all activations.
            choice: the policy of the blocks of `model`.
            rows: the rows of the micro-batch.
            timer: predicts seconds from the rates of the cluster.
        """
        factors = self.at(rows)
        plain = dict(
            zip(section_keys(model_sections.sections), model_sections.sections, strict=True)
        )
        share = self.share(choice, rows) if choice == "selective" or choice == "full" else None
        sections = []
        for key, section in zip(section_keys(model.sections), model.sections, strict=True):
            slowdown = factors.get(key, (1.0, 1.0))
            if share is not None and section.name and key in plain:
                slowdown_alone, whole = (
                    [timer.op_seconds(work) for work in (each.forward, each.backward)]
                    for each in (section, plain[key])
                )
                forward, backward = (
                    factor * part * _ratio(seconds, known)
                    for factor, part, seconds, known in zip(
                        slowdown, share, whole, slowdown_alone, strict=True
                    )
                )
                slowdown = forward, backward
            sections.append(replace(section, slowdown=slowdown))
        return replace(model, sections=tuple(sections))


BEFORE, AFTER = "(before)", "(after)"


def section_keys(sections: Sequence[Section]) -> list[str]:
    """Return the keys of a whole model's sections: BEFORE, the names of its blocks, AFTER."""
    return [BEFORE, *(section.name for section in sections[1:-1]), AFTER]


@dataclass
class BlockTimer:
    """Times the blocks of a job's model on this machine, or reads cached times.

    Args:
        job: the job that is planned or run.
        model: the job's model, on the meta device.
        example: one micro-batch.
        ranks: the number of ranks that will share the machine.
        rows: the micro-batch sizes whose seconds may be needed.
        script: the path of `engine/time_blocks.py`, which times blocks; None to use cached times
            only.
    """

    job: Job
    model: nn.Module
    example: MicroBatch
    ranks: int
    rows: Sequence[int]
    script: Path | None = None
    source: str = field(default="", init=False)
    """A text that says which blocks were timed, or why none were; set by `seconds`."""
    basis: StepBasis = field(default="rates", init=False)
    """Whether seconds are predicted from timed blocks or from rates alone; set by `seconds`."""

    def seconds(self, *, bf16_parameters: bool) -> list[BlockSeconds]:
        """Return the seconds of the blocks from the cache, or time them, which takes some seconds.

        Args:
            bf16_parameters: see `Plan.bf16_parameters`.

        Returns:
            An entry for each timed micro-batch size, ascending. The list is empty if there is no
            `script` and nothing is cached. It is also empty if the blocks could not be timed; then
            `source` has the reason.
        """
        request = BlockRequest(
            override_job(
                self.job, [*ONE_PROCESS, "strategy=single", "train.global_batch_size=1"]
            ).model_dump(mode="json"),
            spread_sizes(self.rows),
            bf16_parameters,
            SECONDS_ALLOWED,
        )
        key = self._key(request)
        cached = _read(key)
        if self.script is not None and not cached.answers(request.rows):
            cached = self._timed_alone(self.script, key, request)
        if cached.timed:
            self.basis, sizes = "blocks", ", ".join(str(timed.rows) for timed in cached.timed)
            self.source = f"blocks timed on this machine, {sizes} rows, {self._copies} at once"
            busy = describe_others(cached.others_cores)
            self.source += f", {busy}: the next run times them again" if busy else ""
        return cached.timed

    @property
    def oversubscription(self) -> float:
        """The number of ranks that were timed at once for each rank that computes at full speed."""
        return self._copies / min(self._copies, usable_cores())

    @property
    def _copies(self) -> int:
        return min(self.ranks, 2 * usable_cores())

    def _timed_alone(self, script: Path, key: str, request: BlockRequest) -> _Kept:
        """Time the blocks. If another process of this machine times them, wait for its times."""
        arguments = [json.dumps(asdict(request))]
        try:
            with BLOCKS.locked(TIMEOUT_S):
                cached = _read(key)
                if not cached.answers(request.rows):
                    before = _Kept() if cached.doubtful else cached
                    if sys.stderr.isatty():
                        sys.stderr.write(_TIMING)
                    clock = CpuClock()
                    measured = measured_by_ranks(script, self._copies, arguments, TIMEOUT_S)
                    on_cpu = device_type_of(self.job) == "cpu"
                    others = (others_cores([clock.read()]) or 0.0) if on_cpu else 0.0
                    by_rows = {
                        timed.rows: timed for timed in (*before.timed, *map(_from_json, measured))
                    }
                    cached = _Kept(
                        [by_rows[rows] for rows in sorted(by_rows)],
                        before.sizes | set(request.rows),
                        max(others, before.others_cores),
                        launch_key(os.environ),
                    )
                    _write(key, cached)
        except (OSError, RuntimeError, ValueError) as error:
            self.source = f"blocks could not be timed: {error}"
            return _Kept()
        return cached

    def _key(self, request: BlockRequest) -> str:
        tensors = [
            (name, list(t.shape), str(t.dtype))
            for named in (self.model.named_parameters(), self.model.named_buffers())
            for name, t in named
        ]
        batch = [(list(t.shape[1:]), str(t.dtype)) for t in self.example.tensors()]
        job = request.job
        # The number of threads that a launcher gives each rank.
        threads = os.environ.get("OMP_NUM_THREADS") or max(1, usable_cores() // self._copies)
        parts = {
            "figures": [figure.name for kind in (BlockSeconds, _Kept) for figure in fields(kind)],
            "model": [job["model"], repr(self.model), tensors, batch],
            "blocks": [name for name, _ in independent_blocks(self.model)],
            "run": [job["optim"], job["train"]["precision"], request.bf16_parameters],
            "device": [device_fingerprint(device_type_of(self.job)), usable_cores(), self._copies],
            "threads": str(threads),
            "order": "sizes in alternation, two seconds each",  # changes with the way
            "allocator": allocator_of_ranks(os.environ),
        }
        return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def spread_sizes(rows: Sequence[int]) -> list[int]:
    """Return at most `MAX_SIZES` of these sizes, ascending, with the smallest and the largest."""
    sizes = sorted(set(rows))
    if len(sizes) <= MAX_SIZES:
        return sizes
    step = (len(sizes) - 1) / (MAX_SIZES - 1)
    return [sizes[round(n * step)] for n in range(MAX_SIZES)]


def slowdowns(
    timed: Sequence[BlockSeconds],
    oversubscription: float,
    model: nn.Module,
    sections_at: Callable[[int], ModelSections],
    timer: StepTimer,
) -> Slowdowns:
    """Divide timed seconds by those that rates predict.

    Args:
        timed: the timed seconds of one or more sizes, ascending.
        oversubscription: see `BlockTimer.oversubscription`.
        model: the model whose blocks were timed.
        sections_at: returns the model's sections, given the rows of a micro-batch. Their blocks
            save all activations, as in the timing.
        timer: predicts seconds from the rates of the cluster.
    """
    names = [name for name, _ in independent_blocks(model)]
    short = shorten_model(model)
    order = range(len(names)) if short is None else short[1]
    places = {BEFORE: 0, AFTER: -1, **{n: 1 + at for n, at in zip(names, order, strict=True)}}
    by_block: dict[str, list[tuple[float, float]]] = {}
    updates = []
    for block in timed:
        sections = sections_at(block.rows)
        keys = section_keys(sections.sections)
        modelled = {
            key: (timer.op_seconds(s.forward), timer.op_seconds(s.backward))
            for key, s in zip(keys, sections.sections, strict=True)
        }
        if len(block.sections) == max(places.values()) + 2 and len(keys) == len(places):
            pairs = {key: block.sections[places[key]] for key in keys}
        else:  # only the whole model was timed: all blocks share its slowdown
            pairs = _evenly(block, modelled, names, order)
        for key in keys:
            ratios = [
                _ratio(seconds / oversubscription, known)
                for seconds, known in zip(pairs[key], modelled[key], strict=True)
            ]
            by_block.setdefault(key, []).append((ratios[0], ratios[1]))
        base = sections.base
        numbers = sum(t.numbers for s in base.sections for t in s.tensors if t.trained)
        work = base.step_work.scaled(block.trained / max(1, numbers))
        updates.append(_ratio(block.update / oversubscription, timer.op_seconds(work)))
    sizes = tuple(block.rows for block in timed)
    update = sorted(updates)[len(updates) // 2]
    return Slowdowns(sizes, by_block, update, [block.shares for block in timed])


def _evenly(
    block: BlockSeconds,
    modelled: Mapping[str, tuple[float, float]],
    names: Sequence[str],
    order: Sequence[int],
) -> dict[str, tuple[float, float]]:
    """Return the seconds of every section if only the whole model was timed."""
    first = {at: name for name, at in reversed([*zip(names, order, strict=True)])}
    timed = [key for key in (BEFORE, *first.values(), AFTER) if key in modelled]
    ratios = []
    for side in (0, 1):
        known = sum(modelled[key][side] for key in timed)
        ratios.append(_ratio(sum(pair[side] for pair in block.sections), known))
    return {key: (a * ratios[0], b * ratios[1]) for key, (a, b) in modelled.items()}


def _ratio(seconds: float, known: float) -> float:
    return seconds / known if known > 0 else 1.0


def _from_json(values: Any) -> BlockSeconds:
    """Read one `BlockSeconds` from JSON values, of ranks that have timed blocks or of the cache.

    Raises:
        ValueError: a figure is missing, is of another type, or is no time.
    """
    if not isinstance(values, dict) or {*values} != {
        figure.name for figure in fields(BlockSeconds)
    }:
        raise ValueError("an entry has other figures")
    sections, shares = values["sections"], values["shares"]
    if not isinstance(sections, list) or not isinstance(shares, dict):
        raise ValueError("its sections are no list, or its shares no object")
    pairs = [*sections, *shares.values()]
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError("its figures are no pairs")
    numbers = [values["update"], *(number for pair in pairs for number in pair)]
    if not all(type(n) in (int, float) and 0 <= n < math.inf for n in numbers):
        raise ValueError("a figure is no time")
    if not (_is_count(values["rows"]) and _is_count(values["trained"])):
        raise ValueError("its rows or numbers are no count")
    if not {*shares} <= {*get_args(BlockVariant)}:
        raise ValueError("its shares are of unknown variants")
    timed = [(float(a), float(b)) for a, b in sections]
    shared = {variant: (float(a), float(b)) for variant, (a, b) in shares.items()}
    return BlockSeconds(values["rows"], timed, values["update"], values["trained"], shared)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


@dataclass(frozen=True)
class _Kept:
    """The cached times of one model on one number of ranks."""

    timed: list[BlockSeconds] = field(default_factory=list)
    sizes: set[int] = field(default_factory=set)
    """The micro-batch sizes that were requested; large ones may have no time."""
    others_cores: float = 0.0
    """The number of cores that other programs used while the blocks were timed."""
    launch: str = ""
    """The key of the launch that timed the blocks. All its ranks use the times, even if the machine
    was busy."""

    @property
    def doubtful(self) -> bool:
        """Whether the blocks were timed on a busy machine, and not in this launch."""
        return bool(describe_others(self.others_cores)) and self.launch != launch_key(os.environ)

    def answers(self, rows: Sequence[int]) -> bool:
        """Whether micro-batches of these sizes need no timing."""
        return set(rows) <= self.sizes and not self.doubtful


def _read(key: str) -> _Kept:
    entry = BLOCKS.read().get(key)
    if entry is None:
        return _Kept()
    try:
        if not isinstance(entry, dict):
            raise ValueError("an entry is no object")
        timed, sizes = entry.get("timed"), entry.get("sizes")
        if not (isinstance(timed, list) and isinstance(sizes, list) and all(map(_is_count, sizes))):
            raise ValueError("an entry has no lists of times and sizes")
        others, launch = entry.get("others_cores"), entry.get("launch")
        if not isinstance(launch, str) or type(others) is not float or not 0 <= others < math.inf:
            raise ValueError("an entry lacks the load of other programs")
        return _Kept([_from_json(values) for values in timed], set(sizes), others, launch)
    except ValueError as error:
        say_damaged(BLOCKS.path, str(error))
        return _Kept()


def _write(key: str, entry: _Kept) -> None:
    """Store an entry as the newest one; the caller holds the lock."""

    def add(entries: dict[str, Any]) -> None:
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        entries.pop(key, None)  # so that the entry becomes the last one, which is the newest
        entries[key] = {**asdict(entry), "sizes": sorted(entry.sizes), "when": when}
        for oldest in list(entries)[:-MAX_CACHED_MODELS]:
            del entries[oldest]

    BLOCKS.change(add)
