"""The exchanges of small numbers between hosts in a step: a frozen table by strategy.

One gather begins when the batch is read: targets, rows, a signal to stop, the peak. The loss needs
a second gather, after the passes. A few strategies need a third or fourth for other numbers.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.device_reads import DeviceReads
from support.host_gathers import HostGathers
from support.nets import BlockLM, tokens
from support.parity import adamw
from support.ranks import run_ranks

from bigtrain.data import GlobalOrder, MicroBatch, StepLoader
from bigtrain.engine.engine import Engine
from bigtrain.engine.resume import Saving, StopSignals
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.job.presets import preset_names
from bigtrain.losses.loss import CrossEntropy
from bigtrain.ranks.context import RunContext
from bigtrain.ranks.preemption import PreemptionNotice
from bigtrain.ranks.step_numbers import OwnNumbers, StepNumbers
from bigtrain.tensors.tree import tree_tensors
from bigtrain.train import take_steps

STEPS, COUNTED = 7, 5
"""The steps of a run, and the one whose exchanges are counted: in the first ones peaks grow."""
BEGIN, LOSS = "begin", "mean_loss"
PLAIN = (BEGIN, LOSS)
FLAGS = (BEGIN, "has_gradient_anywhere", LOSS)  # which gradients any replica has
NORM = (BEGIN, LOSS, "norm")  # DeepSpeed's step gets the norm as a number
PIPELINE = (BEGIN, "_mean_loss")
FULLY_SHARDED = ("fsdp", "fsdp_checkpointing", "fsdp_zero2", "hybrid")
Row = tuple[Sequence[str], tuple[int, int]]
"""The gathers of the last rank; the numbers of device reads on the first and on the last rank."""
REPLICAS: dict[str, Row] = {
    **dict.fromkeys(("ddp", "ddp_checkpointing", "ddp_offload_disk"), (PLAIN, (2, 2))),
    **dict.fromkeys(FULLY_SHARDED, (PLAIN, (2, 2))),
    **dict.fromkeys(("zero1_torch", "zero1_torch_offload_disk"), (PLAIN, (2, 2))),
    **dict.fromkeys(("oss", "sharded_ddp", "local_sgd", "diloco"), (PLAIN, (2, 2))),
    **dict.fromkeys(("ring", "sync_sgd"), (FLAGS, (2, 2))),
    **dict.fromkeys(("zero1", "zero2", "zero3", "zero2_checkpointing"), (NORM, (2, 2))),
    **dict.fromkeys(("zero3_checkpointing", "zero2_offload", "zero3_offload"), (NORM, (2, 2))),
    # A server has no loss on a device, and the norm comes from the servers.
    "parameter_server": ((*FLAGS, "norm"), (0, 1)),
    "parameter_server_async": ((), (0, 5)),
}
PIPELINES: dict[str, Row] = {
    **dict.fromkeys(("gpipe", "1f1b", "1f1b_checkpointing", "layer_split"), (PIPELINE, (1, 2))),
    **dict.fromkeys(("1f1b_ddp", "1f1b_fsdp", "1f1b_zero1", "1f1b_zero2"), (PIPELINE, (1, 2))),
    **dict.fromkeys(("interleaved_1f1b", "zero_bubble"), (PIPELINE, (1, 2))),
    "zbv": (PIPELINE, (2, 1)),  # the first rank also has the last stage
    "pipeline_deepspeed": (PIPELINE, (1, 2)),
    "pipeline_deepspeed_zero1": ((*PIPELINE, "clip"), (1, 3)),
}
SLICES: dict[str, Row] = dict.fromkeys(("tensor", "tensor_sequence"), (PLAIN, (2, 2)))
TABLES = {"dp": REPLICAS, "pp": PIPELINES, "tp": SLICES}
DAILY = {"dp": ("ddp", "ring"), "pp": ("1f1b_fsdp",), "tp": ("tensor",)}
SEVERAL_DEVICES = ("data_parallel", "layer_split_devices", "gpipe_fairscale")
"""One process drives several devices."""


class Run:
    """The parts of `bigtrain train` that a run of an engine needs, without files."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.total_steps = engine, STEPS
        self.data = SimpleNamespace(validation=None)
        self.lines: list[str] = []

    def training_steps(self, context: RunContext, _seen: int) -> Iterator[Any]:
        samples, plan = tokens(64, ignored=False), self.engine.plan
        loader = StepLoader(
            samples,
            GlobalOrder(len(samples), plan.batch.global_size),
            count=CrossEntropy().count,
            dp_rank=plan.data_rank(context.dp_rank),
            dp_size=plan.batch.dp_size,
            micro_batch_size=plan.batch.micro_size,
        )
        yield from loader

    def step(self, result: Any, *_: Any) -> None:
        self.lines.append(f"step {result.step}")

    def sync(self) -> None:
        self.lines.append("save")

    def validation_batches(self, _context: RunContext) -> list[Any]:
        self.lines.append("validate")
        return []

    def validation(self, _step: int, _measured: Any) -> None: ...

    def print_line(self, _line: str) -> None: ...


