"""All that the golden files need from the product: its imports, and calls that return plain values.

Nothing else under tests/golden imports bigtrain.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bigtrain.assembly.make_plan import make_plan
from bigtrain.assembly.resolve import resolve_plan
from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.workload import Workload
from bigtrain.data import open_data
from bigtrain.data.loader import MicroBatch
from bigtrain.engine.setup import check_job, open_setup
from bigtrain.errors import BigtrainError
from bigtrain.job.arguments import plan_arguments
from bigtrain.job.load import job_from_keys, load_job, override_job
from bigtrain.losses.loss import CrossEntropy
from bigtrain.machine.cluster import load_cluster
from bigtrain.models import check_model
from bigtrain.optim.factory import optimizer_factory
from bigtrain.planner.ask import ask
from bigtrain.planner.command import make_question
from bigtrain.planner.show import no_fit_lines, plan_document, plan_text
from bigtrain.prediction.predict import collect_advice, forecast_rank, forecast_step
from golden.nets import NETS

GPT = [
    "model.name=gpt",
    "model.args={num_layers: 5, width: 32, num_heads: 2, sequence_length: 16}",
    "data.name=synthetic",
    "data.args={kind: language, vocabulary: 61, samples: 64}",
]
"""The job of `gpt`, the only net here that the product provides."""


def refused(call: Callable[[], object]) -> str | None:
    """The message with which a call refuses its input; None if it accepts."""
    try:
        call()
    except BigtrainError as error:
        return f"{type(error).__name__}: {error}"
    except SystemExit as error:
        return f"SystemExit: {error.code}"
    return None


def rank_forecasts(
    net: str, strategy: str, ranks: int, keys: Mapping[str, Any], share: float | None = None
) -> dict[str, Any]:
    """Forecasts of a run before it is built, for each pp rank, or the reason for a refusal.

    Args:
        net: 'gpt', which is opened as `bigtrain train` does, or one of NETS.
        strategy: a preset.
        ranks: number of ranks.
        keys: dotted keys of the job.
        share: a share of the peak without a budget, used as the budget of recomputation.
    """
    try:
        if share is None:
            return _forecasts(net, strategy, ranks, keys)
        whole = max(_peaks(net, strategy, ranks, keys))
        return _forecasts(
            net, strategy, ranks, {**keys, "strategy.recompute": {"budget": int(share * whole)}}
        )
    except BigtrainError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    except Exception as error:  # noqa: BLE001 - a changed failure must show, too
        return {"failed": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}


def _peaks(net: str, strategy: str, ranks: int, keys: Mapping[str, Any]) -> list[int]:
    resolved, workload = _resolved(net, strategy, ranks, keys)
    forecasts = [
        forecast_rank(resolved, workload, rank).forecast for rank in range(resolved.plan.pp)
    ]
    return [forecast.peak().bytes for forecast in forecasts if forecast is not None]


def _resolved(
    net: str, strategy: str, ranks: int, keys: Mapping[str, Any]
) -> tuple[ResolvedPlan, Workload]:
    """The plan with its choices, and the input of a forecast."""
    if net == "gpt":
        words = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
        job = load_job("default", strategy, [*GPT, *words])
        check_job(job)
        parts = open_setup(job, make_plan(job, ranks, "cpu"))
        return parts.resolved, parts.workload
    make, batch = NETS[net]
    job = job_from_keys(strategy, keys)
    plan = make_plan(job, ranks, "cpu")
    rows, loss = plan.batch.micro_size, CrossEntropy()
    inputs, targets = batch(rows)
    example = MicroBatch(inputs, targets, loss.count(targets), rows)
    workload = Workload(make(), example, loss, optimizer_factory(job.optim, 0))
    return resolve_plan(plan, workload), workload


def _forecasts(net: str, strategy: str, ranks: int, keys: Mapping[str, Any]) -> dict[str, Any]:
    resolved, workload = _resolved(net, strategy, ranks, keys)
    plan, batch = resolved.plan, resolved.plan.batch
    document: dict[str, Any] = {
        "mesh": f"pp {plan.pp} x dp {plan.dp}, micro-batch {batch.micro_size} x "
        f"{batch.accumulation_steps}"
    }
    if resolved.layout is not None:
        document["layout"] = list(resolved.layout.lines())
    if resolved.notes:
        document["settled"] = list(resolved.notes)
    saved_names = _saved_by_modules(resolved)
    if saved_names:
        document["keeps"] = saved_names
    for rank in range(plan.pp):
        document |= _rank(plan, rank, forecast_rank(resolved, workload, rank))
    return document


def _saved_by_modules(resolved: ResolvedPlan) -> dict[str, str]:
    """The names of the modules by the choice of what they save."""
    names_by_choice: dict[str, list[str]] = {}
    for name, choice in resolved.policies.items():
        names_by_choice.setdefault(choice, []).append(name)
    return {choice: " ".join(names) for choice, names in sorted(names_by_choice.items())}


def own_peaks(net: str, strategy: str, ranks: int, keys: Mapping[str, Any]) -> list[int]:
    """The peak of each replica of a model that is not cut, in bytes."""
    resolved, workload = _resolved(net, strategy, ranks, keys)
    (profile,) = forecast_rank(resolved, workload).profiles
    return [peak.bytes for peak in _replica_peaks(profile, resolved.plan)]


def _replica_peaks(profile: Any, plan: Any) -> list[Any]:
    """The peak of each replica."""
    return [
        forecast_step(profile, replace(plan, dp_rank=replica)).peak() for replica in range(plan.dp)
    ]


def _rank(plan: Any, rank: int, predicted: Any) -> dict[str, Any]:
    at = f"rank {rank}"
    if predicted.forecast is None:
        return {f"{at} note": predicted.note}
    peak = _peak(predicted.forecast.peak())
    document: dict[str, Any] = {at: peak}
    profiles = predicted.profiles
    document[f"{at} profiles"] = [_profile(profile) for profile in profiles]
    if "cut" not in plan.techniques:
        peaks = [_peak(one) for one in _replica_peaks(profiles[0], plan)]
        if any(one != peak for one in peaks):
            document["replicas"] = peaks
        lines = collect_advice(profiles[0], plan)
        if lines:
            document["advice"] = lines
    sent = _traffic(plan, profiles)
    if any(sent):
        document[f"{at} traffic"] = sent
    gpu_traffic = _traffic(replace(plan, device_type="cuda"), profiles)
    if gpu_traffic != sent:
        document[f"{at} traffic of a GPU"] = gpu_traffic
    return document


def _peak(peak: Any) -> str:
    parts = ", ".join(f"{kind} {nbytes}" for kind, nbytes in vars(peak.breakdown).items() if nbytes)
    return f"{peak.bytes} in {peak.phase}: {parts}"


def _profile(profile: Any) -> str:
    return (
        f"parameters {profile.parameter_bytes}, gradients {profile.gradient_bytes}, optimizer "
        f"{profile.optimizer_bytes}, buffers {profile.buffer_bytes}, batch {profile.batch_bytes}"
    )


def _traffic(plan: Any, profiles: Sequence[Any]) -> list[list[str]]:
    """For each stage, the traffic that the techniques state, in their order."""
    return [
        [
            f"{traffic.kind} {traffic.nbytes} in {traffic.calls}, each {traffic.every}, "
            f"beside {traffic.overlaps}, ranks {traffic.ranks} by {traffic.stride}"
            for technique in plan.in_order
            for traffic in technique.traffic(profile, plan)
        ]
        for profile in profiles
    ]


def planner_document(arguments: Sequence[str]) -> dict[str, Any]:
    """The document of `bigtrain plan --json`, the file of the best plan, and the advice if
    none fits.
    """
    options = plan_arguments([*arguments])
    job = load_job(options.job, "single", options.overrides)
    question, margin = make_question(job, load_cluster(options.cluster), options)
    planned = ask(question)
    document = json.loads(json.dumps(plan_document(planned, margin)))
    if planned.result.best:
        document["file"] = plan_text(planned, planned.result.best[0], "bigtrain plan")
    else:
        document["nothing fits"] = no_fit_lines(planned)
    return document


def loaded(words: Sequence[str], config: str | None, strategy: str | None) -> str | None:
    """The refusal of a job's words and file names."""
    return refused(lambda: load_job(config, strategy, words))


