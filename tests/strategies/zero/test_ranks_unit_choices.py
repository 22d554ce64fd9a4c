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

NUMBERS = 300
"""Bytes of losses, counts and norms, of which some are in no forecast of any strategy."""
ROWS, LENGTH, WORDS = 12, 16, 128
KEEP = "strategy.replicate.keep_gathered"
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
    "each rank has all": kept((1, "all"), **{"strategy.replicate.shard_ranks": 1}),
}


@pytest.mark.parametrize("case", KEPT)
def test_blocks_that_stay_gathered_are_forecast_to_the_byte(case: str) -> None:
    check(KEPT[case], 2)


IN_TURN = {"train.micro_batch_size": 3, "mesh.pp": 2, "mesh.dp": 2}
ON_FOUR = {
    "pairs": (kept((1, "all"), **PAIRS), "fsdp", {}),
    "pairs, three micro-batches in bf16": (kept((1,), **PAIRS, **THREE, **BF16), "fsdp", {}),
    "1f1b": (kept((1, "all", ["blocks.0"]), **IN_TURN), "1f1b+fsdp", {"pp": 2, "dp": 2}),
    "1f1b, bf16": (kept((1, "all"), **IN_TURN, **BF16), "1f1b+fsdp", {"pp": 2, "dp": 2}),
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


SAME = [{KEEP: 1}, {KEEP: ["blocks.0", "blocks.2"], "train.micro_batch_size": 1}]


def test_the_numbers_are_those_of_one_process() -> None:
    (single,) = run_ranks(records, 1, "single", [FP64])[0]
    settings = [{**FP64, **keys} for keys in SAME]
    for found in run_ranks(records, 2, "fsdp", settings, timeout_s=200):
        for record, keys in zip(found, settings, strict=True):
            assert largest_difference(single, record) < 1e-10, keys
