"""The first lines of a run, and the lines of its steps."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.engine import StepResult
from bigtrain.engine.setup import open_setup
from bigtrain.job.load import job_from_keys
from bigtrain.memory.timeline import Breakdown, Peak
from bigtrain.prediction.memory_report import FullestRank
from bigtrain.ranks.preemption import Highest
from bigtrain.report import progress
from bigtrain.report.banner import MemoryLimit, banner_lines, peak_line
from bigtrain.report.progress import StepBar, StepLine
from bigtrain.units import format_duration, format_share

SMALL = {
    "model.args.num_layers": 1,
    "model.args.width": 16,
    "model.args.num_heads": 2,
    "model.args.sequence_length": 16,
    "train.steps": 50,
    "train.global_batch_size": 8,
}


def banner(strategy: str, ranks: int, **keys: Any) -> list[str]:
    dotted = {key.replace("__", "."): value for key, value in keys.items()}
    job = job_from_keys(strategy, {**SMALL, **dotted})
    return [*banner_lines(open_setup(job, make_plan(job, ranks, "cpu")), ranks, "cpu")]


def test_a_banner_says_model_strategy_optimizer_and_batch() -> None:
    lines = banner("ddp", 2, train__precision="bf16", optim__momentum=0.9, optim__name="sgd")
    assert lines[0] == "model: gpt, 7.7k parameters (all trained), bf16"
    assert lines[2] == "strategy ddp: 2 ranks on cpu"
    assert lines[3] == "optimizer: sgd, momentum 0.9; rate 0.001, constant"
    assert lines[4].startswith("global batch 8 = micro-batch 4 x accumulation 1 x dp 2; 50 steps")


def test_a_banner_says_how_a_model_lies_on_the_ranks() -> None:
    assert banner("1f1b_ddp", 4, mesh__pp=2, model__args__num_layers=2)[2] == (
        "strategy 1f1b_ddp: 4 ranks on cpu, mesh pp 2 x dp 2 x tp 1"
    )


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"optim__lr": 0.01}, "rate 0.01, constant"),
        ({"optim__warmup_steps": 10}, "rate 0.001 after 10 warm-up steps, constant"),
        (
            {"optim__schedule": "linear", "optim__final_lr_share": 0.5},
            "rate 0.001, linear down to 0.00051 in step 50",
        ),
        (
            {"optim__warmup_steps": 100},
            "rate 1e-05 in step 1, up to 0.0005 in step 50 (100 warm-up steps)",
        ),
        (
            {"optim__schedule": "step", "optim__milestones": [1, 2]},
            "rate 0.001, times 0.1 at epochs 1, 2",
        ),
        ({"optim__lr": 0.01, "optim__base_batch_size": 16}, "rate 0.005, constant"),
        (
            {"optim__weight_decay": 0.1, "optim__clip_norm": 1.0},
            "weight decay 0.1, clipped to norm 1; rate 0.001",
        ),
    ],
)
def test_a_banner_says_the_course_of_the_rate(keys: dict[str, Any], words: str) -> None:
    assert words in banner("single", 1, **keys)[3]


def test_frozen_parameters_are_counted() -> None:
    job = job_from_keys("single", SMALL)
    parts = replace(open_setup(job, make_plan(job, 1, "cpu")), frozen_parameters=4000)
    words = "(3.7k trained, 4.0k frozen)"
    assert words in next(iter(banner_lines(parts, 1, "cpu")))


def peak(size: int) -> Peak:
    return Peak("backward", Breakdown(parameters=size))


def test_the_fullest_rank_is_named() -> None:
    alone = FullestRank.among({0: peak(2048)})
    limit = MemoryLimit(2**20, "memory.cap,")
    assert peak_line(alone, None, limit) == (
        "predicted peak: 2.0 KiB, in backward (0.2% of memory.cap, 1.0 MiB)"
    )
    alike = FullestRank.among({0: peak(2048), 1: peak(2048)})
    assert str(alike) == "2.0 KiB on each of 2 ranks, in backward"
    partial = FullestRank.among({0: peak(5), 1: peak(2048), 2: peak(2048)})
    assert str(partial) == "2.0 KiB on rank 1, the fullest of 3, in backward"
    assert FullestRank.among({}) is None
    none = peak_line(None, "memory.predict is off", limit)
    assert none == "predicted peak: none (memory.predict is off)"


def test_the_highest_figure_says_whose_it_is() -> None:
    assert Highest.of([3.0, 7.0, 7.0]) == Highest(7.0, 1, is_equal=False)
    assert Highest.of([7.0, 7.0]) == Highest(7.0, 0, is_equal=True)
    assert Highest.of([-1.0, -1.0]) is None


def result(step: int, tokens: float | None = 1234.5) -> StepResult:
    return StepResult(step, 1.25, 0.512, 1e-4, 8, 99.96, tokens, 0.08, 1000)


def test_a_step_line_has_loss_rate_norm_speed_peak_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([10.0, 12.0, 16.0, 16.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    line = StepLine(100, 4000)
    first = "loss 1.2500  lr 0.0001  norm 0.512  1,234 tokens/s  peak 1000 B (25.0%)"
    assert line.text(result(1), 1000, None) == (first, "")
    assert line.text(result(2), 1000, None) == (first, "left 3 min 16 s")
    # Three seconds per step, averaged over both steps.
    named, left = line.text(result(3, None), 2000, 1)
    assert named.endswith("  100.0 samples/s  peak 2.0 KiB on rank 1 (50.0%)")
    assert left == "left 4 min 51 s"
    assert line.text(result(100), 1000, None)[1] == ""


def test_without_a_peak_or_a_limit_nothing_is_said_of_it() -> None:
    assert "peak" not in StepLine(9, 4000).text(result(1), None, None)[0]
    assert StepLine(9, None).text(result(1), 5, None)[0].endswith("  peak 5 B")


@pytest.mark.parametrize("width", [80, 140])
def test_a_terminal_has_a_bar_and_the_line_below(width: int) -> None:
    printed = io.StringIO()
    console = Console(file=printed, width=width, force_terminal=True, color_system=None)
    bar = StepBar(console, 10, 2)
    bar.show(5, "loss 1.0", "left 3 s")
    console.print(*bar.get_renderables(), sep="\n")
    lines = printed.getvalue().splitlines()
    assert "step  5/10 left 3 s" in lines[0]
    assert "loss 1.0" in printed.getvalue()
    assert all(len(line) <= width for line in lines)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59, "59 s"), (61, "1 min 01 s"), (7260, "2 h 01 min"), (190_000, "2 d 5 h")],
)
def test_durations(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words


@pytest.mark.parametrize(
    ("share", "words"),
    [(0.0, "0.0%"), (1e-5, "<0.1%"), (0.625, "62.5%"), (-1e-5, "0.0%"), (1.2, "120.0%")],
)
def test_shares_have_no_zero_that_is_none(share: float, words: str) -> None:
    assert format_share(share, 1) == words
