"""Pipelines of every schedule: numbers of one process, failures, micro-batches in flight."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.hand_cut import HandCut, HandStage
from support.nets import VOCABULARY
from support.parity import sgd
from support.ranks import RankFailure, run_ranks
from support.whole import as_saved, whole_tensors

from bigtrain.assembly.make_plan import make_plan
from bigtrain.core.loop import LoopRunner
from bigtrain.core.replicas import GradientAverager
from bigtrain.core.strategy import Assembly
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import CheckpointError, ConfigError, NonFiniteError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.memory.meter import MemoryMeter
from bigtrain.pipeline.runner import PipelineRunner
from bigtrain.ranks.context import RunContext
from bigtrain.schedules.in_flight import peak_in_flight as held_at_most
from bigtrain.schedules.orders import SCHEDULES, V_SHAPED_SCHEDULES, schedule_orders, stage_ranks

LOSS = CrossEntropy()
# (rows, length) of the micro-batches of each step, for one replica.
EVEN = [[(2, 5)] * 4, [(2, 5)] * 4]
RAGGED = [[(2, 5), (2, 5), (2, 5), (2, 5), (1, 5)], [(2, 4)] * 4, [(3, 6), (2, 4), (2, 5)]]
Shapes = Sequence[Sequence[tuple[int, int]]]


def steps(shapes: Shapes, replica: int) -> list[list[MicroBatch]]:
    generator = torch.Generator().manual_seed(100 + replica)
    micro_batches_by_step = []
    for number, step in enumerate(shapes):
        batches = []
        for step_index, (full, length) in enumerate(step):
            smaller = replica and step_index == len(step) - 1 and number == 0
            rows = 1 if smaller else full
            inputs = torch.randint(VOCABULARY, (rows, length), generator=generator)
            targets = torch.randint(VOCABULARY, (rows, length), generator=generator)
            share = 0.2 * (replica + step_index)
            targets[torch.rand(rows, length, generator=generator) < share] = -100
            if step_index == 2 and number == 1:  # padding
                batches.append(MicroBatch(inputs, targets, 0, 0))
            else:
                batches.append(MicroBatch(inputs, targets, LOSS.count(targets), rows))
        micro_batches_by_step.append(batches)
    return micro_batches_by_step


def model_of() -> HandCut:
    torch.manual_seed(7)
    return HandCut().double()


def assembly_of(context: RunContext, model: HandCut, strategy: str, clip: float | None) -> Assembly:
    job = job_from_keys(
        strategy,
        {
            "train.precision": "fp64",
            "train.micro_batch_size": 2,
            "train.accumulation_steps": 4,
            "optim.clip_norm": clip,
        },
    )
    plan = make_plan(job, context.dp_size, "cpu")
    object.__setattr__(plan, "pp", context.pp_size)
    return Assembly(
        context=context,
        plan=plan,
        loss=LOSS,
        meter=MemoryMeter(context.device, 0),
        model=model,
        make_optimizer=sgd,
        module=model,
        materialize=lambda _names: None,
    )


def pipeline(
    context: RunContext, schedule: str, strategy: str, per_rank: int, clip: float | None
) -> PipelineRunner:
    ranks = stage_ranks(schedule, context.pp_size, per_rank)
    count = len(ranks)
    model = model_of()
    stages = [
        HandStage(model, index, count, LOSS)
        for index, rank in enumerate(ranks)
        if rank == context.pp_rank
    ]
    assembly = assembly_of(context, model, strategy, clip)
    assembly.roots = list(stages)
    for technique in assembly.plan.techniques.values():
        technique.apply(assembly)
    ties = [("embedding.weight", (0, count - 1))]
    return PipelineRunner(assembly, stages, schedule, ties=ties)


def record(
    runner: Any, batches: list[list[MicroBatch]]
) -> tuple[list[float], list[float], list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    losses, norms, gradients = [], [], []
    for step in batches:
        runner.module.train()
        losses.append(runner.forward_backward(step).read())
        gradients.append(whole_tensors(runner.gradients()))
        norms.append(runner.update())
    return losses, norms, gradients, whole_tensors(runner.state())


def run_alone(shapes: Shapes, replicas: int = 1, clip: float | None = None) -> tuple[Any, ...]:
    """One process with the batches of all replicas."""
    context = RunContext.alone()
    runner = LoopRunner(assembly_of(context, model_of(), "single", clip))
    parts = [steps(shapes, replica) for replica in range(replicas)]
    together = [[m for part in parts for m in part[n]] for n in range(len(shapes))]
    return record(runner, together)


def run(
    context: RunContext,
    schedule: str,
    shapes: Shapes,
    strategy: str = "single",
    per_rank: int = 1,
    clip: float | None = None,
) -> tuple[Any, ...]:
    runner = pipeline(context, schedule, strategy, per_rank, clip)
    return record(runner, steps(shapes, context.dp_rank))


def check(results: list[tuple[Any, ...]], expected: tuple[Any, ...]) -> None:
    losses, norms, gradients, state = expected
    for mine in results:
        assert mine[0] == pytest.approx(losses, abs=1e-10)
        assert mine[1] == pytest.approx(norms, abs=1e-10)
        for gradient, wanted in zip(mine[2], gradients, strict=True):
            assert gradient.keys() == wanted.keys()
            for name, tensor in wanted.items():
                torch.testing.assert_close(gradient[name], tensor, rtol=0, atol=1e-10)
        # A stage's buffer counts micro-batches, while the whole model counts batches.
        assert mine[3].keys() == state.keys()
        for name, tensor in state.items():
            if name != "model.seen":
                torch.testing.assert_close(mine[3][name], tensor, rtol=0, atol=1e-10)
    assert all(list(mine[3]) == list(results[0][3]) for mine in results)


def stages_for(schedule: str) -> int:
    if schedule in V_SHAPED_SCHEDULES:
        return 2
    return 1 if schedule in ("naive", "gpipe", "1f1b") else 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_on_two_ranks(schedule: str) -> None:
    results = run_ranks(run, 2, schedule, RAGGED, "single", stages_for(schedule), 0.5, pp=2)
    check(results, run_alone(RAGGED, clip=0.5))


@pytest.mark.parametrize(
    ("schedule", "per_rank"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)]
)
def test_four_ranks(schedule: str, per_rank: int) -> None:
    results = run_ranks(run, 4, schedule, RAGGED, "single", per_rank, pp=4)
    check(results, run_alone(RAGGED))


@pytest.mark.parametrize(
    ("schedule", "strategy"),
    [
        ("1f1b", "ddp"),
        ("gpipe", "zero1_torch"),
        ("1f1b", "fsdp_zero2"),
        ("1f1b", "fsdp"),
        ("interleaved_zero_bubble", "fsdp"),
    ],
)
def test_replicas_of_a_pipeline(schedule: str, strategy: str) -> None:
    # The second replica has one smaller micro-batch; the first must take part in its collectives.
    results = run_ranks(run, 4, schedule, EVEN, strategy, stages_for(schedule), 0.5, pp=2, dp=2)
    check(results, run_alone(EVEN, replicas=2, clip=0.5))


def counted_passes(context: RunContext, schedule: str) -> tuple[str, int]:
    """The recorder's word for what it counts, and the highest number in one step."""
    recorder = context.recorder
    runner = pipeline(context, schedule, "single", stages_for(schedule), None)
    runner.meter.recorder = recorder  # as the engine does
    recorder.begin_step(1)
    record(runner, steps(EVEN, context.dp_rank)[:1])
    return recorder.unit, max(event[3] for event in recorder._events if event is not None)


