"""A budget for saved activations: the settings that it chooses, and the budgets that are
refused.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.parity import adamw
from support.recomputed import RECOMPUTE, gpt, gpt_without, text
from torch import nn

from bigtrain.assembly.make_plan import describe_plan, make_plan
from bigtrain.assembly.recompute_budget import _BudgetTask
from bigtrain.assembly.resolve import resolve_plan
from bigtrain.core.workload import Workload
from bigtrain.data import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.memory.timeline import MEMORY_KINDS, Breakdown, Peak
from bigtrain.units import format_bytes


def resolved_plan(budget: object, model=gpt_without, **keys: Any) -> Any:
    """The plan of one process with this budget, resolved for the model."""
    job = job_from_keys(
        "single", {"train.global_batch_size": 8, f"{RECOMPUTE}.budget": budget, **keys}
    )
    plan = make_plan(job, 1, "cpu")
    loss = CrossEntropy()
    inputs, targets = text()
    example = MicroBatch(inputs, targets, loss.count(targets), len(inputs))
    return resolve_plan(plan, Workload(model(), example, loss, adamw))


def test_a_budget_with_room_for_all_keeps_all():
    plan = resolved_plan("1GiB")
    assert set(plan.plan.techniques["recompute"].blocks.values()) == {"keep"}
    assert "4 save all activations;" in plan.notes[0]


def test_the_smallest_peak_is_named_and_reached():
    with pytest.raises(ConfigError, match="smallest peak that this job reaches") as caught:
        resolved_plan(1000)
    message = str(caught.value)
    assert "in the backward phase" in message
    assert "Use strategy.recompute.budget=" in message
    least = int(message.split("Use strategy.recompute.budget=")[1].split(",")[0])
    assert f"budget {format_bytes(least)}" in resolved_plan(least).notes[0]
    with pytest.raises(ConfigError, match="smallest peak"):
        resolved_plan(least - 1)


def budget_task(plan: Any) -> _BudgetTask:
    unused: Any = None
    return _BudgetTask(plan, unused, 10, unused, None, None, {})


def test_buffers_of_fully_shard_are_not_set_by_the_size_of_a_bucket():
    peak = Peak("forward", Breakdown(buffers=1000))
    for strategy, fix in (("fsdp", "--strategy zero2."), ("ddp", "bucket_size.")):
        plan = make_plan(job_from_keys(strategy, {"train.global_batch_size": 8}), 2, "cpu")
        assert budget_task(plan)._too_small(peak, 0).endswith(fix)


@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_a_budget_that_is_too_small_names_a_fix_for_each_kind_of_memory(kind):
    peak = Peak("forward", replace(Breakdown(), **{kind: 1000}))
    plan: Any = SimpleNamespace(pp=1, replicate=SimpleNamespace(sharded_states=0))
    text = budget_task(plan)._too_small(peak, 0)
    assert f"of which {kind} are 1000 B. Use strategy.recompute.budget=1000, or " in text


def test_a_share_of_the_device_is_a_budget():
    assert "4 save all activations;" in resolved_plan("50%").notes[0]
    assert "4 save all activations;" in resolved_plan(0.5).notes[0]
    assert "4 save all activations;" in resolved_plan("0.5").notes[0]


def test_no_example_no_budget():
    plan = make_plan(job_from_keys("single", {f"{RECOMPUTE}.budget": "1GiB"}), 1, "cpu")
    with pytest.raises(ConfigError, match=r"Give prepare\(\.\.\., example="):
        resolve_plan(plan, Workload(gpt(), None, CrossEntropy(), adamw))


class Unpredictable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x):
        return self.layers[int(x.sum() > 0)](x.float())


def test_a_model_that_cannot_be_forecast_has_no_budget():
    with pytest.raises(ConfigError, match=r"cannot be forecast: .*recompute.mode=full"):
        resolved_plan(1000, model=Unpredictable)


def test_a_model_without_blocks_has_no_budget():
    with pytest.raises(ConfigError, match=r"this model has none.*layers="):
        resolved_plan(1000, model=nn.Identity)


REFUSED = [
    ("single", {"every": 2, "layers": ["blocks.0"]}, "every and layers both choose"),
    (
        "single",
        {"budget": "1GiB", "mode": "full"},
        "strategy.recompute.budget sets the mode of each block",
    ),
    ("single", {"mode": "ful"}, "'full' or 'selective'"),
    ("single", {"every": 0}, "every"),
    ("single", {"budget": "much"}, "'much' is not a size"),
    ("single", {"budget": "150%"}, "neither a size above 0 nor a share"),
    ("single", {"budget": 1.5}, "neither a size above 0 nor a share"),
    ("single", {"budget": True}, "neither a size above 0 nor a share"),
    ("single", {"budget": "-1GiB"}, "is not a size"),
    ("single", {"budget": 0}, "neither a size above 0 nor a share"),
    (
        "single",
        {"blocks": {"blocks.0": "full"}, "mode": "full"},
        "strategy.recompute.blocks sets the mode",
    ),
    ("single", {"blocks": {"blocks.0": "offload"}}, "Set strategy.offload.activations=disk"),
    ("single_activations_disk", {"mode": "selective"}, "Use strategy.recompute.mode=full"),
    ("gpipe", {"mode": "full", "cut": "always"}, "Set strategy.cut.checkpoint=never"),
    ("zero3", {"mode": "selective"}, "change them in place. Use strategy.recompute.mode=full"),
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
    ({"layers": ["blocks.0", "blocks.0.mlp"]}, "is inside blocks.0.*Leave one out"),
    ({"every": 5}, "has 4 blocks. Use strategy.recompute.every=4"),
    ({"blocks": {"blocks.9": "full"}}, "no module 'blocks.9'"),
]


@pytest.mark.parametrize(("options", "message"), NAMES)
def test_names_that_match_nothing_are_refused(options, message):
    keys = {f"{RECOMPUTE}.{key}": value for key, value in options.items()}
    plan = make_plan(job_from_keys("single", keys), 1, "cpu")
    with pytest.raises(ConfigError, match=message):
        resolve_plan(plan, Workload(gpt(), None, CrossEntropy(), adamw))


def test_one_word_says_it():
    for word, field in (("full", "mode"), ("selective", "mode"), ("6GiB", "budget")):
        technique = make_plan(job_from_keys("single", {RECOMPUTE: word}), 1, "cpu").techniques[
            "recompute"
        ]
        assert field in technique.model_fields_set


def test_what_a_budget_chose_is_written_into_the_plan_and_read_back():
    keep = resolved_plan("1GiB").plan
    least = resolved_plan(keep.batch.micro_size * 10**6)
    described = describe_plan(least.plan)["strategy"]["recompute"]
    assert set(described["blocks"]) == {f"blocks.{number}" for number in range(4)}
    keys = {RECOMPUTE: described, "train.global_batch_size": 8}
    again = make_plan(job_from_keys("single", keys), 1, "cpu")
    assert again.techniques["recompute"] == least.plan.techniques["recompute"]
    assert resolve_plan(again, Workload(gpt_without(), None, CrossEntropy(), adamw)).plan is again
