"""Show the planner's answer: a table, reasons for rejected plans, a JSON document, a plan file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from rich.table import Table

from bigtrain.planner.ask import PlannedAnswer
from bigtrain.planner.evaluate import EvaluatedPlan, RejectedPlan
from bigtrain.units import KIB, MIB, format_bytes, format_count, format_flops, format_seconds

_SHORT = {
    "parameters": "par",
    "frozen": "frozen",
    "gradients": "grad",
    "optimizer": "opt",
    "activations": "act",
    "buffers": "buf",
    "temporary": "temp",
}


WIDE_TABLE = 130
"""The width of a terminal, in characters, that the whole table needs."""


def plans_table(planned: PlannedAnswer, width: int = WIDE_TABLE) -> Table:
    """Return a table of the fastest plans that fit, the fastest first.

    Args:
        planned: the answer.
        width: the width of the terminal in characters. Below `WIDE_TABLE` the table has no columns
            for the recomputed blocks and for the parts of the peak.
    """
    question = planned.question
    table = Table(
        title=f"{question.job.model.name}, {format_count(planned.num_parameters)} parameters, on "
        f"{question.devices} x {question.cluster.device.name}: at most "
        f"{format_bytes(question.limit)} of tensors a rank",
        title_justify="left",
    )
    table.add_column("")
    table.add_column("plan")
    wide = width >= WIDE_TABLE
    shown = ("pp x dp x tp", "micro-batch", *(("recomputed",) if wide else ()), "peak")
    for name in (*shown, *(("parts",) if wide else ()), "step"):
        table.add_column(name, justify="right" if name != "parts" else "left")
    table.add_column(_unit(planned), justify="right")
    table.add_column("MFU", justify="right")
    apart = _differences(planned, planned.result.best)
    if any(apart):
        table.add_column("differs in")
    for number, evaluated in enumerate(planned.result.best, start=1):
        figures = plan_figures(planned, evaluated)
        table.add_row(
            str(number),
            evaluated.label,
            " x ".join(map(str, evaluated.candidate.axes)),
            f"{evaluated.candidate.rows} x {evaluated.candidate.micro_batches}",
            *([recompute_summary(evaluated)] if wide else []),
            format_bytes(evaluated.peak.bytes),
            *([_parts(evaluated)] if wide else []),
            format_seconds(evaluated.seconds.total),
            format_count(figures["targets_per_second"]),
            "-" if figures["mfu"] is None else f"{100 * figures['mfu']:.0f} %",
            *([_short_keys(apart[number - 1])] if any(apart) else []),
        )
    return table


def frontier_table(planned: PlannedAnswer, width: int = WIDE_TABLE) -> Table:
    """Return a table of the Pareto front, from the least time to the least memory.

    Args:
        planned: the answer.
        width: the width of the terminal in characters. Below `WIDE_TABLE` the table has no column
            for the recomputed blocks.
    """
    question, front = planned.question, planned.result.front
    table = Table(
        title=f"{question.job.model.name}, {format_count(planned.num_parameters)} parameters, on "
        f"{question.devices} x {question.cluster.device.name}: no plan has both less memory and "
        "less time",
        title_justify="left",
    )
    wide = width >= WIDE_TABLE
    for name in ("peak", "", "step", "", _unit(planned)):
        table.add_column(name, justify="right")
    table.add_column("plan")
    for name in ("pp x dp x tp", "micro-batch", *(("recomputed",) if wide else ())):
        table.add_column(name, justify="right")
    apart = _differences(planned, front)
    if any(apart):
        table.add_column("differs in")
    table.add_column("take it with")
    for at, evaluated, differing in zip(planned.result.front_limits, front, apart, strict=True):
        memory = evaluated.peak.bytes / front[0].peak.bytes
        time = evaluated.seconds.total / front[0].seconds.total
        table.add_row(
            format_bytes(evaluated.peak.bytes),
            f"{memory:.2f}",
            format_seconds(evaluated.seconds.total),
            f"{time:.2f}",
            format_count(plan_figures(planned, evaluated)["targets_per_second"]),
            evaluated.label,
            " x ".join(map(str, evaluated.candidate.axes)),
            f"{evaluated.candidate.rows} x {evaluated.candidate.micro_batches}",
            *([recompute_summary(evaluated)] if wide else []),
            *([_short_keys(differing)] if any(apart) else []),
            f"--at {at // KIB}KiB",
        )
    return table


def _differences(planned: PlannedAnswer, plans: Sequence[EvaluatedPlan]) -> list[dict[str, Any]]:
    """Return for each plan the options that distinguish it from rows that look the same."""
    shown = [
        (plan.label, *plan.candidate.axes, plan.candidate.rows, recompute_summary(plan))
        for plan in plans
    ]
    return differences(shown, [plan_values(planned, plan)["strategy"] for plan in plans])


def differences(
    shown: Sequence[object], strategies: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Find the options that distinguish rows which look the same.

    Args:
        shown: for each row, its cells. Rows with equal cells look the same.
        strategies: for each row, all options of its strategy, nested by role.

    Returns:
        For each row, the options in which it differs from a row that looks the same, with their
        values. The keys are dotted; the value is None where the row does not have the option.
    """
    leaves = [dict(_leaves(strategy)) for strategy in strategies]
    distinguishing = []
    for row, options in zip(shown, leaves, strict=True):
        same = [others for others, shown_row in zip(leaves, shown, strict=True) if shown_row == row]
        keys = dict.fromkeys(key for others in same for key in others)
        unequal = [k for k in keys if any(others.get(k) != options.get(k) for others in same)]
        distinguishing.append({key: options.get(key) for key in unequal})
    return distinguishing