@pytest.mark.parametrize(
    ("schedule", "word"), [("1f1b", "micro-batch"), ("interleaved_1f1b", "pass")]
)
def test_the_recorder_counts_passes_where_a_rank_has_several_stages(schedule, word) -> None:
    micro_batches = len(steps(EVEN, 0)[0])
    stages = stages_for(schedule)
    for found, highest in run_ranks(counted_passes, 2, schedule, pp=2):
        assert found == word
        assert highest == stages * micro_batches


def resume_state(context: RunContext, strategy: str) -> tuple[Any, ...]:
    """Run two steps, load their state into new stages, and run the third step there."""
    first = pipeline(context, "1f1b", strategy, 1, None)
    batches = steps([*EVEN, *EVEN], context.dp_rank)
    record(first, batches[:2])
    first.predict(batches[0][0])  # a prediction leaves parameters gathered
    state = as_saved(whole_tensors(first.state()))
    second = pipeline(context, "1f1b", strategy, 1, None)
    with torch.no_grad():
        for stage in second._stages.values():
            for parameter in stage.parameters():
                parameter.add_(1.0)
    with pytest.raises(
        CheckpointError,
        match=r"it lacks layers.0.down.bias and has nothing.* --tie layers.0.down.bias=OTHER",
    ):
        second.load_state({n: t for n, t in state.items() if n != "model.layers.0.down.bias"})
    second.load_state(state)
    return record(second, batches[2:])


@pytest.mark.parametrize(("strategy", "dp"), [("single", 1), ("zero1_torch", 2), ("fsdp", 2)])
def test_state_goes_and_comes(strategy: str, dp: int) -> None:
    results = run_ranks(resume_state, 2 * dp, strategy, pp=2, dp=dp)
    context = RunContext.alone()
    runner = LoopRunner(assembly_of(context, model_of(), "single", None))
    parts = [steps([*EVEN, *EVEN], replica) for replica in range(dp)]
    together = [[m for part in parts for m in part[n]] for n in range(4)]
    record(runner, together[:2])
    check(results, record(runner, together[2:]))


def predict_between_steps(context: RunContext) -> list[Any]:
    """Predictions on this rank, after each of some steps."""
    runner = pipeline(context, "zbv_zero_bubble", "single", 2, None)
    batches = steps(RAGGED, 0)
    predictions = []
    for step in batches:
        runner.forward_backward(step)
        runner.update()
        outputs = [runner.predict(batch) for batch in step]
        predictions.append(
            [out if out is None else (out[0].tolist(), out[1].tolist()) for out in outputs]
        )
    context.barrier()  # a rank must not exit while another still receives from it
    return predictions


