"""`bigtrain verify --fuzz N`: verify plans drawn from the planner's space, and reduce failures.

A plan is drawn as words of the command line, so that the user can repeat a failure with them.
"""

from __future__ import annotations

import inspect
import random
import shlex
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bigtrain.assembly.make_plan import device_type_of, make_plan
from bigtrain.compare.contenders import find_strategies, ranks_to_start, without_strategy
from bigtrain.compare.subprocess_runs import QUIET
from bigtrain.core.layer_strategies import SliceStrategy
from bigtrain.core.registry import techniques_of
from bigtrain.core.workload import Workload
from bigtrain.engine.setup import open_setup
from bigtrain.errors import BigtrainError, ConfigError
from bigtrain.job.arguments import ComparisonOptions
from bigtrain.job.import_path import load_object
from bigtrain.job.load import ONE_PROCESS, load_job
from bigtrain.job.schema import Job
from bigtrain.models.blocks import find_blocks
from bigtrain.planner.space import Candidate, SearchSpace
from bigtrain.verify.bench import Bench, Verdict, VerifiedStrategy

_MOST_SAMPLES = 16
"""The most samples of a step. More samples take longer and test nothing else."""
_MOST_ATTEMPTS = 60
"""The most smaller plans that are tried for one failure."""
_RECOMPUTE = (None, None, "full", "selective", "every_2")
_REFUSALS = 40
"""The most refused plans that are drawn for each requested plan."""


@dataclass(frozen=True)
class FuzzedPlan:
    """A plan as words of a command line.

    The fields `replicate`, `cut`, `recompute`, `offload` and `slices` are words of `--strategy`.
    """

    pp: int
    dp: int
    rows: int
    """The number of samples of a micro-batch."""
    micro_batches: int
    """The number of micro-batches of each replica in a step."""
    replicate: str
    cut: str | None = None
    recompute: str | None = None
    offload: str | None = None
    tp: int = 1
    slices: str | None = None
    """The technique that slices layers over the tp ranks; None without slices."""
    at: tuple[str, ...] = ()
    """The modules with which stages after the first begin; empty for balanced stages."""
    sizes: tuple[tuple[str, int], ...] = ()
    """The arguments of the model that differ from the job's."""
    steps: int = 3

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the plan."""
        return self.pp * self.dp * self.tp

    @property
    def strategy(self) -> str:
        """The argument of `--strategy`."""
        is_whole = self.cut is None and self.slices is None
        replicate = self.replicate if self.dp > 1 or is_whole else None
        parts = (self.cut, replicate, self.slices, self.recompute, self.offload)
        return "+".join(part for part in parts if part is not None)

    @property
    def words(self) -> list[str]:
        """The KEY=VALUE words of the plan's job."""
        samples = self.rows * self.micro_batches * self.dp
        words = [f"mesh.pp={self.pp}", f"mesh.dp={self.dp}", f"mesh.tp={self.tp}"]
        words.append(f"train.global_batch_size={samples}")
        words += [f"train.micro_batch_size={self.rows}", "train.precision=fp32"]
        if self.at:
            words.append(f"strategy.cut.at=[{', '.join(self.at)}]")
        return words + [f"model.args.{name}={size}" for name, size in self.sizes]

    def command(self, options: ComparisonOptions) -> str:
        """Return the command line that verifies only this plan."""
        job = [] if options.job is None else [options.job]
        line = ["bigtrain", "verify", *job, "-n", str(self.num_ranks)]
        line += ["--strategy", self.strategy, "--steps", str(self.steps)]
        return shlex.join([*line, *options.overrides, *self.words])


def draw_plans(
    draw: random.Random, spaces: Sequence[SearchSpace], names: Sequence[str]
) -> Iterator[FuzzedPlan]:
    """Yield random plans without end; none if the spaces have no candidates.

    All meshes are equally likely, and so are all combinations of techniques on a mesh.

    Args:
        draw: the random generator.
        spaces: the search space for each number of ranks.
        names: the names of the modules with which stages may begin, in the model's order.
    """
    by_kind: dict[Any, dict[Any, list[Candidate]]] = {}
    for space in spaces:
        for moves in (False, True):
            for candidate in space.candidates(fallback_tier=moves):
                if not candidate.is_typed:
                    continue
                kinds = by_kind.setdefault(candidate.axes, {})
                kinds.setdefault((candidate.label, moves), []).append(candidate)
    while by_kind:
        mesh = by_kind[draw.choice(list(by_kind))]
        chosen = draw.choice(mesh[draw.choice(list(mesh))])
        cuts = chosen.stages - 1
        named = chosen.cut is not None and cuts <= len(names) and draw.random() < 0.5
        at = sorted(draw.sample(range(len(names)), cuts)) if named else []
        yield FuzzedPlan(
            *(chosen.pp, chosen.dp, chosen.rows, chosen.micro_batches),
            replicate=chosen.replicate.label if chosen.replicate is not None else "single",
            cut=chosen.cut.label if chosen.cut is not None else None,
            recompute=draw.choice(_RECOMPUTE),
            offload=chosen.offload.label if chosen.offload is not None else None,
            tp=chosen.tp,
            slices=chosen.slices.label if chosen.slices is not None else None,
            at=tuple(names[index] for index in at),
        )


