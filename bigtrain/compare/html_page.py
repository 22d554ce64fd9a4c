"""The comparison as one HTML file: pictures and figures, nothing from elsewhere, no script."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bigtrain.compare.pictures import (
    NARROW,
    WIDE,
    as_svg,
    loss_curves,
    memory_bars,
    memory_curves,
    throughput_figure,
)
from bigtrain.compare.rows import ComparisonRow
from bigtrain.memory.timeline import MEMORY_KINDS
from bigtrain.report.plot_style import plot_style
from bigtrain.units import MIB

_CSS = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 12px; max-width: 1160px;
  color: #1a1a1a; background: #fff; }
h1 { font-size: 1.5rem; margin: .4rem 0; } h2 { font-size: 1.1rem; margin: 1.6rem 0 .3rem; }
code { background: #f2f2f2; padding: .1em .3em; overflow-wrap: anywhere; }
svg { max-width: 100%; height: auto; display: block; }
.narrow { display: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 8px; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
td.why { text-align: left; white-space: normal; min-width: 18em; color: #a02020; }
p.note { color: #555; font-size: 13px; }
@media (max-width: 700px) { .wide { display: none; } .narrow { display: block; } }
"""


def write_page(path: Path, document: dict[str, Any], rows: Sequence[ComparisonRow]) -> None:
    """Write the page.

    Args:
        path: the file.
        document: of compare.json: title, command, surroundings.
        rows: the same rows as in it.
    """
    path.write_text("\n".join(_lines(document, rows)) + "\n", "utf-8")


def _lines(document: dict[str, Any], rows: Sequence[ComparisonRow]) -> Iterator[str]:
    title = html.escape(document["title"])
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield '<link rel="icon" href="data:,">'
    yield f"<title>{title}</title><style>{_CSS}</style></head><body>"
    yield f"<h1>{title}</h1>"
    yield f"<p><code>{html.escape(document['command'])}</code></p>"
    yield f'<p class="note">{html.escape(_where(document))}</p>'
    yield "<h2>Peak memory by part</h2>"
    yield from _both("bars", lambda width, name: memory_bars(rows, width, "", f"{name}-"))
    yield "<h2>Figures</h2>"
    yield from _table(document, rows)
    for heading, note, draw in (
        ("Throughput against memory", _PARETO, throughput_figure),
        ("Memory over one step", _COURSE, memory_curves),
        ("Losses", _LOSSES, loss_curves),
    ):
        drawn = list(_both(heading.split()[0].lower(), partial(_of_rows, draw, rows)))
        if drawn:
            yield f'<h2>{heading}</h2><p class="note">{note}</p>'
            yield from drawn
    yield "</body></html>"


_PARETO = "The line joins what no other strategy beats in both."
_COURSE = "The rank with the highest peak; every tensor is tracked, which makes the step slower."
_LOSSES = "The same seed and the same data: strategies that compute the same lie on one line."


def _where(document: dict[str, Any]) -> str:
    around = document["surroundings"]
    versions = ", ".join(f"{name} {version}" for name, version in around["versions"].items())
    cap = f"; no more than {document['cap']} a rank" if document["cap"] else ""
    return f"{around['hardware']}; Python {around['python']}, {versions}{cap}"


def _of_rows(
    draw: Callable[[Sequence[ComparisonRow], float], Figure | None],
    rows: Sequence[ComparisonRow],
    width: float,
    _: str,
) -> Figure | None:
    return draw(rows, width)


def _both(name: str, draw: Callable[[float, str], Figure | None]) -> Iterator[str]:
    """A picture at two widths, of which the screen shows one."""
    for kind, width in (("wide", WIDE), ("narrow", NARROW)):
        with plot_style():
            figure = draw(width, kind)
        if figure is not None:
            yield f'<div class="{kind}">{as_svg(figure, f"{kind}-{name}")}</div>'


def _table(document: dict[str, Any], rows: Sequence[ComparisonRow]) -> Iterator[str]:
    headings = ["strategy", "ranks", "peak", *MEMORY_KINDS, "process", "predicted", "error"]
    headings += ["s/step", "predicted s", "samples/s"]
    if document["largest"]:
        headings.append(f"largest {document['largest'].rpartition('.')[2]}")
    yield '<div class="scroll"><table><thead><tr>'
    yield "".join(f"<th>{html.escape(word)}</th>" for word in headings)
    yield "</tr></thead><tbody>"
    for row in rows:
        cells = "".join(f"<td>{cell}</td>" for cell in _cells(row))
        if document["largest"] and row.status == "ok":
            cells += f"<td>{row.largest or '-'}</td>"
        if row.status != "ok":
            why = html.escape(f"{row.status}: {row.reason}")
            cells = f'<td class="why" colspan="{len(headings) - 2}">{why}</td>'
        name = html.escape(row.strategy)
        yield f"<tr><td>{name}</td><td>{row.num_ranks}</td>{cells}</tr>"
    yield '</tbody></table></div><p class="note">Sizes in MiB, of the rank with the highest peak. '
    yield "peak: tracked tensors, to which the parts sum. process: resident memory above what the "
    yield "process held before the model was built.</p>"


def _cells(row: ComparisonRow) -> Iterator[str]:
    parts = row.breakdown or {}
    for size in (
        row.peak_bytes,
        *(parts.get(kind) for kind in MEMORY_KINDS),
        row.process_peak_bytes,
        row.predicted_peak_bytes,
    ):
        yield f"{size / MIB:,.1f}" if size is not None else "-"
    yield f"{round(row.error, 3) + 0.0:+.1%}" if row.error is not None else "-"
    for seconds in (row.step_seconds, row.predicted_step_seconds):
        yield f"{seconds:.3f}" if seconds else "-"
    yield f"{row.samples_per_second:.1f}" if row.samples_per_second else "-"
