"""Measure the seconds of each block of a job's model, forward and backward, and of an update.

`bigtrain.timing.block_seconds` runs this file in a new process. The process starts several ranks,
because the ranks of a run share the machine. Each rank runs this file again, and computes
independently:

    python bigtrain/engine/time_blocks.py --start N ANSWER REQUEST
    python bigtrain/engine/time_blocks.py ANSWER REQUEST          as a rank

REQUEST is a `BlockRequest` as JSON. ANSWER is a file that rank 0 writes: a list with a
`BlockSeconds` for each micro-batch size, as JSON.
"""

import os
import sys

# A file that is run by its path has its own folder on sys.path, not that of the package.
if not __package__ and sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(__file__):
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import json
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from bigtrain.activations.recompute import checkpoint_block
from bigtrain.assembly.make_plan import device_type_of, make_plan
from bigtrain.core.loop import LoopRunner
from bigtrain.core.strategy import Assembly, Plan
from bigtrain.core.workload import Workload
from bigtrain.devices import is_accelerator, synchronize, timing_event
from bigtrain.engine.setup import RunSetup, open_setup
from bigtrain.files.parse import parse_json
from bigtrain.job.schema import Job
from bigtrain.memory.host_memory import free_host_bytes
from bigtrain.memory.meter import MemoryMeter
from bigtrain.models.blocks import independent_blocks
from bigtrain.models.parameters import bf16_parameter_names, named_tensors
from bigtrain.prediction.fake_runs.runs import resize_micro_batch
from bigtrain.prediction.shorten import shorten_model
from bigtrain.prediction.whole_model import WHOLE_MODEL
from bigtrain.ranks.connect import connect
from bigtrain.ranks.context import RunContext
from bigtrain.ranks.exit_status import run_guarded
from bigtrain.ranks.launch import start_ranks
from bigtrain.ranks.launcher_env import detect_rank_info
from bigtrain.timing.block_seconds import BlockRequest, BlockSeconds, BlockVariant
from bigtrain.versions.torch_versions import backward_for_inputs, backward_for_weights

SCRIPT = Path(__file__)
MOST_REPEATS = 9
"""The most repetitions of a step with one micro-batch size."""
SECONDS_A_SIZE = 2.0
"""The seconds that the repetitions of one micro-batch size should take together."""
LONG_STEP_S = 1.0
"""At a size with longer steps no variants are timed: they take about as long as the steps, and a
size of half as many rows has the same shares within some per cent."""
FREE_SHARE = 0.5
"""The largest share of the host's free memory that all ranks together may use."""


class BlockStopwatch:
    """Records the times at which blocks begin and end in one micro-batch.

    Args:
        model: the model; its blocks get hooks.
        names: the names of the blocks, in the order of the forward pass.
        device: the device on which the model runs.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], device: torch.device) -> None:
        self._device = device
        self._uses_events = is_accelerator(device)
        self.names = list(names)
        self._moments: list[tuple[str, Any]] = []
        for name in self.names:
            block = model.get_submodule(name)
            block.register_forward_pre_hook(self._begins(name), with_kwargs=True)
            block.register_forward_hook(self._ends(name))

    def start(self) -> None:
        """Begin a micro-batch, and discard the times of the last one."""
        self._moments = []
        self.note("start")

    def note(self, event: str) -> None:
        """Record the time of an event; on a GPU, the time at which the stream reaches this call."""
        moment: Any
        if self._uses_events:
            moment = timing_event(self._device)
            moment.record()
        else:
            moment = time.perf_counter()
        self._moments.append((event, moment))

    def sections(self) -> tuple[list[tuple[float, float]], float]:
        """Return the seconds of the last micro-batch's sections, and the seconds of the update.

        The seconds of a section are a pair (forward, backward). The sections are those of
        `BlockSeconds`; there is a single section if the blocks do not run one after another.
        """
        moments = self._seconds()
        edges = self._edges(moments)
        update = moments["updated"] - moments["backward_end"]
        if edges is None:
            start = moments["backward_start"]
            return [(start - moments["start"], moments["backward_end"] - start)], update
        forward, backward = ([b - a for a, b in pairwise(each)] for each in edges)
        return list(zip(forward, reversed(backward), strict=True)), update

    def _seconds(self) -> dict[str, float]:
        """Return the seconds at which each event first occurred.

        If a block has several outputs, its backward pass begins with the first of their gradients.
        """
        if self._uses_events:
            synchronize(self._device)
            start = self._moments[0][1]
            return {
                event: start.elapsed_time(moment) / 1e3 for event, moment in reversed(self._moments)
            }
        return dict(reversed(self._moments))

    def _edges(self, moments: dict[str, float]) -> tuple[list[float], list[float]] | None:
        """Return the seconds at which sections begin and end, forward and backward.

        The backward pass of a block begins when the gradient of its output is made, which also ends
        the backward pass of the next block. The first block's backward pass ends when the gradient
        of its inputs is made. None if the blocks do not run one after another.
        """
        if len(self.names) < 2:
            return None
        forward = [moments.get(f"forward {name}", -1.0) for name in self.names]
        backward = [moments.get(f"backward {name}", -1.0) for name in reversed(self.names)]
        done = moments.get("inputs", moments["backward_end"])
        ends = moments.get(f"end {self.names[-1]}", -1.0)
        forward_edges = [moments["start"], *forward, ends, moments["backward_start"]]
        backward_edges = [moments["backward_start"], *backward, done, moments["backward_end"]]
        is_ordered = all(edges == sorted(edges) for edges in (forward_edges, backward_edges))
        return (forward_edges, backward_edges) if is_ordered else None

    def _begins(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self.note(f"forward {name}")
            if name == self.names[0]:
                self._watch((args, kwargs), "inputs")

        return hook

    def _ends(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            self.note(f"end {name}")
            self._watch(output, f"backward {name}")

        return hook

    def _watch(self, tensors: Any, event: str) -> None:
        """Record an event whenever the gradient of one of the tensors is made."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self.note(event))  # type: ignore[no-untyped-call]


