"""Show the progress of a run: a step as a line of text, and a progress bar on a terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from bigtrain.engine.engine import StepResult
from bigtrain.units import format_bytes, format_duration, format_share

_WINDOW = 100
"""The number of last steps from whose duration the remaining time is estimated."""


class StepLine:
    """Makes the text for each step.

    Args:
        total_steps: the number of steps of the run.
        limit_bytes: the memory of which a rank's peak is a share; None if it is unknown.
    """

    def __init__(self, total_steps: int, limit_bytes: int | None) -> None:
        self._total, self._limit = total_steps, limit_bytes
        self._ends: deque[float] = deque(maxlen=_WINDOW)

    def text(
        self, result: StepResult, peak_bytes: int | None, peak_rank: int | None
    ) -> tuple[str, str]:
        """Return the text of a step, and the remaining time.

        Call it once for each step, because it also notes the time at which the step ends.

        Args:
            result: the result of the step.
            peak_bytes: the highest peak of all ranks so far, in bytes; None if unknown.
            peak_rank: the rank with this peak; None in a run of one rank, or if all peaks are
                equal.

        Returns:
            Loss, learning rate, norm of the gradients, speed and peak in one text; and the
            remaining time, empty after the first and the last step.
        """
        self._ends.append(time.monotonic())
        speed = f"{result.samples_per_second:.1f} samples/s"
        if result.tokens_per_second is not None:
            speed = f"{result.tokens_per_second:,.0f} tokens/s"
        words = [
            f"loss {result.loss:.4f}",
            *([] if result.top1 is None else [f"top1 {result.top1:.4f}"]),
            f"lr {result.lr:.3g}",
            f"norm {result.grad_norm:.3g}",
            speed,
        ]
        if peak_bytes is not None:
            where = "" if peak_rank is None else f" on rank {peak_rank}"
            share = f" ({format_share(peak_bytes, self._limit)})" if self._limit else ""
            words.append(f"peak {format_bytes(peak_bytes)}{where}{share}")
        left = self._left_seconds(result.step)
        return "  ".join(words), "" if left is None else f"left {format_duration(left)}"

    def _left_seconds(self, step: int) -> float | None:
        """Return the remaining seconds at the speed of the last steps; None if unknown or over."""
        if len(self._ends) < 2 or step >= self._total:
            return None
        each = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return each * (self._total - step)


class StepBar(Progress):
    """A bar for the finished steps, with the text of `StepLine` for the last step below it.

    Args:
        console: the terminal.
        total_steps: the number of steps of the run.
        first_step: the number of steps before the resume; 0 for a new run.
    """

    def __init__(self, console: Console, total_steps: int, first_step: int) -> None:
        self._text = ""
        left = TextColumn("{task.description}", markup=False)
        columns = (BarColumn(bar_width=40), TextColumn("step"), MofNCompleteColumn(), left)
        super().__init__(*columns, console=console)
        self._steps = self.add_task("", total=total_steps, completed=first_step)

    def show(self, step: int, text: str, left: str) -> None:
        """Show a finished step.

        Args:
            step: the number of the step, from 1.
            text: the step's text from `StepLine`.
            left: the remaining time as text.
        """
        self._text = text
        self.update(self._steps, completed=step, description=left)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the bar and the text below it; rich calls this."""
        yield self.make_tasks_table(self.tasks)
        if getattr(self, "_text", ""):
            yield Text(self._text)
