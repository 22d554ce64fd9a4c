"""Draw the pictures of a comparison: bars and curves of memory, throughput, and losses.

Each picture is drawn for a given width, so that a page can show the picture that fits the screen.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from bigtrain.compare.rows import ComparisonRow
from bigtrain.memory.timeline import MEMORY_KINDS, kinds_in
from bigtrain.report.plot_style import COLOURS, STYLE
from bigtrain.units import MIB

WIDE, NARROW = 12.0, 3.9
"""The two widths of pictures on the page, in inches."""
_SHADES = {"forward": "#F4F4F4", "backward": "#E9E9E9", "step": "#DDDDDD"}
_FEW = 12
"""The largest number of lines or points that are labelled with names."""


def write_bars(path: Path, title: str, rows: Sequence[ComparisonRow]) -> None:
    """Write the bars of `memory_bars` as a picture (.svg or .png).

    Args:
        path: the file; its suffix is the format.
        title: the title of the picture.
        rows: the rows of the comparison.
    """
    with rc_context({**STYLE, "svg.hashsalt": "bars"}):
        figure = memory_bars(rows, 10.0, title)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def as_svg(figure: Figure, name: str) -> str:
    """Return a figure as an SVG element.

    Ids that two figures on one page may share are removed or derived from `name`.
    """
    text = io.StringIO()
    with rc_context({**STYLE, "svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()[text.getvalue().index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", svg)
    return re.sub(r'(<svg [^>]*?)width="([\d.]+)pt" height="[\d.]+pt"', r'\1width="\2pt"', svg)


def memory_bars(
    rows: Sequence[ComparisonRow], width: float, title: str, prefix: str = ""
) -> Figure:
    """Draw peak memory by part: for each strategy a bar and its number, or the kind of failure.

    Args:
        rows: the rows of the comparison.
        width: the width in inches.
        title: the title; empty for none.
        prefix: the beginning of the ids of the bars and numbers in an SVG file.
    """
    figure = Figure(figsize=(width, 1.5 + 0.3 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    most = max((row.peak_bytes or 0 for row in rows), default=0) / MIB or 1.0
    for position, row in enumerate(rows):
        left = 0.0
        for kind in MEMORY_KINDS:
            size = (row.breakdown or {}).get(kind, 0) / MIB
            patch = axes.barh(position, size, left=left, color=COLOURS[kind], height=0.7)[0]
            patch.set_gid(f"{prefix}bar-{row.strategy}-{kind}")
            left += size
        label = f"{left:,.1f}" if row.status == "ok" else row.status
        if row.largest is not None:
            label += f"  (up to {row.largest})"
        colour = "black" if row.status == "ok" else "#A02020"
        end = max(left, (row.predicted_peak_bytes or 0) / MIB)
        number = axes.text(end + most * 0.01, position, label, va="center", color=colour)
        number.set_gid(f"{prefix}number-{row.strategy}")
        if row.predicted_peak_bytes:
            at = row.predicted_peak_bytes / MIB
            axes.plot([at, at], [position - 0.42, position + 0.42], color="black", linewidth=1.2)
    axes.set_yticks(range(len(rows)), [row.strategy for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, most * (1.14 if width > 6 else 1.35))
    long_label = "peak memory of the fullest rank, MiB (black line: predicted)"
    axes.set_xlabel(long_label if width > 6 else "peak, MiB (black line: predicted)", loc="left")
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    _kinds_legend(figure, width, rows)
    return figure


def memory_curves(rows: Sequence[ComparisonRow], width: float) -> Figure | None:
    """Draw memory over one step, in a small picture for each strategy, with shaded phases.

    Args:
        rows: the rows of the comparison.
        width: the width in inches.

    Returns:
        The figure; None if no row has a timeline.
    """
    seen = [row for row in rows if row.timeline]
    if not seen:
        return None
    columns = min(len(seen), 3 if width > 6 else 1)
    lines = -(-len(seen) // columns)
    figure = Figure(figsize=(width, 0.6 + 1.9 * lines), layout="constrained")
    most = max(row.peak_bytes or 0 for row in seen) / MIB * 1.08
    for number, row in enumerate(seen, start=1):
        axes = figure.add_subplot(lines, columns, number)
        _course(axes, row)
        axes.set_ylim(0, most)
    _kinds_legend(figure, width, rows)
    return figure


def _course(axes: Axes, row: ComparisonRow) -> None:
    timeline = row.timeline or {}
    seconds = timeline["seconds"]
    kinds = [kind for kind in MEMORY_KINDS if any(timeline["parts"].get(kind, ()))]
    parts = [[size / MIB for size in timeline["parts"][kind]] for kind in kinds]
    axes.stackplot(seconds, *parts, colors=[COLOURS[kind] for kind in kinds], step="post")
    end = seconds[-1] if seconds else 1.0
    starts = timeline["phases"]
    shown: set[str] = set()
    for (start, phase), (stop, _) in zip(starts, [*starts[1:], (end, "")], strict=True):
        if phase not in _SHADES:
            continue
        axes.axvspan(start, stop, color=_SHADES[phase], zorder=0)
        if phase not in shown and stop - start > end * 0.1:
            shown.add(phase)
            top = axes.get_xaxis_transform()
            style: dict[str, Any] = {"va": "top", "fontsize": 7, "color": "#606060"}
            axes.text(start, 0.99, f" {phase}", transform=top, **style)
    axes.set_xlim(0, end)
    axes.set_title(f"{row.strategy}, rank {timeline['rank']}", loc="left", fontsize=9)
    axes.tick_params(labelsize=7)
    axes.set_xlabel("seconds (slower than untracked)", fontsize=7, loc="left")


def throughput_figure(rows: Sequence[ComparisonRow], width: float) -> Figure | None:
    """Draw throughput over peak memory, with a line through the `pareto_front`.

    Args:
        rows: the rows of the comparison.
        width: the width in inches.

    Returns:
        The figure; None if no row has a throughput and a peak.
    """
    seen = [row for row in rows if row.peak_bytes and row.samples_per_second]
    if not seen:
        return None
    figure = Figure(figsize=(width, 5.0 if width > 6 else 4.2), layout="constrained")
    axes = figure.add_subplot()
    best = pareto_front(seen)
    for row in seen:
        on_front = row in best
        x, y = (row.peak_bytes or 0) / MIB, row.samples_per_second or 0.0
        axes.plot(x, y, "o", color="#D55E00" if on_front else "#A0A0A0", markersize=6)
        if on_front or len(seen) <= _FEW:
            axes.annotate(row.strategy, (x, y), (4, 4), textcoords="offset points", fontsize=8)
    axes.step(
        [(row.peak_bytes or 0) / MIB for row in best],
        [row.samples_per_second or 0.0 for row in best],
        where="post",
        color="#D55E00",
        linewidth=1,
    )
    axes.margins(x=0.15 if width > 6 else 0.3)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("peak memory, MiB (less is better)", loc="left")
    axes.set_ylabel("samples a second (more is better)")
    return figure


def pareto_front(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Return the Pareto-optimal rows in memory and throughput, in the order of rising memory."""
    best: list[ComparisonRow] = []
    ordered = sorted(rows, key=lambda r: (r.peak_bytes or 0, -(r.samples_per_second or 0.0)))
    for row in ordered:
        if not best or (row.samples_per_second or 0.0) > (best[-1].samples_per_second or 0.0):
            best.append(row)
    return best


def loss_curves(rows: Sequence[ComparisonRow], width: float) -> Figure | None:
    """Draw the losses of all strategies in one diagram, where equal losses make one line.

    Args:
        rows: the rows of the comparison.
        width: the width in inches.

    Returns:
        The figure; None if no row has losses.
    """
    seen = [row for row in rows if row.losses]
    if not seen:
        return None
    figure = Figure(figsize=(width, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for row in seen:
        steps = range(1, len(row.losses) + 1)
        axes.plot(steps, row.losses, marker=".", linewidth=1, alpha=0.7, label=row.strategy)
    if len(seen) <= _FEW:
        axes.legend(fontsize=8, frameon=False)
    axes.set_xlabel("step", loc="left")
    axes.set_ylabel("loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _kinds_legend(figure: Figure, width: float, rows: Sequence[ComparisonRow]) -> None:
    kinds = kinds_in(row.breakdown for row in rows)
    handles = [Patch(color=COLOURS[kind], label=kind) for kind in kinds]
    columns = len(kinds) if width > 6 else 3
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, frameon=False)