def main(arguments: list[str]) -> int:
    """Start the ranks, or run as one of them, and return the exit status.

    Args:
        arguments: the arguments of the command line; see the module's docstring.
    """
    if arguments[0] == "--start":
        return start_ranks(int(arguments[1]), arguments[2:], Path(__file__))
    answer, request = arguments
    wanted = BlockRequest(**parse_json(request, "the request"))
    job = Job.model_validate(wanted.job)
    placement = detect_rank_info(os.environ)
    with connect(placement, device=device_type_of(job), setup_timeout=120, timeout=600) as context:
        timed = time_blocks(job, wanted, context)
        if context.is_main:
            Path(answer).write_text(
                json.dumps([asdict(block_seconds) for block_seconds in timed]), "utf-8"
            )
    return 0


def time_blocks(job: Job, wanted: BlockRequest, context: RunContext) -> list[BlockSeconds]:
    """Time all micro-batch sizes for which there is time and memory. Collective.

    Steps of all sizes alternate. So a moment at which the machine is slow affects all of them, and
    hardly their order.

    Args:
        job: the job whose model is timed.
        wanted: the micro-batch sizes and the limit of seconds.
        context: this rank's context.

    Returns:
        The seconds for each size that was timed, in the order of `wanted.rows`.
    """
    plan = make_plan(job, 1, context.device.type)
    setup = open_setup(job, plan)
    model = shortened_with_values(setup, context)
    if wanted.bf16_parameters:
        for name in bf16_parameter_names(model):
            parameter = model.get_parameter(name)
            parameter.data = parameter.data.to(torch.bfloat16)
    workload = replace(setup.workload, model=model)
    names = [name for name, _ in independent_blocks(model)]
    stopwatch = BlockStopwatch(model, names, context.device)
    runner = _runner(workload, plan, context)
    began = time.perf_counter()
    timings: list[_SizeTiming] = []
    before = _resident_bytes()
    for rows in wanted.rows:
        # Twice as many rows take about twice the memory of the sizes so far, on every rank.
        growth = 2 * (_resident_bytes() - before) if timings else 0
        free = free_host_bytes() or 0
        tight = context.device.type == "cpu" and growth * context.world_size > FREE_SHARE * free
        planned = sum(timing.planned_seconds for timing in timings)
        planned += 4 * timings[-1].step_seconds if timings else 0  # twice as long, and two of them
        late = time.perf_counter() - began + planned > wanted.seconds
        if max(context.all_gather_numbers(float(timings != [] and (tight or late)))):
            break
        smaller = timings[-1] if timings else None
        timings.append(_SizeTiming(runner, workload, stopwatch, rows, context, smaller))
    for turn in range(max(timing.times for timing in timings)):
        for timing in timings:
            if turn < timing.times:
                timing.repeat()
    return [timing.result() for timing in timings]


