"""Forecast the file's plan, and search for a better plan on the same devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bigtrain.assembly.make_plan import make_plan
from bigtrain.core.registry import make_technique
from bigtrain.engine.setup import check_job, open_setup
from bigtrain.errors import ConfigError, unquoted_word
from bigtrain.explain.request import ToolRequest
from bigtrain.explain.tools.deepspeed_file import write_json
from bigtrain.job.load import load_job
from bigtrain.job.schema import Job, Role, RoleConfig
from bigtrain.machine.cluster import Cluster
from bigtrain.memory.timeline import Peak
from bigtrain.planner.ask import PlannedAnswer, Question, ask, engine_margins, rank_limits
from bigtrain.planner.evaluate import EvaluatedPlan
from bigtrain.planner.show import no_fit_lines
from bigtrain.report.dry_run import fullest_rank, predict_ranks
from bigtrain.timing.run_seconds import forecast_on
from bigtrain.timing.step_time import StepTimer

FASTER = 0.98
"""A plan is better if it takes at most this share of the seconds of the file's plan."""
SMALLER = 0.9
"""A plan is also better if it takes at most this share of the memory, and no more seconds."""


@dataclass(frozen=True)
class Outlook:
    """The predicted peak and seconds of one plan."""

    label: str
    """The words of the strategy."""
    words: tuple[str, ...]
    """Options and keys that run the plan, to write after the name of the script."""
    peak: Peak | None
    """The peak of the fullest rank; None without a forecast."""
    seconds: float | None
    """Seconds of an optimizer step; None without a forecast."""
    note: str = ""
    """Why the peak or the seconds are missing; empty if neither is."""

    @property
    def breakdown(self) -> dict[str, int]:
        """Bytes at the peak, by kind of tensor; empty without a forecast."""
        return {} if self.peak is None else self.peak.breakdown.by_kind()


@dataclass(frozen=True)
class Better:
    """A better plan than the file's, if the planner has found one."""

    plan: Outlook | None
    """The better plan; None if there is none."""
    reason: str
    """Why the plan is better, or why there is no better plan."""
    limit: int
    """Bytes that the tensors of a rank may take."""


def forecast_file(
    request: ToolRequest, ranks: int, cluster: Cluster, words: Sequence[str], pasted: Sequence[str]
) -> Outlook:
    """Forecast the plan of a file.

    Args:
        request: the request, with settled strategy and batch. If the model refuses a key, the key
            is removed and a finding is added.
        ranks: the number of ranks.
        cluster: the devices; their rates determine the seconds.
        words: the keys of the job that is forecast; see `settle.forecast_words`.
        pasted: the keys of the job to run, without strategy and batch; see
            `settle.pasted_words`.

    Returns:
        The forecast. If it has no peak, its note contains the reason.
    """
    for _ in range(_MOST_TRIES):
        own = _own_words(request, words, pasted)
        try:
            peak, seconds, note = _forecast(request, ranks, cluster, words)
            return Outlook(request.words, own, peak, seconds, note)
        except ConfigError as error:
            reason = str(error)
            # A refusal begins with the key, or has it in parentheses after a parameter.
            refused = next(
                (key for key in _REPLACED if reason.startswith(key) or f"({key}" in reason), None
            )
            if refused is None or refused not in request.keys:
                return Outlook(request.words, own, None, None, reason)
            replacement = _REPLACED[refused]
            said = reason.partition(". Use ")[0].rstrip(".")
            more = "without it" if replacement is None else f"with {replacement}"
            written = request.keys.pop(refused).written
            request.find("not forecast", written, f"{said}; it is forecast {more}")
            words, pasted = (_without(refused, each, replacement) for each in (words, pasted))
    return Outlook(request.words, own, None, None, reason)


_REPLACED: dict[str, str | None] = {
    "optim.name": "optim.name=adamw",
    "optim.implementation": None,
    "optim.master_weights": None,
    "model.lora.targets": None,
    "model.lora.modules_to_save": None,
    "model.lora.quantize": None,
    "model.chunked_loss": None,
}
"""Keys that a strategy or a model may refuse, each with the override that replaces the key."""
_MOST_TRIES = 4


def _without(key: str, words: Sequence[str], replacement: str | None) -> list[str]:
    kept = [word for word in words if not word.startswith(f"{key}=")]
    return kept if replacement is None else [*kept, replacement]


def _forecast(
    request: ToolRequest, ranks: int, cluster: Cluster, words: Sequence[str]
) -> tuple[Peak | None, float | None, str]:
    with TemporaryDirectory(prefix="bigtrain-") as folder:
        strategy, words = request.words, list(words)
        if request.deepspeed is not None:
            path = write_json(Path(folder) / "engine.json", request.deepspeed)
            words.append(f"strategy.deepspeed={path}")
        job = load_job(None, strategy, words)
        plan = make_plan(job, ranks, cluster.device.kind, one_host=ranks <= cluster.node.devices)
        setup = open_setup(job, plan, check_job(job))
        predicted = predict_ranks(setup)
        fullest = fullest_rank(setup, predicted)
        if fullest is None:
            notes = (rank.prediction.note for rank in predicted)
            return None, None, next((note for note in notes if note), "no reason is known")
        try:
            step = forecast_on(StepTimer(cluster), job, setup.resolved, setup.workload)
        except ConfigError as error:
            return fullest.peak, None, f"seconds: {error}"
        return fullest.peak, step.seconds, step.source if step.seconds is None else ""