def test_predictions_are_on_the_rank_of_the_last_stage() -> None:
    runner = LoopRunner(assembly_of(RunContext.alone(), model_of(), "single", None))
    results = run_ranks(predict_between_steps, 2, pp=2)
    for number, step in enumerate(steps(RAGGED, 0)):
        runner.forward_backward(step)
        runner.update()
        for step_index, batch in enumerate(step):
            output, targets = runner.predict(batch)
            mine, wanted = results[0][number][step_index]
            torch.testing.assert_close(torch.tensor(mine).double(), output, rtol=0, atol=1e-6)
            assert wanted == targets.tolist()
            assert results[1][number][step_index] is None


def fail_in_a_stage(context: RunContext, kind: str, schedule: str) -> str:
    """Run a step in which the stage on rank 1 raises or has a NaN loss."""
    runner = pipeline(context, schedule, "single", 1, None)
    if context.rank == 1 and kind == "error":
        runner._stages[1].wrong = ConfigError("model.name: no")
    batches = steps(EVEN, 0)[0]
    if kind == "nan" and context.rank == 1:
        with torch.no_grad():
            runner._stages[1].positions.weight.fill_(torch.nan)
    with pytest.raises(NonFiniteError) as caught:
        runner.forward_backward(batches)
    return str(caught.value)


@pytest.mark.parametrize("schedule", ["1f1b", "naive"])
def test_a_stage_fails_with_its_own_error(schedule: str) -> None:
    with pytest.raises(RankFailure, match="rank 1 failed") as caught:
        run_ranks(fail_in_a_stage, 2, "error", schedule, pp=2, timeout_s=25)
    assert isinstance(caught.value.cause, ConfigError)
    assert str(caught.value.cause) == "model.name: no"


def test_a_loss_that_is_not_finite_stops_all_ranks() -> None:
    results = run_ranks(fail_in_a_stage, 2, "nan", "gpipe", pp=2)
    assert results == ["the loss of rank 1 is nan"] * 2


class Held:
    """Counts the living graphs of a stage, by the tensors that they have saved."""

    def __init__(self) -> None:
        self.alive = 0
        self.most = 0

    def begin(self) -> None:
        self.alive += 1
        self.most = max(self.most, self.alive)


class Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, graphs: Held) -> torch.Tensor:
        graphs.begin()
        token = torch.zeros(1)
        weakref.finalize(token, lambda: setattr(graphs, "alive", graphs.alive - 1))
        ctx.save_for_backward(token)
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def count_graphs(context: RunContext, schedule: str, per_rank: int) -> dict[int, tuple[int, int]]:
    """The largest number of living graphs of each stage, and the stage's rank."""
    runner = pipeline(context, schedule, "single", per_rank, None)
    helds = {}
    for index, stage in runner._stages.items():
        graphs = helds[index] = Held()
        layer = next(iter(stage.layers.values()))
        layer.register_forward_hook(lambda _m, _i, out, graphs=graphs: Mark.apply(out, graphs))
    batches = steps([[(2, 5)] * 6], 0)[0]
    inputs = weakref.ref(batches[0].inputs)
    runner.forward_backward(batches)
    del batches
    assert inputs() is None  # the step must not keep its batch alive
    return {index: (graphs.most, graphs.alive) for index, graphs in helds.items()}


@pytest.mark.parametrize(("schedule", "per_rank"), [("gpipe", 1), ("1f1b", 1), ("naive", 1)])
def test_no_more_is_in_flight_than_the_schedule_says(schedule: str, per_rank: int) -> None:
    results = run_ranks(count_graphs, 2, schedule, per_rank, pp=2)
    for rank, actions in enumerate(schedule_orders(schedule, 2, per_rank, 6)):
        assert {n: most for n, (most, _) in results[rank].items()} == held_at_most(actions)
        assert all(alive == 0 for _, alive in results[rank].values())


def average_gradients(context: RunContext) -> list[list[float]]:
    """Average gradients of several dtypes and layouts; return them flat."""
    mine = float(context.rank + 1)
    gradients = [
        torch.full((3,), mine),
        torch.full((2, 2), 10 * mine, dtype=torch.float64),
        torch.full((40, 2), mine).t(),
        torch.full((2, 3, 4, 4), mine).to(memory_format=torch.channels_last),
        torch.full((5,), 2 * mine),
        torch.full((3, 4), mine)[:, ::2],
    ]
    buffer = torch.full((2,), mine)
    GradientAverager(context, 100, [buffer])(gradients)
    return [gradient.flatten().unique().tolist() for gradient in (*gradients, buffer)]


def test_gradients_of_any_layout_are_averaged() -> None:
    assert (
        run_ranks(average_gradients, 2) == [[[1.5], [15.0], [1.5], [1.5], [3.0], [1.5], [1.0]]] * 2
    )