class CountedRun(Run):
    """A run that counts the exchanges and the reads of step `COUNTED`."""

    def training_steps(self, context: RunContext, seen: int) -> Iterator[Any]:
        engine = self.engine
        for number, batch in enumerate(super().training_steps(context, seen), start=1):
            if number != COUNTED:
                yield batch
                continue
            known = [*engine.model.parameters(), *engine.model.buffers()]
            known += [p for root in engine.runner.roots for p in root.parameters()]
            for part in batch.micro_batches:
                known += [*tree_tensors(part.inputs), *tree_tensors(part.targets)]
            with DeviceReads(known) as self.reads, HostGathers() as self.gathers:
                yield batch


def open_engine(context: RunContext, strategy: str, validate_at: int | None = None) -> Engine:
    keys: dict[str, Any] = {"train.accumulation_steps": 2, "train.micro_batch_size": 2}
    keys |= {"memory.track_steps": 0, "memory.predict": False, "train.eval_every": validate_at or 0}
    keys |= {"checkpoint.every": 0, "checkpoint.at_end": False}
    if strategy in FULLY_SHARDED:  # `DeviceReads` does not follow sums in shared memory
        keys["strategy.replicate.exchange"] = "sockets"
    loss, samples = CrossEntropy(), tokens(2, ignored=False)
    example = MicroBatch(samples.inputs, samples.targets, loss.count(samples.targets), 2)
    job = job_from_keys(strategy, keys)
    return Engine(partial(BlockLM, width=32), loss, adamw, job, context, example=example)


def take(engine: Engine, run: Run, notice: PreemptionNotice) -> bool:
    parts: Any = run
    saving = Saving(engine.job, engine, Path("nowhere"), STEPS)
    signals = StopSignals(notice, engine, saving)
    return take_steps(parts, engine, saving, parts, signals)


def count_exchanges(
    context: RunContext, strategies: Sequence[str]
) -> dict[str, tuple[tuple[str, ...], int, bool] | str]:
    """Return the gathers, the number of reads and whether the first gather waits, by strategy."""
    results: dict[str, Any] = {}
    for strategy in strategies:
        try:
            with open_engine(context, strategy) as engine:
                run = CountedRun(engine)
                with PreemptionNotice(context, engine.plan.replicate.notice_every) as notice:
                    assert take(engine, run, notice)
        except ConfigError as error:
            results[strategy] = str(error)
            continue
        gathers = run.gathers
        results[strategy] = tuple(gathers.places), len(run.reads.places), gathers.waits[:1]
    return results


def assert_counts(axis: str, strategies: Sequence[str], flavour: Any = None) -> None:
    axes = {} if axis == "dp" else {axis: 2}
    first, last = run_ranks(count_exchanges, 2, strategies, flavour=flavour, timeout_s=300, **axes)
    for name in strategies:
        expected = TABLES[axis].get(name)
        if expected is None:
            assert isinstance(first[name], str), name  # refused
            continue
        gathers, reads = expected
        assert last[name][0] == tuple(gathers), name
        assert len(first[name][0]) == len(gathers), name
        assert (first[name][1], last[name][1]) == reads, name
        assert first[name][2] == last[name][2] == [False] * bool(gathers), name


@pytest.mark.parametrize("axis", TABLES)
def test_a_few_strategies_exchange_twice_a_step(axis: str) -> None:
    assert_counts(axis, DAILY[axis])


@pytest.mark.parametrize("axis", TABLES)
def test_every_preset_of_two_ranks_is_in_the_table(axis: str) -> None:
    names = [name for name in preset_names("strategies") if name not in SEVERAL_DEVICES]
    assert_counts(axis, names, flavour="deepspeed")


class SignalledRun(Run):
    """A run in which rank 1 gets a signal in some step: in a pass, or after the update."""

    def __init__(
        self, engine: Engine, validate_at: int | None, step: int, *, in_pass: bool
    ) -> None:
        super().__init__(engine)
        if validate_at is not None:
            self.data = SimpleNamespace(validation=())
        self.at, self.in_pass = step, in_pass
        engine.model.register_forward_pre_hook(self.in_forward)

    def in_forward(self, *_: Any) -> None:
        if self.in_pass and self.engine.steps_done + 1 == self.at:
            self.get()

    def step(self, result: Any, *figures: Any) -> None:
        super().step(result, *figures)
        if not self.in_pass and result.step == self.at:
            self.get()

    def get(self) -> None:
        if self.engine.context.rank == 1:
            signal.raise_signal(signal.SIGTERM)


