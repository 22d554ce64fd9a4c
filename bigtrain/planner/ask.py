"""Answer a question to the planner: set up the job's model, and search its plans."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from bigtrain.assembly.make_plan import make_plan
from bigtrain.assembly.model_checks import ModelChecks
from bigtrain.data.loader import MicroBatch
from bigtrain.engine.run_loss.choose_loss import choose_loss
from bigtrain.engine.setup import RunSetup, check_job, open_setup
from bigtrain.engine.time_blocks import SCRIPT
from bigtrain.errors import ConfigError
from bigtrain.job.load import ONE_PROCESS, override_job
from bigtrain.job.schema import Job, Role, RoleConfig
from bigtrain.losses.chunked_cross_entropy import ChunkedCrossEntropy
from bigtrain.losses.loss import Loss
from bigtrain.machine.cluster import Cluster, DeviceSpec
from bigtrain.machine.residuals import (
    StepBasis,
    has_device,
    non_tensor_reserve,
    safety_margin,
    step_uncertainty,
)
from bigtrain.memory.cap import Limit
from bigtrain.planner.evaluate import PlanEvaluator
from bigtrain.planner.search import PlanSearch, SearchResult
from bigtrain.planner.space import SearchSpace, round_sizes, searched_techniques
from bigtrain.prediction.fake_runs.runs import resize_micro_batch
from bigtrain.prediction.memory_report import engine_of
from bigtrain.prediction.section_library import SectionLibrary
from bigtrain.prediction.shorten import shorten_model
from bigtrain.timing.block_seconds import BlockTimer
from bigtrain.timing.step_time import StepTimer
from bigtrain.units import KIB, MIB, format_bytes, parse_bytes


@dataclass(frozen=True)
class Question:
    """A question to the planner: which plan of a job is the fastest that fits."""

    job: Job
    cluster: Cluster
    devices: int
    memory: Limit
    """The memory limit of each rank."""
    global_batch_size: int
    """Samples of a step, over all replicas."""
    pp: int | None = None
    """The pp size that the user has fixed; None to search it. The same holds for `dp` and `tp`, and
    for `rows`, the samples of a micro-batch."""
    dp: int | None = None
    rows: int | None = None
    tp: int | None = None
    at_hand: bool = False
    """Whether the cluster is this machine, so that the model's blocks can be timed."""
    only_best: bool = False
    """Whether to search the fastest plan only, without others and without the Pareto front."""
    peak_option: str = ""
    """The option that limits predicted peaks, as it is written before its value: `--at ` or
    `strategy.budget=`. Empty if the limit is that of a device or a cap."""
    within: Mapping[Role, RoleConfig] | None = None
    """The techniques that every plan must have, with the options that are set; None for all plans.
    A role that is missing has none of the other techniques."""
    frontier: bool = False
    """Whether to search the whole Pareto front. The margins then have to be zero."""
    margins: Mapping[str, float] = field(kw_only=True)
    """The engines to choose from, each with the share by which its memory forecasts are enlarged
    before they are compared with the limit."""

    @property
    def limit(self) -> int:
        """The bytes that the tensors of a rank may take."""
        return self.memory.for_tensors

    def memory_for(self, peak_bytes: int, engine: str) -> int:
        """The bytes of device memory, or of a cap, that a rank needs for a forecast peak.

        Args:
            peak_bytes: the forecast peak of the rank's tensors, without the engine's margin.
            engine: the engine of the plan. Without an entry in `margins` its margin is 0.
        """
        needed = math.ceil(peak_bytes * (1 + self.margins.get(engine, 0.0))) + 1
        return self.memory.memory_for(needed)


