"""Make the table of a comparison for a terminal, and the lines around it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from bigtrain.compare.rows import ComparisonRow, largest_loss_difference
from bigtrain.memory.timeline import MEMORY_KINDS, kinds_in
from bigtrain.units import MIB, format_bytes, signed_share

_HEADINGS = (
    "peak",
    *MEMORY_KINDS,
    *("process", "predicted", "error", "sent", "s/step", "predicted s", "time"),
)
WIDE = 165
"""The width of the whole table in characters, unless a strategy's name is unusually long."""
_LEFT_OUT: tuple[tuple[int, tuple[str, ...]], ...] = (
    (WIDE, ()),
    (130, ("buffers", "process", "sent", "predicted s")),
    (0, (*MEMORY_KINDS, "process", "sent", "predicted s")),
)
"""Pairs of the least width of a terminal and the columns that are left out at this width. The first
pair that fits is used. compare.json has the figures of all columns."""


def comparison_table(
    rows: Sequence[ComparisonRow], title: str, largest: str | None, width: int = WIDE
) -> Table:
    """Return a table of all strategies: peak by part, predicted peak, time; sizes in MiB.

    Args:
        rows: the rows in the order of their runs. Times are relative to the first row with a time.
        title: the title, which names the job.
        largest: the user's value of `--largest`; None without this option.
        width: the terminal's width in characters. A narrow table has fewer columns.
    """
    left_out = next(columns for least, columns in _LEFT_OUT if width >= least)
    table = Table(title=f"{title} (MiB, rank with the highest peak)", title_justify="left")
    table.add_column("strategy", no_wrap=True)
    if "frozen" not in kinds_in(row.breakdown for row in rows):
        left_out = (*left_out, "frozen")
    headings = [heading for heading in _HEADINGS if heading not in left_out]
    for heading in headings:
        table.add_column(_SHORT.get(heading, heading), justify="right", no_wrap=True)
    if largest is not None:
        table.add_column(f"largest {largest}", justify="right")
    first = next((row for row in rows if row.step_seconds), None)
    for row in rows:
        if row.status != "ok":
            table.add_row(_name(row, rows), row.status)
            continue
        parts = row.breakdown or {}
        every = [_mib(row.peak_bytes), *(_mib(parts.get(kind)) for kind in MEMORY_KINDS)]
        every += [_mib(row.process_peak_bytes), _mib(row.predicted_peak_bytes)]
        every += [signed_share(row.error), _mib(row.sent_bytes)]
        every += [_number(row.step_seconds, 3), _number(row.predicted_step_seconds, 3)]
        every.append(_times(row, first))
        named = zip(_HEADINGS, every, strict=True)
        cells = [cell for heading, cell in named if heading not in left_out]
        if largest is not None:
            cells.append(str(row.largest or "-"))
        table.add_row(_name(row, rows), *cells)
    return table


_SHORT = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "acts",
    "temporary": "temp",
}


def notes(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return the lines below the table: why rows have no figures, and the meaning of columns."""
    lines = [f"{row.strategy}: {row.status}: {row.reason}" for row in rows if row.reason]
    lines += [
        f"{row.strategy}: above {row.largest}: {row.largest_reason}"
        for row in rows
        if row.largest is not None and row.largest_reason
    ]
    apart = largest_loss_difference(rows)
    if apart is not None:
        lines.append(str(apart))
    lines.append(
        "peak: tracked tensors, the sum of the parts; process: resident memory above that before "
        "the model was built; sent: to other ranks in a step; time: of a step, relative to the "
        "first row; predicted s: of a step, if `bigtrain doctor` has measured the machine"
    )
    return lines


def progress_line(row: ComparisonRow) -> str:
    """Return the line that is printed when the run of a row has ended."""
    if row.status != "ok":
        return f"{row.strategy}: {row.status}: {row.reason}"
    line = f"{row.strategy}: peak {format_bytes(row.peak_bytes or 0)}"
    if row.step_seconds:
        line += f", {row.step_seconds:.3f} s a step"
    return line + (f", largest {row.largest}" if row.largest is not None else "")


def _name(row: ComparisonRow, rows: Sequence[ComparisonRow]) -> str:
    """Return the strategy's name, with its number of ranks if the rows differ in this number."""
    if len({any_row.num_ranks for any_row in rows}) == 1:
        return row.strategy
    return f"{row.strategy} ({row.num_ranks})"


def _mib(size: int | None) -> str:
    return f"{size / MIB:.1f}" if size is not None else "-"


def _number(value: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" if value else "-"


def _times(row: ComparisonRow, first: ComparisonRow | None) -> str:
    if not row.step_seconds or first is None or not first.step_seconds:
        return "-"
    return f"{row.step_seconds / first.step_seconds:.2f}x"
