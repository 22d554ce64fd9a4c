"""A forecast composed from recorded sections of a model equals that of the whole model."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from support.nets import StagedResidual
from torch import Tensor, nn

from bigtrain.assembly.make_plan import make_plan
from bigtrain.assembly.resolve import resolve_plan
from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.workload import Workload
from bigtrain.costs.forecast import Profile
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.chunked_cross_entropy import ChunkedCrossEntropy
from bigtrain.losses.loss import CrossEntropy, Loss
from bigtrain.models import make_model
from bigtrain.models.blocks import independent_blocks
from bigtrain.optim.factory import optimizer_factory
from bigtrain.prediction.compose import compose_profile
from bigtrain.prediction.fake_runs import runs
from bigtrain.prediction.fake_runs.runs import resize_micro_batch
from bigtrain.prediction.predict import forecast_rank, forecast_rank_step, forecast_step
from bigtrain.prediction.profile_model import make_profile
from bigtrain.prediction.record_sections import record_sections
from bigtrain.prediction.section_library import ModelSections, SectionLibrary
from bigtrain.prediction.shorten import shorten_model, untie_parameters

CPU = torch.device("cpu")
GPT = {"num_layers": 6, "width": 32, "num_heads": 2, "vocab_size": 97, "sequence_length": 16}


class Images(nn.Module):
    """Convolutions with BatchNorm between a stem and a head: blocks of two shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        wide = [self._block(16 if n else 8, 16) for n in range(3)]
        self.stages = nn.Sequential(*(self._block(8, 8) for _ in range(4)), *wide)
        self.head = nn.Linear(16, 5)

    @staticmethod
    def _block(width: int, out: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean(dim=(2, 3)))


class ByNumber(nn.Module):
    """Calls its blocks by index, so that none can be removed to shorten the model."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 4
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(4)
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        for number in range(self.count):
            x = x + self.layers[number](x)
        return self.head(x)


class Twice(ByNumber):
    """Runs through its blocks twice, so that they are not sections."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers):
            x = x + layer(x)
        return self.head(x)


