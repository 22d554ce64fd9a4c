"""The choices of torch's stages 2 and 3: their memory to the byte, their traffic, their numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.parity import adamw, largest_difference, sgd, train
from support.peaks import repeat_if_above
from support.ranks import run_ranks
from torch import Tensor, nn

from bigtrain.data import MicroBatch
from bigtrain.data.source import TensorSamples
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.memory.timeline import MEMORY_KINDS, Peak
from bigtrain.models.gpt import GPT, GPTConfig
from bigtrain.ranks.context import RunContext

NUMBERS = 64
"""Bytes of losses, counts and norms, of which some are in no forecast of any strategy."""
ROWS, LENGTH, WORDS = 12, 16, 128
KEEP, REDUCE = "strategy.replicate.keep_gathered", "strategy.replicate.reduce"
AHEAD, APART = "strategy.replicate.prefetch", {"strategy.replicate.outside_blocks": "apart"}
THREE, BF16 = {"train.micro_batch_size": 4}, {"train.precision": "bf16"}
FULL, PAIRS = {"strategy.recompute": "full"}, {"strategy.replicate.shard_ranks": 2}


def gpt(layers: int = 4, *, tied: bool = False) -> nn.Module:
    sizes = {"num_layers": layers, "width": 32, "num_heads": 4, "vocab_size": WORDS}
    return GPT(GPTConfig(**sizes, sequence_length=LENGTH, tie_embeddings=tied))


def frozen_gpt() -> nn.Module:
    """A model in which only the norms, and the last block, are trained."""
    model = gpt(5)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "blocks.4" in name)
    return model


def frozen_front() -> nn.Module:
    """A model whose first layers are frozen, so that its first blocks have no backward pass."""
    model = gpt(6)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in ("blocks.4", "blocks.5", "head")))
    return model


def words() -> tuple[Tensor, Tensor]:
    numbers = torch.arange(ROWS * (LENGTH + 1)).view(ROWS, LENGTH + 1) * 7 % WORDS
    return numbers[:, :-1].contiguous(), numbers[:, 1:].contiguous()


Row = tuple[Peak, Peak, bool]
"""The predicted peak, the measured one, and whether each rank sent the stated bytes."""


def measured(context: RunContext, cases: dict[str, Any], strategy: str) -> dict[str, Row]:
    """Train four steps for each case."""
    return {case: of_case(context, strategy, *setting) for case, setting in cases.items()}


def of_case(context: RunContext, strategy: str, make: Any, keys: dict[str, Any]) -> Row:
    inputs, targets = words()
    dp = context.world_size // keys.get("mesh.pp", 1) // keys.get("mesh.tp", 1)
    keys = {"train.global_batch_size": ROWS * dp, "memory.track_steps": 4, **keys}
    loss, size = CrossEntropy(), keys.get("train.micro_batch_size", ROWS)
    job = job_from_keys(strategy, keys)
    example = MicroBatch(inputs[:size], targets[:size], loss.count(targets[:size]), size)
    with Engine(make, loss, adamw, job, context, example=example) as engine:
        for _ in range(4):
            engine.step((inputs.clone(), targets.clone()))
        report = engine.memory()
        ranks = () if report is None else report.ranks  # only rank 0 has it
        sent = all(rank.volume in (None, rank.predicted_volume) for rank in ranks)
        assert engine.prediction.peak is not None, engine.prediction.note
        return engine.prediction.peak, engine.meter.measured().peak, sent


def check(cases: dict[str, Any], world_size: int, strategy: str = "fsdp", **mesh: int) -> None:
    """The peak of each rank is the forecast's, kind by kind, and it sends what is stated."""
    arguments = (world_size, cases, strategy)
    rows = repeat_if_above(
        lambda: run_ranks(measured, *arguments, timeout_s=300, **mesh),
        lambda row: any(got.bytes > NUMBERS + said.bytes for said, got, _ in row.values()),
    )
    for rank, row in enumerate(rows):
        for case, (predicted, peak, sent) in row.items():
            assert abs(predicted.bytes - peak.bytes) <= NUMBERS, (rank, case, predicted, peak)
            assert predicted.phase == peak.phase, (rank, case)
            for kind in MEMORY_KINDS if not mesh else ():  # a stage's inputs are of two kinds
                said, got = getattr(predicted.breakdown, kind), getattr(peak.breakdown, kind)
                assert abs(said - got) <= NUMBERS, (rank, case, kind, said, got)
            assert sent, (rank, case)