def _leaves(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _short_keys(values: Mapping[str, Any]) -> str:
    """Return the options as text, with the last word of each key and at most three list items."""
    shown = {
        key.rpartition(".")[2]: (
            " ".join([*map(str, value[:3]), *(["..."] if len(value) > 3 else [])])
            if isinstance(value, list)
            else value
        )
        for key, value in values.items()
    }
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def _unit(planned: PlannedAnswer) -> str:
    return "tokens/s" if planned.setup.data.task.name == "language" else "samples/s"


def _parts(evaluated: EvaluatedPlan) -> str:
    """The three largest parts of the peak on the fullest rank, as text."""
    parts = vars(evaluated.peak.breakdown)
    largest = sorted(parts, key=lambda kind: -parts[kind])[:3]
    where = f" (pp rank {evaluated.fullest_rank})" if evaluated.candidate.pp > 1 else ""
    return " ".join(f"{_SHORT[k]} {format_bytes(parts[k])}" for k in largest if parts[k]) + where


def recompute_summary(evaluated: EvaluatedPlan) -> str:
    """The number of blocks for each recompute policy, as text.

    The text is `none` if all blocks save all activations.
    """
    counts = Counter(evaluated.recomputed.values())
    return ", ".join(f"{count} {choice}" for choice, count in sorted(counts.items())) or "none"


def plan_figures(planned: PlannedAnswer, evaluated: EvaluatedPlan) -> dict[str, Any]:
    """Return the predicted figures of a plan as JSON values.

    They are the bytes of the fullest rank at its peak, the seconds of a step, the targets per
    second over all replicas, and the MFU between 0 and 1. The MFU is None if it would be above 1.
    """
    seconds = evaluated.seconds.total
    mfu = planned.step_flops / seconds / planned.peak_flops
    return {
        "peak_bytes": evaluated.peak.bytes,
        "phase": evaluated.peak.phase,
        "pp_rank": evaluated.fullest_rank,
        "breakdown": evaluated.peak.breakdown.by_kind(),
        "step_seconds": seconds,
        "seconds": {key: round(value, 9) for key, value in vars(evaluated.seconds).items()},
        "targets_per_second": planned.tokens / seconds,
        "mfu": mfu if mfu <= 1 else None,
    }


def figure_caveats(planned: PlannedAnswer) -> list[str]:
    """Return warnings about the figures by which plans were compared, one line each.

    A line appears if the rates were measured on a busy machine, and if an MFU is above 100 %.
    """
    caveat, lines = planned.question.cluster.caveat, []
    if caveat:
        lines.append(
            f"the rates of this machine were measured {caveat}: predicted seconds are too high. "
            "The next run measures them again. On an idle machine, run bigtrain doctor --again"
        )
    if any(plan_figures(planned, plan)["mfu"] is None for plan in planned.result.best):
        lines.append(
            "no MFU is shown where it would be above 100 %: the model's blocks compute faster than "
            f"the measured {format_flops(planned.peak_flops)} of all devices together, which are "
            "too low. Run bigtrain doctor --again on an idle machine"
        )
    return lines


def rejection_lines(planned: PlannedAnswer) -> Iterator[str]:
    """Yield a line for each strategy, on its plan with the lowest peak among those that do not fit.

    The lines are sorted by this peak. A last line counts the plans that a lower bound excludes.
    """
    answer = planned.result
    nearest_miss: dict[str, RejectedPlan] = {}
    for rejected in answer.rejected:
        if rejected.peak is None:
            continue
        label = rejected.candidate.label
        before = nearest_miss.get(label)
        if before is None or (before.peak and rejected.peak.bytes < before.peak.bytes):
            nearest_miss[label] = rejected
    for label, rejected in sorted(nearest_miss.items(), key=lambda pair: _peak(pair[1])):
        candidate = rejected.candidate
        mesh = f"{candidate.mesh}, micro-batch {candidate.rows}"
        yield f"does not fit: {label} ({mesh}): {rejected.reason}"
    if answer.below_bound:
        yield (
            f"{answer.below_bound} plans cannot fit, however they are cut: their parameters, "
            "gradients, optimizer state and saved activations are above the limit"
        )


def _peak(refused: RejectedPlan) -> int:
    return refused.peak.bytes if refused.peak is not None else 0


def search_line(planned: PlannedAnswer) -> str:
    """Return one line on the size of the search and the seconds that it took."""
    answer = planned.result
    return (
        f"{answer.candidates} plans searched in {answer.seconds:.1f} s; the memory of "
        f"{answer.evaluated} was forecast, the others are slower or cannot fit"
    )


def plan_document(planned: PlannedAnswer, margin: str) -> dict[str, Any]:
    """Return the whole answer as JSON values. Bytes are integers, seconds are floats.

    Args:
        planned: the answer.
        margin: the line that `command.make_question` returns.
    """
    question, answer = planned.question, planned.result
    return {
        "model": question.job.model.model_dump(mode="json"),
        "num_parameters": planned.num_parameters,
        "cluster": question.cluster.model_dump(mode="json"),
        "devices": question.devices,
        "memory_bytes": question.memory.nbytes,
        "limit_bytes": question.limit,
        "margin": margin,
        "seconds": planned.seconds_line if answer.best else None,
        "global_batch_size": question.global_batch_size,
        "candidates": answer.candidates,
        "judged": answer.evaluated,
        "search_seconds": answer.seconds,
        "plans": _rows(planned, answer.best),
        "front": _rows(planned, answer.front),
        "front_limits": answer.front_limits,
        "not_fitting": list(rejection_lines(planned)),
    }


def _row(planned: PlannedAnswer, plan: EvaluatedPlan) -> dict[str, Any]:
    return {"label": plan.label, **plan_values(planned, plan)}


def _rows(planned: PlannedAnswer, plans: Sequence[EvaluatedPlan]) -> list[dict[str, Any]]:
    """Return plans as JSON values.

    A plan that looks like another plan of the list has the key `differs`, with the options that
    distinguish them; see `_differences`.
    """
    differing = _differences(planned, plans)
    rows = [_row(planned, plan) for plan in plans]
    return [
        {**row, "differs": plan} if plan else row for row, plan in zip(rows, differing, strict=True)
    ]


def plan_values(planned: PlannedAnswer, evaluated: EvaluatedPlan) -> dict[str, Any]:
    """Return a plan as YAML values, which `bigtrain train --plan` reads."""
    strategy = evaluated.job.strategy.model_dump(mode="json", exclude_defaults=True)
    strategy["name"] = "planned"
    return {
        "mesh": dict(zip(("pp", "dp", "tp"), evaluated.candidate.axes, strict=True)),
        "strategy": strategy,
        "train": {
            "global_batch_size": evaluated.plan.batch.global_size,
            "micro_batch_size": evaluated.candidate.rows,
            "accumulation_steps": None,
            "precision": evaluated.plan.precision,
        },
        "predicted": plan_figures(planned, evaluated),
    }


def plan_text(planned: PlannedAnswer, evaluated: EvaluatedPlan, command: str) -> str:
    """Return the text of a plan file, which users may read and change.

    Args:
        planned: the answer.
        evaluated: the plan to write, from the answer.
        command: the command line that makes the file; it is the first line of the text.
    """
    peak, step = format_bytes(evaluated.peak.bytes), format_seconds(evaluated.seconds.total)
    head = (
        f"# {command}\n# {evaluated.label}: predicted peak {peak} on a rank, {step} a step on "
        f"{planned.question.cluster.name}.\n"
        "# bigtrain train --plan follows this file; it ignores `predicted`.\n"
    )
    values = plan_values(planned, evaluated)
    return head + yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)


