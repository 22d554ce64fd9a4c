"""`--strategy auto`: the planner chooses the plan of a run, and explains its choice."""

from __future__ import annotations

import os
from collections.abc import Iterator

from bigtrain.assembly.make_plan import device_type_of
from bigtrain.devices import device_names
from bigtrain.errors import ConfigError
from bigtrain.job.arguments import TrainOptions
from bigtrain.job.load import load_job
from bigtrain.job.schema import Job, Role, RoleConfig, StrategyConfig
from bigtrain.machine.cluster import Cluster, cluster_names, load_cluster
from bigtrain.machine.local_cluster import cached_local_cluster
from bigtrain.planner.ask import (
    PlannedAnswer,
    Question,
    ask,
    engine_margins,
    limit_on_peaks,
    rank_limits,
)
from bigtrain.planner.show import no_fit_lines, recompute_summary, rejection_lines
from bigtrain.ranks.launcher_env import RankInfo
from bigtrain.units import format_bytes

AUTO_STRATEGY = "auto"
AUTO_ENGINES = ("torch",)
"""The engines to choose from: those with the most accurate forecasts."""


def plan_job(options: TrainOptions, placement: RankInfo) -> tuple[Job, list[str]]:
    """Return the job of this command line with the chosen plan, and lines that explain the choice.

    With `--strategy auto` all techniques are chosen. With `strategy.budget` and other words, only
    what these words leave open is chosen.

    Every rank plans by itself and gets the same result. The rates are those that `bigtrain doctor`
    stored on this node, or those of a cluster file, and one rank times the blocks for all.

    Args:
        options: the options of the command line, with the strategy `auto` or a budget.
        placement: this rank's placement; the plan is for its world size.

    Raises:
        ConfigError: the job cannot be loaded, a plan file or no global batch size is given, or no
            plan fits.
    """
    is_auto = options.strategy == AUTO_STRATEGY
    if options.plan is not None:
        asked = "--strategy auto" if is_auto else "strategy.budget"
        raise ConfigError(
            f"{asked} chooses a plan, and --plan {options.plan} names one. Leave one of them out."
        )
    job = load_job(options.config, "single" if is_auto else options.strategy, options.overrides)
    cluster, rates_source, measured = _cluster(device_type_of(job), placement)
    cap = None if job.memory.cap is None else str(job.memory.cap)
    memory, reserved_line = rank_limits(cluster, memory=None, cap=cap)
    shares, margin_line = engine_margins(AUTO_ENGINES)
    samples = job.train.global_batch_size
    if samples is None:
        raise ConfigError(
            f"{AUTO_STRATEGY if is_auto else 'strategy.budget'}: the planner divides the global "
            "batch into micro-batches, and train.global_batch_size is not given. Use "
            "train.global_batch_size=32."
        )
    budget, within = job.strategy.budget, None if is_auto else _fixed(job.strategy)
    if budget is not None:
        memory, shares = limit_on_peaks(memory, shares, "strategy.budget=", budget)
        margin_line = "a budget is compared with predicted peaks, without a margin"
    planned = ask(
        Question(
            job=job.model_copy(
                update={"strategy": job.strategy.model_copy(update={"budget": None})}
            ),
            cluster=cluster,
            devices=placement.world_size,
            memory=memory,
            global_batch_size=samples,
            pp=job.mesh.pp,
            dp=None if job.mesh.dp == -1 else job.mesh.dp,
            tp=job.mesh.tp,
            rows=job.train.micro_batch_size,
            at_hand=measured,
            peak_option="" if budget is None else "strategy.budget=",
            within=within,
            margins=shares,
        )
    )
    if not planned.result.best:
        raise ConfigError(" ".join(no_fit_lines(planned)))
    best = planned.result.best[0]
    title, chooser = (AUTO_STRATEGY, "auto") if is_auto else (job.strategy.name, "budget")
    named = best.job.strategy.model_copy(update={"name": f"{title}: {best.label}"})
    return best.job.model_copy(update={"strategy": named}), [
        *_reasons(planned, chooser),
        f"{chooser}: rates {rates_source}{_also(planned.timed)}; {reserved_line}; {margin_line}",
    ]


def _fixed(strategy: StrategyConfig) -> dict[Role, RoleConfig]:
    """Return the techniques that a budget does not choose.

    Raises:
        ConfigError: the strategy names something that the budget chooses.
    """
    roles = strategy.roles()
    chosen = {"recompute": "which blocks recompute", "accumulate": "the micro-batches"}
    for role, what in chosen.items():
        if role in roles:
            raise ConfigError(
                f"strategy.budget chooses {what}, and so does {strategy.name} (strategy.{role}). "
                "Leave out strategy.budget, or that word of --strategy."
            )
    return roles


def _also(words: str) -> str:
    return f", {words}" if words else ""


def _reasons(planned: PlannedAnswer, chooser: str) -> Iterator[str]:
    first, *others = planned.result.best
    candidate = first.candidate
    where = f" on pp rank {first.fullest_rank}" if candidate.pp > 1 else ""
    yield (
        f"{chooser}: {first.label} ({candidate.mesh}, micro-batch {candidate.rows} x "
        f"{candidate.micro_batches}, recomputed: {recompute_summary(first)}): predicted peak "
        f"{format_bytes(first.peak.bytes)}{where} of {format_bytes(planned.question.limit)}, "
        f"{first.seconds.total:.3g} s a step"
    )
    for alternative in [o for o in others if o.candidate.label != candidate.label][:2]:
        yield (
            f"{chooser}: next {alternative.label} ({alternative.candidate.mesh}): "
            f"{format_bytes(alternative.peak.bytes)}, {alternative.seconds.total:.3g} s a step"
        )
    for line in [*rejection_lines(planned)][:2]:
        yield f"{chooser}: {line}"


def _cluster(device_type: str, placement: RankInfo) -> tuple[Cluster, str, bool]:
    """Return the cluster of this run, by stored rates or from a cluster file.

    Nothing is measured, because each rank would measure other rates.

    Returns:
        The cluster, the source of its rates, and whether they were measured on this machine.
    """
    ranks = placement.local_world_size
    known = cached_local_cluster(ranks, device_type) if placement.one_node else None
    if known is not None:
        return known, f"measured by bigtrain doctor {known.caveat}".rstrip(), True
    cluster = load_cluster(_likely(device_type))
    if device_type == "cpu":
        host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        device = cluster.device.model_copy(update={"memory": host_bytes // ranks})
        node = cluster.node.model_copy(update={"devices": ranks, "host_memory": host_bytes})
        cluster = cluster.model_copy(update={"device": device, "node": node})
    return (
        cluster,
        f"of configs/clusters/{cluster.name}.yaml (bigtrain doctor measures this machine)",
        False,
    )


def _likely(device_type: str) -> str:
    """The name of the first cluster file that matches this kind of device, or else h100-node."""
    if device_type == "cpu":
        return "cpu"
    device_name = device_names()[0].lower()
    for name in cluster_names():
        if name.partition("-")[0] in device_name:
            return name
    return "h100-node"