def shortened_with_values(setup: RunSetup, context: RunContext) -> nn.Module:
    """Return the model with its initial values, but only a few blocks of each run of equal ones.

    The weights of blocks that are left out are not made.

    Args:
        setup: the parts of a run, of which the model is used.
        context: this rank's context, with the device and the seed.
    """
    model, blueprint = setup.blueprint.model, setup.blueprint
    short = shorten_model(model)
    if short is None:
        blueprint.materialize(context.device, seed=context.seed)
        return model
    order = short[1]
    names = [name for name, _ in independent_blocks(model)]
    spare = tuple(f"{name}." for index, name in enumerate(names) if order[index] in order[:index])
    wanted = [name for name in named_tensors(model) if not name.startswith(spare)]
    blueprint.materialize(context.device, seed=context.seed, only=wanted)
    result = shorten_model(model)
    return model if result is None else result[0]


def _runner(workload: Workload, plan: Plan, context: RunContext) -> LoopRunner:
    """Return the plain loop for one process."""
    own_context = RunContext.alone(context.device, context.seed)
    root = WHOLE_MODEL.root(workload.model, workload.loss, plan, context.device)
    return LoopRunner(
        Assembly(
            context=own_context,
            plan=plan,
            loss=workload.loss,
            meter=MemoryMeter(context.device, track_steps=0),
            model=workload.model,
            make_optimizer=workload.make_optimizer,
            module=root,
            materialize=lambda _names: None,
        )
    )


class _SizeTiming:
    """Times micro-batches of one size on all ranks at once. All methods are collective.

    Args:
        runner: runs the steps.
        workload: the model and an example micro-batch.
        stopwatch: records the seconds of the blocks.
        rows: the rows of a micro-batch.
        context: this rank's context.
        smaller: the timing of the next smaller size; None if there is none.
    """

    def __init__(
        self,
        runner: LoopRunner,
        workload: Workload,
        stopwatch: BlockStopwatch,
        rows: int,
        context: RunContext,
        smaller: "_SizeTiming | None",
    ) -> None:
        self._runner, self._stopwatch, self._context = runner, stopwatch, context
        self._rows, self._model = rows, workload.model
        self._batch = resize_micro_batch(workload.micro_batch, rows)
        # The first step allocates memory that later steps reuse, so it only decides their number.
        sections, update = _step_seconds(runner, stopwatch, self._batch)
        step_seconds = max(context.all_gather_numbers(2 * (sum(map(sum, sections)) + update)))
        self.step_seconds = step_seconds
        """The seconds of the first step."""
        self.times = repetitions(step_seconds)
        """The number of repetitions."""
        self._seconds: list[tuple[list[tuple[float, float]], float]] = []
        self._smaller = smaller if step_seconds > LONG_STEP_S else None
        began = time.perf_counter()
        self._variants: _Variants | None = None
        if self._smaller is None:
            self._variants = _Variants(runner, workload.model, stopwatch.names, self._batch)
            self._variants.repeat()  # the first repetition does not count
        self.planned_seconds = self.times * (step_seconds + time.perf_counter() - began)
        """The seconds that the repetitions will take."""

    def repeat(self) -> None:
        """Time a step and the variants of a block once."""
        self._context.barrier()
        self._seconds.append(_step_seconds(self._runner, self._stopwatch, self._batch))
        if self._variants is not None:
            self._context.barrier()
            self._variants.repeat()

    def result(self) -> BlockSeconds:
        """Return the medians of the repetitions, as means over the ranks."""
        by_section = zip(*(pairs for pairs, _ in self._seconds), strict=True)
        sections = [_medians(pairs) for pairs in by_section]
        update = statistics.median(seconds for _, seconds in self._seconds)
        flat = [*(number for pair in sections for number in pair), update]
        ranks = self._context.world_size
        means = [sum(self._context.all_gather_numbers(number)) / ranks for number in flat]
        pairs = list(zip(means[:-1:2], means[1::2], strict=True))
        trained = sum(p.numel() for p in self._model.parameters() if p.requires_grad)
        return BlockSeconds(self._rows, pairs, means[-1], trained, self._shares())

    def _shares(self) -> dict[BlockVariant, tuple[float, float]]:
        """Return the shares of the variants, which may be those of the next smaller size."""
        if self._smaller is not None:
            return self._smaller._shares()
        return {} if self._variants is None else self._variants.shares()