def no_fit_lines(planned: PlannedAnswer) -> list[str]:
    """Return lines for an answer without plans: the smallest peak, and changes that may help.

    The changes are a larger memory or cap, more devices, or a model with fewer blocks. The
    candidate with the smallest peak is searched first, which may take a while.
    """
    question = planned.question
    smallest = planned.search.smallest()
    peak = None if smallest is None else smallest.peak
    if smallest is None or peak is None:
        return [
            f"plan: nothing fits {format_bytes(question.limit)}, and no plan could be forecast."
        ]
    breakdown = vars(peak.breakdown)
    kind = max(breakdown, key=lambda part: breakdown[part])
    needed = question.memory_for(peak.bytes, smallest.candidate.engine)
    option = "--cap " if question.memory.reserved is None else "--memory "
    option = question.peak_option or option
    largest = planned.search.evaluator.most_blocks(smallest.candidate, question.limit)
    smaller = ""
    if largest is not None:
        smaller = (
            f", or a model with {largest[0]} of its {planned.search.space.num_blocks} blocks "
            f"({format_count(largest[1])} parameters), which fits"
        )
    return [
        f"plan: no plan fits {format_bytes(question.limit)} of tensors on a rank of "
        f"{question.devices} devices.",
        f"The smallest peak is {format_bytes(peak.bytes)}, with {smallest.candidate.label} "
        f"({smallest.candidate.mesh}, micro-batch {smallest.candidate.rows}), of which {kind} are "
        f"{format_bytes(breakdown[kind])}.",
        f"Use {option}{-(-needed // MIB)}MiB, or more --devices{smaller}.",
    ]