def changed(strategy: str, words: Sequence[str]) -> str | None:
    """The refusal of words that change a job."""
    return refused(lambda: override_job(job_from_keys(strategy, {}), words))


def planned(strategy: str, keys: Mapping[str, Any], ranks: int) -> str | None:
    """The refusal of a plan."""
    return refused(lambda: make_plan(job_from_keys(strategy, keys), ranks, "cpu"))


def opened(strategy: str, words: Sequence[str], ranks: int) -> str | None:
    """The refusal of a job as `bigtrain train` opens it, without the planner's options."""

    def call() -> None:
        job = load_job("default", strategy, words)
        check_job(job)
        open_setup(job, make_plan(job, ranks, "cpu"))

    return refused(call)


def modelled(name: str, args: Mapping[str, Any]) -> str | None:
    """The refusal of a model's arguments."""
    return refused(lambda: check_model(name, args))


def sourced(name: str, args: Mapping[str, Any]) -> str | None:
    """The refusal of a data source's arguments."""
    return refused(lambda: open_data(name, None, args, seed=0))


def clustered(path: str) -> str | None:
    """The refusal of a cluster's file."""
    return refused(lambda: load_cluster(path))


def unplannable(arguments: Sequence[str]) -> str | None:
    """The refusal of the planner's arguments."""
    return refused(lambda: planner_document(arguments))
