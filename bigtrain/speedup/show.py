"""The table of `bigtrain speedup`, and the solutions of the inequality in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from bigtrain.speedup.forecast import StepForecaster
from bigtrain.speedup.inequality import SyncStep, Threshold


@dataclass(frozen=True)
class SpeedupRow:
    """The figures of one strategy on a number of ranks."""

    strategy: str
    ranks: int
    measured: SyncStep | None = None
    predicted: SyncStep | None = None
    reason: str | None = None
    """Why there are no figures; None if there are."""

    @property
    def progress_line(self) -> str:
        """The line that is printed when the row is done."""
        name = f"{self.strategy} on {self.ranks}"
        if self.measured is None:
            return f"{name}: {self.reason}"
        return f"{name}: {self.measured.speedup:.2f} times as fast as one"

    def as_json(self, samples: int) -> dict[str, Any]:
        """Return the row as JSON values.

        Args:
            samples: the samples of an epoch.
        """
        return {
            "strategy": self.strategy,
            "ranks": self.ranks,
            "reason": self.reason,
            "measured": _step_json(self.measured, samples),
            "predicted": _step_json(self.predicted, samples),
        }


def _step_json(step: SyncStep | None, samples: int) -> dict[str, Any] | None:
    if step is None:
        return None
    derived = {"seconds": step.seconds, "speedup": step.speedup, "pays": step.pays}
    return {**asdict(step), **derived, "epoch_seconds": step.epoch_seconds(samples)}


def speedup_table(rows: Sequence[SpeedupRow], title: str, samples: int) -> Table:
    """Return a table of measured seconds, with predicted ones in brackets.

    Args:
        rows: the rows of the table.
        title: the title of the table.
        samples: the samples of an epoch.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("strategy")
    for name in ("ranks", "computing s", "T_sync s", "exchange alone s", "step s", "epoch s"):
        table.add_column(name, justify="right")
    table.add_column("times as fast", justify="right")
    table.add_column("pays")
    for row in rows:
        best = row.measured or row.predicted
        if best is None:
            table.add_row(row.strategy, str(row.ranks), *["-"] * 7)
            continue
        table.add_row(
            row.strategy,
            str(row.ranks),
            *(_both(row, name) for name in ("compute", "exposed", "whole", "seconds")),
            _pair(
                *(
                    None if s is None else f"{s.epoch_seconds(samples):.1f}"
                    for s in (row.measured, row.predicted)
                )
            ),
            _pair(
                *(None if s is None else f"{s.speedup:.2f}" for s in (row.measured, row.predicted))
            ),
            "yes" if best.pays else "no",
        )
    return table


def _both(row: SpeedupRow, name: str) -> str:
    values = (None if s is None else getattr(s, name) for s in (row.measured, row.predicted))
    return _pair(*(None if value is None else _seconds(value) for value in values))


def _seconds(value: float) -> str:
    return f"{value:.4f}" if abs(value) >= 0.01 else f"{value:.2g}"


def _pair(measured: str | None, predicted: str | None) -> str:
    if predicted is None:
        return measured or "-"
    return f"{measured or '-'} ({predicted})"


def threshold_lines(
    label: str,
    rows: Sequence[SpeedupRow],
    solved: Mapping[str, Mapping[str, Threshold]],
    forecaster: StepForecaster,
) -> list[str]:
    """Return the inequality of a strategy and its solutions, as lines of text.

    Args:
        label: the strategy.
        rows: the rows of all strategies.
        solved: the solutions, by `LABEL here` (measured) or `LABEL on RANKS` (predicted), and by
            quantity.
        forecaster: the forecaster of the strategy.
    """
    lines = []
    for name, thresholds in solved.items():
        if name.partition(" ")[0] != label:
            continue
        here = name.endswith(" here")
        steps = [row.measured if here else row.predicted for row in rows if row.strategy == label]
        step = [each for each in steps if each is not None][-1]
        rate = forecaster.bandwidth(step.ranks) if forecaster.is_local or not here else None
        lines += inequality_lines(label, step, thresholds, rate, here=here)
    return lines


def inequality_lines(
    label: str,
    step: SyncStep,
    thresholds: Mapping[str, Threshold],
    bandwidth: float | None,
    *,
    here: bool,
) -> list[str]:
    """Return the inequality with its numbers and the smallest values with which it holds, as lines.

    Args:
        label: the strategy.
        step: the step for which the inequality was solved.
        thresholds: the solutions for `batch`, for `bandwidth` (as a multiple of the present
            bandwidth) and, if the exchanges of other numbers of ranks can be predicted, for
            `ranks`.
        bandwidth: the present bandwidth in bytes per second; None if unknown.
        here: whether the step was measured; otherwise it was predicted.
    """
    sign, verdict = ("<", "pays") if step.pays else (">=", "does not pay")
    left, right = step.seconds, step.workers * step.alone
    lines = [
        f"{label} on {step.ranks} ranks, {'measured' if here else 'predicted'}: "
        f"T_comp {_seconds(step.compute)} + T_sync {_seconds(step.exposed)} = {_seconds(left)} s "
        f"{sign} {step.workers} x {_seconds(step.alone)} = {_seconds(right)} s: it {verdict}"
    ]

    pays, many = step.pays, "{:.0f} or more".format

    def rate(times: float) -> str:
        if times == 0:
            return "any"
        words = f"{times:.2g} times the present one, or more"
        return words if bandwidth is None else f"{words}: {_rate(times * bandwidth)}"

    now = f"now {step.batch}"
    lines.append(_line("samples a worker", thresholds["batch"], many, now, pays=pays))
    lines.append(_line("bandwidth", thresholds["bandwidth"], rate, "", pays=pays))
    if "ranks" in thresholds:
        lines.append(_line("ranks", thresholds["ranks"], many, "", pays=pays))
    return lines


def _line(
    quantity: str, threshold: Threshold, words: Callable[[float], str], now: str, *, pays: bool
) -> str:
    """Return the line of one threshold: "never" if no value pays, not even the present one."""
    if threshold.value is None and pays:
        reason = f"the smallest value that pays is not known: {threshold.reason}"
        return f"  {quantity}: the present value pays; {reason}"
    if threshold.value is None:
        return f"  {quantity}: never: {threshold.reason}"
    notes = "; ".join(note for note in (now, threshold.reason) if note)
    return f"  {quantity}: {words(threshold.value)}" + (f" ({notes})" if notes else "")


def _rate(bytes_per_second: float) -> str:
    """Return a rate as text in bits per second, the unit in which links are specified."""
    bits = 8 * bytes_per_second
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits:.3g} bit/s"
