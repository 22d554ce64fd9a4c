"""Blocks that keep less compute the same, need what is predicted, and stay inside a budget."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from nets import BlockConv, BlockLM, tokens
from parity import adamw, largest_difference, train
from ranks import run_ranks
from torch import nn

from bigtrain.assembly.make_plan import describe_plan, make_plan
from bigtrain.assembly.resolve import resolve
from bigtrain.core.workload import Workload
from bigtrain.data import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.models.gpt import GPT, GPTConfig
from bigtrain.units import format_bytes

RECOMPUTE = "strategy.recompute"
WAYS: dict[str, dict[str, Any]] = {
    "full": {f"{RECOMPUTE}.mode": "full"},
    "selective": {f"{RECOMPUTE}.mode": "selective"},
    "every second": {f"{RECOMPUTE}.every": 2},
    "selective, every second": {f"{RECOMPUTE}.mode": "selective", f"{RECOMPUTE}.every": 2},
    "by name": {f"{RECOMPUTE}.layers": ["blocks.1.attention", "blocks.*.mlp"]},
    "moved": {"strategy.offload.activations": "disk"},
    "inputs moved": {f"{RECOMPUTE}.mode": "full", "strategy.offload.activations": "disk"},
    "half recomputed, half moved": {
        f"{RECOMPUTE}.every": 2,
        "strategy.offload.activations": "disk",
    },
}


def gpt(dropout: float = 0.2) -> nn.Module:
    shape = {"vocab_size": 13, "sequence_length": 16, "num_layers": 4, "width": 64}
    return GPT(GPTConfig(**shape, num_heads=4, dropout=dropout))


def text(rows: int = 8, length: int = 16) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(5)
    found = torch.randint(0, 13, (rows, length + 1), generator=generator)
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def images(rows: int = 8) -> tuple[Any, Any]:
    return torch.randn(rows, 1, 12, 12, generator=torch.Generator().manual_seed(6)), (
        torch.arange(rows) % 3
    )


def run(context, model, batch, keys, strategy="single", steps=3):
    """Losses, state, predicted and measured peak, lines, of a few steps on one batch."""
    micro = keys.get("train.micro_batch_size", len(batch[0]))
    rows = len(batch[0]) * context.dp_size
    words = {"train.global_batch_size": rows, "memory.track_steps": steps, **keys}
    job, loss = job_from_keys(strategy, words), CrossEntropy()
    inputs, targets = batch[0][:micro], batch[1][:micro]
    example = MicroBatch(inputs, targets, loss.count(targets), micro)
    with Engine(model, loss, adamw, job, context, example=example) as engine:
        losses = [engine.step(tuple(t.clone() for t in batch)).loss for _ in range(steps)]
        state = {n: s.read().clone() for n, s in engine.runner.state().items()}
        peaks = engine.predicted, engine.meter.measured().peak
        return losses, state, peaks, engine.advice


@pytest.fixture(scope="module")
def plain():
    return run_ranks(run, 1, gpt, text(), {})[0]


@pytest.mark.parametrize("way", WAYS)
def test_one_process_computes_the_same_to_the_last_bit_dropout_on(plain, way):
    losses, state, (predicted, measured), _ = run_ranks(run, 1, gpt, text(), WAYS[way])[0]
    assert losses == plain[0]
    assert all(torch.equal(state[name], plain[1][name]) for name in plain[1])
    assert predicted == measured
    # At this size the peak is the activations': every way takes some away.
    assert measured.bytes < plain[2][1].bytes


@pytest.mark.parametrize("keys", [WAYS["full"], WAYS["moved"], WAYS["inputs moved"]])
def test_running_statistics_move_once_and_changes_in_place_are_right(keys):
    one = run_ranks(run, 1, BlockConv, images(), {})[0]
    other = run_ranks(run, 1, BlockConv, images(), keys)[0]
    assert one[0] == other[0]
    assert int(other[1]["model.layers.0.1.num_batches_tracked"]) == 3
    assert all(torch.equal(other[1][name], one[1][name]) for name in one[1])


def test_selective_and_a_product_changed_in_place():
    model = partial(BlockConv, inplace=False)
    one = run_ranks(run, 1, model, images(), {})[0]
    other = run_ranks(run, 1, model, images(), WAYS["selective"])[0]
    assert one[0] == other[0]
    with pytest.raises(Exception, match=r"changes one in place.*Use strategy.recompute.mode=full"):
        run_ranks(run, 1, BlockConv, images(), WAYS["selective"])


def test_full_takes_almost_all_of_what_the_blocks_save_away():
    batch = text(64)
    none, full = (run_ranks(run, 1, gpt, batch, keys)[0][2][1] for keys in ({}, WAYS["full"]))
    assert full.breakdown.activations < 0.15 * none.breakdown.activations


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_other_precisions(precision):
    keys = {"train.precision": precision, "train.micro_batch_size": 4}
    one = run_ranks(run, 1, gpt, text(), keys)[0]
    for way in ("full", "selective"):
        other = run_ranks(run, 1, gpt, text(), {**keys, **WAYS[way]})[0]
        assert one[0] == other[0]
        assert other[2][0].bytes == pytest.approx(other[2][1].bytes, rel=0.005)


FP64 = {"train.precision": "fp64", "train.micro_batch_size": 2, "optim.clip_norm": 0.5}
CUT_WAYS = [
    ("gpipe", "selective"),
    ("interleaved_1f1b", "full"),
    ("zero_bubble", "full"),
    ("zbv", "full"),
    ("1f1b", "every second"),
    ("1f1b", "moved"),
    ("layer_split_devices", "full"),
    ("gpipe_fairscale", "full"),
    ("ddp", "selective"),
    ("fsdp_zero2", "full"),
    ("fsdp", "selective"),
    ("zero1_torch", "moved"),
]


@pytest.mark.parametrize(("strategy", "way"), CUT_WAYS)
def test_under_other_strategies_the_numbers_are_those_of_one_process(strategy, way):
    samples = tokens(22)
    one = run_ranks(train, 1, BlockLM, samples, "single", FP64)[0]
    ranks = 1 if strategy in ("layer_split_devices", "gpipe_fairscale") else 2
    plan = make_plan(job_from_keys(strategy, {"train.global_batch_size": 8, **FP64}), ranks, "cpu")
    keys = {**FP64, **WAYS[way]}
    for record in run_ranks(train, ranks, BlockLM, samples, strategy, keys, pp=plan.pp):
        assert largest_difference(one, record) < 1e-10


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "pipeline_deepspeed"])
def test_under_deepspeed(strategy):
    samples, keys = tokens(22), {"train.micro_batch_size": 2}
    one = run_ranks(train, 1, BlockLM, samples, "single", keys)[0]
    plan = make_plan(job_from_keys(strategy, {"train.global_batch_size": 8, **keys}), 2, "cpu")
    for record in run_ranks(
        train, 2, BlockLM, samples, strategy, {**keys, **WAYS["selective"]}, pp=plan.pp
    ):
        assert largest_difference(one, record) < 1e-5


def test_a_block_that_a_cut_goes_through_keeps_less_in_its_parts():
    keys = {**FP64, **WAYS["full"], "strategy.cut.at": ["blocks.1.mlp"]}
    samples = tokens(22)
    one = run_ranks(train, 1, small_gpt, samples, "single", FP64)[0]
    for record in run_ranks(train, 2, small_gpt, samples, "gpipe", keys, pp=2):
        assert largest_difference(one, record) < 1e-10


def small_gpt() -> nn.Module:
    shape = {"vocab_size": 13, "sequence_length": 6, "num_layers": 2, "width": 16, "num_heads": 2}
    return GPT(GPTConfig(**shape))


# Budgets


BUDGETED = [
    ("single", 1, {}),
    ("single", 1, {"train.micro_batch_size": 16}),
    ("ddp", 2, {}),
    ("fsdp", 2, {}),
    ("1f1b", 2, {"train.micro_batch_size": 8}),
    ("interleaved_1f1b", 2, {"train.micro_batch_size": 8}),
    ("single", 1, {"strategy.offload.activations": "disk"}),
]


@pytest.mark.parametrize(("strategy", "ranks", "keys"), BUDGETED)
def test_a_budget_is_kept_and_used(strategy, ranks, keys):
    pp = 2 if "1f1b" in strategy else 1
    batch, given = text(32), {"pp": pp}
    wide = run_ranks(run, ranks, gpt_without, batch, keys, strategy, **given)
    least = {**keys, f"{RECOMPUTE}.mode": "full"}
    narrow = run_ranks(run, ranks, gpt_without, batch, least, strategy, 1, **given)
    high = max(found[2][0].bytes for found in wide)
    low = max(found[2][0].bytes for found in narrow)
    assert low < high
    limit = (high + low) // 2
    words = {**keys, f"{RECOMPUTE}.budget": limit}
    for found in run_ranks(run, ranks, gpt_without, batch, words, strategy, **given):
        assert found[0] == pytest.approx(wide[0][0], rel=1e-5)
        assert found[2][0].bytes <= limit
        assert found[2][1].bytes <= 1.02 * limit
        said = [line for line in found[3] if "budget" in line]
        assert len(said) == pp
        assert "longer" in said[0]
    assert max(f[2][0].bytes for f in wide) > limit


def gpt_without() -> nn.Module:
    return gpt(0.0)


def settled(budget: object, model=gpt_without, **keys: Any) -> Any:
    job = job_from_keys(
        "single", {"train.global_batch_size": 8, f"{RECOMPUTE}.budget": budget, **keys}
    )
    plan = make_plan(job, 1, "cpu")
    loss = CrossEntropy()
    inputs, targets = text()
    example = MicroBatch(inputs, targets, loss.count(targets), len(inputs))
    return resolve(plan, Workload(model(), example, loss, adamw))


def test_a_budget_with_room_for_all_keeps_all():
    found = settled("1GiB")
    assert set(found.plan.techniques["recompute"].blocks.values()) == {"keep"}
    assert "4 everything;" in found.notes[0]


def test_the_smallest_peak_is_named_and_reached():
    with pytest.raises(ConfigError, match="smallest peak that this job reaches") as caught:
        settled(1000)
    message = str(caught.value)
    assert "in the backward phase" in message
    assert "Use strategy.recompute.budget=" in message
    least = int(message.split("Use strategy.recompute.budget=")[1].split(",")[0])
    assert f"budget {format_bytes(least)}" in settled(least).notes[0]
    with pytest.raises(ConfigError, match="smallest peak"):
        settled(least - 1)


def test_a_share_of_the_device_is_a_budget():
    assert "4 everything;" in settled("50%").notes[0]
    assert "4 everything;" in settled(0.5).notes[0]
    assert "4 everything;" in settled("0.5").notes[0]


def test_no_example_no_budget():
    plan = make_plan(job_from_keys("single", {f"{RECOMPUTE}.budget": "1GiB"}), 1, "cpu")
    with pytest.raises(ConfigError, match=r"Give prepare\(\.\.\., example="):
        resolve(plan, Workload(gpt(), None, CrossEntropy(), adamw))


class Unpredictable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x):
        return self.layers[int(x.sum() > 0)](x.float())


def test_a_model_that_cannot_be_forecast_has_no_budget():
    with pytest.raises(ConfigError, match=r"there is none: .*Use strategy.recompute.mode=full"):
        settled(1000, model=Unpredictable)


def test_a_model_without_blocks_has_no_budget():
    with pytest.raises(ConfigError, match=r"no blocks to choose for.*layers="):
        settled(1000, model=nn.Identity)


REFUSED = [
    ("single", {"every": 2, "layers": ["blocks.0"]}, "every and layers both say"),
    ("single", {"budget": "1GiB", "mode": "full"}, "budget says what each block keeps"),
    ("single", {"mode": "ful"}, "'full' or 'selective'"),
    ("single", {"every": 0}, "every"),
    ("single", {"budget": "much"}, "'much' is not a size"),
    ("single", {"budget": "150%"}, "neither a size above 0 nor a share"),
    ("single", {"budget": 1.5}, "neither a size above 0 nor a share"),
    ("single", {"budget": True}, "neither a size above 0 nor a share"),
    ("single", {"budget": "-1GiB"}, "is not a size"),
    ("single", {"budget": 0}, "neither a size above 0 nor a share"),
    ("single", {"blocks": {"blocks.0": "full"}, "mode": "full"}, "blocks says what each block"),
    ("single", {"blocks": {"blocks.0": "offload"}}, "Set strategy.offload.activations=disk"),
    ("single_activations_disk", {"mode": "selective"}, "Use strategy.recompute.mode=full"),
    ("gpipe", {"mode": "full", "cut": "always"}, "Set strategy.cut.checkpoint=never"),
    ("zero3", {"mode": "selective"}, "changes them in place. Use strategy.recompute.mode=full"),
    ("zbv", {"mode": "selective"}, "Use strategy.recompute.mode=full, or strategy.cut.schedule"),
]


@pytest.mark.parametrize(("strategy", "options", "message"), REFUSED)
def test_what_makes_no_sense_is_refused(strategy, options, message):
    keys = {f"{RECOMPUTE}.{key}": value for key, value in options.items() if key != "cut"}
    if "cut" in options:
        keys["strategy.cut.checkpoint"] = options["cut"]
    with pytest.raises(ConfigError, match=message):
        make_plan(job_from_keys(strategy, keys), 1 if strategy.startswith("single") else 2, "cpu")


NAMES = [
    ({"layers": ["block.0"]}, r"no module 'block.0', did you mean 'blocks.0'\?.*blocks.0"),
    ({"layers": ["blocks"]}, r"blocks is a ModuleList.*Use blocks\.\*"),
    ({"layers": ["blocks.0", "blocks.0.mlp"]}, "is inside of blocks.0.*Leave one out"),
    ({"every": 5}, "has 4 blocks. Use strategy.recompute.every=4"),
    ({"blocks": {"blocks.9": "full"}}, "no module 'blocks.9'"),
]


@pytest.mark.parametrize(("options", "message"), NAMES)
def test_names_that_match_nothing_are_refused(options, message):
    keys = {f"{RECOMPUTE}.{key}": value for key, value in options.items()}
    plan = make_plan(job_from_keys("single", keys), 1, "cpu")
    with pytest.raises(ConfigError, match=message):
        resolve(plan, Workload(gpt(), None, CrossEntropy(), adamw))


def test_one_word_says_it():
    for word, field in (("full", "mode"), ("selective", "mode"), ("6GiB", "budget")):
        technique = make_plan(job_from_keys("single", {RECOMPUTE: word}), 1, "cpu").techniques[
            "recompute"
        ]
        assert field in technique.model_fields_set


def test_what_a_budget_chose_is_written_into_the_plan_and_read_back():
    keep = settled("1GiB").plan
    least = settled(keep.batch.micro_size * 10**6)
    described = describe_plan(least.plan)["strategy"]["recompute"]
    assert set(described["blocks"]) == {f"blocks.{number}" for number in range(4)}
    keys = {RECOMPUTE: described, "train.global_batch_size": 8}
    again = make_plan(job_from_keys("single", keys), 1, "cpu")
    assert again.techniques["recompute"] == least.plan.techniques["recompute"]
    assert resolve(again, Workload(gpt_without(), None, CrossEntropy(), adamw)).plan is again