@dataclass(frozen=True)
class PlannedAnswer:
    """A question to the planner, with the plans that the search has found."""

    question: Question
    setup: RunSetup
    result: SearchResult
    search: PlanSearch
    num_parameters: int
    step_flops: float
    """FLOPs of one global batch, forward and backward, without recomputation."""
    tokens: int
    """Tokens of one global batch; for a task other than language, its samples."""
    timed: str
    """Which blocks were timed on this machine, or why none was; empty for other clusters."""
    basis: StepBasis = "rates"
    """Whether the seconds are predicted from timed blocks or from rates alone."""

    @property
    def seconds_line(self) -> str:
        """One line on the source of the best plan's seconds, and the error of past predictions."""
        cluster, best = self.question.cluster, self.result.best[0]
        engine = engine_of(best.plan)
        if not self.question.at_hand:
            return (
                f"seconds: predicted from the rates of {cluster.name}; their error is not known, "
                f"as no run on {cluster.device.name} was measured here"
            )
        error = f"; {step_uncertainty(engine, self.basis, cluster.device.kind)}" if engine else ""
        return f"seconds: {self.timed}{error}"

    @property
    def peak_flops(self) -> float:
        """FLOP/s of all devices together, in the job's precision."""
        cluster = self.question.cluster
        nodes = self.question.devices / cluster.node.devices
        device_flops = cluster.device.flops.of(self.question.job.train.precision)
        return device_flops * (nodes if cluster.node.shared else self.question.devices)


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable Python's cycle collector: planning makes millions of objects, and few cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


Opened = tuple[RunSetup, SectionLibrary, PlanEvaluator]
"""The setup of a question's job, the sections of its model, and the evaluator of plans."""


def ask(question: Question, opened: Opened | None = None) -> PlannedAnswer:
    """Search the plans of a job for the fastest that fit.

    Args:
        question: the question.
        opened: the result of `open_evaluator` for this question, or for one that differs from it
            only in its memory limit, its number of devices and the sizes that the user has fixed.
            Both questions must be about one device, or both about several. None to call
            `open_evaluator`.

    Returns:
        The answer; its list of best plans is empty if none fits.

    Raises:
        ConfigError: a number is impossible, the model does not run on fake tensors, or every
            candidate is refused.
    """
    check_question(question)
    with uncollected():
        return _search(question, opened or open_evaluator(question))


def open_evaluator(question: Question) -> Opened:
    """Set up the job of a question, the sections of its model, and the evaluator of its plans.

    Raises:
        ConfigError: the model cannot be described, or every rank must build the whole model, which
            is larger than the question's limit.
    """
    single_job = override_job(
        question.job, [*ONE_PROCESS, "strategy=single", "train.global_batch_size=1"]
    )
    model_spec = check_job(single_job)
    setup = open_setup(single_job, make_plan(single_job, 1, "cpu"), model_spec, by_block=True)
    if setup.workload.whole_bytes > question.limit:
        raise ConfigError(
            f"plan: every rank builds the model whole ({setup.blueprint.reason}), which takes "
            f"{format_bytes(setup.workload.whole_bytes)}; its tensors may take "
            f"{format_bytes(question.limit)}. Use a smaller model, or one that can be built on "
            "the meta device."
        )
    model, example = setup.workload.model, setup.workload.micro_batch
    library = SectionLibrary(
        model,
        example,
        _losses(setup, example, question.cluster.device.kind),
        setup.workload.make_optimizer,
        torch.device("cpu"),
    )
    timer, cut = StepTimer(question.cluster), question.devices > 1
    blocks = _block_timer(question, setup)
    shortened = shorten_model(model)
    checks = ModelChecks(setup.workload, shortened[0] if shortened else None)
    evaluator = PlanEvaluator(
        question.job, library, timer, question.margins, cut=cut, blocks=blocks, checks=checks
    )
    return setup, library, evaluator


