"""A picture of the Pareto front: the plans for which no other plan is both smaller and faster."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from bigtrain.planner.ask import PlannedAnswer
from bigtrain.planner.evaluate import EvaluatedPlan
from bigtrain.planner.show import recompute_summary
from bigtrain.report.plot_style import plot_style
from bigtrain.units import GIB, MIB

_FRONT, _OTHER, _LIMIT = "#0072B2", "#A0A0A0", "#D55E00"
"""Colours of Okabe and Ito's palette."""


def write_front(path: Path, planned: PlannedAnswer) -> None:
    """Draw the best plans and the Pareto front into a file.

    Args:
        path: the file to write, whose name ends in .svg or .png.
        planned: an answer with at least one plan.
    """
    with plot_style():
        figure = front_figure(planned)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def front_figure(planned: PlannedAnswer) -> Figure:
    """Return a figure with the fullest rank's peak on the x axis and seconds of a step on the y."""
    answer, question = planned.result, planned.question
    unit, name = (GIB, "GiB") if question.limit >= GIB else (MIB, "MiB")
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    axes = figure.add_subplot()
    others = [plan for plan in answer.best if plan not in answer.front]
    axes.scatter(*_points(others, unit), color=_OTHER, s=22, label="dominated")
    axes.plot(*_points(answer.front, unit), color=_FRONT, marker="o", label="Pareto front")
    for plan in answer.front:
        mesh = plan.candidate.mesh
        text = f"{plan.label}\n{mesh}, recomputed: {recompute_summary(plan)}"
        at = (plan.peak.bytes / unit, plan.seconds.total)
        axes.annotate(text, at, xytext=(6, 6), textcoords="offset points", fontsize=7)
    axes.axvline(question.limit / unit, color=_LIMIT, linestyle="--", linewidth=1)
    axes.text(question.limit / unit, axes.get_ylim()[1], " limit", color=_LIMIT, va="top")
    axes.set_xlabel(f"predicted peak of the fullest rank ({name})")
    axes.set_ylabel("predicted step (s)")
    axes.set_title(f"{question.job.model.name} on {question.devices} x {question.cluster.name}")
    axes.margins(x=0.18, y=0.12)
    axes.legend(frameon=False)
    return figure


def _points(plans: list[EvaluatedPlan], unit: int) -> tuple[list[float], list[float]]:
    return [plan.peak.bytes / unit for plan in plans], [plan.seconds.total for plan in plans]