def stop(
    context: RunContext, step: int, in_pass: bool, validate_at: int | None
) -> tuple[list[str], str]:
    engine = open_engine(context, "ddp", validate_at)
    with engine, PreemptionNotice(context) as notice:
        engine.save = lambda *_, **__: None  # type: ignore[method-assign, assignment]
        engine.evaluate = lambda _batches: {}  # type: ignore[method-assign]
        run = SignalledRun(engine, validate_at, step, in_pass=in_pass)
        assert not take(engine, run, notice)
        assert engine.steps_done == step
        return run.lines, notice.signal_name


@pytest.mark.parametrize("step", [1, COUNTED])
@pytest.mark.parametrize("in_pass", [True, False])
def test_a_signal_stops_the_run_after_the_step_in_which_it_came(step: int, in_pass: bool) -> None:
    steps = [f"step {number}" for number in range(1, step + 1)]
    assert run_ranks(stop, 2, step, in_pass, None) == [([*steps, "save"], "SIGTERM")] * 2


def test_the_state_is_saved_before_a_validation_that_is_due() -> None:
    lines = [*(f"step {number}" for number in range(1, 6)), "save", "validate"]
    assert run_ranks(stop, 2, COUNTED, True, COUNTED) == [(lines, "SIGTERM")] * 2


def own_loop(context: RunContext, own_rows: Sequence[int]) -> tuple[list[str], list[float]]:
    """Train on pairs, of which the ranks have different numbers of rows."""
    samples = tokens(8, ignored=False)
    rows = own_rows[context.rank]
    batch = samples.inputs[:rows], samples.targets[:rows]
    with open_engine(context, "ddp") as engine:
        engine.step(batch)
        with HostGathers() as gathers:
            result = engine.step(batch)
        return gathers.places, [result.samples, result.loss]


def test_a_loop_of_the_user_needs_no_more() -> None:
    first, last = run_ranks(own_loop, 2, [4, 1])
    assert first == last
    assert first[0] == list(PLAIN)
    assert first[1][0] == 5


class Gathers:
    """A context whose gather is over when the test says so.

    Args:
        rows: the row of every rank but the first.
    """

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        self.rows, self.waited = rows, 0

    def begin_rows(self, numbers: Sequence[float]) -> Any:
        def wait() -> list[list[float]]:
            self.waited += 1
            return [list(numbers), *map(list, self.rows)]

        return wait

    def ranks_of(self, _axis: str) -> list[int]:
        return list(range(len(self.rows) + 1))


def test_numbers_are_waited_for_once_and_when_they_are_wanted() -> None:
    context: Any = Gathers([OwnNumbers(5, 3, 2, 1, divisors=(0.5,)).as_row()])
    numbers, batch = StepNumbers(context, replicas=2), [object()]
    assert numbers.targets_of(batch) is None
    numbers.begin(OwnNumbers(7, 4, 1, 1, signal=15, peak=9.0, divisors=(0.25,)))
    numbers.belong_to(batch)
    assert context.waited == 0
    assert numbers.targets_of(batch) == 12
    assert numbers.is_even
    assert numbers.divisors() == [12, 0.75]
    assert [(own.signal, own.peak) for own in numbers.everyone()] == [(15, 9.0), (0, -1.0)]
    assert context.waited == 1


def test_a_runner_that_runs_other_micro_batches_gathers_their_targets() -> None:
    context: Any = Gathers([OwnNumbers(5, 3, 2, 1).as_row()])
    numbers, batch = StepNumbers(context, replicas=2), [object()]
    numbers.begin(OwnNumbers(7, 4, 1, 1))
    numbers.belong_to(batch)
    assert numbers.targets_of([*batch]) is None
    assert numbers.targets_of(batch) is None  # they are of a step that is over
    assert not numbers.is_even


def test_servers_have_no_part_in_the_sums() -> None:
    context: Any = Gathers([OwnNumbers(5, 3, 2, 1).as_row(), OwnNumbers(2, 1, 1, 2).as_row()])
    numbers, batch = StepNumbers(context, replicas=2), [object()]
    numbers.begin(OwnNumbers(100, 50, 20, 9))
    numbers.belong_to(batch)
    assert numbers.targets_of(batch) == 7
    assert not numbers.is_even