def _search(question: Question, opened: Opened) -> PlannedAnswer:
    setup, library, evaluator = opened
    example, blocks = setup.workload.micro_batch, evaluator.blocks
    whole_model, techniques = evaluator.whole_model(2), searched_techniques(question.job)
    is_whole = question.devices == 1 or question.tp == 1
    space = SearchSpace(
        devices=question.devices,
        per_node=question.cluster.node.devices,
        global_batch_size=question.global_batch_size,
        num_blocks=len(whole_model.sections) - 2,
        pp=question.pp,
        dp=question.dp,
        tp=question.tp,
        most_ranks=1 if is_whole else library.most_ranks(techniques["slice"]),
        rows=question.rows,
        engines=tuple(question.margins),
        device_type=question.cluster.device.kind,
        techniques=techniques,
        within=question.within,
    )
    if question.within is not None and next(space.candidates(), None) is None:
        raise ConfigError(
            f"plan: no plan of {question.devices} devices has the words "
            f"{question.job.strategy.name} and this mesh. Use other words, or --strategy auto."
        )
    search = PlanSearch(evaluator, space)
    answer = search.run(
        question.limit,
        only_best=question.only_best,
        frontier=question.frontier,
        with_offload=bool(question.peak_option),
    )
    flops = sum(
        float(((w.flops + w.low_flops) * w.times).sum())
        for s in whole_model.sections
        for w in (s.forward, s.backward)
    )
    samples = question.global_batch_size
    targets = example.count // max(1, example.rows) if setup.data.task.name == "language" else 1
    return PlannedAnswer(
        question=question,
        setup=setup,
        result=answer,
        search=search,
        num_parameters=setup.parameters,
        step_flops=flops / 2 * samples,  # the sections are of two rows
        tokens=int(targets * samples),
        timed=blocks.source if blocks is not None else "",
        basis=blocks.basis if blocks is not None else "rates",
    )


def _block_timer(question: Question, setup: RunSetup) -> BlockTimer | None:
    if not question.at_hand:
        return None
    batch, ranks = question.global_batch_size, min(question.devices, question.cluster.node.devices)
    sizes = [n for n in round_sizes(batch) if question.rows in (None, n)]
    workload = setup.workload
    return BlockTimer(question.job, workload.model, workload.micro_batch, ranks, sizes, SCRIPT)


def _losses(parts: RunSetup, example: MicroBatch, device_type: str) -> Callable[[bool, int], Loss]:
    """Return a function that makes the loss of a run.

    Its arguments are whether several micro-batches are in flight at the head, and the rows of a
    micro-batch.
    """
    job = parts.job
    if job.model.loss is not None:
        return lambda *_: parts.workload.loss
    # The head was found in a run of the whole model, and is the same for any batch.
    known = parts.workload.loss
    found = (
        {"head": known.head}
        if isinstance(known, ChunkedCrossEntropy)
        else {"chunked_loss": False, "head": None, "chunk_size": None}
    )
    model = replace(parts.model, config=job.model.model_copy(update=found))

    @cache
    def loss(several_waiting: bool, rows: int) -> Loss:  # noqa: FBT001
        return choose_loss(
            model,
            parts.data.task,
            parts.workload.model,
            resize_micro_batch(example, rows),
            several_waiting=several_waiting,
            device_type=device_type,
        )

    return loss


