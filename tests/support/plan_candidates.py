"""Candidates of the planner by the names of presets and schedules."""

from __future__ import annotations

from collections.abc import Iterator

from bigtrain.core.variants import Variant, preset_options
from bigtrain.errors import ConfigError
from bigtrain.planner.ask import Opened, PlannedAnswer, Question, ask, open_evaluator
from bigtrain.planner.evaluate import EvaluatedPlan
from bigtrain.planner.search import PlanSearch
from bigtrain.planner.space import Candidate

GPT = [
    "model.name=gpt",
    "model.args={num_layers: 4, width: 64, num_heads: 4, sequence_length: 32}",
    "data.name=synthetic",
    "data.args={kind: language}",
    "train.global_batch_size=8",
    "checkpoint.at_end=false",  # with a model this small, a save would be the peak
]
"""The words of a job to plan."""


_opened: dict[str, Opened] = {}


def ask_with_shared_model(question: Question) -> PlannedAnswer:
    """Answer a question with the sections that an earlier question of the same job has made."""
    key = repr((question.job, question.cluster, question.devices > 1, question.margins))
    if key not in _opened:
        _opened[key] = open_evaluator(question)
    return ask(question, _opened[key])


def candidate_of(
    pp: int,
    dp: int,
    preset: str,
    rows: int,
    micro_batches: int,
    schedule: str | None = None,
    stages_per_rank: int = 1,
    offload: str | None = None,
    shard_ranks: int | None = None,
) -> Candidate:
    """The candidate with these words, as the techniques offer it."""
    options = {"engine": "deepspeed", **preset_options("replicate", preset)}
    if options["name"] != "zero":
        options = {"name": options["name"]}
    if shard_ranks is not None:
        options, preset = {**options, "shard_ranks": shard_ranks}, f"hybrid_{shard_ranks}"
    replicate = Variant(preset, options, str(options.get("engine", "torch")))
    cut = None
    if schedule is not None:
        is_interleaved = schedule.startswith("interleaved")
        more = {"stages_per_rank": stages_per_rank} if is_interleaved else {}
        words = {"zbv_zero_bubble": "zbv", "interleaved_zero_bubble": "zero_bubble"}
        label = words.get(schedule, schedule) + (f"_{stages_per_rank}" * (stages_per_rank > 2))
        cut = Variant(label, {"name": "pipeline", "schedule": schedule, **more})
    offload_variant = None
    if offload is not None:
        offload_variant = Variant(f"offload_{offload}", {"optimizer": offload})
    return Candidate(pp, dp, replicate, rows, micro_batches, cut, offload_variant)


def every_plan(
    search: PlanSearch, limit: int, *, with_offload: bool = False
) -> Iterator[EvaluatedPlan]:
    """Evaluate every candidate and yield those that fit; assert that no bound exceeds its
    figures.
    """
    evaluator, bounds = search.evaluator, search.bounds
    space = search.space
    tiers = (False, True) if with_offload else (False,)
    for candidate in (one for tier in tiers for one in space.candidates(fallback_tier=tier)):
        try:
            plan = evaluator.plan_of(candidate)
            least = bounds.least_seconds(candidate)
        except ConfigError:  # a technique refuses it
            continue
        evaluated = evaluator.evaluate(candidate, plan, limit)
        if isinstance(evaluated, EvaluatedPlan):
            most = evaluated.seconds.total * (1 + 1e-9)
            assert least <= most
            assert bounds.even_seconds(candidate, plan) <= most
            assert bounds.kept_seconds(candidate, plan) <= most
            assert bounds.least_bytes(candidate, plan) <= evaluated.peak.bytes
            assert bounds.floor_bytes(candidate, plan) <= evaluated.peak.bytes
            assert evaluated.peak.bytes <= limit
            yield evaluated