def shrink(
    plan: FuzzedPlan,
    sizes: dict[str, int],
    fails: Callable[[FuzzedPlan], bool],
    most: int = _MOST_ATTEMPTS,
) -> FuzzedPlan:
    """Reduce a plan that fails, until no reduction of it fails or `most` plans were tried.

    Args:
        plan: the plan that fails.
        sizes: the model's arguments that are whole numbers, which may be reduced.
        fails: returns whether a plan fails in the same way; False for a plan that cannot run.
        most: the most plans that are tried.

    Returns:
        The smallest plan that fails.
    """
    tried = {plan}
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(plan, sizes):
            if smaller in tried or len(tried) > most:
                continue
            tried.add(smaller)
            if fails(smaller):
                plan, progress = smaller, True
                break
    return plan


def _smaller(plan: FuzzedPlan, sizes: dict[str, int]) -> Iterator[FuzzedPlan]:
    """Yield plans with one reduction each; reductions that make later attempts cheap are first."""
    if plan.steps > 1:
        yield replace(plan, steps=1)
    yield from _smaller_meshes(plan)
    if plan.recompute is not None:
        yield replace(plan, recompute=None)
    if plan.offload is not None:
        yield replace(plan, offload=None)
    if plan.micro_batches > 1:
        yield replace(plan, micro_batches=1)
        yield replace(plan, micro_batches=plan.micro_batches // 2)
    if plan.rows > 1:
        yield replace(plan, rows=1)
        yield replace(plan, rows=plan.rows // 2)
    current = {**sizes, **dict(plan.sizes)}
    for name, size in sorted(current.items(), key=lambda item: -item[1]):
        if size > 1:
            changed = {**dict(plan.sizes), name: size // 2}
            yield replace(plan, sizes=tuple(sorted(changed.items())))


def _smaller_meshes(plan: FuzzedPlan) -> Iterator[FuzzedPlan]:
    """Yield plans with fewer or simpler replicas, stages or slices."""
    if plan.dp > 1:
        yield replace(plan, dp=plan.dp // 2)
    if plan.cut is not None:
        yield replace(plan, pp=1, cut=None, at=())
        if plan.pp > 2:
            yield replace(plan, pp=plan.pp // 2, at=())
        if plan.at:
            yield replace(plan, at=())
    if plan.slices is not None:
        yield replace(plan, tp=1, slices=None)
        if plan.tp > 2:
            yield replace(plan, tp=plan.tp // 2)
        if plan.slices != "tensor":
            yield replace(plan, slices="tensor")


@dataclass(frozen=True)
class FuzzResult:
    """The result of a drawn plan."""

    plan: FuzzedPlan
    row: VerifiedStrategy
    """The result of `smallest`; of `plan` if `smallest` is None."""
    smallest: FuzzedPlan | None = None
    """The smallest plan that fails as `plan` does; None if `plan` passes."""

    def command(self, options: ComparisonOptions) -> str:
        """Return the command line that repeats the result."""
        return (self.smallest or self.plan).command(options)

    def as_json(self, options: ComparisonOptions) -> dict[str, Any]:
        """Return the result as JSON values."""
        command = self.command(options)
        return {"drawn": self.plan.command(options), "command": command, **self.row.as_json()}


def fuzz(
    options: ComparisonOptions, job_words: Sequence[str], folder: Path
) -> Iterator[FuzzResult]:
    """Draw plans, verify them one after the other, and reduce each plan that fails.

    Yields the result of each plan that can run, and ends after `options.fuzz` results. A plan that
    cannot run is skipped.

    Args:
        options: the options of the command line, with the number of results (`fuzz`, at least 1),
            the `seed`, the `steps` of a plan, and the largest number of ranks.
        job_words: the KEY=VALUE words of every run.
        folder: the folder for the runs' files. It has to exist. Each run gets a new folder in it,
            named by its number.

    Raises:
        ConfigError: the job cannot run in one process, the largest number of ranks is below 1, no
            plan can be drawn for any allowed number of ranks, or too many drawn plans cannot run.
    """
    bench = _FuzzBench(options, job_words, folder)
    words = [*without_strategy(options.overrides), *job_words, *QUIET, *ONE_PROCESS]
    job = load_job(options.job, "single", words)
    plan = make_plan(job, 1, device_type_of(job))
    setup = open_setup(job, plan)
    blocks = [name for name, _ in find_blocks(setup.workload.model)]
    sizes = model_sizes(job, setup.workload.model)
    most = ranks_to_start(options.num_ranks, device_type_of(job))
    samples = max(most, min(_MOST_SAMPLES, plan.batch.global_size) // most * most)
    mesh = load_job(options.job, None, options.overrides).mesh
    most_slices = _most_slices(setup.workload)
    fixed = (mesh.pp or 1) * (mesh.tp or 1)
    spaces = [
        SearchSpace(
            n, n, samples, len(blocks), pp=mesh.pp, dp=mesh.dp, tp=mesh.tp, most_ranks=most_slices
        )
        for n in range(min(2, most), most + 1)
        if samples % n == 0 and n % fixed == 0
    ]
    if not any(any(space.candidates()) for space in spaces):
        raise ConfigError(
            f"verify --fuzz: no plan of at most {most} ranks can be drawn: it needs a number of "
            f"ranks that mesh.pp x mesh.tp = {fixed} divides, and that divides the {samples} "
            f"samples of a step. Leave mesh.pp and mesh.tp out, or use -n {fixed * -(-2 // fixed)}."
        )
    done = refused = 0
    for drawn in draw_plans(random.Random(options.seed), spaces, blocks[1:]):
        drawn = replace(drawn, steps=options.steps)
        row = bench.verify(drawn)
        if row.verdict == "refused":
            refused += 1
            if refused > _REFUSALS * options.fuzz:
                raise ConfigError(
                    f"{refused} of {refused + done} drawn plans cannot run, the last of them "
                    f"because: {row.reason}"
                )
            continue
        done += 1
        if row.verdict == "pass":
            yield FuzzResult(drawn, row)
        else:
            smallest = shrink(drawn, sizes, partial(bench.has_verdict, verdict=row.verdict))
            yield FuzzResult(drawn, bench.verify(smallest, localises=True), smallest)
        if done == options.fuzz:
            return


def _most_slices(workload: Workload) -> int:
    """Return the most ranks over which layers can be sliced; 1 if no layer can be sliced."""
    techniques = (t for t in techniques_of("slice") if isinstance(t, SliceStrategy))
    return max((technique.most_ranks(workload) for technique in techniques), default=1)


class _FuzzBench:
    """Verifies plans, each with its own reference."""

    def __init__(self, options: ComparisonOptions, words: Sequence[str], folder: Path) -> None:
        self._options = options
        self._words = [word for word in words if not word.startswith("train.steps=")]
        self._folder = folder
        self._count = 0

    def has_verdict(self, plan: FuzzedPlan, *, verdict: Verdict) -> bool:
        return self.verify(plan).verdict == verdict

    def verify(self, plan: FuzzedPlan, *, localises: bool = False) -> VerifiedStrategy:
        options = copy(self._options)
        options.strategies, options.num_ranks = plan.strategy, plan.num_ranks
        options.overrides = [*self._options.overrides, *plan.words]
        words = [*self._words, f"train.steps={plan.steps}"]
        try:
            (contender,) = find_strategies(options, [*words, *QUIET])
        except ConfigError as error:
            ranks = plan.num_ranks
            return VerifiedStrategy(plan.strategy, ranks, "refused", "fp32", str(error))
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        bench = Bench(options, words, folder, localises=localises)
        try:
            return bench.check(contender)
        except BigtrainError as error:  # a reduced model may not run in one process
            return VerifiedStrategy(contender.label, plan.num_ranks, "refused", "fp32", str(error))
        finally:
            bench.close()


def model_sizes(job: Job, model: object) -> dict[str, int]:
    """Return the arguments of a job's model that are whole numbers above 1, with their values.

    Args:
        job: the job.
        model: the job's model.
    """
    sizes: dict[str, Any] = dict(vars(getattr(model, "config", None) or object))
    if ":" in job.model.name:
        parameters = inspect.signature(load_object(job.model.name, "model.name")).parameters
        sizes = {name: parameter.default for name, parameter in parameters.items()}
    sizes |= job.model.args
    return {name: size for name, size in sizes.items() if type(size) is int and size > 1}