def check_question(question: Question) -> None:
    """Refuse a question with impossible numbers.

    Raises:
        ConfigError: there are fewer than 1 device or sample, more devices than one node of a
            cluster without links between nodes, or no memory for tensors.
    """
    cluster = question.cluster
    if question.devices < 1:
        raise ConfigError(
            f"plan: --devices {question.devices}: at least 1 is needed. Use --devices "
            f"{cluster.node.devices}, one node of {cluster.name}."
        )
    if question.global_batch_size < 1:
        raise ConfigError(
            f"plan: --global-batch-size {question.global_batch_size}: at least 1 sample is "
            "needed. Use --global-batch-size 64."
        )
    if question.devices > cluster.node.devices and cluster.between is None:
        raise ConfigError(
            f"plan: --devices {question.devices}, and cluster {cluster.name} is one node of "
            f"{cluster.node.devices} devices, without links between nodes. Use --devices "
            f"{cluster.node.devices}, or another --cluster."
        )
    memory = question.memory.nbytes
    if question.limit <= 0 and question.peak_option:
        raise ConfigError(
            f"plan: {question.peak_option}{memory} leaves nothing for tensors. Use "
            f"{question.peak_option}1GiB; if no plan fits, the answer names the least size."
        )
    if question.limit <= 0 and question.memory.reserved is None:
        needed = format_bytes(2 * question.memory.memory_for(0)).replace(" ", "")
        raise ConfigError(
            f"plan: --cap {memory} ({format_bytes(memory)}) leaves nothing for tensors. "
            f"Use --cap {needed} or more."
        )
    if question.limit <= 0:
        raise ConfigError(
            f"plan: --memory {memory} ({format_bytes(memory)}) is less than a process on "
            f"{cluster.name} takes without any tensor, "
            f"{format_bytes(cluster.device.reserved)}. Use --memory "
            f"{format_bytes(2 * cluster.device.reserved).replace(' ', '')} or more."
        )


def rank_limits(cluster: Cluster, *, memory: str | None, cap: str | None) -> tuple[Limit, str]:
    """Return the memory limit of a rank, and a line on the memory reserved for non-tensors.

    Args:
        cluster: the cluster, whose device has a memory size and a reserve.
        memory: the memory of a device as text, such as 80GiB; None for that of the cluster's
            device. It is ignored if there is a cap.
        cap: the limit that a run would enforce, as text; None for all of the memory.

    Raises:
        ConfigError: a text is not a number of bytes.
    """
    if cap is not None:
        non_tensor = non_tensor_reserve(cluster.device.kind, cluster.device.name)
        limit = Limit(parse_bytes(cap, "--cap"), non_tensor_bytes=non_tensor)
        reserve = format_bytes(limit.nbytes - limit.for_tensors)
        return limit, f"of the cap {reserve} are reserved for memory other than tensors"
    size = parse_bytes(memory, "--memory") if memory is not None else cluster.device.memory
    reserved = cluster.device.reserved
    line = f"{format_bytes(reserved)} are reserved for memory other than tensors"
    return Limit(size, reserved), line


def limit_on_peaks(
    memory: Limit, margins: Mapping[str, float], option: str, peak: int | None
) -> tuple[Limit, dict[str, float]]:
    """Return a limit on predicted peaks, and margins of zero.

    Args:
        memory: the memory of a rank.
        margins: by engine, the margins that the memory has to leave free.
        option: the option that names the peak, as it is written before its value.
        peak: the bytes that the option names; None for the most that a rank may take.

    Raises:
        ConfigError: the option names more than a rank may take.
    """
    most = int(memory.for_tensors / (1 + max(margins.values()))) // KIB * KIB  # as it is printed
    if peak is not None and peak > most:
        raise ConfigError(
            f"{option}{format_bytes(peak).replace(' ', '')}: tensors of a rank may take "
            f"{format_bytes(most)}. Use {option}{most // MIB}MiB or less, or devices with more "
            "memory."
        )
    return Limit(most if peak is None else peak, 0), dict.fromkeys(margins, 0.0)


def engine_margins(
    engines: Iterable[str], device: DeviceSpec | None = None
) -> tuple[dict[str, float], str]:
    """Return by engine the share by which its forecasts are enlarged, and a line with the reasons.

    Args:
        engines: some of 'torch', 'deepspeed' and 'fairscale'.
        device: the device of a described cluster; None for this machine's. If this machine has no
            such device, its recorded runs are not used, and the margins are the defaults.
    """
    foreign = None
    if device is not None and not has_device(device.kind, device.name):
        foreign = device.name
    margins = {engine: safety_margin(engine, foreign_device=foreign) for engine in engines}
    lines = [f"{engine}: {margin.explanation}" for engine, margin in margins.items()]
    return {engine: margin.margin for engine, margin in margins.items()}, "; ".join(lines)