def kept(values: Any, make: Any = gpt, **keys: Any) -> dict[str, Any]:
    return {str(value): (make, {**keys, KEEP: value}) for value in values}


MANY = ("none", 1, 3, "all", "blocks.1", ["blocks.0", "*.3"])
KEPT = {
    "fp32": kept(MANY),
    "bf16": kept(MANY, **BF16),
    "three micro-batches": kept(MANY, **THREE),
    "three micro-batches in bf16": kept(MANY, **THREE, **BF16),
    "recomputed": kept((1, "all"), **FULL),
    "tied": kept((1, "all"), partial(gpt, tied=True), **THREE),
    "frozen": kept((1, 2, "all"), frozen_gpt, **THREE),
    "first blocks without a backward pass": kept(("none", 1, 3, "all"), frozen_front),
    "each rank has all": kept((1, "all"), **{"strategy.replicate.shard_ranks": 1}),
}


@pytest.mark.parametrize("case", KEPT)
def test_blocks_that_stay_gathered_are_forecast_to_the_byte(case: str) -> None:
    check(KEPT[case], 2)


ONCE = {REDUCE: "step"}
BETWEEN = {**PAIRS, REDUCE: "step_between_groups"}


def reduced(make: Any = gpt, *, micro_batches: Any = (2, 3), **keys: Any) -> dict[str, Any]:
    sizes = {str(number): ROWS // number for number in micro_batches}
    return {n: (make, {**ONCE, **keys, "train.micro_batch_size": m}) for n, m in sizes.items()}


REDUCED = {
    "fp32": reduced(),
    "bf16": reduced(**BF16),
    "recomputed": reduced(**FULL),
    "recomputed in bf16": reduced(**FULL, **BF16),
    "kept in part": reduced(**{KEEP: 2}),
    "all kept": reduced(**{"strategy.replicate.stage": 2}),
    "tied": reduced(partial(gpt, tied=True)),
    "frozen": reduced(frozen_gpt),
    "frozen, bf16": reduced(frozen_gpt, **BF16),
    "each rank has all": reduced(**{"strategy.replicate.shard_ranks": 1}),
}


@pytest.mark.parametrize("case", REDUCED)
def test_gradients_reduced_once_a_step_are_forecast_to_the_byte(case: str) -> None:
    check(REDUCED[case], 2)


def ahead(make: Any = gpt, *, numbers: Any = (0, 1, 3), **keys: Any) -> dict[str, Any]:
    return {str(number): (make, {**keys, AHEAD: number}) for number in numbers}


GATHERED_AHEAD = {
    "fp32": ahead(numbers=(0, 1, 2, 4)),
    "bf16": ahead(**BF16),
    "recomputed": ahead(**FULL),
    "three micro-batches": ahead(**THREE),
    "once a step": ahead(**THREE, **ONCE),
    "kept in part": ahead(**{KEEP: 2}),
    "patterns kept": ahead(**{KEEP: ["blocks.0", "blocks.2"]}),
    "all kept": ahead(numbers=(1, 3), **{"strategy.replicate.stage": 2}),
    "frozen": ahead(frozen_gpt),
    "first blocks without a backward pass": ahead(frozen_front),
}


@pytest.mark.parametrize("case", GATHERED_AHEAD)
def test_blocks_gathered_ahead_are_forecast_to_the_byte(case: str) -> None:
    check(GATHERED_AHEAD[case], 2)


def apart(*settings: dict[str, Any], make: Any = gpt) -> dict[str, Any]:
    return {str(number): (make, {**APART, **keys}) for number, keys in enumerate(settings)}


TWO_DIMS = ({}, {KEEP: 1}, {KEEP: ["embedding"]}, {KEEP: "all"}, {AHEAD: 0}, {AHEAD: 2})
OUTSIDE = {
    "fp32": apart(*TWO_DIMS),
    "bf16": apart(*({**keys, **BF16} for keys in TWO_DIMS)),
    "three micro-batches": apart(THREE, {**THREE, **ONCE}, {**THREE, **ONCE, **BF16}),
    "recomputed": apart(FULL, {**FULL, **THREE, KEEP: 2}),
    "stage 2": apart({"strategy.replicate.stage": 2}),
    "frozen": apart({}, {**THREE, **ONCE}, make=frozen_front),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_layers_outside_of_blocks_that_are_units_are_forecast_to_the_byte(case: str) -> None:
    check(OUTSIDE[case], 2)


IN_TURN = {"train.micro_batch_size": 3, "mesh.pp": 2, "mesh.dp": 2}
ON_FOUR = {
    "pairs": (kept((1, "all"), **PAIRS), "fsdp", {}),
    "pairs, three micro-batches in bf16": (kept((1,), **PAIRS, **THREE, **BF16), "fsdp", {}),
    "1f1b": (kept((1, "all", ["blocks.0"]), **IN_TURN), "1f1b+fsdp", {"pp": 2, "dp": 2}),
    "1f1b, bf16": (kept((1, "all"), **IN_TURN, **BF16), "1f1b+fsdp", {"pp": 2, "dp": 2}),
    "pairs, apart": (apart(PAIRS, {**BETWEEN, **THREE}), "fsdp", {}),
    "1f1b, apart": (apart(IN_TURN, {**IN_TURN, AHEAD: 2}), "1f1b+fsdp", {"pp": 2, "dp": 2}),
    "1f1b, apart in bf16": (apart({**IN_TURN, **BF16, **ONCE}), "1f1b+fsdp", {"pp": 2, "dp": 2}),
    "pairs, ahead": (ahead(numbers=(0, 2), **PAIRS), "fsdp", {}),
    "1f1b, ahead": (ahead(**IN_TURN), "1f1b+fsdp", {"pp": 2, "dp": 2}),
    "1f1b, ahead in bf16": (ahead(**IN_TURN, **BF16, **{KEEP: 1}), "1f1b+fsdp", {"pp": 2, "dp": 2}),
    "gpipe, ahead": (ahead(numbers=(2,), **IN_TURN, **BF16), "gpipe+fsdp", {"pp": 2, "dp": 2}),
    "pairs, once": (reduced(**PAIRS), "fsdp", {}),
    "pairs, once between them": (reduced(**BETWEEN), "fsdp", {}),
    "pairs, once between them in bf16": (reduced(**BETWEEN, **BF16), "fsdp", {}),
    "1f1b, once": (kept((1, "all"), **IN_TURN, **ONCE), "1f1b+fsdp", {"pp": 2, "dp": 2}),
    "1f1b, once in bf16": (kept((1,), **IN_TURN, **ONCE, **BF16), "1f1b+fsdp", {"pp": 2, "dp": 2}),
    "gpipe in bf16": (kept((1,), **IN_TURN, **BF16), "gpipe+fsdp", {"pp": 2, "dp": 2}),
    "gpipe, once": (kept(("none",), **IN_TURN, **ONCE), "gpipe+fsdp", {"pp": 2, "dp": 2}),
}


@pytest.mark.parametrize("case", ON_FOUR)
def test_choices_on_four_ranks_are_forecast_to_the_byte(case: str) -> None:
    cases, strategy, mesh = ON_FOUR[case]
    check(cases, 4, strategy, **mesh)


FP64 = {"train.precision": "fp64", "optim.clip_norm": 0.5}


def samples() -> TensorSamples:
    return TensorSamples(*words())


def records(context: RunContext, strategy: str, settings: list[dict[str, Any]]) -> Any:
    return [train(context, gpt, samples(), strategy, keys, 4, sgd) for keys in settings]


SAME = [
    {KEEP: 1},
    {KEEP: ["blocks.0", "blocks.2"], "train.micro_batch_size": 1},
    {**ONCE, "train.micro_batch_size": 1},
    {**ONCE, KEEP: 2, "train.micro_batch_size": 2},
    {AHEAD: 0},
    {AHEAD: 2, KEEP: 1},
    APART,
    {**APART, **ONCE, "train.micro_batch_size": 2, KEEP: 1, AHEAD: 2},
]


def test_the_numbers_are_those_of_one_process() -> None:
    (single,) = run_ranks(records, 1, "single", [FP64])[0]
    settings = [{**FP64, **keys} for keys in SAME]
    for found in run_ranks(records, 2, "fsdp", settings, timeout_s=200):
        for record, keys in zip(found, settings, strict=True):
            assert largest_difference(single, record) < 1e-10, keys


ON_FOUR_SAME = {
    "fsdp": (
        {},
        [{**PAIRS, **ONCE, "train.micro_batch_size": 1}, {**BETWEEN, "train.micro_batch_size": 1}],
    ),
    "1f1b+fsdp": ({"pp": 2, "dp": 2}, [{**IN_TURN, **ONCE, "train.micro_batch_size": 1, KEEP: 1}]),
    "interleaved_1f1b+fsdp": (
        {"pp": 2, "dp": 2},
        [{**IN_TURN, **ONCE, "train.micro_batch_size": 1}],
    ),
    "fsdp+tensor": (
        {"tp": 2, "dp": 2},
        [{**APART, **ONCE, "train.micro_batch_size": 1, KEEP: 1, "mesh.tp": 2, "mesh.dp": 2}],
    ),
    "zero_bubble+fsdp": ({"pp": 2, "dp": 2}, [{**IN_TURN, **ONCE, "train.micro_batch_size": 1}]),
}


@pytest.mark.parametrize("strategy", ON_FOUR_SAME)
def test_the_numbers_on_four_ranks_are_those_of_one_process(strategy: str) -> None:
    mesh, settings = ON_FOUR_SAME[strategy]
    (single,) = run_ranks(records, 1, "single", [FP64])[0]
    settings = [{**FP64, **keys} for keys in settings]
    found = run_ranks(records, 4, strategy, settings, timeout_s=200, **mesh)
    for record in found[0]:
        losses = pytest.approx(single.losses, rel=1e-10)
        assert record.losses == losses
        assert record.norms == pytest.approx(single.norms, rel=1e-10)
    for mine in found:
        for record in mine:  # a stage has a part of the model
            for name, weight in record.weights.items():
                assert torch.allclose(weight, single.weights[name], atol=1e-10), name


class Skips(nn.Module):
    """A layer that the second micro-batch of a step does not use, and one that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU()) for _ in range(2)
        )
        self.extra, self.head = nn.Linear(8, 8), nn.Linear(8, WORDS)
        self.calls = 0

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.embedding(numbers)
        for block in self.blocks:
            x = x + block(x)
        if self.calls % 2 == 0:
            x = x + self.extra(x)
        self.calls += self.training
        return self.head(x)


def skipping(context: RunContext, strategy: str, keys: dict[str, Any]) -> Any:
    return train(context, Skips, samples(), strategy, keys, 4, sgd)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_a_gradient_of_one_micro_batch_alone_is_in_the_sum(precision: str) -> None:
    keys = {"train.precision": precision, "train.micro_batch_size": 2}
    always = run_ranks(skipping, 2, "fsdp", keys)
    once = run_ranks(skipping, 2, "fsdp", {**keys, **ONCE})
    for mine, other in zip(once, always, strict=True):
        tolerance = 1e-10 if precision == "fp64" else 0.05
        assert largest_difference(mine, other) < tolerance


def stopped_and_continued(context: RunContext, keys: dict[str, Any]) -> Any:
    """The losses of steps of which one failed before its last micro-batch; and without it."""
    job = job_from_keys("fsdp", {"train.global_batch_size": ROWS * 2, **keys, **FP64})
    found = []
    for fails in (False, True):
        with Engine(gpt, CrossEntropy(), sgd, job, context) as engine:
            if fails:
                loop: Any = engine.runner
                forward, loop.forward_loss = loop.forward_loss, failing(loop.forward_loss)
                with pytest.raises(Interrupted):
                    engine.step(words())
                loop.forward_loss = forward
            found.append([engine.step(words()).loss for _ in range(3)])
    return found


class Interrupted(Exception):
    pass


def failing(forward: Any) -> Any:
    """A forward pass that fails before its second micro-batch."""
    calls = []

    def run(placed: Any) -> Any:
        calls.append(placed)
        if len(calls) == 2:
            raise Interrupted
        return forward(placed)

    return run


def test_what_a_failed_step_added_up_is_not_in_the_next_one() -> None:
    for without, after in run_ranks(stopped_and_continued, 2, {**ONCE, **THREE}):
        assert after == without
