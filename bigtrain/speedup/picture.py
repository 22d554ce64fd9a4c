"""The speed-up over the number of ranks as a picture: measured, predicted, and the ideal line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from bigtrain.report.plot_style import COLOURS, plot_style
from bigtrain.speedup.show import SpeedupRow


def write_speedup(path: Path, title: str, rows: Sequence[SpeedupRow]) -> None:
    """Draw measured and, dashed, predicted speed-ups of each strategy into a file.

    Args:
        path: the file to write, whose name ends in .svg or .png.
        title: the title of the picture.
        rows: the rows to draw; those of each strategy are in ascending order of ranks.
    """
    with plot_style():
        figure = speedup_figure(title, rows)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def speedup_figure(title: str, rows: Sequence[SpeedupRow]) -> Figure:
    """Return a figure of the speed-up over one process by the number of ranks, on log axes."""
    figure = Figure(figsize=(7.0, 4.6), layout="constrained")
    axes = figure.add_subplot()
    most = max((row.ranks for row in rows), default=2)
    axes.plot([1, most], [1, most], color="#D0D0D0", linewidth=1, label="ideal")
    axes.axhline(1, color="#808080", linewidth=0.8)
    labels = dict.fromkeys(row.strategy for row in rows)
    colours = list(COLOURS.values())
    for number, label in enumerate(labels):
        shown = [row for row in rows if row.strategy == label]
        colour = colours[number % len(colours)]
        for kind, style in (("measured", "o-"), ("predicted", "x--")):
            steps = [getattr(row, kind) for row in shown if getattr(row, kind) is not None]
            if steps:
                points = [1, *(s.ranks for s in steps)], [1.0, *(s.speedup for s in steps)]
                axes.plot(*points, style, color=colour, label=f"{label}, {kind}", markersize=5)
    axes.set_xscale("log", base=2)
    axes.set_xticks([2**n for n in range(most.bit_length() + 1) if 2**n <= most])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    axes.set_yscale("log", base=2)  # so that the ideal speed-up is a straight line
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("ranks", loc="left")
    axes.set_ylabel("samples a second over those of one process")
    axes.set_title(title, loc="left")
    axes.legend(frameon=False, fontsize=8)
    return figure
