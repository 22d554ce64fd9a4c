"""The front of memory and time as a picture: plans than which none is both smaller and faster."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from bigtrain.planner.ask import PlannedAnswer
from bigtrain.planner.evaluate import EvaluatedPlan
from bigtrain.planner.show import recompute_summary
from bigtrain.report.plot_style import plot_style
from bigtrain.units import GIB, MIB

_FRONT, _OTHER, _LIMIT = "#0072B2", "#A0A0A0", "#D55E00"
"""Of the palette of Okabe and Ito."""


def write_front(path: Path, planned: PlannedAnswer) -> None:
    """Draw every plan that was told of, and the front through those that no other beats.

    Args:
        path: ends in .svg or .png.
        planned: has at least one plan.
    """
    with plot_style():
        figure = front_figure(planned)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def front_figure(planned: PlannedAnswer) -> Figure:
    """The figure: peak memory of the fullest rank to the right, seconds of a step upwards."""
    answer, question = planned.result, planned.question
    unit, name = (GIB, "GiB") if question.limit >= GIB else (MIB, "MiB")
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    axes = figure.add_subplot()
    others = [one for one in answer.best if one not in answer.front]
    axes.scatter(*_places(others, unit), color=_OTHER, s=22, label="slower, or holds more")
    axes.plot(*_places(answer.front, unit), color=_FRONT, marker="o", label="none beats these")
    for one in answer.front:
        mesh = one.candidate.mesh
        said = f"{one.label}\n{mesh}, again: {recompute_summary(one)}"
        at = (one.peak.bytes / unit, one.seconds.total)
        axes.annotate(said, at, xytext=(6, 6), textcoords="offset points", fontsize=7)
    axes.axvline(question.limit / unit, color=_LIMIT, linestyle="--", linewidth=1)
    axes.text(question.limit / unit, axes.get_ylim()[1], " limit", color=_LIMIT, va="top")
    axes.set_xlabel(f"predicted peak of the fullest rank ({name})")
    axes.set_ylabel("predicted step (s)")
    axes.set_title(f"{question.job.model.name} on {question.devices} x {question.cluster.name}")
    axes.margins(x=0.18, y=0.12)
    axes.legend(frameon=False)
    return figure


def _places(plans: list[EvaluatedPlan], unit: int) -> tuple[list[float], list[float]]:
    return [one.peak.bytes / unit for one in plans], [one.seconds.total for one in plans]