class Looks(ByNumber):
    """Reads a value, which fake tensors do not have."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x if float(x.sum()) > 0 else -x)


def tokens(rows: int) -> MicroBatch:
    inputs = torch.zeros(rows, 16, dtype=torch.long)
    return MicroBatch(inputs, inputs.clone(), 16 * rows, rows)


def floats(*shape: int) -> MicroBatch:
    return MicroBatch(torch.zeros(*shape), torch.zeros(shape[0], dtype=torch.long), *shape[:1] * 2)


def gpt() -> nn.Module:
    return make_model("gpt", GPT)


PLAIN = CrossEntropy()
CHUNKED = ChunkedCrossEntropy(head="head", chunk_size=97 * 4 * 8)
MODELS: dict[str, Any] = {
    "gpt": (gpt, tokens(2), PLAIN),
    "gpt in chunks": (gpt, tokens(2), CHUNKED),
    "images": (Images, floats(4, 3, 12, 12), PLAIN),
    "by number": (ByNumber, floats(4, 16), PLAIN),
    "staged": (StagedResidual, floats(4, 8), PLAIN),
    "twice": (Twice, floats(4, 16), PLAIN),
}
WORDS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp full": {"strategy.recompute": "full"},
    "ddp selective bf16": {"strategy.recompute": "selective", "train.precision": "bf16"},
    "zero2 bf16": {"train.precision": "bf16"},
    "fsdp full bf16": {"strategy.recompute": "full", "train.precision": "bf16"},
    "zero3 full": {"strategy.recompute": "full"},
}


def compare_profiles(name: str, words: str, rows: int) -> tuple[Profile, Profile, Any]:
    """The profile of a real run, the composed profile, and the plan."""
    make, example, loss = MODELS[name]
    strategy = words.split()[0]
    keys = {"train.global_batch_size": 8 * rows, "train.micro_batch_size": rows, **WORDS[words]}
    plan = make_plan(job_from_keys(strategy, keys), 2, "cpu")
    with torch.device("meta"):
        model = make()
    optimizer = optimizer_factory(job_from_keys(strategy, keys).optim, 0)
    workload = Workload(model, resize_micro_batch(example, rows), loss, optimizer)
    exact = make_profile(workload, ResolvedPlan.of(plan, model))
    assert exact.untraceable is None
    choice = WORDS[words].get("strategy.recompute", "keep")
    library = SectionLibrary(model, example, lambda *_: loss, optimizer, CPU)
    unrecomputed = chosen = library.model_sections(plan, rows, "keep")
    if choice != "keep":
        chosen = library.model_sections(plan, rows, choice)
        if len(unrecomputed.sections) == 2:  # no blocks: the whole model is one section
            unrecomputed = chosen
    return exact, composed_profile(unrecomputed, chosen, again=choice != "keep"), plan


def composed_profile(unrecomputed: ModelSections, chosen: ModelSections, *, again: bool) -> Profile:
    """As in the planner: sections before and after the blocks are from the run that saves
    everything.
    """
    sections = (unrecomputed.sections[0], *chosen.sections[1:-1], unrecomputed.sections[-1])
    names = [section.name for section in sections if section.name]
    return compose_profile(unrecomputed.base, sections, recomputed=names if again else ())


@pytest.mark.parametrize(("name", "words"), [*product(MODELS, WORDS)])
def test_a_model_put_together_is_forecast_as_a_whole_one(name, words):
    exact, made, plan = compare_profiles(name, words, 4)
    for key in ("parameter_bytes", "gradient_bytes", "buffer_bytes", "optimizer_bytes"):
        assert getattr(made, key) == getattr(exact, key), key
    for key in ("batch_bytes", "trained_elements", "state_slots", "state_scalars"):
        assert getattr(made, key) == getattr(exact, key), key
    peak, wanted = forecast_step(made, plan).peak(), forecast_step(exact, plan).peak()
    assert peak.phase == wanted.phase
    assert peak.bytes == pytest.approx(wanted.bytes, rel=5e-4), (peak, wanted)


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("name", ["gpt", "gpt in chunks", "by number"])
def test_other_sizes_are_read_off_two_runs(name, rows):
    exact, made, plan = compare_profiles(name, "ddp", rows)
    assert made.batch_bytes == exact.batch_bytes
    peak, wanted = forecast_step(made, plan).peak(), forecast_step(exact, plan).peak()
    assert peak.bytes == pytest.approx(wanted.bytes, rel=2e-3), (peak, wanted)


@pytest.mark.parametrize(
    ("name", "strategy", "ranks", "at"),
    [
        ("gpt", "1f1b", 2, ["blocks.3"]),
        ("gpt", "gpipe", 2, ["blocks.1"]),
        ("gpt", "interleaved_1f1b", 2, ["blocks.2", "blocks.3", "blocks.5"]),
        ("gpt", "1f1b_zero1", 4, ["blocks.2"]),
        ("gpt", "layer_split", 2, ["blocks.5"]),
        ("staged", "1f1b", 2, ["stages.1.blocks.1"]),
        ("staged", "1f1b", 2, ["stages.2.blocks.0"]),
        ("staged", "1f1b_fsdp", 4, ["stages.1.blocks.1"]),
        ("staged", "interleaved_1f1b", 2, [f"stages.{i}.blocks.2" for i in range(3)]),
    ],
)
def test_a_stage_put_together_is_forecast_as_one_that_was_cut(name, strategy, ranks, at):
    make, example, loss = MODELS[name]
    keys = {"train.global_batch_size": 8 * ranks, "train.micro_batch_size": 1, "mesh.pp": 2}
    plan = make_plan(job_from_keys(strategy, {**keys, "strategy.cut.at": at}), ranks, "cpu")
    with torch.device("meta"):
        model = make()
    optimizer = optimizer_factory(job_from_keys(strategy, keys).optim, 0)
    example = resize_micro_batch(example, 1)
    workload = Workload(model, example, loss, optimizer)
    resolved = resolve_plan(plan, workload)
    assert resolved.layout is not None
    body = SectionLibrary(model, example, lambda *_: loss, optimizer, CPU).model_sections(
        plan, 1, "keep", cut=True
    )
    names = [section.name for section in body.sections]
    edges = [0, *(names.index(name) for name in at), len(names)]
    parts = {}
    for stage, (first, stop) in enumerate(zip(edges, edges[1:], strict=False)):
        after = body.sections[stop] if stop < len(names) else None
        parts[stage] = forecast_step(
            compose_profile(body.base, body.sections[first:stop], after=after), plan
        )
    for rank in range(2):
        exact = forecast_rank(resolved, workload, rank).forecast
        rank_parts = {stage: parts[stage] for stage in resolved.layout.stages_of(rank)}
        peak = forecast_rank_step(rank_parts, plan, rank).peak()
        assert exact is not None
        assert peak.bytes == pytest.approx(exact.peak().bytes, rel=5e-3), (peak, exact.peak())


def test_a_model_is_shortened_where_neighbours_are_alike():
    with torch.device("meta"):
        shortened = shorten_model(gpt())
        assert shorten_model(Images()) is not None
    assert shortened is not None
    short, order = shortened
    assert [name for name, _ in independent_blocks(short)] == ["blocks.0", "blocks.1", "blocks.2"]
    assert order == (0, 1, 1, 1, 1, 2)  # the last block represents only itself


def test_tied_parameters_are_told_apart_for_stages():
    with torch.device("meta"):
        model = gpt()
    copied, aliases = untie_parameters(model)
    assert len(list(copied.named_parameters())) == len(list(model.named_parameters())) + 1
    assert list(aliases) == ["head.weight"]
    assert aliases["head.weight"] in dict(model.named_parameters())


def test_a_model_that_looks_at_values_is_refused_with_the_line():
    with torch.device("meta"):
        model = Looks()
    plan = make_plan(job_from_keys("single", {"train.global_batch_size": 2}), 1, "cpu")
    make_optimizer = optimizer_factory(job_from_keys("single", {}).optim, 0)
    library = SectionLibrary(model, floats(2, 16), lambda *_: PLAIN, make_optimizer, CPU)
    with pytest.raises(
        ConfigError, match=r"does not run on fake tensors.*forward.*bigtrain compare"
    ):
        library.model_sections(plan, 2, "keep")


def test_losses_may_differ_where_micro_batches_wait():
    with torch.device("meta"):
        model = gpt()
    asked: list[bool] = []

    def loss(waiting: bool, rows: int) -> Loss:
        assert rows == 2
        asked.append(waiting)
        return PLAIN if waiting else CHUNKED

    plan = make_plan(job_from_keys("single", {"train.global_batch_size": 2}), 1, "cpu")
    library = SectionLibrary(
        model, tokens(2), loss, optimizer_factory(job_from_keys("single", {}).optim, 0), CPU
    )
    bodies = [library.model_sections(plan, 2, "keep", waiting=waiting) for waiting in (False, True)]
    spans = [
        len(composed_profile(body, body, again=False).passes["first"].spans) for body in bodies
    ]
    assert spans[0] != spans[1]
    assert set(asked) == {True, False}


def test_what_is_after_the_blocks_is_found_with_one_block_alone(monkeypatch):
    """With a loss in chunks the section after the blocks is the same for one block as for all."""
    with torch.device("meta"):
        model = gpt()
    loss = replace(CHUNKED, chunk_size=16 * 97 * 4)
    optimizer = optimizer_factory(job_from_keys("single", {}).optim, 0)
    plan = make_plan(job_from_keys("single", {"train.global_batch_size": 3}), 1, "cpu")
    recorded: list[list[str]] = []

    def noted(*arguments: Any, **options: Any) -> Any:
        short_section = record_sections(*arguments, **options)
        recorded.append([section.name for section in short_section[0].sections])
        return short_section

    monkeypatch.setattr(runs, "record_sections", noted)
    library = SectionLibrary(model, tokens(2), lambda *_: loss, optimizer, CPU)
    short_section = library.model_sections(plan, 3, "keep").sections[-1]
    assert recorded == [["", *(f"blocks.{n}" for n in range(3)), ""], ["", "blocks.0", ""]]
    names = [name for name, _ in independent_blocks(model)]
    arguments = (Workload(model, tokens(3), loss, optimizer), names, [tokens(3)], plan, CPU)
    whole = record_sections(*arguments)[0].sections[-1]
    assert short_section.passes == whole.passes
    assert short_section.backward.times.sum() == whole.backward.times.sum()


@pytest.mark.parametrize(
    ("words", "blocks"), [("single", [3, 1]), ("zero1_torch bf16", [3, 1]), ("ddp bf16", [3, 3])]
)
def test_with_another_loss_the_blocks_are_those_of_the_usual_one(words, blocks, monkeypatch):
    """Unless autocast frees its copies at a moment inside the loss: then the whole model is run."""
    strategy, _, precision = words.partition(" ")
    keys = {"train.global_batch_size": 8, **({"train.precision": precision} if precision else {})}
    plan = make_plan(job_from_keys(strategy, keys), 1 if strategy == "single" else 2, "cpu")
    optimizer = optimizer_factory(job_from_keys("single", {}).optim, 0)
    recorded: list[int] = []

    def noted(*arguments: Any, **options: Any) -> Any:
        recorded.append(len(arguments[1]))
        return record_sections(*arguments, **options)

    def found() -> ModelSections:
        with torch.device("meta"):
            model = gpt()
        losses = {False: CHUNKED, True: PLAIN}
        library = SectionLibrary(model, tokens(2), lambda waits, _: losses[waits], optimizer, CPU)
        return library.model_sections(plan, 2, "keep", waiting=True)

    monkeypatch.setattr(runs, "record_sections", noted)
    short = found()
    assert recorded == blocks
    monkeypatch.setattr(runs.FakeRuns, "_with_other_ends", lambda *_: ())
    whole = found()
    for mine, real in zip(short.sections, whole.sections, strict=True):
        assert (mine.name, mine.tensors) == (real.name, real.tensors)
        if precision != "bf16" or strategy != "ddp":  # simultaneous storages are in any order
            assert mine.passes == real.passes
        assert (mine.forward.nbytes == real.forward.nbytes).all()
        assert (mine.backward.nbytes == real.backward.nbytes).all()