def _own_words(
    request: ToolRequest, words: Sequence[str], pasted: Sequence[str]
) -> tuple[str, ...]:
    """Return the options and keys that run the file's plan."""
    batch = [
        unquoted_word(key, request.keys[key].value)
        for key in ("train.global_batch_size", "train.micro_batch_size")
    ]
    own_keys = ("mesh.", "model.chunked_loss")
    mesh = [word for word in words if word.startswith(own_keys)]
    file = request.usable_file
    if file is not None and request.deepspeed is not None:
        said = {key for key, asked in request.keys.items() if asked.written}
        own = [word for word in pasted if word.partition("=")[0] not in said]
        batch = [word for word in batch if word.partition("=")[0] not in said]
        return (f"strategy.deepspeed={file}", *own, *mesh, *batch)
    return ("--strategy", request.words, *pasted, *mesh, *batch)


def find_better(
    file: Outlook,
    job: Job,
    ranks: int,
    cluster: Cluster,
    memory: str | None,
    pasted: Sequence[str],
) -> Better:
    """Search for a better plan for the same model, batch and devices.

    A plan is better if it is faster, smaller, or fits the devices where the file's plan does not.

    Args:
        file: the forecast of the file's plan.
        job: the job without a strategy.
        ranks: the number of devices.
        cluster: the devices.
        memory: the memory of a device, a size such as 40GiB; None for the cluster's.
        pasted: the keys of the job to run, without strategy and batch; see
            `settle.pasted_words`.

    Raises:
        ConfigError: a size is wrong, or the cluster has too few devices.
    """
    limits, _ = rank_limits(cluster, memory=memory, cap=None)
    margins, _ = engine_margins(("torch", "deepspeed"), cluster.device)
    question = Question(
        job=job,
        cluster=cluster,
        devices=ranks,
        memory=limits,
        global_batch_size=job.train.global_batch_size or ranks,
        margins=margins,
    )
    planned = ask(question)
    if not planned.result.best:
        return Better(None, " ".join(no_fit_lines(planned)), question.limit)
    found, reason = _choose(file, planned)
    if found is None:
        return Better(None, reason, question.limit)
    words = (*plan_words(found, pasted),)
    outlook = Outlook(found.label, words, found.peak, found.seconds.total)
    return Better(outlook, reason, question.limit)


def _choose(file: Outlook, planned: PlannedAnswer) -> tuple[EvaluatedPlan | None, str]:
    """Return a better plan and the reason, or None and why no plan is better."""
    best, limit = planned.result.best[0], planned.question.limit
    if file.peak is None:
        return best, "the file's plan could not be forecast"
    if file.peak.bytes > limit:
        return best, "it fits, and the file's plan does not"
    if file.seconds is None or best.seconds.total <= FASTER * file.seconds:
        return best, "it is faster"
    within = [
        plan
        for plan in (*planned.result.front, *planned.result.best)
        if plan.seconds.total <= file.seconds and plan.peak.bytes <= SMALLER * file.peak.bytes
    ]
    if within:
        return min(within, key=lambda plan: plan.peak.bytes), "it takes less memory, and no longer"
    return None, "no plan on these devices is faster, or as fast with less memory"


def plan_words(found: EvaluatedPlan, pasted: Sequence[str]) -> list[str]:
    """Return the options and keys that run a plan, with presets where they set the same values.

    Args:
        found: the plan.
        pasted: the keys of the job to run, without strategy and batch.
    """
    label, roles = found.label, found.job.strategy.roles()
    named = _named_roles(label)
    if not named.keys() <= roles.keys():
        label, named = "single", _named_roles("single")
    rest = {
        role: config.model_dump(mode="json")
        for role, config in roles.items()
        if role not in named or make_technique(role, config) != make_technique(role, named[role])
    }
    sizes = dict(zip(("pp", "dp", "tp"), found.candidate.axes, strict=True))
    batch = found.plan.batch
    return [
        *("--strategy", label),
        *[unquoted_word(f"strategy.{role}", options) for role, options in rest.items()],
        *pasted,
        *[f"mesh.{axis}={size}" for axis, size in sizes.items() if axis != "dp" and size > 1],
        f"train.global_batch_size={batch.global_size}",
        f"train.micro_batch_size={batch.micro_size}",
    ]


def _named_roles(label: str) -> Mapping[Role, RoleConfig]:
    """Return the roles that the presets of a label set, or `single`'s roles for unknown presets."""
    try:
        return load_job(None, label).strategy.roles()
    except ConfigError:
        return load_job(None, "single").strategy.roles()