def repetitions(step_seconds: float) -> int:
    """Return how often a step of two micro-batches is repeated.

    Args:
        step_seconds: the seconds of the first step.
    """
    return max(1, min(MOST_REPEATS, round(SECONDS_A_SIZE / step_seconds)))


def _step_seconds(
    runner: LoopRunner, stopwatch: BlockStopwatch, batch: Any
) -> tuple[list[tuple[float, float]], float]:
    """Run a step of two micro-batches and an update, and return its seconds.

    The seconds are those of the second micro-batch. It adds its gradients to those of the first,
    as every micro-batch of a step but the first does.
    """
    runner.begin_step()
    for _ in range(2):
        stopwatch.start()
        _pass(runner, stopwatch, batch)
    runner.update()
    stopwatch.note("updated")
    return stopwatch.sections()


class _Variants:
    """Times the variants of the block in the middle of the model; see `BlockSeconds.shares`.

    A model with a single block has none.

    Args:
        runner: runs the model once, to find the block's inputs.
        model: the model.
        names: the names of the blocks.
        batch: a micro-batch.
    """

    def __init__(
        self, runner: LoopRunner, model: nn.Module, names: Sequence[str], batch: Any
    ) -> None:
        self._model, self._times = model, 0
        self._taken: dict[BlockVariant, list[tuple[float, ...]]] = {}
        self._calls: list[tuple[Any, Any]] = []
        if len(names) < 2:
            return
        self._block = model.get_submodule(names[len(names) // 2])
        hook = self._block.register_forward_pre_hook(
            lambda _module, args, kwargs: self._calls.append((args, kwargs)), with_kwargs=True
        )
        with torch.no_grad():
            runner.forward_loss(runner.place_batch(batch))
        hook.remove()

    def repeat(self) -> None:
        """Time each variant once, beside a block that saves all activations."""
        if not self._calls:
            return
        self._times += 1
        for variant in get_args(BlockVariant):
            with suppress(Exception):  # the user's code may raise anything
                plain = _variant_seconds(self._block, None, *self._calls[0])
                seconds = _variant_seconds(self._block, variant, *self._calls[0])
                base = plain[1:] * 2 if variant == "split" else plain
                shares = tuple(a / b for a, b in zip(seconds, base, strict=True))
                self._taken.setdefault(variant, []).append(shares)
        self._model.zero_grad()

    def shares(self) -> dict[BlockVariant, tuple[float, float]]:
        """Return the medians, without the first repetition and variants that failed in one."""
        medians = {}
        for variant, measured in self._taken.items():
            if len(measured) < self._times:
                continue
            first, second = (statistics.median(each) for each in zip(*measured[1:], strict=True))
            medians[variant] = first, second
        return medians


def _variant_seconds(
    block: nn.Module, variant: BlockVariant | None, args: Any, kwargs: Any
) -> tuple[float, float]:
    """Return the seconds of a block's forward and of its backward pass.

    For the variant `split` they are the seconds of the input backward and of the weight backward.
    """
    block_inputs: list[Tensor] = []

    def as_input(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        block_inputs.append(leaf.detach().requires_grad_())
        return block_inputs[-1]

    args, kwargs = tree_map(as_input, (args, kwargs))
    times = [_now(block_inputs[0])]
    if variant in ("selective", "full"):
        result = checkpoint_block(block, block, *args, selective=variant == "selective", **kwargs)
    else:
        result = block(*args, **kwargs)
    outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    times.append(_now(block_inputs[0]))
    gradients = [torch.ones_like(output) for output in outputs]
    if variant == "split":  # as torch's zero-bubble schedules split it
        times = [_now(block_inputs[0])]
        _, groups = backward_for_inputs(outputs, gradients, block_inputs, block.parameters())
        times.append(_now(block_inputs[0]))
        backward_for_weights(block.parameters(), groups)
    else:
        torch.autograd.backward(outputs, gradients)
    times.append(_now(block_inputs[0]))
    first, second = (after - before for before, after in pairwise(times))
    return first, second


def _now(tensor: Tensor) -> float:
    synchronize(tensor.device)
    return time.perf_counter()


def _pass(runner: LoopRunner, stopwatch: BlockStopwatch, batch: Any) -> None:
    placed = runner.place_batch(batch)
    loss = runner.forward_loss(placed)
    stopwatch.note("backward_start")
    runner.backward(loss / max(1, placed.count))
    stopwatch.note("backward_end")


def _medians(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    forward, backward = zip(*pairs, strict=True)
    return statistics.median(forward), statistics.median(backward)


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(sys.argv[1:])))
