"""One strategy's row in a comparison: the figures of its run, or the reason why it has none."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bigtrain.files.parse import parse_json, read_json, read_json_object
from bigtrain.files.regular import MOST_LINES, is_there, read_text

Status = Literal["ok", "refused", "out of memory", "time limit", "failed"]


@dataclass(frozen=True)
class ComparisonRow:
    """The figures of one strategy's run; None where a figure is unknown."""

    strategy: str
    num_ranks: int
    status: Status
    reason: str | None = None
    """The reason why there are no figures, in one line."""
    peak_bytes: int | None = None
    """The measured peak of the tensors of the rank with the highest peak."""
    predicted_peak_bytes: int | None = None
    """The predicted peak of this rank."""
    process_peak_bytes: int | None = None
    """The largest growth of any rank's resident memory since before the model was built."""
    phase: str | None = None
    """The phase in which `peak_bytes` was reached."""
    breakdown: dict[str, int] | None = None
    """The bytes of each part of `peak_bytes`; they sum to it."""
    step_seconds: float | None = None
    """The median of the steps in which memory was not tracked."""
    predicted_step_seconds: float | None = None
    """The predicted seconds of a step; None if the machine's rates are unknown."""
    sent_bytes: int | None = None
    """Bytes that the rank with the most traffic sends in a step; None if they were not counted."""
    predicted_sent_bytes: int | None = None
    """The highest predicted bytes that a rank sends in a step."""
    samples_per_second: float | None = None
    """The samples of all ranks per second."""
    losses: tuple[float, ...] = ()
    """The loss of each step."""
    timeline: dict[str, Any] | None = None
    """Memory over one step, as JSON values: `seconds`, `parts` and `phases` (see
    `memory.timeline.MemoryCurve`), and `rank`."""
    largest: int | None = None
    """The highest value of the key of `--largest` that ran."""
    largest_reason: str | None = None
    """The reason why a higher value did not run."""

    @property
    def error(self) -> float | None:
        """The relative error of the predicted peak: 0.01 if it is 1 % above the measured peak."""
        if not self.peak_bytes or self.predicted_peak_bytes is None:
            return None
        return self.predicted_peak_bytes / self.peak_bytes - 1

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON values for compare.json."""
        return {**asdict(self), "prediction_error": self.error}

    @classmethod
    def of_run(cls, strategy: str, num_ranks: int, folder: Path) -> ComparisonRow:
        """Read the figures of a run from its folder.

        Args:
            strategy: the strategy's name in the comparison.
            num_ranks: the number of ranks of the run.
            folder: the run's folder.

        Raises:
            UnreadableError: a file is missing or is not JSON.
            KeyError: a file lacks a figure.
        """
        memory = read_json_object(folder / "memory.json")
        lines = read_text(folder / "metrics.jsonl", most=MOST_LINES).splitlines()
        steps = [parse_json(line, folder / "metrics.jsonl") for line in lines]
        highest = max(memory["ranks"], key=lambda rank: rank["peak_bytes"] or 0)
        process = [r["process_peak_bytes"] for r in memory["ranks"] if r["process_peak_bytes"]]
        seconds = _untracked(steps)
        timeline = folder / "timeline.json"
        return cls(
            strategy,
            num_ranks,
            "ok",
            peak_bytes=highest["peak_bytes"],
            predicted_peak_bytes=highest["predicted_peak_bytes"],
            process_peak_bytes=max(process, default=None),
            phase=highest["phase"],
            breakdown=highest["breakdown"],
            step_seconds=seconds,
            predicted_step_seconds=steps[0].get("predicted_step_seconds") if steps else None,
            sent_bytes=_most_sent(memory["ranks"], "sent_bytes"),
            predicted_sent_bytes=_most_sent(memory["ranks"], "predicted_sent_bytes"),
            samples_per_second=steps[-1]["samples"] / seconds if seconds else None,
            losses=tuple(step["loss"] for step in steps),
            timeline=read_json(timeline) if is_there(timeline) else None,
        )

    def with_largest(self, value: int | None, reason: str | None) -> ComparisonRow:
        """Return a copy of the row with the result of `--largest`; see `largest.find_largest`."""
        return replace(self, largest=value, largest_reason=reason)


@dataclass(frozen=True)
class LossDifference:
    """The largest difference between the losses of a strategy and those of the first row."""

    strategy: str
    against: str
    """The strategy of the first row."""
    step: int
    """The step with the largest difference, from 1."""
    relative: float
    """The difference as a share of the first row's loss in that step."""

    def __str__(self) -> str:
        """Return the difference as a sentence."""
        if not self.relative:
            return f"Every loss is that of {self.against}, to the last bit."
        return (
            f"The largest difference of a loss from that of {self.against}: {self.relative:.1e} of "
            f"it, by {self.strategy} in step {self.step}."
        )


def loss_difference(row: ComparisonRow, first: ComparisonRow) -> LossDifference | None:
    """Return the largest difference of a row's losses from those of the first row.

    The result is None if one of the rows has no losses, or if both are the same row.
    """
    pairs = list(zip(row.losses, first.losses, strict=False))
    if not pairs or row is first:
        return None
    shares = [abs(loss - expected) / (abs(expected) or 1.0) for loss, expected in pairs]
    shares = [math.inf if math.isnan(share) else share for share in shares]  # max ignores nan
    step = shares.index(max(shares))
    return LossDifference(row.strategy, first.strategy, step + 1, shares[step])


def largest_loss_difference(rows: Sequence[ComparisonRow]) -> LossDifference | None:
    """Return the largest difference of any row from the first row with losses.

    The result is None if fewer than two rows have losses.
    """
    with_losses = [row for row in rows if row.losses]
    differences = [loss_difference(row, with_losses[0]) for row in with_losses[1:]]
    known = [each for each in differences if each is not None]
    return max(known, key=lambda difference: difference.relative, default=None)


def _most_sent(ranks: list[dict[str, Any]], key: str) -> int | None:
    """Return the most bytes that a rank of a memory.json sends; None if no rank has the figure."""
    sums = []
    for rank in ranks:
        sizes = [kind[key] for kind in rank.get("traffic", {}).values()]
        if sizes and None not in sizes:
            sums.append(sum(sizes))
    return max(sums, default=None)


TRACKED_STEPS = 2
"""The first steps of each run, in which every tensor is tracked. They are slower, and are not
timed."""


def _untracked(steps: list[dict[str, Any]]) -> float | None:
    timed = [step["step_seconds"] for step in steps[TRACKED_STEPS:]] or [
        step["step_seconds"] for step in steps[-1:]
    ]
    return statistics.median(timed) if timed else None
