"""Write a comparison as one HTML file with pictures, without scripts or links to other files."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
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
from bigtrain.compare.rows import ComparisonRow, largest_loss_difference, loss_difference
from bigtrain.memory.timeline import MemoryKind, kinds_in
from bigtrain.report.plot_style import plot_style
from bigtrain.units import MIB, signed_share

_CSS = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 12px; max-width: 1340px;
  color: #1a1a1a; background: #fff; }
h1 { font-size: 1.5rem; margin: .4rem 0; } h2 { font-size: 1.1rem; margin: 1.6rem 0 .3rem; }
code { background: #f2f2f2; padding: .1em .3em; overflow-wrap: anywhere; }
svg { max-width: 100%; height: auto; display: block; }
.narrow { display: none; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 6px; text-align: right; border-bottom: 1px solid #ddd; }
th { vertical-align: bottom; font-weight: 600; }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 9em; }
td.why { text-align: left; white-space: normal; min-width: 18em; color: #a02020; }
p.note { color: #555; font-size: 13px; }
@media (max-width: 1100px) {
  thead { display: none; }
  table, tbody { display: block; }
  tr { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.2em, 1fr)); gap: 2px 14px;
    padding: 8px 0; border-bottom: 1px solid #bbb; }
  td, td:first-child { border: 0; padding: 0; display: flex; justify-content: space-between;
    gap: 6px; min-width: 0; }
  td:first-child { grid-column: 1 / -1; font-weight: 600; }
  td.why { grid-column: 1 / -1; display: block; min-width: 0; }
  td[data-name]::before { content: attr(data-name); color: #666; }
}
@media (max-width: 700px) { .wide { display: none; } .narrow { display: block; } }
"""


def write_page(path: Path, document: dict[str, Any], rows: Sequence[ComparisonRow]) -> None:
    """Write the page.

    Args:
        path: the file to write.
        document: the content of compare.json.
        rows: the rows of the comparison.
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
            apart = largest_loss_difference(rows) if heading == "Losses" else None
            more = "" if apart is None else f" <strong>{html.escape(str(apart))}</strong>"
            yield f'<h2>{heading}</h2><p class="note">{note}{more}</p>'
            yield from drawn
    yield "</body></html>"


_PARETO = "The line joins the strategies that no other one beats in both."
_COURSE = "The rank with the highest peak; every tensor is tracked, which makes the step slower."
_LOSSES = "The same seed and the same data: strategies that compute the same share one line."


def _where(document: dict[str, Any]) -> str:
    around = document["surroundings"]
    versions = ", ".join(f"{name} {version}" for name, version in around["versions"].items())
    cap = f"; at most {document['cap']} a rank" if document["cap"] else ""
    when = datetime.fromisoformat(document["date"]).strftime("%d %B %Y, %H:%M %Z").strip(" ,")
    python = f"Python {around['python']}"
    return (
        f"{when}; {document['steps']} steps a run; {around['hardware']}; {python}, {versions}{cap}"
    )


def _of_rows(
    draw: Callable[[Sequence[ComparisonRow], float], Figure | None],
    rows: Sequence[ComparisonRow],
    width: float,
    _: str,
) -> Figure | None:
    return draw(rows, width)


def _both(name: str, draw: Callable[[float, str], Figure | None]) -> Iterator[str]:
    """Yield a picture at two widths, of which the page shows the one that fits the screen."""
    for kind, width in (("wide", WIDE), ("narrow", NARROW)):
        with plot_style():
            figure = draw(width, kind)
        if figure is not None:
            yield f'<div class="{kind}">{as_svg(figure, f"{kind}-{name}")}</div>'


def _table(document: dict[str, Any], rows: Sequence[ComparisonRow]) -> Iterator[str]:
    kinds = kinds_in(row.breakdown for row in rows)
    headings = ["strategy", "ranks", "peak", *kinds, "process", "predicted", "error"]
    headings += ["s/step", "predicted s", "samples/s", "losses apart"]
    if document["largest"]:
        headings.append(f"largest {document['largest'].rpartition('.')[2]}")
    yield "<table><thead><tr>"
    yield "".join(f"<th>{html.escape(word)}</th>" for word in headings)
    yield "</tr></thead><tbody>"
    first = next((row for row in rows if row.losses), None)
    for row in rows:
        cells = [str(row.num_ranks), *_cells(row, kinds), _apart(row, first)]
        if document["largest"]:
            cells.append(str(row.largest or "-"))
        named = zip(headings[1:], cells, strict=True)
        shown = "".join(f'<td data-name="{html.escape(n)}">{cell}</td>' for n, cell in named)
        if row.status != "ok":
            why = html.escape(f"{row.status}: {row.reason}")
            shown = f'<td data-name="ranks">{row.num_ranks}</td>'
            shown += f'<td class="why" colspan="{len(headings) - 2}">{why}</td>'
        name = html.escape(row.strategy).replace("_", "_<wbr>").replace("+", "+<wbr>")
        yield f"<tr><td><span>{name}</span></td>{shown}</tr>"
    yield '</tbody></table><p class="note">Sizes in MiB, of the rank with the highest peak. '
    yield "peak: tracked tensors, the sum of the parts. process: resident memory above that before "
    yield "the model was built. losses apart: the largest difference of a loss from the first "
    yield "row's, as a share of it.</p>"


def _apart(row: ComparisonRow, first: ComparisonRow | None) -> str:
    apart = None if first is None else loss_difference(row, first)
    if apart is None:
        return "-"
    return f"{apart.relative:.0e}" if apart.relative else "0"


def _cells(row: ComparisonRow, kinds: Sequence[MemoryKind]) -> Iterator[str]:
    parts = row.breakdown or {}
    for size in (
        row.peak_bytes,
        *(parts.get(kind) for kind in kinds),
        row.process_peak_bytes,
        row.predicted_peak_bytes,
    ):
        yield f"{size / MIB:,.1f}" if size is not None else "-"
    yield signed_share(row.error)
    for seconds in (row.step_seconds, row.predicted_step_seconds):
        yield f"{seconds:.3f}" if seconds else "-"
    yield f"{row.samples_per_second:.1f}" if row.samples_per_second else "-"
