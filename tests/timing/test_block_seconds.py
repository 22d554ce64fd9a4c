"""Blocks timed on this machine, and the planner's use of their seconds."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.setup import open_setup
from bigtrain.engine.time_blocks import SCRIPT, BlockStopwatch, repetitions, time_blocks
from bigtrain.job.load import load_job
from bigtrain.job.schema import Job
from bigtrain.machine.cluster import load_cluster
from bigtrain.memory.cap import Limit
from bigtrain.planner.ask import Question, ask
from bigtrain.prediction.section_library import SectionLibrary
from bigtrain.ranks.context import RunContext
from bigtrain.timing import block_seconds
from bigtrain.timing.block_seconds import (
    AFTER,
    BEFORE,
    BlockRequest,
    BlockSeconds,
    BlockTimer,
    Slowdowns,
    section_keys,
    slowdowns,
    spread_sizes,
)
from bigtrain.timing.step_time import StepTimer, TimedParts
from bigtrain.units import GIB

WORDS = [
    "model.name=gpt",
    "model.args={num_layers: 6, width: 64, num_heads: 4, sequence_length: 32}",
    "data.name=synthetic",
    "data.args={kind: language}",
    "train.global_batch_size=4",
]
NODE = load_cluster("cpu")


@pytest.fixture(scope="module")
def job() -> Job:
    return load_job(None, "single", WORDS)


def request(job: Job, *rows: int, seconds: float = 60.0) -> BlockRequest:
    return BlockRequest(job.model_dump(mode="json"), list(rows), False, seconds)


def test_every_section_of_a_model_is_timed_and_the_sum_is_the_whole(job):
    one_row, two = time_blocks(job, request(job, 1, 2), RunContext.alone())
    assert (one_row.rows, two.rows) == (1, 2)
    assert (
        len(one_row.sections) == len(two.sections) == 2 + 3
    )  # six equal blocks are shortened to three
    assert all(forward > 0 and backward > 0 for forward, backward in one_row.sections)
    assert 0 < one_row.update < 5
    assert set(one_row.shares) == {"split", "selective", "full"}
    assert all(0.05 < share < 20 for pair in one_row.shares.values() for share in pair)
    assert 0.5 < sum(one_row.shares["split"]) < 5
    short_blocks, outside = 3 * 12 * 64 * 64, 256 * 64
    assert one_row.trained > short_blocks + outside
    assert one_row.trained < 2 * short_blocks


def test_after_its_time_no_larger_size_is_begun(job):
    timed = time_blocks(job, request(job, 1, 2, 4, seconds=0.0), RunContext.alone())
    assert [entry.rows for entry in timed] == [1]


def test_sizes_with_long_steps_have_the_variants_of_smaller_ones(job, monkeypatch):
    monkeypatch.setattr("bigtrain.engine.time_blocks.LONG_STEP_S", 0.0)
    one_row, two, four = time_blocks(job, request(job, 1, 2, 4), RunContext.alone())
    assert two.shares == four.shares == one_row.shares
    assert len(one_row.shares) == 3
    assert two.sections != four.sections


class TwoBlocks(nn.Module):
    """Two blocks in sequence, or with one of them called again after the other."""

    def __init__(self, *, crosswise: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.crosswise = crosswise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.blocks
        hidden = first(x * 2)
        return first(second(hidden)) if self.crosswise else second(hidden)


def test_slow_steps_are_repeated_less_often():
    assert [repetitions(seconds) for seconds in (0.01, 0.2, 1.0, 30.0)] == [9, 9, 2, 1]


@pytest.mark.parametrize("crosswise", [False, True])
def test_the_sections_of_a_micro_batch_add_up_to_its_seconds(crosswise):
    model = TwoBlocks(crosswise=crosswise)
    stopwatch = BlockStopwatch(model, ["blocks.0", "blocks.1"], torch.device("cpu"))
    stopwatch.start()
    loss = model(torch.ones(2, 4, requires_grad=True)).sum()
    stopwatch.note("backward_start")
    loss.backward()
    stopwatch.note("backward_end")
    stopwatch.note("updated")
    sections, update = stopwatch.sections()
    moments = dict(reversed(stopwatch._moments))
    assert update == moments["updated"] - moments["backward_end"]
    assert sum(map(sum, sections)) == pytest.approx(moments["backward_end"] - moments["start"])
    # Before the blocks, the blocks, after the blocks; or the whole model as one.
    assert len(sections) == (1 if crosswise else 4)


def library(job: Job) -> SectionLibrary:
    setup = open_setup(job, make_plan(job, 1, "cpu"))
    work = setup.workload
    cpu = torch.device("cpu")
    return SectionLibrary(
        work.model, work.micro_batch, lambda *_: work.loss, work.make_optimizer, cpu
    )


def timed_as(
    section_library: SectionLibrary,
    plan: Any,
    timer: StepTimer,
    rows: int,
    factors: dict[str, float],
) -> BlockSeconds:
    """The times of a machine on which sections take a multiple of the predicted seconds."""
    model = section_library.model_sections(plan, rows, "keep")
    keys = section_keys(model.sections)
    at = {key: n for n, key in enumerate(keys)}
    names = [BEFORE, keys[1], keys[2], keys[-2], AFTER]  # first, middle, last
    pairs = [
        tuple(
            factors[name] * side * timer.op_seconds(work)
            for side, work in enumerate((section.forward, section.backward), start=1)
        )
        for name, section in ((name, model.sections[at[name]]) for name in names)
    ]
    numbers = sum(t.numbers for s in model.base.sections for t in s.tensors if t.trained)
    update = 5 * timer.op_seconds(model.base.step_work)
    return BlockSeconds(rows, pairs, update, numbers, {"full": (1.1, 1.6)})


def test_what_was_timed_is_held_beside_what_rates_say(job):
    section_library, timer, plan = library(job), StepTimer(NODE), make_plan(job, 1, "cpu")
    names = section_keys(section_library.model_sections(plan, 1, "keep").sections)
    factors = {BEFORE: 2.0, names[1]: 3.0, names[2]: 4.0, names[-2]: 6.0, AFTER: 7.0}
    timed = [timed_as(section_library, plan, timer, rows, factors) for rows in (1, 4)]
    timed[1] = BlockSeconds(
        4,
        [(2 * a, 2 * b) for a, b in timed[1].sections],
        timed[1].update,
        timed[1].trained,
        timed[1].shares,
    )

    def sections_at(rows: int) -> Any:
        return section_library.model_sections(plan, rows, "keep")

    slowdowns_found = slowdowns(timed, 1.0, section_library._runs._model, sections_at, timer)
    assert slowdowns_found.rows == (1, 4)
    assert slowdowns_found.update == pytest.approx(5)
    for name in names[1:-1]:  # all blocks between the ends equal the one that was timed
        expected = factors.get(name, 4.0)
        assert slowdowns_found.at(1)[name] == pytest.approx((expected, 2 * expected))
        assert slowdowns_found.at(2)[name] == pytest.approx((1.5 * expected, 3 * expected))
        assert slowdowns_found.at(64)[name] == pytest.approx((2 * expected, 4 * expected))
    # Two ranks on one core were timed twice as long as one rank on a core.
    crowded = slowdowns(timed, 2.0, section_library._runs._model, sections_at, timer)
    assert crowded.at(1)[AFTER] == pytest.approx((3.5, 7.0))
    sections = section_library.model_sections(plan, 1, "keep")
    whole = slowdowns_found.applied(sections, sections, "keep", 1, timer)
    seconds = timer.pass_seconds(whole.sections)
    plain = timer.pass_seconds(section_library.model_sections(plan, 1, "keep").sections)
    assert 2 * plain.forward < seconds.forward < 7 * plain.forward
    assert 4 * plain.backward < seconds.backward < 14 * plain.backward
    # A recomputed block takes the timed fraction of the seconds of one that is not recomputed.
    full = slowdowns_found.applied(
        section_library.model_sections(plan, 1, "full"), sections, "full", 1, timer
    )
    once, again = (timer.pass_seconds([each.sections[2]]) for each in (whole, full))
    assert again.forward == pytest.approx(1.1 * once.forward)
    assert again.backward == pytest.approx(1.6 * once.backward)
    # If only the whole model was timed, all blocks share its slowdown.
    slow_blocks = BlockSeconds(1, [(3 * plain.forward, 0.0)], timed[0].update, timed[0].trained)
    alike = slowdowns([slow_blocks], 1.0, section_library._runs._model, sections_at, timer)
    assert len({round(forward, 6) for forward, _ in alike.at(1).values()}) == 1


def test_the_search_goes_by_what_was_timed(job, monkeypatch):
    asked: list[bool] = []

    def seconds(timer: BlockTimer, *, bf16_parameters: bool) -> list[BlockSeconds]:
        asked.append(bf16_parameters)
        section_library, plan = library(timer.job), make_plan(timer.job, 1, "cpu")
        names = section_keys(section_library.model_sections(plan, 1, "keep").sections)
        factors = dict.fromkeys([*names], 3.0)
        timer.source = "as a test says"
        timed_blocks = timed_as(section_library, plan, StepTimer(NODE), 1, factors)
        slower = timer.oversubscription
        pairs = [(slower * a, slower * b / 2) for a, b in timed_blocks.sections]
        return [BlockSeconds(1, pairs, slower * timed_blocks.update, timed_blocks.trained)]

    monkeypatch.setattr(BlockTimer, "seconds", seconds)
    limit = Limit(GIB, reserved=0)
    arguments = (job, NODE, 1, limit, 4)
    by_rates = ask(Question(*arguments, rows=2, margins={"torch": 0.0}))
    by_blocks = ask(Question(*arguments, rows=2, margins={"torch": 0.0}, at_hand=True))
    assert asked == [False]
    assert (by_rates.timed, by_blocks.timed) == ("", "as a test says")
    candidate = by_rates.result.best[0].candidate
    before, after = (
        answer.search.evaluator.evaluate(
            candidate, answer.search.evaluator.plan_of(candidate), GIB
        ).seconds
        for answer in (by_rates, by_blocks)
    )
    assert after.compute == pytest.approx(3 * before.compute)
    assert after.update == pytest.approx(5 * before.update)


def test_blocks_are_timed_once_for_a_model_and_a_number_of_ranks(
    job, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    setup = open_setup(job, make_plan(job, 1, "cpu"))
    work = setup.workload
    calls: list[Any] = []

    def measured(_script: Any, ranks: int, arguments: list[str], _timeout: float) -> Any:
        wanted = json.loads(arguments[0])
        calls.append((ranks, wanted["rows"], wanted["bf16_parameters"]))
        assert wanted["job"]["strategy"] == load_job(None, "single", []).model_dump()["strategy"]
        return [asdict(BlockSeconds(rows, [(0.1, 0.2)], 0.3, 7)) for rows in wanted["rows"]]

    monkeypatch.setattr(block_seconds, "measured_by_ranks", measured)
    monkeypatch.setattr(block_seconds, "others_cores", lambda _uses: 0.0)

    def timer(ranks: int = 2, rows: tuple[int, ...] = (1, 2)) -> BlockTimer:
        return BlockTimer(job, work.model, work.micro_batch, ranks, rows, SCRIPT)

    no_script = BlockTimer(job, work.model, work.micro_batch, 2, (1, 2))
    assert no_script.seconds(bf16_parameters=False) == []  # nothing is cached and nothing is timed
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr.isatty", lambda: True)
        first = timer().seconds(bf16_parameters=False)
    assert "timing the model's blocks on this machine" in capsys.readouterr().err
    assert first == [BlockSeconds(1, [(0.1, 0.2)], 0.3, 7), BlockSeconds(2, [(0.1, 0.2)], 0.3, 7)]
    again = timer()
    assert again.seconds(bf16_parameters=False) == first
    assert not capsys.readouterr().err
    assert again.source == "blocks timed on this machine, 1, 2 rows, 2 at once"
    assert no_script.seconds(bf16_parameters=False) == first
    assert timer(rows=(2,)).seconds(bf16_parameters=False) == first
    assert len(calls) == 1
    timer().seconds(bf16_parameters=True)
    timer(ranks=1).seconds(bf16_parameters=False)
    assert calls[1:] == [(2, [1, 2], True), (1, [1, 2], False)]
    (tmp_path / "bigtrain" / "blocks.json").write_text("half of it {")
    assert timer().seconds(bf16_parameters=False) == first
    assert len(calls) == 4
    more = timer(rows=(2, 8)).seconds(bf16_parameters=False)  # for a different request
    assert [entry.rows for entry in more] == [1, 2, 8]
    assert calls[4:] == [(2, [2, 8], False)]
    with monkeypatch.context() as patch:
        patch.setenv("LD_PRELOAD", "another_malloc.so")
        assert no_script.seconds(bf16_parameters=False) == []

    def failed(*_: Any) -> Any:
        raise RuntimeError("2 ranks did not answer in 180 s")

    monkeypatch.setattr(block_seconds, "measured_by_ranks", failed)
    slow = timer(rows=(1, 2, 4))
    assert slow.seconds(bf16_parameters=False) == []
    assert slow.source == "blocks could not be timed: 2 ranks did not answer in 180 s"


def test_blocks_of_a_busy_machine_are_marked_and_timed_again_by_another_launch(
    job, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("bigtrain.machine.busy.usable_cores", lambda: 2)
    work, calls = open_setup(job, make_plan(job, 1, "cpu")).workload, []

    def measured(*_: Any) -> Any:
        calls.append(0.1 * (1 + len(calls)))
        return [asdict(BlockSeconds(1, [(calls[-1], 0.2)], 0.3, 7))]

    def asked(launch: str, others_cores: float) -> tuple[float, str]:
        monkeypatch.setattr(block_seconds, "measured_by_ranks", measured)
        monkeypatch.setattr(block_seconds, "others_cores", lambda _uses: others_cores)
        monkeypatch.setattr(block_seconds, "launch_key", lambda _environ: launch)
        timer = BlockTimer(job, work.model, work.micro_batch, 2, (1,), SCRIPT)
        (timed,) = timer.seconds(bf16_parameters=False)
        return timed.sections[0][0], timer.source

    seconds, source = asked("a", 1.5)
    assert seconds == 0.1
    assert source.endswith(
        ", while other programs used 1.5 of the 2 cores: the next run times them again"
    )
    assert asked("a", 0.0) == (seconds, source)  # the other ranks of a launch use the same times
    assert asked("b", 0.0) == (0.2, "blocks timed on this machine, 1 rows, 2 at once")
    assert asked("c", 1.5) == asked("b", 0.0)  # nothing is timed: the cached times are valid


OTHERS = {"others_cores": 0.0, "launch": "a"}
SIZES = {"sizes": [1], **OTHERS}
GOOD = {"rows": 1, "sections": [[0.1, 0.2]], "update": 0.3, "trained": 7, "shares": {}}


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ([], "an entry is no object"),
        ({}, "no lists of times and sizes"),
        ({"timed": [GOOD], "sizes": [math.inf]}, "no lists of times and sizes"),
        ({"timed": [GOOD], "sizes": [True]}, "no lists of times and sizes"),
        ({"timed": {}, "sizes": [1]}, "no lists of times and sizes"),
        ({"timed": [GOOD], "sizes": [1], "launch": "a"}, "the load of other programs"),
        ({"timed": [GOOD], "sizes": [1], **OTHERS, "others_cores": -1.0}, "the load of other"),
        ({"timed": [[1]], **SIZES}, "an entry has other figures"),
        ({"timed": [{**GOOD, "more": 1}], **SIZES}, "an entry has other figures"),
        ({"timed": [{**GOOD, "shares": []}], **SIZES}, "its shares no object"),
        ({"timed": [{**GOOD, "shares": {"split": [1]}}], **SIZES}, "no pairs"),
        (
            {"timed": [{**GOOD, "shares": {"other": [1, 1]}}], "sizes": [1], **OTHERS},
            "of unknown variants",
        ),
        (
            {"timed": [{**GOOD, "sections": [[0.1, "x"]]}], "sizes": [1], **OTHERS},
            "a figure is no time",
        ),
        (
            {"timed": [{**GOOD, "sections": [[0.1, math.nan]]}], "sizes": [1], **OTHERS},
            "is no time",
        ),
        ({"timed": [{**GOOD, "update": -1}], **SIZES}, "a figure is no time"),
        (
            {"timed": [{**GOOD, "rows": 1.5}], "sizes": [1], **OTHERS},
            "its rows or numbers are no count",
        ),
    ],
)
def test_an_entry_that_is_none_is_said_and_timed_anew(entry, reason, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("bigtrain.files.drafts._SAID", set())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = block_seconds.BLOCKS.path
    path.parent.mkdir()
    path.write_text(json.dumps({"key": entry, "other": {**OTHERS, "timed": [GOOD], "sizes": [1]}}))
    assert block_seconds._read("key") == block_seconds._Kept()
    errors = capsys.readouterr().err
    assert reason in errors
    assert errors.count("\n") == 1
    cached_entry = block_seconds._read("other")
    assert cached_entry == block_seconds._Kept(
        [BlockSeconds(1, [(0.1, 0.2)], 0.3, 7)], {1}, 0.0, "a"
    )
    block_seconds._write("key", cached_entry)
    assert block_seconds._read("key") == cached_entry


def test_of_many_sizes_the_smallest_the_largest_and_some_between_are_timed():
    assert spread_sizes([4, 1, 2]) == [1, 2, 4]
    assert spread_sizes([1, 2, 3, 4, 6, 8, 12, 16, 24, 32]) == [1, 3, 6, 8, 16, 32]


def test_ranks_of_this_machine_time_a_job(job, monkeypatch, tmp_path):
    """In separate processes, as for a user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    work = open_setup(job, make_plan(job, 1, "cpu")).workload
    timer = BlockTimer(job, work.model, work.micro_batch, 2, (1,), SCRIPT)
    (timed,) = timer.seconds(bf16_parameters=False)
    assert timer.source.startswith("blocks timed on this machine")
    assert len(timed.sections) == 5
    assert (tmp_path / "bigtrain" / "blocks.json").is_file()


def test_between_two_sizes_the_slowdown_is_read_off_by_their_ratio():
    splits = [{"split": pair} for pair in ((0.6, 0.6), (0.8, 0.4), (0.8, 0.4))]
    slowdowns = Slowdowns((1, 4, 16), {"a": [(1.0, 1.0), (3.0, 5.0), (3.0, 5.0)]}, 1.5, splits)
    assert slowdowns.at(1)["a"] == (1.0, 1.0)
    assert slowdowns.at(2)["a"] == pytest.approx((2.0, 3.0))
    assert slowdowns.at(8)["a"] == pytest.approx((3.0, 5.0))
    assert slowdowns.at(100)["a"] == (3.0, 5.0)
    assert slowdowns.parts(2) == TimedParts(1.5, pytest.approx((0.7, 0.5)))
